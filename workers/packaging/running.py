"""Runs and times libraries of whole models, on a worker or on a board. Needs TVM's runtime alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from tuning_db.keys import Json
from tuning_db.ranged import Function, Ranged

#: Seconds that are spent on timing one library, once there are this many samples.
_ENOUGH_S: Final = 8.0
_FEWEST: Final = 3


class LibraryRefused(Exception):
    """A library did not run, or was not let run. The message says what happened and why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What libraries did, by label."""

    outputs: Mapping[str, list[list[NDArray[Any]]]]  #: of each example
    samples_s: Mapping[str, list[float]]  #: seconds of one inference; on a GPU of the computation alone
    #: Seconds of an inference's other parts, each by its name; of a GPU's libraries alone.
    parts_s: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    #: Of each engine that is installed its version, and why it has no samples where it has none.
    engines: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    #: Of a model in parts what the first part answered, of each example, by label.
    heads: Mapping[str, list[list[NDArray[Any]]]] = field(default_factory=dict)


def set_threads(threads: int) -> None:
    """How many threads TVM's kernels run in. Before the first of them: it is read when TVM starts its threads.

    Without it TVM takes OpenMP's number, or half of the cores, and would be timed on fewer cores than ONNX Runtime.
    """
    os.environ["TVM_NUM_THREADS"] = str(threads)
    # Bound to cores, TVM's threads would wait for whatever else runs there; ONNX Runtime's are not bound either.
    os.environ["TVM_BIND_THREADS"] = "0"


def load_library(path: str, device: Any = None, function: str = "main") -> Callable[..., Any]:
    """The model's function of a library, on a device of TVM's; on the CPU of this machine if none is given."""
    found: Callable[..., Any] = _machine(path, device)[function]
    return found


def load_ranged(path: str, told: Mapping[str, Any], names: Sequence[str]) -> Ranged:
    """A library's functions for a range of batches, as a manifest's `range` tells it, on the CPU of this machine."""
    import tvm

    machine = _machine(path)

    def function(name: str) -> Function:
        found = machine[name]
        return lambda arrays: outputs_of(found(*map(tvm.runtime.tensor, arrays)))

    return Ranged.of(told, names, function)


def _machine(path: str, device: Any = None) -> Any:
    import tvm
    from tvm.runtime.vm import VirtualMachine

    return VirtualMachine(tvm.runtime.load_module(path), device or tvm.cpu())


def outputs_of(result: Any) -> list[NDArray[Any]]:
    """What a model's function answers, as arrays: it returns one tensor, or several."""
    return [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]


def time_in_turns(
    callers: Mapping[str, Callable[[], object]],
    rounds: int,
    min_sample_s: float,
    *,
    rested: Collection[str] = (),
) -> dict[str, list[float]]:
    """Seconds of one call of each, `rounds` samples, each sample long enough to be measured, all taking turns.

    Those `rested` begin when the threads of whoever was before them have gone to sleep. Who has taken `_ENOUGH_S` sits
    out the later rounds: a model that takes seconds before it is tuned would keep the others waiting.
    """
    counts = {}
    for label, call in callers.items():
        call()
        start_s = time.perf_counter()
        call()
        counts[label] = max(1, int(min_sample_s / max(time.perf_counter() - start_s, 1e-7)))
    samples: dict[str, list[float]] = {label: [] for label in callers}
    for _ in range(rounds):
        for label, call in callers.items():
            if len(samples[label]) >= _FEWEST and sum(samples[label]) * counts[label] > _ENOUGH_S:
                continue
            if label in rested:
                wait_until_idle()
            start_s = time.perf_counter()
            for _ in range(counts[label]):
                call()
            samples[label].append((time.perf_counter() - start_s) / counts[label])
    return samples


def wait_until_idle(timeout_s: float = 1.0) -> None:
    """Sleep until the threads of this process are asleep too: TVM's look for work for a fifth of a second after each
    inference, and would take a core from whoever is measured next."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        before_s = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before_s < 0.002:
            return
