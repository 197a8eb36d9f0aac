"""Template `winograd`: tiles of data transformed, one matrix product for each place in the tile, transformed back.

The products are the tile of registers of template `conv`, with the tiles of the picture in the place of pixels. Data
is transformed for all tiles first. `joined` says whether each block of channels then goes through the products and the
transform back at once, so that what lies between stays in a core's own cache, or all go through one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from workers.search.templates.knobs import Config, Cpu, Geometry, Template, divisors, spread


class WinogradTemplate(Template[Cpu]):
    name: ClassVar[str] = "winograd"
    knobs: ClassVar[tuple[str, ...]] = ("tile_o", "tile_p", "strip", "tasks", "joined")

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
                        found.append({"tile_o": tile_o, "tile_p": tile_p, "strip": strip, "tasks": tasks, "joined": 0})
                if g["o"] // tile_o >= cpu.threads:
                    found.append({"tile_o": tile_o, "tile_p": tile_p, "strip": 1, "tasks": 0, "joined": 1})

        def badness(c: Config) -> float:
            rounded = -(-tiles // c["tile_p"]) * c["tile_p"] / tiles
            few = max(0, 8 - c["tile_o"] * c["tile_p"] * vectors) / 8
            weights = 4 * c["tile_o"] * g["v"] * g["ic"] * g["ii"]
            return (
                rounded * (1 + 0.3 * few + 0.1 * (c["tile_o"] > 1))
                + 0.02 * abs(math.log2(weights * c["strip"] / cpu.l1_bytes)) + 0.01 * c["tasks"]
                + 0.05 * c["joined"]
            )  # fmt: skip

        return sorted(found, key=badness)

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        g, c = geometry, config
        block = schedule.get_sblock
        self._transform_data(schedule, g)
        if c["joined"]:
            self._join(schedule, g, c)
            return
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
        _unroll_and_vectorize(schedule, loops[2:])
        _unroll_and_vectorize(schedule, [oi, pi, v])
        _unroll_and_vectorize(schedule, schedule.get_loops(schedule.decompose_reduction(total, ic))[-3:])
        n, o, h, w, v = schedule.get_loops(block("result"))
        ho, hi = schedule.split(h, [None, g["outputs"]])
        wo, wi = schedule.split(w, [None, g["outputs"]])
        schedule.reorder(n, o, ho, wo, hi, wi, v)
        self._transform_back(schedule, wo, [hi, wi, v])
        schedule.parallel(schedule.fuse(n, o, ho))

    def _join(self, schedule: Any, g: Geometry, c: Config) -> None:
        """Products and the transform back by blocks of channels: what lies between stays in the core's own cache."""
        total, products = schedule.get_sblock("sum"), schedule.get_sblock("products")
        n, o, h, w, v = schedule.get_loops(schedule.get_sblock("result"))
        oo, oi = schedule.split(o, [None, c["tile_o"]])
        ho, hi = schedule.split(h, [None, g["outputs"]])
        wo, wi = schedule.split(w, [None, g["outputs"]])
        schedule.reorder(oo, n, oi, ho, wo, hi, wi, v)
        self._transform_back(schedule, wo, [hi, wi, v])
        schedule.compute_at(products, oo, preserve_unit_loops=True)
        a, b, po, p, pv = schedule.get_loops(products)[-5:]
        outside, inside = schedule.split(p, [None, c["tile_p"]])
        schedule.reorder(a, b, outside, po, inside, pv)
        schedule.compute_at(total, outside, preserve_unit_loops=True)
        schedule.set_scope(total, 0, "local")
        *_, so, sp, sv, ic, ii = schedule.get_loops(total)
        schedule.reorder(ic, ii, so, sp, sv)
        _unroll_and_vectorize(schedule, [po, inside, pv])
        _unroll_and_vectorize(schedule, [so, sp, sv])
        schedule.parallel(oo)
        _unroll_and_vectorize(schedule, schedule.get_loops(schedule.decompose_reduction(total, ic))[-3:])

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
        _unroll_and_vectorize(schedule, [a, b, i])
        _unroll_and_vectorize(schedule, schedule.get_loops(half)[-3:])

    @staticmethod
    def _transform_back(schedule: Any, tile: Any, pixels: Sequence[Any]) -> None:
        """The transform back within the loop over tiles, its pixels written by the loops `pixels`."""
        half, whole = schedule.get_sblock("result_rows"), schedule.get_sblock("result_tiles")
        for block in (whole, half):
            schedule.compute_at(block, tile, preserve_unit_loops=True)
            schedule.set_scope(block, 0, "local")
        _unroll_and_vectorize(schedule, pixels)
        for block in (whole, half):
            _unroll_and_vectorize(schedule, schedule.get_loops(block)[-3:])

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g, c = geometry, config
        vectors = max(1, g["v"] // cpu.lanes)
        tiles = g["n"] * g["rows"] * g["columns"]
        weights = 4 * c["tile_o"] * g["v"] * g["ic"] * g["ii"]
        return [
            c["tile_o"], c["tile_p"], c["strip"], c["tasks"], c["joined"], c["tile_o"] * c["tile_p"] * vectors,
            -(-tiles // c["tile_p"]) * c["tile_p"] / tiles,
            math.log2(weights / cpu.l1_bytes),
            math.log2(4 * c["strip"] * c["tile_p"] * g["ic"] * g["ii"] / cpu.l1_bytes),
            math.log2(tiles), math.log2(g["o"]), math.log2(g["ic"]), g["outputs"], g["tile"],
            g["rows"] * g["columns"] * g["outputs"] ** 2 / (g["h"] * g["w"]), g["others"],
        ]  # fmt: skip


def _unroll_and_vectorize(schedule: Any, loops: Sequence[Any]) -> None:
    """The last of the loops becomes vectors, the others straight code."""
    schedule.vectorize(loops[-1])
    for loop in loops[:-1]:
        schedule.unroll(loop)
