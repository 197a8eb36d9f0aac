"""Algebraic identities, each on a graph of a few operators: what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from tests.workers.conftest import Host, lower, operators
from tests.workers.graph.nets import Net
from workers.graph import pipeline

SHAPE = (2, 3, 4)


def shape_of(net: Net, *sizes: int) -> str:
    return net.constant(np.array(sizes))


def zero_added(net: Net, x: str) -> str:
    return net("Sub", net("Add", net.constant(np.zeros((3, 1), "float32")), x), net.number(0))


def one_multiplied(net: Net, x: str) -> str:
    return net("Div", net("Mul", net.constant(np.ones(4, "float32")), x), net.number(1))


def negated_twice(net: Net, x: str) -> str:
    return net("Neg", net("Neg", x))


def transposed_back(net: Net, x: str) -> str:
    return net("Transpose", net("Transpose", x, perm=[2, 0, 1]), perm=[1, 2, 0])


def reshaped_back(net: Net, x: str) -> str:
    y = net("Reshape", net("Reshape", x, shape_of(net, 6, 4)), shape_of(net, 4, 3, 2))
    return net("Reshape", net("Unsqueeze", y, shape_of(net, 1)), shape_of(net, *SHAPE))


def cast_to_the_same(net: Net, x: str) -> str:
    return net("Cast", x, to=TensorProto.FLOAT)


def left_alone(net: Net, x: str) -> str:
    """What exporters leave of training."""
    return net("Dropout", net("Identity", x))


def chosen_always(net: Net, x: str) -> str:
    return net("Where", net.constant(np.zeros((3, 4), bool)), net.number(7), x)


def first_power(net: Net, x: str) -> str:
    return net("Pow", x, net.number(1))


@pytest.mark.parametrize(
    "spell",
    [zero_added, one_multiplied, negated_twice, transposed_back, reshaped_back, cast_to_the_same, left_alone,
     chosen_always, first_power],
)  # fmt: skip
def test_nothing_is_left(spell: Callable[[Net, str], str], host: Host, tmp_path: Path) -> None:
    """What gives back what it was given is no operator."""
    net = Net()
    assert simplified(net.model(net("Relu", spell(net, net.input(*SHAPE)))), host, tmp_path) == ["nn.relu"]


def transposed_twice(net: Net, x: str) -> str:
    return net("Transpose", net("Transpose", x, perm=[2, 0, 1]), perm=[0, 2, 1])


def reshaped_thrice(net: Net, x: str) -> str:
    return net("Flatten", net("Squeeze", net("Unsqueeze", x, shape_of(net, 0)), shape_of(net, 0)))


def cubed(net: Net, x: str) -> str:
    return net("Pow", x, net.number(3))


def scaled_factors(net: Net, x: str) -> str:
    half = net("Div", x, net.number(2))
    return net("MatMul", half, net("Mul", net.number(0.25), net.input(2, 4, 5)))


def shifted_by_more(net: Net, x: str) -> str:
    """A zero that spreads the sum over a new axis stays."""
    return net("Add", x, net.constant(np.zeros((5, 1, 1, 1), "float32")))


def joined(net: Net, x: str) -> str:
    """Equal products are one, and what nobody reads is none."""
    w = net.weights(4, 4)
    net("Exp", x)
    return net("Sub", net("MatMul", x, w), net("Tanh", net("MatMul", x, w)))


def constants(net: Net, x: str) -> str:
    return net("Mul", x, net("Exp", net("Add", net.random(4), net.random(4))))


@pytest.mark.parametrize(
    ("spell", "left"),
    [
        (transposed_twice, ["permute_dims"]),
        (reshaped_thrice, ["reshape"]),
        (cubed, ["multiply", "multiply"]),
        (scaled_factors, ["matmul", "multiply"]),
        (shifted_by_more, ["add"]),
        (joined, ["matmul", "tanh", "subtract"]),
        (constants, ["multiply"]),
    ],
)
def test_less_is_left(spell: Callable[[Net, str], str], left: list[str], host: Host, tmp_path: Path) -> None:
    """What is the same with fewer operators is spelled with them; what is not stays."""
    net = Net()
    assert simplified(net.model(spell(net, net.input(*SHAPE))), host, tmp_path) == left


def simplified(model: ModelProto, host: Host, folder: Path) -> list[str]:
    """What `main` calls once it is simplified."""
    _, imported = lower(model, host, folder)
    with host.target, pipeline.pass_context():
        return operators(pipeline.simplify()(imported.module))
