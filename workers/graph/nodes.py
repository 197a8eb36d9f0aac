"""The bindings of a Relax function as nodes, and what is read from them: shapes, types, constants, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax, tirx
from tvm.ir.expr import GenericConst, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize

from workers.graph.layout import Slots
from workers.graph.parts import Window
from workers.graph.pointwise import Step

Array = NDArray[Any]


def rewritten(expression: Any, read: Callable[[relax.Var], Any]) -> Any:
    """The expression with what `read` gives in the place of each variable."""
    if isinstance(expression, relax.Var):
        return read(expression)
    if isinstance(expression, relax.Tuple):
        return relax.Tuple([rewritten(item, read) for item in expression.fields])
    if isinstance(expression, relax.TupleGetItem):
        return relax.TupleGetItem(rewritten(expression.tuple_value, read), expression.index)
    if isinstance(expression, relax.Call):
        arguments = [rewritten(argument, read) for argument in expression.args]
        return relax.Call(expression.op, arguments, expression.attrs, expression.ty_args)
    return expression


class NotBlockable(Exception):
    """The function holds something that this pass does not read. It is left to TVM as it is."""


@dataclass(slots=True)
class Node:
    """One binding of the function. `operator` is the name without namespace, "" for what is not an operator's call."""

    index: int
    variable: relax.Var
    operator: str
    arguments: list[Any]
    attributes: Any
    value: Any
    uses: list[int] = field(default_factory=list)  #: nodes that read it, -1 for the function's result

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.variable)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A value in blocked layout. `shape` is what the graph calls it: [n, c, h, w], or [n, c]."""

    variable: Any
    slots: Slots
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return dtype_of(self.variable)

    @property
    def size(self) -> tuple[int, int]:
        return (self.shape[2], self.shape[3]) if len(self.shape) == 4 else (1, 1)

    @property
    def shape5(self) -> tuple[int, int, int, int, int]:
        return (self.shape[0], self.slots.blocks, *self.size, self.slots.block)


@dataclass(slots=True)
class Group:
    """An anchor with the elementwise nodes that are fused behind it. Without an anchor, the program starts from
    `first`. `operands` are the steps' other inputs, in the order of ("input", k)."""

    anchor: int | None
    members: list[int]
    steps: list[Step] = field(default_factory=list)
    operands: list[Any] = field(default_factory=list)
    first: Any = None

    @property
    def last(self) -> int:
        return self.members[-1]


def read(module: tvm.ir.IRModule) -> Iterator[Node]:
    body = module["main"].body
    if not isinstance(body, relax.SeqExpr) or len(body.blocks) != 1:
        raise NotBlockable("main is not one dataflow block")
    nodes: list[Node] = []
    for binding in body.blocks[0].bindings:
        if not isinstance(binding, relax.VarBinding):
            raise NotBlockable("main matches shapes at run time")
        if not isinstance(binding.value, relax.Call | relax.Tuple | relax.TupleGetItem | relax.Var | GenericConst):
            raise NotBlockable(f"main holds a {type(binding.value).__name__}")
        value = binding.value
        operator, arguments, attributes = "", [], None
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            operator, arguments, attributes = str(value.op.name).removeprefix("relax."), list(value.args), value.attrs
            extremum = _extremum(module, value) if operator == "call_tir" else None
            if extremum is not None:
                operator, arguments = extremum
            if operator in ("nn.relu", "nn.leakyrelu", "nn.silu", "nn.gelu"):
                operator = operator.removeprefix("nn.")
        nodes.append(Node(len(nodes), binding.var, operator, arguments, attributes, value))
    places = {node.variable: node for node in nodes}
    for node in nodes:
        for variable in variables_of(node.value):
            if variable in places:
                places[variable].uses.append(node.index)
    for variable in variables_of(body.body):
        if variable in places:
            places[variable].uses.append(-1)
    yield from nodes


def variables_of(expression: Any) -> Iterator[Any]:
    if isinstance(expression, relax.Var):
        yield expression
    elif isinstance(expression, relax.Tuple):
        for item in expression.fields:
            yield from variables_of(item)
    elif isinstance(expression, relax.TupleGetItem):
        yield from variables_of(expression.tuple_value)
    elif isinstance(expression, relax.Call):
        for argument in expression.args:
            yield from variables_of(argument)


