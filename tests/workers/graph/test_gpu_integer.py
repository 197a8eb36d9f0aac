"""Quantized models as GPUs compute them, in integers: their kernels run on a CPU, as they are and as CUDA source, and
are compared with ONNX Runtime's run of the model as it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from onnx import ModelProto
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic
from tvm import relax, s_tir, tirx
from tvm.ir.expr import GenericConst

from tests.workers.conftest import Host, lower
from tests.workers.devices.recordings import H100
from tests.workers.graph.nets import Net
from tests.workers.graph.shapes import CHANNELS, SEEDS, examples
from tests.workers.graph.test_graphs import resnet
from tests.workers.graph.test_quantized import (
    Recipe,
    depthwise,
    dynamic_sums,
    feed_forward,
    grouped,
    one_convolution,
    quanta,
    quantized,
    sums,
)
from tests.workers.models import save
from tests.workers.templates_gpu import emulator
from workers.devices.identity import gpu_identity_of
from workers.devices.targets import gpu_target_of
from workers.packaging import gpu_library, reference
from workers.packaging.gpu_library import Kernels
from workers.search.templates.gpu_plain import gpu_template
from workers.search.templates.gpu_registry import GPU_TEMPLATES
from workers.search.templates.knobs import Gpu

Array = NDArray[Any]
MACHINE = Gpu(multiprocessors=132, tensor_types=("float16", "int8"))
Run = Callable[[str, list[Array]], None]


@dataclass(frozen=True)
class Lowered:
    """A model as a GPU's kernels, example inputs, and what ONNX Runtime makes of these."""

    kernels: Kernels
    target: tvm.target.Target
    inputs: list[Array]
    wanted: dict[str, Array]

    @property
    def functions(self) -> dict[str, tirx.PrimFunc]:
        """The kernels by name."""
        functions = self.kernels.module.functions.items()
        return {variable.name_hint: f for variable, f in functions if isinstance(f, tirx.PrimFunc)}

    def in_integers(self) -> list[str]:
        """Kernels that sum products of int8."""
        return [name for name in self.functions if "int8_" in name]

    def outputs(self, run: Run) -> list[Array]:
        """Of the model, its kernels run one after the other."""
        main = self.kernels.module["main"]
        values: dict[Any, Any] = dict(zip(main.params, self.inputs, strict=True))

        def read(expression: Any) -> Any:
            if isinstance(expression, relax.Tuple):
                return [read(field) for field in expression.fields]
            if isinstance(expression, relax.TupleGetItem):
                return read(expression.tuple_value)[expression.index]
            return expression.value.numpy() if isinstance(expression, GenericConst) else values[expression]

        for block in main.body.blocks:
            for binding in block.bindings:
                call = binding.value
                if not isinstance(call, relax.Call):
                    values[binding.var] = read(call)
                    continue
                assert call.op == tvm.ir.Op.get("relax.call_tir"), call
                types = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
                made = [np.empty([int(size) for size in kind.shape], str(kind.dtype)) for kind in types]
                run(call.args[0].name_hint, [*map(np.ascontiguousarray, read(call.args[1])), *made])
                values[binding.var] = made if isinstance(call.ty, relax.TupleType) else made[0]
        result = read(main.body.body)
        return result if isinstance(result, list) else [result]

    def check(self, run: Run, steps: dict[str, float] | None = None) -> None:
        """Outputs named in `steps` may differ by that much, hardly anywhere; others in nothing."""
        for (name, wanted), got in zip(self.wanted.items(), self.outputs(run), strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            if steps is None or name not in steps:
                np.testing.assert_array_equal(got, wanted, name)
                continue
            apart = np.abs(got.astype("float64") - wanted) / steps[name]
            assert apart.max() < 1.01, f"{name} is {apart.max():.1f} steps apart"
            assert np.count_nonzero(apart > 0.5) <= max(1, 0.02 * apart.size)


def take(model: ModelProto, host: Host, folder: Path, seed: int = 0) -> Lowered:
    inputs, imported = lower(model, host, folder)
    target = tvm.target.Target(json.loads(gpu_target_of(gpu_identity_of(H100), host.target_json)))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(imported.bound, options, providers=["CPUExecutionProvider"])
    example = reference.example_inputs(inputs, seed)
    names = [output.name for output in session.get_outputs()]
    wanted = dict(zip(names, session.run(None, example), strict=True))
    kernels = gpu_library.kernels(imported.module, target, half=False)
    return Lowered(kernels, target, [example[spec.name] for spec in inputs], wanted)


def unscheduled(lowered: Lowered, host: Host) -> Run:
    """Kernels as they are, by LLVM."""
    functions = {name: f.with_attr("global_symbol", name) for name, f in lowered.functions.items()}
    library = tvm.compile(tvm.IRModule(functions), target=host.target)

    def run(name: str, arrays: list[Array]) -> None:
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        library[name](*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            array[...] = tensor.numpy()

    return run


def schedules(lowered: Lowered, template: str | None) -> dict[str, s_tir.Schedule]:
    """Of kernels that sum integers: TVM's default, or of those that a template is for its first guess."""
    found = {}
    module = lowered.kernels.module
    if template is None:
        module = gpu_library.schedule_the_rest(module, lowered.target)
    for name in lowered.in_integers():
        schedule = s_tir.Schedule(tvm.IRModule({"main": module[name].with_attr("global_symbol", "main")}))
        if template is not None:
            geometry = dict(gpu_template(lowered.functions[name])).get(template)
            if geometry is None:
                continue
            config = GPU_TEMPLATES[template].configs(geometry, MACHINE)[0]
            GPU_TEMPLATES[template].schedule(schedule, geometry, config, MACHINE)
        found[name] = schedule
    return found


def as_cuda(lowered: Lowered, host: Host, scheduled: Mapping[str, s_tir.Schedule]) -> Run:
    """Kernels that are scheduled as CUDA source that runs on this CPU, others as `unscheduled`."""
    others = unscheduled(lowered, host)

    def run(name: str, arrays: list[Array]) -> None:
        if name in scheduled:
            emulator.run(scheduled[name], arrays)
        else:
            others(name, arrays)

    return run


def integers(lowered: Lowered) -> tuple[int, list[str]]:
    """How many sums are in integers, and why others are not."""
    told = lowered.kernels.sums
    assert told is not None
    return told.in_integers, [found.reason for found in told.in_real]


@pytest.mark.parametrize(
    ("make", "recipe", "count"),
    [
        (resnet, Recipe(), 6),
        (resnet, Recipe(QuantType.QInt8, QuantFormat.QOperator), 6),
        (resnet, Recipe(activations=QuantType.QInt8, per_channel=False), 6),
        (depthwise, Recipe(), 3),
        (grouped, Recipe(), 4),
        (feed_forward, Recipe(), 3),
    ],
)
def test_networks_are_computed_in_integers(
    make: Callable[[], ModelProto], recipe: Recipe, count: int, host: Host, folder: Path
) -> None:
    """Every convolution and product of a network is, each in one kernel with its bias, activation, residual addition
    and requantization, within a quantum of ONNX Runtime."""
    model = quantized(make(), folder, recipe)
    lowered = take(model, host, folder)
    assert integers(lowered) == (count, [])
    assert len(lowered.in_integers()) == count
    lowered.check(unscheduled(lowered, host), quanta(model))


@pytest.mark.parametrize("zero", [0, 255])
@pytest.mark.parametrize("case", ["dense", "depthwise", "groups", "multiplier"])
def test_sums_are_exact(case: str, zero: int, host: Host, folder: Path) -> None:
    """Weights of -128, data at both ends, zero points there too and padding by them: every sum is ONNX Runtime's."""
    lowered = take(sums(case, zero, requantized=False), host, folder)
    assert integers(lowered) == (1, [])
    lowered.check(unscheduled(lowered, host))


@examples(6)
@given(CHANNELS, CHANNELS, st.sampled_from((1, 2)), st.sampled_from((1, 3)), st.booleans(), SEEDS)
def test_convolutions_of_any_channels(
    host: Host, folder: Path, channels: int, out: int, stride: int, kernel: int, relu: bool, seed: int
) -> None:
    """A convolution that is quantized at once is within a quantum of ONNX Runtime's, whatever its shape."""
    model = quantized(one_convolution(channels, out, stride, kernel, relu, seed), folder)
    lowered = take(model, host, folder, seed)
    assert integers(lowered) == (1, [])
    lowered.check(unscheduled(lowered, host), quanta(model))


@pytest.mark.parametrize("case", ["rows", "zeros", "few rows", "picture", "channels"])
def test_dynamic_sums_are_exact(case: str, host: Host, folder: Path) -> None:
    """Of data whose scale and zero point are taken from it, sums of bytes become real numbers as ONNX Runtime's do, bit
    by bit."""
    lowered = take(dynamic_sums(case), host, folder)
    assert integers(lowered) == (1, [])
    lowered.check(unscheduled(lowered, host))


def small() -> ModelProto:
    """Padding by a zero point, a residual addition, groups with strides, rows."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 16, 6, 6), 16, 16, (3, 3), pads=[1] * 4))
    x = net("Relu", net("Add", x, net.conv(x, 16, 16)))
    x = net.conv(x, 16, 16, (3, 3), groups=4, strides=[2, 2], pads=[1] * 4)
    x = net("Reshape", x, net.constant(np.array([9, 16])))
    return net.model(net("MatMul", x, net.weights(16, 24)))


@pytest.mark.skipif(emulator.compiler() is None, reason="running CUDA on a CPU needs g++ 12 or later")
@pytest.mark.parametrize("template", [None, "gpu-tensor", "gpu-product"])
def test_cuda_computes_what_the_reference_does(template: str | None, host: Host, folder: Path) -> None:
    """By TVM's default, on tensor cores and on ordinary ones, a network is within a quantum of ONNX Runtime."""
    model = quantized(small(), folder)
    lowered = take(model, host, folder)
    assert integers(lowered) == (4, [])
    scheduled = schedules(lowered, template)
    assert len(scheduled) == (3 if template else 4)  # groups are no product
    lowered.check(as_cuda(lowered, host, scheduled), quanta(model))


def test_dynamic_networks(host: Host, folder: Path) -> None:
    """What ONNX Runtime's quantizer makes of a network whose scales are found at run time: each product with its bias
    and what follows is one kernel, and TVM's default schedules each that is new."""
    path = folder / "dynamic.onnx"
    # Of weights of seven bits ONNX Runtime's sums do not saturate.
    quantize_dynamic(save(feed_forward(), folder, "float.onnx"), path, per_channel=True, reduce_range=True)
    lowered = take(onnx.load(path), host, folder)
    assert integers(lowered) == (3, [])
    assert len(lowered.in_integers()) == 3
    # Scales of the second and the third product depend on roundings before.
    lowered.check(unscheduled(lowered, host), dict.fromkeys(lowered.wanted, 2e-2))
    gpu_library.schedule_the_rest(lowered.kernels.module, lowered.target)


def test_what_is_not_in_integers_is_told(host: Host, folder: Path) -> None:
    """A product of two activations, by operator, shape and reason; nothing of a model without quantization."""
    net = Net()
    x = net.conv(net.input(1, 3, 8, 8), 3, 16)
    rows = net("Reshape", x, net.constant(np.array([16, 64])))
    model = quantized(net.model(net("MatMul", rows, net("Transpose", rows, perm=[1, 0]))), folder)
    lowered = take(model, host, folder)
    assert lowered.kernels.sums is not None
    assert lowered.kernels.sums.told() == {
        "in_integers": 1,
        "others": [
            {
                "operator": "matmul", "shape": [16, 16],
                "reason": "its other operand is not a constant of int8 around zero",
            }
        ],
    }  # fmt: skip
    lowered.check(unscheduled(lowered, host), quanta(model))
    net = Net()
    assert take(net.model(net("MatMul", net.input(4, 24), net.weights(24, 8))), host, folder).kernels.sums is None
