"""What computations over blocked data are made of: windows, programs that are fused to them, and their functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import te

from workers.graph.pointwise import Program
from workers.search.templates.knobs import GEOMETRY_ATTR, TEMPLATE_ATTR

Shape5 = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Fused:
    """A program and the shapes and types of its other inputs; an axis of length 1 is broadcast."""

    program: Program = field(default_factory=Program)
    inputs: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()  #: one for each input; none where all are float32

    def __bool__(self) -> bool:
        return bool(self.program.steps)

    def placeholders(self, stem: str) -> list[Any]:
        """Tensors for the inputs, called stem0, stem1, …"""
        dtypes = self.dtypes or ("float32",) * len(self.inputs)
        pairs = zip(self.inputs, dtypes, strict=True)
        return [te.placeholder(shape, dtype, name=f"{stem}{k}") for k, (shape, dtype) in enumerate(pairs)]

    def behind(self, inputs: Sequence[Any]) -> Callable[[Any, Sequence[Any]], Any]:
        """The program's result for a value and where it stands."""
        return lambda value, index: self.program.evaluate(value, [at(tensor, index) for tensor in inputs])


@dataclass(frozen=True, slots=True)
class Window:
    """How a window moves over height and width."""

    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  #: top, left, bottom, right

    def extent(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result."""
        top, left, bottom, right = self.padding
        reach_h, reach_w = ((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        return (
            (height + top + bottom - reach_h) // self.strides[0] + 1,
            (width + left + right - reach_w) // self.strides[1] + 1,
        )

    @property
    def is_point(self) -> bool:
        return self.kernel == (1, 1) and self.padding == (0, 0, 0, 0)


class BlockedConvolution:
    """What convolutions over blocked data have in common, whatever numbers they sum."""

    __slots__ = ()
    batch: int
    in_blocks: int
    height: int
    width: int
    out_blocks: int
    block: int
    window: Window
    plain_channels: int
    epilogue: Fused

    @property
    def data_shape(self) -> tuple[int, ...]:
        if self.plain_channels:
            return (self.batch, self.plain_channels, self.height, self.width)
        return (self.batch, self.in_blocks, self.height, self.width, self.block)

    @property
    def result_shape(self) -> Shape5:
        return (self.batch, self.out_blocks, *self.window.extent(self.height, self.width), self.block)

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.epilogue.program.dtype("float32")


def at(tensor: Any, index: Sequence[Any]) -> Any:
    """The element of a tensor that is broadcast over its axes of length 1."""
    return tensor[tuple(0 if int(size) == 1 else i for size, i in zip(tensor.shape, index, strict=True))]


def function_of(tensors: Sequence[Any], template: str, geometry: Mapping[str, int]) -> tvm.tirx.PrimFunc:
    """The function with these parameters, for this template."""
    function = te.create_prim_func(list(tensors))
    text = json.dumps(dict(geometry), sort_keys=True)
    return function.with_attr({TEMPLATE_ATTR: template, GEOMETRY_ATTR: text, "tirx.noalias": True})
