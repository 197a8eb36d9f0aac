"""Loads a fetched library and runs it: `load(folder)`. Needs TVM's runtime and NumPy, as every program that does so.

A library for a range of sizes has functions for some of them; between these its inputs are cut, and what it was not
made for is refused before it is called. One for a GPU needs that, and CUDA's runtime: `pip install "tunery[cuda]"`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuning_db.ranged import Function, Ranged
from tuning_db.streams import CudaFailed, Overlapped, load_cudart

#: Answers to many inputs, one after the other.
Stream = Generator[list[NDArray[Any]], None, None]


class InputRefused(ValueError):
    """An input that is missing, or of another dtype or shape than the library's. It was not run."""


@dataclass(frozen=True, slots=True)
class Library:
    """A model's library as one function: arrays by the inputs' names to arrays, in the order of the outputs.

    InputRefused names an input that the library does not take; OutOfRange one of a size that it does not serve.
    """

    manifest: Mapping[str, Any]
    function: Callable[[Sequence[NDArray[Any]]], list[NDArray[Any]]]
    streamed: Callable[[Iterable[Sequence[NDArray[Any]]]], Stream]

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        return self.function(self._checked(inputs))

    def stream(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Stream:
        """The answer to each of `batches`, in their order.

        On a GPU two are in flight: copies of the next inputs and of the last outputs pass while one is computed. So two
        of `batches` are taken ahead of the answers. What one of them is refused for, or `batches` raises in place of
        it, comes after the answers to all before it. Closed, or dropped, a stream frees its buffers; other calls of the
        library are allowed meanwhile.
        """
        yield from self.streamed(map(self._checked, batches))

    def _checked(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """In the model's order."""
        told = self.manifest.get("range")
        axes = told["axes"] if told else [None] * len(self.manifest["inputs"])
        unknown = sorted(set(inputs) - {spec["name"] for spec in self.manifest["inputs"]})
        if unknown:
            raise InputRefused(f"the library has no input {unknown[0]!r}")
        arrays = []
        for spec, axis in zip(self.manifest["inputs"], axes, strict=True):
            name, wanted = spec["name"], list(spec["shape"])
            if name not in inputs:
                raise InputRefused(f"input {name!r} is missing")
            array = np.ascontiguousarray(inputs[name]) if inputs[name].ndim else inputs[name]
            shape = list(array.shape)
            if axis is not None and len(shape) == len(wanted):
                wanted[axis] = shape[axis]  # what it may be is for the range to say
            if str(array.dtype) != spec["dtype"] or shape != wanted:
                raise InputRefused(f"input {name!r} is {array.dtype}{shape}, not {spec['dtype']}{spec['shape']}")
            arrays.append(array)
        return arrays


def load(folder: str | os.PathLike[str]) -> Library:
    """The library that `Tunery.fetch` put into `folder`, for this machine's CPU, or for the first GPU that CUDA shows.

    Load before anything else of TVM's runs: on a CPU, once TVM's threads have started, how many there are is settled;
    for a GPU TVM finds CUDA's runtime when it is imported, or not at all. InputRefused for a library whose machine code
    is of another architecture than the GPU, CudaFailed where there is none.
    """
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    device, path = manifest["key_fields"]["device"], str(Path(folder) / "library.so")
    if device["kind"] == "cuda":
        return _on_gpu(manifest, path)
    if device["kind"] != "cpu":
        raise InputRefused(f"the library is for {device['model']}: this loads libraries for CPUs and NVIDIA's GPUs")
    os.environ["TVM_NUM_THREADS"] = str(device["cores"])
    os.environ["TVM_BIND_THREADS"] = "0"
    import tvm
    from tvm.runtime.vm import VirtualMachine

    machine = VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())

    def named(name: str) -> Function:
        found = machine[name]
        return lambda arrays: _arrays(found(*map(tvm.runtime.tensor, arrays)))

    told, names = manifest.get("range"), [spec["name"] for spec in manifest["inputs"]]
    function = named("main") if told is None else Ranged.of(told, names, named)
    # On a CPU nothing is copied, and one inference takes all cores.
    return Library(manifest, function, lambda batches: (function(arrays) for arrays in batches))


def _on_gpu(manifest: Mapping[str, Any], path: str) -> Library:
    made_for = manifest["key_fields"]["device"]
    library = f"the library is for {made_for['model']}, {made_for['arch']}"
    try:
        load_cudart()
    except CudaFailed as error:
        raise CudaFailed(f"{library}: {error}") from None
    import tvm
    import tvm_ffi
    from tvm.runtime.vm import VirtualMachine

    device = tvm.cuda(0)
    if not device.exist:
        raise CudaFailed(
            f"{library}: TVM reaches no GPU here; its driver is missing, or TVM was imported before this library"
        )
    arch = f"sm_{device.compute_version.replace('.', '')}"
    if arch != made_for["arch"]:
        raise InputRefused(
            f"{library}; this GPU, {device.device_name}, is {arch}, and runs no machine code for {made_for['arch']}"
        )
    function = VirtualMachine(tvm.runtime.load_module(path), device)["main"]

    def on_default_stream() -> AbstractContextManager[Any]:
        return tvm_ffi.use_raw_stream(device, 0)  # type: ignore[no-any-return]  # TVM publishes no types

    def call(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        # TVM's own copies use the default stream, and computations of all libraries must share one (`Overlapped`).
        with on_default_stream():
            return _arrays(function(*(tvm.runtime.tensor(array, device) for array in arrays)))

    def empty() -> list[Any]:
        return [tvm.runtime.empty(spec["shape"], spec["dtype"], device) for spec in manifest["inputs"]]

    def streamed(batches: Iterable[Sequence[NDArray[Any]]]) -> Stream:
        with Overlapped(function, empty, on_default_stream) as overlapped:
            yield from overlapped.stream(batches)

    return Library(manifest, call, streamed)


def _arrays(result: Any) -> list[NDArray[Any]]:
    return [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]
