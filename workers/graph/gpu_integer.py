"""Convolutions and products of a quantized graph in integers, for GPUs: int8 times int8 into int32 sums.

What tensor cores take: data and weights of int8 (`FoldConstants("int8")` leaves no other bytes in a graph but those of
its inputs, and of grids that are known at run time only, which are moved by 128 here). With x and w the integers, a sum
stands for the real number

    m · (Σ w·x + c),   c = bias − zero_x · Σ w,   m = scale_x · scale_w

where padding is x = zero_x. `c`, `m` and the rounding are those of `workers.graph.integer`, and so is what of the
following operators goes into them (`workers.graph.folding.in_units`). What sums, and what makes bytes or real numbers
of the sums, are two functions here, which TVM fuses, and with them whatever else is elementwise behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax, te, tirx
from tvm.ir.expr import GenericConst

from tuning_db.keys import Json
from workers.graph.dynamic import RunGrid, run_grid
from workers.graph.folding import channel_vector, in_units
from workers.graph.integer import run_constants
from workers.graph.integer_nodes import SUMS, InReal, is_quantized, reason_of_real
from workers.graph.nodes import (
    Node,
    NotBlockable,
    dtype_of,
    is_nchw,
    number_of,
    read,
    rewritten,
    shape_of,
    window_of,
)
from workers.graph.parts import Window
from workers.graph.pointwise import OPERATORS, VALUE, Program, Ref, Step
from workers.graph.quantized import Grid, Weights, grid_of, weights_of
from workers.search.templates.knobs import BELOW

Array = NDArray[Any]

#: Operators of the value and of constants that may go into the epilogue's constants.
_FOLDED: Final = frozenset({"add", "subtract", "multiply", "divide", "maximum", "minimum", "clip", "relu", "quantize"})


@dataclass(frozen=True, slots=True)
class QuantizedSums:
    """What became of the convolutions and products of a quantized graph."""

    in_integers: int
    in_real: tuple[InReal, ...]  #: the others, in the order of the graph

    def told(self) -> dict[str, Json]:
        """As the manifest tells it."""
        return {"in_integers": self.in_integers, "others": [found.told() for found in self.in_real]}


@dataclass(frozen=True, slots=True)
class _Sum:
    """A convolution or product of integers, with the operators that its constants stand for."""

    node: Node
    source: Any  #: int8, or uint8 that is yet to be moved
    grid: Grid | RunGrid
    weights: Weights
    added: NDArray[np.int32]  #: to the sums; of a grid that is known at run time only, times its zero point, taken off
    factor: NDArray[np.float32]
    steps: tuple[Step, ...]
    operands: tuple[Any, ...]  #: of steps: constants with a number for each channel, or one
    last: Node

    @property
    def axis(self) -> int:
        """Of channels in the result."""
        return 1 if self.node.operator == "nn.conv2d" else len(self.node.shape) - 1


def integer_sums(module: tvm.ir.IRModule) -> tuple[tvm.ir.IRModule, QuantizedSums | None]:
    """The simplified module with its quantized sums in integers, and which these are; None if nothing is quantized, or
    `main` is not one dataflow block of static shapes, which stays as it is."""
    try:
        nodes = list(read(module))
        if not is_quantized(nodes):
            return module, None
        writing = _Writing(module, nodes)
        return writing.module(), writing.told()
    except NotBlockable:  # a shape may turn out not to be known while it is written
        return module, None


class _Writing:
    """`main` written anew."""

    def __init__(self, module: tvm.ir.IRModule, nodes: Sequence[Node]) -> None:
        self._module = module
        self._nodes = nodes
        self._made_by = {node.variable: node for node in nodes}
        self._builder = relax.BlockBuilder(
            tvm.IRModule({v: function for v, function in module.functions.items() if v.name_hint != "main"})
        )
        self._values: dict[Any, Any] = {}  #: variable → expression of the new function
        self._moved: dict[Any, Any] = {}  #: variable of uint8 → the same as int8
        self._sums: dict[int, _Sum] = {}
        self._reasons: dict[int, str] = {}
        for node in nodes:
            if node.operator in SUMS:
                found = self._sum_of(node)
                if isinstance(found, _Sum):
                    self._sums[node.index] = found
                else:
                    self._reasons[node.index] = found

    def told(self) -> QuantizedSums:
        real = tuple(
            InReal(node.operator, node.shape, reason_of_real(node, self._reasons[node.index]))
            for node in self._nodes
            if node.index in self._reasons
        )
        return QuantizedSums(len(self._sums), real)

    def module(self) -> tvm.ir.IRModule:
        main, builder = self._module["main"], self._builder
        folded = {index for found in self._sums.values() for index in self._between(found)}
        with builder.function("main", list(main.params), attrs=dict(main.attrs) if main.attrs else {}):
            with builder.dataflow():
                for node in self._nodes:
                    if node.index in self._sums:
                        found = self._sums[node.index]
                        self._values[found.last.variable] = self._emit_sum(found)
                    elif node.index not in folded:
                        self._values[node.variable] = self._emit(node)
                result = builder.emit_output(self._read(main.body.body))
            builder.emit_func_output(result)
        return relax.transform.DeadCodeElimination()(builder.finalize())

    def _between(self, found: _Sum) -> list[int]:
        """The nodes behind the sum that are part of it."""
        indices = []
        node = found.node
        while node is not found.last:
            node = self._nodes[node.uses[0]]
            indices.append(node.index)
        return indices

    def _made(self, expression: Any, operator: str) -> Node | None:
        node = self._made_by.get(expression) if isinstance(expression, relax.Var) else None
        return node if node is not None and node.operator == operator else None

    def _sum_of(self, node: Node) -> _Sum | str:
        """What it is in integers, or why it is not."""
        dequantized = self._made(node.arguments[0], "dequantize")
        source = None if dequantized is None else dequantized.arguments[0]
        grid = None if dequantized is None else self._grid(dequantized)
        if dequantized is None or grid is None or dtype_of(source) not in ("int8", "uint8"):
            return "its data is not quantized to 8 bits on one scale"
        if node.operator == "nn.conv2d":
            if not is_nchw(node):
                return "its layout is not NCHW"
            outputs, rank = 0, 4
        elif node.operator == "matmul" and len(shape_of(source)) > 1:
            outputs, rank = 1, 2
        else:
            return "no kernel of bytes computes it"
        weight = self._made(node.arguments[1], "dequantize")
        weights = None if weight is None else weights_of(weight.value, outputs, rank)
        if weights is None:
            return "its other operand is not a constant of int8 around zero"
        try:
            if isinstance(grid, RunGrid):
                sums = run_constants((-BELOW, BELOW - 1), weights.integers)
                return _Sum(node, source, grid, weights, sums, weights.scales, (), (), node)
            steps, operands, last = self._behind(node, len(weights.scales))
            added, factor, left, read = in_units(steps, operands, grid.of("int8"), weights)
        except OverflowError as error:
            return str(error)
        return _Sum(node, source, grid, weights, added, factor, tuple(left), tuple(read), last)

    def _grid(self, dequantized: Node) -> Grid | RunGrid | None:
        source, scale, zero = dequantized.arguments
        grid = grid_of(dequantized.arguments, dtype_of(source))
        if grid is not None:
            return grid
        parts = [self._made_by.get(part) if isinstance(part, relax.Var) else None for part in (scale, zero)]
        if parts[0] is None or parts[1] is None or dtype_of(source) != "uint8":
            return None
        return run_grid(self._module, parts[0].value, parts[1].value)

    def _behind(self, node: Node, channels: int) -> tuple[list[Step], list[Any], Node]:
        """The operators that follow one after the other, each the only reader of the one before, as steps; the
        constants that they read, and the last of them. A quantization ends them."""
        steps: list[Step] = []
        operands: list[Any] = []
        axis = 1 if node.operator == "nn.conv2d" else len(node.shape) - 1
        last = node
        while len(last.uses) == 1 and last.uses[0] >= 0:
            following = self._nodes[last.uses[0]]
            if following.operator not in _FOLDED or following.shape != node.shape:
                break
            value: Ref = ("step", len(steps) - 1) if steps else VALUE
            arguments: list[Ref] = []
            if following.operator == "quantize":
                grid = grid_of(following.arguments, dtype_of(following.variable))
                if grid is None or grid.dtype != "int8" or not following.arguments[0].same_as(last.variable):
                    break
                numbers = (grid.scale, grid.zero, *grid.bounds)
                steps.append(Step("quantize", (value, *(("number", float(number)) for number in numbers))))
                return steps, operands, following
            added: list[Any] = []
            for argument in following.arguments:
                number = number_of(argument)
                if isinstance(argument, relax.Var) and argument.same_as(last.variable):
                    arguments.append(value)
                elif number is not None:
                    arguments.append(("number", number))
                elif _is_for_channels(argument, axis, len(node.shape), channels):
                    arguments.append(("input", len(operands) + len(added)))
                    added.append(argument)
            if len(arguments) < len(following.arguments):
                break
            operands += added
            steps.append(Step(following.operator, tuple(arguments)))
            last = following
        return steps, operands, last

    def _emit_sum(self, found: _Sum) -> Any:
        node, grid = found.node, found.grid
        data = self._int8(found.source)
        zeros = [self._read(grid.tensor)] if isinstance(grid, RunGrid) else []
        weight = found.weights.integers
        if node.operator == "nn.conv2d":
            zero = 0 if isinstance(grid, RunGrid) else grid.of("int8").zero
            compute = _convolution(window_of(node), int(node.attributes.groups), node.shape, zero)
            name = "int8_conv2d"
        else:
            weight, compute, name = weight[:, :, 0, 0], _product, "int8_matmul"
        padding = zeros if node.operator == "nn.conv2d" and any(window_of(node).padding) else []
        constant = relax.const(np.ascontiguousarray(weight))
        total = self._builder.emit_te(compute, data, constant, *padding, primfunc_name_hint=name)
        constants: list[Any] = [relax.const(vector) for vector in (found.added, found.factor)]
        if zeros:
            # By a kernel of its own: TVM fuses none that reads a tensor at fixed places.
            both = self._builder.emit_te(_at_run_time, *constants, *zeros, primfunc_name_hint="dynamic_constants")
            constants = [self._builder.emit(relax.TupleGetItem(both, index)) for index in (0, 1)]
        channels = len(found.weights.scales)
        others = [
            relax.const(np.ascontiguousarray(channel_vector(operand, channels), dtype="float32"))
            for operand in found.operands
        ]
        finish = _finish(found.steps, found.axis)
        return self._builder.emit_te(finish, total, *constants, *others, primfunc_name_hint="finish")

    def _emit(self, node: Node) -> Any:
        grid = grid_of(node.arguments, dtype_of(node.variable)) if node.operator == "quantize" else None
        if grid is None or grid.dtype not in ("int8", "uint8"):
            return self._builder.emit(self._read(node.value))
        numbers = (grid.scale, grid.zero, *grid.bounds)
        dtype = grid.dtype

        # By the expression of the kernels that sum, so that a number is the same quantum wherever it is rounded.
        def quantized(data: te.Tensor) -> te.Tensor:
            return te.compute(data.shape, lambda *index: _quantize(data(*index), numbers, dtype), name="quantized")

        return self._builder.emit_te(quantized, self._read(node.arguments[0]), primfunc_name_hint="quantize")

    def _int8(self, source: Any) -> Any:
        """The tensor, moved if it is of uint8."""
        if dtype_of(source) == "int8":
            return self._read(source)
        if source not in self._moved:

            def moved(data: te.Tensor) -> te.Tensor:
                def element(*index: Any) -> Any:
                    return (data(*index).astype("int32") - BELOW).astype("int8")

                return te.compute(data.shape, element, name="moved")

            self._moved[source] = self._builder.emit_te(moved, self._read(source), primfunc_name_hint="moved")
        return self._moved[source]

    def _read(self, expression: Any) -> Any:
        """The expression over the new function's variables."""
        return rewritten(expression, lambda variable: self._values.get(variable, variable))


