"""The engines that a tuned library is measured against, as callables on the same inputs and the same threads.

ONNX Runtime is always there. OpenVINO is an extra (`pip install 'tunery[openvino]'`): without it `available` says so.
Those that run on a GPU are in `gpu_baselines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.keys import Json
from workers.said import first_line

#: Engines by the name of their package.
ENGINES: Final = ("onnxruntime", "openvino")
#: What a package is distributed as, where that is not its name alone.
_DISTRIBUTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
}

Call = Callable[[], list[NDArray[Any]]]
#: One inference, to its end.
Run = Callable[[], object]
Facts = dict[str, Json]


class BaselineUnavailable(Exception):
    """The engine is not one that is known, or not installed, or cannot run the model. The message says why."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines to be timed beside a library. What fails in one of them makes it unavailable, and nothing else."""

    calls: dict[str, Run] = field(default_factory=dict)
    told: dict[str, Facts] = field(default_factory=dict)  #: of each its version; `unavailable` why it has no time

    def add(self, name: str, facts: Facts, make: Callable[[], tuple[Run, Facts]]) -> None:
        """Prepare one: `make` gives the call and what there is to tell besides. It is called once, to see it run."""
        self.told[name] = facts
        try:
            call, more = make()
            call()
        except Exception as error:  # each engine raises its own
            self.lose(name, first_line(error))
            return
        self.told[name] = {**facts, **more}

        def guarded() -> object:
            if name in self.calls:
                try:
                    return call()
                except Exception as error:
                    self.lose(name, first_line(error))
            return None

        self.calls[name] = guarded

    def timed(self, samples_s: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """The samples, without those of engines that were lost while they were taken."""
        return {label: taken for label, taken in samples_s.items() if label in self.calls or label not in self.told}

    def lose(self, name: str, why: str) -> None:
        self.told[name] = {**self.told[name], "unavailable": why}
        self.calls.pop(name, None)


def available() -> dict[str, str | None]:
    """Engine → its version; None for one that is not installed. Imports none of them."""
    return {engine: version_of(engine) for engine in ENGINES}


def version_of(package: str) -> str | None:
    """Of what is installed, under whichever name it is distributed; None for what is not. Imports nothing."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def baseline(engine: str, model_path: Path, inputs: Mapping[str, NDArray[Any]], threads: int) -> Call:
    """One inference of the ONNX model on `inputs`, outputs in the model's order, each a new array.

    The model is compiled here, for the shapes of `inputs`; the call only runs it. Raises BaselineUnavailable.
    """
    versions = available()
    if engine not in versions:
        raise BaselineUnavailable(f"no engine is called {engine!r}; there are {', '.join(ENGINES)}")
    if versions[engine] is None:
        raise BaselineUnavailable(f"{engine} is not installed; run: pip install 'tunery[{_EXTRAS[engine]}]'")
    return _MAKERS[engine](model_path, inputs, threads)


def on_cpu(model_path: Path, inputs: Mapping[str, NDArray[Any]], threads: int, without: str | None = None) -> Engines:
    """All that are installed. `without`: why only ONNX Runtime is to be run."""
    engines = Engines()
    for engine, version in available().items():
        if version is None:
            continue
        if engine != "onnxruntime" and without is not None:
            engines.told[engine] = {"version": version, "unavailable": without}
            continue
        engines.add(engine, {"version": version}, partial(_plain, engine, model_path, inputs, threads))
    return engines


def _plain(engine: str, model_path: Path, inputs: Mapping[str, NDArray[Any]], threads: int) -> tuple[Run, Facts]:
    return baseline(engine, model_path, inputs, threads), {}


def optional() -> list[str]:
    """Those that are installed beside ONNX Runtime."""
    return [engine for engine, version in available().items() if version is not None and engine != "onnxruntime"]


def _onnxruntime(model_path: Path, inputs: Mapping[str, NDArray[Any]], threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Its idle threads would otherwise spin on the cores that the next one in turn is measured on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
    feeds = dict(inputs)
    return lambda: list(session.run(None, feeds))


def _openvino(model_path: Path, inputs: Mapping[str, NDArray[Any]], threads: int) -> Call:
    import openvino

    core = openvino.Core()
    model = core.read_model(str(model_path))
    # Shapes bound before compilation: kernels for unknown sizes are slower.
    model.reshape({name: list(array.shape) for name, array in inputs.items()})
    compiled = core.compile_model(
        model,
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",  # by itself it computes in bfloat16 where the CPU can
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # a pinned thread waits for whoever else is on its core
        },
    )
    request = compiled.create_infer_request()
    for name, array in inputs.items():
        request.set_tensor(name, openvino.Tensor(np.ascontiguousarray(array)))
    ports = list(compiled.outputs)

    def call() -> list[NDArray[Any]]:
        request.infer()
        return [np.array(request.get_tensor(port).data) for port in ports]

    return call


_EXTRAS: Final[Mapping[str, str]] = {"onnxruntime": "worker", "openvino": "openvino"}
_MAKERS: Final[Mapping[str, Callable[[Path, Mapping[str, NDArray[Any]], int], Call]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
