"""What one call of a function has to do at least, read from the function itself: operations, bytes, constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import tvm

from workers.search.templates.plain import item_bytes, nests

#: Which parameters are constants of the model, by TVM's pass AttachAttrLayoutFreeBuffers.
_CONSTANTS_ATTR: Final = "layout_free_buffers"
#: The parameter of a kernel of ours that is its weights.
_WEIGHT: Final = "weight"


@dataclass(frozen=True, slots=True)
class Work:
    """Of one call, whatever its schedule is."""

    flops: float
    bytes: float  #: read and written, each byte once
    constant_bytes: float  #: of them, those of constants


def work_of(module: tvm.ir.IRModule) -> Work:
    """Of the function `main`. A parameter counts with the elements that loops reach at most: a function that takes a
    few rows of a large table does not read it all. What is in a nest that is not understood counts nothing."""
    function = module["main"]
    reached = dict.fromkeys(function.params, 0)
    for _, stage in nests(function):
        if stage is not None:
            for access in (*stage.read, stage.written):
                if access.buffer in reached:
                    reached[access.buffer] += stage.iterations
    sizes = [_bytes(buffer, elements) for buffer, elements in reached.items()]
    constants = [sizes[index] for index in constants_of(function)]
    return Work(float(tvm.s_tir.analysis.estimate_tir_flops(module)), float(sum(sizes)), float(sum(constants)))


def constants_of(function: tvm.tirx.PrimFunc) -> tuple[int, ...]:
    """The positions of the parameters that are constants of the model: what a call reads cold within an inference."""
    marked = function.attrs.get(_CONSTANTS_ATTR, ()) if function.attrs else ()
    named = [index for index, parameter in enumerate(function.params) if parameter.name == _WEIGHT]
    return tuple(sorted({*map(int, marked), *named}))


def _bytes(buffer: Any, elements: int) -> int:
    if not all(isinstance(size, tvm.tirx.IntImm) for size in buffer.shape):
        return 0
    return item_bytes(str(buffer.dtype)) * min(elements, math.prod(int(size) for size in buffer.shape))
