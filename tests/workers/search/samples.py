"""Small computations to search over, and synthetic features."""

from __future__ import annotations

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te

from tests.workers.conftest import workload_of
from tuning_db.trials import Workload
from workers.graph.tasks import normalize_mod


def matmul_module(m: int, n: int, k: int) -> tvm.ir.IRModule:
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    return normalize_mod(te.create_prim_func([a, b, c]))


def matmul(m: int = 16, n: int = 16, k: int = 16) -> Workload:
    return workload_of(matmul_module(m, n, k))


def double() -> Workload:
    """A computation with next to nothing to choose."""
    a = te.placeholder((3,), name="a")
    return workload_of(normalize_mod(te.create_prim_func([a, te.compute((3,), lambda i: a[i] * 2, name="b")])))


def features(seed: int, rows: int = 3) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((rows, 164)).astype(np.float32)
