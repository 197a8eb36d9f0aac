"""What became of one measured candidate: a value, never an exception and never a magic latency. And what is learnt
from many of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tuning_db.errors import TooLarge
from tuning_db.keys import Json, sha256_json

#: A model of a thousand deep trees has a tenth of this.
MAX_BOOSTER_BYTES: Final = 32 * 2**20


class FailureKind(StrEnum):
    """Where a trial failed."""

    BUILD_ERROR = "build-error"
    BUILD_TIMEOUT = "build-timeout"
    BUILD_CRASH = "build-crash"
    RUN_ERROR = "run-error"
    RUN_TIMEOUT = "run-timeout"
    RUN_CRASH = "run-crash"


@dataclass(frozen=True, slots=True)
class Measured:
    """The candidate ran. `run_s` are the seconds of one call, one entry a repeat, in the order measured."""

    run_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.run_s)


@dataclass(frozen=True, slots=True)
class Failed:
    """The candidate did not build or did not run, and what was said of it."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Workload:
    """One computation to be scheduled, as MetaSchedule knows it.

    `template` and `geometry` come together, or not at all (ValueError).
    """

    structural_hash: str
    module: str  #: MetaSchedule's JSON of the IRModule (`tvm.ir.save_json`, base64)
    template: str | None = None  #: name of the schedule template that the computation is made for
    geometry: Mapping[str, int] | None = field(default=None, hash=False)  #: the sizes that the template asks for

    def __post_init__(self) -> None:
        if (self.template is None) != (self.geometry is None):
            raise ValueError(f"template {self.template!r} with geometry {self.geometry!r}: give both or neither")
        if self.geometry is not None:
            object.__setattr__(self, "geometry", _whole_numbers("geometry", self.geometry))

    @property
    def digest(self) -> str:
        """Identity within a scope. The module's text is hashed too, so an edited row no longer matches its name.
        Template and geometry are not: they say of a computation what it can be scheduled with."""
        return sha256_json([self.structural_hash, self.module])


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate of one workload and its outcome: a tuning record, or the note of a failure."""

    workload: str  #: `Workload.digest`
    trace: str  #: canonical JSON of the schedule's trace
    outcome: Measured | Failed
    config: Mapping[str, int] | None = field(default=None, hash=False)  #: values of the template's knobs, if it has one

    def __post_init__(self) -> None:
        if self.config is not None:
            object.__setattr__(self, "config", _whole_numbers("config", self.config))

    @property
    def trace_digest(self) -> str:
        return trace_digest(self.trace)


@dataclass(frozen=True, slots=True)
class Experience:
    """What became of one setting of a template's knobs for one geometry: what a cost model learns from."""

    workload: str  #: `Workload.digest`
    geometry: Mapping[str, int] = field(hash=False)
    config: Mapping[str, int] = field(hash=False)
    median_s: float | None  #: seconds of one call, the median of the repeats; None: it did not build or did not run


@dataclass(frozen=True, slots=True)
class StoredCostModel:
    """A trained cost model, kept for the next job.

    `booster_json` is what XGBoost's `Booster.save_raw("json")` gives, which runs no code when it is read. ValueError
    for anything else, XGBoost's binary format included; TooLarge above `MAX_BOOSTER_BYTES`.
    """

    format_version: int  #: counts up when features or the score's meaning change; whoever reads it compares
    trained_on: int  #: how many outcomes it has seen
    booster_json: bytes
    note: str = ""  #: for people, and for whoever trained it

    def __post_init__(self) -> None:
        if len(self.booster_json) > MAX_BOOSTER_BYTES:
            raise TooLarge(
                f"a cost model of {len(self.booster_json)} bytes is not stored, the limit is {MAX_BOOSTER_BYTES}; "
                "train fewer or shallower trees",
                limit_bytes=MAX_BOOSTER_BYTES,
            )
        try:
            is_object = isinstance(json.loads(self.booster_json), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError('a cost model is stored as a JSON object: Booster.save_raw("json")')


def _whole_numbers(what: str, values: Mapping[str, int]) -> dict[str, int]:
    """A copy in the order of the names, which nobody else holds. ValueError for what is not whole numbers by name."""
    for name, value in values.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{what} holds {name!r}: {value!r}; give whole numbers by name")
    return dict(sorted(values.items()))


def trace_digest(trace: str) -> str:
    """Names a candidate within its workload, so that it is never measured twice."""
    digest: Json = trace
    return sha256_json(digest)
