"""Says which templates schedule a PrimFunc of ordinary loop nests for a GPU. The counterpart of `plain` for CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import tvm
from tvm import s_tir, tirx

from workers.search.templates import gpu_map, gpu_product, gpu_reduce
from workers.search.templates.gpu_registry import GPU_TEMPLATES
from workers.search.templates.knobs import Geometry, Gpu

#: What a template is tried on: a small GPU with everything that any has.
_TRIED_ON: Final = Gpu(multiprocessors=16, tensor_types=("float16", "int8"))

#: Fragments of 16 by 16 are mostly padding for a product that is smaller, and tiles hardly read a number twice.
_LEAST_SIDE: Final = 8


def gpu_template(function: tirx.PrimFunc) -> list[tuple[str, dict[str, int]]]:
    """The templates that schedule the function, a lowered one without a schedule, and its geometry for each.

    The likeliest first; none if none of ours does. Each has been applied once, with its first guess. One may have no
    choice for a GPU that lacks what it needs. Equal functions give equal answers.
    """
    return [(name, dict(geometry)) for name, geometry in _candidates(function) if _applies(name, geometry, function)]


def _candidates(function: tirx.PrimFunc) -> Iterator[tuple[str, Geometry]]:
    if (product := gpu_product.product_of(function)) is not None:
        large = min(product.geometry["rows"], product.geometry["columns"], product.geometry["sum"]) >= _LEAST_SIDE
        names = ["gpu-tensor", "gpu-product"] if large else ["gpu-product", "gpu-tensor"]
        for name in names if product.geometry["tensor"] else ["gpu-product"]:
            yield name, product.geometry
    thin = product is None or min(product.geometry["rows"], product.geometry["columns"]) < _LEAST_SIDE
    if thin and (reduction := gpu_reduce.geometry_of(function)) is not None:
        yield "gpu-reduce", reduction
    if (elements := gpu_map.geometry_of(function)) is not None:
        yield "gpu-map", elements


def _applies(name: str, geometry: Geometry, function: tirx.PrimFunc) -> bool:
    template = GPU_TEMPLATES[name]
    configs = template.configs(geometry, _TRIED_ON)
    if not configs:
        return False
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}), error_render_level="fast")
    try:
        template.apply(schedule, geometry, configs[0], _TRIED_ON)
    except Exception:  # whatever a primitive refuses, in TVM's own kinds of error
        return False
    return True
