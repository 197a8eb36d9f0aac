"""What an ONNX file is called, what it declares, and which files are refused: in-process, without TVM."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.workers.models import conv_bn_relu, determinant, make_model, matmuls, normal, port, save
from tuning_db.catalog import ModelInfo
from tuning_db.errors import InvalidModel, InvalidRequest, ShapeMismatch, UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend import onnx_model
from workers.frontend.onnx_model import inputs_of, model_digest, outputs_of


def scaled(name: str = "scaled", inner: str = "t", factor: float = 2.0) -> ModelProto:
    """`y = Scale(x)` with a function of the model's own, which multiplies by `factor` and adds 1."""
    function = helper.make_function(
        "custom",
        "Scale",
        ["v"],
        ["o"],
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.float32(factor), "k")),
            helper.make_node("Mul", ["v", "k"], [inner], name=name),
            helper.make_node("Identity", [inner], ["o"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    return make_model(
        [helper.make_node("Scale", ["x"], ["y"], domain="custom")],
        [port("x", 2, 3)],
        [port("y", 2, 3)],
        ir_version=10,
        functions=[function],
    )


def branching(condition: bool | None = True) -> ModelProto:
    """`y = if p then x + w else -x`, with `p` a weight, or an input where `condition` is None."""
    then = helper.make_graph([helper.make_node("Add", ["x", "w"], ["t"])], "then", [], [port("t", 2, 3)])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], [port("e", 2, 3)])
    weights: dict[str, Any] = {"w": normal(2, 3)}
    inputs = [port("x", 2, 3)]
    if condition is None:
        inputs.append(helper.make_tensor_value_info("p", TensorProto.BOOL, []))
    else:
        weights["p"] = np.array(condition)
    node = helper.make_node("If", ["p"], ["y"], name="choice", then_branch=then, else_branch=other)
    return make_model([node], inputs, [port("y", 2, 3)], weights)


def branch(model: ModelProto, name: str) -> GraphProto:
    return next(a.g for a in model.graph.node[0].attribute if a.name == name)


def rename_tensor(model: ModelProto, old: str, new: str) -> None:
    for tensor in model.graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


def spell_out_weights(model: ModelProto) -> None:
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        typed = helper.make_tensor(tensor.name, tensor.data_type, list(tensor.dims), array.ravel().tolist())
        assert not typed.HasField("raw_data")
        assert tensor.HasField("raw_data")
        tensor.CopyFrom(typed)


def add_dead_node(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(normal(4), "unused"))
    model.graph.node.append(helper.make_node("Add", ["c", "unused"], ["nobody"]))


def document(model: ModelProto) -> None:
    model.doc_string = model.graph.doc_string = "a better explanation"
    for node in model.graph.node:
        node.doc_string = "what this does"
        for attribute in node.attribute:
            attribute.doc_string = "what this means"
    for tensor in model.graph.initializer:
        tensor.doc_string = "where this is from"


def swap_independent_nodes(model: ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[1], nodes[0], *nodes[2:]])


def rename_nodes(model: ModelProto) -> None:
    for index, node in enumerate(model.graph.node):
        node.name = f"node_{index}"


def set_producer(model: ModelProto) -> None:
    model.producer_name, model.producer_version, model.model_version = "exporter", "9.9", 7
    model.metadata_props.add(key="trained", value="yesterday")


SAME: dict[str, Callable[[ModelProto], None]] = {
    "producer": set_producer,
    "doc strings": document,
    "node names": rename_nodes,
    "inner tensor": lambda model: rename_tensor(model, "a", "renamed"),
    "weight name": lambda model: rename_tensor(model, "left", "renamed"),
    "order of independent nodes": swap_independent_nodes,
    "typed instead of raw data": spell_out_weights,
    "dead node and weight": add_dead_node,
    "default domain spelled out": lambda model: setattr(model.graph.node[0], "domain", "ai.onnx"),
    "graph name": lambda model: setattr(model.graph, "name", "other"),
    "known inner shapes": lambda model: model.graph.value_info.append(port("a", "N", 4)),
}


