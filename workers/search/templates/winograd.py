"""Template `winograd`: tiles of data transformed, one matrix product for each place in the tile, transformed back.

The products are the tile of registers of template `conv`, with the tiles of the picture in the place of pixels. Data
may be transformed for all tiles at once or not at all together: `group` rows of tiles go through all three steps
before the next, so that what lies between the steps stays in a core's own cache.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from workers.search.templates.knobs import Config, Cpu, Geometry, Template, divisors, spread


class WinogradTemplate(Template):
    name: ClassVar[str] = "winograd"
    knobs: ClassVar[tuple[str, ...]] = ("tile_o", "tile_p", "strip", "tasks")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        g = geometry
        vectors = max(1, g["v"] // cpu.lanes)
        tiles = g["n"] * g["rows"] * g["columns"]
        limit = min(tiles, (cpu.registers - 1) // vectors - 1)
        widths = [t for t in divisors(tiles, limit) if t >= min(4, limit)]
        if widths[-1:] == [] or widths[-1] < min(limit, 7):
            widths = sorted(range(min(5, limit // 2), limit + 1), key=lambda t: (-(-tiles // t) * t - tiles, -t))[:4]
        found = []
        for tile_o in [t for t in (1, 2, 4) if g["o"] % t == 0]:
            for tile_p in widths:
                if tile_o * tile_p * vectors + tile_o * vectors + 1 > cpu.registers:
                    continue
                if tile_o > 1 and tile_p * vectors > 8:
                    continue
                for strip in spread(divisors(-(-tiles // tile_p)), 5):
                    for tasks in (0, 1):
                        found.append({"tile_o": tile_o, "tile_p": tile_p, "strip": strip, "tasks": tasks})

        def badness(c: Config) -> float:
            rounded = -(-tiles // c["tile_p"]) * c["tile_p"] / tiles
            few = max(0, 8 - c["tile_o"] * c["tile_p"] * vectors) / 8
            weights = 4 * c["tile_o"] * g["v"] * g["ic"] * g["ii"]
            return (
                rounded * (1 + 0.3 * few + 0.1 * (c["tile_o"] > 1))
                + 0.02 * abs(math.log2(weights * c["strip"] / cpu.l1_bytes)) + 0.01 * c["tasks"]
            )  # fmt: skip

        return sorted(found, key=badness)

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        g, c = geometry, config
        block = schedule.get_sblock
        self._transform_data(schedule, g)
        # Products
        total, products = block("sum"), block("products")
        a, b, o, p, v, ic, ii = schedule.get_loops(total)
        oo, oi = schedule.split(o, [None, c["tile_o"]])
        po, pm, pi = schedule.split(p, [None, c["strip"], c["tile_p"]])
        outer = [a, b, oo, po] if c["tasks"] == 0 else [a, b, po, oo]
        schedule.reorder(*outer, pm, ic, ii, oi, pi, v)
        schedule.reverse_compute_at(products, pm)
        schedule.set_scope(total, 0, "local")
        schedule.parallel(schedule.fuse(*outer))
        loops = schedule.get_loops(products)
        schedule.vectorize(loops[-1])
        for loop in loops[2:-1]:
            schedule.unroll(loop)
        for loop in (oi, pi):
            schedule.unroll(loop)
        schedule.vectorize(v)
        start = schedule.get_loops(schedule.decompose_reduction(total, ic))
        schedule.vectorize(start[-1])
        for loop in start[-3:-1]:
            schedule.unroll(loop)
        self._transform_back(schedule, g)

    @staticmethod
    def _transform_data(schedule: Any, g: Geometry) -> None:
        whole, half, stage = (schedule.get_sblock(name) for name in ("data_tiles", "data_rows", "stage"))
        a, b, c, p, i = schedule.get_loops(whole)
        rows, columns = schedule.split(p, [g["n"] * g["rows"], g["columns"]])
        schedule.reorder(c, rows, columns, a, b, i)
        schedule.compute_at(half, columns, preserve_unit_loops=True)
        schedule.set_scope(half, 0, "local")
        task = schedule.fuse(c, rows)
        schedule.compute_at(stage, task, preserve_unit_loops=True)
        schedule.parallel(task)
        schedule.vectorize(schedule.get_loops(stage)[-1])
        for loop in (a, b):
            schedule.unroll(loop)
        schedule.vectorize(i)
        loops = schedule.get_loops(half)
        schedule.vectorize(loops[-1])
        for loop in loops[-3:-1]:
            schedule.unroll(loop)

    @staticmethod
    def _transform_back(schedule: Any, g: Geometry) -> None:
        half, whole, result = (schedule.get_sblock(name) for name in ("result_rows", "result_tiles", "result"))
        n, o, h, w, v = schedule.get_loops(result)
        ho, hi = schedule.split(h, [None, g["outputs"]])
        wo, wi = schedule.split(w, [None, g["outputs"]])
        schedule.reorder(n, o, ho, wo, hi, wi, v)
        for block in (whole, half):
            schedule.compute_at(block, wo, preserve_unit_loops=True)
            schedule.set_scope(block, 0, "local")
        schedule.parallel(schedule.fuse(n, o, ho))
        for loop in (hi, wi):
            schedule.unroll(loop)
        schedule.vectorize(v)
        for block in (whole, half):
            loops = schedule.get_loops(block)
            schedule.vectorize(loops[-1])
            for loop in loops[-3:-1]:
                schedule.unroll(loop)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g, c = geometry, config
        vectors = max(1, g["v"] // cpu.lanes)
        tiles = g["n"] * g["rows"] * g["columns"]
        weights = 4 * c["tile_o"] * g["v"] * g["ic"] * g["ii"]
        return [
            c["tile_o"], c["tile_p"], c["strip"], c["tasks"], c["tile_o"] * c["tile_p"] * vectors,
            -(-tiles // c["tile_p"]) * c["tile_p"] / tiles,
            math.log2(weights / cpu.l1_bytes),
            math.log2(4 * c["strip"] * c["tile_p"] * g["ic"] * g["ii"] / cpu.l1_bytes),
            math.log2(tiles), math.log2(g["o"]), math.log2(g["ic"]), g["outputs"], g["tile"],
            g["rows"] * g["columns"] * g["outputs"] ** 2 / (g["h"] * g["w"]), g["others"],
        ]  # fmt: skip
