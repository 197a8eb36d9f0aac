"""What an attempt says of a library that it cannot publish."""

from __future__ import annotations

from typing import Any

from workers.tuning import disagreement, inaccuracy


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
