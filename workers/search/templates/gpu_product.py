"""Template `gpu-product`: matrix products and convolutions on a GPU's ordinary cores, through shared memory.

A convolution is a product whose left matrix is read through index expressions (implicit GEMM). Both are brought into
the form out[batch, row, column] += left[batch, row, sum] * right[batch, column, sum] by `reindex` and layouts that fuse
axes, as TVM's default rule does (`tvm.s_tir.dlight.gpu.matmul.Matmul`), padded to whole tiles, and what was fused
around the product is computed where it is read: before it as tiles are fetched, after it as results are written.

Columns are whatever lies side by side in the output, so that neighbouring threads write neighbouring addresses.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import tvm
from tvm import tirx
from tvm.s_tir.dlight.gpu.matmul import IterKind, detect_iter_traits, make_iter_fusion_index_map

from workers.search.templates import gpu_fragments, plain
from workers.search.templates.gpu_blocks import (
    inline_consumers,
    inline_producer,
    inline_producers,
    resident_blocks,
    share_fetch,
    uses,
)
from workers.search.templates.knobs import Config, Geometry, Gpu, Template, divisors
from workers.search.templates.plain import Access, Stage

#: What tensor cores multiply, by a geometry's "tensor"; 0 is none of it.
TENSOR_TYPES: Final = ("", "float16", "int8")
#: Choices that are handed to a search at most, and tilings among them.
_CHOICES: Final = 384
_TILINGS: Final = 96
#: Registers that a thread needs beside its sums and the numbers it multiplies: addresses, counters.
_OTHER_REGISTERS: Final = 32
_MOST_REGISTERS: Final = 255  #: of one thread
_THREADS: Final = (1, 2, 4, 7, 8, 14, 16, 28, 32, 64)  #: 7, 14 and 28 are images' sides
_PER_THREAD: Final = (1, 2, 4, 7, 8)
_STEPS: Final = (4, 8, 16, 32)
_LONGEST_BODY: Final = 512  #: multiplications of one thread that are written out
_ENOUGH_WARPS: Final = 8  #: of a multiprocessor, to hide that each of them waits


@dataclass(frozen=True, slots=True)
class Product:
    """A stage that multiplies two buffers and sums, and which of them has the rows."""

    stage: Stage
    left: int  #: which of the block's reads has the rows
    geometry: Geometry


def product_of(function: tirx.PrimFunc) -> Product | None:
    """The function's only reduction, if it is a product of two buffers; None if it is none, or there are others.

    The geometry names sizes; bits of the numbers that are multiplied and summed (`left_bits`, `right_bits`,
    `sum_bits`), whether they are floats, which of `TENSOR_TYPES` they are; whether neighbours in memory lie along the
    summed axis (`left_along`, `right_along`); whether an operand is read as windows (`left_window`, …), how many of its
    numbers can be read at once (`left_lanes`, …), and whether these cross from one axis to the next (`left_crossed`,
    …); what is computed before (`conditional`) and after (`expensive`, `operations`).
    """
    found = plain.nests(function)
    stages = [stage for _, stage in found if stage is not None]
    reductions = [stage for stage in stages if stage.reduced]
    if len(stages) < len(found) or len(reductions) != 1:
        return None
    [stage] = reductions
    types = _multiplied(stage)
    kinds = [_kind(stage, position) for position in range(len(stage.extents))]
    if types is None or None in kinds or not {"left", "right", "sum"} <= {*kinds}:
        return None
    by_kind = {name: [i for i, kind in enumerate(kinds) if kind == name] for name in ("batch", "left", "right", "sum")}
    sizes = {name: math.prod(stage.extents[i] for i in positions) for name, positions in by_kind.items()}
    columns = _side_by_side(stage.written, stage, by_kind)
    left = 0 if columns == "right" else 1
    first, second = stage.read if left == 0 else reversed(stage.read)
    rows = "left" if left == 0 else "right"
    lanes = [_lanes(access, stage, by_kind) for access in (first, second)]
    after = [
        other for other in stages
        if other is not stage and any(b.same_as(stage.written.buffer) for b in _read_buffers(other, stages))
    ]  # fmt: skip
    if not all(_has_axes_of(other, stage, after) for other in (stage, *after)):
        return None
    return Product(
        stage,
        left,
        {
            "batch": sizes["batch"],
            "rows": sizes[rows],
            "columns": sizes["right" if rows == "left" else "left"],
            "sum": sizes["sum"],
            "left_bits": types[left],
            "right_bits": types[1 - left],
            "tensor": _tensor_type(stage),
            "sum_bits": _bits(stage.written.buffer.dtype),
            "floats": int(str(stage.written.buffer.dtype).startswith("float")),
            "left_along": int(_side_by_side(first, stage, by_kind) == "sum"),
            "right_along": int(_side_by_side(second, stage, by_kind) == "sum"),
            "conditional": int(any(s.conditional for s in stages if s not in after)),
            "expensive": sum(other.expensive for other in after),
            "operations": sum(other.operations for other in after),
            "left_window": int(_is_window(first, stage)),
            "right_window": int(_is_window(second, stage)),
            "left_lanes": lanes[0][0],
            "right_lanes": lanes[1][0],
            "left_crossed": int(lanes[0][1]),
            "right_crossed": int(lanes[1][1]),
        },
    )


def _bits(dtype: Any) -> int:
    return 8 * plain.item_bytes(str(dtype))


def _multiplied(stage: Stage) -> tuple[int, int] | None:
    """Bits of the two numbers that the stage multiplies, in the order that it reads them; None if it is no product."""
    total = stage.value
    if not isinstance(total, tirx.Add) or len(stage.read) != 2 or stage.read[0].buffer.same_as(stage.read[1].buffer):
        return None
    if not (isinstance(total.a, tvm.ir.TensorLoad) and total.a.source.same_as(stage.written.buffer)):
        return None
    if not isinstance(total.b, tirx.Mul):
        return None
    factors = [f.value if isinstance(f, tirx.Cast) else f for f in (total.b.a, total.b.b)]
    if not all(isinstance(factor, tvm.ir.TensorLoad) for factor in factors):
        return None
    if not all(factor.source.same_as(a.buffer) for factor, a in zip(factors, stage.read, strict=True)):
        return None
    first, second = (_bits(access.buffer.dtype) for access in stage.read)
    return first, second


def _tensor_type(stage: Stage) -> int:
    """Which of the `TENSOR_TYPES` are multiplied and summed as tensor cores do; 0 for none of them."""
    types = {str(access.buffer.dtype) for access in stage.read}
    sums = gpu_fragments.SUMS
    return next(
        (i for i, t in enumerate(TENSOR_TYPES) if types == {t} and str(stage.written.buffer.dtype) == sums.get(t)), 0
    )


def _kind(stage: Stage, position: int) -> str | None:
    """What an axis counts: of extent 1 nothing (""), else what of the operands depends on it."""
    if stage.extents[position] == 1:
        return ""
    variable = stage.variables[position]
    kinds: Mapping[tuple[bool, ...], str] = {
        (True, True, True): "batch", (True, False, True): "left", (False, True, True): "right",
        (True, True, False): "sum",
    }  # fmt: skip
    return kinds.get(tuple(uses(access, variable) for access in (*stage.read, stage.written)))


def _axes_of(index: Any, stage: Stage) -> list[int]:
    used = list(plain.nodes(index))
    return [i for i, v in enumerate(stage.variables) if stage.extents[i] > 1 and any(node.same_as(v) for node in used)]


def _is_window(access: Access, stage: Stage) -> bool:
    """Whether an index adds up axes, as a convolution's do."""
    return any(len(_axes_of(index, stage)) > 1 for index in access.indices)


