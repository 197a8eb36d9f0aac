"""Quantized models, as ONNX Runtime's quantizer writes them, in integers from first quantization to last."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from tvm import relax

from tests.workers.conftest import Host
from tests.workers.graph.kernels import AVX2, AVX512, check, plain, take
from tests.workers.graph.nets import Net
from tests.workers.graph.shapes import CHANNELS, SEEDS, examples
from tests.workers.graph.test_graphs import calls, classifier, resnet, squeeze_and_excite
from tests.workers.graph.test_operators import choose, extracted
from tests.workers.models import save
from tuning_db.jobs import Claim
from tuning_db.store import TuningStore
from workers.packaging import library
from workers.search.candidates import Built, Candidate, Measurement
from workers.search.forkserver import ForkServer
from workers.search.lanes import LocalBuilder, LocalRunner
from workers.search.templates.knobs import PMADDWD

Array = NDArray[Any]


class Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime publishes no types
    """Four samples of standard normal numbers."""

    def __init__(self, model: ModelProto) -> None:
        generator = np.random.default_rng(0)
        shapes = {x.name: [d.dim_value for d in x.type.tensor_type.shape.dim] for x in model.graph.input}
        self._samples: Iterator[dict[str, Array]] = iter(
            [{name: generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}] * 4
        )

    def get_next(self) -> dict[str, Array] | None:
        return next(self._samples, None)


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized."""

    activations: QuantType = QuantType.QUInt8
    form: QuantFormat = QuantFormat.QDQ
    per_channel: bool = True


