"""TVM's own schedule of a kernel for GPUs as a choice among others: what every template has to beat."""

from __future__ import annotations

from typing import Any, ClassVar

from workers.search.templates.knobs import Config, Geometry, Gpu, Template


class GpuDefaultTemplate(Template[Gpu]):
    """Applies nothing: what has no schedule gets the default when it is compiled (`workers.graph.gpu`)."""

    name: ClassVar[str] = "gpu-default"
    knobs: ClassVar[tuple[str, ...]] = ()

    def configs(self, geometry: Geometry, machine: Gpu) -> list[Config]:
        return [{}]

    def apply(self, schedule: Any, geometry: Geometry, config: Config, machine: Gpu) -> None:
        pass

    def features(self, geometry: Geometry, config: Config, machine: Gpu) -> list[float]:
        return [0.0]
