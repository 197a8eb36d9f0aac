"""What an attempt says of a library that it cannot publish."""

from __future__ import annotations

from workers.tuning import disagreement


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
