"""Operators that are a few others, against ONNX Runtime on the same inputs."""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto, helper

from tests.workers.conftest import Host, differences
from tests.workers.models import make_model, port


def test_equals_onnx_runtime(host: Host, tmp_path: Path) -> None:
    """Sequences are turned round up to lengths known only when the model runs (the examples hold 1 and 2), along
    either axis; norms are taken with operator set 17, where axes are attributes."""
    model = make_model(
        [
            helper.make_node("ReverseSequence", ["x", "lengths"], ["first"], time_axis=0, batch_axis=1),
            helper.make_node("ReverseSequence", ["x", "few"], ["second"], time_axis=1, batch_axis=0),
            helper.make_node("LpNormalization", ["x"], ["norm"], axis=1, p=1),
        ],
        [port("x", 3, 4, 2), port("lengths", 4, dtype=TensorProto.INT64), port("few", 3, dtype=TensorProto.INT64)],
        [port("first", 3, 4, 2), port("second", 3, 4, 2), port("norm", 3, 4, 2)],
    )
    assert differences(model, host, tmp_path) == []
