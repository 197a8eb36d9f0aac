"""The arithmetic that stands for exp, log, erf, tanh and sigmoid: its numbers over all of float32, its machine code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import s_tir, te, tirx, topi

from tests.workers.conftest import Host
from workers.graph import elementary

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ROW = 1 << 14
EXACT: dict[str, Callable[[Doubles], Doubles]] = {
    "exp": np.exp,
    "log": np.log,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
#: Largest error in units of the last place, as the module's docstring states it.
ULP = {"exp": 1.0, "log": 2.0, "erf": 5.0, "tanh": 6.0, "sigmoid": 3.0}
ABSOLUTE = {"erf": 3.4e-7, "tanh": 3.4e-7, "sigmoid": 1.0e-7}


def one_call(name: str, dtype: str = "float32") -> tirx.PrimFunc:
    x = te.placeholder((ROW,), dtype, "x")
    return te.create_prim_func([x, te.compute((ROW,), lambda i: getattr(tirx, name)(x[i]), name="y")])


def vectorised(function: tirx.PrimFunc, lanes: int = 16) -> tvm.ir.IRModule:
    schedule = s_tir.Schedule(function)
    [loop] = schedule.get_loops(schedule.get_sblock("y"))
    schedule.vectorize(schedule.split(loop, [None, lanes])[1])
    return schedule.mod


def evaluate(module: tvm.ir.IRModule, host: Host, values: Floats) -> Floats:
    compiled = tvm.compile(module, target=host.target)
    rows = np.zeros(-(-len(values) // ROW) * ROW, "float32")
    rows[: len(values)] = values
    result = np.empty_like(rows)
    for start in range(0, len(rows), ROW):
        out = tvm.runtime.tensor(np.zeros(ROW, "float32"))
        compiled["main"](tvm.runtime.tensor(rows[start : start + ROW].copy()), out)
        result[start : start + ROW] = out.numpy()
    return result[: len(values)]


def sweep() -> Floats:
    """Every 2039th of all float32 values (denormals, NaNs and both infinities among them), and where results vary."""
    bits = np.arange(0, 1 << 32, 2039, dtype=np.uint64).astype(np.uint32)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 88.72, 88.7229, 88.73, -87.34, -103.9, -104.0]
    dense = [np.linspace(-110, 95, 300_000), np.linspace(-12, 12, 300_000), np.linspace(0.5, 2, 300_000)]
    parts = [bits.view(np.float32), np.array(special, np.float32), *(part.astype(np.float32) for part in dense)]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", EXACT)
def test_every_float32_is_within_the_stated_error(name: str, host: Host) -> None:
    """NaN, infinities, signed zeros and denormals come out as they should, everything else within the stated error."""
    values = sweep()
    found = evaluate(elementary.lower_module(vectorised(one_call(name))), host, values)
    with np.errstate(all="ignore"):
        exact = EXACT[name](values.astype(np.float64))
        expected = exact.astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    assert np.array_equal(np.signbit(found[expected == 0]), np.signbit(expected[expected == 0]))
    finite = np.isfinite(expected)
    if name == "sigmoid":
        assert found[finite & (values < -87)].max() <= 1.7e-38
        finite &= values >= -87
    error = np.abs(found[finite].astype(np.float64) - exact[finite])
    worst = np.argmax(error / np.spacing(np.abs(expected[finite])))
    assert error[worst] <= ULP[name] * np.spacing(np.abs(expected[finite][worst])), values[finite][worst]
    assert error.max() <= ABSOLUTE.get(name, math.inf)


@pytest.mark.parametrize("name", EXACT)
def test_vectorised_loops_stay_vectors(name: str, host: Host) -> None:
    """The machine code of a vectorised loop multiplies packed numbers and calls no function of the C library."""
    before = vectorised(one_call(name))
    compiled = tvm.compile(elementary.lower_module(before), target=host.target)
    assembly = compiled.mod.inspect_source("asm")
    packed = r"v(mul|fmadd\d+)ps\s.*%[yz]mm" if host.identity.arch == "x86_64" else r"fml?[mulad]+\s+v\d+\.4s"
    assert re.search(packed, assembly)
    library_call = r"\b(call|jmp|bl)\w*\s+\S*(exp|log|erf|tanh)f"
    assert not re.search(library_call, assembly)


@pytest.mark.parametrize("name", EXACT)
def test_scalar_and_vector_code_agree(name: str, host: Host) -> None:
    """A scalar loop gives what a vectorised one gives, in every bit: the tail of a row is like its rest."""
    values = np.linspace(-100, 100, ROW).astype(np.float32)
    lowered = elementary.lower(one_call(name))
    scalar = evaluate(tvm.IRModule({"main": lowered.with_attr("global_symbol", "main")}), host, values)
    assert np.array_equal(scalar, evaluate(vectorised(lowered), host, values), equal_nan=True)


def test_calls_within_calls_are_replaced_once_each(host: Host) -> None:
    """exp(tanh(x)) + exp(-x) has three calls; all are replaced and the size of the code is three calls' and no more."""
    x = te.placeholder((ROW,), "float32", "x")
    y = te.compute((ROW,), lambda i: tirx.exp(tirx.tanh(x[i])) + tirx.exp(-x[i]), name="y")
    lowered = elementary.lower_module(vectorised(te.create_prim_func([x, y])))
    script = lowered.script()
    assert not re.search(r"T\.(exp|tanh)\(", script)
    single = len(elementary.lower_module(vectorised(one_call("exp"))).script())
    assert len(script) < 4 * single
    values = np.linspace(-3, 3, ROW).astype(np.float32)
    wide = values.astype(np.float64)
    np.testing.assert_allclose(evaluate(lowered, host, values), np.exp(np.tanh(wide)) + np.exp(-wide), rtol=1e-6)


