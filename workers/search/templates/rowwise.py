"""Template `rowwise`: softmax, normalisations, means: all that a row needs is computed while the row is in cache.

A row's sum or maximum is a chain in which each step waits for the last, and floating-point addition may not be
reordered, so no compiler vectorises it. Here it is split by `rfactor` into partial results for each lane of `vectors`
vector registers, which are then combined as a tree. Elementwise stages run over the row between the reductions;
intermediate rows live in buffers of one row.

A row whose length nothing near a vector divides (a prime, say) is copied once into a buffer padded with the reduction's
identity. The predicate that a split would need instead is lost by TVM's `compute_at`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from tvm import tirx

from workers.search.templates import plain
from workers.search.templates.knobs import Config, Cpu, Geometry, Template
from workers.search.templates.plain import Rows, Stage

#: A loop of at most this many steps is unrolled.
_UNROLLED: Final = 4


class RowwiseTemplate(Template[Cpu]):
    name: ClassVar[str] = "rowwise"
    #: Threads or not; rows that go through the stages together; vectors of partial results; vectors an elementwise
    #: loop takes a step (0: LLVM decides, which also handles what is left of a row).
    knobs: ClassVar[tuple[str, ...]] = ("parallel", "strip", "vectors", "wide")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        row, rows, last = geometry["row"], geometry["rows"], geometry["last"]
        work = geometry["operations"] + plain.EXPENSIVE_COST * geometry["expensive"]
        threads = [0] if cpu.threads < 2 or rows < 2 else [1, 0]
        if work < plain.SERIAL_WORK:
            threads.reverse()
        elif work > 100 * plain.SERIAL_WORK and 1 in threads:
            threads = [1]
        strips = [strip for strip in (1, 2, 4, 8) if last % strip == 0 and strip * row * 8 <= cpu.l1_bytes]
        # A row's sums wait for one another; the shorter the row, the more rows it takes to fill the time.
        usual = 8 if row <= 4 * cpu.lanes else 2
        strips.sort(key=lambda strip: abs(math.log2(strip / usual)))
        vectors = [count for count in (4, 2, 1, 8) if count == 1 or row >= count * cpu.lanes]
        wides = [0, *(wide for wide in (1, 2, 4) if row % (wide * cpu.lanes) == 0)]
        return [
            {"parallel": parallel, "strip": strip, "vectors": count, "wide": wide}
            for parallel in threads
            for strip in strips or [1]
            for count in vectors
            for wide in wides
        ]

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        tasks = geometry["rows"] // config["strip"]
        return [
            *(math.log2(1 + geometry[name]) for name in
              ("rows", "row", "reductions", "stages", "iterations", "expensive", "operations", "bytes")),
            math.log2(1 + tasks),
            float(geometry["row"] % cpu.lanes == 0),
            geometry["row"] * config["strip"] * 4 / cpu.l1_bytes,
            math.log2(cpu.lanes),
            math.log2(cpu.threads),
            float(config["parallel"]),
            math.log2(config["strip"]),
            math.log2(config["vectors"]),
            float(config["wide"]),
        ]  # fmt: skip

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        plain.inline_elementwise(schedule, padding=False)
        rows = plain.rows_of(schedule.mod["main"])
        if rows is None:
            raise ValueError("the function has no rows: its geometry was not made from it")
        parts = [_split_reductions(schedule, stage, config["vectors"], cpu.lanes) for stage in rows.stages]
        output = parts[-1][-1].block
        row = _row_loop(schedule, output, rows, config["strip"])
        for part in reversed([part for stage in parts for part in stage][:-1]):
            schedule.compute_at(part.block, row, preserve_unit_loops=True)
        if config["parallel"]:
            schedule.parallel(row)
        for stage, leading, steps in zip(rows.stages, rows.leading, parts, strict=True):
            trailing = len(stage.extents) - leading
            for part in steps:
                if part.partial or (stage.reduced and part is steps[-1]):
                    _vectorise_part(schedule, part, config["strip"])
                elif not stage.reduced and trailing:
                    loops = schedule.get_loops(part.block)[-trailing:]
                    _vectorise_elements(schedule, stage, loops, config["wide"], cpu.lanes)


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that computes a stage or a step of its reduction."""

    block: Any
    width: int = 1  #: partial results that it computes
    vector: int = 1  #: lanes it computes at a time
    partial: bool = False  #: its first axis are the partial results


def _split_reductions(schedule: Any, stage: Stage, vectors: int, lanes: int) -> list[_Part]:
    """The blocks of a stage in order: for a reduction the partial results, their combination as a tree, the rest."""
    block = schedule.get_sblock(stage.name)
    if not stage.reduced:
        return [_Part(block)]
    length = math.prod(stage.reduced)
    axis = len(stage.written.indices)
    loops = schedule.get_loops(block)
    loop = schedule.fuse(*loops[len(stage.spatial) :])
    copied = []
    width, vector = partial_width(length, vectors, lanes)
    if not width:
        copy = _pad(schedule, stage, block, lanes)
        if copy is None:
            return [_Part(block)]
        copied = [_Part(copy)]
        width = vector = lanes
    parts = []
    for step, lanes_at_once in _tree(width, vector):
        inner = schedule.split(loop, [None, step])[1]
        parts.append(_Part(schedule.rfactor(inner, axis), step, lanes_at_once, partial=True))
        loop = schedule.get_loops(block)[-1]
    return [*copied, *parts, _Part(block)]


