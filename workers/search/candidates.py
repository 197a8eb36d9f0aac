"""What the search passes between its parts: operators to be scheduled, candidates, built candidates. Plain values.

TVM's objects do not cross a process boundary; their JSON does. `Workload.module` and `Trial.trace` hold it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuning_db.trials import Workload, trace_digest

#: One row for each buffer store of a scheduled module: MetaSchedule's per-store features.
Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Operator:
    """One distinct computation of a model and how often an inference runs it."""

    name: str
    workload: Workload
    weight: int
    untuned_s: float  #: one call as compiled without a schedule; the bar that a record has to clear


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to schedule one workload, not yet measured."""

    workload: Workload
    trace: str  #: canonical JSON

    @property
    def digest(self) -> str:
        return trace_digest(self.trace)


@dataclass(frozen=True, slots=True)
class Built:
    """A candidate compiled to a shared library."""

    library: str  #: path
    arguments: tuple[tuple[str, tuple[int, ...]], ...]  #: dtype and shape of each argument, packed weights included
    features: Features | None  #: None when the extractor found none


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long a built candidate is run: `repeat` samples of at least `min_repeat_s` each."""

    repeat: int = 3
    min_repeat_s: float = 0.02
    threads: int = 1


def canonical_trace(trace_json: Any) -> str:
    """The one spelling of `Trace.as_json()`, so that equal traces have equal digests."""
    return json.dumps(trace_json, sort_keys=True, separators=(",", ":"), default=_number)


def _number(value: Any) -> int | float:
    """TVM leaves its boxed constants (IntImm, FloatImm) in a trace's JSON."""
    boxed: int | float = value.value
    return boxed
