"""How a batch is cut into pieces that a library has functions for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning_db.pieces import OutOfRange, Piece, Points


def test_the_fastest_cover() -> None:
    """Of the covers the one that takes the least time, in which the last piece may overlap."""
    points = Points(1, 32, {1: 1.0, 8: 4.0, 32: 10.0})
    assert points.pieces(8) == [Piece(0, 8, 0)]
    assert points.pieces(3) == [Piece(0, 1, 0), Piece(1, 1, 0), Piece(2, 1, 0)]
    assert points.pieces(9) == [Piece(0, 8, 0), Piece(8, 1, 0)] or points.pieces(9)[0].point == 1
    # Seven times one would take longer than eight of which one is known already.
    assert sorted(piece.point for piece in points.pieces(15)) == [8, 8]
    assert points.pieces(15)[-1].known == 1
    for batch in (0, 33, -1):
        with pytest.raises(OutOfRange, match="1 to 32"):
            points.pieces(batch)


def test_a_point_is_run_by_its_own_function() -> None:
    """A batch that was compared with the reference in one piece is run in one, though two would be faster."""
    assert Points(1, 4, {1: 1.0, 2: 2.5}).pieces(2) == [Piece(0, 2, 0)]


@pytest.mark.parametrize(
    ("low", "high", "points"), [(1, 8, [2, 8]), (2, 8, [1, 8]), (1, 8, [1, 9]), (3, 2, [3]), (1, 2, [])]
)
def test_what_is_no_range(low: int, high: int, points: list[int]) -> None:
    """The range's lower end must be a point, and none lies outside of it."""
    with pytest.raises(ValueError, match=r"range|must begin"):
        Points(low, high, dict.fromkeys(points, 1.0))


@given(st.dictionaries(st.integers(1, 40), st.floats(1e-3, 1.0), min_size=1, max_size=4), st.integers(0, 40), st.data())
def test_every_item_is_computed_once(seconds: dict[int, float], more: int, data: st.DataObject) -> None:
    """Whatever the points: pieces lie within the batch, follow each other without a gap, and only what is said to be
    known is computed again."""
    points = Points(min(seconds), max(seconds) + more, seconds)
    batch = data.draw(st.integers(points.low, points.high))
    done = 0
    for piece in points.pieces(batch):
        assert piece.point in seconds
        assert piece.begin >= 0
        assert piece.begin + piece.point <= batch
        assert piece.begin + piece.known == done
        done = piece.begin + piece.point
    assert done == batch
