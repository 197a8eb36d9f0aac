"""Models that select boxes: what is selected, what is made of it, and which models are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from tvm.runtime.vm import VirtualMachine

from tests.workers.lending import lent_board
from tests.workers.models import make_model, port, save
from tuning_db.errors import UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.devices import local_cpu
from workers.frontend.onnx_import import Parts, import_parts
from workers.graph import pipeline
from workers.graph.selected import joined
from workers.packaging import library
from workers.packaging.on_board import OnBoard
from workers.packaging.reference import Comparison, Rest
from workers.packaging.running import outputs_of
from workers.tuning import compared

BOXES, SCORES = (2, 40, 4), (2, 3, 40)
SELECTED = ["selected", "K", 3]


def selecting(
    behind: Sequence[NodeProto] = (), outputs: Sequence[tuple[str, int, Sequence[Any]]] = (), *,
    most: int = 10, iou: float = 0.5, score: float | None = 0.25, centred: int = 0, before: Sequence[NodeProto] = (),
    names: str = "boxes scores", weights: dict[str, NDArray[Any]] | None = None,
) -> ModelProto:  # fmt: skip
    """A NonMaxSuppression of what is fed, or of what the nodes `before` it make, and nodes behind it."""
    constants = {"most": np.array([most], np.int64), "iou": np.array([iou], np.float32)}
    if score is not None:
        constants["score"] = np.array([score], np.float32)
    node = helper.make_node(
        "NonMaxSuppression", [*names.split(), *constants], ["selected"], "suppress", center_point_box=centred
    )
    answers = [port(name, *shape, dtype=dtype) for name, dtype, shape in outputs]
    return make_model(
        [*before, node, *behind], [port("boxes", *BOXES), port("scores", *SCORES)],
        answers or [port("selected", "K", 3, dtype=TensorProto.INT64)], {**constants, **(weights or {})},
    )  # fmt: skip


def parts_of(model: ModelProto, folder: Path) -> Parts:
    specs = tuple(TensorSpec(name, "float32", shape) for name, shape in (("boxes", BOXES), ("scores", SCORES)))
    return import_parts(save(model, folder), specs, folder)


def compiled(model: ModelProto, folder: Path) -> Callable[..., list[NDArray[Any]]]:
    function = VirtualMachine(tvm.runtime.load_module(str(compile_parts(parts_of(model, folder), folder))), tvm.cpu())
    return lambda *arrays: outputs_of(function["main"](*map(tvm.runtime.tensor, arrays)))


def compile_parts(parts: Parts, folder: Path) -> Path:
    assert parts.selected is not None
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    with target, pipeline.pass_context():
        modules = {
            name: pipeline.lower_operators()(pipeline.simplify()(part.module)) for name, part in parts.functions.items()
        }
    path = folder / "library.so"
    library.compile_functions(joined(library.merge(modules), parts.functions, parts.selected), target, path)
    return path


def feeds(seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Boxes and scores; of every third seed on a grid, so that scores are equal and overlaps meet the bound."""
    generator = np.random.default_rng(seed)
    boxes, scores = (generator.standard_normal(shape).astype(np.float32) for shape in (BOXES, SCORES))
    if seed % 3 == 0:
        boxes, scores = np.round(boxes * 3), np.round(scores * 2) / 2
    return boxes, scores if seed else scores - 100


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({}, 60),
        ({"centred": 1}, 60),
        ({"score": None, "most": 2**63 - 1}, 240),
        ({"iou": 0.0, "most": 1}, 6),
        ({"iou": 1.0, "score": -1.0}, 60),
        ({"score": float("inf")}, 0),
    ],
    ids=str,
)
def test_what_is_selected(options: dict[str, Any], largest: int, tmp_path: Path) -> None:
    """The boxes that ONNX Runtime selects, in its order, whether there are none, a few or all."""
    model = selecting(**options)
    run = compiled(model, tmp_path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    numbers = []
    for seed in range(60):
        boxes, scores = feeds(seed)
        [wanted] = session.run(None, {"boxes": boxes, "scores": scores})
        [got] = run(boxes, scores)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, wanted, strict=True)
        numbers.append(len(wanted))
    assert max(numbers) == largest
    assert numbers[0] == 0 or "score" in options


