"""Winograd's matrices, against convolution in exact arithmetic; and weights as the variants want them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.sym import Analyzer

from workers.graph import winograd
from workers.graph.computations import Convolution, Dense, Pooling, pack_weights, winograd_tiles
from workers.graph.parts import Window

SIZES = [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5), (1, 1), (3, 2), (2, 2)]
NUMBERS = st.fractions(min_value=-5, max_value=5, max_denominator=8)


@pytest.mark.parametrize(("outputs", "taps"), SIZES)
@settings(deadline=None)
@given(data=st.data())
def test_matrices_are_exact(outputs: int, taps: int, data: st.DataObject) -> None:
    """Aᵀ[(G g) ⊙ (Bᵀ d)] is the convolution itself, in fractions."""
    back, forth_taps, forth = winograd.matrices(outputs, taps)
    size = outputs + taps - 1
    d = data.draw(st.lists(NUMBERS, min_size=size, max_size=size))
    g = data.draw(st.lists(NUMBERS, min_size=taps, max_size=taps))

    def times(matrix: winograd.Matrix, vector: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]

    products = [a * b for a, b in zip(times(forth_taps, g), times(forth, d), strict=True)]
    wanted = [sum((g[k] * d[i + k] for k in range(taps)), Fraction(0)) for i in range(outputs)]
    assert times(back, products) == wanted


def test_tile_that_is_too_large() -> None:
    """There are eight points, so a tile has at most eight places."""
    winograd.matrices(6, 3)
    with pytest.raises(ValueError, match="more than 7 points"):
        winograd.matrices(7, 3)


@pytest.mark.parametrize(("outputs", "taps"), SIZES)
@pytest.mark.parametrize("which", [0, 2])
def test_combinations_are_the_rows_of_the_matrix(outputs: int, taps: int, which: int) -> None:
    """However sums are shared among rows, each row is its own linear combination: seen on unit vectors."""
    matrix = winograd.matrices(outputs, taps)[which]
    simplify = Analyzer().simplify
    for row in range(len(matrix)):
        for unit in range(len(matrix[0])):
            expression = winograd.combine(
                matrix, tirx.const(row, "int32"), lambda k, unit=unit: tirx.const(float(k == unit), "float32")
            )
            assert simplify(expression).value == pytest.approx(float(matrix[row][unit]), rel=1e-6), (row, unit)


@pytest.mark.parametrize(("outputs", "taps"), [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)])
def test_weights_are_transformed(outputs: int, taps: int) -> None:
    """G g Gᵀ for every pair of channels, [tile, tile, …] in front, to the last bit of float32."""
    weight = np.random.default_rng(0).standard_normal((3, 2, taps, taps)).astype("float32")
    transformed = winograd.transform_weights(weight, outputs)
    g = np.array([[float(x) for x in row] for row in winograd.matrices(outputs, taps)[1]])
    assert transformed.shape == (outputs + taps - 1, outputs + taps - 1, 3, 2)
    assert transformed.dtype == np.float32
    np.testing.assert_allclose(transformed[:, :, 2, 1], g @ weight[2, 1].astype("float64") @ g.T, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("convolution", "reads"),
    [
        (Convolution(1, 2, 9, 9, 2, 16, 32, Window((3, 2))), 32),
        (Convolution(1, 2, 9, 9, 2, 16, 21, Window((3, 2))), 32),  # a unit of 8: the last one is not full
        (Convolution(1, 2, 9, 9, 2, 16, 19), 32),
        (Convolution(1, 1, 9, 9, 2, 16, 5), 16),
        (Convolution(1, 1, 9, 9, 2, 16, 3, plain_channels=3), 3),
        (Convolution(1, 2, 9, 9, 2, 16, 24, table=11), 11),
        (Convolution(1, 4, 9, 9, 2, 16, 64, groups=2), 32),
    ],
)
def test_weights_are_packed_by_blocks_and_units(convolution: Convolution, reads: int) -> None:
    """[out slots, reads, kh, kw] → [out block, unit of reads, kh, kw, read, slot], 0 beyond what is read."""
    slots = convolution.out_blocks * convolution.block
    weight = np.random.default_rng(0).random((slots, reads, *convolution.window.kernel)).astype("float32")
    packed = pack_weights(convolution, "direct", weight)
    assert packed.shape == convolution.weight_shape
    unit = convolution.unit
    assert convolution.in_units * unit >= min(reads, convolution.in_slots // convolution.groups)
    for o, ic, h, w, ii, v in np.ndindex(packed.shape):
        read = ic * unit + ii
        wanted = weight[o * 16 + v, read, h, w] if read < reads else 0
        assert packed[o, ic, h, w, ii, v] == wanted


def test_weights_of_others_are_packed() -> None:
    """A depthwise window's [slots, kh, kw] → [blocks, kh, kw, slot]; a dense layer's like those of one pixel."""
    window = np.random.default_rng(0).random((32, 3, 5)).astype("float32")
    packed = pack_weights(Pooling("depthwise", 1, 2, 9, 9, 16, Window((3, 5))), "window", window)
    assert packed.shape == (2, 3, 5, 16)
    np.testing.assert_array_equal(packed[1, 2, 4], window[16:, 2, 4])
    dense = np.random.default_rng(0).random((32, 24, 1, 1)).astype("float32")
    packed = pack_weights(Dense(4, 24, 20, 16), "dense", dense)
    assert packed.shape == (2, 3, 1, 1, 8, 16)
    assert packed[1, 2, 0, 0, 5, 3] == dense[19, 21, 0, 0]


def test_packed_winograd_weights() -> None:
    """[tile, tile, out block, unit, read, slot]."""
    weight = np.random.default_rng(0).random((32, 16, 3, 3)).astype("float32")
    packed = pack_weights(Convolution(1, 1, 9, 9, 2, 16, 16, Window((3, 3))), "winograd4", weight)
    assert packed.shape == (6, 6, 2, 1, 16, 16)
    np.testing.assert_array_equal(packed[2, 3, 1, 0, 7, 4], winograd.transform_weights(weight, 4)[2, 3, 20, 7])


@pytest.mark.parametrize(
    ("convolution", "tiles"),
    [
        (Convolution(1, 1, 14, 14, 1, 16, 16, Window((3, 3))), (2, 4, 6)),
        (Convolution(1, 1, 7, 7, 1, 16, 16, Window((3, 3))), (2, 6)),
        (Convolution(1, 1, 4, 4, 1, 16, 16, Window((3, 3))), (2,)),
        (Convolution(1, 1, 14, 14, 1, 16, 16, Window((5, 5))), (2, 4)),
        (Convolution(1, 1, 14, 14, 1, 16, 16, Window((3, 3), (2, 2))), ()),
        (Convolution(1, 1, 14, 14, 1, 16, 16, Window((3, 3), (1, 1), (2, 2))), ()),
        (Convolution(1, 1, 14, 14, 1, 16, 16, Window((3, 5))), ()),
        (Convolution(1, 2, 14, 14, 1, 16, 24, Window((3, 3))), ()),
        (Convolution(1, 2, 14, 14, 2, 16, 32, Window((3, 3)), groups=2), ()),
        (Convolution(1, 1, 14, 14, 1, 16, 3, Window((3, 3)), plain_channels=3), ()),
        # 36 / 16 × 2^25 tiles' places × 64 slots: more than 32 bits can number.
        (Convolution(2, 4, 4098, 4098, 4, 16, 64, Window((3, 3))), ()),
    ],
)
def test_where_winograd_applies(convolution: Convolution, tiles: tuple[int, ...]) -> None:
    """Square windows of 3 and 5, dense channels in whole blocks, tiles that are mostly inside, indices of 32 bits."""
    assert winograd_tiles(convolution) == tiles
