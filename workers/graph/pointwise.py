"""Chains of elementwise operators as one expression: what is fused in front of and behind a computation of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tvm import te, tirx

from workers.graph import extrema

#: What a step reads: ("value", 0) is what the chain begins with, ("input", k) another tensor, ("step", i) an earlier
#: step's result, ("number", x) a constant.
Ref = tuple[str, int | float]
VALUE: Final[Ref] = ("value", 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One elementwise operator, by its Relax name without the namespace."""

    operator: str
    arguments: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Elementwise steps on one value and other inputs; the last step is the result, no step is the value itself.

    They are computed in float32. What they read may be uint8, where a step "dequantize" reads it; what comes of a last
    step "quantize" is uint8.
    """

    steps: tuple[Step, ...] = ()

    def evaluate(self, value: tirx.PrimExpr, inputs: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        """The result for one element. `inputs` are the elements of the other tensors at the same place."""
        results: list[tirx.PrimExpr] = []

        def read(reference: Ref) -> tirx.PrimExpr:
            kind, which = reference
            if kind in ("value", "input"):
                element = value if kind == "value" else inputs[int(which)]
                # A tensor's element has no type yet, which some operators ask for.
                return element.asobject() if isinstance(element, te.tensor.TensorSlice) else element
            if kind == "step":
                return results[int(which)]
            return _number(which)

        for step in self.steps:
            results.append(OPERATORS[step.operator](*map(read, step.arguments)))
        result = results[-1] if results else value
        # Through int32: there is an instruction for it, and the number fits.
        return result.astype("int32").astype("uint8") if self._quantizes else result

    @property
    def _quantizes(self) -> bool:
        return bool(self.steps) and self.steps[-1].operator == "quantize"

    def dtype(self, of_value: str) -> str:
        """Of the result, for a value of this type."""
        if self._quantizes:
            return "uint8"
        return "float32" if self.steps else of_value

    @property
    def is_cheap(self) -> bool:
        """Whether it may be computed anew for every use: no transcendental function in it."""
        return not any(step.operator in _COSTLY for step in self.steps)

    @property
    def size(self) -> int:
        """Operations of one element if each step were computed anew wherever it is read, which is what simplification
        makes of an expression; a transcendental function reads its argument many times."""
        sizes: list[int] = []
        for step in self.steps:
            read = sum(sizes[int(which)] for kind, which in step.arguments if kind == "step")
            sizes.append(1 + (16 * (1 + read) if step.operator in _COSTLY else read))
        return sizes[-1] if sizes else 0

    @property
    def keeps_padding_finite(self) -> bool:
        """Whether a lane that holds no channel is a finite number again, if it is one in all that is read."""
        return not any(_is_unsafe(step) for step in self.steps)


def _is_unsafe(step: Step) -> bool:
    numbers = [float(which) for kind, which in step.arguments if kind == "number"]
    if step.operator == "divide":
        return step.arguments[1] == ("number", 0.0) or step.arguments[1][0] != "number"
    if step.operator in ("clip", "maximum", "minimum"):
        return False  # a bound may well be infinite
    return step.operator in UNSAFE_ON_PADDING or not all(map(math.isfinite, numbers))


def _number(value: float) -> tirx.PrimExpr:
    return tirx.const(float(value), "float32")


def _sigmoid(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.sigmoid(x)


def _leaky(x: tirx.PrimExpr, alpha: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.Select(x > _number(0), x, x * alpha)


def _quantize(x: tirx.PrimExpr, scale: Any, zero: Any, low: Any, high: Any) -> tirx.PrimExpr:
    """The integer, still as float32: rounded to the nearest, halves to even, within bounds."""
    scaled = x if scale.value == 1.0 else x / scale
    return tirx.min(tirx.max(tirx.nearbyint(scaled) + zero, low), high)


def _dequantize(x: tirx.PrimExpr, scale: Any, zero: Any) -> tirx.PrimExpr:
    return (x.astype("float32") - zero) * scale


#: Elementwise operators that are fused, for float32: Relax's name → the expression.
OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": extrema.larger,
    "minimum": extrema.smaller,
    "negative": lambda a: -a,
    "abs": tirx.abs,
    "square": lambda a: a * a,
    "sqrt": tirx.sqrt,
    "exp": tirx.exp,
    "erf": tirx.erf,
    "tanh": tirx.tanh,
    "sigmoid": _sigmoid,
    "relu": extrema.relu,
    "clip": extrema.bounded,
    "leakyrelu": _leaky,
    "silu": lambda a: a * _sigmoid(a),
    # Of numbers: scale and zero point, and the bounds of the integer.
    "quantize": _quantize,
    "dequantize": _dequantize,
    # Ours: 0 in lanes where the second operand is 0, whatever the first is there.
    "masked": lambda a, holds: tirx.Select(holds > _number(0), a, _number(0)),
}

_COSTLY: Final = frozenset({"exp", "erf", "tanh", "sigmoid", "silu", "sqrt", "divide"})
#: Steps after which a lane that holds no channel may hold something that is not a finite number: what reads it
#: multiplies it by weights of zero, which would make it NaN.
UNSAFE_ON_PADDING: Final = frozenset({"divide", "exp", "sqrt"})
