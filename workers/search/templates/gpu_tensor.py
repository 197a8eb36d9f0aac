"""Template `gpu-tensor`: the computations of `gpu-product` on tensor cores: float16 summed in float32, int8 in int32.

Follows TVM's default rule (`tvm.s_tir.dlight.gpu.matmul.MatmulTensorization`): tiles of both matrices are staged in
shared memory, each warp multiplies fragments of 16 by 16 out of them (CUDA's WMMA), and what it has summed goes through
shared memory too, for how a fragment's numbers are spread over threads is not said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from workers.search.templates import gpu_fragments
from workers.search.templates.gpu_blocks import inline_consumers, inline_producers, resident_blocks, share_fetch
from workers.search.templates.gpu_fragments import COLUMN, ROW, SIDE
from workers.search.templates.gpu_product import TENSOR_TYPES, normalise, number_of, product_of, work_of
from workers.search.templates.knobs import Config, Geometry, Gpu, Template

_CHOICES: Final = 384  #: that are handed to a search at most
_WARPS: Final = (1, 2, 4, 8)
_MOST_WARPS: Final = 8
_FRAGMENTS: Final = (1, 2, 4)
_STEPS: Final = (1, 2, 4)
#: Registers that a thread needs for a fragment of sums, for one that is multiplied, and for addresses.
_SUM_REGISTERS: Final = 8
_FACTOR_REGISTERS: Final = 8
_OTHER_REGISTERS: Final = 40
_MOST_REGISTERS: Final = 255
_ENOUGH_WARPS: Final = 8  #: of a multiprocessor, to hide that each of them waits


class GpuTensorTemplate(Template[Gpu]):
    name: ClassVar[str] = "gpu-tensor"
    version: ClassVar[int] = 2
    #: Warps of a block along rows and along columns; fragments that each of them sums, along both; fragments along the
    #: sum that are fetched together; numbers that a thread copies at once.
    knobs: ClassVar[tuple[str, ...]] = ("warps_i", "warps_j", "fragments_i", "fragments_j", "step", "vector")

    def configs(self, geometry: Geometry, gpu: Gpu) -> list[Config]:
        if not geometry["tensor"] or TENSOR_TYPES[geometry["tensor"]] not in gpu.tensor_types:
            return []
        found = sorted(_choices(geometry, gpu), key=lambda config: (_cost(geometry, config, gpu), *config.values()))
        return found[:_CHOICES]

    def features(self, geometry: Geometry, config: Config, gpu: Gpu) -> list[float]:
        plan = _plan(geometry, config)
        return [
            *(math.log2(1 + geometry[name]) for name in
              ("batch", "rows", "columns", "sum", "expensive", "operations")),
            *(float(geometry[name]) for name in
              ("tensor", "left_along", "right_along", "left_window", "right_window", "left_crossed", "right_crossed",
               "conditional")),
            *(math.log2(geometry[name]) for name in ("left_lanes", "right_lanes")),
            *(math.log2(config[knob]) for knob in self.knobs),
            math.log2(gpu.multiprocessors),
            math.log2(plan.warps),
            math.log2(plan.blocks),
            math.log2(plan.blocks / gpu.multiprocessors),
            plan.blocks / gpu.multiprocessors / math.ceil(plan.blocks / gpu.multiprocessors),
            math.log2(plan.padded_work / max(1, work_of(geometry))),
            math.log2(1 + plan.registers * plan.warps * gpu.warp / gpu.registers),
            math.log2(1 + plan.shared_bytes / gpu.shared_bytes),
            math.log2(1 + _resident_blocks(plan, gpu) * plan.warps),
            math.log2(config["fragments_i"] * config["fragments_j"] / (config["fragments_i"] + config["fragments_j"])),
            math.log2(plan.tile_i * plan.tile_j / (plan.tile_i + plan.tile_j)),
            math.log2(1 + geometry["sum"] / config["step"] / SIDE),
        ]  # fmt: skip

    def apply(self, schedule: Any, geometry: Geometry, config: Config, gpu: Gpu) -> None:
        product = product_of(schedule.mod["main"])
        if product is None:
            raise ValueError("the function is no product: its geometry was not made from it")
        dtype = TENSOR_TYPES[geometry["tensor"]]
        warps = config["warps_i"] * config["warps_j"]
        left_along, right_along = bool(geometry["left_along"]), bool(geometry["right_along"])
        normal = normalise(
            schedule,
            product,
            [
                1,
                SIDE * config["warps_i"] * config["fragments_i"],
                SIDE * config["warps_j"] * config["fragments_j"],
                SIDE * config["step"],
            ],
            left_along=left_along,
            right_along=right_along,
        )
        batch, i, j, k = schedule.get_loops(normal.block)
        i, inner_i = schedule.split(i, [None, SIDE])
        j, inner_j = schedule.split(j, [None, SIDE])
        k, inner_k = schedule.split(k, [None, SIDE])
        schedule.reorder(batch, i, j, k, inner_i, inner_j, inner_k)
        block = schedule.blockize(inner_i)
        block_i, warp_i, own_i = schedule.split(i, [None, config["warps_i"], config["fragments_i"]])
        block_j, warp_j, own_j = schedule.split(j, [None, config["warps_j"], config["fragments_j"]])
        outer_k, step = schedule.split(k, [None, config["step"]])
        schedule.reorder(batch, block_i, block_j, warp_i, warp_j, outer_k, step, own_i, own_j)
        schedule.bind(schedule.fuse(batch, block_i, block_j), "blockIdx.x")
        warp = schedule.fuse(warp_i, warp_j)
        schedule.bind(warp, "threadIdx.y")
        fragments = []
        for operand, use in ((normal.left, "a"), (normal.right, "b")):
            shared = schedule.cache_read(block, number_of(schedule, block, operand.buffer), gpu_fragments.SCOPE)
            if dtype == "int8":
                # CUDA wants every fragment of 256 bytes at a multiple of 32: each lies by itself.
                schedule.transform_layout(
                    shared, ("write", 0), lambda b, r, c: (b, r // SIDE, c // SIDE, r % SIDE, c % SIDE)
                )
            schedule.compute_at(shared, outer_k, preserve_unit_loops=True)
            copied = schedule.fuse(*schedule.get_loops(shared)[-2:])
            if dtype != "int8":
                # Lines must not all begin in the same bank; a line of a fragment must be a multiple of 16 bytes away.
                schedule.storage_align(shared, 0, axis=-2, factor=SIDE, offset=SIDE // 2)
            vector = _fetched(geometry, config, "left" if use == "a" else "right")
            share_fetch(schedule, copied, warps, gpu.warp, vector)
            inline_producers(schedule, shared)
            staged = schedule.get(shared).writes[0].source
            fragment = schedule.cache_read(block, number_of(schedule, block, staged), f"wmma.matrix_{use}")
            schedule.compute_at(fragment, step, preserve_unit_loops=True)
            fragments.append(fragment)
        result = schedule.cache_write(block, 0, gpu_fragments.SCOPE)
        sums = schedule.cache_write(block, 0, "wmma.accumulator")
        schedule.reverse_compute_at(sums, warp, preserve_unit_loops=True)
        schedule.reverse_compute_at(result, warp, preserve_unit_loops=True)
        *_, rows, columns = schedule.get_loops(result)
        left, right = (ROW if left_along else COLUMN), (COLUMN if right_along else ROW)
        for fragment, use, order in zip(fragments, "ab", (left, right), strict=True):
            _tensorize(schedule, fragment, gpu_fragments.load(use, dtype, order))
        _tensorize(schedule, sums, gpu_fragments.store(gpu_fragments.SUMS[dtype]))
        start = schedule.decompose_reduction(block, outer_k)
        [start] = schedule.get_child_blocks(start)
        schedule.tensorize(schedule.get_loops(start)[-2], gpu_fragments.fill(gpu_fragments.SUMS[dtype]))
        multiply = gpu_fragments.multiply(dtype, left, right, "a" if product.left == 0 else "b")
        schedule.tensorize(schedule.get_loops(normal.block)[-3], multiply)
        inline_consumers(schedule, result)
        _, lane = schedule.split(schedule.fuse(rows, columns), [None, gpu.warp])
        schedule.bind(lane, "threadIdx.x")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from a choice."""

    warps: int  #: of a block
    tile_i: int
    tile_j: int
    blocks: int
    padded_work: int  #: multiplications, those of padding included
    registers: int  #: of a thread, about
    staged_bytes: int  #: of the larger of the two matrices
    shared_bytes: int  #: results take the place of what is staged


