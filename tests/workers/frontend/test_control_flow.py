"""Loops written out step by step, against ONNX Runtime on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.workers.conftest import Host, differences
from tests.workers.models import make_model, normal, port, save
from tuning_db.errors import UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend.control_flow import MOST_STEPS
from workers.frontend.onnx_import import import_onnx

NUMBER, ON = port("i", dtype=TensorProto.INT64), port("on", dtype=TensorProto.BOOL)


def looped(times: int = 3, goes_on: str = "Identity") -> ModelProto:
    """A loop that reads from outside, adds up, collects, branches on the number of the step, and holds another loop."""
    inner = helper.make_graph(
        [helper.make_node("Mul", ["z", "factor"], ["z1"]), helper.make_node("Identity", ["on2"], ["on3"])],
        "inner",
        [port("j", dtype=TensorProto.INT64), port("on2", dtype=TensorProto.BOOL), port("z", 2, 3)],
        [port("on3", dtype=TensorProto.BOOL), port("z1", 2, 3)],
    )

    def branch(node: NodeProto) -> object:
        return helper.make_graph([node], node.op_type, [], [port(node.output[0], 2, 3)])

    body = helper.make_graph(
        [
            helper.make_node("Equal", ["i", "one"], ["second"]),
            helper.make_node(
                "If", ["second"], ["b"],
                then_branch=branch(helper.make_node("Neg", ["x"], ["t"])),
                else_branch=branch(helper.make_node("Exp", ["sum"], ["e"])),
            ),
            helper.make_node("Loop", ["two", "", "b"], ["scaled"], body=inner),
            helper.make_node("Add", ["sum", "scaled"], ["next"]),
            helper.make_node("Tanh", ["next"], ["seen"]),
            helper.make_node(goes_on, ["on"], ["more"]),
        ],
        "body",
        [NUMBER, ON, port("sum", 2, 3)],
        [port("more", dtype=TensorProto.BOOL), port("next", 2, 3), port("seen", 2, 3)],
        [numpy_helper.from_array(np.array(1), "one"), numpy_helper.from_array(normal(3), "factor")],
    )  # fmt: skip
    node = helper.make_node("Loop", ["times", "", "x"], ["y", "all"], name="outer", body=body)
    weights = {"times": np.array(times), "two": np.array(2)}
    return make_model([node], [port("x", 2, 3)], [port("y", 2, 3), port("all", times, 2, 3)], weights)


def scanned() -> ModelProto:
    """Columns from the last to the first, collected as columns from the last to the first."""
    body = helper.make_graph(
        [helper.make_node("Sub", ["c", "s"], ["s1"]), helper.make_node("Mul", ["s1", "c"], ["out"])],
        "body",
        [port("s", 2), port("c", 2)],
        [port("s1", 2), port("out", 2)],
    )
    node = helper.make_node(
        "Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[1], scan_output_axes=[-1], scan_output_directions=[1],
    )  # fmt: skip
    return make_model([node], [port("start", 2), port("x", 2, 4)], [port("last", 2), port("y", 2, 4)], opset=12)


@pytest.mark.parametrize("make", [looped, scanned])
def test_equals_onnx_runtime(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """A loop gives what it gives in ONNX Runtime, at the end and of every step."""
    assert differences(make(), host, tmp_path) == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (looped(MOST_STEPS + 1), f"its {MOST_STEPS + 1} steps .* at most {MOST_STEPS} steps"),
        (looped(3, "Not"), "whether it goes on depends on the data"),
    ],
)
def test_loops_that_stay(model: ModelProto, reason: str, tmp_path: Path) -> None:
    """A loop of too many steps, or with an end that is not known before, is refused by its name."""
    with pytest.raises(UnsupportedOperator, match=f"operator Loop .*'outer'.* {reason}"):
        import_onnx(save(model, tmp_path), (TensorSpec("x", "float32", (2, 3)),), tmp_path)