def partial_width(length: int, vectors: int, lanes: int) -> tuple[int, int]:
    """How many partial results a reduction over `length` numbers has, and how many are computed at a time.

    (0, 0) when nothing between 5 and `lanes` divides the length and no multiple of a vector does.
    """
    vector = lanes
    while vector >= 4:
        for count in range(vectors, 0, -1):
            if length % (count * vector) == 0:
                return count * vector, vector
        vector //= 2
    odd = [width for width in range(5, lanes + 1) if length % width == 0]
    return (odd[-1], odd[-1]) if odd else (0, 0)


def _tree(width: int, vector: int) -> list[tuple[int, int]]:
    """The widths of a reduction's steps, each with its vector: down to one vector, down to four numbers."""
    steps = [(width, vector)]
    if width > vector:
        steps.append((vector, vector))
    if vector > 4 and vector % 4 == 0:
        steps.append((4, 4))
    return steps


def _pad(schedule: Any, stage: Stage, block: Any, lanes: int) -> Any | None:
    """Copy what a reduction reads into a buffer that the identity pads to whole vectors.

    None where a reduction does more than to collect one row of a buffer: padding what it reads would not pad its terms.
    """
    identity = schedule.get(block).init.value
    terms = [stage.value.a, stage.value.b] if isinstance(stage.value, (tirx.Add, tirx.Max, tirx.Min)) else []
    if len(stage.read) != 1 or len(terms) != 2 or not isinstance(identity, tirx.FloatImm):
        return None
    [access] = stage.read
    position = next(i for i, kind in enumerate(stage.kinds) if kind == "R" and stage.extents[i] > 1)
    collects = all(hasattr(term, "indices") for term in terms) and access.indices[-1].same_as(stage.variables[position])
    whole = math.prod(stage.reduced) == stage.extents[position] == int(access.buffer.shape[-1])
    if not collects or not whole:
        return None
    reads = [region.source for region in schedule.get(block).reads]
    index = next(i for i, buffer in enumerate(reads) if buffer.same_as(access.buffer))
    copy = schedule.cache_read(block, index, "global", consumer_blocks=[block])
    schedule.transform_layout(
        copy,
        ("write", 0),
        lambda *at: (*at[:-1], at[-1] // lanes, at[-1] % lanes),
        pad_value=float(np.float32(identity.value)),
    )
    return copy


def _row_loop(schedule: Any, block: Any, rows: Rows, strip: int) -> Any:
    """The outermost loop, over strips of rows, of the block that writes the output."""
    loops = schedule.get_loops(block)
    leading = rows.leading[-1]
    counting = [i for i in range(leading) if rows.stages[-1].extents[i] > 1]
    if not counting:
        return schedule.fuse(*loops[:leading]) if leading else schedule.add_unit_loop(loops[0])
    last = counting[-1]
    if strip == 1:
        return schedule.fuse(*loops[: last + 1])
    outer, _ = schedule.split(loops[last], [None, strip])
    return schedule.fuse(*loops[:last], outer)


def _vectorise_part(schedule: Any, part: _Part, strip: int) -> None:
    """Order the loops of one step of a reduction, and vectorise those over partial results."""
    partial: list[Any] = []
    summed: list[Any] = []
    others: list[Any] = []
    for loop, axis, kind in _axes(schedule, part.block):
        (partial if part.partial and axis == 0 else summed if kind == "R" else others).append(loop)
    if part.partial:
        [lanes] = partial
        schedule.reorder(*others, *summed, lanes)
        _in_vectors(schedule, lanes, part.width, part.vector)
        steps = math.prod([int(schedule.get(loop).extent) for loop in summed])
        if steps <= _UNROLLED:
            for loop in summed:
                schedule.unroll(loop)
        start = schedule.decompose_reduction(part.block, summed[0])
        _in_vectors(schedule, schedule.get_loops(start)[-1], part.width, part.vector)
        return
    # Rows of a strip are independent: with them innermost their sums do not wait for one another.
    schedule.reorder(*summed, *others)
    if strip > 1:
        for loop in others:
            schedule.unroll(loop)
    if int(schedule.get(summed[-1]).extent) <= 4 * _UNROLLED:
        schedule.unroll(summed[-1])
    schedule.decompose_reduction(part.block, summed[0])


def _in_vectors(schedule: Any, loop: Any, width: int, vector: int) -> None:
    """Unroll and vectorise a loop over `width` numbers. Of one that is vectorised already, nothing is left to do."""
    if int(schedule.get(loop).extent) != width or schedule.get(loop).kind == tirx.ForKind.VECTORIZED:
        return
    if width > vector:
        outer, loop = schedule.split(loop, [None, vector])
        schedule.unroll(outer)
    schedule.vectorize(loop)


def _vectorise_elements(schedule: Any, stage: Stage, loops: list[Any], wide: int, lanes: int) -> None:
    """Vectorise an elementwise stage along its row, in `wide` vectors a step, where these divide it."""
    adjacent = min(stage.contiguous("S"), len(loops))
    if not adjacent:
        return
    fused = schedule.fuse(*loops[len(loops) - adjacent :])
    length = int(schedule.get(fused).extent)
    if wide and length % (wide * lanes) == 0:
        _, several, vector = schedule.split(fused, [None, wide, lanes])
        schedule.unroll(several)
        schedule.vectorize(vector)


def _axes(schedule: Any, block: Any) -> list[tuple[Any, int, str]]:
    """The loops around a block below the outermost, each with number and kind of the axis that it belongs to."""
    loops = schedule.get_loops(block)
    realize = schedule.get(loops[-1]).body
    found = []
    for loop in loops[1:]:
        variable = schedule.get(loop).loop_var
        for number, (axis, value) in enumerate(zip(realize.block.iter_vars, realize.iter_values, strict=True)):
            if any(node.same_as(variable) for node in plain.nodes(value)):
                found.append((loop, number, "R" if int(axis.iter_type) == int(tirx.IterVar.CommReduce) else "S"))
    return found
