"""What single passes of the pipeline do to real models: PaddleOCR's, as rapidocr-onnxruntime ships them, and a layer of
BERT as PyTorch 2.14 exported it, by `model_zoo.bert_layer(0, hidden=32, heads=2, inner=64, tokens=8)`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
import tvm

from tests.workers.conftest import Host
from tests.workers.graph.test_plan import kinds, plan_of
from tests.workers.models import text_model
from tuning_db.jobs import Claim
from tuning_db.keys import TensorSpec
from tuning_db.store import TuningStore
from workers.frontend.onnx_import import Imported, import_onnx
from workers.graph import pipeline
from workers.graph.algebra import name_of

BERT = Path(__file__).with_name("bert_layer.onnx")
INPUTS = {
    "bert_layer": TensorSpec("states", "float32", (1, 8, 32)),
    "ch_ppocr_mobile_v2.0_cls_infer": TensorSpec("x", "float32", (1, 3, 48, 192)),
    "ch_PP-OCRv4_rec_infer": TensorSpec("x", "float32", (1, 3, 48, 320)),
    "ch_PP-OCRv4_det_infer": TensorSpec("x", "float32", (1, 3, 160, 160)),
}


def imported(name: str, scratch: Path) -> Imported:
    path = BERT if name == BERT.stem else text_model(f"{name}.onnx")
    return import_onnx(path, [INPUTS[name]], scratch)


def bound(module: tvm.ir.IRModule) -> Counter[str]:
    """What variables of `main` are bound to: operators by name, all else by kind."""
    values = [binding.value for block in module["main"].body.blocks for binding in block.bindings]
    return Counter(name_of(value) or type(value).__name__ for value in values)


@pytest.mark.parametrize(
    ("left_out", "name", "counted", "without", "with_it"),
    [
        ("DecomposeOps", "ch_PP-OCRv4_det_infer", "nn.batch_norm", 1, 0),
        # BatchNorm in parts is the first of a tuple that nobody else reads.
        ("CanonicalizeBindings", "ch_PP-OCRv4_det_infer", "TupleGetItem", 1, 0),
        # Queries, keys and values are products of reshapes of the same, and one product once they are not.
        ("EliminateCommonSubexpr", "bert_layer", "matmul", 8, 6),
        ("FoldConstants", "ch_ppocr_mobile_v2.0_cls_infer", "reshape", 54, 1),
        ("ApplyIdentities", "ch_PP-OCRv4_rec_infer", "nn.layer_norm", 0, 4),
        ("MergeProjections", "bert_layer", "matmul", 8, 6),
        # The three products that were merged.
        ("DeadCodeElimination", "bert_layer", "matmul", 9, 6),
    ],
)
def test_a_pass_shows_on_a_real_model(
    host: Host, tmp_path: Path, left_out: str, name: str, counted: str, without: int, with_it: int
) -> None:
    """Without the pass a real model keeps what it is there to remove, or lacks what it finds."""
    module = imported(name, tmp_path).module
    passes = list(pipeline.simplify().passes)
    others = [each for each in passes if each.info.name != left_out]
    assert len(others) < len(passes)
    with host.target, pipeline.pass_context():
        assert bound(tvm.transform.Sequential(others)(module))[counted] == without
        assert bound(tvm.transform.Sequential(passes)(module))[counted] == with_it


def test_every_pass_is_shown() -> None:
    """No pass of the pipeline is without a line in the table above."""
    [table] = [mark.args[1] for mark in test_a_pass_shows_on_a_real_model.pytestmark]
    assert {row[0] for row in table} == {each.info.name for each in pipeline.simplify().passes}


@pytest.mark.parametrize(
    ("name", "kernels", "transforms"),
    [
        ("bert_layer", {"dense": 4, "matmul": 2, "softmax": 1, "layer_norm": 2}, 0),
        (
            "ch_ppocr_mobile_v2.0_cls_infer",
            {"conv3x3": 1, "conv1x1": 42, "depthwise": 11, "average_pool": 10, "max_pool": 1, "softmax": 1, "plain": 1},
            1,
        ),
    ],
)
def test_kernels_of_a_real_model(
    name: str, kernels: dict[str, int], transforms: int, host: Host, sqlite_store: TuningStore, claim: Claim,
    tmp_path: Path,
) -> None:  # fmt: skip
    """BatchNorm, activations and residual additions are computed in the convolutions and products before them;
    attention is two products and a softmax; layouts change at the edges, and no weight is put into order at run time.
    That is no more kernels than ONNX Runtime has nodes, and at most half of the intermediates' memory."""
    model = imported(name, tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.bound, options, providers=["CPUExecutionProvider"])
    plan = plan_of(model.module, host, sqlite_store, claim)
    assert (dict(kinds(plan)), plan.layout_transforms) == (kernels, transforms)
    assert plan.kernels.total() <= len(onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert plan.planned_bytes <= plan.unplanned_bytes / 2