def _lanes(access: Access, stage: Stage, by_kind: Mapping[str, Sequence[int]]) -> tuple[int, bool]:
    """How many numbers lie side by side and begin at a multiple of as many, up to 16; whether so many cross from one
    axis to the next.

    1 for windows, which begin anywhere, and where axes do not follow one another address by address.
    """
    near = [i for i in by_kind.get(_side_by_side(access, stage, by_kind), ()) if uses(access, stage.variables[i])]
    far = [i for i, v in enumerate(stage.variables) if i not in near and stage.extents[i] > 1 and uses(access, v)]
    steps = access.coefficients([stage.variables[i] for i in [*near, *far]])
    walked = [math.prod(stage.extents[i] for i in near[position + 1 :]) for position in range(len(near))]
    if not near or _is_window(access, stage) or steps is None or steps[: len(near)] != walked:
        return 1, False
    lanes = math.gcd(16, math.prod(stage.extents[i] for i in near), *steps[len(near) :])
    return lanes, stage.extents[near[-1]] % lanes != 0


def _side_by_side(access: Access, stage: Stage, by_kind: Mapping[str, Sequence[int]]) -> str:
    """The kind of axis along which neighbours in memory lie.

    A window's own axis moves through an image as the image's axis does, but not far: it does not count.
    """
    windows = {
        axis
        for index in access.indices
        for axis in _axes_of(index, stage)
        if stage.kinds[axis] == "R" and len(_axes_of(index, stage)) > 1
    }
    nearest: tuple[int, str] | None = None
    for kind, positions in by_kind.items():
        for position in set(positions) - windows:
            if uses(access, stage.variables[position]):
                step = access.coefficients([stage.variables[position]])
                distance = abs(step[0]) if step else 1 << 40  # not the same at every place
                if nearest is None or distance < nearest[0]:
                    nearest = distance, kind
    return nearest[1] if nearest else ""


