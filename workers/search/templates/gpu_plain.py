"""placeholder"""

from __future__ import annotations

from typing import Any

from workers.search.templates.knobs import Geometry


def gpu_templates(function: Any) -> list[tuple[str, Geometry]]:
    return []
