"""The one line of what a library or a process said that a message repeats: it may have said any amount."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 300


def first_line(said: object, otherwise: str = "") -> str:
    """The first line of an error or a text that is not blank; `otherwise`, or an error's kind, where there is none."""
    return (_lines(said) or [_nothing(said, otherwise)])[0][:_LONGEST]


def last_line(said: object, otherwise: str = "") -> str:
    """The last such line: compilers, interpreters and TVM put the reason there."""
    return (_lines(said) or [_nothing(said, otherwise)])[-1][:_LONGEST]


def _lines(said: object) -> list[str]:
    return [line.strip() for line in str(said).splitlines() if line.strip()]


def _nothing(said: object, otherwise: str) -> str:
    return otherwise or (type(said).__name__ if isinstance(said, BaseException) else "")