def test_what_is_made_of_the_selected(tmp_path: Path) -> None:
    """What a model gathers for each selected box has as many rows as there are, beside outputs that have nothing to do
    with it, and whichever axis the boxes lie along."""
    before = [helper.make_node("Relu", ["scores"], ["positive"]), helper.make_node("Abs", ["boxes"], ["corners"])]
    behind = [
        helper.make_node("Slice", ["selected", "zero", "one", "one"], ["batch"]),
        helper.make_node("Slice", ["selected", "two", "three", "one"], ["box"]),
        helper.make_node("Concat", ["batch", "box"], ["place"], axis=1),
        helper.make_node("GatherND", ["corners", "place"], ["picked"]),
        helper.make_node("GatherND", ["positive", "selected"], ["points"]),
        helper.make_node("Unsqueeze", ["points", "one"], ["scored"]),
        helper.make_node("Concat", ["picked", "scored"], ["detected"], axis=1),
        helper.make_node("Transpose", ["detected"], ["turned"], perm=[1, 0]),
        helper.make_node("Reshape", ["picked", "flat"], ["flattened"]),
        helper.make_node("Shape", ["picked"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["nothing"]),
        helper.make_node("Add", ["nothing", "picked"], ["same"]),
    ]
    outputs = [
        ("detected", TensorProto.FLOAT, ["K", 5]), ("turned", TensorProto.FLOAT, [5, "K"]),
        ("positive", TensorProto.FLOAT, SCORES), ("selected", TensorProto.INT64, ["K", 3]),
        ("flattened", TensorProto.FLOAT, ["F"]), ("same", TensorProto.FLOAT, ["K", 4]),
    ]  # fmt: skip
    weights = {
        name: np.array([value], np.int64)
        for name, value in (("zero", 0), ("one", 1), ("two", 2), ("three", 3), ("flat", -1))
    }
    model = selecting(behind, outputs, before=before, names="corners positive", weights=weights)
    parts = parts_of(model, tmp_path)
    told = {output["name"]: (output["shape"], output.get("varying_axis")) for output in parts.told_outputs()}
    assert told == {
        "detected": ([60, 5], 0), "turned": ([5, 60], 1), "positive": ([2, 3, 40], None),
        "selected": ([60, 3], 0), "flattened": ([240], 0), "same": ([60, 4], 0),
    }  # fmt: skip
    run = compiled(model, tmp_path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for seed in range(20):
        boxes, scores = feeds(seed)
        wanted = session.run(None, {"boxes": boxes, "scores": scores})
        for one, other in zip(wanted, run(boxes, scores), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    assert len(wanted[0]) > 3


def _size(*more: NodeProto) -> list[NodeProto]:
    return [
        helper.make_node("Shape", ["selected"], ["shape"], end=1),
        helper.make_node("Cast", ["shape"], ["count"], "counting", to=TensorProto.FLOAT),
        *more,
    ]


@pytest.mark.parametrize(
    ("behind", "output", "complaint"),
    [
        ([helper.make_node("TopK", ["number", "two"], ["y", "places"], axis=0)], ["K", 3], "topk"),
        ([helper.make_node("ReduceMax", ["number"], ["y"], axes=[0], keepdims=0)], [3], "it is computed from items"),
        ([helper.make_node("Softmax", ["number"], ["y"], axis=0)], ["K", 3], "softmax"),
        (
            _size(helper.make_node("Mul", ["number", "count"], ["y"], "scaling")),
            ["K", 3],
            "'scaling' computes with how",
        ),
        (_size(helper.make_node("Identity", ["count"], ["y"])), [1], "'y' tells how many"),
        (
            _size(
                helper.make_node("Range", ["nought", "length", "step"], ["places"]),
                helper.make_node("Squeeze", ["shape"], ["length"]),
                helper.make_node("Cast", ["places"], ["y"], to=TensorProto.FLOAT),
            ),
            ["K"],
            "'y' tells how many",
        ),
        ([helper.make_node("Slice", ["number", "nought1", "two"], ["y"])], ["K", 3], "it is computed from items"),
    ],
    ids=["TopK", "ReduceMax", "Softmax", "times", "size", "Range", "Slice"],
)
def test_rows_that_are_no_box_s_own(behind: list[NodeProto], output: list[Any], complaint: str, tmp_path: Path) -> None:
    """A model that does anything with its selected boxes but to each of them by itself is refused, and the message
    says which operator does it."""
    nodes = [helper.make_node("Cast", ["selected"], ["number"], to=TensorProto.FLOAT), *sorted(behind, key=_squeezed)]
    weights = {
        "two": np.array([2], np.int64), "nought1": np.array([0], np.int64),
        "nought": np.array(0, np.int64), "step": np.array(1, np.int64),
    }  # fmt: skip
    model = selecting(nodes, [("y", TensorProto.FLOAT, output)], weights=weights)
    with pytest.raises(UnsupportedOperator, match="NonMaxSuppression") as refused:
        parts_of(model, tmp_path)
    assert refused.value.node == "suppress"
    assert complaint in str(refused.value)
    assert "end the model before" in str(refused.value)


def _squeezed(node: NodeProto) -> int:
    """ONNX wants a node behind those whose outputs it reads."""
    return {"Shape": 0, "Squeeze": 1, "Range": 2}.get(node.op_type, 3)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (selecting(most=0), "max_output_boxes_per_class is 0"),
        (selecting(iou=1.5), "iou_threshold is 1.5"),
        (
            selecting(
                [helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["more"], "another")],
                [("more", TensorProto.INT64, ["K", 3])],
            ),
            "node 'another'.*'suppress' is another",
        ),
    ],
    ids=["none", "iou", "two"],
)
def test_selections_that_are_refused(model: ModelProto, complaint: str, tmp_path: Path) -> None:
    """A selection that selects nothing, is against the standard or is one of several is refused by name."""
    with pytest.raises(UnsupportedOperator, match=complaint):
        parts_of(model, tmp_path)


