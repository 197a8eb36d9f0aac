"""Weights in float16: which numbers are, and which weights may become such."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: What rounding may change a tensor by, of its norm. Numbers that float16 has in full precision (from 6.1e-5 on) come
#: to 2^-12 or less; more is lost by those below alone.
MOST_LOST: Final = 2.0**-10


def rounded(weight: NDArray[Any]) -> tuple[NDArray[np.float16] | None, str]:
    """The weights in float16; or None, and why they had better stay float32."""
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16)
    if not np.isfinite(half).all():
        largest = float(np.abs(weight).max())
        return None, f"its weights reach {largest:.3g}, and float16 ends at {float(np.finfo(np.float16).max):g}"
    norm = float(np.linalg.norm(weight.astype(np.float64)))
    lost = float(np.linalg.norm(half.astype(np.float64) - weight.astype(np.float64)))
    if lost > MOST_LOST * norm:
        return None, f"rounding would change its weights by {lost / norm:.1e} of their norm: many are below 6e-05"
    return half, ""


def is_half(weight: NDArray[Any]) -> bool:
    """Whether every number is one of float16."""
    half, _ = rounded(weight)
    return half is not None and bool(np.array_equal(half.astype(weight.dtype), weight))
