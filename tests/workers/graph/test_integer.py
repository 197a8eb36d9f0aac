"""Convolutions in integers, compared with ONNX Runtime's on the same quantized model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tvm import s_tir

from tests.workers.conftest import Host
from tests.workers.models import make_model, port
from workers.graph.computations import Window
from workers.graph.integer import QuantizedConvolution, constants, convolution, pack_weights
from workers.search.templates.knobs import Config, Cpu, template_of
from workers.search.templates.registry import TEMPLATES

Array = NDArray[Any]
CASES = {
    "point": (QuantizedConvolution(2, 2, 7, 5, 3, 16, 128, 117), (32, 48)),
    "window": (QuantizedConvolution(1, 1, 9, 8, 2, 16, 3, 0, window=Window((3, 3), padding=(1, 1, 1, 1))), (16, 32)),
    "relu": (
        QuantizedConvolution(1, 2, 6, 6, 1, 16, 255, 90, low=90, window=Window((3, 2), padding=(0, 1, 2, 0))),
        (24, 9),
    ),
    "strides": (
        QuantizedConvolution(1, 1, 11, 13, 1, 16, 0, 200, 10, 220, Window((3, 3), (2, 2), (2, 1), (2, 1, 2, 1))),
        (3, 10),
    ),
    "narrow blocks": (
        QuantizedConvolution(1, 3, 5, 5, 2, 8, 7, 9, window=Window((1, 3), padding=(0, 1, 0, 1))),
        (21, 15),
    ),
}


class Quantized:
    """Random integers for a convolution of `channels` in and out, in ONNX's layout, and what ONNX Runtime gives."""

    def __init__(self, conv: QuantizedConvolution, channels: tuple[int, int], seed: int = 0) -> None:
        self.conv, (self.inside, self.outside) = conv, channels
        generator = np.random.default_rng(seed)
        self.data = generator.integers(0, 256, (conv.batch, self.inside, conv.height, conv.width)).astype(np.uint8)
        self.weight = generator.integers(-127, 128, (self.outside, self.inside, *conv.window.kernel)).astype(np.int8)
        self.bias = generator.integers(-(2**15), 2**15, self.outside).astype(np.int32)
        self.scales = (0.02, generator.uniform(0.001, 0.01, self.outside).astype(np.float32), 0.0)
        # So that results reach over all of uint8 and beyond, where they are cut off.
        spread = 74 * 73 * np.sqrt(self.weight[0].size) * 0.02 * float(self.scales[1].mean())
        self.scales = (0.02, self.scales[1], spread / 80)

    def onnxruntime(self) -> Array:
        conv, window = self.conv, self.conv.window
        wanted = self.session().run(None, {"x": self.data})[0]
        assert wanted.shape[2:] == window.extent(conv.height, conv.width)
        return np.clip(wanted, conv.low, conv.high)

    def session(self, threads: int = 1) -> onnxruntime.InferenceSession:
        conv, window = self.conv, self.conv.window
        data, channels, result = self.scales
        weights = {
            "w": self.weight, "b": self.bias, "xs": np.float32(data), "xz": np.uint8(conv.data_zero), "ws": channels,
            "wz": np.zeros(self.outside, np.int8), "ys": np.float32(result), "yz": np.uint8(conv.result_zero),
        }  # fmt: skip
        node = helper.make_node(
            "QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["y"],
            pads=list(window.padding), strides=list(window.strides), dilations=list(window.dilation),
        )  # fmt: skip
        shape = (conv.batch, self.outside, *window.extent(conv.height, conv.width))
        model = make_model(
            [node],
            [port("x", *self.data.shape, dtype=TensorProto.UINT8)],
            [port("y", *shape, dtype=TensorProto.UINT8)],
            {name: np.asarray(value) for name, value in weights.items()},
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def arguments(self) -> list[Array]:
        """Data, weights and constants in blocks, the slots without a channel filled with anything."""
        conv, block = self.conv, self.conv.block
        n, c, h, w, _ = conv.data_shape
        data = np.full((n, c * block, h, w), 77, np.uint8)
        data[:, : self.inside] = self.data
        weight = np.zeros((conv.out_blocks * block, c * block, *conv.window.kernel), np.int8)
        weight[: self.outside, : self.inside] = self.weight
        missing = conv.out_blocks * block - self.outside
        scales = (self.scales[0], np.pad(self.scales[1], (0, missing)), self.scales[2])
        added, factor = constants(conv, weight, np.pad(self.bias, (0, missing)), scales)
        blocked = np.ascontiguousarray(data.reshape(n, c, block, h, w).transpose(0, 1, 3, 4, 2))
        return [blocked, pack_weights(conv, weight), added, factor]

    def plain(self, result: Array) -> Array:
        """A blocked result in ONNX's layout."""
        n, o, h, w, v = result.shape
        return result.transpose(0, 1, 4, 2, 3).reshape(n, o * v, h, w)[:, : self.outside]


def compute(quantized: Quantized, library: Any) -> Array:
    arguments = [tvm.runtime.tensor(array) for array in quantized.arguments()]
    result = tvm.runtime.tensor(np.zeros(quantized.conv.result_shape, np.uint8))
    library["main"](*arguments, result)
    return quantized.plain(result.numpy())


def assert_equal(wanted: Array, got: Array) -> None:
    """Within one quantum, and different in hardly any: no more than rounding of the multiplier explains."""
    difference = np.abs(wanted.astype(int) - got.astype(int))
    assert difference.max() <= 1
    assert np.count_nonzero(difference) <= 0.002 * difference.size
    assert len(np.unique(wanted)) > 20  # there was something to compare


@pytest.mark.parametrize("case", CASES)
def test_convolution(case: str, host: Host) -> None:
    """Sums, padding by the zero point, empty slots, rounding, cut-off and ReLU are ONNX Runtime's."""
    quantized = Quantized(*CASES[case])
    with host.target:
        library = tvm.compile(tvm.IRModule({"main": convolution(quantized.conv)}), target=host.target)
    assert_equal(quantized.onnxruntime(), compute(quantized, library))


def scheduled(conv: QuantizedConvolution, config: Config, cpu: Cpu) -> s_tir.Schedule:
    function = convolution(conv)
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
    found = template_of(function)
    assert found is not None
    TEMPLATES[found[0]].schedule(schedule, found[1], config, cpu)
    return schedule


@pytest.mark.parametrize("case", CASES)
def test_template(case: str, host: Host) -> None:
    """First and last choices of the template compute the same, by dot products of four where this CPU has them."""
    quantized, cpu = Quantized(*CASES[case], seed=1), host.cpu
    found = template_of(convolution(quantized.conv))
    assert found is not None
    configs = TEMPLATES[found[0]].configs(found[1], cpu)
    without = TEMPLATES[found[0]].configs(found[1], replace(cpu, dot=False))
    assert any(config["dot"] for config in configs) == (cpu.dot and quantized.conv.block == cpu.lanes)
    for config in (configs[0], configs[len(configs) // 2], configs[-1], without[0]):
        schedule = scheduled(quantized.conv, config, cpu)
        library = tvm.compile(schedule.mod, target=host.target)
        assert_equal(quantized.onnxruntime(), compute(quantized, library))
        if config["dot"]:
            assert "vpdpbusd" in library.mod.inspect_source("asm")


def test_overflow_is_refused() -> None:
    """Sums that may leave 32 bits are an error, not other numbers: by the bias, or by the bias and the sum."""
    weight, ones = np.full((16, 16, 1, 1), 127, np.int8), np.ones(16, np.float32)
    for zero, bias in ((255, -(2**31) + 5), (0, 2**31 - 1000)):
        conv = QuantizedConvolution(1, 1, 1, 1, 1, 16, zero, 0)
        constants(conv, weight, np.zeros(16, np.int32), (1.0, ones, 1.0))
        with pytest.raises(OverflowError):
            constants(conv, weight, np.full(16, bias, np.int32), (1.0, ones, 1.0))
