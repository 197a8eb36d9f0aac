"""Which sampled sketches are not worth a build: what their innermost loops must keep in registers does not fit.

MetaSchedule samples tile sizes blindly. Where the innermost tile needs more accumulators than a CPU has vector
registers, each step of the reduction spills; where its vectors are narrower than any vector register, or nothing runs
in parallel, most of the machine stands still. Of 40 samples of a blocked 3x3 convolution on AVX-512 this refuses 26:
their median is 8 GFLOP/s on one thread, that of the others 27. Asking for vectors of whole registers would refuse
nearly all of them, the fastest too. These are figures of one layer, and of the same 40 samples that the limit on
vectors was chosen by: they show why it is where it is, not how well it does on other layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import tvm

from workers.search.templates.knobs import Cpu

#: Numbers in the narrowest vector register that a CPU may have: 128 bits.
_NARROWEST: Final = 4
_PARALLEL: Final = int(tvm.tirx.ForKind.PARALLEL)
_VECTORIZED: Final = int(tvm.tirx.ForKind.VECTORIZED)


@dataclass(frozen=True, slots=True)
class InnerTile:
    """What one step of the heaviest reduction works on."""

    elements: int  #: results that the loops inside the innermost reduction loop run over
    vector: int  #: elements of its vectorised loops; 1 without any
    parallel: int  #: iterations that run in parallel; 1 without any
    work: int  #: iterations of all loops


def register_rule_broken(schedule: tvm.s_tir.Schedule, cpu: Cpu) -> str | None:
    """Why the schedule is not worth a build; None if it may be. Says nothing of computations without a reduction."""
    tile = max(_inner_tiles(schedule), key=lambda tile: tile.work, default=None)
    if tile is None:
        return None
    if tile.parallel < min(2, cpu.threads):
        return "nothing runs in parallel"
    if tile.vector < min(_NARROWEST, cpu.lanes):
        return f"vectors of {tile.vector} elements"
    if math.ceil(tile.elements / cpu.lanes) > cpu.registers - 2:  # operands need registers too
        return f"{tile.elements} accumulators in {cpu.registers} registers of {cpu.lanes}"
    return None


def _inner_tiles(schedule: tvm.s_tir.Schedule) -> list[InnerTile]:
    """One for each block that reduces, where all its loops have numbers for extents."""
    tiles = []
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        loops = [schedule.get(loop) for loop in schedule.get_loops(block)]
        if not loops or not all(isinstance(loop.extent, tvm.tirx.IntImm | int) for loop in loops):
            continue
        realize = _realize_within(loops[-1].body, schedule.get(block))
        reduced = [
            value
            for variable, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
            if variable.iter_type == tvm.tirx.IterVar.CommReduce
        ]
        if not reduced:
            continue
        reducing = {variable for value in reduced for variable in tvm.tirx.analysis.undefined_vars(value)}
        extents = [int(loop.extent) for loop in loops]
        inside = 0  # the first loop within the innermost one that reduces
        for number, (loop, extent) in enumerate(zip(loops, extents, strict=True)):
            if extent > 1 and any(loop.loop_var.same_as(variable) for variable in reducing):
                inside = number + 1
        kinds = [int(loop.kind) for loop in loops]
        tiles.append(
            InnerTile(
                elements=math.prod(extents[inside:]),
                vector=math.prod(e for e, kind in zip(extents, kinds, strict=True) if kind == _VECTORIZED),
                parallel=math.prod(e for e, kind in zip(extents, kinds, strict=True) if kind == _PARALLEL),
                work=math.prod(extents),
            )
        )
    return tiles


def _realize_within(body: Any, block: Any) -> Any:
    """Where the block is bound to loops: it is the body of the innermost one, or stands there beside other loops."""
    found = body.seq if isinstance(body, tvm.tirx.SeqStmt) else [body]
    realizes = (statement for statement in found if isinstance(statement, tvm.s_tir.SBlockRealize))
    return next(realize for realize in realizes if realize.block.same_as(block))
