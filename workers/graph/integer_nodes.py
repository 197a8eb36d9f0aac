"""Which operators of a quantized graph are computed in integers, and their calls.

An operator that sums reads uint8 data where a dequantization lies before it, and weights where one of int8 does. It is
computed in integers if it is one that `workers.graph.integer` has; else the dequantization is a kernel's first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import tvm
from numpy.typing import NDArray
from tvm import relax

from tuning_db.keys import Json
from workers.graph.computations import Computation, Pooling
from workers.graph.dynamic import RunGrid, run_grid
from workers.graph.folding import in_units
from workers.graph.integer import IntegerConvolution, IntegerDense, run_constants
from workers.graph.layout import Slots
from workers.graph.nodes import (
    Blocked,
    Group,
    Node,
    averages_pixels,
    dtype_of,
    fits_pool,
    is_depthwise,
    is_nchw,
    read,
    shape_of,
    size_of,
    window_of,
)  # fmt: skip
from workers.graph.parts import Fused, Window
from workers.graph.pointwise import OPERATORS, VALUE, Program, Step
from workers.graph.quantized import Grid, Weights, grid_of, weights_of
from workers.search.templates.knobs import BELOW

Array = NDArray[Any]

#: A plain input of at most this many channels is read by the first convolution as it is.
FEW_CHANNELS: Final = 8
#: Rows of a product of integers that are computed as images of one pixel.
_FEW_ROWS: Final = 64
AVERAGES: Final = ("mean", "nn.avg_pool2d")
#: Operators that sum products.
SUMS: Final = frozenset({"matmul", *(f"nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose"))})


@dataclass(frozen=True, slots=True)
class Integers:
    """What an operator reads that sums integers: uint8 data on a grid, or float32 that is quantized to it first."""

    source: Any
    grid: Grid | RunGrid
    weights: Weights | None  #: None for an average
    absorbed: tuple[int, ...]  #: nodes that it does the work of
    quantizes: bool = False
    signed: bool = False  #: whether products are of data less 128
    rows: bool = False  #: whether it is plain rows, and so is the result

    @property
    def zero(self) -> int:
        """The zero point of the data; 0 if that is known at run time only."""
        return self.grid.zero if isinstance(self.grid, Grid) else 0

    @property
    def below(self) -> int:
        """What the integers that are multiplied are less than those of the grid."""
        return BELOW if self.signed else 0


@dataclass(frozen=True, slots=True)
class InReal:
    """A convolution or product of a quantized graph whose products are not of bytes."""

    operator: str
    shape: tuple[int, ...]  #: of its result
    reason: str

    def told(self) -> dict[str, Json]:
        """As the manifest tells it."""
        return {"operator": self.operator, "shape": list(self.shape), "reason": self.reason}


class IntegerNodes:
    """The nodes of a graph, and what of them is in kernels so far."""

    def __init__(self, module: tvm.ir.IRModule, block: int, *, signed: bool) -> None:
        """NotBlockable if `main` is not one dataflow block of static shapes."""
        self._module = module
        self._block = block
        self._signed = signed  #: whether dot products are of int8 by int8
        self._nodes = list(read(module))
        self._index = {node.variable: node.index for node in self._nodes}
        self._group_of: dict[int, Group] = {}
        self._blocked: set[int] = set()
        self._integers: dict[int, Integers] = {}  #: by the anchor of a group
        self._reasons: dict[int, str] = {}  #: why a node that sums is not among them

    @property
    def is_quantized(self) -> bool:
        """Whether anything in it is quantized."""
        return is_quantized(self._nodes)

    @property
    def integer_sums(self) -> int:
        """Convolutions and products that are computed in integers."""
        return sum(integers.weights is not None for integers in self._integers.values())

    @property
    def real_sums(self) -> list[InReal]:
        """Those that are not, in the order of the graph."""
        return [
            InReal(
                node.operator,
                node.shape,
                reason_of_real(node, self._reasons.get(node.index, "no kernel of bytes computes it")),
            )
            for node in self._nodes
            if node.operator in SUMS and node.index not in self._integers
        ]

    def _node(self, expression: Any) -> Node | None:
        index = self._index.get(expression) if isinstance(expression, relax.Var) else None
        return None if index is None else self._nodes[index]

    def _is_blocked(self, expression: Any) -> bool:
        node = self._node(expression)
        return node is not None and node.index in self._blocked

    def _dequantized(self, expression: Any) -> Node | None:
        """What dequantizes uint8 to this, if that is so and not part of a kernel yet."""
        node = self._node(expression)
        if node is None or node.operator != "dequantize" or node.index in self._group_of:
            return None
        grid = grid_of(node.arguments, dtype_of(node.arguments[0]))
        return node if grid is not None and grid.dtype == "uint8" else None

    def _dequantized_by_run(self, expression: Any) -> tuple[Any, RunGrid] | None:
        """The uint8 that this dequantizes, and their grid, if that is known at run time only."""
        node = self._node(expression)
        if node is None or node.operator != "dequantize" or dtype_of(node.arguments[0]) != "uint8":
            return None
        scale, zero = (self._node(argument) for argument in node.arguments[1:])
        if scale is None or zero is None:
            return None
        grid = run_grid(self._module, scale.value, zero.value)
        return None if grid is None else (node.arguments[0], grid)

    def _may_end_at(self, node: Node) -> bool:
        """Whether a kernel may have this as its last: not real numbers that another would rather have as integers."""
        if node.operator != "dequantize":
            return True
        return not any(self._wants_integers(self._nodes[use]) for use in node.uses if use >= 0)

    def _wants_integers(self, node: Node) -> bool:
        if node.operator in ("nn.conv2d", "matmul"):
            return self._integers_of(node) is not None
        return node.operator in OPERATORS or node.operator in AVERAGES

    def _integers_of(self, node: Node) -> Integers | None:
        """What this reads as integers, if it is an operator that sums them."""
        if node.operator not in ("nn.conv2d", "matmul", *AVERAGES):
            return None
        found = self._sum_of(node)
        if isinstance(found, Integers):
            return found
        self._reasons[node.index] = found
        return None

    def _sum_of(self, node: Node) -> Integers | str:
        """What it reads, or why it does not read integers."""
        dequantized = self._dequantized(node.arguments[0])
        by_run = self._dequantized_by_run(node.arguments[0])
        grid: Grid | RunGrid | None
        absorbed: tuple[int, ...] = ()
        if dequantized is not None:
            source, absorbed = dequantized.arguments[0], (dequantized.index,)
            grid = grid_of(dequantized.arguments, dtype_of(source))
        elif by_run is not None:
            # What dequantizes it is not absorbed: others may read that.
            source, grid = by_run
        else:
            return "its data is not quantized to 8 bits on one scale"
        assert grid is not None
        if node.operator in AVERAGES:
            fits = averages_pixels(node) if node.operator == "mean" else fits_pool(node)
            if not self._is_blocked(source) or not fits or isinstance(grid, RunGrid):
                return "its data is not blocked, or its window not one of pixels"
            return Integers(source, grid, None, absorbed)
        if node.operator == "nn.conv2d":
            rows = False
            if not is_nchw(node):
                return "its layout is not NCHW"
            if isinstance(grid, RunGrid) and int(node.attributes.groups) > 1:
                return "its scale and zero point are known at run time only, and it is of groups"
            outputs, rank = 0, 4
        else:
            # Few rows, and what is blocked, are images of one pixel.
            rows = not self._is_blocked(source) and (len(node.shape) != 2 or node.shape[0] > _FEW_ROWS)
            if rows and not IntegerDense.fits(shape_of(source)[-1], node.shape[-1], self._block):
                return f"its rows are no whole fours, or its outputs no whole blocks of {self._block}"
            outputs, rank = 1, 2
        weight = self._node(node.arguments[1])
        weights = None if weight is None else weights_of(weight.value, outputs, rank)
        if weights is None:
            return "its other operand is not a constant of int8 around zero"
        signed = self._signed and not (node.operator == "nn.conv2d" and is_depthwise(node))
        found = Integers(source, grid, weights, absorbed, signed=signed, rows=rows)
        try:
            _constants_of(found, weights, [], [])
        except OverflowError as error:
            return str(error)
        made = self._node(source)
        if (
            made is not None
            and dequantized is not None
            and made.operator == "quantize"
            and made.index not in self._group_of
            and made.uses == [dequantized.index]
            and rank == 4
            and int(node.attributes.groups) == 1
            and made.shape[1] <= FEW_CHANNELS
            and not self._is_blocked(made.arguments[0])
        ):
            return replace(found, source=made.arguments[0], absorbed=(made.index, dequantized.index), quantizes=True)
        return found

    def _reads_weights(self, node: Node) -> bool:
        """Whether this dequantizes what is read as integers alone, weights or data."""
        return node.operator == "dequantize" and bool(node.uses) and all(use in self._integers for use in node.uses)


def is_quantized(nodes: Sequence[Node]) -> bool:
    """Whether anything in a graph of these is quantized."""
    return any(node.operator in ("quantize", "dequantize") or _sums_wide_integers(node) for node in nodes)


def reason_of_real(node: Node, reason: str) -> str:
    """Why an operator that sums does so not in products of bytes, `reason` where it sums real numbers."""
    if _sums_wide_integers(node):
        return "its weights have a zero point, or its sums are read as integers: int32 times int32"
    return reason


def _sums_wide_integers(node: Node) -> bool:
    return node.operator in SUMS and dtype_of(node.variable) == "int32"


def _constants_of(
    integers: Integers, weights: Weights, steps: Sequence[Step], operands: Sequence[Any]
) -> tuple[Array, Array, list[Step], list[Any]]:
    """`in_units`, or of a grid that is known at run time only the same with all steps left. OverflowError if 32 bits
    may be too few for a sum."""
    if isinstance(integers.grid, Grid):
        summed = replace(integers.grid, zero=integers.grid.zero - integers.below)
        return in_units(steps, operands, summed, weights)
    zeros = (-integers.below, 255 - integers.below)
    return run_constants(zeros, weights.integers), weights.scales, list(steps), list(operands)


class Emission(Protocol):
    """The writing of a graph that a call is part of."""

    _graph: Any
    _builder: relax.BlockBuilder

    def _blocked(self, expression: Any, slots: Slots | None) -> Blocked: ...
    def _plain(self, variable: Any) -> Any: ...
    def _rows_of(self, expression: Any, rows: int) -> Any: ...
    def _reshaped(self, expression: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any: ...
    def _fuse_rows(
        self, steps: Sequence[Step], operands: Sequence[Any], slots: Slots, rows: int
    ) -> tuple[Fused, list[Any]]: ...
    def _wanted_slots(self, operands: Sequence[Any], shape: tuple[int, ...]) -> Slots | None: ...
    def _fuse(
        self, group: Group, slots: Slots, shape: tuple[int, ...], shift: Array | None = None,
        steps: Sequence[Step] | None = None, operands: Sequence[Any] | None = None,
    ) -> tuple[Fused, list[Any]]: ...  # fmt: skip
    def _call(
        self, computation: Computation, data: Sequence[Any], *, weight: Array | None = None,
        table: Array | None = None, others: Sequence[Any] = (),
    ) -> Any: ...  # fmt: skip


def integer_convolution(
    emission: Emission, group: Group, node: Node, integers: Integers, weights: Weights, shape: tuple[int, ...]
) -> Blocked:
    """A convolution or product of rows, from sums of integers to whatever its epilogue makes of them."""
    block, grid = emission._graph.block, integers.grid
    dynamic = isinstance(grid, RunGrid)
    if node.operator == "nn.conv2d" and int(node.attributes.groups) > 1:
        return (_depthwise if is_depthwise(node) else _grouped)(emission, group, node, integers, weights, shape)
    window = window_of(node) if node.operator == "nn.conv2d" else Window()
    out = emission._wanted_slots(group.operands, shape) or Slots.in_order(shape[1], block)
    added, factor, steps, operands = _constants_of(integers, weights, group.steps, group.operands)
    fused, others = emission._fuse(group, out, shape, None, steps, operands)
    source = integers.source
    pre = Fused()
    if integers.quantizes:
        assert isinstance(grid, Grid)
        numbers = (grid.scale, grid.zero, *grid.bounds)
        pre = Fused(Program((Step("quantize", (VALUE, *(("number", float(n)) for n in numbers))),)))
    arranged = out.fill(weights.integers)
    channels = shape_of(source)[1]
    if integers.quantizes or (channels <= FEW_CHANNELS and not emission._graph._is_blocked(source)):
        value = emission._plain(source)
        conv = IntegerConvolution(
            shape[0],
            1,
            *size_of(shape_of(source)),
            out.blocks,
            block,
            integers.zero,
            window,
            channels,
            pre,
            fused,
            integers.signed,
            dynamic=dynamic,
        )
        if len(shape_of(source)) != 4:
            value = emission._builder.emit(relax.op.reshape(value, conv.data_shape))
    else:
        data = emission._blocked(source, None)
        value, arranged = data.variable, data.slots.fill(arranged, axis=1)
        conv = IntegerConvolution(
            shape[0],
            data.slots.blocks,
            *data.size,
            out.blocks,
            block,
            integers.zero,
            window,
            0,
            pre,
            fused,
            integers.signed,
            dynamic=dynamic,
        )
    constants = _constants(emission, integers, out, added, factor)
    variable = emission._call(conv, [value], weight=arranged, others=[*constants, *others])
    return Blocked(variable, out, shape)


def _depthwise(
    emission: Emission, group: Group, node: Node, integers: Integers, weights: Weights, shape: tuple[int, ...]
) -> Blocked:
    """A convolution of each channel by itself: slots stay what they are."""
    data = emission._blocked(integers.source, None)
    added, factor, steps, operands = _constants_of(integers, weights, group.steps, group.operands)
    fused, others = emission._fuse(group, data.slots, shape, None, steps, operands)
    pool = Pooling(
        "depthwise", shape[0], data.slots.blocks, *data.size, emission._graph.block, window_of(node), False, Fused(),
        fused, data.dtype, integers.zero,
    )  # fmt: skip
    packed = data.slots.fill(weights.integers[:, 0])
    constants = _constants(emission, integers, data.slots, added, factor)
    return Blocked(
        emission._call(pool, [data.variable], weight=packed, others=[*constants, *others]), data.slots, shape
    )


def _grouped(
    emission: Emission, group: Group, node: Node, integers: Integers, weights: Weights, shape: tuple[int, ...]
) -> Blocked:
    """A convolution of several groups, from channels in order to channels in order."""
    block, groups = emission._graph.block, int(node.attributes.groups)
    channels = shape_of(integers.source)[1]
    data = emission._blocked(integers.source, Slots.in_order(channels, block))
    out = Slots.in_order(shape[1], block)
    added, factor, steps, operands = _constants_of(integers, weights, group.steps, group.operands)
    fused, others = emission._fuse(group, out, shape, None, steps, operands)
    conv = IntegerConvolution(
        shape[0], data.slots.blocks, *data.size, out.blocks, block, integers.zero, window_of(node), 0, Fused(),
        fused, integers.signed, groups, (channels // groups, shape[1] // groups),
    )  # fmt: skip
    arranged, constants = out.fill(weights.integers), _constants(emission, integers, out, added, factor)
    return Blocked(emission._call(conv, [data.variable], weight=arranged, others=[*constants, *others]), out, shape)


def integer_dense(
    emission: Emission, group: Group, node: Node, integers: Integers, weights: Weights, shape: tuple[int, ...]
) -> Any:
    """Rows of plain data times constant weights, to plain rows."""
    outputs, length, _, _ = weights.integers.shape
    rows = math.prod(node.shape[:-1])
    slots = Slots.in_order(outputs, emission._graph.block)
    added, factor, steps, operands = _constants_of(integers, weights, group.steps, group.operands)
    fused, others = emission._fuse_rows(steps, operands, slots, rows)
    dynamic = isinstance(integers.grid, RunGrid)
    dense = IntegerDense(rows, length, outputs, slots.block, integers.signed, fused, dynamic)
    data = emission._rows_of(integers.source, rows)
    constants = _constants(emission, integers, slots, added, factor)
    result = emission._call(dense, [data], weight=weights.integers, others=[*constants, *others])
    return emission._reshaped(result, (rows, outputs), shape)


def _constants(emission: Emission, integers: Integers, slots: Slots, added: Array, factor: Array) -> list[Any]:
    """One of each for a slot, [blocks, block], and the grid of the data if that is known at run time only."""
    found = [relax.const(slots.fill(vector).reshape(slots.blocks, slots.block)) for vector in (added, factor)]
    return [*found, emission._plain(integers.grid.tensor)] if isinstance(integers.grid, RunGrid) else found
