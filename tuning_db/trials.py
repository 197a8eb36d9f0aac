"""What became of one measured candidate: a value, never an exception and never a magic latency."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum

from tuning_db.keys import Json, sha256_json


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
    """One computation to be scheduled, as MetaSchedule knows it."""

    structural_hash: str
    module: str  #: MetaSchedule's JSON of the IRModule (`tvm.ir.save_json`, base64)

    @property
    def digest(self) -> str:
        """Identity within a scope. The module's text is hashed too, so an edited row no longer matches its name."""
        return sha256_json([self.structural_hash, self.module])


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate of one workload and its outcome: a tuning record, or the note of a failure."""

    workload: str  #: `Workload.digest`
    trace: str  #: canonical JSON of the schedule's trace
    outcome: Measured | Failed

    @property
    def trace_digest(self) -> str:
        return trace_digest(self.trace)


def trace_digest(trace: str) -> str:
    """Names a candidate within its workload, so that it is never measured twice."""
    digest: Json = trace
    return sha256_json(digest)
