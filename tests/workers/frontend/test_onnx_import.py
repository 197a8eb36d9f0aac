"""From ONNX to Relax: the rewrites, and what the importer must get right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tvm import relax

from tests.workers.frontend.test_onnx_model import celu, folded_determinant, scaled
from tests.workers.models import conv_bn_relu, make_model, matmuls, normal, port, save
from tuning_db.errors import ImportFailed, TuneryError, UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend.inlining import inline_functions
from workers.frontend.onnx_import import import_onnx, sum_to_add
from workers.frontend.onnx_model import check_operators


def operators(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_sum_becomes_add() -> None:
    """`Sum` of n tensors becomes n - 1 additions with the same result name; of one it is left alone."""
    terms = [f"t{i}" for i in range(3)]
    model = make_model(
        [helper.make_node("Sum", terms, ["s"], name="all"), helper.make_node("Sum", ["s"], ["y"])],
        [port(name, 2, 3) for name in terms],
        [port("y", 2, 3)],
    )
    rewritten = sum_to_add(model)
    assert operators(rewritten) == ["Add", "Add", "Sum"]
    first, second, _ = rewritten.graph.node
    assert [*first.input, *second.input] == ["t0", "t1", first.output[0], "t2"]
    assert list(second.output) == ["s"]


def test_functions_are_inlined() -> None:
    """A model's own functions and the standard's are replaced by their bodies; what TVM converts itself is not."""
    assert operators(inline_functions(scaled())) == ["Constant", "Mul", "Identity"]
    assert "Celu" not in operators(inline_functions(celu()))
    assert operators(inline_functions(matmuls())) == operators(matmuls())


def test_import(tmp_path: Path) -> None:
    """The module takes the inputs in order; batch normalisation is folded into the convolution before it."""
    specs = (TensorSpec("x", "float32", (2, 8, 14, 14)),)
    imported = import_onnx(save(conv_bn_relu(), tmp_path), specs, tmp_path)
    assert isinstance(imported.module["main"], relax.Function)
    assert [list(p.ty.shape.values) for p in imported.module["main"].params] == [[2, 8, 14, 14]]
    assert imported.outputs == (TensorSpec("y", "float32", (2, 16, 14, 14)),)
    assert (imported.nodes_before, imported.nodes_after) == (3, 2)
    assert operators(onnx.load(imported.bound)) == ["Conv", "BatchNormalization", "Relu"]


def test_outputs_that_no_node_makes(tmp_path: Path) -> None:
    """An output that is an input has the bound shape, and one that is a weight its own."""
    model = make_model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [port("x", "N", 4)],
        [port("x", "N", 4), port("y", "N", 4), port("c", 2)],
        {"c": normal(2)},
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    imported = import_onnx(path, [TensorSpec("x", "float32", (3, 4))], tmp_path)
    assert [(spec.name, spec.shape) for spec in imported.outputs] == [("x", (3, 4)), ("y", (3, 4)), ("c", (2,))]


def test_constants_are_folded(tmp_path: Path) -> None:
    """An operator that TVM lacks is computed before import where it depends on constants alone."""
    imported = import_onnx(save(folded_determinant(), tmp_path), (TensorSpec("x", "float32", (2, 3)),), tmp_path)
    assert imported.nodes_after == 1


@pytest.mark.parametrize(
    ("operator", "given", "outputs", "attributes"),
    [
        ("Reshape", ["x", "n"], 1, {}),  # tvm#20174
        ("Split", ["x", "n"], 2, {"axis": 1}),  # tvm#17866
        ("Expand", ["x", "n"], 1, {}),
        ("Tile", ["x", "n"], 1, {}),
        ("ReduceSum", ["x", "n"], 1, {}),
        ("ConstantOfShape", ["n"], 1, {}),
        ("Resize", ["x", "", "", "n"], 1, {}),
    ],
)
def test_shapes_that_are_fed(
    operator: str, given: list[str], outputs: int, attributes: dict[str, int], tmp_path: Path
) -> None:
    """A node whose result has a shape that depends on the numbers fed is refused by its name, before any other node is
    looked at, however far the numbers come; not so where only shapes decide, or a weight that is listed as an input."""
    names = [f"y{index}" for index in range(outputs)]
    model = make_model(
        [
            helper.make_node("Add", ["s", "s"], ["n"]),
            helper.make_node(operator, given, names, name="the node", **attributes),
            helper.make_node("Reshape", [names[0], "flat"], ["y"]),
        ],
        [port("x", 2, 3), port("s", 2, dtype=TensorProto.INT64)],
        [port("y", 6)],
        {"flat": np.array([6])},
    )
    with pytest.raises(
        UnsupportedOperator, match=f"{operator} .node 'the node'.*numbers in input 's'; make 'n' a constant"
    ):
        check_operators(model)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2]), "s"))
    check_operators(model)
    model.graph.initializer.pop()
    model.graph.node[0].CopyFrom(helper.make_node("Shape", ["s"], ["n"]))
    check_operators(model)


@pytest.mark.parametrize("operator", ["NonZero", "Unique", "Compress"])
def test_lengths_that_depend_on_data(operator: str, tmp_path: Path) -> None:
    """A node whose result is as long as the numbers fed make it is refused by its name, with what to do instead; one of
    constants is folded."""
    given, kinds = ["y"], [port("x", 2, 3)]
    if operator == "Compress":
        given, kinds = ["y", "kept"], [*kinds, port("kept", 2, dtype=TensorProto.BOOL)]
    node = helper.make_node(operator, given, ["z"], name="the node", **({"axis": 0} if operator == "Compress" else {}))
    model = make_model([helper.make_node("Relu", ["x"], ["y"]), node], kinds, [port("z")])
    with pytest.raises(
        UnsupportedOperator, match=f"{operator} .node 'the node'.* how long its result is .*; end the model"
    ):
        check_operators(model)
    for port_ in kinds:
        shape = [dim.dim_value for dim in port_.type.tensor_type.shape.dim]
        array = np.ones(shape, bool if port_.name == "kept" else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, port_.name))
    check_operators(model)


def test_shapes_that_depend_on_data(tmp_path: Path) -> None:
    """Where nobody has looked, in a function, a shape that is known when the model has run, and not before, fails the
    import, and is said."""
    model = make_model(
        [helper.make_node("places", ["x"], ["y"], domain="mine")],
        [port("x", 2, 3)],
        [port("y", 2, "n", dtype=TensorProto.INT64)],
        functions=[
            helper.make_function(
                "mine", "places", ["a"], ["b"], [helper.make_node("NonZero", ["a"], ["b"])],
                [helper.make_opsetid("", 17)],
            )
        ],
    )  # fmt: skip
    with pytest.raises(ImportFailed, match=r"output 'y' has the shape .* which depends on the data"):
        import_onnx(save(model, tmp_path), (TensorSpec("x", "float32", (2, 3)),), tmp_path)


def test_outputs_beyond_every_size(tmp_path: Path) -> None:
    """An output of more elements than a size can count is refused as one, not as an input."""
    node = helper.make_node("Expand", ["x", "sizes"], ["y"])
    model = make_model([node], [port("x", 1)], [port("y", "N")], {"sizes": np.array([1 << 40])})
    with pytest.raises(ImportFailed, match=r"output 'y' .*1099511627776"):
        import_onnx(save(model, tmp_path), [TensorSpec("x", "float32", (1,))], tmp_path)


def test_body_with_an_unsupported_operator(tmp_path: Path) -> None:
    """An operator that TVM lacks is refused by name also where it only appears when functions are inlined."""
    function = helper.make_function(
        "custom", "Hidden", ["v"], ["o"], [helper.make_node("Det", ["v"], ["o"])], [helper.make_opsetid("", 17)]
    )
    model = make_model(
        [helper.make_node("Hidden", ["x"], ["y"], domain="custom")],
        [port("x", 3, 3)],
        [port("y")],
        ir_version=10,
        functions=[function],
    )
    with pytest.raises(UnsupportedOperator, match="Det"):
        import_onnx(save(model, tmp_path), (TensorSpec("x", "float32", (3, 3)),), tmp_path)


def test_contradiction_that_only_the_runtime_sees(tmp_path: Path) -> None:
    """Channels that do not fit a convolution's weights end the import with an error of ours."""
    model = conv_bn_relu()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "C"
    with pytest.raises(TuneryError):
        import_onnx(save(model, tmp_path), (TensorSpec("x", "float32", (1, 9, 14, 14)),), tmp_path)
