"""Algebraic identities, and what exporters spell in many operators, as the fewest that compute the same.

Every rule reads one call and what it is made of, and says what is the same with less. Rows that are normalised become
`nn.layer_norm` however they were spelled, activations become sums and products that any kernel takes in, and numbers
that factors of a matrix product are multiplied with come behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.ir.expr import GenericConst

from workers.graph.nodes import rewritten

Array = NDArray[Any]

#: Given the rewriting, a variable of the old function, what its call became and that call over new variables, it says
#: what the variable's value is in the new function.
Change = Callable[["Rewriting", Any, Any, relax.Call], Any]

_RESHAPES: Final = ("reshape", "expand_dims", "squeeze", "flatten")
#: Powers up to this are products.
_MOST_FACTORS: Final = 4


@tvm.transform.module_pass(opt_level=0, name="ApplyIdentities")
class ApplyIdentities:
    """The pass. A `main` that is not one dataflow block stays as it is."""

    def transform_module(self, module: tvm.ir.IRModule, _context: Any) -> tvm.ir.IRModule:
        if not is_plain(module):
            return module
        return Rewriting(module).rewritten(_apply)


class Rewriting:
    """`main` written anew, one binding after the other. What is left for nothing is dead code."""

    def __init__(self, module: tvm.ir.IRModule) -> None:
        self._module = module
        self._builder = relax.BlockBuilder()
        self._values: dict[Any, Any] = {}  #: variable → expression of the new function
        self._made: dict[Any, Any] = {}  #: variable of the new function → what it is bound to

    def rewritten(self, change: Change) -> tvm.ir.IRModule:
        """The module with what `change` gives in the place of each call."""
        main, builder = self._module["main"], self._builder
        with builder.function("main", list(main.params), attrs=dict(main.attrs) if main.attrs else {}):
            with builder.dataflow():
                for binding in main.body.blocks[0].bindings:
                    value = self._read(binding.value)
                    result = self.emit(value)
                    if isinstance(value, relax.Call):
                        result = change(self, binding.var, result, value)
                    self._values[binding.var] = result
                result = builder.emit_output(self._read(main.body.body))
            builder.emit_func_output(result)
        module = builder.get()
        for variable, function in self._module.functions.items():
            if variable.name_hint != "main":
                module[variable] = function
        return module

    def emit(self, expression: Any) -> Any:
        """A variable for the expression; for one that needs none, itself."""
        if isinstance(expression, relax.Var | GenericConst):
            return expression
        variable = self._builder.emit(expression)
        self._made[variable] = self._builder.lookup_binding(variable)
        return variable

    def call(self, expression: Any, *names: str) -> Any:
        """The call that a variable is bound to, if it is of an operator of one of these names."""
        made = self._made.get(expression) if isinstance(expression, relax.Var) else None
        return made if name_of(made) in names else None

    def _read(self, expression: Any) -> Any:
        return rewritten(expression, lambda variable: self._values.get(variable, variable))


def is_plain(module: tvm.ir.IRModule) -> bool:
    """Whether `main` is one block of plain bindings."""
    body = module["main"].body
    if not isinstance(body, relax.SeqExpr) or len(body.blocks) != 1:
        return False
    return all(isinstance(binding, relax.VarBinding) for binding in body.blocks[0].bindings)


def name_of(expression: Any) -> str:
    """Of the operator that is called, without its namespace; "" if none is."""
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name).removeprefix("relax.")
    return ""


def shape_of(expression: Any) -> tuple[int, ...] | None:
    """None where it is not known, or no tensor's."""
    kind = expression.ty
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        return None
    sizes = list(kind.shape.values) if hasattr(kind.shape, "values") else None
    if sizes is None or not all(isinstance(size, tvm.tirx.IntImm) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)


def array_of(expression: Any) -> Array | None:
    return expression.value.numpy() if isinstance(expression, GenericConst) else None


def number_of(expression: Any) -> float | None:
    """The value of a float32 constant of one element."""
    array = array_of(expression)
    return None if array is None or array.size != 1 or array.dtype != np.float32 else float(array.reshape(-1)[0])


