"""Template `gpu-reduce`: softmax, normalisations, means, pooling, products with a vector, depthwise convolutions.

Where all stages of a function share rows, a block of threads computes some rows from the first stage to the last, what
it needs in between in shared memory (TVM's default, `tvm.s_tir.dlight.gpu.general_reduction.GeneralReduction`, has a
row for each block). A row's sum is shared among threads, which TVM then adds up, or is all one thread's: a pooling
window. Functions whose stages share none get a kernel for each stage.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from tvm import s_tir, tirx

from workers.search.templates import plain
from workers.search.templates.gpu_blocks import RESIDENT_THREADS, bind_elements, stages_of, uses
from workers.search.templates.knobs import Config, Geometry, Gpu, Template
from workers.search.templates.plain import Stage

_POWERS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_UNROLLS: Final = (16, 0, 64)
#: Numbers of a row that one thread keeps by itself.
_KEPT: Final = 32


class GpuReduceTemplate(Template[Gpu]):
    name: ClassVar[str] = "gpu-reduce"
    #: Rows of a block; threads that share a row; whether what is costly and read more than once is kept in shared
    #: memory (1) or computed again (0); the longest body that is unrolled.
    knobs: ClassVar[tuple[str, ...]] = ("across", "along", "store", "unroll")

    def configs(self, geometry: Geometry, gpu: Gpu) -> list[Config]:
        stores = (1, 0) if geometry["stored_bytes"] else (0,)
        work = geometry["rows"] * max(geometry["length"], geometry["columns"])
        found: list[Config] = [
            {"across": across, "along": along, "store": store, "unroll": unroll}
            for across in _POWERS
            for along in _POWERS
            for store in stores
            for unroll in _UNROLLS
            if min(gpu.warp, work) <= across * along <= gpu.threads
            # More than twice what there is helps nobody.
            and across < 2 * geometry["rows"]
            and (along == 1 or along < 2 * max(geometry["length"], geometry["columns"]))
            and across * (store * geometry["stored_bytes"] + 64) <= gpu.shared_bytes
            and not (store and along == 1 and geometry["columns"] > _KEPT)
        ]
        return sorted(found, key=lambda config: (_cost(geometry, config, gpu), _UNROLLS.index(config["unroll"])))

    def features(self, geometry: Geometry, config: Config, gpu: Gpu) -> list[float]:
        across, along = config["across"], config["along"]
        blocks = math.ceil(geometry["rows"] / across)
        return [
            *(math.log2(1 + geometry[name]) for name in
              ("rows", "length", "columns", "reductions", "stages", "iterations", "expensive", "operations", "bytes",
               "stored_bytes")),
            *(float(geometry[name]) for name in ("joined", "beside", "conditional")),
            math.log2(gpu.multiprocessors),
            math.log2(blocks),
            math.log2(blocks / gpu.multiprocessors),
            math.log2(across * along),
            math.log2(math.ceil(geometry["length"] / along)),
            math.log2(1 + blocks * across * along / gpu.multiprocessors / RESIDENT_THREADS),
            (-geometry["length"] % along) / along,
            (-geometry["rows"] % across) / across,
            math.log2(1 + config["store"] * across * geometry["stored_bytes"]),
            *(math.log2(1 + config[knob]) for knob in self.knobs),
        ]  # fmt: skip

    def apply(self, schedule: Any, geometry: Geometry, config: Config, gpu: Gpu) -> None:
        _prepare(schedule, store=bool(config["store"]))
        stages = [stage for _, stage in plain.nests(schedule.mod["main"]) if stage is not None]
        rows = _rows(stages, schedule.mod["main"])
        if rows is None:
            for stage in stages:
                _alone(schedule, stage, config, beside=bool(geometry["beside"]))
        else:
            blocks = [(schedule.get_sblock(stage.name), stage) for stage in stages]
            _together(schedule, blocks, rows, config, beside=bool(geometry["beside"]))


def geometry_of(function: tirx.PrimFunc) -> Geometry | None:
    """None for a function that does not reduce, or has a stage that is not understood."""
    stages = stages_of(function, lambda schedule: _prepare(schedule, store=True))
    again = stages_of(function, lambda schedule: _prepare(schedule, store=False))
    if stages is None or again is None or not any(stage.reduced for stage in stages):
        return None
    rows, rows_again = (_rows(found, function) for found in (stages, again))
    reductions = [stage for stage in again if stage.reduced]
    heaviest = max(reductions, key=lambda stage: stage.iterations)
    last = stages[-1]
    counted = math.prod(last.extents[i] for i in rows) if rows is not None else math.prod(heaviest.spatial)
    kept = [stage for stage in stages[:-1] if not stage.reduced] if rows is not None else []
    return {
        "rows": counted,
        "length": max(math.prod(stage.reduced) for stage in reductions),
        "columns": last.iterations // counted if rows is not None else 1,
        "joined": int(rows is not None and rows_again is not None),
        "reductions": len(reductions),
        "stages": len(again),
        "iterations": sum(stage.iterations for stage in again),
        "expensive": sum(stage.expensive * stage.iterations for stage in again),
        "operations": sum(stage.operations * stage.iterations for stage in again),
        "bytes": plain.parameter_bytes(function),
        "stored_bytes": sum(
            stage.iterations // counted * plain.item_bytes(str(stage.written.buffer.dtype)) for stage in kept
        ),
        # Whether neighbours in memory belong to rows that are neighbours, and not to one row.
        "beside": int(_beside(heaviest)),
        "conditional": int(any(stage.conditional for stage in again)),
    }


def _prepare(schedule: Any, *, store: bool) -> None:
    """Compute elementwise stages where they are read, but with `store` what is costly and read by several; give a
    function that ends in a sum a stage that copies it."""
    for name, _ in plain.nests(schedule.mod["main"]):
        stages = [stage for _, stage in plain.nests(schedule.mod["main"]) if stage is not None]
        stage = next((stage for stage in stages if stage.name == name), None)
        if stage is None or stage.reduced:
            continue
        reading = plain.readers(stages, stage)
        again = len(reading) > 1 or any(reader.iterations > stage.iterations for reader in reading)
        if not (store and stage.expensive and again):
            with contextlib.suppress(s_tir.ScheduleError):  # an output
                schedule.compute_inline(schedule.get_sblock(name))
    found = plain.nests(schedule.mod["main"])
    last = found[-1][1] if found else None
    written = [stage for _, stage in found if stage is not None and _is_output(stage, schedule.mod["main"])]
    if last is not None and last.reduced and last.spatial and written == [last]:
        schedule.cache_write(schedule.get_sblock(last.name), 0, "local")


def _is_output(stage: Stage, function: tirx.PrimFunc) -> bool:
    return any(stage.written.buffer.same_as(parameter) for parameter in function.params)


def _rows(stages: Sequence[Stage], function: tirx.PrimFunc) -> tuple[int, ...] | None:
    """The loops of the last stage that count rows: those that say which of the reductions' results it reads.

    None if the stages share no rows: if another has an output too, or one computes other rows.
    """
    last = stages[-1]
    if last.reduced or [stage for stage in stages if _is_output(stage, function)] != [last]:
        return None
    reduced = [stage.written.buffer for stage in stages if stage.reduced]
    used: set[int] = set()
    for access in last.read:
        if any(access.buffer.same_as(buffer) for buffer in reduced):
            used |= {i for i, v in enumerate(last.variables) if last.extents[i] > 1 and uses(access, v)}
    rows = tuple(sorted(used))
    return rows if all(_own_rows(stage, last, rows) is not None for stage in stages) else None


def _own_rows(stage: Stage, last: Stage, rows: Sequence[int]) -> list[int] | None:
    """The loops of a stage that count the rows of the last one; None if it does not compute these rows in order.

    A sum has no other spatial loops, nor has what is one number of a row; all else has the loops of the last stage.
    """
    axes = [v for v, kind, e in zip(stage.variables, stage.kinds, stage.extents, strict=True) if kind == "S" and e > 1]
    written = [i for i, n in zip(stage.written.indices, stage.written.buffer.shape, strict=True) if int(n) > 1]
    if stage is not last and not (
        len(axes) == len(written) and all(i.same_as(axis) for i, axis in zip(written, axes, strict=True))
    ):
        return None
    extents = [last.extents[i] for i in rows]
    if stage.reduced or math.prod(stage.extents) == math.prod(extents):
        own = [i for i, kind in enumerate(stage.kinds) if kind == "S" and stage.extents[i] > 1]
        return own if [stage.extents[i] for i in own] == extents else None
    return list(rows) if stage.extents == last.extents else None


def _beside(stage: Stage) -> bool:
    """Whether what a reduction reads lies side by side along its last spatial axis, and not along what it sums."""
    spatial = [i for i, kind in enumerate(stage.kinds) if kind == "S" and stage.extents[i] > 1]
    summed = [i for i, kind in enumerate(stage.kinds) if kind == "R" and stage.extents[i] > 1]
    if not spatial or not summed:
        return bool(spatial)
    for access in stage.read:
        steps = access.coefficients([stage.variables[spatial[-1]], stage.variables[summed[-1]]])
        if steps is not None and steps[0] == 1 and steps[1] != 1:
            return True
    return False


def _axes(beside: bool) -> tuple[str, str]:
    """The axes of threads that count rows, and that share one."""
    return ("threadIdx.x", "threadIdx.y") if beside else ("threadIdx.y", "threadIdx.x")


def _together(
    schedule: Any, blocks: Sequence[tuple[Any, Stage]], rows: tuple[int, ...], config: Config, *, beside: bool
) -> None:
    across_axis, along_axis = _axes(beside)
    *before, (last_block, last) = blocks
    count = math.prod(last.extents[i] for i in rows)
    # With one axis for rows and one along them, TVM can tell what a stage needs of another.
    for block, stage in blocks:
        own = _own_rows(stage, last, rows)
        if own is None:
            raise ValueError("a stage computes other rows than the last one")
        others = [i for i in range(len(stage.extents)) if i not in own]
        schedule.transform_block_layout(block, _fused(stage.variables, stage.extents, [own, others]))
    for block, stage in before:
        own = _own_rows(stage, last, rows) or []
        shape = [int(size) for size in stage.written.buffer.shape]
        used = [next((i for i, v in enumerate(stage.variables) if v.same_as(x)), -1) for x in stage.written.indices]
        counting = [d for d, axis in enumerate(used) if axis in own]
        others = [d for d in range(len(shape)) if d not in counting]
        if shape:
            layout = _fused(stage.variables[:1] * len(shape), shape, [counting, others])
            schedule.transform_layout(block, ("write", 0), layout)
    row, column = schedule.get_loops(last_block)
    grid, row = schedule.split(row, [None, config["across"]])
    # Threads are bound when every stage has its place: TVM takes a loop over threads to be shared by all of them.
    shared = [(last_block, column, last)]
    for block, stage in reversed(before):
        number = not stage.reduced and stage.iterations == count  # of a row: each of its threads computes it
        # TVM gives a sum to each thread that shared in it. In shared memory one thread would write it, and where
        # several rows have a place each, TVM sees no need of a barrier before the others read.
        schedule.set_scope(block, 0, "local" if config["along"] == 1 or stage.reduced or number else "shared")
        schedule.compute_at(block, row, preserve_unit_loops=True)
        if not number:
            shared.append((block, schedule.get_loops(block)[-1], stage))
    schedule.bind(grid, "blockIdx.x")
    schedule.bind(row, across_axis)
    for block, loop, stage in shared:
        outer = _share(schedule, loop, along_axis, config)
        if stage.reduced and config["along"] == 1:
            schedule.decompose_reduction(block, outer)


def _fused(variables: Sequence[Any], extents: Sequence[int], groups: Sequence[Sequence[int]]) -> tirx.IndexMap:
    """The index map that makes one axis of each group of axes."""
    axes = [tirx.Var(f"i{number}", variable.ty) for number, variable in enumerate(variables)]
    fused = []
    for group in groups:
        index: Any = tirx.IntImm(axes[0].ty, 0)
        for axis in group:
            if extents[axis] > 1:
                index = index * extents[axis] + axes[axis]
        fused.append(index)
    return tirx.IndexMap(axes, fused, None)


def _alone(schedule: Any, stage: Stage, config: Config, *, beside: bool) -> None:
    """A kernel of its own for a stage."""
    block = schedule.get_sblock(stage.name)
    if not stage.reduced:
        bind_elements(schedule, block, config["across"] * config["along"], 1, 1)
    elif stage.spatial:
        # Of a sum that threads share, TVM forgets which rows there are none of as the sum is written: a copy knows.
        copy = schedule.cache_write(block, 0, "local")
        found = [other for _, other in plain.nests(schedule.mod["main"]) if other is not None]
        sums = next((other for other in found if other.name == stage.name), None)
        copied = next((other for other in found if other.written.buffer.same_as(stage.written.buffer)), None)
        if sums is None or copied is None:
            raise ValueError("a sum is written in no order that is understood")
        rows = tuple(i for i, extent in enumerate(copied.extents) if extent > 1)
        _together(schedule, [(block, sums), (copy, copied)], rows, config, beside=beside)
    else:
        loops = schedule.get_loops(block)
        schedule.bind(schedule.add_unit_loop(loops[0]), "blockIdx.x")
        outer = _share(schedule, schedule.fuse(*loops), "threadIdx.x", config)
        if config["along"] == 1:
            schedule.decompose_reduction(block, outer)


def _share(schedule: Any, loop: Any, axis: str, config: Config) -> Any:
    """Share a loop among the threads of a row; the loop that is left for each of them."""
    if config["along"] > 1:
        loop, thread = schedule.split(loop, [None, config["along"]])
        schedule.reorder(thread, loop)
        schedule.bind(thread, axis)
    if config["unroll"]:
        schedule.annotate(loop, "pragma_auto_unroll_max_step", config["unroll"])
        schedule.annotate(loop, "pragma_unroll_explicit", 1)
    return loop


def _cost(geometry: Geometry, config: Config, gpu: Gpu) -> float:
    """The less the better a guess: a multiprocessor's time in steps of a thread, about; it claims no more."""
    across, along = config["across"], config["along"]
    threads = across * along
    blocks = math.ceil(geometry["rows"] / across)
    rounds = math.ceil(blocks / gpu.multiprocessors)
    steps = math.ceil(geometry["length"] / along) + math.ceil(geometry["columns"] / along)
    # Threads of a warp should read side by side; adding up takes its own steps, and a barrier beyond a warp.
    width = across if geometry["beside"] else along
    apart = 1 + 3 * max(0.0, 1 - width / 8) if geometry["length"] > 1 else 1.0
    adding = 2 * geometry["reductions"] * math.log2(along) * (2 if along > gpu.warp or geometry["beside"] else 1)
    busy = min(rounds, max(1, RESIDENT_THREADS // threads)) * math.ceil(threads / gpu.warp) / 16
    again = 1 if config["store"] or not geometry["stored_bytes"] else 1.5
    partial = math.ceil(threads / gpu.warp) * gpu.warp / threads
    return rounds * math.ceil(threads / gpu.warp) * (steps * apart * again + adding) * partial / min(1.0, busy)
