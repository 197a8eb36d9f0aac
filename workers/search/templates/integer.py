"""Template `integer`: int8 convolutions in a tile of registers of sums, by dot products of four where the CPU has them.

As in template `conv` a tile of `tile_o` blocks of channels by `tile_w` pixels is summed in registers and written back
once. One step multiplies one vector of weights, four slots of input for each slot of output, by four neighbouring bytes
of data that go to all lanes. With `dot` that is an instruction for it (`dot.py`); without, what LLVM finds.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

from workers.search.templates.dot import dot_intrinsic
from workers.search.templates.knobs import PMADDWD, SDOT, Config, Cpu, Geometry, Template, divisors, spread

#: A task shorter than this many operations costs more to hand to a thread than to do.
_SERIAL_OPERATIONS: Final = 200_000

_MIN_SUMS: Final = 4


class IntegerTemplate(Template[Cpu]):
    name: ClassVar[str] = "integer"
    knobs: ClassVar[tuple[str, ...]] = ("tile_o", "tile_w", "dot", "by_rows", "parallel")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        g = geometry
        vectors = max(1, g["v"] // cpu.lanes)
        has_dot = bool(cpu.dot) and g["v"] % cpu.lanes == 0 and (cpu.dot == SDOT) == bool(g.get("signed"))
        halves = 2 if cpu.dot == PMADDWD else 1
        operations = 2 * g["n"] * g["o"] * g["h"] * g["w"] * g["v"] * g["ic"] * g["kh"] * g["kw"] * g["ii"]
        fitting: list[Config] = [
            {"tile_o": tile_o, "tile_w": tile_w, "dot": int(has_dot), "by_rows": by_rows, "parallel": parallel}
            for tile_o in divisors(g["o"], 6)
            # The sums, the weights of a step, and the data that goes to all lanes, both by halves for `pmaddwd`.
            for tile_w in self._widths(
                g["w"], (cpu.registers - (tile_o * vectors + 1) * halves) // (tile_o * vectors), exact=has_dot
            )
            for by_rows in (0, 1)
            for parallel in ((1,) if operations > _SERIAL_OPERATIONS else (0, 1))
        ]
        # Fewer sums leave a product waiting for the one before it.
        enough = [c for c in fitting if c["tile_o"] * c["tile_w"] * vectors >= min(_MIN_SUMS, g["w"])]
        return sorted(enough or fitting, key=lambda config: self._badness(g, config, vectors))

    @staticmethod
    def _widths(width: int, most: int, *, exact: bool) -> list[int]:
        """Widths of at most `most` that divide the row, and others where no good one does: their tail is cut off, which
        TVM cannot do with tensor intrinsics."""
        found = divisors(width, most)
        if exact or most < 1 or found[-1] >= min(width, most, 6):
            return found
        return [*found, *spread(range(min(most, 6), min(width, most) + 1), 6)]

    @staticmethod
    def _badness(g: Geometry, c: Config, vectors: int) -> float:
        sums = c["tile_o"] * c["tile_w"] * vectors
        loads = (c["tile_w"] + c["tile_o"] * vectors) / sums
        rounded = -(-g["w"] // c["tile_w"]) * c["tile_w"] / g["w"]
        return rounded * (1 + loads + 0.3 * max(0, 8 - sums) / 8) + 0.01 * c["by_rows"]

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        c = config
        total, result = schedule.get_sblock("sum"), schedule.get_sblock("result")
        n, o, h, w, v, ic, kh, kw, fours, four = schedule.get_loops(total)
        oo, oi = schedule.split(o, [None, c["tile_o"]])
        wo, wi = schedule.split(w, [None, c["tile_w"]])
        outer = [n, h, oo] if c["by_rows"] else [n, oo, h]
        schedule.reorder(*outer, wo, ic, kh, kw, fours, oi, wi, v, four)
        schedule.reverse_compute_at(result, wo)
        schedule.set_scope(total, 0, "local")
        task = schedule.fuse(*outer)
        if c["parallel"]:
            schedule.parallel(task)
        for loop in (oi, wi):
            schedule.unroll(loop)
        self._write_back(schedule, result)
        for name, there in (("quantized", geometry["quantized"]), ("stage", geometry["staged"])):
            if there:
                self._place_rows(schedule, schedule.get_sblock(name), geometry, c, cpu)
        if not c["dot"]:
            schedule.reorder(four, v)
            schedule.unroll(four)
            schedule.vectorize(v)
        self._write_back(schedule, schedule.decompose_reduction(total, ic))
        if c["dot"]:
            vector, lanes = schedule.split(v, [None, cpu.lanes])
            schedule.unroll(vector)
            schedule.tensorize(lanes, dot_intrinsic(cpu.dot, cpu.lanes))

    @staticmethod
    def _place_rows(schedule: Any, block: Any, g: Geometry, c: Config, cpu: Cpu) -> None:
        """What is made of all the data before anything is summed."""
        loops = schedule.get_loops(block)
        # Few channels side by side are gathered from as many planes: there is no vector to load.
        if not g["plain"]:
            schedule.vectorize(loops[-1])
        elif len(loops) == 4 and int(schedule.get(loops[-1]).extent) % cpu.lanes == 0:
            _, vector = schedule.split(loops[-1], [None, cpu.lanes])
            schedule.vectorize(vector)
        rows = schedule.fuse(*loops[:3])
        if c["parallel"]:
            schedule.parallel(rows)

    @staticmethod
    def _write_back(schedule: Any, block: Any) -> None:
        *_, across, along, lanes = schedule.get_loops(block)
        schedule.vectorize(lanes)
        for loop in (across, along):
            schedule.unroll(loop)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g, c = geometry, config
        vectors = max(1, g["v"] // cpu.lanes)
        sums = c["tile_o"] * c["tile_w"] * vectors
        reduction = g["ic"] * g["kh"] * g["kw"] * g["ii"]
        along = -(-g["w"] // c["tile_w"])
        return [
            sums,
            (c["tile_w"] + c["tile_o"] * vectors) / sums,
            c["tile_o"], c["tile_w"], c["dot"], c["by_rows"], c["parallel"],
            along * c["tile_w"] / g["w"],
            math.log2(g["n"] * g["h"] * (g["o"] // c["tile_o"])),
            math.log2(c["tile_o"] * g["v"] * reduction / cpu.l1_bytes),
            math.log2(reduction), math.log2(g["ic"]), g["kh"], g["kw"], g["stride"], math.log2(g["h"] * g["w"]),
            math.log2(g["o"]), g["staged"], g["quantized"], g["plain"], g["others"], g["bytes"],
        ]  # fmt: skip
