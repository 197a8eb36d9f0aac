"""Quantized operators as quantizers write them, against ONNX Runtime on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from tests.workers.conftest import Host, differences
from tests.workers.models import make_model, port, save
from tuning_db.errors import UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend.onnx_import import import_onnx

RNG = np.random.default_rng(0)


def integers(dtype: type, *shape: int) -> NDArray[np.integer]:
    """Of seven bits: with eight, ONNX Runtime's sums of two products saturate on processors without VNNI."""
    return RNG.integers(0, 64, shape).astype(dtype)


def static() -> ModelProto:
    """Two convolutions, by channel and by tensor, the second in groups, and a product by column: uint8 with int8."""
    one, zero = np.array(0.02, np.float32), np.array(7, np.uint8)
    weights: dict[str, NDArray[Any]] = {
        "flat": np.array([1, 4, 4]),
        "sx": one, "zx": np.array(128, np.uint8), "sc": np.array(0.3, np.float32), "z": zero,
        "w1": integers(np.int8, 4, 3, 3, 3), "s1": np.array([0.01, 0.02, 0.03, 0.04], np.float32),
        "z1": np.zeros(4, np.int8), "b1": integers(np.int32, 4) * 50,
        "w2": integers(np.uint8, 4, 2, 2, 2), "s2": np.array(0.015, np.float32), "z2": np.array(30, np.uint8),
        "wm": integers(np.int8, 4, 5) - 32, "sm": np.array([0.01, 0.02, 0.03, 0.02, 0.01], np.float32),
        "zm": np.zeros(5, np.int8), "ym": np.array(0.4, np.float32), "zy": np.array(120, np.uint8),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        helper.make_node(
            "QLinearConv", ["q", "sx", "zx", "w1", "s1", "z1", "sc", "z", "b1"], ["c1"], pads=[1] * 4, strides=[2, 2]
        ),
        helper.make_node("QLinearConv", ["c1", "sc", "z", "w2", "s2", "z2", "sc", "z"], ["c2"], group=2),
        helper.make_node("Reshape", ["c2", "flat"], ["r"]),
        helper.make_node("QLinearMatMul", ["r", "sc", "z", "wm", "sm", "zm", "ym", "zy"], ["y"]),
    ]
    outputs = [port("c2", 1, 4, 2, 2, dtype=TensorProto.UINT8), port("y", 1, 4, 5, dtype=TensorProto.UINT8)]
    return make_model(nodes, [port("x", 1, 3, 6, 6)], outputs, weights)


def dynamic() -> ModelProto:
    """Scale and zero point of the input are taken from it while the model runs."""
    weights = {"w": integers(np.uint8, 4, 3, 3, 3), "zw": np.array(30, np.uint8), "m": integers(np.uint8, 4, 5)}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("ConvInteger", ["q", "w", "z", "zw"], ["c"], auto_pad="SAME_UPPER"),
        helper.make_node("MatMulInteger", ["q", "m", "z", "zw"], ["p"]),
    ]
    outputs = [port("c", 1, 4, 4, 4, dtype=TensorProto.INT32), port("p", 1, 3, 4, 5, dtype=TensorProto.INT32)]
    return make_model(nodes, [port("x", 1, 3, 4, 4)], outputs, weights)


@pytest.mark.parametrize("make", [static, dynamic])
def test_equals_onnx_runtime(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """Every integer that comes out is ONNX Runtime's."""
    assert differences(make(), host, tmp_path) == []


def test_scale_that_depends_on_the_data(tmp_path: Path) -> None:
    """A scale of the result that is computed while the model runs is refused by the node's name."""
    model = static()
    model.graph.initializer.remove(next(tensor for tensor in model.graph.initializer if tensor.name == "ym"))
    model.graph.input.append(port("ym"))
    specs = (TensorSpec("x", "float32", (1, 3, 6, 6)), TensorSpec("ym", "float32", ()))
    with pytest.raises(UnsupportedOperator, match=r"operator QLinearMatMul .* quantize the model statically"):
        import_onnx(save(model, tmp_path), specs, tmp_path)
