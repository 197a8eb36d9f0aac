"""Slots: which channel lies where, and constants brought into that order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.graph.layout import NONE, Slots

SLOTS = st.builds(Slots.in_order, st.integers(1, 70), st.just(16)) | st.builds(
    lambda groups, size: Slots.by_group(groups * size, groups, 16), st.integers(1, 6), st.integers(1, 20)
)


def test_in_order() -> None:
    """Channel c lies in slot c, and the last block is filled up."""
    slots = Slots.in_order(5, 4)
    assert slots.channels == (0, 1, 2, 3, 4, NONE, NONE, NONE)
    assert (slots.blocks, slots.count, slots.used, slots.is_in_order) == (2, 5, 5, True)
    assert slots.slot_of == (0, 1, 2, 3, 4)


def test_by_group() -> None:
    """Each group begins a block; groups of whole blocks lie in order."""
    slots = Slots.by_group(6, 2, 4)
    assert slots.channels == (0, 1, 2, NONE, 3, 4, 5, NONE)
    assert (slots.used, slots.is_in_order) == (7, False)
    assert slots.slot_of == (0, 1, 2, 4, 5, 6)
    assert Slots.by_group(8, 2, 4) == Slots.in_order(8, 4)


@settings(deadline=None)
@given(parts=st.lists(SLOTS, min_size=1, max_size=4))
def test_joined(parts: list[Slots]) -> None:
    """Blocks lie behind each other, and channels are numbered on, as in a concatenation."""
    joined = Slots.joined(parts)
    assert joined.blocks == sum(part.blocks for part in parts)
    assert sorted(c for c in joined.channels if c != NONE) == list(range(sum(part.count for part in parts)))
    arrays = [np.random.default_rng(i).random(part.count) for i, part in enumerate(parts)]
    filled = [part.fill(array) for part, array in zip(parts, arrays, strict=True)]
    np.testing.assert_array_equal(joined.fill(np.concatenate(arrays)), np.concatenate(filled))


@settings(deadline=None)
@given(slots=SLOTS, data=st.data())
def test_renamed(slots: Slots, data: st.DataObject) -> None:
    """A permutation of channels moves nothing: what the slots hold is the same, by its new name."""
    new_name = data.draw(st.permutations(range(slots.count)))
    values = np.arange(1.0, slots.count + 1)
    permuted = np.empty_like(values)
    permuted[list(new_name)] = values
    np.testing.assert_array_equal(slots.renamed(new_name).fill(permuted), slots.fill(values))


@settings(deadline=None)
@given(slots=SLOTS, axis=st.integers(0, 2))
def test_filled_arrays_are_read_back_by_their_slots(slots: Slots, axis: int) -> None:
    """Along any axis, each channel's values are in its slot, and the slots without a channel are 0."""
    shape = [2, 3, 2]
    shape[axis] = slots.count
    values = np.random.default_rng(0).random(shape).astype("float32") + 1
    filled = slots.fill(values, axis)
    assert filled.dtype == values.dtype
    np.testing.assert_array_equal(np.take(filled, slots.slot_of, axis), values)
    empty = [slot for slot, channel in enumerate(slots.channels) if channel == NONE]
    assert not np.take(filled, empty, axis).any()


@pytest.mark.parametrize("shape", [(5,), (5, 1, 1), (1, 5, 1, 1)])
def test_vector(shape: tuple[int, ...]) -> None:
    """One value a channel becomes one a slot, [1, blocks, 1, 1, block]."""
    vector = Slots.in_order(5, 4).vector(np.arange(1, 6, dtype="float32").reshape(shape))
    assert vector.shape == (1, 2, 1, 1, 4)
    assert vector.reshape(-1).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_padding_that_is_not_finite_is_0_all_the_same() -> None:
    """Slots without a channel hold 0 even where the first channel, which stands in for them, is NaN."""
    assert Slots.in_order(1, 4).fill(np.array([np.nan]))[1:].tolist() == [0, 0, 0]
