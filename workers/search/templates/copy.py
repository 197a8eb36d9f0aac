"""Template `copy`: one elementwise block, written once: layouts changed, programs applied, pixels repeated."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

from workers.search.templates.knobs import Config, Cpu, Geometry, Template

#: Below this many elements one thread is done before a second has begun.
_SERIAL_ELEMENTS: Final = 16_384


class CopyTemplate(Template[Cpu]):
    name: ClassVar[str] = "copy"
    knobs: ClassVar[tuple[str, ...]] = ("fused", "parallel", "vector")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        elements = geometry["outer"] * geometry["rows"] * geometry["last"]
        vector = cpu.lanes if geometry["last"] % cpu.lanes == 0 else 1
        found = [
            {"fused": fused, "parallel": parallel, "vector": width}
            for parallel in (1, 0)
            for fused in range(1, geometry["axes"])
            for width in sorted({vector, 1}, reverse=True)
        ]
        wanted = int(elements > _SERIAL_ELEMENTS)
        return sorted(found, key=lambda c: (abs(c["parallel"] - wanted), -c["vector"], abs(c["fused"] - 3)))

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        loops = schedule.get_loops(schedule.get_sblock("result"))
        if config["vector"] > 1:
            outer, inner = schedule.split(loops[-1], [None, config["vector"]])
            schedule.vectorize(inner)
            loops = [*loops[:-1], outer]
        task = schedule.fuse(*loops[: config["fused"]]) if config["fused"] > 1 else loops[0]
        if config["parallel"]:
            schedule.parallel(task)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g = geometry
        return [
            config["fused"], config["parallel"], config["vector"],
            math.log2(g["outer"]), math.log2(g["rows"]), math.log2(g["last"]), g["axes"],
        ]  # fmt: skip