def _has_axes_of(other: Stage, product: Stage, after: Sequence[Stage]) -> bool:
    """Whether a stage writes, and reads of what the product leads to, one number for each of its own in their order."""
    axes = [v for v, e, kind in zip(other.variables, other.extents, other.kinds, strict=True) if e > 1 and kind == "S"]
    followed = [product.written.buffer, *(stage.written.buffer for stage in after)]
    for access in (other.written, *(a for a in other.read if any(a.buffer.same_as(b) for b in followed))):
        indices = [i for i, size in zip(access.indices, access.buffer.shape, strict=True) if int(size) > 1]
        if len(indices) != len(axes) or not all(i.same_as(axis) for i, axis in zip(indices, axes, strict=True)):
            return False
    return True


def _read_buffers(stage: Stage, stages: Sequence[Stage]) -> list[Any]:
    """The buffers that a stage reads, directly or through others."""
    found: list[Any] = []
    pending = [stage]
    while pending:
        for access in pending.pop().read:
            if not any(access.buffer.same_as(buffer) for buffer in found):
                found.append(access.buffer)
                pending += [other for other in stages if other.written.buffer.same_as(access.buffer)]
    return found


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix that is multiplied, as the schedule sees it."""

    buffer: Any  #: what the product reads, after normalising
    along: bool  #: the summed axis is its last one


@dataclass(frozen=True, slots=True)
class Normal:
    """A product in the form that is tiled: its block, whose loops are batch, row, column and sum."""

    block: Any
    left: Operand
    right: Operand


def normalise(
    schedule: Any, product: Product, padding: Sequence[int], *, left_along: bool, right_along: bool
) -> Normal:
    """Bring the product into the form [batch, row, column, sum], padded to multiples of `padding` in that order.

    `left_along`: the left matrix is [batch, row, sum] instead of [batch, sum, row]; `right_along` likewise.
    """
    block = schedule.get_sblock(product.stage.name)
    reads = [schedule.reindex(block, ("read", number)) for number in (0, 1)]
    write = schedule.reindex(block, ("write", 0))
    traits = detect_iter_traits(schedule.get(block))
    if traits is None:
        raise ValueError("the function's reduction is no product: its geometry was not made from it")
    *operands, out, whole = traits
    batch, summed = IterKind.kIter_S, IterKind.kIter_K
    rows, columns = (IterKind.kIter_I, IterKind.kIter_J) if product.left == 0 else (IterKind.kIter_J, IterKind.kIter_I)
    for number, (read, operand) in enumerate(zip(reads, operands, strict=True)):
        is_left = number == product.left
        own = rows if is_left else columns
        order = [batch, own, summed] if (left_along if is_left else right_along) else [batch, summed, own]
        schedule.transform_layout(read, ("write", 0), make_iter_fusion_index_map(operand, order))
    schedule.transform_layout(write, ("read", 0), make_iter_fusion_index_map(out, [batch, rows, columns]))
    schedule.transform_block_layout(block, make_iter_fusion_index_map(whole, [batch, rows, columns, summed]))
    schedule.pad_einsum(block, list(padding))
    buffers = [schedule.get(block).reads[number].source for number in (0, 1)]
    return Normal(block, Operand(buffers[product.left], left_along), Operand(buffers[1 - product.left], right_along))


def number_of(schedule: Any, block: Any, buffer: Any) -> int:
    """Which of the block's reads is of the buffer."""
    return next(i for i, region in enumerate(schedule.get(block).reads) if region.source.same_as(buffer))


