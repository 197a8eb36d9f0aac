"""Elementary functions as arithmetic: exp, log, erf, tanh and sigmoid of float32 without a call into the C library.

LLVM turns each of them into one library call for every element, which also keeps the loop around it from being
vectorised. Here each becomes additions, multiplications, one division at most, and integer shifts: no branch, no table,
so that a vectorised loop stays one. IEEE semantics are kept: NaN gives NaN, ±0, ±inf, overflow and gradual underflow
are right, fast-math is not assumed, and sums that LLVM may reorder do no harm (`options.reassociation`).

Method: Cody and Waite, "Software Manual for the Elementary Functions" (1980), in the branch-free form of Moshier's
Cephes library, Eigen and MLAS: range reduction by a magic number and a split ln 2, a polynomial or rational
approximation, 2^n built from its exponent bits in two factors (XNNPACK), so that denormal results round once. The
coefficients are fits of our own: least squares in Chebyshev points, weights by Lawson's iteration, rounded to float32.

Largest errors (`tests/workers/test_elementary.py` sweeps them): exp 1 ulp; log 2 ulp; erf 5 ulp and tanh 6 ulp, which
is 3.4e-7 where they approach 1; sigmoid 3 ulp down to -87, below which it stays at 1.7e-38.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

#: 1.5 · 2^23: added to a number below 2^22 it rounds it to an integer, which then stands in the lowest bits.
_ROUNDER: Final = 12582912.0
#: How deep calls are replaced in each other.
_MAX_DEPTH: Final = 2
#: What float32 adds to an exponent.
_BIAS: Final = 127
#: ln 2 in two parts. The first has nine significant bits: its products with an exponent are exact.
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4
#: (e^r - 1 - r) / r² for |r| <= ln 2 / 2, ascending powers of r.
_EXP: Final = (0.49999994, 0.16666521, 0.041668385, 0.008368738, 0.001381477)
#: (2 artanh(s) - 2s) / s³ for |s| <= 3 - 2√2, ascending powers of s².
_LOG: Final = (0.6666677594184875, 0.399774968624115, 0.298730731010437)
#: erf(x) / x for |x| <= 3.925, where erf reaches 1 in float32: numerator and denominator, ascending powers of x².
_ERF_LIMIT: Final = 3.925
_ERF_P: Final = (1.1283791065, 0.19059525430, 0.052769459784, 0.0037726024166, 0.00028484279756, 2.0459926873e-6)
_ERF_Q: Final = (1.0, 0.50224339962, 0.11418330669, 0.014983306639, 0.0011638667202, 3.8047372072e-5)
#: tanh(x) / x for |x| <= 9.01, where tanh reaches 1 in float32.
_TANH_LIMIT: Final = 9.01
_TANH_P: Final = (1.0, 0.13380372524, 0.0034948126413, 2.0596296963e-5, 1.3336872939e-8)
_TANH_Q: Final = (1.0, 0.46713688970, 0.025874033570, 0.00032843658118, 7.7692948253e-7)


def lower(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """`function` with its float32 calls of these functions replaced; the function itself if it has none.

    Two kinds of division become multiplications by a reciprocal, at up to 1.5 ulp: by a constant, and the softmax's
    by the sum of its row. A vector's division takes as long as ten multiplications.

    Roundings are called by LLVM's name: TVM takes its own for one that has no vectors, takes the vectorized loop around
    it apart, and does not compile what is bound within two of them.

    Of a function of a function of a function the outermost are calls of the C library after all: compiling takes time
    that grows with the power of the depth, since simplification puts each value in wherever it is read.

    Meant for scheduled functions, right before they are compiled: an inlined block would otherwise carry its copies of
    the arithmetic into every schedule, and schedules, traces and keys would depend on coefficients.
    """
    stores = _stores(function)
    # What each replaced call's argument is bound to: how deep calls are nested in it, itself included.
    depths: dict[Any, int] = {}

    def depth(expression: Any) -> int:
        found = [0]
        tvm_ffi.structural_walk(expression, (tirx.Let, lambda let: found.append(depths.get(let.var, 0))))
        return max(found)

    def replace(call: tvm.ir.Call) -> Any:
        name = getattr(call.op, "name", "")
        make = _MAKERS.get(name)
        if str(call.ty.dtype) != "float32":
            return call
        if name == "tirx.nearbyint":
            return tirx.call_llvm_pure_intrin("float32", "llvm.nearbyint", call.args[0])
        if make is None:
            return call
        inner = depth(call.args[0])
        if inner >= _MAX_DEPTH:
            return _in_c_library(call)
        lowered = _let("x", call.args[0], make)
        depths[lowered.var] = inner + 1
        return lowered

    def divide(quotient: tirx.Div) -> Any:
        if str(quotient.ty.dtype) != "float32":
            return quotient
        if isinstance(quotient.b, tirx.FloatImm) and 2.0**-100 < abs(quotient.b.value) < 2.0**100:
            return quotient.a * _f32(1.0 / quotient.b.value)
        if _is_softmax(quotient, stores):
            # Constant along the row: the compiler takes it out of the loop.
            return quotient.a * (_f32(1.0) / quotient.b)
        return quotient

    # Divisions first: those that the functions bring along are meant to stay.
    divided = tvm_ffi.structural_map(function, (tirx.Div, divide), order="post")
    return tvm_ffi.structural_map(divided, (tvm.ir.Call, replace), order="post")


def _stores(function: tirx.PrimFunc) -> Mapping[Any, list[Any]]:
    """What is stored into each buffer, wherever it is."""
    found: dict[Any, list[Any]] = {}
    tvm_ffi.structural_walk(
        function.body, (tirx.BufferStore, lambda store: found.setdefault(store.buffer, []).append(store.value))
    )
    return found


def _is_softmax(quotient: tirx.Div, stores: Mapping[Any, list[Any]]) -> bool:
    """Whether this divides e^(x - maximum) by the sum of such: a sum of at least 1, whose reciprocal is exact enough.

    The reciprocal of other divisors, too small or too large, would be inf or denormal.
    """
    if not isinstance(quotient.a, tvm.ir.TensorLoad) or not isinstance(quotient.b, tvm.ir.TensorLoad):
        return False
    power = quotient.a.source
    powers = stores.get(power, [])
    if not powers or not all(_is_power_below_maximum(value, stores) for value in powers):
        return False
    return not quotient.b.source.same_as(power) and _sums(quotient.b.source, power, stores)


def _is_power_below_maximum(value: Any, stores: Mapping[Any, list[Any]]) -> bool:
    if not isinstance(value, tvm.ir.Call) or getattr(value.op, "name", "") != "tirx.exp":
        return False
    difference = value.args[0]
    if not isinstance(difference, tirx.Sub) or not isinstance(difference.b, tvm.ir.TensorLoad):
        return False
    written = stores.get(difference.b.source, [])
    return any(isinstance(value, tirx.Max) for value in written) and all(
        isinstance(value, (tirx.Max, tirx.FloatImm)) for value in written
    )


def _sums(total: Any, power: Any, stores: Mapping[Any, list[Any]]) -> bool:
    """Whether buffer `total` holds sums of `power`'s numbers alone, partial sums between them included."""
    if total.same_as(power):
        return True
    written = stores.get(total, [])
    terms: list[Any] = []
    for value in written:
        if isinstance(value, tirx.Add):
            terms += [value.a, value.b]
        elif not isinstance(value, tirx.FloatImm) or value.value != 0.0:
            return False
    others = [term for term in terms if not (isinstance(term, tvm.ir.TensorLoad) and term.source.same_as(total))]
    return bool(others) and all(
        isinstance(term, tvm.ir.TensorLoad) and _sums(term.source, power, stores) for term in others
    )


