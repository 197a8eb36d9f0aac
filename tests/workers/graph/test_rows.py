"""The proof that a model computes each item of a batch from that item alone: what it accepts, and what it must not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from tuning_db.keys import TensorSpec
from tuning_db.pieces import Slab
from workers.frontend.onnx_import import import_onnx
from workers.graph import pipeline
from workers.graph.rows import RowsMixed, prove

ITEMS = 4
TARGET = {"kind": "llvm", "num-cores": 1}


def lowered(
    folder: Path,
    nodes: Sequence[Any],
    inputs: dict[str, Sequence[int]],
    ranks: dict[str, int],
    constants: dict[str, Any] | None = None,
    dtypes: dict[str, str] | None = None,
) -> tvm.ir.IRModule:
    """A model as the tuning process lowers it, with outputs of these ranks."""
    specs = [TensorSpec(name, (dtypes or {}).get(name, "float32"), tuple(shape)) for name, shape in inputs.items()]
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [
            helper.make_tensor_value_info(s.name, helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype)), list(s.shape))
            for s in specs
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in ranks.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    path = folder / "rows.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    imported = import_onnx(path, tuple(specs), folder)
    with tvm.target.Target(TARGET), pipeline.pass_context():
        return pipeline.lower_operators()(pipeline.simplify()(imported.module))


def numbers(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def node(operator: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def test_an_image_classifier(folder: Path) -> None:
    """Padding, sums over channels and windows, a flattening and a softmax keep items apart."""
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("MaxPool", "r", "m", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", "m", "f"),
        node("Gemm", "f v b", "g"),
        node("Softmax", "g"),
    ]
    constants = {"w": numbers(4, 3, 3, 3), "v": numbers(64, 5), "b": numbers(5)}
    assert prove(lowered(folder, nodes, {"x": [ITEMS, 3, 8, 8]}, {"y": 2}, constants), [0], ITEMS) == (Slab(0, 1),)


def test_batches_in_other_places(folder: Path) -> None:
    """Items may lie behind another axis, and be merged with the axis that follows them; an input may be the same for
    all of them, and so may an output. Two axes are of as many entries as there are items."""
    nodes = [
        node("Reshape", "x merged", "flat"),
        node("MatMul", "flat w", "product"),
        node("Reshape", "product apart", "z"),
        node("Add", "z s"),
        node("Transpose", "y", "t", perm=[1, 0, 2]),
        node("ReduceMean", "s", "u", axes=[-1], keepdims=0),
    ]
    constants = {
        "merged": np.array([ITEMS * 3, ITEMS]), "apart": np.array([ITEMS, 3, ITEMS]), "w": numbers(ITEMS, ITEMS)
    }  # fmt: skip
    inputs = {"x": [ITEMS, 3, ITEMS], "s": [3, ITEMS]}
    found = prove(lowered(folder, nodes, inputs, {"y": 3, "t": 3, "u": 1, "product": 2}, constants), [0, None], ITEMS)
    assert found == (Slab(0, 1), Slab(1, 1), None, Slab(0, 3))


def test_attention_and_a_table(folder: Path) -> None:
    """Rows of a table taken by number, layer normalisation by hand, and attention within an item."""
    nodes = [
        node("Gather", "table ids", "e"),
        node("ReduceMean", "e", "mean", axes=[-1]),
        node("Sub", "e mean", "d"),
        node("Mul", "d d", "dd"),
        node("ReduceMean", "dd", "variance", axes=[-1]),
        node("Sqrt", "variance", "deviation"),
        node("Div", "d deviation", "n"),
        node("Transpose", "n", "k", perm=[0, 2, 1]),
        node("MatMul", "n k", "scores"),
        node("Softmax", "scores", "p"),
        node("MatMul", "p n"),
    ]
    module = lowered(folder, nodes, {"ids": [ITEMS, 6]}, {"y": 3}, {"table": numbers(10, 8)}, dtypes={"ids": "int64"})
    assert prove(module, [0], ITEMS) == (Slab(0, 1),)


@pytest.mark.parametrize(
    ("nodes", "constants", "operator"),
    [
        ([node("ReduceMean", "x", "m", axes=[0]), node("Sub", "x m")], {}, "mean"),
        ([node("Softmax", "x", axis=0)], {}, "softmax"),
        ([node("CumSum", "x zero")], {"zero": np.array(0)}, "cumsum"),
        ([node("Add", "x c")], {"c": numbers(ITEMS, 6)}, "add"),
        ([node("Gather", "x back")], {"back": np.arange(ITEMS)[::-1].copy()}, "take"),
        ([node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "x t")], {}, "matmul"),
        ([node("Reshape", "x other", "r"), node("Softmax", "r")], {"other": np.array([6, ITEMS])}, "reshape"),
        ([node("Concat", "x x", axis=0)], {}, "concat"),
        ([node("Slice", "x from to")], {"from": np.array([1]), "to": np.array([3])}, "slice"),
        ([node("TopK", "x two", "v", axis=0)], {"two": np.array([2])}, "topk"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_mixes_items(folder: Path, nodes: Sequence[Any], constants: dict[str, Any], operator: str) -> None:
    """Sums, orders and constants along the batch, and whatever moves or drops items, end the proof by name."""
    if nodes[0].op_type == "TopK":
        nodes = [helper.make_node("TopK", ["x", "two"], ["y", "order"], axis=0)]
    module = lowered(folder, nodes, {"x": [ITEMS, 6]}, {"y": 2}, constants)
    with pytest.raises(RowsMixed) as error:
        prove(module, [0], ITEMS)
    assert operator in error.value.operator


def test_a_constant_that_is_equal_for_all_items(folder: Path) -> None:
    """What an exporter wrote out for each item is no difference between them."""
    constants = {"c": np.repeat(numbers(1, 6), ITEMS, axis=0)}
    module = lowered(folder, [node("Add", "x c")], {"x": [ITEMS, 6]}, {"y": 2}, constants)
    assert prove(module, [0], ITEMS) == (Slab(0, 1),)


def test_an_output_that_may_or_may_not_have_items(folder: Path) -> None:
    """An output that depends on no item but has as many entries is refused: for more items it may have more."""
    module = lowered(folder, [node("Abs", "s")], {"x": [ITEMS, 6], "s": [ITEMS]}, {"y": 1})
    with pytest.raises(RowsMixed, match="the same for all items"):
        prove(module, [0, None], ITEMS)


def test_one_item_proves_nothing(folder: Path) -> None:
    """With one item everything depends on it alone."""
    module = lowered(folder, [node("Relu", "x")], {"x": [1, 6]}, {"y": 2})
    with pytest.raises(ValueError, match="two or more"):
        prove(module, [0], 1)


@pytest.mark.parametrize("seed", range(10))
def test_chains_of_operators(folder: Path, seed: int) -> None:
    """Of a random chain on a cube, in which no axis can be told by its size, it is shown exactly if no operator works
    along the batch, wherever transpositions have put that; and then permuted items give permuted results."""
    generator = np.random.default_rng(seed)
    nodes, axis, mixed, value = [], 0, False, "x"
    for step in range(6):
        kind, along, result = generator.choice(["t", "s", "m", "p", "a"]), int(generator.integers(3)), f"v{step}"
        if kind == "t":
            order = [int(each) for each in generator.permutation(3)]
            nodes.append(node("Transpose", value, result, perm=order))
            axis = order.index(axis)
        elif kind == "s" and (along != axis or step == 5):
            nodes.append(node("Softmax", value, result, axis=along))
            mixed |= along == axis
        elif kind == "m" and (along != axis or step == 5):
            nodes.append(node("ReduceMean", value, f"{result}/mean", axes=[along]))
            nodes.append(node("Sub", f"{value} {result}/mean", result))
            mixed |= along == axis
        elif kind == "p" and (axis != 2 or step == 5):
            nodes.append(node("MatMul", f"{value} w", result))
            mixed |= axis == 2
        else:
            nodes.append(node("Tanh", value, result))
        value = result
    nodes.append(node("Identity", value))
    module = lowered(folder, nodes, {"x": [ITEMS] * 3}, {"y": 3}, {"w": numbers(ITEMS, ITEMS)})
    if mixed:
        with pytest.raises(RowsMixed):
            prove(module, [0], ITEMS)
        return
    assert prove(module, [0], ITEMS) == (Slab(axis, 1),)
    session = onnxruntime.InferenceSession(folder / "rows.onnx", providers=["CPUExecutionProvider"])
    items, order = numbers(ITEMS, ITEMS, ITEMS), generator.permutation(ITEMS)
    (plain,), (permuted,) = session.run(None, {"x": items}), session.run(None, {"x": items[order]})
    np.testing.assert_allclose(permuted, plain.take(order, axis), atol=1e-6)