def quantized(model: ModelProto, folder: Path, recipe: Recipe | None = None) -> ModelProto:
    """The model with int8 weights, and every operator on quantized tensors that can be."""
    recipe = recipe or Recipe()
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    model = onnx.shape_inference.infer_shapes(model)
    logging.disable(logging.WARNING)
    try:
        quantize_static(
            save(model, folder, "float.onnx"), folder / "quantized.onnx", Reader(model), quant_format=recipe.form,
            per_channel=recipe.per_channel, activation_type=recipe.activations, weight_type=QuantType.QInt8,
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(folder / "quantized.onnx")


def quanta(model: ModelProto) -> dict[str, float]:
    """The scale of each output that is dequantized last."""
    numbers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    outputs = {output.name for output in model.graph.output}
    return {
        node.output[0]: float(numbers[node.input[1]])
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.output[0] in outputs
    }


def point() -> ModelProto:
    """A convolution of one pixel with ReLU."""
    net = Net()
    return net.model(net("Relu", net.conv(net.input(1, 24, 6, 6), 24, 20)))


def dense_block() -> ModelProto:
    """A concatenation, and an average that counts its padding."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 9, 9), 3, 20, (3, 3), pads=[1] * 4))
    x = net("Concat", x, net.conv(x, 20, 12, (3, 3), pads=[1] * 4), axis=1)
    x = net("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, count_include_pad=1)
    return net.model(net.conv(x, 32, 16))


def depthwise() -> ModelProto:
    """As in MobileNet."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 9, 9), 3, 20, (3, 3), pads=[1] * 4))
    x = net("Relu", net.conv(x, 20, 20, (3, 3), groups=20, pads=[1] * 4))
    return net.model(net.conv(x, 20, 16))


def grouped() -> ModelProto:
    """Groups that are whole blocks, that lie across blocks, and of one channel of input."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 7, 7), 3, 36, (3, 3), pads=[1] * 4))
    x = net("Relu", net.conv(x, 36, 48, (3, 3), groups=3))
    x = net("Relu", net.conv(x, 48, 96, (1, 1), groups=3))
    return net.model(net.conv(x, 96, 192, (3, 3), groups=96, strides=[2, 2], pads=[1] * 4))


def feed_forward() -> ModelProto:
    """Rows through two layers and past them, as in a transformer."""
    net = Net()
    x = net.input(2, 5, 32)
    y = net("Add", net("MatMul", x, net.weights(32, 48)), net.random(48))
    y = net("Add", net("MatMul", net("Relu", y), net.weights(48, 32)), net.random(32))
    return net.model(net("MatMul", net("Add", x, y), net.weights(32, 16)))


def swish() -> ModelProto:
    """Convolutions, each behind it a product of its result with that one's sigmoid, as SiLU is exported."""
    net = Net()
    x = net.input(1, 8, 9, 9)
    for channels, out in ((8, 20), (20, 12)):
        x = net.conv(x, channels, out, (3, 3), pads=[1] * 4)
        x = net("Mul", x, net("Sigmoid", x))
    return net.model(net("GlobalAveragePool", x))


def in_all(model: ModelProto, host: Host, folder: Path) -> list[str]:
    """What an inference calls, kernels without their numbers."""
    module, _ = take(model, host, folder).graph.emit(plain)
    return [name if name.startswith("relax.") else name.rpartition("_")[0] for name in calls(module)]


INTEGERS = ["int8_conv3x3", "max_pool", *["int8_conv3x3"] * 3, "int8_conv1x1", "int8_conv3x3", "plain"]


@pytest.mark.parametrize(
    ("make", "recipe", "wanted"),
    [
        (point, Recipe(), ["relax.quantize", "block", "int8_conv1x1", "plain"]),
        # Bias, ReLU and the addition of what goes round two layers are in the convolutions, and so is the picture's
        # quantization.
        (resnet, Recipe(), INTEGERS),
        (resnet, Recipe(per_channel=False), INTEGERS),
        (resnet, Recipe(activations=QuantType.QInt8), INTEGERS),
        (resnet, Recipe(form=QuantFormat.QOperator), INTEGERS),
        (resnet, Recipe(QuantType.QInt8, QuantFormat.QOperator), INTEGERS),
        (
            classifier,
            Recipe(),
            ["int8_conv3x3", "average_pool", "int8_conv1x1", "int8_conv1x1", "plain", "relax.reshape"],
        ),
        (
            dense_block,
            Recipe(),
            # One part of the concatenation comes from its convolution as it has to be.
            ["int8_conv3x3", "int8_conv3x3", "requantize", "concat", "average_pool", "int8_conv1x1", "plain"],
        ),
        (depthwise, Recipe(), ["int8_conv3x3", "int8_depthwise", "int8_conv1x1", "plain"]),
        # Rows are reshaped to two axes and back, which moves nothing.
        (feed_forward, Recipe(), ["relax.quantize", *["int8_dense"] * 3, *["relax.reshape"] * 7]),
        (grouped, Recipe(), ["int8_conv3x3", "int8_conv3x3", "int8_conv1x1", "int8_conv3x3", "plain"]),
    ],
)  # fmt: skip
def test_networks_are_computed_in_integers(
    make: Callable[[], ModelProto], recipe: Recipe, wanted: list[str], host: Host, folder: Path
) -> None:
    """No kernel but these between what comes in and what goes out: no dequantization, quantization or layout."""
    assert sorted(in_all(quantized(make(), folder, recipe), host, folder)) == sorted(wanted)


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (resnet, Recipe()),
        (resnet, Recipe(QuantType.QInt8, QuantFormat.QOperator)),
        (classifier, Recipe()),
        (dense_block, Recipe()),
        (depthwise, Recipe()),
        (depthwise, Recipe(activations=QuantType.QInt8, per_channel=False)),
        (grouped, Recipe()),
        (feed_forward, Recipe()),
        (squeeze_and_excite, Recipe()),
        (swish, Recipe()),
    ],
)
def test_networks_compute_what_the_reference_does(
    make: Callable[[], ModelProto], recipe: Recipe, host: Host, folder: Path
) -> None:
    """Within a quantum of ONNX Runtime's unoptimised graph."""
    model = quantized(make(), folder, recipe)
    check(take(model, host, folder), host, count=1, quanta=quanta(model))


