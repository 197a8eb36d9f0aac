"""Quantization on a scale and zero point that are taken from the data while the model runs (DynamicQuantizeLinear).

Three kernels: the smallest and largest number of each row, which threads share; scale and zero point, both float32 in
one tensor of two; the integers. A kernel that sums products of the integers reads that tensor as well
(`workers.graph.integer`). As in ONNX Runtime zero is always on the grid, and the scale of nothing but zeros is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax, te, tirx

#: Attribute of a function that gives the "scale" or the "zero" of a grid alone.
PART_ATTR: Final = "tunery.grid_part"
#: Rows are at least that long, where the tensor is so large: their ends are compared by one thread.
_LONG_ROW: Final = 256
_LARGEST: Final = 255


@dataclass(frozen=True, slots=True)
class RunGrid:
    """Where the real numbers of a tensor of uint8 lie, known at run time only: [scale, zero point] of float32."""

    tensor: Any


def quantize_dynamically(builder: relax.BlockBuilder, data: Any) -> relax.Tuple:
    """DynamicQuantizeLinear of a float32 tensor of known shape: integers, scale and zero point."""
    ends = builder.emit_te(_ends, data, primfunc_name_hint="dynamic_ends")
    grid = builder.emit_te(_grid, ends, primfunc_name_hint="dynamic_grid")
    integers = builder.emit_te(_integers, data, grid, primfunc_name_hint="dynamic_quantize")
    scale, zero = (
        builder.emit_te(part, grid, primfunc_name_hint=f"dynamic_{name}", primfunc_attrs={PART_ATTR: name})
        for name, part in (("scale", _scale), ("zero", _zero))
    )
    return relax.Tuple([integers, scale, zero])


def run_grid(module: tvm.ir.IRModule, scale: Any, zero: Any) -> RunGrid | None:
    """The grid whose scale and zero point the results of these two calls are, if they are of one grid."""
    grids = [_whole(module, call, part) for call, part in ((scale, "scale"), (zero, "zero"))]
    return RunGrid(grids[0]) if grids[0] is not None and grids[0].same_as(grids[1]) else None


def _whole(module: tvm.ir.IRModule, call: Any, part: str) -> Any:
    """The grid that this call takes a part of."""
    if not isinstance(call, relax.Call) or call.op != tvm.ir.Op.get("relax.call_tir"):
        return None
    attributes = module[call.args[0]].attrs
    if not attributes or PART_ATTR not in attributes or str(attributes[PART_ATTR]) != part:
        return None
    return call.args[1].fields[0]


def _ends(data: te.Tensor) -> te.Tensor:
    """[rows…, 2]: the smallest and the largest number of each row, of the last axes."""
    sizes = [int(size) for size in data.shape]
    leading = next((k for k in range(len(sizes) - 1, 0, -1) if math.prod(sizes[k:]) >= _LONG_ROW), 0)

    def end(reduce: Any, name: str) -> te.Tensor:
        along = [te.reduce_axis((0, size), f"k{axis}") for axis, size in enumerate(sizes[leading:])]
        return te.compute(sizes[:leading], lambda *row: reduce(data(*row, *along), axis=along), name=name)

    low, high = end(te.min, "low"), end(te.max, "high")

    def either(*index: Any) -> Any:
        *row, which = index
        return tirx.Select(which == 0, low(*row), high(*row))

    return te.compute((*sizes[:leading], 2), either, name="ends")


def _grid(ends: te.Tensor) -> te.Tensor:
    """[scale, zero point] of the numbers between zero and the ends."""
    sizes = [int(size) for size in ends.shape[:-1]]

    def end(reduce: Any, which: int, name: str) -> te.Tensor:
        rows = [te.reduce_axis((0, size), f"k{axis}") for axis, size in enumerate(sizes)]
        return te.compute(
            (1,), lambda _: reduce(ends(*rows, which), axis=rows) if rows else ends[which], name=name
        )  # fmt: skip

    low, high = end(te.min, 0, "lowest"), end(te.max, 1, "highest")
    none = tirx.const(0.0, "float32")

    def number(which: Any) -> Any:
        least, most = tirx.min(low[0], none), tirx.max(high[0], none)
        # TVM multiplies by the reciprocal of a constant: of double the error is too small for a wrong rounding.
        step = ((most - least).astype("float64") / tirx.const(float(_LARGEST), "float64")).astype("float32")
        scale = tirx.Select(least == most, tirx.const(1.0, "float32"), step)
        return tirx.Select(which == 0, scale, tirx.nearbyint(_bounded(none - least / scale)))

    return te.compute((2,), number, name="grid")


def _integers(data: te.Tensor, grid: te.Tensor) -> te.Tensor:
    def integer(*index: Any) -> Any:
        # Through int32: there is an instruction for it, and the number fits.
        return _bounded(tirx.nearbyint(data(*index) / grid[0]) + grid[1]).astype("int32").astype("uint8")

    return te.compute(data.shape, integer, name="integers")


def _scale(grid: te.Tensor) -> te.Tensor:
    return te.compute((), lambda *_: grid[0], name="scale")


def _zero(grid: te.Tensor) -> te.Tensor:
    return te.compute((), lambda *_: grid[1].astype("uint8"), name="zero")


def _bounded(x: Any) -> Any:
    return tirx.min(tirx.max(x, tirx.const(0.0, "float32")), tirx.const(float(_LARGEST), "float32"))
