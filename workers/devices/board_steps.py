"""What a board does for a worker, each step in a forked child with a deadline of its own: a kernel that crashes, hangs
or leaks ends that child, and the session goes on.

Names of libraries and arrays are files in the session's folder. Runs on the board with TVM's runtime alone; the worker
calls it by `board_session`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm.runtime

from workers.devices import roof
from workers.packaging.running import load_library, outputs_of, set_threads, time_in_turns
from workers.search import sampling
from workers.search.candidates import Built, Measurement
from workers.search.forkserver import ChildFailed, call_in_child

#: The packed function that runs a step: JSON in, JSON out.
RUN_STEP: Final = "tunery.board.run_step"
#: Weights are read from here: more than the last cache of a board's CPU holds.
POOL_BYTES: Final = 32 << 20


def run_step(asked: str) -> str:
    """Run one of `STEPS` in a forked child. `asked` and the answer are JSON. The answer has `value`; or `failed`, the
    name of a kind of ChildFailed, and `message`; or `unready`, why nothing was run."""
    data = json.loads(asked)
    # TVM's upload does not notice when the disk is full.
    for name, digest in data["files"].items():
        if hashlib.sha256(Path(name).read_bytes()).hexdigest() != digest:
            disk = os.statvfs(Path.cwd())
            free = f"{disk.f_bavail * disk.f_frsize} bytes are free on its disk"
            return json.dumps({"unready": f"{name} did not arrive as it was sent; {free}"})
    try:
        value = call_in_child(STEPS[data["step"]], *data["arguments"], deadline_s=data["deadline_s"])
    except ChildFailed as failure:
        return json.dumps({"failed": type(failure).__name__, "message": str(failure)})
    return json.dumps({"value": value})


def _built(data: Mapping[str, Any]) -> Built:
    arguments = tuple((str(dtype), tuple(shape)) for dtype, shape in data["arguments"])
    return Built(str(Path(data["library"]).resolve()), arguments, None, tuple(data["weights"]))


def measure(built: Mapping[str, Any], measurement: Mapping[str, Any], hopeless_s: float | None) -> dict[str, Any]:
    """`sampling.measure_guarded`: `run_s` and `conditions`."""
    run_s, found = sampling.measure_guarded(_built(built), Measurement(**measurement), hopeless_s)
    return {"run_s": list(run_s), "conditions": asdict(found)}


def measure_in_turn(candidates: Sequence[Mapping[str, Any]], measurement: Mapping[str, Any]) -> list[list[float]]:
    """`sampling.measure_in_turn`."""
    return [list(s) for s in sampling.measure_in_turn([_built(c) for c in candidates], Measurement(**measurement))]


def infer(library: str, inputs: Sequence[str], outputs: Sequence[str], threads: int, function: str = "main") -> None:
    """Run a function of a library on each file of `inputs` (.npz, `arr_0`, `arr_1`, … in the model's order), and write
    what it answers into the file of `outputs` beside it."""
    set_threads(threads)
    call = load_library(library, function=function)
    for source, destination in zip(inputs, outputs, strict=True):
        np.savez(destination, *outputs_of(call(*_tensors(source))))


def time_libraries(
    libraries: Mapping[str, str], inputs: str, threads: int, rounds: int, min_sample_s: float, function: str = "main"
) -> dict[str, list[float]]:
    """Seconds of one call of each library's function, by label, all taking turns."""
    set_threads(threads)
    callers = {
        label: partial(load_library(path, function=function), *_tensors(inputs)) for label, path in libraries.items()
    }
    return time_in_turns(callers, rounds, min_sample_s)


def measure_roof(plan: Mapping[str, Any], libraries: Mapping[str, str]) -> dict[str, float]:
    """`roof.time_kernels`, of kernels by name."""
    found = roof.Plan(**plan)
    set_threads(found.threads)
    kernels = {name: tvm.runtime.load_module(path)["main"] for name, path in libraries.items()}
    return asdict(roof.time_kernels(found, kernels))


def _tensors(path: str) -> list[Any]:
    with np.load(path) as arrays:
        return [tvm.runtime.tensor(arrays[f"arr_{number}"]) for number in range(len(arrays.files))]


#: By name.
STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    function.__name__: function for function in (measure, measure_in_turn, infer, time_libraries, measure_roof)
}
