"""Faults that people reported of ONNX importers: each tried on a small model, against ONNX Runtime on the same inputs.

Held elsewhere: Softmax of opset 11 (tvm#20183), Gather (tvm#20217), ReduceMean (tvm#18072), NaN (tvm#19572,
tvm#19540), integers (tvm#17835) and the gate before publication (tvm#17947) in `packaging/test_reference.py`; schedules
of integers that are spread (tvm#17947) in `graph/test_operators.py`; shapes from data (tvm#20174, tvm#17866) in
`test_onnx_import.py`; weights among the inputs (tvm#7055) in `test_onnx_model.py`; dimensions that are not fixed
(tvm#15336) in `service/test_jobs.py`; data files (tvm#6022, onnx#3559, onnx#3991) in `test_archives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.workers.conftest import Host, differences
from tests.workers.models import make_model, normal, port


def negative_indices() -> ModelProto:
    """tvm#19436, tvm#19531: indices from the end, known only when the model runs (the examples hold 1 and 2)."""
    nodes = [
        helper.make_node("Sub", ["i", "three"], ["n"]),
        helper.make_node("GatherElements", ["x", "n"], ["elements"], axis=1),
        helper.make_node("GatherND", ["x", "n"], ["nd"]),
    ]
    outputs = [port("elements", 3, 2), port("nd", 3)]
    inputs = [port("x", 3, 3), port("i", 3, 2, dtype=TensorProto.INT64)]
    return make_model(nodes, inputs, outputs, {"three": np.array(3)})


def scatter_from_the_end() -> ModelProto:
    """tvm#19531: ScatterND at index -1."""
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"])
    return make_model([node], [port("x", 3, 3), port("u", 1, 3)], [port("y", 3, 3)], {"i": np.array([[-1]])})


def shapes_from_initializers() -> ModelProto:
    """tvm#20001, tvm#20066: ConstantOfShape and Split whose sizes are initializers."""
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["c"]),
        helper.make_node("Add", ["x", "c"], ["z"]),
        helper.make_node("Split", ["z", "sizes"], ["a", "b"], axis=1),
    ]
    weights = {"s": np.array([2, 5]), "sizes": np.array([2, 3])}
    return make_model(nodes, [port("x", 2, 5)], [port("a", 2, 2), port("b", 2, 3)], weights)


def scalar_quantization() -> ModelProto:
    """tvm#20126: QuantizeLinear and DequantizeLinear of a tensor without dimensions."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("QuantizeLinear", ["m", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("Add", ["x", "d"], ["y"]),
    ]
    weights = {"scale": np.array(0.05, np.float32), "zero": np.array(3, np.int8)}
    return make_model(nodes, [port("x", 2, 3)], [port("y", 2, 3)], weights)


def quantization_by_channel() -> ModelProto:
    """tvm#15931: a matrix product with int8 weights that have a scale for each column."""
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scales", "zeros"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    weights = {
        "w": np.random.default_rng(0).integers(-127, 128, (8, 4)).astype(np.int8),
        "scales": np.array([0.01, 0.02, 0.03, 0.04], np.float32),
        "zeros": np.zeros(4, np.int8),
    }
    return make_model(nodes, [port("x", 2, 8)], [port("y", 2, 4)], weights)


def gemm_by_channel() -> ModelProto:
    """tvm#15931: activations that are quantized too, and a Gemm of transposed weights with a scale for each row."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "scales", "zeros"], ["d"], axis=0),
        helper.make_node("Gemm", ["a", "d", "b"], ["y"], transB=1),
    ]
    weights = {
        "step": np.array(0.05, np.float32),
        "zero": np.array(128, np.uint8),
        "w": np.random.default_rng(0).integers(-127, 128, (4, 8)).astype(np.int8),
        "scales": np.array([0.01, 0.02, 0.03, 0.04], np.float32),
        "zeros": np.zeros(4, np.int8),
        "b": normal(4),
    }
    return make_model(nodes, [port("x", 2, 8)], [port("y", 2, 4)], weights)


def bounds_that_are_no_numbers() -> ModelProto:
    """tvm#19533: Clip whose lower bound, or upper bound, or both, are NaN: that bound is none."""
    bounds = {
        "nan": np.array(np.nan, np.float32),
        "low": np.array(-0.5, np.float32),
        "high": np.float32(0.5).reshape(()),
    }
    pairs = [("low", "nan"), ("nan", "high"), ("nan", "nan"), ("nan", "")]
    nodes = [helper.make_node("Clip", ["x", *pair], [f"y{index}"]) for index, pair in enumerate(pairs)]
    return make_model(nodes, [port("x", 3, 5)], [port(f"y{index}", 3, 5) for index in range(4)], bounds)


