"""What every GPU template does with a function's blocks: compute some where others are read, share loops among threads.

Schedule primitives alone, so that a trace replays. What a schedule refuses is not in its trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tvm import s_tir, tirx

from workers.search.templates import plain
from workers.search.templates.knobs import Gpu
from workers.search.templates.plain import Access, Stage

#: Threads that a multiprocessor holds at once, on most architectures.
RESIDENT_THREADS: Final = 1536


def inline_all(schedule: Any) -> list[Any]:
    """Compute every elementwise block where it is read; the blocks that are left."""
    left = []
    for name, _ in plain.nests(schedule.mod["main"]):
        block = schedule.get_sblock(name)
        if not _allowed(schedule.compute_inline, block):
            left.append(block)
    return left


def stages_of(function: tirx.PrimFunc, inline: Callable[[Any], object] = inline_all) -> list[Stage] | None:
    """The function's stages when `inline` has been applied; None if it has a nest that is not understood."""
    schedule = s_tir.Schedule(function)
    inline(schedule)
    [after] = schedule.mod.functions.values()
    found = plain.nests(after)
    stages = [stage for _, stage in found if stage is not None]
    return stages if found and len(stages) == len(found) else None


def uses(access: Access, variable: Any) -> bool:
    """Whether an index depends on the variable."""
    return any(node.same_as(variable) for index in access.indices for node in plain.nodes(index))


def bind_elements(schedule: Any, block: Any, threads: int, elements: int, vector: int) -> None:
    """Share an elementwise block's loops among threads: `elements` times `vector` numbers for each."""
    loops = schedule.get_loops(block)
    loop = schedule.fuse(*loops) if loops else schedule.add_unit_loop(block)
    grid, several, thread, lanes = schedule.split(loop, [None, elements, threads, vector])
    schedule.bind(grid, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    if elements > 1:
        schedule.unroll(several)
    if vector > 1:
        schedule.vectorize(lanes)


def inline_producers(schedule: Any, block: Any) -> None:
    """Compute what a block reads, as far back as can be, where it is read."""
    while True:
        if not [p for p in _around(schedule.get_producers, block) if _allowed(schedule.compute_inline, p)]:
            return


def inline_producer(schedule: Any, block: Any, buffer: Any) -> None:
    """Compute one of the buffers that a block reads, as far back as can be, where the block reads it."""
    for producer in schedule.get_producers(block):
        if any(region.source.same_as(buffer) for region in schedule.get(producer).writes):
            inline_producers(schedule, producer)
            schedule.compute_inline(producer)


def share_fetch(schedule: Any, loop: Any, threads_y: int, threads_x: int, vector: int) -> None:
    """Share a loop that copies among all threads of a block: neighbours copy what lies side by side."""
    _, thread_y, thread_x, lanes = schedule.split(loop, [None, threads_y, threads_x, vector])
    schedule.bind(thread_y, "threadIdx.y")
    schedule.bind(thread_x, "threadIdx.x")
    if vector > 1:
        schedule.vectorize(lanes)


def inline_consumers(schedule: Any, block: Any) -> None:
    """Compute what reads a block as it writes, one reader after the other. ScheduleError if some cannot be.

    Readers must have the block's axes: for one that fuses them, a reshape, TVM asks whether an index is within the
    fused axis in place of what it asked before, and numbers of the padding are.
    """
    while consumers := schedule.get_consumers(block):
        [consumer] = consumers
        # What else it reads may be computed by blocks of its own.
        for producer in schedule.get_producers(consumer):
            if not schedule.get(producer).same_as(schedule.get(block)):
                inline_producers(schedule, producer)
                schedule.compute_inline(producer)
        schedule.reverse_compute_inline(consumer)


def _around(neighbours: Any, block: Any) -> list[Any]:
    found = []
    for neighbour in neighbours(block):
        found += [neighbour, *_around(neighbours, neighbour)]
    return found


def _allowed(inline: Any, block: Any) -> bool:
    """Whether the schedule allowed it. A block that is gone already is refused as well."""
    try:
        inline(block)
    except Exception:
        return False
    return True


def resident_blocks(threads: int, registers: int, shared_bytes: int, gpu: Gpu) -> int:
    """Blocks that a multiprocessor holds at once, about."""
    return max(
        1,
        min(
            RESIDENT_THREADS // threads,
            gpu.registers // (registers * threads),
            2 * gpu.shared_bytes // (shared_bytes + 1),
        ),
    )
