"""Larger, smaller, bounded, sign: elementwise operators that keep NaN, as ONNX Runtime's do.

TVM's `max(a, b)` is `a > b ? a : b`, one instruction, which gives b where a is NaN: with a constant that is no NaN in
the first place and what may be one in the second, NaN comes through at no cost. Of two tensors the first is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from tvm import relax, te, tirx
from tvm.ir.expr import GenericConst, TensorLoad


def larger(a: Any, b: Any) -> Any:
    return _either(tirx.max, a, b)


def smaller(a: Any, b: Any) -> Any:
    return _either(tirx.min, a, b)


def bounded(x: Any, low: Any, high: Any) -> Any:
    """`x` within two numbers."""
    return tirx.min(high, tirx.max(low, x))


def relu(x: Any) -> Any:
    return tirx.max(tirx.const(0, x.ty), x)


def sign(x: Any) -> Any:
    """-1, 0 or 1."""
    of_number = tirx.Select(
        x < tirx.const(0, x.ty), tirx.const(-1, x.ty),
        tirx.Select(x > tirx.const(0, x.ty), tirx.const(1, x.ty), tirx.const(0, x.ty)),
    )  # fmt: skip
    return tirx.Select(_is_nan(x), x, of_number) if _is_float(x) else of_number


def _either(choose: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    # What is read from memory costs least to be read twice.
    if isinstance(b, tirx.FloatImm) or (not isinstance(a, tirx.FloatImm | TensorLoad) and isinstance(b, TensorLoad)):
        a, b = b, a
    chosen = choose(a, b)
    return chosen if isinstance(a, tirx.FloatImm) or not _is_float(a) else tirx.Select(_is_nan(a), a, chosen)


def _is_nan(x: Any) -> Any:
    """Of float32 by its bits: `isnan` is not vectorised, and a number's comparison with itself TVM takes for known."""
    if str(x.ty) != "float32":
        return tirx.isnan(x)
    return (tirx.reinterpret("int32", x) & tirx.const(0x7FFFFFFF, "int32")) > tirx.const(0x7F800000, "int32")


def _is_float(x: Any) -> bool:
    return str(x.ty).startswith("float")


Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _elementwise(name: str, element: Callable[..., Any]) -> Legalize:
    """The operator of floats as a function; of others as TVM has it. Arguments are broadcast tensors, or numbers."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        dtype = str(call.ty.dtype)
        operands = [_number(argument, dtype) for argument in call.args]
        tensors = [operand for operand in operands if isinstance(operand, relax.Expr)]
        if not dtype.startswith("float") or not tensors:
            return call.op.get_attr("FLegalize")(builder, call)
        shape = list(call.ty.shape.values)

        def compute(*read: Any) -> Any:
            def value(*index: Any) -> Any:
                given = iter(read)
                return element(
                    *(x if isinstance(x, tirx.FloatImm) else _at(next(given), index, shape) for x in operands)
                )

            return te.compute(shape, value, name=name)

        return builder.call_te(compute, *tensors, primfunc_name_hint=name)

    return legalize


def _number(expression: Any, dtype: str) -> Any:
    """The float that a number or a constant of one element is, the expression itself if it is none, or NaN."""
    number = math.nan
    if isinstance(expression, tirx.FloatImm | tirx.IntImm):
        number = float(expression.value)
    elif isinstance(expression, GenericConst) and expression.value.numpy().size == 1:
        number = float(expression.value.numpy().reshape(-1)[0])
    return expression if math.isnan(number) else tirx.const(number, dtype)


def _at(tensor: Any, index: tuple[Any, ...], shape: list[Any]) -> Any:
    """The element of a tensor that is broadcast to a shape: its axes are the last ones, those of length 1 stretched."""
    first = len(index) - len(tensor.shape)
    axes = zip(tensor.shape, index[first:], shape[first:], strict=True)
    # What has the shape already is read at the very index, or it would not be fused.
    return tensor(*(i if int(size) == int(wanted) else 0 for size, i, wanted in axes))


#: In the place of TVM's functions of these operators.
LEGALIZE: Final[Mapping[str, Legalize]] = {
    "relax.nn.relu": _elementwise("relu", relu),
    "relax.maximum": _elementwise("maximum", larger),
    "relax.minimum": _elementwise("minimum", smaller),
    "relax.clip": _elementwise("clip", bounded),
    "relax.sign": _elementwise("sign", sign),
}
