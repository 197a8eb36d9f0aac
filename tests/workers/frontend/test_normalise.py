"""Operators that are written as others, in forms that exporters write and the standard's own cases do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.workers.conftest import Host, differences
from tests.workers.models import make_model, normal, port, save
from tuning_db.errors import UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend.onnx_import import import_onnx


def reductions_over_nothing() -> ModelProto:
    kinds = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    nodes = [helper.make_node(f"Reduce{kind}", ["x"], [kind], noop_with_empty_axes=1) for kind in kinds]
    return make_model(nodes, [port("x", 3, 5)], [port(kind, 3, 5) for kind in kinds], opset=18)


def mean_of_integers() -> ModelProto:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1]),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    return make_model(nodes, [port("x", 3, 5, dtype=TensorProto.INT32)], [port("y", 3, 5, dtype=TensorProto.INT32)])


def equal_truths() -> ModelProto:
    """As PyTorch's exporter writes a division that rounds down."""
    nodes = [
        helper.make_node("Less", ["x", "z"], ["less"]),
        helper.make_node("Less", ["z", "x"], ["more"]),
        helper.make_node("Equal", ["less", "more"], ["y"]),
    ]
    return make_model(nodes, [port("x", 3, 5), port("z", 5)], [port("y", 3, 5, dtype=TensorProto.BOOL)])


def normalised_doubles() -> ModelProto:
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"])
    weights = {"scale": normal(5).astype("float64"), "bias": normal(5, seed=1).astype("float64")}
    x, y = (port(name, 3, 5, dtype=TensorProto.DOUBLE) for name in ("x", "y"))
    return make_model([node], [x], [y], weights)


@pytest.mark.parametrize("make", [reductions_over_nothing, mean_of_integers, equal_truths, normalised_doubles])
def test_equals_onnx_runtime(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """The library gives what ONNX Runtime gives."""
    assert differences(make(), host, tmp_path) == []


def test_what_is_not_sorted(tmp_path: Path) -> None:
    """TopK of int16, which TVM's runtime cannot sort, is refused by its node before anything is built."""
    node = helper.make_node("TopK", ["x", "k"], ["values", "places"], name="best")
    outputs = [port("values", 3, dtype=TensorProto.INT16), port("places", 3, dtype=TensorProto.INT64)]
    model = make_model([node], [port("x", 5, dtype=TensorProto.INT16)], outputs, {"k": np.array([3])})
    with pytest.raises(UnsupportedOperator, match=r"TopK \(node 'best'.*int16"):
        import_onnx(save(model, tmp_path), [TensorSpec("x", "int16", (5,))], tmp_path)
