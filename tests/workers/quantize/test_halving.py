"""Models with weights in float16: which are, what that costs, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.workers.models import make_model, matmuls, normal, port
from tests.workers.quantize.test_quantize import ask, images, npz, residual_net
from tuning_db.errors import InvalidRequest, UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.quantize.__main__ import run
from workers.quantize.request import SOURCE, Recipe

ROWS = (TensorSpec("x", "float32", (3, 8)),)


def halved(*arguments: Any, exclude: tuple[str, ...] = ()) -> tuple[dict[str, Any], Path]:
    """The report, and the model with float16 weights; arguments as of `ask`."""
    request = ask(*arguments, recipe=Recipe(None, scheme="fp16", exclude=exclude))
    report: Any = run(request)
    return report, Path(request.target)


def test_weights(tmp_path: Path) -> None:
    """All weights become float16, rounded to the nearest, but those of excluded nodes; the file has half the bytes, and
    the report tells what outputs and layers lose on samples, the worst layer first."""
    report, path = halved(tmp_path, residual_net(), npz(tmp_path, x=images()), exclude=("stem", "classifier"))
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert {name for name, kind in kinds.items() if kind == TensorProto.FLOAT16} == {
        f"block{block}_conv{conv}_w/float16" for block in (0, 1) for conv in (0, 1)
    }
    assert report["weights"] == {
        "float16": 4,
        "float32": [
            {"node": "stem", "operator": "Conv", "reason": "excluded"},
            {"node": "classifier", "operator": "Gemm", "reason": "excluded"},
        ],
    }
    source = path.with_name(SOURCE)
    before, after = ({t.name: numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer} for p in (source, path))
    weight, stored = before["block0_conv0_w"], after["block0_conv0_w/float16"]
    np.testing.assert_array_equal(stored, weight.astype(np.float16))
    assert path.stat().st_size < 0.6 * source.stat().st_size
    [output] = report["outputs"]
    assert 50 < output["sqnr_db"] < 100
    assert output["cosine"] > 1 - 1e-5
    own = {layer["node"]: layer["own_sqnr_db"] for layer in report["layers"]}
    assert set(own) == {f"block{block}_conv{conv}" for block in (0, 1) for conv in (0, 1)}
    assert list(own.values()) == sorted(own.values())


def test_names_that_are_taken(tmp_path: Path) -> None:
    """A model may hold the names that the rounded weights would get."""
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "w"], ["w/rounded"], name="w/widened"),
            helper.make_node("Relu", ["w/rounded"], ["w/float16"]),
        ],
        [port("x", 3, 8)],
        [port("w/float16", 3, 4)],
        {"w": normal(8, 4)},
    )
    report, path = halved(tmp_path, model, None, ROWS)
    assert report["weights"]["float16"] == 1
    x = normal(3, 8)
    [before], [after] = (
        onnxruntime.InferenceSession(each, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        for each in (model.SerializeToString(), path)
    )
    np.testing.assert_allclose(after, before, atol=1e-2)


def products(left: Any, right: Any) -> ModelProto:
    model = matmuls()
    del model.graph.initializer[:]
    model.graph.initializer.extend([numpy_helper.from_array(left, "left"), numpy_helper.from_array(right, "right")])
    return model


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(7e4, r"its weights reach 7e\+04, and float16 ends at 65504"), (1e-7, r"change its weights by .* of their norm")],
)
def test_weights_that_float16_does_not_hold(bad: float, reason: str, tmp_path: Path) -> None:
    """A layer with weights beyond float16's range, or so small that few digits are left, stays float32 by name."""
    report, _ = halved(tmp_path, products(np.full((8, 4), bad, np.float32), normal(8, 4)), None, ROWS)
    [kept] = report["weights"]["float32"]
    assert (kept["node"], report["weights"]["float16"], report["samples"]) == ("first", 1, 0)
    assert re.search(reason, kept["reason"])


def test_what_is_refused(tmp_path: Path) -> None:
    """Exclusions that name no node, or one without weights, and a model of which nothing would be float16."""
    for exclude, problem in (
        (("frist",), r"there is no node 'frist' once .*did you mean 'first'"),
        (("last",), r"node 'last' has no weights that fp16 would round"),
        (("first", "second"), r"no float32 weights .*, or all of them stay fp32"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            halved(tmp_path, matmuls(), None, ROWS, exclude=exclude)
    nothing = make_model([helper.make_node("Relu", ["x"], ["y"])], [port("x", 3, 8)], [port("y", 3, 8)])
    with pytest.raises(InvalidRequest, match="holds no float32 weights"):
        halved(tmp_path, nothing, None, ROWS)


def test_loop(tmp_path: Path) -> None:
    """A product within a loop is quantized as those around it are: the loop is written out first, as for a library."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["h", "weight"], ["h1"], "inner"), helper.make_node("Identity", ["on"], ["on1"])],
        "body",
        [port("i", dtype=TensorProto.INT64), port("on", dtype=TensorProto.BOOL), port("h", 3, 8)],
        [port("on1", dtype=TensorProto.BOOL), port("h1", 3, 8)],
    )
    model = make_model(
        [helper.make_node("Loop", ["times", "", "x"], ["y"], "outer", body=body)],
        [port("x", 3, 8)],
        [port("y", 3, 8)],
        {"times": np.array(2), "weight": normal(8, 8)},
    )
    report, path = halved(tmp_path, model, npz(tmp_path, x=normal(4, 3, 8)), ROWS)
    assert (report["weights"]["float16"], report["weights"]["float32"]) == (2, [])
    assert 50 < report["outputs"][0]["sqnr_db"] < 100
    assert [node.op_type for node in onnx.load(path).graph.node].count("MatMul") == 2


def test_what_nothing_compiles(tmp_path: Path) -> None:
    """An operator of ONNX Runtime's own, left once constants are folded, is refused before anything is rounded."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "scale", "zero"], ["q"]),
        helper.make_node("QLinearSigmoid", ["q", "scale", "zero", "scale", "zero"], ["s"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["s", "scale", "zero"], ["y"]),
    ]
    weights = {"w": normal(8, 8), "scale": np.float32(0.1), "zero": np.uint8(128)}
    model = make_model(nodes, [port("x", 3, 8)], [port("y", 3, 8)], weights)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(UnsupportedOperator, match=r"operator com\.microsoft\.QLinearSigmoid .* cannot be compiled"):
        halved(tmp_path, model, None, ROWS)
