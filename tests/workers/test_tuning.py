"""What an attempt says of a library that it cannot publish."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.conftest import Compiled
from tuning_db.errors import LoadFailed
from workers.packaging.reference import Comparison
from workers.tuning import combined, compared, disagreement, inaccuracy


def test_a_wrong_library_of_winograds_algorithm() -> None:
    """Whoever may have asked for more rounding than the check lets pass is told how to ask for less."""
    said = disagreement("tuned", "output 'y' is off by 1", {"direct": 3, "winograd4": 2, "winograd6": 1})
    assert said.startswith("the tuned library does not agree with ONNX Runtime: output 'y' is off by 1; 3 of its 6 ")
    assert "--no-winograd" in said
    assert "options.winograd: false" in said


def test_a_wrong_library_without_it() -> None:
    """What does not help is not advised."""
    said = disagreement("tuned", "output 'y' is off by 1", {"direct": 3})
    assert said == "the tuned library does not agree with ONNX Runtime: output 'y' is off by 1"


def test_a_quantized_model_that_loses_too_much() -> None:
    """Every output has to keep what was asked; the message names the worst and what to leave out. Outputs that are
    equal, or are no floats, keep all."""
    report: dict[str, Any] = {
        "samples": 32,
        "outputs": [{"output": name, "sqnr_db": sqnr} for name, sqnr in (("a", 21.0), ("b", 18.25), ("c", None))],
        "layers": [{"node": f"conv{number}"} for number in range(9)],
    }
    assert inaccuracy("int8", report, 18) is None
    said = inaccuracy("int8", report, 30)
    assert said is not None
    assert "int8 keeps 18.2 dB of output 'b' on 32 samples, and quantization.min_sqnr_db is 30" in said
    assert "'conv0', 'conv1', 'conv2': leave some out with quantization.exclude" in said


def test_engines_of_several_functions() -> None:
    """An engine that did not run one of a range's functions has no time for all of them, and why is told."""
    check = {"untuned": {"ok": True}}
    first = {"checks": check, "samples_s": {"untuned": [1.0], "e": [2.0]}, "engines": {"e": {"version": "1"}}}
    lost = {"checks": check, "samples_s": {"untuned": [1.5]}, "engines": {"e": {"version": "1", "unavailable": "no"}}}
    for verdicts in ([first, lost], [lost, first]):
        verdict = combined(verdicts)
        assert verdict["samples_s"] == {"untuned": [2.5]}
        assert verdict["engines"] == {"e": {"version": "1", "unavailable": "no"}}


def test_an_engine_that_crashes(conv: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another engine than ONNX Runtime kills the process that compares, it is asked again without it, and what
    happened is told; a library that kills it does so twice."""
    (tmp_path / "openvino.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "openvino-2.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: openvino\nVersion: 2.0\n"
    (tmp_path / "openvino-2.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    comparison = Comparison(
        str(conv.reference), {"untuned": str(conv.untuned)}, conv.inputs, threads=1, rounds=1, min_sample_s=1e-4
    )
    warnings: list[str] = []
    [answer] = compared([comparison], tmp_path / "comparison.json", 120, warnings.append)
    assert answer["checks"]["untuned"]["ok"] is True
    assert set(answer["samples_s"]) == {"untuned", "onnxruntime"}
    assert answer["engines"]["openvino"]["version"] == "2.0"
    assert "ended with signal 11" in answer["engines"]["openvino"]["unavailable"]
    [warning] = warnings
    assert warning.startswith("compared again without openvino: ")
    missing = replace(comparison, libraries={"untuned": str(tmp_path / "missing.so")})
    with pytest.raises(LoadFailed, match=r"missing\.so"):
        compared([missing], tmp_path / "comparison.json", 120, warnings.append)
