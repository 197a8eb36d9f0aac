"""Convolutions in integers, compared with ONNX Runtime's on the same quantized model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tvm import s_tir
from tvm.target import codegen

from tests.workers.conftest import Host
from tests.workers.models import make_model, port
from workers.devices import local_cpu
from workers.graph.integer import IntegerConvolution, convolution, offsets, pack_weights
from workers.graph.parts import Fused, Window
from workers.graph.pointwise import VALUE, Program, Ref, Step
from workers.search.templates.knobs import BELOW, PMADDWD, SDOT, USDOT, VPDPBUSD, Config, Cpu, template_of
from workers.search.templates.registry import TEMPLATES

Array = NDArray[Any]


def conv(
    shape: tuple[int, int, int, int, int, int], zeros: tuple[int, int], bounds: tuple[int, int] = (0, 255),
    window: Window | None = None, plain_channels: int = 0,
) -> IntegerConvolution:  # fmt: skip
    """A convolution that is quantized at once; `zeros` are the zero points of data and result."""
    numbers: list[Ref] = [("number", float(number)) for number in (1, zeros[1], *bounds)]
    epilogue = Fused(Program((Step("quantize", (VALUE, *numbers)),)))
    return IntegerConvolution(*shape, zeros[0], window or Window(), plain_channels, epilogue=epilogue)


#: With channels in and out.
CASES = {
    "point": (conv((2, 2, 7, 5, 3, 16), (128, 117)), (32, 48)),
    "window": (conv((1, 1, 9, 8, 2, 16), (3, 0), window=Window((3, 3), padding=(1, 1, 1, 1))), (16, 32)),
    "relu": (conv((1, 2, 6, 6, 1, 16), (255, 90), (90, 255), Window((3, 2), padding=(0, 1, 2, 0))), (24, 9)),
    "strides": (
        conv((1, 1, 11, 13, 1, 16), (0, 200), (10, 220), Window((3, 3), (2, 2), (2, 1), (2, 1, 2, 1))),
        (3, 10),
    ),
    "narrow blocks": (conv((1, 3, 5, 5, 2, 8), (7, 9), window=Window((1, 3), padding=(0, 1, 0, 1))), (21, 15)),
    "plain": (conv((1, 1, 9, 9, 2, 16), (9, 7), window=Window((3, 3), (2, 2), padding=(1, 1, 1, 1)), plain_channels=3),
              (3, 32)),
}  # fmt: skip


class Quantized:
    """Random integers for a convolution of `channels` in and out, in ONNX's layout, and what ONNX Runtime gives."""

    def __init__(self, conv: IntegerConvolution, channels: tuple[int, int], seed: int = 0) -> None:
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
        return np.clip(wanted, *self.numbers[2:])

    @property
    def numbers(self) -> list[float]:
        """Scale, zero point and bounds of the result in the epilogue."""
        return [float(number) for _, number in self.conv.epilogue.program.steps[0].arguments[1:]]

    def session(self, threads: int = 1) -> onnxruntime.InferenceSession:
        conv, window = self.conv, self.conv.window
        data, channels, result = self.scales
        weights = {
            "w": self.weight, "b": self.bias, "xs": np.float32(data), "xz": np.uint8(conv.data_zero), "ws": channels,
            "wz": np.zeros(self.outside, np.int8), "ys": np.float32(result), "yz": np.uint8(self.numbers[1]),
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
        missing = conv.out_blocks * block - self.outside
        weight = np.pad(self.weight, ((0, missing), (0, 0), (0, 0), (0, 0)))
        scale, scales, result = self.scales
        factor = np.pad(np.float32(scale) * scales / np.float32(result), (0, missing))
        zero = conv.data_zero - (BELOW if conv.signed else 0)
        added = offsets(zero, weight, np.pad(self.bias, (0, missing)).astype(np.int64))
        constants = [vector.reshape(conv.out_blocks, block) for vector in (added, factor)]
        if conv.plain_channels:
            return [self.data, pack_weights(conv, weight), *constants]
        n, c, h, w, _ = conv.data_shape
        data = np.full((n, c * block, h, w), 77, np.uint8)
        data[:, : self.inside] = self.data
        blocked = np.ascontiguousarray(data.reshape(n, c, block, h, w).transpose(0, 1, 3, 4, 2))
        return [blocked, pack_weights(conv, weight), *constants]

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


def scheduled(conv: IntegerConvolution, config: Config, cpu: Cpu) -> s_tir.Schedule:
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
    without = TEMPLATES[found[0]].configs(found[1], replace(cpu, dot=""))
    assert any(config["dot"] for config in configs) == (bool(cpu.dot) and quantized.conv.block % cpu.lanes == 0)
    for config in (configs[0], configs[len(configs) // 2], configs[-1], without[0]):
        schedule = scheduled(quantized.conv, config, cpu)
        library = tvm.compile(schedule.mod, target=host.target)
        assert_equal(quantized.onnxruntime(), compute(quantized, library))
        if config["dot"]:
            assert cpu.dot in library.mod.inspect_source("asm")


#: Kinds of CPU with 16 slots in a block: LLVM's name, and what its schedules are made for.
KINDS = {
    "AVX512-VNNI": ("cascadelake", Cpu(16, 32, 32 << 10, 1 << 20, 2, VPDPBUSD)),
    "AVX512": ("skylake-avx512", Cpu(16, 32, 32 << 10, 1 << 20, 2, PMADDWD)),
    "AVX-VNNI": ("alderlake", Cpu(8, 16, 32 << 10, 1 << 20, 2, VPDPBUSD)),
    "AVX2": ("haswell", Cpu(8, 16, 32 << 10, 1 << 20, 2, PMADDWD)),
    "SSE2": ("x86-64-v2", Cpu(4, 16, 32 << 10, 1 << 20, 2, PMADDWD)),
    "dotprod": ("cortex-a76", Cpu(4, 32, 32 << 10, 1 << 20, 2, SDOT)),
    "i8mm": ("neoverse-v2", Cpu(4, 32, 32 << 10, 1 << 20, 2, USDOT)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_cpu_has_its_instruction(kind: str, host: Host) -> None:
    """Chosen by features alone; never one that cuts sums off. What runs on this machine computes the same on it."""
    mcpu, cpu = KINDS[kind]
    arm = cpu.dot in (SDOT, USDOT)
    target = tvm.target.Target({"kind": "llvm", "mtriple": f"{'aarch64' if arm else 'x86_64'}-linux-gnu", "mcpu": mcpu})
    features = [str(feature) for feature in codegen.llvm_get_cpu_features(target)]
    arch = "aarch64" if arm else "x86_64"
    assert (local_cpu.dot_of(arch, features), local_cpu.vector_registers(arch, features)[0]) == (cpu.dot, cpu.lanes)
    signed = cpu.dot == SDOT
    quantized = Quantized(replace(CASES["strides"][0], signed=signed), CASES["strides"][1], seed=2)
    found = template_of(convolution(quantized.conv))
    assert found is not None
    config = next(c for c in TEMPLATES[found[0]].configs(found[1], cpu) if not c["parallel"])
    schedule = scheduled(quantized.conv, config, cpu)
    assembly = tvm.compile(schedule.mod, target=target).mod.inspect_source("asm")
    assert re.search(rf"\bv?{cpu.dot}\b", assembly)
    assert "maddubs" not in assembly
    runs = {"AVX512-VNNI": "avx512vnni", "AVX512": "avx512bw", "AVX2": "avx2"}
    here = set(host.identity.features)
    # Both encodings of VNNI are of one instruction, which LLVM chooses by features.
    if runs.get(kind) in here or (kind == "AVX-VNNI" and here & {"avxvnni", "avx512vnni"}):
        library = tvm.compile(schedule.mod, target=host.target)
        assert_equal(quantized.onnxruntime(), compute(quantized, library))


def test_overflow_is_refused() -> None:
    """Sums that may leave 32 bits are an error, not other numbers: by the bias, or by the bias and the sum."""
    weight = np.full((16, 16, 1, 1), 127, np.int8)
    for zero, bias in ((255, -(2**31) + 5), (0, 2**31 - 1000)):
        offsets(zero, weight, np.zeros(16, np.int64))
        with pytest.raises(OverflowError):
            offsets(zero, weight, np.full(16, bias, np.int64))