@pytest.mark.parametrize("change", SAME)
def test_digest_ignores(change: str) -> None:
    """What does not change the computation does not change the digest."""
    model = matmuls()
    SAME[change](model)
    assert model != matmuls()
    assert model_digest(model) == model_digest(matmuls())


def flip_weight_byte(model: ModelProto) -> None:
    data = bytearray(model.graph.initializer[0].raw_data)
    data[5] ^= 1
    model.graph.initializer[0].raw_data = bytes(data)


def rename_input(model: ModelProto) -> None:
    rename_tensor(model, "x", "image")
    model.graph.input[0].name = "image"


def rename_output(model: ModelProto) -> None:
    rename_tensor(model, "y", "scores")
    model.graph.output[0].name = "scores"


def reshape_weight(model: ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [4, 8]


def swap_operands(model: ModelProto) -> None:
    model.graph.node[0].input[:] = ["left", "x"]


DIFFERENT: dict[str, Callable[[ModelProto], None]] = {
    "one bit of a weight": flip_weight_byte,
    "shape of a weight": reshape_weight,
    "attribute": lambda model: setattr(model.graph.node[3].attribute[0], "i", 0),
    "attribute left out": lambda model: model.graph.node[3].ClearField("attribute"),
    "operator": lambda model: setattr(model.graph.node[2], "op_type", "Sub"),
    "operands swapped": swap_operands,
    "domain": lambda model: setattr(model.graph.node[2], "domain", "com.example"),
    "input name": rename_input,
    "output name": rename_output,
    "operator set": lambda model: setattr(model.opset_import[0], "version", 18),
    "symbol": lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "M"),
    "input dtype": lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", TensorProto.DOUBLE),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_digest_changes(change: str) -> None:
    """What may change the computation, or how it is fed, changes the digest."""
    model = matmuls()
    DIFFERENT[change](model)
    assert model_digest(model) != model_digest(matmuls())


def test_digest_of_functions() -> None:
    """A function of the model's own counts by what it computes, not by the names inside it."""
    assert model_digest(scaled(name="other", inner="other")) == model_digest(scaled())
    assert model_digest(scaled(factor=3.0)) != model_digest(scaled())


def test_digest_of_subgraphs() -> None:
    """A branch counts by what it computes, captured tensors included, and not by the names inside it."""
    renamed = branching()
    inner = branch(renamed, "then_branch")
    inner.node[0].output[0] = inner.output[0].name = "other"
    assert model_digest(renamed) == model_digest(branching())
    changed = branching()
    branch(changed, "then_branch").node[0].input[1] = "x"
    assert model_digest(changed) != model_digest(branching())


def overloaded(which: str) -> ModelProto:
    """A call of one of two functions that differ by their overloads alone."""
    functions = [
        helper.make_function(
            "custom", "F", ["v"], ["o"], [helper.make_node(kind, ["v"], ["o"])], [helper.make_opsetid("", 17)],
            overload=kind,
        )
        for kind in ("Relu", "Neg")
    ]  # fmt: skip
    call = helper.make_node("F", ["x"], ["y"], domain="custom", overload=which)
    return make_model([call], [port("x", 3)], [port("y", 3)], ir_version=10, functions=functions)


def referring(which: str) -> ModelProto:
    """A function that multiplies by one of two tensors that are its attributes."""
    constant = helper.make_node("Constant", [], ["k"])
    constant.attribute.add(name="value", ref_attr_name=which, type=AttributeProto.TENSOR)
    function = helper.make_function(
        "custom", "F", ["v"], ["o"], [constant, helper.make_node("Mul", ["v", "k"], ["o"])],
        [helper.make_opsetid("", 17)], attributes=["a", "b"],
    )  # fmt: skip
    a, b = (numpy_helper.from_array(np.float32(number)) for number in (2, 5))
    call = helper.make_node("F", ["x"], ["y"], domain="custom", a=a, b=b)
    return make_model([call], [port("x", 3)], [port("y", 3)], ir_version=10, functions=[function])


def nested(which: str) -> ModelProto:
    """A loop in a loop, whose body reads what the one or the other hands on."""

    def body(name: str, *nodes: NodeProto) -> GraphProto:
        ports = [port(f"step of {name}", dtype=TensorProto.INT64), port(f"on of {name}", dtype=TensorProto.BOOL)]
        going = helper.make_node("Identity", [f"on of {name}"], [f"goes on of {name}"])
        results = [port(f"goes on of {name}", dtype=TensorProto.BOOL), port(f"result of {name}", 3)]
        return helper.make_graph([going, *nodes], name, [*ports, port(name, 3)], results)

    inner = body("inner", helper.make_node("Add", [which, which], ["result of inner"]))
    outer = body("outer", helper.make_node("Loop", ["n", "p", "outer"], ["result of outer"], body=inner))
    loop = helper.make_node("Loop", ["n", "p", "x"], ["y"], body=outer)
    return make_model([loop], [port("x", 3)], [port("y", 3)], {"n": np.array(2), "p": np.array(True)})


def left_out(which: str) -> ModelProto:
    """An output that a node leaves out, and an input that another leaves out, or that output."""
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["", which, "c"], hidden_size=1)
    nodes = [lstm, helper.make_node("Clip", ["c", which, "most"], ["y"])]
    weights = {"w": normal(1, 4, 1), "r": normal(1, 4, 1), "most": np.float32(1)}
    return make_model(nodes, [port("x", 1, 1, 1)], [port("y", 1, 1, 1)], {k: np.asarray(v) for k, v in weights.items()})


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (overloaded, "Relu", "Neg"),
        (referring, "a", "b"),
        (nested, "inner", "outer"),
        (left_out, "", "h"),
    ],
)
def test_digest_of_what_is_meant(make: Callable[[str], ModelProto], one: str, other: str) -> None:
    """Models that differ only in which function, attribute, body or absent tensor is meant are different models."""
    assert model_digest(make(one)) != model_digest(make(other))
    assert model_digest(make(one)) == model_digest(make(one))


