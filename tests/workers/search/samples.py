"""Small computations to search over, a small template for one of them, and synthetic features."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te

from tests.workers.conftest import workload_of
from tuning_db.trials import Workload
from workers.graph.tasks import normalize_mod
from workers.search.templates.knobs import (
    GEOMETRY_ATTR,
    TEMPLATE_ATTR,
    Config,
    Cpu,
    Geometry,
    Template,
    divisors,
)

CPU = Cpu(lanes=8, registers=16, l1_bytes=32 << 10, l2_bytes=512 << 10, threads=2)


class MatmulTemplate(Template[Cpu]):
    """A matrix product in tiles: rows and columns of a tile, and whether the rows of tiles run in parallel."""

    name = "test-matmul"
    knobs = ("rows", "columns", "parallel")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        return [
            {"rows": rows, "columns": columns, "parallel": parallel}
            for parallel in (1, 0)
            for rows in divisors(geometry["m"], 16)
            for columns in divisors(geometry["n"], 64)
        ]

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        block = schedule.get_sblock("c")
        i, j, r = schedule.get_loops(block)
        outer_i, inner_i = schedule.split(i, [None, config["rows"]])
        outer_j, inner_j = schedule.split(j, [None, config["columns"]])
        schedule.reorder(outer_i, outer_j, r, inner_i, inner_j)
        schedule.vectorize(inner_j)
        if config["parallel"]:
            schedule.parallel(outer_i)
        schedule.decompose_reduction(block, r)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        sizes = [math.log2(geometry[name]) for name in ("m", "n", "k")]
        return [*sizes, *(math.log2(config[knob] + 1) for knob in self.knobs)]


TEMPLATES = {MatmulTemplate.name: MatmulTemplate()}


def matmul_module(m: int, n: int, k: int, *, template: bool = False) -> tvm.ir.IRModule:
    """`template` says so in the function's attributes, as the graph does."""
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    function = te.create_prim_func([a, b, c])
    if template:
        geometry = json.dumps({"m": m, "n": n, "k": k})
        function = function.with_attr(TEMPLATE_ATTR, MatmulTemplate.name).with_attr(GEOMETRY_ATTR, geometry)
    return normalize_mod(function)


def matmul(m: int = 16, n: int = 16, k: int = 16) -> Workload:
    return workload_of(matmul_module(m, n, k))


def templated(m: int = 16, n: int = 16, k: int = 16) -> Workload:
    """A matrix product that `MatmulTemplate` can schedule."""
    workload = workload_of(matmul_module(m, n, k, template=True))
    geometry = {"m": m, "n": n, "k": k}
    return Workload(workload.structural_hash, workload.module, MatmulTemplate.name, geometry)


def double() -> Workload:
    """A computation with next to nothing to choose."""
    a = te.placeholder((3,), name="a")
    return workload_of(normalize_mod(te.create_prim_func([a, te.compute((3,), lambda i: a[i] * 2, name="b")])))


def features(seed: int, rows: int = 3) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((rows, 164)).astype(np.float32)