def _extremum(module: tvm.ir.IRModule, call: relax.Call) -> tuple[str, list[Any]] | None:
    """The importer spells ONNX's Clip by computed bounds as functions of their own: read what such a function does."""
    arguments = list(call.args[1].fields)
    if len(arguments) != 2:
        return None
    statement = module[call.args[0]].body
    while not isinstance(statement, tirx.BufferStore):
        inner = statement.block if isinstance(statement, SBlockRealize) else statement
        if not isinstance(inner, SBlockRealize | SBlock | tirx.For) and inner is statement:
            return None
        statement = inner if inner is not statement else statement.body
    value = statement.value
    if not isinstance(value, tirx.Max | tirx.Min):
        return None
    if not (isinstance(value.a, TensorLoad) and isinstance(value.b, TensorLoad)):
        return None
    return ("maximum" if isinstance(value, tirx.Max) else "minimum"), arguments


def shape_of(expression: Any) -> tuple[int, ...]:
    kind = expression.ty
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        return ()
    try:
        return tuple(int(size) for size in kind.shape)
    except (TypeError, ValueError):
        raise NotBlockable("a shape is not known before the model runs") from None


def dtype_of(expression: Any) -> str:
    """Of a tensor; "" for anything else."""
    kind = expression.ty
    return str(kind.dtype) if isinstance(kind, relax.TensorType) else ""


def is_float(expression: Any) -> bool:
    return dtype_of(expression) == "float32"


def array_of(constant: GenericConst) -> Array:
    array: Array = constant.value.numpy()
    return array


def number_of(expression: Any) -> float | None:
    """The value of a constant of one element, or of a primitive argument."""
    if isinstance(expression, GenericConst):
        array = array_of(expression)
        return float(array.reshape(-1)[0]) if array.size == 1 and array.dtype == np.float32 else None
    return float(expression.value) if isinstance(expression, tirx.IntImm | tirx.FloatImm) else None


def size_of(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[2], shape[3]) if len(shape) == 4 else (1, 1)


def window_of(node: Node) -> Window:
    attributes = node.attributes
    kernel = shape_of(node.arguments[1])[2:]
    return Window((kernel[0], kernel[1]), pair(attributes.strides), pair(attributes.dilation), four(attributes.padding))


def pool_window_of(node: Node) -> Window:
    """The window with padding such that it gives the shape that the graph states, whatever rounding it used."""
    attributes = node.attributes
    kernel, strides, dilation = pair(attributes.pool_size), pair(attributes.strides), pair(attributes.dilation)
    top, left, bottom, right = four(attributes.padding)
    height, width = size_of(shape_of(node.arguments[0]))
    ends = []
    for size, before, after, k, s, d, wanted in zip(
        (height, width), (top, left), (bottom, right), kernel, strides, dilation, node.shape[2:], strict=True
    ):
        ends.append(max(after, (wanted - 1) * s + (k - 1) * d + 1 - size - before))
    return Window(kernel, strides, dilation, (top, left, ends[0], ends[1]))


def pair(values: Any) -> tuple[int, int]:
    first, second = (int(v) for v in values)
    return first, second


def four(values: Any) -> tuple[int, int, int, int]:
    top, left, bottom, right = (int(v) for v in values)
    return top, left, bottom, right


def is_nchw(node: Node) -> bool:
    a = node.attributes
    return (str(a.data_layout), str(a.kernel_layout), str(a.out_layout)) == ("NCHW", "OIHW", "NCHW")


def fits_pool(node: Node) -> bool:
    if str(node.attributes.layout) != "NCHW":
        return False
    average = node.operator == "nn.avg_pool2d"
    window = pool_window_of(node)
    stretched = window.padding != four(node.attributes.padding)
    if window.extent(*size_of(shape_of(node.arguments[0]))) != node.shape[2:]:
        return False
    return not (average and (stretched or (any(window.padding) and window.dilation != (1, 1))))


def averages_pixels(node: Node) -> bool:
    if node.attributes.axis is None:
        return False
    rank = len(shape_of(node.arguments[0]))
    return rank == 4 and sorted(int(axis) % rank for axis in node.attributes.axis) == [2, 3]


def is_depthwise(node: Node) -> bool:
    return int(node.attributes.groups) == shape_of(node.arguments[0])[1] == node.shape[1] > 1
