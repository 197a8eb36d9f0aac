"""Quantized models as libraries: imported, compiled, and as near to fp32 as ONNX Runtime's run of the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.workers.conftest import Host, compile_model
from tests.workers.models import matmuls, normal
from tests.workers.quantize.test_quantize import ask, images, npz, residual_net
from tuning_db.keys import TensorSpec
from workers.packaging.reference import Comparison, run
from workers.quantize import __main__ as quantizer
from workers.quantize.request import SOURCE, Recipe


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_library(mode: str, host: Host, tmp_path: Path) -> None:
    """On the samples it was calibrated on, a library has no more noise than ONNX Runtime's run; the verdict tells both
    ratios of each output."""
    if mode == "static":
        request = ask(tmp_path, residual_net(), npz(tmp_path, x=images()))
    else:
        inputs = (TensorSpec("x", "float32", (3, 8)),)
        request = ask(tmp_path, matmuls(), npz(tmp_path, x=normal(6, 3, 8)), inputs, Recipe(None))
    report: Any = quantizer.run(request)
    compiled = compile_model(onnx.load(request.target), host, tmp_path)
    comparison = Comparison(
        str(compiled.reference), {"it": str(compiled.untuned)}, compiled.inputs, threads=1, rounds=1, min_sample_s=1e-4,
        fp32=str(Path(request.target).with_name(SOURCE)), calibration=request.calibration,
    )  # fmt: skip
    verdict: Any = run(comparison)["checks"]
    assert verdict["it"]["ok"], verdict
    assert verdict["it"]["samples"] == 6
    (told,) = verdict["it"]["quantized"]
    assert told["reference_sqnr_db"] == pytest.approx(report["outputs"][0]["sqnr_db"], abs=0.1)
    assert told["sqnr_db"] > told["reference_sqnr_db"] - 1
    # Of a model that is uploaded quantized there is no fp32; its library agrees all the same.
    alone: Any = run(replace(comparison, fp32=None, calibration=None))["checks"]
    assert alone["it"]["ok"], alone