def constants_of_one_shape() -> ModelProto:
    """apache/tvm-ffi#645: two convolutions whose different weights have one shape, and many small constants."""
    nodes = [helper.make_node("Conv", ["x", "w0"], ["c0"]), helper.make_node("Conv", ["c0", "w1"], ["s0"])]
    weights = {"w0": normal(4, 4, 1, 1, seed=1), "w1": normal(4, 4, 1, 1, seed=2)}
    for index in range(6):
        weights[f"k{index}"] = normal(4, 1, 1, seed=10 + index)
        nodes.append(helper.make_node("Add" if index % 2 else "Mul", [f"s{index}", f"k{index}"], [f"s{index + 1}"]))
    return make_model(nodes, [port("x", 1, 4, 5, 5)], [port("s6", 1, 4, 5, 5)], weights)


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def reductions_of_opset_18() -> ModelProto:
    """tvm#18072: two axes, given as an input, in every reduction."""
    nodes = [helper.make_node("Exp", ["x"], ["e"])]
    nodes += [helper.make_node(f"Reduce{name}", ["e", "axes"], [name]) for name in _REDUCTIONS]
    outputs = [port(name, 1, 3, 1) for name in _REDUCTIONS]
    return make_model(nodes, [port("x", 2, 3, 4)], outputs, {"axes": np.array([0, -1])}, opset=18)


def reductions_of_opset_13() -> ModelProto:
    """tvm#18072: as attributes, which ReduceSum alone has as an input."""
    names = [name for name in _REDUCTIONS if name != "Sum"]
    nodes = [helper.make_node("Exp", ["x"], ["e"])]
    nodes += [helper.make_node(f"Reduce{name}", ["e"], [name], axes=[0, -1]) for name in names]
    nodes.append(helper.make_node("ReduceSum", ["e", "axes"], ["Sum"]))
    outputs = [port(name, 1, 3, 1) for name in _REDUCTIONS]
    return make_model(nodes, [port("x", 2, 3, 4)], outputs, {"axes": np.array([0, -1])}, opset=13)


def strange_names() -> ModelProto:
    """Inputs and outputs whose names are no identifiers, or the same one once they are made so, keep their order."""
    nodes = [helper.make_node("Sub", ["a.b", "a_b"], ["1/y:0"]), helper.make_node("Neg", ["é []"], ["main"])]
    inputs = [port("é []", 2), port("a_b", 2), port("a.b", 2)]
    return make_model(nodes, inputs, [port("main", 2), port("1/y:0", 2)])


def resize_by_fractions() -> ModelProto:
    """tvm#19570: Resize by 2.5 of half pixels takes the pixels that the standard says."""
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], [mode], mode=mode, coordinate_transformation_mode="half_pixel")
        for mode in ("nearest", "linear")
    ]
    weights = {"scales": np.array([1, 1, 2.5, 2.5], np.float32)}
    return make_model(
        nodes, [port("x", 1, 1, 3, 3)], [port(mode, 1, 1, 7, 7) for mode in ("nearest", "linear")], weights
    )


def one_hot_from_the_end() -> ModelProto:
    """tvm#20217, tvm#19436: OneHot of indices from the end, in the type of its values."""
    nodes = [
        helper.make_node("Sub", ["i", "three"], ["n"]),
        helper.make_node("OneHot", ["n", "depth", "values"], ["y"]),
    ]
    weights = {"three": np.array(3), "depth": np.array(4), "values": np.array([0.5, 2], np.float32)}
    return make_model(nodes, [port("i", 5, dtype=TensorProto.INT64)], [port("y", 5, 4)], weights)


MODELS = [
    resize_by_fractions,
    one_hot_from_the_end,
    negative_indices,
    scatter_from_the_end,
    shapes_from_initializers,
    scalar_quantization,
    quantization_by_channel,
    gemm_by_channel,
    bounds_that_are_no_numbers,
    constants_of_one_shape,
    reductions_of_opset_18,
    reductions_of_opset_13,
    strange_names,
]


@pytest.mark.parametrize("make", MODELS)
def test_equals_onnx_runtime(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """The library gives what ONNX Runtime gives, in the order in which the model names its inputs and outputs."""
    assert differences(make(), host, tmp_path) == []