def _apply(rewriting: Rewriting, _variable: Any, result: Any, call: relax.Call) -> Any:
    for rule in _RULES.get(name_of(call), ()):
        found = rule(rewriting, result, call)
        if found is not None:
            return found
    return result


def _is_same(result: Any, source: Any) -> bool:
    """Whether it has the type and shape of the result."""
    shape = shape_of(result)
    return shape is not None and shape == shape_of(source) and str(result.ty.dtype) == str(source.ty.dtype)


def _neutral(value: float, *, left: bool) -> Callable[[Rewriting, Any, relax.Call], Any]:
    """A constant operand that changes nothing: on the right, or, with `left`, on either side."""

    def rule(_rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
        pairs = [(call.args[0], call.args[1]), *([(call.args[1], call.args[0])] if left else [])]
        for source, other in pairs:
            array = array_of(other)
            if array is not None and array.size and bool((array == value).all()) and _is_same(result, source):
                return source
        return None

    return rule


def _double_negation(rewriting: Rewriting, _result: Any, call: relax.Call) -> Any:
    inner = rewriting.call(call.args[0], "negative")
    return None if inner is None else inner.args[0]


def _cast(_rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    return call.args[0] if _is_same(result, call.args[0]) else None


def _transposition(rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    rank = len(shape_of(result) or ())
    axes = _axes(call, rank)
    if axes == list(range(rank)):
        return call.args[0]
    inner = rewriting.call(call.args[0], "permute_dims")
    if inner is None:
        return None
    before = _axes(inner, rank)
    both = [before[axis] for axis in axes]
    return inner.args[0] if both == list(range(rank)) else rewriting.emit(relax.op.permute_dims(inner.args[0], both))


def _axes(call: relax.Call, rank: int) -> list[int]:
    given = call.attrs.axes
    return list(reversed(range(rank))) if given is None else [int(axis) % rank for axis in given]


def _reshaping(rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    """Of a reshape of a reshape, one; of what only adds or drops axes of size 1, a reshape as any other."""
    shape, source = shape_of(result), call.args[0]
    if shape is None or shape_of(source) is None:
        return None
    inner = rewriting.call(source, *_RESHAPES)
    if inner is not None:
        source = inner.args[0]
    if shape_of(source) == shape:
        return source
    if source.same_as(call.args[0]) and name_of(call) == "reshape":
        return None
    return rewriting.emit(relax.op.reshape(source, shape))


def _choice(_rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    """One of two whose condition is a constant, the same everywhere."""
    condition = array_of(call.args[0])
    if condition is None or not condition.size or condition.min() != condition.max():
        return None
    chosen = call.args[1] if condition.reshape(-1)[0] else call.args[2]
    return chosen if _is_same(result, chosen) else None


def _power(rewriting: Rewriting, _result: Any, call: relax.Call) -> Any:
    exponent = number_of(call.args[1])
    if exponent is None or exponent not in range(1, _MOST_FACTORS + 1) or not _keeps_shape(call):
        return None
    power = call.args[0]
    for _ in range(int(exponent) - 1):
        power = rewriting.emit(relax.op.multiply(power, call.args[0]))
    return power


def _keeps_shape(call: relax.Call) -> bool:
    """Whether the second operand has no more axes than the first."""
    return len(shape_of(call.args[1]) or ()) <= len(shape_of(call.args[0]) or ())


def _gelu(rewriting: Rewriting, _result: Any, call: relax.Call) -> Any:
    x = call.args[0]
    if str(x.ty.dtype) != "float32":
        return None
    emit = rewriting.emit
    if name_of(call) == "nn.gelu":
        gate = emit(relax.op.erf(emit(relax.op.multiply(x, relax.const(math.sqrt(0.5), "float32")))))
    else:
        square = emit(relax.op.multiply(x, x))
        factor = emit(relax.op.multiply(square, relax.const(0.044715, "float32")))
        bent = emit(relax.op.multiply(x, emit(relax.op.add(factor, relax.const(1.0, "float32")))))
        gate = emit(relax.op.tanh(emit(relax.op.multiply(bent, relax.const(math.sqrt(2 / math.pi), "float32")))))
    half = emit(relax.op.multiply(x, relax.const(0.5, "float32")))
    return emit(relax.op.multiply(half, emit(relax.op.add(gate, relax.const(1.0, "float32")))))


def _scaled_factors(rewriting: Rewriting, _result: Any, call: relax.Call) -> Any:
    """(s·a)(t·b) = s·t·(ab): numbers behind a product are part of its kernel, in front of it they need one."""
    scale, factors = 1.0, []
    for factor in call.args:
        number, factor = _scale(rewriting, factor)
        scale *= number
        factors.append(factor)
    if scale == 1.0 or not math.isfinite(scale) or scale == 0.0:
        return None
    product = rewriting.emit(relax.Call(call.op, factors, call.attrs, call.ty_args))
    return rewriting.emit(relax.op.multiply(product, relax.const(scale, "float32")))


def _scale(rewriting: Rewriting, factor: Any) -> tuple[float, Any]:
    """What of a factor is a number that it is multiplied with, and what that leaves."""
    scaled = rewriting.call(factor, "multiply", "divide")
    if scaled is not None:
        pairs = [(scaled.args[0], scaled.args[1])]
        if name_of(scaled) == "multiply":
            pairs.append((scaled.args[1], scaled.args[0]))
        for inner, other in pairs:
            number = number_of(other)
            if number and math.isfinite(number) and _is_same(factor, inner):
                return (number if name_of(scaled) == "multiply" else 1 / number), inner
    return 1.0, factor


# Normalised rows


def _either_way(call: relax.Call) -> Iterator[tuple[Any, Any]]:
    yield call.args[0], call.args[1]
    yield call.args[1], call.args[0]


def _mean_of(rewriting: Rewriting, expression: Any) -> Any:
    """What this is the mean of over the last axis, which stays."""
    mean = rewriting.call(expression, "mean")
    if mean is None or not bool(mean.attrs.keepdims) or mean.attrs.axis is None:
        return None
    shape = shape_of(mean.args[0])
    axes = [int(axis) for axis in mean.attrs.axis]
    if (
        shape is None
        or len(axes) != 1
        or axes[0] % len(shape) != len(shape) - 1
        or str(expression.ty.dtype) != "float32"
    ):
        return None
    return mean.args[0]


def _centred(rewriting: Rewriting, expression: Any) -> Any:
    """What this is without its mean."""
    difference = rewriting.call(expression, "subtract")
    if difference is None:
        return None
    source = _mean_of(rewriting, difference.args[1])
    return source if source is not None and source.same_as(difference.args[0]) else None


def _deviation(rewriting: Rewriting, expression: Any) -> tuple[Any, float] | None:
    """x and ε if this is √(mean((x − mean(x))²) + ε)."""
    root = rewriting.call(expression, "sqrt")
    return None if root is None else _variance(rewriting, root.args[0])


def _variance(rewriting: Rewriting, expression: Any) -> tuple[Any, float] | None:
    total = rewriting.call(expression, "add")
    for variance, small in _either_way(total) if total is not None else ():
        epsilon = number_of(small)
        square = rewriting.call(_mean_of(rewriting, variance), "multiply", "square") if epsilon is not None else None
        if square is not None and square.args[0].same_as(square.args[-1]):
            source = _centred(rewriting, square.args[0])
            if source is not None:
                return source, float(epsilon or 0.0)
    return None


def _inverse_deviation(rewriting: Rewriting, expression: Any) -> tuple[Any, float] | None:
    """x and ε if this is 1 / √(mean((x − mean(x))²) + ε)."""
    quotient = rewriting.call(expression, "divide")
    if quotient is not None and number_of(quotient.args[0]) == 1.0:
        return _deviation(rewriting, quotient.args[1])
    inverse = rewriting.call(expression, "rsqrt")
    return None if inverse is None else _variance(rewriting, inverse.args[0])


def _normal(rewriting: Rewriting, source: Any, scale: Array, shift: Array, epsilon: float) -> Any:
    constants = [relax.const(np.ascontiguousarray(array, "float32")) for array in (scale, shift)]
    return rewriting.emit(relax.op.nn.layer_norm(source, *constants, axes=[-1], epsilon=epsilon))


def _normalised(rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    """(x − mean) / deviation."""
    pairs = _either_way(call) if name_of(call) == "multiply" else iter([(call.args[0], call.args[1])])
    find = _inverse_deviation if name_of(call) == "multiply" else _deviation
    for centred, deviation in pairs:
        found = find(rewriting, deviation)
        source = _centred(rewriting, centred) if found is not None else None
        if found is not None and source is not None and source.same_as(found[0]):
            size = (shape_of(result) or (0,))[-1]
            return _normal(rewriting, source, np.ones(size), np.zeros(size), found[1])
    return None


def _row(expression: Any, size: int) -> Array | None:
    """A constant for each place in a row."""
    array = array_of(expression)
    if array is None or array.dtype != np.float32 or array.size != math.prod(array.shape[-1:]):
        return None
    return np.broadcast_to(array.reshape(-1), (size,)) if array.size in (1, size) else None


def _normalised_and(rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    """A constant that normalised rows are multiplied with, or that is added, belongs to their normalisation."""
    for normal, other in _either_way(call):
        norm = rewriting.call(normal, "nn.layer_norm")
        row = None if norm is None or not _is_same(result, normal) else _row(other, (shape_of(result) or (0,))[-1])
        if norm is None or row is None or len(norm.attrs.axes) != 1:
            continue
        scale, shift = (array_of(argument) for argument in norm.args[1:3])
        if scale is None or shift is None or str(result.ty.dtype) != "float32":
            continue
        if name_of(call) == "multiply":
            scale, shift = scale * row, shift * row
        else:
            shift = shift + row
        return _normal(rewriting, norm.args[0], scale, shift, float(norm.attrs.epsilon))
    return None


def _normalised_by_factor(rewriting: Rewriting, result: Any, call: relax.Call) -> Any:
    """x·f + (b − mean·f) with f = g / deviation, as TensorFlow's batch_normalization spells it."""
    size = (shape_of(result) or (0,))[-1]
    for scaled, shifted in _either_way(call):
        product, difference = rewriting.call(scaled, "multiply"), rewriting.call(shifted, "subtract")
        if product is None or difference is None:
            continue
        shift, moved = _row(difference.args[0], size), rewriting.call(difference.args[1], "multiply")
        if shift is None or moved is None:
            continue
        for source, factor in _either_way(product):
            pairs = _either_way(moved)
            if not any(same.same_as(factor) and _is_mean(rewriting, mean, source) for mean, same in pairs):
                continue
            parts = rewriting.call(factor, "multiply")
            for inverse, gain in _either_way(parts) if parts is not None else ():
                found, scale = _inverse_deviation(rewriting, inverse), _row(gain, size)
                if found is not None and scale is not None and found[0].same_as(source):
                    return _normal(rewriting, source, scale, shift, found[1])
    return None


def _is_mean(rewriting: Rewriting, expression: Any, source: Any) -> bool:
    found = _mean_of(rewriting, expression)
    return found is not None and bool(found.same_as(source))


_RULES: Final[Mapping[str, tuple[Callable[[Rewriting, Any, relax.Call], Any], ...]]] = {
    "add": (_neutral(0, left=True), _normalised_and, _normalised_by_factor),
    "astype": (_cast,),
    "divide": (_neutral(1, left=False), _normalised),
    "matmul": (_scaled_factors,),
    "multiply": (_neutral(1, left=True), _normalised, _normalised_and),
    "negative": (_double_negation,),
    "nn.gelu": (_gelu,),
    "nn.gelu_tanh": (_gelu,),
    "permute_dims": (_transposition,),
    "power": (_power,),
    "subtract": (_neutral(0, left=False),),
    "where": (_choice,),
    **dict.fromkeys(_RESHAPES, (_reshaping,)),
}