def _is_for_channels(expression: Any, axis: int, rank: int, channels: int) -> bool:
    """Whether it is a constant with a number for each channel of a tensor of that rank."""
    if not isinstance(expression, GenericConst) or dtype_of(expression) != "float32":
        return False
    shape = shape_of(expression)
    wide = [1] * (rank - len(shape)) + list(shape)
    return len(wide) == rank and wide == [channels if place == axis else 1 for place in range(rank)]


def _convolution(window: Window, groups: int, shape: tuple[int, ...], zero: int) -> Callable[..., te.Tensor]:
    """Of data [n, c, h, w], weights [o, c of a group, kh, kw], and the grid if padding depends on it."""
    (top, left, _, _), (sh, sw), (dh, dw) = window.padding, window.strides, window.dilation

    def compute(data: te.Tensor, weight: te.Tensor, *grid: te.Tensor) -> te.Tensor:
        _, channels, height, width = (int(size) for size in data.shape)
        inside, outside = channels // groups, shape[1] // groups
        read = data
        if any(window.padding):
            reach_h = (shape[2] - 1) * sh + (window.kernel[0] - 1) * dh + 1
            reach_w = (shape[3] - 1) * sw + (window.kernel[1] - 1) * dw + 1

            def pad(n: Any, c: Any, h: Any, w: Any) -> Any:
                fill = (grid[0][1].astype("int32") - BELOW).astype("int8") if grid else tirx.const(zero, "int8")
                within = te.all(h >= top, h < top + height, w >= left, w < left + width)
                return te.if_then_else(within, data[n, c, h - top, w - left], fill)

            read = te.compute((shape[0], channels, reach_h, reach_w), pad, name="padded")
        c, kh, kw = (te.reduce_axis((0, int(size)), name) for size, name in
                     zip(weight.shape[1:], ("c", "kh", "kw"), strict=True))  # fmt: skip

        def total(n: Any, o: Any, h: Any, w: Any) -> Any:
            channel = c if groups == 1 else o // outside * inside + c
            x = read[n, channel, h * sh + kh * dh, w * sw + kw * dw]
            return te.sum(x.astype("int32") * weight[o, c, kh, kw].astype("int32"), axis=[c, kh, kw])

        return te.compute(shape, total, name="sum")

    return compute


