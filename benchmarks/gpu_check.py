"""Compiles a small net and ResNet-50 in half precision for a GPU, compares them with ONNX Runtime and times them.

    benchmarks/gpu_check.sh --out gpu_check.json                     # on a machine with a GPU: installs what is needed
    python benchmarks/gpu_check.py --arch sm_87 --arch sm_90         # anywhere: compiles, and reads back what for

Kernels have TVM's default schedules: this says that the lane works, not how fast it can be. Libraries are run and timed
as a worker does it (`workers.packaging.on_gpu`), beside the engines that are installed, and then loaded as a user's
program does it (`service.loading`). Exit status 1: an output is farther from ONNX Runtime's than half precision
explains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import model_zoo
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from tuning_db.keys import DeviceIdentity, Json, TensorSpec, to_json
from workers.devices import local_cpu, local_gpu
from workers.devices.identity import UnusableDevice

Array = NDArray[np.float32]
#: The largest difference that is allowed, relative to the output's largest magnitude: float16 has 11 bits.
TOLERANCE: Final = 1e-2
ROUNDS: Final = 30
MIN_SAMPLE_S: Final = 0.02

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


def run(model: Path, library: Path, identity: DeviceIdentity) -> dict[str, Any]:
    """How far the library is from ONNX Runtime on the CPU, as a worker and as a program runs it, and median seconds of
    an inference: computation alone, one at a time with its copies, and streamed so that copies overlap computation."""
    from workers.packaging import gpu_baselines
    from workers.packaging.on_gpu import OnGpu, run_on_gpu

    feeds = [model_zoo.inputs_for(model, seed) for seed in (1, 2, 3)]
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    wanted = [session.run(None, feed) for feed in feeds]
    label, threads = model.stem, len(os.sched_getaffinity(0))
    ran = run_on_gpu(
        OnGpu(cast("dict[str, Json]", to_json(identity))),
        {label: str(library)},
        [list(feed.values()) for feed in feeds],
        ROUNDS,
        MIN_SAMPLE_S,
        lambda: gpu_baselines.on_gpu(model, feeds[0], threads, half=True),
    )
    answers = {"worker": ran.outputs[label], **loaded(model, library, identity, feeds)}
    worst = {
        name: max(
            relative_difference(a, b) for each in zip(wanted, got, strict=True) for a, b in zip(*each, strict=True)
        )
        for name, got in answers.items()
    }
    seconds = {"computation": ran.samples_s[label], **ran.parts_s[label]}
    return {
        "difference": worst,
        "ok": max(worst.values()) <= TOLERANCE,
        "median_s": {part: statistics.median(taken) for part, taken in seconds.items()},
        "engines": {
            name: {**told, "median_s": statistics.median(ran.samples_s[name]) if name in ran.samples_s else None}
            for name, told in ran.engines.items()
        },
    }


def loaded(
    model: Path, library: Path, identity: DeviceIdentity, feeds: list[dict[str, Array]]
) -> dict[str, list[list[Array]]]:
    """What the library answers when it was fetched and loaded: called, and streamed."""
    from service.loading import load

    folder = library.with_suffix("")
    folder.mkdir()
    (folder / "library.so").symlink_to(library)
    inputs = [TensorSpec(name, str(array.dtype), array.shape) for name, array in feeds[0].items()]
    manifest = {"key_fields": {"device": to_json(identity)}, "inputs": to_json(inputs)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    ready = load(folder)
    return {"called": [ready(feed) for feed in feeds], "streamed": list(ready.stream(feeds))}


def relative_difference(wanted: Array, got: Array) -> float:
    """Relative to the largest magnitude; infinite if shapes differ or a number is none."""
    if wanted.shape != got.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(wanted - got).max() / np.abs(wanted).max())


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
    identity = None
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
                if identity is not None:
                    result |= run(model, Path(result["library"]), identity)
                found[f"{model.stem} {arch}"] = result
                console.print(f"[bold]{model.stem}[/bold] for {arch}: {json.dumps(result)}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(result.get("ok", True) for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
