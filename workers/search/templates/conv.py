"""Template `conv`: a sum of channels and window in a tile of vector registers that is written back once.

The tile holds `tile_o` blocks of channels by `tile_h` × `tile_w` pixels, fully unrolled; each step loads one vector of
weights a block and multiplies it by one number of data a pixel. It is fast when the tile's accumulators, and what each
step loads, stay in registers, and when there are enough of them to hide the latency of a multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from workers.search.templates.knobs import Config, Cpu, Geometry, Template, divisors, spread

#: Fewer accumulators than this leave a multiply-add waiting for the one before it.
_MIN_ACCUMULATORS: Final = 4
#: A task shorter than this many operations costs more to hand to a thread than to do.
_SERIAL_FLOPS: Final = 100_000
_MAX_CONFIGS: Final = 3000
_ORDERS: Final = (("ic", "kh", "kw", "ii"), ("kh", "ic", "kw", "ii"))
#: `tasks`: which loops make the tasks that threads share, outermost first.
_CHANNELS_THEN_ROWS, _ROWS_THEN_CHANNELS, _ROWS = 0, 1, 2
#: `pack_at`, where weights are packed that are no constants: all before the tasks, those of one matrix by the task that
#: has all of it, or nowhere: rows of them are read as they lie.
_PACK_BEFORE, _PACK_BY_TASK, _PACK_NOTHING = 0, 1, 2
_PACKING_BADNESS: Final = (0.1, 0.05, 0.0)


class ConvTemplate(Template[Cpu]):
    name: ClassVar[str] = "conv"
    version: ClassVar[int] = 2
    knobs: ClassVar[tuple[str, ...]] = (
        "tile_o", "tile_h", "tile_w", "strip", "order", "chunked", "tasks", "stage_at", "pack_at", "parallel",
    )  # fmt: skip

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        found = list(self._configs(geometry, cpu))
        found.sort(key=lambda config: self._badness(geometry, config, cpu))
        return found[:_MAX_CONFIGS]

    def _configs(self, g: Geometry, cpu: Cpu) -> Iterator[Config]:
        flops = 2 * g["n"] * g["o"] * g["h"] * g["w"] * g["v"] * g["ic"] * g["kh"] * g["kw"] * g["ii"]
        vectors = max(1, g["v"] // cpu.lanes)
        by_task = g["staged"] and not g["indirect"]
        for tile_o in [t for t in (1, 2, 3, 4, 6, 8) if g["o"] % t == 0]:
            for tile_h in [t for t in (1, 2, 4) if t == 1 or (g["h"] % t == 0 and g["w"] <= 16)]:
                for tile_w in self._widths(g["w"], (cpu.registers - 1) // vectors - 1):
                    accumulators = tile_o * tile_h * tile_w * vectors
                    if tile_o > 1 and tile_h * tile_w * vectors > 8:
                        continue  # one block has enough: a number of data is then used once, straight from memory
                    # The weights of a step, and one register for a number that cannot be read from memory in place.
                    if accumulators + tile_o * vectors + 1 > cpu.registers:
                        continue
                    small = g["h"] * g["w"] * (g["o"] // tile_o) == tile_h * tile_w
                    if accumulators < _MIN_ACCUMULATORS and not small and g["w"] >= _MIN_ACCUMULATORS:
                        continue
                    for strip in self._strips(g, tile_h, tile_w):
                        for order in (0, 1) if g["kh"] > 1 and g["ic"] > 1 else (0,):
                            for chunked in (0, 1) if g["ic"] > 1 and not g["indirect"] else (0,):
                                for tasks in (_CHANNELS_THEN_ROWS, _ROWS_THEN_CHANNELS, _ROWS):
                                    # Of what a table chooses no part is known before the whole.
                                    for stage_at in (0, 1) if by_task and tasks == _ROWS else (0,):
                                        for pack_at in self._packings(g):
                                            for parallel in (1,) if flops > 8 * _SERIAL_FLOPS else (0, 1):
                                                yield {
                                                    "tile_o": tile_o, "tile_h": tile_h, "tile_w": tile_w,
                                                    "strip": strip, "order": order, "chunked": chunked, "tasks": tasks,
                                                    "stage_at": stage_at, "pack_at": pack_at, "parallel": parallel,
                                                }  # fmt: skip

    @staticmethod
    def _packings(g: Geometry) -> list[int]:
        if not g.get("packed"):
            return [_PACK_BEFORE]
        return [
            _PACK_BEFORE,
            *([_PACK_BY_TASK] if g["n"] > 1 else []),
            *([_PACK_NOTHING] if g["rows_lie"] else []),
        ]

    @staticmethod
    def _widths(width: int, most: int) -> list[int]:
        """Widths of a tile, of `most` pixels at most: those that divide the row, and a few that leave a tail where no
        good one does."""
        limit = min(width, most)
        exact = divisors(width, limit)
        if exact[-1] >= min(limit, 6):
            return [t for t in exact if t >= min(4, limit)]
        tails = sorted(range(min(6, limit // 2), limit + 1), key=lambda t: (-(-width // t) * t - width, -t))[:4]
        return sorted({*exact[-1:], *tails})

    @staticmethod
    def _strips(g: Geometry, tile_h: int, tile_w: int) -> list[int]:
        """Tiles that one task does one after the other, along the width if that is the only axis, else rows."""
        tiles = -(-g["w"] // tile_w) if g["h"] == 1 else g["h"] // tile_h
        return spread(divisors(tiles, 56), 6)

    def _badness(self, g: Geometry, c: Config, cpu: Cpu) -> float:
        """A guess at how slow a choice is, for the order in which choices are tried before anything is known."""
        vectors = max(1, g["v"] // cpu.lanes)
        accumulators = c["tile_o"] * c["tile_h"] * c["tile_w"] * vectors
        loads = (c["tile_h"] * c["tile_w"] + c["tile_o"] * vectors) / accumulators
        rounded = -(-g["w"] // c["tile_w"]) * c["tile_w"] / g["w"]
        tasks = self._tasks(g, c)
        balance = -(-tasks // cpu.threads) * cpu.threads / tasks if c["parallel"] else cpu.threads
        weights = g.get("weight_bytes", 4) * c["tile_o"] * g["v"] * g["ic"] * g["kh"] * g["kw"] * g["ii"]
        spill = 0.1 if weights > cpu.l2_bytes // 2 else 0.0
        # Weights that no cache holds are read once where tasks go by channels, and by every thread where by rows.
        if weights * (g["o"] // c["tile_o"]) > cpu.l2_bytes and c["tasks"] != _CHANNELS_THEN_ROWS:
            spill += 0.1
        return (
            rounded * balance * (1 + 0.2 * loads + 0.3 * max(0, 8 - accumulators) / 8 + spill + 0.1 * (c["tile_o"] > 1))
            + 0.05 * c["chunked"] + 0.02 * c["order"] - 0.03 * c["stage_at"] + 0.01 * abs(math.log2(max(1, tasks) / 16))
            + (_PACKING_BADNESS[c["pack_at"]] if g.get("packed") else 0.0)
        )  # fmt: skip

    @staticmethod
    def _tasks(g: Geometry, c: Config) -> int:
        if c["pack_at"] == _PACK_BY_TASK:
            return g["n"]
        along_w = -(-g["w"] // c["tile_w"])
        rows = -(-along_w // c["strip"]) if g["h"] == 1 else g["h"] // c["tile_h"] // c["strip"]
        return g["n"] * rows * (g["o"] // c["tile_o"] if c["tasks"] != _ROWS else 1)

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        g, c = geometry, config
        total, result = schedule.get_sblock("sum"), schedule.get_sblock("result")
        stage = schedule.get_sblock("stage") if g["staged"] else None
        if g["h"] == 1 and len(schedule.get_loops(total)) == 6:
            n, o, w, v, ic, ii = schedule.get_loops(total)
            h = kh = kw = None
        else:
            n, o, h, w, v, ic, kh, kw, ii = schedule.get_loops(total)
        oo, oi = schedule.split(o, [None, c["tile_o"]])
        if h is None:
            wo, wm, wi = schedule.split(w, [None, c["strip"], c["tile_w"]])
            rows, middle, tile = [wo], [wm], [wi]
        elif g["h"] == 1:
            wo, wm, wi = schedule.split(w, [None, c["strip"], c["tile_w"]])
            rows, middle, tile = [h, wo], [wm], [wi]
        else:
            ho, hm, hi = schedule.split(h, [None, c["strip"], c["tile_h"]])
            wm, wi = schedule.split(w, [None, c["tile_w"]])
            rows, middle, tile = [ho], [hm, wm], [hi, wi]
        named = {"ic": ic, "kh": kh, "kw": kw, "ii": ii}
        reduction = [named[name] for name in _ORDERS[c["order"]] if named[name] is not None]
        outer = {
            _CHANNELS_THEN_ROWS: [n, oo, *rows],
            _ROWS_THEN_CHANNELS: [n, *rows, oo],
            _ROWS: [n, *rows, oo],
        }[c["tasks"]]
        if c["chunked"]:
            # A chunk of input channels is summed over the whole strip before the next: its weights stay in L1, and the
            # strip's sums in L1 or L2 instead of registers.
            schedule.reorder(*outer, reduction[0], *middle, *reduction[1:], oi, *tile, v)
            schedule.reverse_compute_at(result, outer[-1])
        else:
            schedule.reorder(*outer, *middle, *reduction, oi, *tile, v)
            schedule.reverse_compute_at(result, middle[-1])
            schedule.set_scope(total, 0, "local")
        loops_of_tasks = 1 if c["pack_at"] == _PACK_BY_TASK else len(outer) - int(c["tasks"] == _ROWS)
        shared = outer[:loops_of_tasks]
        task = schedule.fuse(*shared) if len(shared) > 1 else shared[0]
        if c["parallel"]:
            schedule.parallel(task)
        for loop in (oi, *tile):
            schedule.unroll(loop)
        schedule.vectorize(v)
        if c["chunked"]:
            self._write_back(schedule, result, unrolled=0)
        else:
            # Below the strip's loops are those of the tile alone; of length 1 there is none.
            outside = 1 + len(outer) - len(shared) + len(middle)
            self._write_back(schedule, result, unrolled=len(schedule.get_loops(result)) - outside - 1)
        if stage is not None:
            self._place_stage(schedule, stage, task, c)
        if g.get("packed"):
            self._place_pack(schedule, schedule.get_sblock("pack"), task, c)
        if g.get("tail"):
            rows_of_cut = schedule.get_loops(schedule.get_sblock("cut"))[0]
            if c["parallel"] and g["w"] > 1:
                schedule.parallel(rows_of_cut)
        start = schedule.decompose_reduction(total, reduction[0])
        self._write_back(schedule, start, unrolled=len(tile) + 1)

    @staticmethod
    def _write_back(schedule: Any, block: Any, unrolled: int) -> None:
        loops = schedule.get_loops(block)
        schedule.vectorize(loops[-1])
        for loop in loops[-1 - unrolled : -1]:
            schedule.unroll(loop)

    @staticmethod
    def _place_stage(schedule: Any, stage: Any, task: Any, c: Config) -> None:
        """Data is padded or put through the prologue all at once, or task by task where a task does all channels: not
        where a table chooses channels, for then it is not known what of the data a task reads."""
        if c["stage_at"]:
            schedule.compute_at(stage, task, preserve_unit_loops=True)
            loops = schedule.get_loops(stage)
            schedule.vectorize(loops[-1])
            return
        loops = schedule.get_loops(stage)
        fused = schedule.fuse(*loops[: len(loops) - 2])
        if c["parallel"]:
            schedule.parallel(fused)
        schedule.vectorize(schedule.get_loops(stage)[-1])

    @staticmethod
    def _place_pack(schedule: Any, pack: Any, task: Any, c: Config) -> None:
        if c["pack_at"] == _PACK_NOTHING:
            schedule.compute_inline(pack)
            return
        if c["pack_at"] == _PACK_BY_TASK:
            schedule.compute_at(pack, task, preserve_unit_loops=True)
        loops = schedule.get_loops(pack)
        schedule.vectorize(loops[-1])
        if c["pack_at"] == _PACK_BEFORE:
            packing = schedule.fuse(*loops[:2])
            if c["parallel"]:
                schedule.parallel(packing)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g, c = geometry, config
        vectors = max(1, g["v"] // cpu.lanes)
        pixels = c["tile_h"] * c["tile_w"]
        accumulators = c["tile_o"] * pixels * vectors
        tasks = self._tasks(g, c)
        reduction = g["ic"] * g["kh"] * g["kw"] * g["ii"]
        rounded = -(-g["w"] // c["tile_w"]) * c["tile_w"] / g["w"]
        weights = g.get("weight_bytes", 4) * c["tile_o"] * g["v"] * reduction
        chunk_weights = weights / g["ic"] if c["chunked"] else weights
        strip_pixels = pixels * c["strip"] * (1 if g["h"] == 1 else -(-g["w"] // c["tile_w"]))
        strip_data = 4 * strip_pixels * g["stride"] ** 2 * g["ic"] * g["ii"]
        return [
            accumulators,
            (pixels + c["tile_o"] * vectors) / accumulators,
            c["tile_o"], c["tile_h"], c["tile_w"], c["strip"], c["order"], c["chunked"], c["tasks"], c["stage_at"],
            c["pack_at"], c["parallel"],
            rounded,
            math.log2(tasks),
            -(-tasks // cpu.threads) * cpu.threads / tasks,
            math.log2(weights / cpu.l1_bytes), math.log2(weights / cpu.l2_bytes),
            math.log2(chunk_weights / cpu.l1_bytes),
            math.log2(strip_data / cpu.l1_bytes), math.log2(strip_data / cpu.l2_bytes),
            math.log2(reduction), math.log2(g["ic"]), g["kh"], g["kw"], g["ii"], g["stride"],
            math.log2(g["h"] * g["w"]), math.log2(g["o"]), g["others"], g["staged"], g["indirect"],
        ]  # fmt: skip
