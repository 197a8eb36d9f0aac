"""Kernels whose weights are float16: every one that has weights, against ONNX Runtime's run of the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from tests.workers.conftest import Host
from tests.workers.graph.kernels import AVX2, check, take
from tests.workers.graph.nets import Net
from workers.graph.computations import Computation, Convolution, Dense, Pooling, variants
from workers.graph.half import rounded
from workers.packaging.reference import compare


def net() -> ModelProto:
    """A convolution of the image, one by a window, one of groups, a depthwise and a transposed one, a layer of rows."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 12, 12), 3, 24, (3, 3), pads=[1, 1, 1, 1]))
    # ONNX Runtime would fold a product into the weights; a quotient is met when kernels are written.
    x = net("Div", net.conv(x, 24, 32, (3, 3), pads=[1, 1, 1, 1]), net.random(32, 1, 1, low=0.5, high=2))
    x = net("Relu", net.conv(x, 32, 32, (3, 3), groups=4, strides=[2, 2], pads=[1, 1, 1, 1]))
    x = net.conv(x, 32, 32, (3, 3), groups=32, pads=[1, 1, 1, 1])
    x = net("ConvTranspose", x, net.weights(32, 8, 2, 2), strides=[2, 2])
    x = net("Reshape", x, net.constant(np.array([8, 144])))
    return net.model(net("MatMul", x, net.weights(144, 20)))


def rounded_weights(model: ModelProto, but: int = 0) -> ModelProto:
    """The model with weights that are numbers of float16, all `but` that many of the last."""
    tensors = [tensor for tensor in model.graph.initializer if len(tensor.dims) in (2, 4)]
    for tensor in tensors[: len(tensors) - but]:
        half, _ = rounded(numpy_helper.to_array(tensor))
        assert half is not None
        tensor.CopyFrom(numpy_helper.from_array(half.astype("float32"), tensor.name))
    return model


def types(computations: dict[str, Computation]) -> dict[str, str]:
    """Of the weights of each kernel that has some."""
    return {
        name: found.weight_dtype
        for name, found in computations.items()
        if isinstance(found, Convolution | Dense) or (isinstance(found, Pooling) and found.kind == "depthwise")
    }


def test_kernels(host: Host, tmp_path: Path) -> None:
    """Every kernel reads its weights as float16 and computes what ONNX Runtime does with the same numbers; none is by
    Winograd's algorithm. Where weights are no such numbers, or are not asked for so, they stay float32."""
    model = rounded_weights(net())
    taken = take(model, host, tmp_path, half=True)
    computations = taken.computations()
    found = types(computations)
    assert len(found) == 6
    assert set(found.values()) == {"float16"}
    for computation in computations.values():
        assert not any(name.startswith("winograd") for name in variants(computation, rounding=True))
    # Which looks at the types that are stored, too.
    assert check(taken, host, cpu=AVX2, count=2) > 1
    assert set(types(take(rounded_weights(net()), host, tmp_path).computations()).values()) == {"float32"}
    left = types(take(rounded_weights(net(), but=1), host, tmp_path, half=True).computations())
    assert sorted(left.values()) == ["float16"] * 5 + ["float32"]


def test_tolerance_by_scheme() -> None:
    """What float16 may lose is allowed of fp16 alone, and no more than that."""
    exact = [np.linspace(-3, 3, 64, dtype=np.float32)]
    for apart, scheme, ok in ((1e-3, "none", False), (1e-3, "fp16", True), (0.1, "fp16", False)):
        [entry] = compare(exact, [exact[0] + np.float32(apart)], ["y"], scheme)
        assert entry["ok"] is ok
    [entry] = compare(exact, exact, ["y"], "fp16")
    assert entry["tolerance"] == pytest.approx(0.03)
