"""All schedule templates for GPUs, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.search.templates.gpu_default import GpuDefaultTemplate
from workers.search.templates.gpu_map import GpuMapTemplate
from workers.search.templates.gpu_product import GpuProductTemplate
from workers.search.templates.gpu_reduce import GpuReduceTemplate
from workers.search.templates.gpu_tensor import GpuTensorTemplate
from workers.search.templates.knobs import Gpu, Template

_TEMPLATES: Final[tuple[Template[Gpu], ...]] = (
    GpuDefaultTemplate(), GpuMapTemplate(), GpuProductTemplate(), GpuReduceTemplate(), GpuTensorTemplate(),
)  # fmt: skip
GPU_TEMPLATES: Final[Mapping[str, Template[Gpu]]] = {template.name: template for template in _TEMPLATES}