def test_digest_is_pinned() -> None:
    """The digest of a model is the same in every version, or stored keys would all be misses."""
    model = make_model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [port("x", "N", 2)],
        [port("y", "N", 2)],
        {"w": np.array([1, 2], dtype=np.float32)},
    )
    assert model_digest(model) == "cb9c30305076a77c2d0f1c1725997556ec9dc8276e38e2bcd11a21670554e8ab"


def test_weights_listed_as_inputs(tmp_path: Path) -> None:
    """A weight that is listed among the inputs, as IR version 3 wants it, is not an input (tvm#7055)."""
    model = matmuls()
    model.ir_version = 3
    model.graph.input.insert(0, port("left", 8, 4))
    model.graph.input.append(port("right", 8, 4))
    model = onnx_model.load(save(model, tmp_path))
    assert [port.name for port in inputs_of(model)] == ["x"]
    assert model_digest(model) == model_digest(matmuls())
    onnx_model.bind(model, [TensorSpec("x", "float32", (3, 8))])
    assert [value.name for value in model.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("written", "read"), [("N", "N"), ("batch_size", "batch_size"), ("?", None), ("-1", None), ("", None)]
)
def test_symbols(written: str, read: str | None) -> None:
    """A name is a symbol; what exporters write for an unknown size is not."""
    model = make_model(
        [helper.make_node("Concat", ["x", "z"], ["y"], axis=0)],
        [port("x", written, 2), port("z", written, 2)],
        [port("y", "M", 2)],
    )
    inputs = inputs_of(model)
    assert [port.shape for port in inputs] == [(read, 2), (read, 2)]
    info = ModelInfo("", "", "onnx", 0, inputs, outputs_of(model))
    shapes = {"x": {"shape": [3, 2]}, "z": {"shape": [4, 2]}}
    if read is None:
        assert [spec.shape for spec in info.bind(shapes)] == [(3, 2), (4, 2)]
    else:
        with pytest.raises(ShapeMismatch, match=f"symbol '{read}'"):
            info.bind(shapes)


