"""What int8 and fp16 cost and gain: numbers, time and bytes of our library, and of ONNX Runtime with the same model.

    python benchmarks/quantization.py [MODEL] [--scheme int8|fp16] [--samples 32] [--trials 400]

MODEL is one of benchmarks/model_zoo.py, quantized as a job does it, on standard normal samples: to int8 statically
by MinMax, per channel; of fp16 they only tell the layers that lose most. SQNR is the power of the fp32 outputs over
that of the difference to them, in dB, over samples that were not calibrated on; ONNX Runtime runs the quantized graph
optimised, with its kernels of int8 (on CPUs it has none of fp16), and as it is written. Both of our libraries are
searched from nothing, as a job would, and all are timed in turns in one process. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_THREADS: Final = len(os.sched_getaffinity(0))
# Read when TVM starts its threads.
os.environ["TVM_NUM_THREADS"] = str(_THREADS)
os.environ["TVM_BIND_THREADS"] = "0"

import model_zoo
import numpy as np
import onnx
import onnx.version_converter
import onnxruntime
import tvm
from numpy.typing import NDArray
from search_quality import empty_records, intrinsics_of
from tvm import relax

from tuning_db.jobs import SearchConfig
from tuning_db.keys import ArtifactKey, BuildOptions, QuantizationConfig, TensorSpec
from workers import toolchain
from workers.devices import local_cpu, roof
from workers.frontend.onnx_import import import_onnx
from workers.graph import pipeline
from workers.graph.memory import MemoryPlan
from workers.graph.operators import Model
from workers.packaging import baselines, library
from workers.packaging.reference import time_in_turns
from workers.quantize.__main__ import run as quantize
from workers.quantize.request import Recipe, Request
from workers.search.candidates import Measurement
from workers.search.forkserver import ForkServer
from workers.search.intrinsics import preload
from workers.search.lanes import LocalBuilder, LocalRunner
from workers.search.scheduler import Scheduler
from workers.search.templates.registry import TEMPLATES

Array = NDArray[Any]
_OPSET: Final = 13
#: Samples that are compared on.
_TESTED: Final = 16
_ROUNDS: Final = 30


@dataclass(frozen=True, slots=True)
class Tuned:
    """A library of ours."""

    path: Path
    plan: MemoryPlan
    trials: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="resnet50")
    parser.add_argument("--scheme", choices=("int8", "fp16"), default="int8")
    parser.add_argument("--samples", type=int, default=32, help="that are calibrated on")
    parser.add_argument("--trials", type=int, default=400, help="of the search, for each library; 0: by first guesses")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the search, for each library")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(report(chosen, Path(folder)), indent=2))


def report(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that is measured."""
    path = _converted(model_zoo.write(chosen.model, folder))
    samples = [model_zoo.inputs_for(path, seed) for seed in range(chosen.samples + _TESTED)]
    specs = tuple(TensorSpec(name, str(array.dtype), tuple(array.shape)) for name, array in samples[0].items())
    calibration, quantized = folder / "samples.npz", folder / "quantized" / "model.onnx"
    quantized.parent.mkdir()
    np.savez(calibration, **{spec.name: np.stack([s[spec.name] for s in samples[: chosen.samples]]) for spec in specs})
    told = quantize(Request(str(path), specs, Recipe(scheme=chosen.scheme), str(quantized), str(calibration)))
    tested = samples[chosen.samples :]
    search = SearchConfig(trials=chosen.trials, seconds=chosen.seconds)
    ours = {
        "fp32": tune(path, specs, search, folder, half=False),
        chosen.scheme: tune(quantized, specs, search, folder, half=chosen.scheme == "fp16"),
    }
    calls: dict[str, Callable[[Mapping[str, Array]], Sequence[Array]]] = {
        "ONNX Runtime fp32": _session(path, "ORT_ENABLE_ALL"),
        f"ONNX Runtime {chosen.scheme}": _session(quantized, "ORT_ENABLE_ALL"),
        f"ONNX Runtime {chosen.scheme} as written": _session(quantized, "ORT_DISABLE_ALL"),
        **{f"ours {name}": _machine(tuned.path, specs) for name, tuned in ours.items()},
    }
    outputs = {name: [call(sample) for sample in tested] for name, call in calls.items()}
    wanted = outputs["ONNX Runtime fp32"]
    timed = {
        **{f"ours {name}": _bound(tuned.path, specs, tested[0]) for name, tuned in ours.items()},
        "ONNX Runtime fp32": baselines.baseline("onnxruntime", path, tested[0], _THREADS),
        f"ONNX Runtime {chosen.scheme}": baselines.baseline("onnxruntime", quantized, tested[0], _THREADS),
    }
    taken = time_in_turns(timed, _ROUNDS, 0.02, rested=("ONNX Runtime fp32", f"ONNX Runtime {chosen.scheme}"))
    kernels = ours[chosen.scheme].plan.kernels
    return {
        "model": chosen.model,
        "sqnr_db": {name: round(sqnr(wanted, got), 2) for name, got in outputs.items()},
        "same_top_1": {name: round(_same_top_1(wanted, got), 3) for name, got in outputs.items()},
        "ours_against_onnxruntime_as_written_db": round(
            sqnr(outputs[f"ONNX Runtime {chosen.scheme} as written"], outputs[f"ours {chosen.scheme}"]), 2
        ),
        "median_ms": {name: round(1e3 * statistics.median(seconds), 3) for name, seconds in taken.items()},
        "fastest_ms": {name: round(1e3 * min(seconds), 3) for name, seconds in taken.items()},
        "library_bytes": {name: tuned.path.stat().st_size for name, tuned in ours.items()},
        "largest_difference": _largest_difference(wanted, outputs[f"ours {chosen.scheme}"]),
        "kernels": dict(kernels),
        "trials": {name: tuned.trials for name, tuned in ours.items()},
        "worst_layers": told["layers"][:5] if isinstance(told, dict) and "layers" in told else told,
    }


