"""Writes ONNX models node by node, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from tests.workers.models import make_model, port


class Net:
    """A graph under construction. Values are called by their names; every method returns that of a new one."""

    def __init__(self, seed: int = 0, opset: int = 17) -> None:
        self._generator = np.random.default_rng(seed)
        self.opset = opset
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._weights: dict[str, NDArray[Any]] = {}
        self._count = 0

    def input(self, *shape: int) -> str:
        name = f"x{len(self._inputs)}"
        self._inputs.append(port(name, *shape))
        return name

    def __call__(self, operator: str, *arguments: str, outputs: int = 1, **attributes: Any) -> str:
        """A node; of one with several outputs they are called name, name_1, …"""
        name = self._name("v")
        names = [name, *(f"{name}_{number}" for number in range(1, outputs))]
        self._nodes.append(helper.make_node(operator, list(arguments), names, **attributes))
        return name

    def constant(self, array: NDArray[Any]) -> str:
        name = self._name("c")
        self._weights[name] = array
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, "float32"))

    def random(self, *shape: int, low: float = -0.5, high: float = 0.5) -> str:
        return self.constant(self._generator.uniform(low, high, shape).astype("float32"))

    def weights(self, *shape: int) -> str:
        """So small that a sum over all axes but the first keeps the size of what it is multiplied with."""
        scale = max(1, np.prod(shape[1:])) ** -0.5
        return self.constant((self._generator.standard_normal(shape) * scale).astype("float32"))

    def conv(
        self, x: str, channels: int, out: int, kernel: tuple[int, int] = (1, 1), *, groups: int = 1, bias: bool = True,
        **attributes: Any,
    ) -> str:  # fmt: skip
        weight = self.weights(out, channels // groups, *kernel)
        more = [self.random(out)] if bias else []
        return self("Conv", x, weight, *more, group=groups, **attributes)

    def blocked(self, channels: int, height: int, width: int, batch: int = 1) -> str:
        """A value that is in blocked layout for certain: the result of a small convolution."""
        return self.conv(self.input(batch, 3, height, width), 3, channels)

    def model(self, *outputs: str) -> ModelProto:
        return make_model(self._nodes, self._inputs, [port(name) for name in outputs], self._weights, opset=self.opset)

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"
