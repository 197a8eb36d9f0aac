"""Template `window`: a reduction over a window within each slot: depthwise convolutions and pooling.

A tile of pixels of one block of slots is kept in registers; with the window unrolled, neighbours share what they load.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

from workers.search.templates.knobs import Config, Cpu, Geometry, Template, divisors, spread

#: Windows of more elements than this are looped over: unrolled, their code would not fit the instruction cache.
_UNROLLED: Final = 26
_SERIAL_ELEMENTS: Final = 200_000


class WindowTemplate(Template[Cpu]):
    name: ClassVar[str] = "window"
    knobs: ClassVar[tuple[str, ...]] = ("tile_h", "tile_w", "strip", "stage_at", "parallel")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        g = geometry
        vectors = max(1, g["v"] // cpu.lanes)
        found: list[Config] = []
        most = (cpu.registers - 4) // vectors
        widths = divisors(g["w"], most)
        if widths[-1] < min(g["w"], 4, most):
            widths.append(min(4, most))
        elements = g["n"] * g["c"] * g["h"] * g["w"] * g["v"] * g["kh"] * g["kw"]
        for tile_h in [t for t in (1, 2, 4) if g["h"] % t == 0]:
            for tile_w in spread(widths, 5):
                if tile_h * tile_w * vectors > cpu.registers - 4:
                    continue
                for strip in spread(divisors(g["h"] // tile_h), 4):
                    for stage_at in (1, 0) if g["staged"] else (0,):
                        for parallel in (1,) if elements > 8 * _SERIAL_ELEMENTS else (1, 0):
                            found.append({
                                "tile_h": tile_h, "tile_w": tile_w, "strip": strip, "stage_at": stage_at,
                                "parallel": parallel,
                            })  # fmt: skip

        def badness(c: Config) -> float:
            tasks = self._tasks(g, c)
            balance = -(-tasks // cpu.threads) * cpu.threads / tasks
            few = max(0, 6 - c["tile_h"] * c["tile_w"] * vectors) / 6
            alone = 0.0 if bool(c["parallel"]) == (elements > _SERIAL_ELEMENTS) else 0.5
            return balance * (1 + 0.3 * few) + alone - 0.1 * c["stage_at"] + 0.01 * abs(math.log2(tasks / 16))

        return sorted(found, key=badness)

    @staticmethod
    def _tasks(g: Geometry, c: Config) -> int:
        return int(g["n"] * g["c"] * (g["h"] // c["tile_h"] // c["strip"]))

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        g, c = geometry, config
        total, result = schedule.get_sblock("sum"), schedule.get_sblock("result")
        n, ch, h, w, v, kh, kw = schedule.get_loops(total)
        ho, hm, hi = schedule.split(h, [None, c["strip"], c["tile_h"]])
        wo, wi = schedule.split(w, [None, c["tile_w"]])
        schedule.reorder(n, ch, ho, hm, wo, kh, kw, hi, wi, v)
        schedule.reverse_compute_at(result, wo)
        schedule.set_scope(total, 0, "local")
        task = schedule.fuse(n, ch, ho)
        if c["parallel"]:
            schedule.parallel(task)
        if g["kh"] * g["kw"] <= _UNROLLED:
            schedule.unroll(kh)
            schedule.unroll(kw)
        schedule.unroll(hi)
        schedule.unroll(wi)
        schedule.vectorize(v)
        self._unroll_tile(schedule, result, len(schedule.get_loops(result)) - 3)
        if g["staged"]:
            stage = schedule.get_sblock("stage")
            if c["stage_at"]:
                schedule.compute_at(stage, task, preserve_unit_loops=True)
            else:
                fused = schedule.fuse(*schedule.get_loops(stage)[:3])
                if c["parallel"]:
                    schedule.parallel(fused)
            schedule.vectorize(schedule.get_loops(stage)[-1])
        self._unroll_tile(schedule, schedule.decompose_reduction(total, kh), 3)

    @staticmethod
    def _unroll_tile(schedule: Any, block: Any, own: int) -> None:
        loops = schedule.get_loops(block)
        schedule.vectorize(loops[-1])
        for loop in loops[len(loops) - own : -1]:
            schedule.unroll(loop)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g, c = geometry, config
        vectors = max(1, g["v"] // cpu.lanes)
        tasks = self._tasks(g, c)
        rows = (c["strip"] * c["tile_h"] - 1) * g["stride"] + g["kh"]
        return [
            c["tile_h"], c["tile_w"], c["strip"], c["stage_at"], c["parallel"],
            c["tile_h"] * c["tile_w"] * vectors,
            -(-g["w"] // c["tile_w"]) * c["tile_w"] / g["w"],
            math.log2(tasks), -(-tasks // cpu.threads) * cpu.threads / tasks,
            rows / (c["strip"] * c["tile_h"] * g["stride"]),
            math.log2(4 * rows * g["w"] * g["stride"] * g["v"] / cpu.l1_bytes),
            math.log2(g["n"] * g["c"] * g["h"] * g["w"]), g["kh"], g["kw"], g["stride"], g["staged"], g["depthwise"],
            g["others"],
        ]  # fmt: skip
