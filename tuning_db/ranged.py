"""Runs a library that serves a range of batches: refuses what lies outside, cuts what lies between its points.

For workers, which check it so, and for programs that load libraries. Needs NumPy, and nothing of TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tuning_db.pieces import OutOfRange, Points, Slab

Arrays = list[NDArray[Any]]
#: One of a library's functions: arrays in, arrays out.
Function = Callable[[Sequence[NDArray[Any]]], Arrays]


@dataclass(frozen=True, slots=True)
class Ranged:
    """The model's function for every batch of a range.

    `functions` are the library's, by batch size. `names` are the inputs', and `axes` each one's axis of the batch, None
    for an input that all items share; `slabs` is where an item lies in each output, None for an output that is the same
    for all of them.
    """

    points: Points
    functions: Mapping[int, Function]
    names: Sequence[str]
    axes: Sequence[int | None]
    slabs: Sequence[Slab | None]

    @classmethod
    def of(cls, told: Mapping[str, Any], names: Sequence[str], function: Callable[[str], Function]) -> Self:
        """As a manifest's `range` tells it; `function` finds the library's by their names."""
        return cls(
            Points(told["low"], told["high"], {point["size"]: point["latency_s"] for point in told["points"]}),
            {point["size"]: function(point["function"]) for point in told["points"]},
            names,
            told["axes"],
            [None if slab is None else Slab(**slab) for slab in told["outputs"]],
        )

    def __call__(self, inputs: Sequence[NDArray[Any]]) -> Arrays:
        """OutOfRange, by input and dimension, for a batch outside of the range or for inputs of which the batches
        differ, before anything is run."""
        pieces = self.points.pieces(self._batch(inputs))
        if len(pieces) == 1:
            return self.functions[pieces[0].point](inputs)
        parts: list[Arrays] = []
        for piece in pieces:
            cut = [
                array
                if axis is None
                else np.ascontiguousarray(_along(array, axis, piece.begin, piece.begin + piece.point))
                for array, axis in zip(inputs, self.axes, strict=True)
            ]
            results = self.functions[piece.point](cut)
            parts.append(
                [
                    result
                    if slab is None
                    else _along(result, slab.axis, piece.known * slab.length, result.shape[slab.axis])
                    for result, slab in zip(results, self.slabs, strict=True)
                ]
            )
        return [
            parts[0][number] if slab is None else np.concatenate([part[number] for part in parts], axis=slab.axis)
            for number, slab in enumerate(self.slabs)
        ]

    def _batch(self, inputs: Sequence[NDArray[Any]]) -> int:
        """How many items the inputs hold."""
        low, high = self.points.low, self.points.high
        first: tuple[int, str] | None = None
        for name, array, axis in zip(self.names, inputs, self.axes, strict=True):
            if axis is None:
                continue
            size = array.shape[axis] if axis < array.ndim else 0
            if not low <= size <= high:
                raise OutOfRange(
                    f"input {name!r}: dimension {axis} is {size}; the library serves {low} to {high}, and was not run"
                )
            if first is not None and first[0] != size:
                raise OutOfRange(
                    f"input {name!r}: dimension {axis} is {size}, and that of input {first[1]!r} {first[0]}; "
                    "the library serves equal batches, and was not run"
                )
            first = first or (size, name)
        if first is None:
            raise OutOfRange("no input has the dimension of the range")
        return first[0]


def _along(array: NDArray[Any], axis: int, begin: int, end: int) -> NDArray[Any]:
    return array[(slice(None),) * axis + (slice(begin, end),)]
