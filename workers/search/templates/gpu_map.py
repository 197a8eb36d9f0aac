"""Template `gpu-map`: elementwise functions, copies, transposes, gathers and padding on a GPU.

Every stage is computed where it is read, what is left of an output runs as one loop over its numbers in their order in
memory, shared among threads (TVM's default, `tvm.s_tir.dlight.gpu.fallback.Fallback`, with its numbers as knobs).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

from tvm import tirx

from workers.search.templates import plain
from workers.search.templates.gpu_blocks import RESIDENT_THREADS, bind_elements, inline_all, stages_of
from workers.search.templates.knobs import Config, Geometry, Gpu, Template

_THREADS: Final = (256, 128, 512, 64, 1024, 32)
_ELEMENTS: Final = (1, 2, 4, 8)


class GpuMapTemplate(Template[Gpu]):
    name: ClassVar[str] = "gpu-map"
    #: Threads of a block; how often each of them goes on to its next numbers; numbers side by side that it computes at
    #: once.
    knobs: ClassVar[tuple[str, ...]] = ("threads", "elements", "vector")

    def configs(self, geometry: Geometry, gpu: Gpu) -> list[Config]:
        vectors = [v for v in (1, 2, 4) if geometry["whole"] % v == 0 and v * geometry["item"] <= 16]
        found: list[Config] = [
            {"threads": threads, "elements": elements, "vector": vector}
            for threads in _THREADS
            for elements in _ELEMENTS
            for vector in vectors
            if threads <= gpu.threads
            # The last block of a short function is no reason for others that nothing is left for.
            and (threads * elements * vector < 2 * geometry["elements"] or (threads, elements, vector) == (32, 1, 1))
        ]
        return sorted(found, key=lambda config: _cost(geometry, config, gpu))

    def features(self, geometry: Geometry, config: Config, gpu: Gpu) -> list[float]:
        blocks = math.ceil(geometry["elements"] / math.prod(config.values()))
        return [
            *(math.log2(1 + geometry[name]) for name in
              ("blocks", "iterations", "elements", "expensive", "operations", "bytes", "item")),
            float(geometry["transposed"]),
            float(geometry["conditional"]),
            math.log2(geometry["whole"] & -geometry["whole"]),
            math.log2(gpu.multiprocessors),
            math.log2(blocks),
            math.log2(1 + blocks * config["threads"] / gpu.multiprocessors / RESIDENT_THREADS),
            (-geometry["elements"] % math.prod(config.values())) / math.prod(config.values()),
            *(math.log2(config[knob]) for knob in self.knobs),
        ]  # fmt: skip

    def apply(self, schedule: Any, geometry: Geometry, config: Config, gpu: Gpu) -> None:
        for block in inline_all(schedule):
            bind_elements(schedule, block, config["threads"], config["elements"], config["vector"])


def geometry_of(function: tirx.PrimFunc) -> Geometry | None:
    """None for a function that reduces, or has a stage that is not understood."""
    after = stages_of(function)
    if after is None or any(stage.reduced for stage in after):
        return None
    heaviest = max(after, key=lambda stage: (stage.iterations, stage.operations))
    return {
        "blocks": len(after),
        "iterations": sum(stage.iterations for stage in after),
        "elements": heaviest.iterations,
        "expensive": sum(stage.expensive * stage.iterations for stage in after),
        "operations": sum(stage.operations * stage.iterations for stage in after),
        "bytes": plain.parameter_bytes(function),
        # What vectors must divide in each stage, or else whether one is whole is asked of every number.
        "whole": math.gcd(*(stage.iterations for stage in after)),
        "item": max(plain.item_bytes(str(stage.written.buffer.dtype)) for stage in after),
        "transposed": int(any(stage.crossing() is not None for stage in after)),
        "conditional": int(any(stage.conditional for stage in after)),
    }


def _cost(geometry: Geometry, config: Config, gpu: Gpu) -> tuple[float, ...]:
    """The less the better a guess: enough threads for every multiprocessor first, then the widest accesses."""
    threads = geometry["elements"] / (config["elements"] * config["vector"])
    missing = max(0.0, math.log2(gpu.multiprocessors * RESIDENT_THREADS / 2 / threads))
    wide = abs(math.log2(config["vector"] * geometry["item"] / 16))
    return missing + wide + math.log2(config["elements"]), abs(math.log2(config["threads"] / 256)), -config["vector"]
