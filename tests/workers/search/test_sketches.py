"""Which schedules break the register rule, on schedules made by hand."""

from __future__ import annotations

import tvm

from tests.workers.conftest import Host
from tests.workers.search.samples import matmul_module
from workers.search.sketches import register_rule_broken
from workers.search.templates.knobs import Cpu

CPU = Cpu(lanes=8, registers=16, l1_bytes=32 << 10, l2_bytes=512 << 10, threads=2)


def schedule(rows: int, columns: int, *, parallel: bool = True, vector: bool = True) -> tvm.s_tir.Schedule:
    """A product of 64x64 matrices in tiles of so many rows and columns, summed in the innermost tile."""
    schedule = tvm.s_tir.Schedule(matmul_module(64, 64, 64))
    block = schedule.get_sblock("c")
    i, j, r = schedule.get_loops(block)
    outer_i, inner_i = schedule.split(i, [None, rows])
    outer_j, inner_j = schedule.split(j, [None, columns])
    schedule.reorder(outer_i, outer_j, r, inner_i, inner_j)
    if vector:
        schedule.vectorize(inner_j)
    if parallel:
        schedule.parallel(outer_i)
    schedule.decompose_reduction(block, r)
    return schedule


def test_fits(host: Host) -> None:
    """Up to two registers fewer than there are may hold sums."""
    assert register_rule_broken(schedule(4, 16), CPU) is None
    assert register_rule_broken(schedule(8, 8), CPU) is None
    assert register_rule_broken(schedule(8, 16), CPU) == "128 accumulators in 16 registers of 8"
    assert register_rule_broken(schedule(64, 16), Cpu(16, 32, 1, 1, 1)) == "1024 accumulators in 32 registers of 16"
    assert register_rule_broken(schedule(16, 16), Cpu(16, 32, 1, 1, 2)) is None


def test_vectors(host: Host) -> None:
    """The innermost loop is vectorised, by four elements at least."""
    assert register_rule_broken(schedule(8, 4), CPU) is None
    assert register_rule_broken(schedule(8, 2), CPU) == "vectors of 2 elements"
    assert register_rule_broken(schedule(4, 16, vector=False), CPU) == "vectors of 1 elements"


def test_parallel(host: Host) -> None:
    """Something runs in parallel, on a CPU that has several threads."""
    serial = schedule(4, 16, parallel=False)
    assert register_rule_broken(serial, CPU) == "nothing runs in parallel"
    assert register_rule_broken(serial, Cpu(8, 16, 1, 1, threads=1)) is None


def test_without_reduction(host: Host) -> None:
    """Of a computation without a reduction nothing is said."""
    a = tvm.te.placeholder((4, 4), name="a")
    function = tvm.te.create_prim_func([a, tvm.te.compute((4, 4), lambda i, j: a[i, j] * 2, name="b")])
    assert register_rule_broken(tvm.s_tir.Schedule(tvm.IRModule({"main": function})), CPU) is None


def test_beside_other_loops(host: Host) -> None:
    """A block that comes after other loops in its innermost loop is found there."""
    a = tvm.te.placeholder((64, 64), name="a")
    r = tvm.te.reduce_axis((0, 64), name="r")
    row = tvm.te.compute((64,), lambda i: tvm.te.sum(a[i, r], axis=r), name="row")
    half = tvm.te.compute((64,), lambda i: row[i] / 2, name="half")
    beside = tvm.s_tir.Schedule(tvm.IRModule({"main": tvm.te.create_prim_func([a, half])}))
    [i] = beside.get_loops(beside.get_sblock("half"))
    beside.compute_at(beside.get_sblock("row"), i)
    assert register_rule_broken(beside, CPU) == "nothing runs in parallel"