def test_bind() -> None:
    """Bound shapes reach every inner tensor and output; what the exporter wrote about other sizes is forgotten."""
    model = conv_bn_relu()
    model.graph.value_info.append(port("c", 7, 7, 7, 7))
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 7
    onnx_model.bind(model, [TensorSpec("x", "float32", (2, 8, 14, 14))])
    assert outputs_of(model)[0].shape == (2, 16, 14, 14)
    inferred = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.value_info}
    assert inferred == {"c": [2, 16, 14, 14], "n": [2, 16, 14, 14]}


@pytest.mark.parametrize("shape", [(2, 9), (2,)])
def test_bind_contradiction(shape: tuple[int, ...]) -> None:
    """A shape that the model cannot work on is refused with the input's name."""
    with pytest.raises(ShapeMismatch, match="x:float32") as caught:
        onnx_model.bind(matmuls(), [TensorSpec("x", "float32", shape)])
    assert caught.value.field == "inputs.x.shape"


def test_unsupported_operator(tmp_path: Path) -> None:
    """An operator that cannot be compiled is named with its node and operator set."""
    model = onnx_model.load(save(determinant(), tmp_path))
    with pytest.raises(UnsupportedOperator, match=r"Det \(node 'volume', opset 17\)") as caught:
        onnx_model.check_operators(model)
    assert (caught.value.operator, caught.value.node, caught.value.opset) == ("Det", "volume", 17)
    model.graph.node[0].name = ""
    with pytest.raises(UnsupportedOperator, match="node 'y'"):
        onnx_model.check_operators(model)


def test_unknown_domain() -> None:
    """An operator of another vendor is refused by its full name, even where a standard one has the same."""
    model = matmuls()
    model.graph.node[0].domain = "com.microsoft"
    with pytest.raises(UnsupportedOperator, match=r"com\.microsoft\.MatMul"):
        onnx_model.check_operators(model)


def folded_determinant() -> ModelProto:
    return make_model(
        [
            helper.make_node("Det", ["w"], ["d"]),
            helper.make_node("Mul", ["x", "d"], ["y"]),
        ],
        [port("x", 2, 3)],
        [port("y", 2, 3)],
        {"w": normal(3, 3)},
    )


def celu() -> ModelProto:
    return make_model([helper.make_node("Celu", ["x"], ["y"])], [port("x", 2, 3)], [port("y", 2, 3)])


@pytest.mark.parametrize("model", [folded_determinant(), celu(), scaled(), branching(True), branching(False)])
def test_operators_that_vanish(model: ModelProto) -> None:
    """What is computed from constants, defined by a function or decided beforehand needs no support by the importer."""
    onnx_model.check_operators(model)
    with pytest.raises(UnsupportedOperator):
        onnx_model.check_operators(model, folded=True)


def test_operators_that_stay() -> None:
    """A branch, a number of steps that depend on the data, and random numbers are not constants."""
    with pytest.raises(UnsupportedOperator, match="operator If"):
        onnx_model.check_operators(branching(None))
    noise = make_model(
        [helper.make_node("RandomNormal", [], ["r"], shape=[2, 3]), helper.make_node("Add", ["x", "r"], ["y"])],
        [port("x", 2, 3)],
        [port("y", 2, 3)],
    )
    with pytest.raises(UnsupportedOperator, match="operator RandomNormal"):
        onnx_model.check_operators(noise)
    loop = helper.make_graph(
        [helper.make_node("Add", ["sum", "x"], ["next"]), helper.make_node("Identity", ["c"], ["more"])],
        "body",
        [port("i", dtype=TensorProto.INT64), port("c", dtype=TensorProto.BOOL), port("sum", 2, 3)],
        [port("more", dtype=TensorProto.BOOL), port("next", 2, 3)],
    )
    model = make_model(
        [helper.make_node("Loop", ["times", "", "zero"], ["y"], body=loop)],
        [port("x", 2, 3), port("times", dtype=TensorProto.INT64)],
        [port("y", 2, 3)],
        {"zero": np.zeros((2, 3), dtype=np.float32)},
    )
    with pytest.raises(UnsupportedOperator, match="operator Loop"):
        onnx_model.check_operators(model)