def test_functions_within_roundings(host: Host) -> None:
    """What is rounded, multiplied and rounded again, as quantized operators behind each other are, stays in vectors,
    with calls of these functions in it."""
    x = te.placeholder((ROW,), "float32", "x")

    def rounded(x: Any) -> Any:
        return tirx.nearbyint(tirx.nearbyint(tirx.sigmoid(x) * 255.0) * 0.125) * 8.0

    function = te.create_prim_func([x, te.compute((ROW,), lambda i: rounded(x[i]), name="y")])
    lowered = elementary.lower_module(vectorised(function))
    values = np.linspace(-9, 9, ROW).astype("float32")
    found = evaluate(lowered, host, values)
    wanted = np.rint(np.rint(255 / (1 + np.exp(-values.astype("float64")))) / 8) * 8
    # Where a product lies between two integers, the last digit decides.
    assert np.count_nonzero(found != wanted) <= ROW // 1000
    machine_code = tvm.compile(lowered, target=host.target).mod.inspect_source("asm")
    assert "nearbyint" not in machine_code


def test_a_lowered_block_may_be_inlined_twice_into_one_expression(host: Host) -> None:
    """Inlining a lowered block at two places of one expression keeps the two values apart."""
    x = te.placeholder((ROW + 1,), "float32", "x")
    e = te.compute((ROW + 1,), lambda i: tirx.exp(x[i]), name="e")
    y = te.compute((ROW,), lambda i: e[i] - e[i + 1], name="y")
    schedule = s_tir.Schedule(elementary.lower(te.create_prim_func([x, y])))
    schedule.compute_inline(schedule.get_sblock("e"))
    [loop] = schedule.get_loops(schedule.get_sblock("y"))
    schedule.vectorize(schedule.split(loop, [None, 16])[1])
    compiled = tvm.compile(schedule.mod, target=host.target)
    values = np.linspace(-3, 3, ROW + 1).astype(np.float32)
    out = tvm.runtime.tensor(np.zeros(ROW, "float32"))
    compiled["main"](tvm.runtime.tensor(values), out)
    exact = np.exp(values.astype(np.float64))
    np.testing.assert_allclose(out.numpy(), exact[:-1] - exact[1:], atol=1e-5)


