"""What single passes of the pipeline do to real models: PaddleOCR's, as rapidocr-onnxruntime ships them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from tests.workers.conftest import Host, operators
from tests.workers.models import text_model
from tuning_db.keys import TensorSpec
from workers.frontend.onnx_import import import_onnx
from workers.graph import pipeline


@pytest.mark.parametrize(
    ("left_out", "file", "shape", "operator", "without", "with_it"),
    [
        ("FoldConstants", "ch_ppocr_mobile_v2.0_cls_infer", (1, 3, 48, 192), "reshape", 54, 1),
        ("ApplyIdentities", "ch_PP-OCRv4_rec_infer", (1, 3, 48, 320), "nn.layer_norm", 0, 4),
        ("DecomposeOps", "ch_PP-OCRv4_det_infer", (1, 3, 160, 160), "nn.batch_norm", 1, 0),
    ],
)
def test_a_pass_shows_on_a_real_model(
    host: Host,
    tmp_path: Path,
    left_out: str,
    file: str,
    shape: tuple[int, ...],
    operator: str,
    without: int,
    with_it: int,
) -> None:
    """Without the pass a real model keeps the operators that it is there to remove, or lacks those that it finds."""
    path = text_model(f"{file}.onnx")
    module = import_onnx(path, [TensorSpec("x", "float32", shape)], tmp_path).module
    passes = list(pipeline.simplify().passes)
    others = [each for each in passes if each.info.name != left_out]
    assert len(others) == len(passes) - 1
    with host.target, pipeline.pass_context():
        assert operators(tvm.transform.Sequential(others)(module)).count(operator) == without
        assert operators(tvm.transform.Sequential(passes)(module)).count(operator) == with_it