def _converted(path: Path) -> Path:
    """The model in an operator set that has scales for each channel."""
    model = onnx.load(path)
    if next(entry.version for entry in model.opset_import if not entry.domain) < _OPSET:
        onnx.save_model(onnx.version_converter.convert_version(model, _OPSET), path)
    return path


def tune(path: Path, specs: tuple[TensorSpec, ...], search: SearchConfig, folder: Path, *, half: bool) -> Tuned:
    """Our library of the model, searched from nothing. `half`: with weights in float16."""
    identity, target_json = local_cpu.probe()
    target, cpu = tvm.target.Target(json.loads(target_json)), local_cpu.cpu_of(identity)
    key = ArtifactKey(
        model=hashlib.sha256(path.read_bytes()).hexdigest(), inputs=specs, device=identity, target=target_json,
        toolchain=toolchain.current(), quantization=QuantizationConfig(), options=BuildOptions(),
    )  # fmt: skip
    imported = import_onnx(path, specs, folder)
    with target, pipeline.pass_context():
        simplified = pipeline.simplify()(imported.module)
    model = Model(simplified, target, cpu.lanes, winograd=True, dot=cpu.dot, half=half)
    with (
        empty_records(key, folder) as records,
        ForkServer(preload(intrinsics_of(identity))) as server,
        LocalBuilder(server, target_json, workers=cpu.threads) as builder,
    ):
        operators = model.extract(records.adopt)
        scheduler = Scheduler(
            server=server, target=target_json, machine=cpu, templates=TEMPLATES, builder=builder,
            runner=LocalRunner(server, Measurement(threads=cpu.threads)), records=records, report=lambda *_: None,
            roof=None, last_cache_bytes=roof.caches(identity.cache_bytes)[2], operators_at_once=cpu.threads,
        )  # fmt: skip
        found = scheduler.run(operators, search)
        module = model.assemble(scheduler.choice())
    built = folder / f"{path.parent.name}.so"
    return Tuned(built, library.compile_library(module, target, built), found.trials)


def sqnr(wanted: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]]) -> float:
    """Decibels, over all samples and outputs; infinite where nothing differs."""
    pairs = [(a, b) for one, other in zip(wanted, got, strict=True) for a, b in zip(one, other, strict=True)]
    signal = sum(float(np.square(a.astype("float64")).sum()) for a, _ in pairs)
    noise = sum(float(np.square(a.astype("float64") - b).sum()) for a, b in pairs)
    return 10 * math.log10(signal / noise) if noise else math.inf


def _largest_difference(wanted: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]]) -> float:
    """Of any entry of an output, relative to the largest of that output: what the check bounds."""
    pairs = [(a, b) for one, other in zip(wanted, got, strict=True) for a, b in zip(one, other, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def _same_top_1(wanted: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]]) -> float:
    return statistics.mean(float(np.mean(a[0].argmax(-1) == b[0].argmax(-1))) for a, b in zip(wanted, got, strict=True))


def _session(path: Path, level: str) -> Callable[[Mapping[str, Array]], Sequence[Array]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda sample: list(session.run(None, dict(sample)))


def _machine(path: Path, specs: Sequence[TensorSpec]) -> Callable[[Mapping[str, Array]], Sequence[Array]]:
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())

    def call(sample: Mapping[str, Array]) -> list[Array]:
        result = machine["main"](*(tvm.runtime.tensor(sample[spec.name]) for spec in specs))
        return [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]

    return call


def _bound(path: Path, specs: Sequence[TensorSpec], sample: Mapping[str, Array]) -> Callable[[], object]:
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    arguments = [tvm.runtime.tensor(sample[spec.name]) for spec in specs]
    return lambda: machine["main"](*arguments)


if __name__ == "__main__":
    main()
