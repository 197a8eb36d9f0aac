"""Runs and times libraries on this process's GPU, from a process that was started anew for it and may be killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from tuning_db.errors import BuildFailed, DeviceLost
from tuning_db.keys import DeviceIdentity, Json
from workers.devices import local_gpu
from workers.devices.identity import UnusableDevice
from workers.packaging import device_code
from workers.packaging.running import LibraryRefused, Ran, load_library, outputs_of, time_in_turns
from workers.said import first_line

#: What is timed of a library beside its computation, whose inputs lie on the device and whose outputs stay there.
PARTS: Final = ("to_device", "from_device", "with_copies")


@dataclass(frozen=True, slots=True)
class OnGpu:
    """The GPU that libraries are for."""

    device: Mapping[str, Json]  #: its identity, as JSON


def run_on_gpu(
    gpu: OnGpu, libraries: Mapping[str, str], examples: Sequence[Sequence[NDArray[Any]]], rounds: int,
    min_sample_s: float, engines: Mapping[str, Callable[[], object]],
) -> Ran:  # fmt: skip
    """Each library, by label a path, on each of `examples`, arrays in the model's order; then all timed in turns with
    `engines`, each time ended by waiting for the device.

    Raises LibraryRefused, or DeviceLost if this process's GPU is not the one that the libraries were made for: what
    differs is named, such as its architecture or driver. Call it before TVM is imported.
    """
    identity = DeviceIdentity.from_json(gpu.device)
    try:
        local_gpu.load_runtime()
        local_gpu.expect(identity)
    except UnusableDevice as error:
        raise DeviceLost(str(error)) from None
    outputs, callers = {}, dict(engines)
    for label, path in libraries.items():
        try:
            device_code.check(Path(path), identity.arch)
            outputs[label], parts = _prepare(path, examples)
        except BuildFailed as error:
            raise LibraryRefused(f"the {label} library: {error}") from None
        except Exception as error:  # TVM raises whatever CUDA answers
            raise LibraryRefused(f"the {label} library on {identity.name}: {first_line(error)}") from None
        callers |= {f"{label} {part}".strip(): call for part, call in parts.items()}
    samples = time_in_turns(callers, rounds, min_sample_s, rested=list(engines))
    return Ran(
        outputs,
        {label: samples[label] for label in (*engines, *libraries)},
        {label: {part: samples[f"{label} {part}"] for part in PARTS} for label in libraries},
    )


def _prepare(
    path: str, examples: Sequence[Sequence[NDArray[Any]]]
) -> tuple[list[list[NDArray[Any]]], dict[str, Callable[[], object]]]:
    """What a library answers to each example, and its parts to be timed on the first; "" is the computation."""
    import tvm

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

    parts: dict[str, Callable[[], object]] = {
        "": compute, "to_device": to_device, "from_device": lambda: outputs_of(result), "with_copies": with_copies,
    }  # fmt: skip
    return outputs, parts