class GpuProductTemplate(Template[Gpu]):
    name: ClassVar[str] = "gpu-product"
    version: ClassVar[int] = 2
    #: Threads of a block along rows and along columns; results that each of them sums, along both; steps of the sum
    #: whose numbers are fetched together; whether a thread's results lie side by side (0) or in fours all over its
    #: block's tile; which matrices are staged in shared memory (1: left, 2: right, 3: both); whether they are turned
    #: there so that rows or columns lie side by side; numbers that a thread fetches at once; steps of the sum that are
    #: written out.
    knobs: ClassVar[tuple[str, ...]] = (
        "threads_i", "threads_j", "tile_i", "tile_j", "step", "spread", "stage", "turn", "vector", "unroll",
    )  # fmt: skip

    def configs(self, geometry: Geometry, gpu: Gpu) -> list[Config]:
        found: dict[tuple[int, ...], Config] = {}
        for rank, tiling in enumerate(_best_tilings(geometry, gpu)):
            for rest in _rests(geometry, tiling, rank):
                config = {**tiling, **rest}
                found.setdefault(tuple(config[knob] for knob in self.knobs), config)
        return sorted(found.values(), key=lambda config: (_cost(geometry, config, gpu), _unusual(config)))[:_CHOICES]

    def features(self, geometry: Geometry, config: Config, gpu: Gpu) -> list[float]:
        plan = _plan(geometry, config)
        threads = config["threads_i"] * config["threads_j"]
        resident = resident_blocks(threads, plan.registers, plan.shared_bytes, gpu)
        return [
            *(math.log2(1 + geometry[name]) for name in
              ("batch", "rows", "columns", "sum", "expensive", "operations")),
            *(geometry[name] / 32 for name in ("left_bits", "right_bits", "sum_bits")),
            *(float(geometry[name]) for name in
              ("floats", "left_along", "right_along", "left_window", "right_window", "left_crossed", "right_crossed",
               "conditional")),
            *(math.log2(geometry[name]) for name in ("left_lanes", "right_lanes")),
            *(math.log2(1 + config[knob]) for knob in self.knobs),
            math.log2(gpu.multiprocessors),
            math.log2(threads),
            math.log2(plan.blocks),
            math.log2(plan.blocks / gpu.multiprocessors),
            plan.blocks / gpu.multiprocessors / math.ceil(plan.blocks / gpu.multiprocessors),
            math.log2(plan.padded_work / max(1, work_of(geometry))),
            math.log2(1 + plan.registers * threads / gpu.registers),
            math.log2(1 + plan.shared_bytes / gpu.shared_bytes),
            math.log2(1 + resident * threads / gpu.warp),
            math.log2(config["tile_i"] * config["tile_j"] / (config["tile_i"] + config["tile_j"])),
            math.log2(plan.tile_i * plan.tile_j / (plan.tile_i + plan.tile_j)),
            math.log2(1 + geometry["sum"] / config["step"]),
        ]  # fmt: skip

    def apply(self, schedule: Any, geometry: Geometry, config: Config, gpu: Gpu) -> None:
        product = product_of(schedule.mod["main"])
        if product is None:
            raise ValueError("the function is no product: its geometry was not made from it")
        turn = bool(config["turn"])
        pieces_i, tile_i = _spread(config["tile_i"], config["spread"])
        pieces_j, tile_j = _spread(config["tile_j"], config["spread"])
        threads_i, threads_j = config["threads_i"], config["threads_j"]
        normal = normalise(
            schedule,
            product,
            [1, config["tile_i"] * threads_i, config["tile_j"] * threads_j, config["step"]],
            left_along=bool(geometry["left_along"]) and not turn,
            right_along=bool(geometry["right_along"]) and not turn,
        )
        block = normal.block
        for operand, bit in ((normal.left, 1), (normal.right, 2)):
            if not config["stage"] & bit:
                inline_producer(schedule, block, operand.buffer)
        batch, i, j, k = schedule.get_loops(block)
        block_i, virtual_i, thread_i, own_i = schedule.split(i, [None, pieces_i, threads_i, tile_i])
        block_j, virtual_j, thread_j, own_j = schedule.split(j, [None, pieces_j, threads_j, tile_j])
        outer_k, inner_k = schedule.split(k, [None, config["step"]])
        schedule.reorder(
            batch, block_i, block_j, virtual_i, virtual_j, thread_i, thread_j, outer_k, inner_k, own_i, own_j
        )
        schedule.bind(schedule.fuse(batch, block_i, block_j), "blockIdx.x")
        if pieces_i > 1:
            schedule.bind(virtual_i, "vthread.y")
        if pieces_j > 1:
            schedule.bind(virtual_j, "vthread.x")
        schedule.bind(thread_i, "threadIdx.y")
        schedule.bind(thread_j, "threadIdx.x")
        schedule.annotate(
            thread_j, "pragma_auto_unroll_max_step", config["unroll"] * config["tile_i"] * config["tile_j"]
        )
        schedule.annotate(thread_j, "pragma_unroll_explicit", 1)
        result = schedule.cache_write(block, 0, "local")
        schedule.reverse_compute_at(result, thread_j, preserve_unit_loops=True)
        for operand, bit, along in (
            (normal.left, 1, geometry["left_along"]),
            (normal.right, 2, geometry["right_along"]),
        ):
            if config["stage"] & bit:
                shared = schedule.cache_read(block, number_of(schedule, block, operand.buffer), "shared")
                schedule.compute_at(shared, outer_k, preserve_unit_loops=True)
                *_, first, second = schedule.get_loops(shared)
                turned = bool(along) and not operand.along
                if turned:
                    # Fetched in the order of memory all the same.
                    schedule.reorder(second, first)
                    first, second = second, first
                vector = _fetched(geometry, config, "left" if bit == 1 else "right")
                share_fetch(schedule, schedule.fuse(first, second), threads_i, threads_j, vector)
                if along:
                    # Lines of a power of two would put what neighbouring threads read or write into the same bank.
                    schedule.storage_align(shared, 0, axis=1, factor=8, offset=4 if turned else vector)
                inline_producers(schedule, shared)
        inline_consumers(schedule, result)
        schedule.decompose_reduction(block, outer_k)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from a choice."""

    tile_i: int  #: of a block
    tile_j: int
    blocks: int
    padded_work: int  #: multiplications, those of padding included
    registers: int  #: of a thread, about
    shared_bytes: int


def _plan(geometry: Geometry, config: Config) -> _Plan:
    tile_i, tile_j = config["threads_i"] * config["tile_i"], config["threads_j"] * config["tile_j"]
    blocks = geometry["batch"] * math.ceil(geometry["rows"] / tile_i) * math.ceil(geometry["columns"] / tile_j)
    summed = math.ceil(geometry["sum"] / config["step"]) * config["step"]
    stage = config.get("stage", 3)
    shared = sum(
        # With what is added to each line against bank conflicts.
        (tile + 8) * (config["step"] + 8) * geometry[bits] // 8
        for bit, tile, bits in ((1, tile_i, "left_bits"), (2, tile_j, "right_bits"))
        if stage & bit
    )
    own = config["tile_i"] * config["tile_j"] + config["tile_i"] + config["tile_j"]
    return _Plan(tile_i, tile_j, blocks, blocks * tile_i * tile_j * summed, own + _OTHER_REGISTERS, shared)


def work_of(geometry: Geometry) -> int:
    return geometry["batch"] * geometry["rows"] * geometry["columns"] * geometry["sum"]


def _tilings(geometry: Geometry, gpu: Gpu) -> Iterator[Config]:
    rows, columns, summed = geometry["rows"], geometry["columns"], geometry["sum"]
    steps = [s for s in _STEPS if s < 2 * summed]
    # A sum that no usual step divides (3 × 7 × 7) may have a divisor near one.
    steps += [d for d in divisors(summed, 32) if d > 4 and d not in steps and all(summed % s for s in steps)][-2:]
    for threads_i, threads_j in itertools.product(_THREADS, _THREADS):
        if not gpu.warp <= threads_i * threads_j <= min(512, gpu.threads) and (threads_i, threads_j) != (4, 4):
            continue
        for tile_i, tile_j in itertools.product(_PER_THREAD, _PER_THREAD):
            # More than twice what there is helps nobody.
            too_large = threads_i * tile_i >= 2 * max(rows, 4) or threads_j * tile_j >= 2 * max(columns, 4)
            for step in () if too_large else steps:
                tiling = {
                    "threads_i": threads_i, "threads_j": threads_j, "tile_i": tile_i, "tile_j": tile_j, "step": step,
                }  # fmt: skip
                plan = _plan(geometry, tiling)
                fits = plan.registers * threads_i * threads_j <= gpu.registers and plan.registers <= _MOST_REGISTERS
                if fits and plan.shared_bytes <= gpu.shared_bytes:
                    yield tiling


def _best_tilings(geometry: Geometry, gpu: Gpu) -> list[Config]:
    """The likeliest first, each with its two likeliest steps: with more, they would all be of a few shapes."""
    ranked = sorted(_tilings(geometry, gpu), key=lambda tiling: (_cost(geometry, tiling, gpu), *tiling.values()))
    shapes: Counter[tuple[int, ...]] = Counter()
    best = []
    for tiling in ranked:
        shape = tuple(tiling[knob] for knob in ("threads_i", "threads_j", "tile_i", "tile_j"))
        shapes[shape] += 1
        if shapes[shape] <= 2:
            best.append(tiling)
    return best[:_TILINGS]


def _rests(geometry: Geometry, tiling: Config, rank: int) -> Iterator[Config]:
    """The other knobs of a tiling, more of them for the likelier tilings."""
    turns = (0, 1) if geometry["left_along"] or geometry["right_along"] else (0,)
    spreads = (0, 1) if max(tiling["tile_i"], tiling["tile_j"]) >= 8 else (0,)
    own = tiling["tile_i"] * tiling["tile_j"]
    unrolls = sorted({steps for steps in (1, 4, tiling["step"]) if own * steps <= _LONGEST_BODY} | {1})
    likely, likelier = rank < _TILINGS // 4, rank < _TILINGS // 16
    for stage in (3, 1, 2, 0) if likelier else (3,):
        widths: dict[tuple[int, ...], int] = {}
        for vector in (1, 2, 4):
            config = {**tiling, "vector": vector}
            fetched = [
                _fetched(geometry, config, side)
                for bit, side in ((1, "left"), (2, "right")) if stage & bit
            ]  # fmt: skip
            widths.setdefault(tuple(fetched), vector)
        vectors = [*reversed(widths.values())]
        for vector in vectors if likely else vectors[:1]:
            for turn in turns if stage else (0,):
                for spread in spreads:
                    for unroll in reversed(unrolls) if likelier else unrolls[-1:]:
                        yield {"spread": spread, "stage": stage, "turn": turn, "vector": vector, "unroll": unroll}


def _unusual(config: Config) -> tuple[int, ...]:
    """Orders choices of equal cost: the more common first."""
    return (
        3 - config["stage"], config["turn"], 1 - config["spread"], -config["vector"], -config["unroll"],
        *config.values(),
    )  # fmt: skip


def _cost(geometry: Geometry, config: Config, gpu: Gpu) -> float:
    """The less the better a guess: a multiprocessor's time, in multiplications of all its lanes.

    A model with a few constants of the order that NVIDIA's tuning guides name, which ranks guesses and claims no more.
    """
    plan = _plan(geometry, config)
    threads = config["threads_i"] * config["threads_j"]
    own = config["tile_i"] * config["tile_j"]
    stage = config.get("stage", 3)
    # A quarter as many numbers come from shared memory in a cycle as are multiplied; several come with one access.
    near = 2 * (config["tile_i"] + config["tile_j"]) / own
    far = 8 * sum(
        geometry[bits] / 32 / (tile if stage & bit else config[own_tile])
        for bit, bits, tile, own_tile in (
            (1, "left_bits", plan.tile_j, "tile_j"), (2, "right_bits", plan.tile_i, "tile_i"),
        )
    )  # fmt: skip
    barrier = 100 / (config["step"] * own * threads / 128) if stage else 0.0
    rounds = math.ceil(plan.blocks / gpu.multiprocessors)
    at_once = min(rounds, resident_blocks(threads, plan.registers, plan.shared_bytes, gpu))
    # Too few warps cannot hide that each waits.
    useful = min(1.0, geometry["rows"] / plan.tile_i) * min(1.0, geometry["columns"] / plan.tile_j)
    idle = max(1.0, _ENOUGH_WARPS / (at_once * useful * math.ceil(threads / gpu.warp)))
    partial = math.ceil(threads / gpu.warp) * gpu.warp / threads
    return rounds * plan.padded_work / plan.blocks * (1 + near + far + barrier) * idle * partial


def _fetched(geometry: Geometry, config: Config, side: str) -> int:
    """Numbers of the left or the right matrix that a thread fetches at once: 16 bytes at most."""
    tile = config["threads_i"] * config["tile_i"] if side == "left" else config["threads_j"] * config["tile_j"]
    line = config["step"] if geometry[f"{side}_along"] else tile
    return math.gcd(config["vector"], line, geometry[f"{side}_lanes"], 128 // geometry[f"{side}_bits"])


def _spread(tile: int, spread: int) -> tuple[int, int]:
    """Pieces of a thread's tile, and their length."""
    return (tile // 4, 4) if spread and tile > 4 and tile % 4 == 0 else (1, tile)
