"""Template `generic`: every other function of loop nests. What it does not understand it leaves as it is.

Elementwise blocks are computed where they are read, the loops of each nest are ordered so that the innermost one runs
over adjacent addresses of what is written, the outermost are shared among threads. Short functions stay on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Final

from tvm import s_tir

from workers.search.templates import plain
from workers.search.templates.knobs import Config, Cpu, Geometry, Template
from workers.search.templates.plain import Stage

#: A reduction of at most this many steps is unrolled: a pooling window.
_WINDOW: Final = 25
#: A thread gets at least this many tasks of a nest whose tasks a knob may cut smaller.
_TASKS_PER_THREAD: Final = 4


class GenericTemplate(Template[Cpu]):
    name: ClassVar[str] = "generic"
    #: Threads or not; vectors that the innermost loop takes a step (0: LLVM decides); whether a reduction's short loops
    #: are unrolled; whether padding is computed where it is read (1) or first (0); side of square tiles of a transpose.
    knobs: ClassVar[tuple[str, ...]] = ("parallel", "vectors", "unroll", "inline_padding", "tile")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        work = geometry["operations"] + geometry["iterations"] + plain.EXPENSIVE_COST * geometry["expensive"]
        threads = [0] if cpu.threads < 2 else [1, 0]
        if work < plain.SERIAL_WORK:
            threads.reverse()
        elif work > 100 * plain.SERIAL_WORK and 1 in threads:
            threads = [1]
        return [
            {"parallel": parallel, "vectors": vectors, "unroll": unroll, "inline_padding": inline, "tile": tile}
            for parallel in threads
            for tile in ((0, 16, 8, 32) if geometry["transposed"] else (0,))
            for inline in ((0, 1) if geometry["padded"] else (0,))
            for unroll in ((1, 0) if 1 < geometry["reduced"] <= _WINDOW else (0,))
            for vectors in (0, 1, 2, 4)
            if vectors * cpu.lanes <= max(geometry["contiguous"], geometry["inner"])
        ]

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        inner = max(geometry["contiguous"], geometry["inner"])
        return [
            *(math.log2(1 + geometry[name]) for name in
              ("blocks", "stages", "iterations", "expensive", "operations", "bytes", "outer", "inner", "contiguous",
               "reduced")),
            float(geometry["padded"]),
            float(geometry["transposed"]),
            float(geometry["blocks"] - geometry["stages"]),
            (inner % cpu.lanes) / cpu.lanes,
            math.log2(cpu.lanes),
            math.log2(cpu.threads),
            *(float(config[knob]) for knob in self.knobs),
        ]  # fmt: skip

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        # On a copy first: should TVM fail where no primitive said that it would, the function stays as it came.
        try:
            _apply(s_tir.Schedule(schedule.mod), config, cpu)
        except Exception:
            return
        _apply(schedule, config, cpu)


def _apply(schedule: Any, config: Config, cpu: Cpu) -> None:
    plain.inline_elementwise(schedule, padding=bool(config["inline_padding"]))
    stages = [stage for _, stage in plain.nests(schedule.mod["main"]) if stage is not None]
    placed: set[str] = set()
    for stage in stages:
        if stage.reduced:
            placed |= _schedule_reduction(schedule, stage, stages, config, cpu)
    for stage in stages:
        if not stage.reduced and stage.name not in placed:
            _schedule_elements(schedule, stage, config, cpu)


def _legal(act: Callable[[], object]) -> bool:
    """Do it if the schedule allows it; the schedule is unchanged if not."""
    try:
        act()
    except s_tir.ScheduleError:
        return False
    return True


def _schedule_elements(schedule: Any, stage: Stage, config: Config, cpu: Cpu) -> None:
    block = schedule.get_sblock(stage.name)
    loops = schedule.get_loops(block)
    adjacent = stage.contiguous("S")
    crossing = stage.crossing()
    if config["tile"] and not adjacent > 1 and crossing is not None and crossing < len(loops) - 1:
        _tile(schedule, loops, crossing, config)
        return
    inner = max(adjacent, 1)
    tail = schedule.fuse(*loops[len(loops) - inner :])
    if len(loops) > inner:
        task = schedule.fuse(*loops[: len(loops) - inner])
        if config["parallel"] and int(schedule.get(task).extent) < cpu.threads:
            # Too few rows for the threads: their halves, quarters, … become tasks too.
            pieces, tail = schedule.split(tail, [_pieces(int(schedule.get(tail).extent), cpu), None])
            task = schedule.fuse(task, pieces)
    else:
        task, tail = schedule.split(tail, [_pieces(int(schedule.get(tail).extent), cpu), None])
    if config["parallel"]:
        _legal(lambda: schedule.parallel(task))
    if adjacent:
        _in_vectors(schedule, tail, config["vectors"], cpu.lanes)


def _pieces(length: int, cpu: Cpu) -> int:
    """Into how many equal pieces a loop over adjacent numbers is cut for threads: whole vectors if that can be."""
    wanted = cpu.threads * _TASKS_PER_THREAD
    options = [d for d in range(1, min(length, 4 * wanted) + 1) if length % d == 0 and length // d >= cpu.lanes]
    whole = [d for d in options if length // d % cpu.lanes == 0]
    enough = [d for d in whole or options if d >= cpu.threads] or options or [1]
    return min(enough, key=lambda d: abs(d - wanted))


def _tile(schedule: Any, loops: list[Any], crossing: int, config: Config) -> None:
    """Squares of two loops, one of which walks through what is read and the other through what is written."""
    tile = config["tile"]
    cuts = []
    for position in (crossing, len(loops) - 1):
        extent = int(schedule.get(loops[position]).extent)
        side = max(d for d in range(1, min(tile, extent) + 1) if extent % d == 0)
        cuts.append(schedule.split(loops[position], [None, side]))
    (read_outer, read_inner), (written_outer, written_inner) = cuts
    others = [loop for i, loop in enumerate(loops[:-1]) if i != crossing]
    schedule.reorder(*others, read_outer, written_outer, read_inner, written_inner)
    task = schedule.fuse(*others, read_outer)
    if config["parallel"]:
        _legal(lambda: schedule.parallel(task))


def _in_vectors(schedule: Any, loop: Any, vectors: int, lanes: int) -> None:
    """`vectors` whole vectors a step where they divide the loop; else LLVM vectorises it, and what is left over."""
    if vectors and int(schedule.get(loop).extent) % (vectors * lanes) == 0:
        _, several, vector = schedule.split(loop, [None, vectors, lanes])
        schedule.unroll(several)
        schedule.vectorize(vector)


def _schedule_reduction(schedule: Any, stage: Stage, stages: list[Stage], config: Config, cpu: Cpu) -> set[str]:
    """Schedule a reduction with its padding and its epilogue. The names of the elementwise stages placed with it."""
    placed: set[str] = set()
    if stage.kinds != "S" * len(stage.spatial) + "R" * len(stage.reduced) or not stage.spatial:
        return placed
    block = schedule.get_sblock(stage.name)
    loops = schedule.get_loops(block)
    spatial, summed = loops[: len(stage.spatial)], loops[len(stage.spatial) :]
    padding = [
        other for other in stages
        if other.conditional and not other.reduced and plain.readers(stages, other) == [stage]
    ]  # fmt: skip
    # What is padded is computed for a task at once: a task is then a plane and not one of its lines, which overlap.
    shared = max(1, len(spatial) - 2) if padding else max(1, len(spatial) - 1)
    task = schedule.fuse(*spatial[:shared])
    if config["parallel"]:
        _legal(lambda: schedule.parallel(task))
    between, last = (spatial[shared:-1], spatial[-1]) if shared < len(spatial) else ([], None)
    if last is None:
        schedule.decompose_reduction(block, summed[0])
    elif math.prod(stage.reduced) <= _WINDOW:
        # A window: its terms are added up in registers for a vector of outputs at a time.
        vector = _divisor(int(schedule.get(last).extent), config["vectors"] * cpu.lanes)
        if vector > 1:
            outer, inner = schedule.split(last, [None, vector])
            schedule.reorder(*between, outer, *summed, inner)
            schedule.vectorize(inner)
        if config["unroll"]:
            for loop in summed:
                schedule.unroll(loop)
        start = schedule.decompose_reduction(block, summed[0])
        if vector > 1:
            schedule.vectorize(schedule.get_loops(start)[-1])
    elif stage.step_of_last() in (0, 1):
        # Sums of columns: a line of them at a time, so that what is read is read in order.
        schedule.reorder(*between, *summed, last)
        start = schedule.decompose_reduction(block, summed[0])
        _in_vectors(schedule, last, config["vectors"], cpu.lanes)
        _in_vectors(schedule, schedule.get_loops(start)[-1], config["vectors"], cpu.lanes)
    else:
        schedule.decompose_reduction(block, summed[0])
    for other in padding:
        if _legal(lambda name=other.name: schedule.compute_at(schedule.get_sblock(name), task)):  # type: ignore[misc]
            placed.add(other.name)
    for other in plain.readers(stages, stage):
        if other.reduced or plain.readers(stages, stage) != [other]:
            continue
        if _legal(lambda name=other.name: schedule.reverse_compute_at(schedule.get_sblock(name), task)):  # type: ignore[misc]
            placed.add(other.name)
    return placed


def _divisor(number: int, limit: int) -> int:
    """The largest divisor that is at most `limit`; 1 for a limit of 0."""
    return max((d for d in range(1, min(number, limit) + 1) if number % d == 0), default=1)
