"""Loads a fetched library and runs it: `load(folder)`. Needs TVM's runtime and NumPy, as every program that does so.

A library for a range of sizes has functions for some of them; between these its inputs are cut, and what it was not
made for is refused before it is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuning_db.ranged import Function, Ranged


class InputRefused(ValueError):
    """An input that is missing, or of another dtype or shape than the library's. It was not run."""


@dataclass(frozen=True, slots=True)
class Library:
    """A model's library as one function: arrays by the inputs' names to arrays, in the order of the outputs.

    InputRefused names an input that the library does not take; OutOfRange one of a size that it does not serve.
    """

    manifest: Mapping[str, Any]
    function: Callable[[Sequence[NDArray[Any]]], list[NDArray[Any]]]

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
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
        return self.function(arrays)


def load(folder: str | os.PathLike[str]) -> Library:
    """The library that `Tunery.fetch` put into `folder`, for this machine's CPU. Once TVM's threads have started, how
    many there are is settled: load before anything else of TVM's runs. InputRefused for a library for GPUs."""
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    device = manifest["key_fields"]["device"]
    if device["kind"] != "cpu":
        raise InputRefused(f"the library is for {device['model']}: this loads libraries for CPUs")
    os.environ["TVM_NUM_THREADS"] = str(device["cores"])
    os.environ["TVM_BIND_THREADS"] = "0"
    import tvm
    from tvm.runtime.vm import VirtualMachine

    machine = VirtualMachine(tvm.runtime.load_module(str(Path(folder) / "library.so")), tvm.cpu())

    def named(name: str) -> Function:
        found = machine[name]

        def call(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
            result = found(*map(tvm.runtime.tensor, arrays))
            return [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]

        return call

    told = manifest.get("range")
    if told is None:
        return Library(manifest, named("main"))
    return Library(manifest, Ranged.of(told, [spec["name"] for spec in manifest["inputs"]], named))
