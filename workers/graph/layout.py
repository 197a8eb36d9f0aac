"""Which channel each slot of a blocked tensor holds, and constants brought into that order.

A blocked tensor [n, blocks, h, w, block] has blocks × block slots. A slot holds one channel or none, in any order:
so a shuffle of channels moves no data, tensors of any number of channels are concatenated by their blocks, and a
convolution may write its channels in the order that the tensor it is added to has already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

NONE: Final = -1  #: a slot that holds no channel


@dataclass(frozen=True)
class Slots:
    """The channel of each slot, `NONE` for none. Every channel is in exactly one slot."""

    channels: tuple[int, ...]
    block: int

    @classmethod
    def in_order(cls, channels: int, block: int) -> Self:
        """Channel c in slot c, the last block filled up."""
        blocks = -(-channels // block)
        return cls(tuple(range(channels)) + (NONE,) * (blocks * block - channels), block)

    @classmethod
    def by_group(cls, channels: int, groups: int, block: int) -> Self:
        """In order, each group beginning a new block."""
        size = channels // groups
        filled: list[int] = []
        for group in range(groups):
            filled += range(group * size, (group + 1) * size)
            filled += [NONE] * (-size % block)
        return cls(tuple(filled), block)

    @classmethod
    def joined(cls, parts: Iterable[Slots]) -> Self:
        """The blocks of several tensors behind each other, their channels numbered on."""
        filled: list[int] = []
        first, block = 0, 0
        for part in parts:
            filled += [channel + first if channel != NONE else NONE for channel in part.channels]
            first += part.count
            block = part.block
        return cls(tuple(filled), block)

    @property
    def blocks(self) -> int:
        return len(self.channels) // self.block

    @cached_property
    def count(self) -> int:
        """Channels."""
        return sum(channel != NONE for channel in self.channels)

    @cached_property
    def used(self) -> int:
        """Slots up to the last that holds a channel."""
        return max(slot for slot, channel in enumerate(self.channels) if channel != NONE) + 1

    @cached_property
    def is_in_order(self) -> bool:
        return self == Slots.in_order(self.count, self.block)

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """The slot of each channel."""
        found = [0] * self.count
        for slot, channel in enumerate(self.channels):
            if channel != NONE:
                found[channel] = slot
        return tuple(found)

    def renamed(self, new_name: Sequence[int]) -> Slots:
        """The same data after its channels were permuted: what was channel c is now channel `new_name[c]`."""
        return Slots(tuple(new_name[c] if c != NONE else NONE for c in self.channels), self.block)

    def fill(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """`values` with one entry a channel along `axis` → one a slot, 0 where there is no channel."""
        taken = np.take(values, np.maximum(self.channels, 0), axis=axis)
        holds = np.array(self.channels) != NONE
        shape = [1] * taken.ndim
        shape[axis] = len(self.channels)
        return np.where(holds.reshape(shape), taken, np.zeros((), values.dtype))

    def vector(self, values: NDArray[Any]) -> NDArray[Any]:
        """One value a channel → [1, blocks, 1, 1, block]."""
        filled: NDArray[Any] = self.fill(values.reshape(-1)).reshape(1, self.blocks, 1, 1, self.block)
        return np.ascontiguousarray(filled)