def lower_module(module: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """`lower` for every PrimFunc of a module; other functions stay as they are."""
    functions = {
        variable: lower(function) if isinstance(function, tirx.PrimFunc) else function
        for variable, function in module.functions.items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def exp(x: Any) -> Any:
    """e^x. `x` is used several times: bind it first where it is more than a variable."""
    # Beyond these the result is inf and 0 anyway, and the integer arithmetic below stays in range.
    return _let("c", _clamp(x, -104.0, 89.0), lambda c: _exp_reduced(c, two_factors=True))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    negated = _let("c", _clamp(-x, -87.0, 87.0), lambda c: _exp_reduced(c, two_factors=False))
    return _f32(1.0) / (negated + _f32(1.0))


def erf(x: Any) -> Any:
    """The error function."""
    return _odd_rational(x, _ERF_LIMIT, _ERF_P, _ERF_Q)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _odd_rational(x, _TANH_LIMIT, _TANH_P, _TANH_Q)


def log(x: Any) -> Any:
    """The natural logarithm: NaN below 0, -inf at 0."""
    tiny = x < _f32(2.0**-126)  # denormal: moved into the normal range first
    scaled = tirx.Select(tiny, x * _f32(2.0**23), x)
    # The number as 2^e · m with m in [√½, √2): the distance of its bits from √½'s, in whole powers of two.
    half_root = 0x3F3504F3

    def finish(bits: Any) -> Any:
        def of_exponent(exponent: Any) -> Any:
            mantissa = tirx.reinterpret("float32", bits - (exponent << _i32(23)))
            return _let("m", mantissa, lambda m: of_parts(m, exponent))

        return _let("e", (bits - _i32(half_root)) >> _i32(23), of_exponent, "int32")

    def of_parts(m: Any, exponent: Any) -> Any:
        power = tirx.Cast("float32", exponent) - tirx.Select(tiny, _f32(23.0), _f32(0.0))
        return _let("n", power, lambda n: _let("s", (m - _f32(1.0)) / (m + _f32(1.0)), lambda s: series(s, n)))

    def series(s: Any, n: Any) -> Any:
        tail = _let("t", s * s, lambda t: s * t * _polynomial(t, _LOG))
        return n * _f32(_LN2_HIGH) + (s + s + (tail + n * _f32(_LN2_LOW)))

    finite = _let("b", tirx.reinterpret("int32", scaled), finish, "int32")
    infinity = _f32(math.inf)
    return tirx.Select(
        x > _f32(0.0),
        tirx.Select(x < infinity, finite, infinity),
        tirx.Select(x == _f32(0.0), -infinity, _f32(math.nan)),
    )


def _exp_reduced(x: Any, *, two_factors: bool) -> Any:
    """e^x for x in [-104, 89] or NaN; with one factor, which is cheaper, in [-87, 88]."""

    # The bias of the exponent's one or two factors comes with the rounding, for nothing.
    rounder = _ROUNDER + (2 * _BIAS if two_factors else _BIAS)

    def with_rounded(rounded: Any) -> Any:
        # Taken from the bits, not converted: a NaN has no integer, and its conversion would be undefined.
        return _let("b", tirx.reinterpret("int32", rounded), with_bits, "int32")

    def with_bits(bits: Any) -> Any:
        # The rounder is taken away as an integer: where sums may be reordered, a compiler that subtracts the number
        # that has just been added rounds nothing.
        n = tirx.Cast("float32", bits - _i32(int(np.float32(rounder).view(np.int32))))
        return _let("n", n, lambda n: with_remainder(bits, n))

    def with_remainder(bits: Any, n: Any) -> Any:
        remainder = x - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW)
        return _let("r", remainder, lambda r: scale(bits, _polynomial(r, (1.0, 1.0, *_EXP))))

    def scale(bits: Any, power: Any) -> Any:
        # The shift to the exponent's place pushes the rounder's own bits out.
        if not two_factors:
            return power * _at_exponent(bits)
        return _let("h", bits >> _i32(1), lambda h: power * _at_exponent(h) * _at_exponent(bits - h), "int32")

    return _let("k", x * _f32(1.0 / math.log(2.0)) + _f32(rounder), with_rounded)


def _at_exponent(biased: Any) -> Any:
    """The power of two whose biased exponent is in the lowest bits."""
    return tirx.reinterpret("float32", biased << _i32(23))


def _odd_rational(x: Any, limit: float, numerator: Sequence[float], denominator: Sequence[float]) -> Any:
    """x · P(x²) / Q(x²), x held within ±limit."""

    def of_clamped(c: Any) -> Any:
        return _let("t", c * c, lambda t: c * _polynomial(t, numerator) / _polynomial(t, denominator))

    return _let("c", _clamp(x, -limit, limit), of_clamped)


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Horner's scheme, coefficients by ascending powers."""
    total = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + _f32(coefficient)
    return total


def _clamp(x: Any, low: float, high: float) -> Any:
    """`x` within [low, high]; NaN stays NaN, which max and min would not keep."""
    return _let(
        "x",
        x,
        lambda v: _let(
            "l", tirx.Select(v < _f32(low), _f32(low), v), lambda w: tirx.Select(w > _f32(high), _f32(high), w)
        ),
    )


def _in_c_library(call: tvm.ir.Call) -> Any:
    """The call as one of the C library's function, which no pass looks into."""
    name, (x,) = call.op.name.removeprefix("tirx."), call.args
    if name == "sigmoid":
        return _f32(1.0) / (tirx.call_pure_extern("float32", "expf", -x) + _f32(1.0))
    return tirx.call_pure_extern("float32", f"{name}f", x)


def _let(name: str, value: Any, body: Callable[[Any], Any], dtype: str = "float32") -> Any:
    variable = tirx.Var(name, dtype)
    return tirx.Let(variable, value, body(variable))


def _f32(value: float) -> Any:
    return tirx.const(value, "float32")


def _i32(value: int) -> Any:
    return tirx.const(value, "int32")


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tirx.exp": exp,
    "tirx.log": log,
    "tirx.erf": erf,
    "tirx.tanh": tanh,
    "tirx.sigmoid": sigmoid,
}