def test_other_types_and_functions_are_left_alone() -> None:
    """A float64 call, and a function without any of these calls, come back unchanged."""
    for function in (one_call("exp", "float64"), one_call("sqrt")):
        tvm.ir.assert_structural_equal(elementary.lower(function), function)


def test_a_softmax_divides_once_a_row(host: Host) -> None:
    """The sum's reciprocal replaces a division of every number; results stay within rounding."""
    x = te.placeholder((8, 64), "float32", "x")
    lowered = elementary.lower(te.create_prim_func([x, topi.nn.softmax(x)]))
    assert re.search(r"T_softmax_exp\[.*\] \* \(T\.float32\(1\.0\) / T_softmax_expsum\[", lowered.script())
    values = np.linspace(-30, 30, 8 * 64).astype(np.float32).reshape(8, 64)
    out = tvm.runtime.tensor(np.zeros((8, 64), "float32"))
    tvm.compile(lowered, target=host.target)["main"](tvm.runtime.tensor(values), out)
    powers = np.exp(values.astype(np.float64) - values.max(1, keepdims=True))
    np.testing.assert_allclose(out.numpy(), powers / powers.sum(1, keepdims=True), rtol=5e-7)


def test_other_divisions_stay_divisions() -> None:
    """A divisor that may be too small or too large for its reciprocal is divided by: any input, any sum of anything."""
    x = te.placeholder((8, 64), "float32", "x")
    k = te.reduce_axis((0, 64), "k")
    total = te.compute((8,), lambda i: te.sum(x[i, k], axis=k), name="total")
    by_sum = te.create_prim_func([x, te.compute((8, 64), lambda i, j: x[i, j] / total[i], name="y")])
    # Without the maximum taken off, the powers may all be denormal.
    power = te.compute((8, 64), lambda i, j: tirx.exp(x[i, j]), name="power")
    powers = te.compute((8,), lambda i: te.sum(power[i, k], axis=k), name="powers")
    unshifted = te.create_prim_func([x, te.compute((8, 64), lambda i, j: power[i, j] / powers[i], name="y")])
    assert re.search(r"= x\[.*\] / total\[", elementary.lower(by_sum).script())
    assert re.search(r"= power\[.*\] / powers\[", elementary.lower(unshifted).script())


def test_division_by_a_constant_is_within_two_units(host: Host) -> None:
    """x / 3 becomes x · (1/3), which is off by less than 1.5 units in the last place."""
    x = te.placeholder((ROW,), "float32", "x")
    function = te.create_prim_func([x, te.compute((ROW,), lambda i: x[i] / tirx.const(3.0, "float32"), name="y")])
    values = np.linspace(-100, 100, ROW).astype(np.float32)
    found = evaluate(elementary.lower_module(vectorised(function)), host, values)
    exact = values.astype(np.float64) / 3
    assert (np.abs(found - exact) <= 1.5 * np.spacing(np.abs(exact.astype(np.float32)))).all()


def test_functions_of_functions() -> None:
    """Ten functions of each other compile at once and are right, the outermost by the C library's own functions."""
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    source = te.placeholder((64,), name="x")

    def nested(i: Any) -> Any:
        value = source[i]
        for make in [tirx.tanh, tirx.sigmoid, tirx.exp, tirx.erf, tirx.log] * 2:
            value = make(value) + tirx.const(0.5, "float32")
        return value

    function = te.create_prim_func([source, te.compute((64,), nested)]).with_attr("global_symbol", "main")
    module = tvm.compile(elementary.lower_module(tvm.IRModule({"main": function})), target=tvm.target.Target("llvm"))
    out = tvm.runtime.tensor(np.zeros(64, np.float32))
    module["main"](tvm.runtime.tensor(x), out)
    expected = x.astype(np.float64)
    for make in [np.tanh, lambda v: 1 / (1 + np.exp(-v)), np.exp, np.vectorize(math.erf), np.log] * 2:
        expected = make(expected) + 0.5
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5)