def _product(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Of rows [..., k] and weights [columns, k]."""
    columns, length = (int(size) for size in weight.shape)
    k = te.reduce_axis((0, length), "k")

    def total(*index: Any) -> Any:
        *rows, column = index
        return te.sum(data(*rows, k).astype("int32") * weight[column, k].astype("int32"), axis=k)

    return te.compute((*data.shape[:-1], columns), total, name="sum")


def _finish(steps: Sequence[Step], axis: int) -> Callable[..., te.Tensor]:
    """What is made of sums: real numbers, or bytes where the last step quantizes."""
    quantizes = bool(steps) and steps[-1].operator == "quantize"
    program = Program(tuple(steps[:-1] if quantizes else steps))

    def compute(total: te.Tensor, added: te.Tensor, factor: te.Tensor, *others: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            channel = index[axis]
            real = (total(*index) + added[channel]).astype("float32") * factor[channel]
            value = program.evaluate(real, [other[channel] for other in others])
            if not quantizes:
                return value
            return _quantize(value, [float(number) for _, number in steps[-1].arguments[1:]], "int8")

        return te.compute(total.shape, element, name="finish")

    return compute


def _at_run_time(sums: te.Tensor, scale: te.Tensor, grid: te.Tensor) -> list[te.Tensor]:
    """What is added to sums on a grid that is known at run time only, and what these are multiplied by."""
    zero = grid[1].astype("int32") - BELOW
    added = te.compute(sums.shape, lambda channel: -zero * sums[channel], name="added")
    return [added, te.compute(scale.shape, lambda channel: grid[0] * scale[channel], name="factor")]


def _quantize(value: Any, numbers: Sequence[float], dtype: str) -> Any:
    scale, zero, low, high = (tirx.const(float(number), "float32") for number in numbers)
    element = value.asobject() if isinstance(value, te.tensor.TensorSlice) else value
    return OPERATORS["quantize"](element, scale, zero, low, high).astype("int32").astype(dtype)
