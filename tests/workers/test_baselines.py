"""The engines that libraries are measured against give the model's outputs, and say so when they are not there."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, helper

from tests.workers.models import conv_bn_relu, make_model, normal, port, save
from workers.packaging import baselines
from workers.packaging.baselines import ENGINES, BaselineUnavailable, available, baseline

installed = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            engine, marks=pytest.mark.skipif(version is None, reason=f"an extra: pip install 'tunery[{engine}]'")
        )
        for engine, version in available().items()
    ],
)


def two_of_each() -> ModelProto:
    """Two inputs that cannot be told apart by shape, and two outputs in another order than they are computed in."""
    return make_model(
        [
            helper.make_node("Sub", ["left", "right"], ["difference"]),
            helper.make_node("MatMul", ["difference", "w"], ["product"]),
        ],
        [port("right", 4, 8), port("left", 4, 8)],
        [port("product", 4, 3), port("difference", 4, 8)],
        {"w": normal(8, 3, seed=5)},
    )


@installed
def test_outputs_are_those_of_the_model_in_its_order(engine: str, tmp_path: Path) -> None:
    """Inputs are taken by name, outputs come in the order that the model declares."""
    inputs = {"left": normal(4, 8, seed=1), "right": normal(4, 8, seed=2)}
    product, difference = baseline(engine, save(two_of_each(), tmp_path), inputs, threads=1)()
    np.testing.assert_allclose(difference, inputs["left"] - inputs["right"], rtol=1e-6)
    np.testing.assert_allclose(product, difference @ normal(8, 3, seed=5), rtol=1e-4, atol=1e-6)


@installed
def test_a_symbolic_shape_is_that_of_the_inputs(engine: str, tmp_path: Path) -> None:
    """The model is compiled for the inputs it is given, and agrees with ONNX Runtime without optimisation."""
    path = save(conv_bn_relu(), tmp_path)
    inputs = {"x": normal(2, 8, 14, 14, seed=3)}
    (result,) = baseline(engine, path, inputs, threads=2)()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (wanted,) = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, inputs)
    assert result.shape == (2, 16, 14, 14)
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


@installed
def test_outputs_are_not_written_over_by_the_next_call(engine: str, tmp_path: Path) -> None:
    """Each call returns arrays of its own."""
    call = baseline(engine, save(conv_bn_relu(), tmp_path), {"x": normal(1, 8, 14, 14)}, threads=1)
    first = call()[0]
    first[:] = 7
    assert not np.array_equal(first, call()[0])
    assert (first == 7).all()


def test_versions_are_those_of_the_packages() -> None:
    """Every engine is listed, with the version that is installed."""
    assert list(available()) == list(ENGINES)
    assert available()["onnxruntime"] == metadata.version("onnxruntime")


def test_onnxruntime_for_gpus_is_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the distribution for GPUs is installed, its version is ONNX Runtime's."""

    def version(package: str) -> str:
        if package == "onnxruntime-gpu":
            return "1.25.0"
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(baselines.metadata, "version", version)
    assert available() == {"onnxruntime": "1.25.0", "openvino": None}


def test_an_engine_that_fails_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an engine that cannot be prepared the reason is told, beside the versions of all; of one that is not to be
    run, why. ONNX Runtime is timed all the same."""
    monkeypatch.setattr(baselines, "available", lambda: {"onnxruntime": "1.32.0", "openvino": "2026.4"})
    monkeypatch.setitem(sys.modules, "openvino", None)
    path, inputs = Path(save(conv_bn_relu(), tmp_path)), {"x": normal(1, 8, 14, 14)}
    engines = baselines.on_cpu(path, inputs, threads=1)
    assert list(engines.calls) == ["onnxruntime"]
    assert engines.told["onnxruntime"] == {"version": "1.32.0"}
    assert engines.told["openvino"]["version"] == "2026.4"
    assert "openvino" in str(engines.told["openvino"]["unavailable"])
    assert baselines.optional() == ["openvino"]
    engines = baselines.on_cpu(path, inputs, threads=1, without="it crashed")
    assert engines.told["openvino"] == {"version": "2026.4", "unavailable": "it crashed"}
    assert engines.timed({"onnxruntime": [1.0], "openvino": [2.0], "tuned": [3.0]}) == {
        "onnxruntime": [1.0], "tuned": [3.0],
    }  # fmt: skip


def test_an_engine_that_is_not_installed_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without OpenVINO its version is None, and asking for it says what to install."""

    def version(package: str) -> str:
        if package == "openvino":
            raise metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(baselines.metadata, "version", version)
    assert available() == {"onnxruntime": "1.0", "openvino": None}
    with pytest.raises(BaselineUnavailable, match=r"pip install 'tunery\[openvino\]'"):
        baseline("openvino", tmp_path / "model.onnx", {}, threads=1)


def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    """The error lists the engines that there are."""
    with pytest.raises(BaselineUnavailable, match="'tensorrt'; there are onnxruntime, openvino"):
        baseline("tensorrt", tmp_path / "model.onnx", {}, threads=1)
