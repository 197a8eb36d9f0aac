"""The engines that a tuned library is measured against, as callables on the same inputs and the same threads.

ONNX Runtime is always there. OpenVINO is an extra (`pip install 'tunery[openvino]'`): without it `available` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Engines by the name of their package.
ENGINES: Final = ("onnxruntime", "openvino")

Call = Callable[[], list[NDArray[Any]]]


class BaselineUnavailable(Exception):
    """The engine is not one that is known, or not installed. The message says what to do."""


def available() -> dict[str, str | None]:
    """Engine → its version; None for one that is not installed. Imports none of them."""
    versions: dict[str, str | None] = {}
    for engine in ENGINES:
        try:
            versions[engine] = metadata.version(engine)
        except metadata.PackageNotFoundError:
            versions[engine] = None
    return versions


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