@pytest.mark.parametrize("opset", [6, 99])
def test_operator_set_outside(opset: int) -> None:
    """A model of an operator set outside the accepted range is refused with how to convert it."""
    model = matmuls()
    model.opset_import[0].version = opset
    with pytest.raises(InvalidModel, match="convert_version"):
        onnx_model.check_operators(model)


def external(tensor: TensorProto, location: str) -> TensorProto:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def external_weight(location: str) -> ModelProto:
    model = matmuls()
    external(model.graph.initializer[0], location)
    return model


def external_constant(location: str) -> ModelProto:
    model = matmuls()
    tensor = external(numpy_helper.from_array(normal(4), "k"), location)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["k"], value=tensor))
    return model


def external_in_function(location: str) -> ModelProto:
    model = scaled()
    external(model.functions[0].node[0].attribute[0].t, location)
    return model


def external_in_branch(location: str) -> ModelProto:
    model = branching()
    inner = branch(model, "then_branch")
    inner.initializer.append(external(numpy_helper.from_array(normal(2, 3), "inner"), location))
    inner.node[0].input[1] = "inner"
    return model


EXTERNAL = [external_weight, external_constant, external_in_function, external_in_branch]


@pytest.mark.parametrize("location", ["weights.bin", "../../etc/passwd", "/etc/passwd"])
@pytest.mark.parametrize("make", EXTERNAL)
def test_external_data(make: Callable[[str], ModelProto], location: str, tmp_path: Path) -> None:
    """Tensors that are kept in another file are refused, wherever they are in the model (onnx#3991)."""
    path = tmp_path / "model.onnx"
    path.write_bytes(make(location).SerializeToString())
    with pytest.raises(InvalidModel, match="keeps its data in another file") as caught:
        onnx_model.load(path)
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"%PDF-1.7 not a model at all", "does not parse"),
        (b"PK\x03\x04 not a model at all", "zip is damaged"),
        (b"\x08\x08", "no graph"),
        (matmuls().SerializeToString()[:-40], "does not parse"),
    ],
)
def test_not_a_model(data: bytes, message: str, tmp_path: Path) -> None:
    """A file that is no model says what it is instead."""
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(InvalidModel, match=message):
        onnx_model.load(path)


def sequence_input() -> ModelProto:
    model = matmuls()
    model.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2]))
    return model


def typed_input(elem_type: int) -> ModelProto:
    model = matmuls()
    model.graph.input[0].type.tensor_type.elem_type = elem_type
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (sequence_input(), "'s' is not a tensor"),
        (typed_input(TensorProto.STRING), "element type string"),
        (typed_input(TensorProto.BFLOAT16), "element type bfloat16"),
        (typed_input(88), "element type number 88"),
    ],
)
def test_ports_that_cannot_be_fed(model: ModelProto, message: str) -> None:
    """Inputs that are not tensors of plain numbers are refused by name."""
    with pytest.raises(InvalidModel, match=message):
        inputs_of(model)


def read_all(path: Path) -> None:
    """Everything that the inspector does with an upload."""
    model = onnx_model.load(path)
    inputs, outputs = inputs_of(model), outputs_of(model)
    digest = model_digest(model)
    onnx_model.check_operators(model)
    shapes = {p.name: {"shape": [s if isinstance(s, int) else 2 for s in p.shape]} for p in inputs}
    onnx_model.bind(model, ModelInfo(digest, "", "onnx", 0, inputs, outputs).bind(shapes))


