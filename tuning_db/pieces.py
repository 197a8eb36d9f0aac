"""How a library with functions for a few batch sizes serves those between them: into which pieces a batch is cut.

For workers and for programs that load libraries; the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class OutOfRange(ValueError):
    """A batch that the library was not made for. Nothing was run."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Where one item of a batch lies in a tensor: `length` indices of `axis` behind each other."""

    axis: int
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Items `begin` to `begin + points` of a batch, computed by the function for so many. The first `known` of them are
    in the result already, from the piece before."""

    begin: int
    point: int
    known: int


@dataclass(frozen=True, slots=True)
class Points:
    """The batch sizes that a library has a function for, and seconds of one call of each.

    `low` is one of them: then every batch of the range can be covered, the last piece overlapping the one before it
    where none fits exactly. ValueError for what is no such range.
    """

    low: int
    high: int
    seconds: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.seconds or not 1 <= self.low <= self.high:
            raise ValueError(f"{self.low} to {self.high} with {len(self.seconds)} points is no range")
        if min(self.seconds) != self.low or max(self.seconds) > self.high:
            raise ValueError(f"the points {sorted(self.seconds)} must begin with {self.low} and end by {self.high}")

    def pieces(self, batch: int) -> list[Piece]:
        """The pieces that take the least time in all. OutOfRange for a batch outside of the range.

        A batch with a function of its own is run by that, even where pieces would be faster: it was compared with the
        reference at this very size.
        """
        if not self.low <= batch <= self.high:
            raise OutOfRange(f"a batch of {batch} lies outside of what the library serves, {self.low} to {self.high}")
        if batch in self.seconds:
            return [Piece(0, batch, 0)]
        # Each state is how many items are left; a piece may be larger than that, but not than the batch.
        fitting = [point for point in self.seconds if point <= batch]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for left in range(1, batch + 1):
            best.append(min((self.seconds[p] + best[max(left - p, 0)][0], p) for p in fitting))
        found: list[Piece] = []
        left = batch
        while left > 0:
            point = best[left][1]
            known = max(point - left, 0)
            found.append(Piece(batch - left - known, point, known))
            left -= point
        return found