def test_a_threshold_that_is_computed(tmp_path: Path) -> None:
    """A threshold that the model computes of what it is fed is refused, at the upload already."""
    before = [helper.make_node("ReduceMean", ["scores"], ["mean"], keepdims=0)]
    model = selecting(before=before)
    [node] = [node for node in model.graph.node if node.op_type == "NonMaxSuppression"]
    node.input[4] = "mean"
    with pytest.raises(UnsupportedOperator, match="make 'mean' a constant"):
        parts_of(model, tmp_path)


def detector() -> ModelProto:
    """A selection of boxes that a node before it makes and scores that are fed, a row for each box from nodes behind
    it, and an output that is a constant."""
    before = [helper.make_node("Sigmoid", ["boxes"], ["corners"])]
    behind = [
        helper.make_node("GatherND", ["scores", "selected"], ["points"]),
        helper.make_node("Unsqueeze", ["points", "one"], ["detected"]),
    ]
    weights = {"one": np.array([1], np.int64), "table": np.arange(3, dtype=np.float32)}
    outputs = [("detected", TensorProto.FLOAT, ["K", 1]), ("table", TensorProto.FLOAT, [3])]
    return selecting(behind, outputs, before=before, names="corners scores", score=0.6, weights=weights)


def test_the_check_of_a_detector(tmp_path: Path) -> None:
    """A detector's library is compared in parts and as a whole, here and on a board: its own boxes and scores must make
    ONNX Runtime select the same. One that selects others is found."""
    parts = parts_of(detector(), tmp_path)
    library_path = compile_parts(parts, tmp_path)
    assert parts.selected is not None
    head = parts.functions["head"]
    assert [spec.name for spec in head.outputs] == ["table", "corners"]
    whole = Comparison(
        str(parts.bound), {"untuned": str(library_path)}, parts.selected.inputs, 2, rounds=1, min_sample_s=0.0,
        rest=Rest(str(parts.selected.rest), [spec.name for spec in head.outputs]),
    )  # fmt: skip
    first = replace(whole, reference=str(head.bound), function="head", rest=None)
    others = onnx.load(parts.selected.rest)
    [iou] = [tensor for tensor in others.graph.initializer if tensor.name == "iou"]
    iou.CopyFrom(numpy_helper.from_array(np.array([0.1], np.float32), "iou"))
    wrong = replace(whole, rest=replace(whole.rest, model=str(save(others, tmp_path, "others.onnx"))))
    comparisons = [whole, first, wrong]
    warnings: list[str] = []
    told = [compared(comparisons, tmp_path / "comparisons.jsonl", 300, warnings.append)]
    with lent_board("detector") as tracker:
        identity, target = local_cpu.probe()
        board = OnBoard(f"127.0.0.1:{tracker.port}", "detector", asdict(identity), target, 120, 20)
        there = [replace(comparison, board=board) for comparison in comparisons]
        told.append(compared(there, tmp_path / "comparisons.jsonl", 300, warnings.append))
    for good, part, bad in told:
        assert good["checks"]["untuned"]["ok"], good
        assert part["checks"]["untuned"]["ok"], part
        assert "reference is float32" in bad["checks"]["untuned"]["problem"]
    assert warnings == []
