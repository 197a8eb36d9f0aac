"""Winograd's minimal filtering: a convolution with fewer multiplications, at the price of rounding.

F(m × m, r × r) makes m × m pixels from a tile of (m + r - 1)² by as many multiplications, where the direct sum needs
(m r)². Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016; the matrices are made exactly,
by Cook and Toom's construction as in Lavin's wincnn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

#: Points at which polynomials are evaluated, infinity besides: small, and in pairs of opposite sign, for that is where
#: rounding stays small and two rows of a transform share their sums.
_POINTS: Final = (0, 1, -1, 2, -2, Fraction(1, 2), Fraction(-1, 2))

Matrix = tuple[tuple[Fraction, ...], ...]


@cache
def matrices(outputs: int, taps: int) -> tuple[Matrix, Matrix, Matrix]:
    """(Aᵀ, G, Bᵀ): outputs y = Aᵀ[(G g) ⊙ (Bᵀ d)] of taps g over data d, exactly. ValueError for too large a tile."""
    size = outputs + taps - 1
    if size - 1 > len(_POINTS):
        raise ValueError(f"F({outputs}, {taps}) needs more than {len(_POINTS)} points")
    points = [Fraction(p) for p in _POINTS[: size - 1]]
    scale = [_product(p - q for q in points if q != p) for p in points] + [Fraction(1)]
    scale[0] = abs(scale[0])  # a sign that may stand on either side; here Bᵀ has it

    def powers(count: int) -> list[list[Fraction]]:
        rows = [[p**k for k in range(count)] for p in points]
        return [*rows, [Fraction(int(k == count - 1)) for k in range(count)]]

    forward = powers(outputs)
    taps_at = [[value / scale[i] for value in row] for i, row in enumerate(powers(taps))]
    lagrange = [_polynomial([q for q in points if q != p]) for p in points]
    data = []
    for i, p in enumerate(points):
        divisor = _product(p - q for q in points if q != p)
        row = [c / divisor for c in lagrange[i]]
        row = [*row, Fraction(0)]
        data.append([value * scale[i] for value in row])
    # The last row is the polynomial with all points as roots: what the others leave for infinity.
    whole = _polynomial(points)
    data.append(whole)
    transposed = tuple(tuple(forward[i][k] for i in range(size)) for k in range(outputs))
    return transposed, tuple(map(tuple, taps_at)), tuple(map(tuple, data))


def _product(values: Any) -> Fraction:
    result = Fraction(1)
    for value in values:
        result *= value
    return result


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of ∏ (x - root), constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [s - root * c for s, c in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


def transform_weights(weight: NDArray[Any], outputs: int) -> NDArray[np.float32]:
    """[…, r, r] → [tile, tile, …], in double precision before it is rounded."""
    _, taps_at, _ = matrices(outputs, weight.shape[-1])
    g = np.array(taps_at, dtype=np.float64)
    transformed = np.einsum("ak,...kl,bl->ab...", g, weight.astype(np.float64), g)
    return np.asarray(transformed, dtype=np.float32)


def combine(matrix: Matrix, row: Any, read: Callable[[int], Any]) -> Any:
    """Σ matrix[row][k] · read(k), for a row that is known once loops are unrolled.

    Rows that differ in the signs of their odd terms alone are spelled as E + O and E - O, and terms with opposite
    columns as sums and differences of pairs, so that the compiler computes what they share once.
    """
    rows = [_combine_row(matrix, number, read) for number in range(len(matrix))]
    result = rows[-1]
    for number in range(len(matrix) - 2, -1, -1):
        result = tirx.Select(row == number, rows[number], result)
    return result


def _combine_row(matrix: Matrix, number: int, read: Callable[[int], Any]) -> Any:
    own = matrix[number]
    pairs = _opposite_columns(matrix)
    if pairs:
        terms = []
        paired = {column for pair in pairs for column in pair}
        for column, coefficient in enumerate(own):
            if column not in paired and coefficient:
                terms.append(_scaled(coefficient, read(column)))
        for first, second in pairs:
            if own[first]:
                both = read(first) + read(second) if own[first] == own[second] else read(first) - read(second)
                terms.append(_scaled(own[first], both))
        return _sum(terms)
    for index, mirror in enumerate(matrix):
        if index != number and _is_mirror(own, mirror):
            even = _sum([_scaled(c, read(k)) for k, c in enumerate(own) if c and k % 2 == 0])
            # Both rows of a pair spell the odd part with the signs of the first, so that it is one expression.
            signs = own if number < index else mirror
            odd = _sum([_scaled(c, read(k)) for k, c in enumerate(signs) if c and k % 2 == 1])
            return even + odd if number < index else even - odd
    return _sum([_scaled(c, read(k)) for k, c in enumerate(own) if c])


def _is_mirror(one: Sequence[Fraction], other: Sequence[Fraction]) -> bool:
    signs = [1 if k % 2 == 0 else -1 for k in range(len(one))]
    return any(one[1::2]) and any(one[::2]) and all(a == s * b for a, b, s in zip(one, other, signs, strict=True))


def _opposite_columns(matrix: Matrix) -> list[tuple[int, int]]:
    """Pairs of columns that are equal up to alternating signs: those of points p and -p in Aᵀ."""
    columns = list(zip(*matrix, strict=True))
    if len(matrix) >= len(columns):
        return []
    pairs = []
    for k in range(len(columns) - 1):
        if k % 2 == 1 and all(abs(a) == abs(b) for a, b in zip(columns[k], columns[k + 1], strict=True)):
            pairs.append((k, k + 1))
    return pairs


def _scaled(coefficient: Fraction, value: Any) -> Any:
    if coefficient == 1:
        return value
    if coefficient == -1:
        return -value
    return tirx.const(float(coefficient), "float32") * value


def _sum(terms: Sequence[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