#: Channels in and out, kernel, groups.
SUMS = {
    "dense": (20, 18, (3, 3), 1),
    "depthwise": (20, 20, (3, 3), 20),
    "one row": (18, 18, (1, 5), 18),
    "groups": (24, 36, (3, 3), 3),
    "multiplier": (12, 24, (3, 3), 12),
}


def on_grid(net: Net, x: str, scale: float, zero: int) -> str:
    """Quantized to bytes and back."""
    grid = net.number(scale), net.constant(np.array(zero, "uint8"))
    return net("DequantizeLinear", net("QuantizeLinear", x, *grid), *grid)


def sums(case: str, zero: int, *, requantized: bool) -> ModelProto:
    """Two convolutions of integers at their limits, on scales of powers of two: float32 holds every sum exactly."""
    channels, out, kernel, groups = SUMS[case]
    net, generator = Net(), np.random.default_rng(zero)

    def integers(*shape: int, values: list[int]) -> Array:
        return generator.choice(values, shape)

    # Of standard normal numbers a third lie beyond 0 or 255.
    x = on_grid(net, net.input(1, channels, 7, 6), 1 / 128, zero)
    weight = integers(out, channels // groups, *kernel, values=[-128, -128, -127, -1, 0, 1, 127]).astype("int8")
    weight[0], weight[-1] = -128, 127
    scale, zeros = net.number(1 / 32), net.constant(np.zeros((), "int8"))
    bias = integers(out, values=[-(2**15), -1, 0, 7, 2**15]).astype("float32") / 4096
    reach = [size // 2 for size in kernel]
    x = net(
        "Conv", x, net("DequantizeLinear", net.constant(weight), scale, zeros), net.constant(bias), group=groups,
        pads=reach * 2, strides=[1, 2],
    )  # fmt: skip
    return net.model(on_grid(net, x, float(np.sqrt(weight[0].size)) / 2, 255 - zero) if requantized else x)


@pytest.mark.parametrize("zero", [0, 128, 255])
@pytest.mark.parametrize("case", SUMS)
def test_sums_are_exact(case: str, zero: int, host: Host, folder: Path) -> None:
    """Weights of -128, data at both ends, and zero points there too: no sum is cut off or wraps, and what becomes bytes
    again is within a quantum."""
    for requantized in (False, True):
        model = sums(case, zero, requantized=requantized)
        taken = take(model, host, folder)
        assert any(name.startswith("int8_") for name in taken.computations())
        check(taken, host, cpu=host.cpu, count=1, quanta=quanta(model), exact=True)
        if "avx2" in host.identity.features:
            check(taken, host, cpu=replace(AVX2, dot=PMADDWD), count=1, quanta=quanta(model), exact=True)


@pytest.mark.parametrize("zero", [0, 255])
def test_sums_of_rows_are_exact(zero: int, host: Host, folder: Path) -> None:
    """The same of rows along two axes, whatever kind of dot products sums them."""
    net, generator = Net(), np.random.default_rng(0)
    weight = generator.choice([-128, -127, 0, 127], (52, 32)).astype("int8")
    weight[:, 0], weight[:, -1] = -128, 127
    real = net("DequantizeLinear", net.constant(weight), net.number(1 / 32), net.constant(np.zeros((), "int8")))
    model = net.model(net("MatMul", on_grid(net, net.input(3, 5, 52), 1 / 128, zero), real))
    taken = take(model, host, folder)
    assert [name.rpartition("_")[0] for name in taken.computations()] == ["int8_dense"]
    check(taken, host, cpu=host.cpu, count=1, exact=True)
    check(take(model, host, folder, signed=True), host, count=1, exact=True)
    if "avx2" in host.identity.features:
        check(taken, host, cpu=replace(AVX2, dot=PMADDWD), count=1, exact=True)


@pytest.mark.parametrize("case", ["dense", "depthwise", "groups"])
def test_sums_of_data_less_128_are_exact(case: str, host: Host, folder: Path) -> None:
    """As CPUs read it whose dot products are of int8 by int8."""
    check(take(sums(case, 3, requantized=False), host, folder, signed=True), host, count=1, exact=True)


def one_convolution(channels: int, out: int, stride: int, kernel: int, relu: bool, seed: int) -> ModelProto:
    net, pads, strides = Net(seed), [kernel // 2] * 4, [stride] * 2
    x = net.conv(net.input(1, channels, 7, 6), channels, out, (kernel, kernel), strides=strides, pads=pads)
    return net.model(net("Relu", x) if relu else x)


@examples(12)
@given(CHANNELS, CHANNELS, st.sampled_from((1, 2)), st.sampled_from((1, 3)), st.booleans(), SEEDS)
def test_convolutions_of_any_channels(
    host: Host, folder: Path, channels: int, out: int, stride: int, kernel: int, relu: bool, seed: int
) -> None:
    """Channels that fill no block, fewer than four, of plain and of blocked data, under two choices of the template."""
    model = quantized(one_convolution(channels, out, stride, kernel, relu, seed), folder)
    taken = take(model, host, folder)
    assert any(name.startswith("int8_conv") for name in taken.computations())
    cpu = host.cpu if host.cpu.dot else AVX512
    check(taken, host, cpu=cpu, count=2, seed=seed, quanta=quanta(model))


def dynamic(net: Net, x: str, operator: str, weight: Array, scale: Array, **attributes: Any) -> str:
    """A product as the quantizer writes it, of data on a grid of its own with weights of uint8 around 128: ONNX
    Runtime's sums of those do not saturate, on whatever processor."""
    q = net("DynamicQuantizeLinear", x, outputs=3)
    y = net(operator, q, net.constant(weight), f"{q}_2", net.constant(np.array(128, "uint8")), **attributes)
    return net("Mul", net("Cast", y, to=TensorProto.FLOAT), net("Mul", f"{q}_1", net.constant(scale)))


def dynamic_sums(case: str) -> ModelProto:
    """One product at its limits, of data that is all zeros in the case of that name."""
    net, generator = Net(), np.random.default_rng(3)

    def weights(*shape: int) -> Array:
        return generator.choice(np.array([0, 0, 1, 127, 128, 129, 255], "uint8"), shape)

    def scales(*shape: int) -> Array:
        return generator.uniform(0.001, 0.01, shape).astype("float32")

    if case in ("rows", "zeros"):
        x = net.input(3, 25, 52)
        x = net("Mul", x, net.number(0)) if case == "zeros" else x
        return net.model(dynamic(net, x, "MatMulInteger", weights(52, 32), scales(32)))
    if case == "few rows":
        return net.model(dynamic(net, net.input(3, 50), "MatMulInteger", weights(50, 23), scales()))
    channels = 3 if case == "picture" else 20
    x, out = net.input(1, channels, 9, 8), 18
    scale = scales() if case == "picture" else scales(out, 1, 1)
    return net.model(dynamic(net, x, "ConvInteger", weights(out, channels, 3, 3), scale, pads=[1] * 4, strides=[2, 1]))


@pytest.mark.parametrize("case", ["rows", "zeros", "few rows", "picture", "channels"])
def test_dynamic_sums_are_exact(case: str, host: Host, folder: Path) -> None:
    """Of data whose scale and zero point are taken from it, sums of bytes become real numbers as ONNX Runtime's do, bit
    by bit, whatever kind of dot products sums them."""
    model = dynamic_sums(case)
    taken = take(model, host, folder)
    kind = "conv3x3" if case in ("picture", "channels") else "conv1x1" if case == "few rows" else "dense"
    assert f"int8_{kind}_0" in taken.computations()
    assert (taken.graph.integer_sums, taken.graph.real_sums) == (1, [])
    check(taken, host, cpu=host.cpu, count=2, exact=True, as_written=True)
    check(take(model, host, folder, signed=True), host, count=1, exact=True, as_written=True)


@pytest.mark.parametrize("per_channel", [False, True])
def test_dynamic_networks(per_channel: bool, host: Host, folder: Path) -> None:
    """What ONNX Runtime's quantizer makes of a network: each product with its bias and what follows is one kernel, and
    three kernels quantize what it reads."""
    path = folder / "dynamic.onnx"
    # Of weights of seven bits ONNX Runtime's sums do not saturate.
    quantize_dynamic(save(feed_forward(), folder, "float.onnx"), path, per_channel=per_channel, reduce_range=True)
    taken = take(onnx.load(path), host, folder)
    assert [name.rpartition("_")[0] for name in taken.computations()] == ["int8_dense"] * 3
    assert (taken.graph.integer_sums, taken.graph.real_sums) == (3, [])
    check(taken, host, cpu=host.cpu, count=1, as_written=True)


def test_what_is_not_in_integers_is_told(host: Host, folder: Path) -> None:
    """A product of two activations, and one of weights with a zero point, by operator, shape and reason."""
    net = Net()
    x = net.conv(net.input(1, 3, 8, 8), 3, 16)
    rows = net("Reshape", x, net.constant(np.array([16, 64])))
    model = quantized(net.model(net("MatMul", rows, net("Transpose", rows, perm=[1, 0]))), folder)
    graph = take(model, host, folder).graph
    assert graph.integer_sums == 1
    [left] = graph.real_sums
    assert (left.operator, left.shape) == ("matmul", (16, 16))
    assert left.reason == "its other operand is not a constant of int8 around zero"
    net = Net()
    plain_model = net.model(net("MatMul", net.input(4, 24), net.weights(24, 8)))
    assert not take(plain_model, host, folder).graph.is_quantized
    quantize_dynamic(save(plain_model, folder, "float.onnx"), folder / "dynamic.onnx", weight_type=QuantType.QUInt8)
    graph = take(onnx.load(folder / "dynamic.onnx"), host, folder).graph
    assert (graph.is_quantized, graph.integer_sums) == (True, 0)
    [left] = graph.real_sums
    assert (left.operator, left.shape) == ("matmul", (4, 8))
    assert left.reason.startswith("its weights have a zero point")


def test_a_library(host: Host, server: ForkServer, sqlite_store: TuningStore, claim: Claim, tmp_path: Path) -> None:
    """Candidates are built and measured in processes of their own, with weights out of cache; the library's outputs are
    within a quantum of the reference."""
    reference = quantized(resnet(), tmp_path)
    model, operators = extracted(lambda: reference, host, sqlite_store, claim, tmp_path)
    generator = random.Random(0)
    choices = {operator.name: choose(operator, host.cpu, generator) for operator in operators}
    with LocalBuilder(server, host.target_json, workers=2) as builder:
        chosen = choices["int8_conv3x3_1"]
        assert chosen.trace is not None
        [built] = builder.build([Candidate(chosen.variant.workload, chosen.trace, chosen.config)])
        assert isinstance(built, Built)
        assert [built.arguments[index][0] for index in built.weights] == ["int8"]
        LocalRunner(server, Measurement(repeat=1, min_repeat_s=1e-4)).compare([built])
    plan = library.compile_library(model.assemble(choices), host.target, tmp_path / "tuned.so")
    assert (plan.integer_kernels, plan.quantizing_kernels) == (6, 0)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "tuned.so")), tvm.cpu())
    x = np.random.default_rng(5).standard_normal((1, 3, 16, 16)).astype("float32")
    [(name, quantum)] = quanta(reference).items()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(reference.SerializeToString(), options, providers=["CPUExecutionProvider"])
    [wanted] = session.run([name], {"x0": x})
    got = machine["main"](tvm.runtime.tensor(x)).numpy()
    assert np.abs(wanted - got).max() < 1.01 * quantum