def _plan(geometry: Geometry, config: Config) -> _Plan:
    tile_i = SIDE * config["warps_i"] * config["fragments_i"]
    tile_j = SIDE * config["warps_j"] * config["fragments_j"]
    tile_k = SIDE * config["step"]
    blocks = geometry["batch"] * math.ceil(geometry["rows"] / tile_i) * math.ceil(geometry["columns"] / tile_j)
    summed = math.ceil(geometry["sum"] / tile_k) * tile_k
    lines = (
        (tile_i, tile_k) if geometry["left_along"] else (tile_k, tile_i),
        (tile_j, tile_k) if geometry["right_along"] else (tile_k, tile_j),
    )
    item = geometry["left_bits"] // 8
    offset = SIDE // 2 if item > 1 else 0
    staged = [count * (length + offset) * item for count, length in lines]
    results = tile_i * tile_j * geometry["sum_bits"] // 8
    registers = (
        _SUM_REGISTERS * config["fragments_i"] * config["fragments_j"]
        + _FACTOR_REGISTERS * (config["fragments_i"] + config["fragments_j"])
        + _OTHER_REGISTERS
    )
    return _Plan(
        config["warps_i"] * config["warps_j"], tile_i, tile_j, blocks, blocks * tile_i * tile_j * summed, registers,
        max(staged), max(sum(staged), results),
    )  # fmt: skip


