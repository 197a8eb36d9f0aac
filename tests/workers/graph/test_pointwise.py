"""Programs of elementwise steps: what they compute, and which of them are cheap or safe where no channel is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from tests.workers.conftest import Host
from workers.graph.pointwise import OPERATORS, VALUE, Program, Step

X = np.array([-3.5, -1.0, -0.25, 0.25, 1.0, 7.0], "float32")
Y = np.array([2.0, -0.5, 1.5, 0.5, 4.0, 3.0], "float32")
ONE, OTHER = VALUE, ("input", 0)


def run(program: Program, host: Host) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    x, y = (te.placeholder((len(X),), name=name) for name in "xy")
    out = te.compute((len(X),), lambda i: program.evaluate(x[i], [y[i]]), name="out")
    compiled = tvm.compile(te.create_prim_func([x, y, out]), target=host.target)
    dtype = program.dtype("float32")
    result = tvm.runtime.tensor(np.full(len(X), np.nan if dtype == "float32" else 255, dtype))
    compiled["main"](tvm.runtime.tensor(X), tvm.runtime.tensor(Y), result)
    return np.asarray(result.numpy())


REFERENCES = {
    "add": (Step("add", (ONE, OTHER)), X + Y),
    "subtract": (Step("subtract", (OTHER, ONE)), Y - X),
    "multiply": (Step("multiply", (ONE, ("number", 0.5))), X * 0.5),
    "divide": (Step("divide", (("number", 2.0), ONE)), 2 / X),
    "maximum": (Step("maximum", (ONE, OTHER)), np.maximum(X, Y)),
    "minimum": (Step("minimum", (ONE, OTHER)), np.minimum(X, Y)),
    "negative": (Step("negative", (ONE,)), -X),
    "abs": (Step("abs", (ONE,)), abs(X)),
    "square": (Step("square", (ONE,)), X * X),
    "sqrt": (Step("sqrt", (("number", 2.25),)), np.full(6, 1.5)),
    "exp": (Step("exp", (ONE,)), np.exp(X)),
    "erf": (Step("erf", (ONE,)), np.array([math.erf(x) for x in X])),
    "tanh": (Step("tanh", (ONE,)), np.tanh(X)),
    "sigmoid": (Step("sigmoid", (ONE,)), 1 / (1 + np.exp(-X))),
    "relu": (Step("relu", (ONE,)), np.maximum(X, 0)),
    "clip": (Step("clip", (ONE, ("number", -1.0), ("number", 0.5))), np.clip(X, -1, 0.5)),
    "leakyrelu": (Step("leakyrelu", (ONE, ("number", 0.1))), np.where(X > 0, X, X * np.float32(0.1))),
    "silu": (Step("silu", (ONE,)), X / (1 + np.exp(-X))),
    "dequantize": (Step("dequantize", (ONE, ("number", 0.5), ("number", 3.0))), (X - 3) * 0.5),
    # Integers as bytes: halves to even, and what is beyond the bounds on them.
    "quantize": (
        Step("quantize", (ONE, *(("number", number) for number in (0.5, 2.0, 0.0, 10.0)))),
        np.array([0, 0, 2, 2, 4, 10], "uint8"),
    ),
    "masked": (Step("masked", (ONE, OTHER)), np.where(Y > 0, X, 0)),
}


def test_every_operator_is_tested() -> None:
    """There is a reference for each operator that is fused."""
    assert set(REFERENCES) == set(OPERATORS)


@pytest.mark.parametrize("operator", REFERENCES)
def test_operators(operator: str, host: Host) -> None:
    """Each operator computes what numpy does, its arguments in their order."""
    step, wanted = REFERENCES[operator]
    np.testing.assert_allclose(run(Program((step,)), host), wanted, rtol=2e-6)


def test_steps_read_earlier_ones(host: Host) -> None:
    """The last step is the result; each may read the value, other inputs and any step before it."""
    program = Program(
        (
            Step("multiply", (ONE, ONE)),
            Step("add", (("step", 0), OTHER)),
            Step("subtract", (("step", 1), ("step", 0))),
            Step("multiply", (("step", 2), ONE)),
        )
    )
    np.testing.assert_allclose(run(program, host), (X * X + Y - X * X) * X, rtol=1e-5)


def test_nothing(host: Host) -> None:
    """Without a step the value itself is the result."""
    np.testing.assert_array_equal(run(Program(), host), X)


@pytest.mark.parametrize(
    ("step", "cheap", "safe"),
    [
        (Step("add", (ONE, OTHER)), True, True),
        (Step("multiply", (ONE, ("number", 1e30))), True, True),
        (Step("multiply", (ONE, ("number", math.inf))), True, False),
        (Step("add", (ONE, ("number", -math.inf))), True, False),
        (Step("clip", (ONE, ("number", 0.0), ("number", math.inf))), True, True),
        (Step("maximum", (ONE, ("number", -math.inf))), True, True),
        (Step("divide", (ONE, ("number", 6.0))), False, True),
        (Step("divide", (ONE, ("number", 0.0))), False, False),
        (Step("divide", (ONE, OTHER)), False, False),
        (Step("divide", (("number", 1.0), ONE)), False, False),
        (Step("sqrt", (ONE,)), False, False),
        (Step("exp", (ONE,)), False, False),
        (Step("sigmoid", (ONE,)), False, True),
    ],
)
def test_what_is_cheap_and_what_is_safe(step: Step, cheap: bool, safe: bool) -> None:
    """Cheap is what may be computed for every use anew; safe is what makes of finite numbers finite ones."""
    program = Program((Step("relu", (ONE,)), step))
    assert (program.is_cheap, program.keeps_padding_finite) == (cheap, safe)
