"""Runs and times libraries on this process's GPU, from a process that was started anew for it and may be killed."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.errors import BuildFailed, DeviceLost
from tuning_db.keys import DeviceIdentity, Json
from tuning_db.streams import Overlapped
from workers.devices import local_gpu
from workers.devices.identity import UnusableDevice
from workers.packaging import device_code
from workers.packaging.baselines import Engines
from workers.packaging.running import LibraryRefused, Ran, load_library, outputs_of, time_in_turns
from workers.said import first_line

#: What is timed of a library beside its computation, whose inputs lie on the device and whose outputs stay there.
#: `with_copies` is one inference at a time; `overlapped` what each of many costs whose copies overlap computation.
PARTS: Final = ("to_device", "from_device", "with_copies", "overlapped")
#: How long inferences are streamed to time one of them, and how many at least and at most: the first one's copy to the
#: device and the last one's from it overlap nothing.
_STREAMED_S: Final = 0.25
_FEWEST: Final = 4
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class OnGpu:
    """The GPU that libraries are for."""

    device: Mapping[str, Json]  #: its identity, as JSON


def run_on_gpu(
    gpu: OnGpu, libraries: Mapping[str, str], examples: Sequence[Sequence[NDArray[Any]]], rounds: int,
    min_sample_s: float, engines: Callable[[], Engines],
) -> Ran:  # fmt: skip
    """Each library, by label a path, on each of `examples`, arrays in the model's order; then all timed in turns with
    `engines`, each time ended by waiting for the device. These are made when the libraries have what they need of it.

    Raises LibraryRefused, or DeviceLost if this process's GPU is not the one that the libraries were made for: what
    differs is named, such as its architecture or driver. Call it before TVM is imported.
    """
    identity = DeviceIdentity.from_json(gpu.device)
    try:
        local_gpu.load_runtime()
        local_gpu.expect(identity)
    except UnusableDevice as error:
        raise DeviceLost(str(error)) from None
    outputs: dict[str, list[list[NDArray[Any]]]] = {}
    parts: dict[str, dict[str, _Part]] = {}
    with ExitStack() as held:
        for label, path in libraries.items():
            try:
                device_code.check(Path(path), identity.arch)
                outputs[label], parts[label] = _prepare(path, examples, held)
            except BuildFailed as error:
                raise LibraryRefused(f"the {label} library: {error}") from None
            except Exception as error:  # TVM raises whatever CUDA answers
                raise LibraryRefused(f"the {label} library on {identity.name}: {first_line(error)}") from None
        beside = engines()
        callers = {**beside.calls}
        for label, of_library in parts.items():
            callers |= {f"{label} {name}".strip(): part.call for name, part in of_library.items()}
        samples = time_in_turns(callers, rounds, min_sample_s, rested=list(beside.calls))

    def seconds(label: str, name: str) -> list[float]:
        inferences = parts[label][name].inferences
        return [sample / inferences for sample in samples[f"{label} {name}".strip()]]

    return Ran(
        outputs,
        beside.timed({engine: samples[engine] for engine in callers if engine in beside.told})
        | {label: seconds(label, "") for label in libraries},
        {label: {name: seconds(label, name) for name in PARTS} for label in libraries},
        beside.told,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What is timed, and how many inferences one call of it is."""

    call: Callable[[], object]
    inferences: int = 1


def _prepare(
    path: str, examples: Sequence[Sequence[NDArray[Any]]], held: ExitStack
) -> tuple[list[list[NDArray[Any]]], dict[str, _Part]]:
    """What a library answers to each example, and its parts to be timed on the first; "" is the computation. `held`
    is closed when they have been.

    LibraryRefused if it answers otherwise when the examples are streamed.
    """
    import tvm
    import tvm_ffi

    device = tvm.cuda(0)
    function = load_library(path, device)
    outputs = [outputs_of(function(*(tvm.runtime.tensor(array, device) for array in arrays))) for arrays in examples]
    tensors = [tvm.runtime.tensor(array, device) for array in examples[0]]
    result = function(*tensors)

    def to_device() -> None:
        for tensor, array in zip(tensors, examples[0], strict=True):
            tensor.copyfrom(array)
        device.sync()

    def compute() -> Any:
        computed = function(*tensors)
        device.sync()
        return computed

    def with_copies() -> list[NDArray[Any]]:
        to_device()
        return outputs_of(compute())

    overlapped = held.enter_context(
        Overlapped(
            function,
            lambda: [tvm.runtime.empty(array.shape, str(array.dtype), device) for array in examples[0]],
            lambda: tvm_ffi.use_raw_stream(device, 0),
        )
    )
    order = [*range(len(examples)), *range(len(examples))]
    for number, answer in zip(order, overlapped.stream(examples[number] for number in order), strict=True):
        if not all(map(_alike, outputs[number], answer)):
            raise LibraryRefused("it answers otherwise when inferences are streamed")
    start_s = time.perf_counter()
    with_copies()
    inferences = min(max(_FEWEST, int(_STREAMED_S / max(time.perf_counter() - start_s, 1e-6))), _MOST)

    def stream() -> None:
        deque(overlapped.stream(itertools.repeat(examples[0], inferences)), maxlen=0)

    parts = {
        "": _Part(compute), "to_device": _Part(to_device), "from_device": _Part(lambda: outputs_of(result)),
        "with_copies": _Part(with_copies), "overlapped": _Part(stream, inferences),
    }  # fmt: skip
    return outputs, parts


def _alike(alone: NDArray[Any], streamed: NDArray[Any]) -> bool:
    """Whether the numbers of an output could be the same: kernels that add in any order do not repeat them exactly."""
    if alone.dtype.kind in "iub":
        return np.array_equal(alone, streamed)
    x, y = alone.astype(np.float64), streamed.astype(np.float64)
    largest = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    return x.shape == y.shape and np.allclose(x, y, rtol=0, atol=1e-2 * largest, equal_nan=True)
