"""Compiles a small net and ResNet-50 in half precision for a GPU, compares them with ONNX Runtime and times them.

    benchmarks/gpu_check.sh --out gpu_check.json                     # on a machine with a GPU: installs what is needed
    python benchmarks/gpu_check.py --arch sm_87 --arch sm_90         # anywhere: compiles, and reads back what for

Kernels have TVM's default schedules: this says that the lane works, not how fast it can be. Times are medians over
rounds, each ended by waiting for the device; copies to the device and back are timed apart from the computation, whose
inputs lie on the device already. Exit status 1: an output is farther from ONNX Runtime's than half precision explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import model_zoo
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from tuning_db.keys import DeviceIdentity, TensorSpec, to_json
from workers.devices import local_cpu, local_gpu
from workers.devices.identity import UnusableDevice

Array = NDArray[np.float32]
#: The largest difference that is allowed, relative to the output's largest magnitude: float16 has 11 bits.
TOLERANCE: Final = 1e-2
ROUNDS: Final = 30

console = Console(highlight=False)


def small_net() -> onnx.ModelProto:
    """A convolution with a ReLU, and the mean over the image."""
    generator = np.random.default_rng(0)
    kernel = (generator.standard_normal((32, 8, 3, 3)) / 8).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["y"]),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 1, 1])],
        [numpy_helper.from_array(kernel, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compile_for(model: Path, target_json: str, folder: Path) -> dict[str, Any]:
    """The library, what is in it, and how long which part took. Raises BuildFailed."""
    import tvm

    from workers.frontend.onnx_import import import_onnx
    from workers.packaging import gpu_library

    target = tvm.target.Target(json.loads(target_json))
    arch = str(target.attrs["arch"])
    feeds = model_zoo.inputs_for(model)
    inputs = tuple(TensorSpec(name, "float32", array.shape) for name, array in feeds.items())
    times_s = [time.monotonic()]
    imported = import_onnx(model, inputs, folder)
    times_s.append(time.monotonic())
    module = gpu_library.lower(imported.module, target, half=True)
    times_s.append(time.monotonic())
    library = folder / f"{model.stem}-{arch}.so"
    cubins = gpu_library.compile_library(module, target, library)
    times_s.append(time.monotonic())
    seconds = dict(zip(("import", "graph", "compile"), np.diff(times_s).round(2).tolist(), strict=True))
    return {
        "library": str(library),
        "library_bytes": library.stat().st_size,
        "arch": [cubin.arch for cubin in cubins],
        "machine_code_bytes": sum(cubin.size_bytes for cubin in cubins),
        "kernels": sum(len(cubin.kernels) for cubin in cubins),
        "seconds": seconds,
    }


def run(model: Path, library: Path) -> dict[str, Any]:
    """Difference from ONNX Runtime on the CPU, and seconds of computation, of copies, and of all together."""
    import tvm
    from tvm import relax

    device = tvm.cuda(0)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), device)
    feeds = model_zoo.inputs_for(model)
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    wanted = session.run(None, feeds)
    arguments = [tvm.runtime.tensor(array, device) for array in feeds.values()]

    def compute() -> list[Any]:
        result = machine["main"](*arguments)
        device.sync()
        return [result] if hasattr(result, "numpy") else list(result)

    def copy_in() -> None:
        for argument, array in zip(arguments, feeds.values(), strict=True):
            argument.copyfrom(array)
        device.sync()

    outputs = compute()

    def copy_out() -> list[Any]:
        return [output.numpy() for output in outputs]

    def whole() -> None:
        nonlocal outputs
        copy_in()
        outputs = compute()
        copy_out()

    worst = max(relative_difference(a, b) for a, b in zip(wanted, copy_out(), strict=True))
    seconds = {step.__name__: median_s(step) for step in (compute, copy_in, copy_out, whole)}
    seconds["onnxruntime_cpu"] = median_s(lambda: session.run(None, feeds), rounds=5)
    return {"difference": worst, "ok": worst <= TOLERANCE, "median_s": seconds}


def relative_difference(wanted: Array, got: Array) -> float:
    """Relative to the largest magnitude; infinite if shapes differ or a number is none."""
    if wanted.shape != got.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(wanted - got).max() / np.abs(wanted).max())


def median_s(step: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of one call, after some that warm up."""
    for _ in range(3):
        step()
    samples = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples)


def targets(archs: list[str]) -> dict[str, str]:
    """By architecture, for GPUs beside a CPU like this machine's, of which nothing but the architecture is known."""
    from workers.devices.targets import gpu_target_of

    _, host = local_cpu.probe()
    return {arch: gpu_target_of(DeviceIdentity("cuda", "NVIDIA", arch, arch, (), 1), host) for arch in archs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", default=[], help="compile for this one, and run nothing")
    parser.add_argument("--zoo", type=Path, help="folder with resnet50.onnx, which is written if it is not there")
    parser.add_argument("--only-small", action="store_true", help="leave ResNet-50 out")
    parser.add_argument("--out", type=Path, help="also write everything as JSON")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.arch:
        by_arch: Mapping[str, str] = targets(options.arch)
    else:
        try:
            local_gpu.load_runtime()
            identity, target = local_gpu.probe()
        except UnusableDevice as error:
            console.print(f"[red]{error}[/red]")
            return 2
        by_arch = {identity.arch: target}
        found["device"] = to_json(identity)
        console.print(f"{identity.name}: {identity.vendor} {identity.model}, {identity.arch}, driver {identity.driver}")
    from workers import toolchain

    found["toolchain"] = to_json(toolchain.current_gpu())
    with tempfile.TemporaryDirectory() as folder:
        models = [Path(folder) / "small.onnx"]
        onnx.save_model(small_net(), models[0])
        if not options.only_small:
            models.append(model_zoo.write("resnet50", options.zoo or Path(folder)))
        for arch, target in by_arch.items():
            for model in models:
                result = compile_for(model, target, Path(folder))
                if not options.arch:
                    result |= run(model, Path(result["library"]))
                found[f"{model.stem} {arch}"] = result
                console.print(f"[bold]{model.stem}[/bold] for {arch}: {json.dumps(result)}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(result.get("ok", True) for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