def _fetched(geometry: Geometry, config: Config, side: str) -> int:
    """Numbers of the left or the right matrix that a thread fetches at once.

    TVM cannot spell eight of float16 that it reads one by one, as it does where it cannot show that they lie side by
    side: where they cross from one axis to the next.
    """
    return min(config["vector"], geometry[f"{side}_lanes"], 4 if geometry[f"{side}_crossed"] else SIDE)


def _choices(geometry: Geometry, gpu: Gpu) -> Iterator[Config]:
    for warps_i, warps_j, fragments_i, fragments_j, step in itertools.product(
        _WARPS, _WARPS, _FRAGMENTS, _FRAGMENTS, _STEPS
    ):
        config = {
            "warps_i": warps_i, "warps_j": warps_j, "fragments_i": fragments_i, "fragments_j": fragments_j,
            "step": step,
        }  # fmt: skip
        plan = _plan(geometry, config)
        threads = plan.warps * gpu.warp
        fits = (
            plan.warps <= _MOST_WARPS
            and threads <= gpu.threads
            and plan.shared_bytes <= gpu.shared_bytes
            # Else TVM gives the results one matrix's own buffer, before all are put into one, and trips over its type.
            and plan.staged_bytes < plan.tile_i * plan.tile_j * geometry["sum_bits"] // 8
            and plan.registers <= _MOST_REGISTERS
            and plan.registers * threads <= gpu.registers
        )
        # More than twice what there is helps nobody.
        sizes = ((plan.tile_i, geometry["rows"]), (plan.tile_j, geometry["columns"]), (SIDE * step, geometry["sum"]))
        if fits and all(tile < 2 * max(size, SIDE) for tile, size in sizes):
            widths: dict[tuple[int, ...], Config] = {}
            for vector in (1, 2, 4, 8) if geometry["left_bits"] == 16 else (1, 4):
                choice = {**config, "vector": vector}
                widths.setdefault(tuple(_fetched(geometry, choice, side) for side in ("left", "right")), choice)
            yield from widths.values()


def _cost(geometry: Geometry, config: Config, gpu: Gpu) -> float:
    """The less the better a guess: cycles of a multiprocessor, about; it ranks guesses and claims no more.

    A multiprocessor is taken to multiply 1024 numbers in a cycle, to move 128 bytes to or from shared memory and 32 to
    or from beyond.
    """
    plan = _plan(geometry, config)
    item = geometry["left_bits"] // 8
    steps = math.ceil(geometry["sum"] / SIDE / config["step"])
    per_step = SIDE * config["step"] * item
    multiplied = plan.tile_i * plan.tile_j * SIDE * config["step"] / 1024
    near = plan.warps * (config["fragments_i"] + config["fragments_j"]) * SIDE * per_step / 128
    fetched = (plan.tile_i + plan.tile_j) * per_step
    # What is fetched number by number takes an instruction for each.
    vectors = [(plan.tile_i, _fetched(geometry, config, "left")), (plan.tile_j, _fetched(geometry, config, "right"))]
    far = fetched / 32 + sum(tile * per_step / item / lanes / 32 for tile, lanes in vectors)
    results = plan.tile_i * plan.tile_j * (geometry["sum_bits"] / 8) * (1 / 32 + 2 / 128)
    rounds = math.ceil(plan.blocks / gpu.multiprocessors)
    at_once = min(rounds, _resident_blocks(plan, gpu))
    idle = max(1.0, _ENOUGH_WARPS / (at_once * plan.warps))
    return rounds * (steps * (multiplied + near + far + 60 / at_once) + results) * idle


def _resident_blocks(plan: _Plan, gpu: Gpu) -> int:
    return resident_blocks(plan.warps * gpu.warp, plan.registers, plan.shared_bytes, gpu)


def _tensorize(schedule: Any, block: Any, intrinsic: str) -> None:
    """Replace a block's copies of fragments; its last two loops run over rows and columns of numbers."""
    *_, rows, columns = schedule.get_loops(block)
    outer_rows, rows = schedule.split(rows, [None, SIDE])
    outer_columns, columns = schedule.split(columns, [None, SIDE])
    schedule.reorder(outer_rows, outer_columns, rows, columns)
    schedule.unroll(outer_rows)
    schedule.unroll(outer_columns)
    schedule.tensorize(rows, intrinsic)
