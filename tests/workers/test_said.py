"""The line that is repeated of what a library or a process said."""

from __future__ import annotations

import pytest

from workers.said import first_line, last_line


@pytest.mark.parametrize(
    ("said", "first", "last"),
    [
        ("one\n  two  \n\n", "one", "two"),
        (ValueError("why\nwhere"), "why", "where"),
        ("\n \n", "nothing", "nothing"),
        ("long" * 1000, "long" * 75, "long" * 75),
    ],
)
def test_lines(said: object, first: str, last: str) -> None:
    """Blank lines do not count, and a line is cut."""
    assert (first_line(said, "nothing"), last_line(said, "nothing")) == (first, last)


def test_an_error_without_words() -> None:
    """An error that says nothing is told by its kind."""
    assert last_line(MemoryError()) == first_line(MemoryError("\n")) == "MemoryError"