_SEEDS = [model.SerializeToString() for model in (matmuls(), scaled(), branching())]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.sampled_from(_SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 10_000),
)
def test_damaged_models(seed: bytes, edits: list[tuple[int, int]], cut: int | None, tmp_path: Path) -> None:
    """Whatever is damaged in a model, it is read or refused as a request's fault; nothing else is raised."""
    data = bytearray(seed)
    for position, value in edits:
        data[position % len(data)] = value
    path = tmp_path / "damaged.onnx"
    path.write_bytes(data if cut is None else data[: cut % len(data)])
    with suppress(InvalidRequest):
        read_all(path)


def bad_text(model: ModelProto) -> bytes:
    return model.SerializeToString().replace(b"Softmax", b"Soft\xff\xfex")


def bad_symbol(model: ModelProto) -> bytes:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "symbol"
    return model.SerializeToString().replace(b"symbol", b"sym\xffol")


def bad_weight(model: ModelProto) -> bytes:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    return model.SerializeToString()


def bad_weight_type(model: ModelProto) -> bytes:
    model.graph.initializer[0].data_type = 105
    return model.SerializeToString()


@pytest.mark.parametrize("damage", [bad_text, bad_symbol, bad_weight, bad_weight_type])
def test_known_damage(damage: Callable[[ModelProto], bytes], tmp_path: Path) -> None:
    """Text that is not UTF-8, and weights whose bytes do not fit, are an invalid model and not a crash."""
    path = tmp_path / "damaged.onnx"
    path.write_bytes(damage(matmuls()))
    with pytest.raises(InvalidModel):
        read_all(path)


def test_output_of_function_that_nothing_produces(tmp_path: Path) -> None:
    """A function whose output nothing computes is refused by the tensor's name."""
    model = scaled()
    model.functions[0].output[0] = "nothing"
    with pytest.raises(InvalidModel, match="nothing"):
        read_all(save(model, tmp_path))


def test_operator_counts() -> None:
    """The operators of a graph are counted by their names."""
    assert onnx_model.operator_counts(matmuls().graph.node) == {"MatMul": 2, "Add": 1, "Softmax": 1}


@pytest.mark.parametrize(
    ("called", "depth", "complaint"),
    [(2, 40, "more than 50000 nodes"), (1, 102, "more than 100 deep"), (1, 0, "calls itself"), (2, 12, None)],
    ids=["doubling", "deep", "itself", "few"],
)
def test_functions_that_call_each_other(called: int, depth: int, complaint: str | None, tmp_path: Path) -> None:
    """Functions that come to more nodes than anybody's model, or call each other too deep or in a circle, are refused
    before anything is written out."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]

    def body(of: str, domain: str) -> list[NodeProto]:
        names = ["x", *(f"t{number}" for number in range(1, called)), "y"]
        return [helper.make_node(of, [a], [b], domain=domain) for a, b in itertools.pairwise(names)]

    functions = [
        helper.make_function("mine", f"f{level}", ["x"], ["y"], body(f"f{level + 1}", "mine"), opsets)
        for level in range(depth)
    ]
    last = body("Relu", "") if depth else body("f0", "mine")
    functions.append(helper.make_function("mine", f"f{depth}", ["x"], ["y"], last, opsets))
    node = helper.make_node("f0", ["x"], ["y"], domain="mine")
    path = save(make_model([node], [port("x", 2)], [port("y", 2)], functions=functions), tmp_path)
    if complaint is None:
        assert onnx_model.load(path).functions
        return
    with pytest.raises(InvalidModel, match=complaint):
        onnx_model.load(path)


def test_two_nodes_of_one_name(tmp_path: Path) -> None:
    """A model that ONNX Runtime refuses, for two of its nodes have one name, is refused at the upload, and says which;
    nodes may have none."""
    model = make_model(
        [helper.make_node("Relu", ["x"], ["a"], "twin"), helper.make_node("Abs", ["a"], ["y"], "twin")],
        [port("x", 2)],
        [port("y", 2)],
    )
    with pytest.raises(InvalidModel, match="two nodes are called 'twin'"):
        onnx_model.load(save(model, tmp_path))
    for node in model.graph.node:
        node.name = ""
    assert len(onnx_model.load(save(model, tmp_path)).graph.node) == 2
