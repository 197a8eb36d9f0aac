"""What the search passes between its parts: operators, their variants, candidates, built candidates. Plain values.

TVM's objects do not cross a process boundary; their JSON does. `Workload.module` and `Trial.trace` hold it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.trials import Trial, Workload, trace_digest
from workers.search.templates.knobs import Config

#: One row for each buffer store of a scheduled module: MetaSchedule's per-store features.
Features = NDArray[np.float32]

#: Where a candidate comes from, by the name of the tuner that searches there alone.
TEMPLATE: Final = "autotvm"
SKETCHES: Final = "ansor"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an operator: direct, by Winograd's algorithm, …; `workload` is that computation.

    `workload.template` names the template that can schedule it, if any, and `workload.geometry` its sizes.
    """

    name: str
    workload: Workload
    sketchable: bool = False  #: whether sketches may be generated from it


@dataclass(frozen=True, slots=True)
class Operator:
    """One distinct operator of a model and how often an inference runs it.

    Its variants are interchangeable, so the best over all of them wins. They come in the order in which they are
    preferred before anything is known of them.
    """

    name: str
    weight: int  #: calls in an inference
    variants: tuple[Variant, ...]
    flops: float  #: of one call, in the variant that needs the fewest: what is thought reachable is bounded by it
    bytes: float  #: read and written by one call at least
    constant_bytes: float = 0.0  #: of them, of weights: constants that no other kernel reads


def together(
    functions: Mapping[str, Sequence[Operator]],
) -> tuple[list[Operator], dict[str, dict[str, str]]]:
    """The operators of several functions, by the function's name, as those of one model: equal ones once, called as
    often as in all of them. And for each function, by its own operators' names, what they are called there."""
    found: dict[tuple[tuple[str, str], ...], Operator] = {}
    names: dict[str, dict[str, str]] = {}
    taken: set[str] = set()
    for function, operators in functions.items():
        own = names[function] = {}
        for operator in operators:
            what = tuple((variant.name, variant.workload.digest) for variant in operator.variants)
            if what in found:
                found[what] = replace(found[what], weight=found[what].weight + operator.weight)
            else:
                name = f"{operator.name}@{function}" if operator.name in taken else operator.name
                found[what] = replace(operator, name=name)
                taken.add(name)
            own[operator.name] = found[what].name
    return list(found.values()), names


@dataclass(frozen=True, slots=True)
class Choice:
    """How one operator is compiled.

    `trial` is the record that it was chosen by, None where nothing was measured. Without a `trace` there is neither
    record nor template: the variant is compiled as it is.
    """

    variant: Variant
    trial: Trial | None
    config: Config | None
    trace: str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to schedule one workload, not yet measured."""

    workload: Workload
    trace: str  #: canonical JSON
    config: Config | None = field(default=None, hash=False)  #: of the workload's template; None for a sketch

    @property
    def digest(self) -> str:
        return trace_digest(self.trace)


@dataclass(frozen=True, slots=True)
class Built:
    """A candidate compiled to a shared library."""

    library: str  #: path
    arguments: tuple[tuple[str, tuple[int, ...]], ...]  #: dtype and shape of each argument, packed weights included
    features: Features | None  #: of a sketch; None when the extractor found none
    weights: tuple[int, ...] = ()  #: which of the arguments are weights: constants that only this kernel reads


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long a built candidate is run: `repeat` samples of at least `min_repeat_s` each."""

    repeat: int = 3
    min_repeat_s: float = 0.015
    threads: int = 1


def canonical_trace(trace_json: Any) -> str:
    """The one spelling of `Trace.as_json()`, so that equal traces have equal digests."""
    return json.dumps(trace_json, sort_keys=True, separators=(",", ":"), default=_number)


def _number(value: Any) -> int | float:
    """TVM leaves its boxed constants (IntImm, FloatImm) in a trace's JSON."""
    boxed: int | float = value.value
    return boxed
