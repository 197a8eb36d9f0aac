"""A tuning job: what is asked for, the states it passes through, and who may move it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from tuning_db.errors import IllegalTransition, InvalidRequest, UnsupportedOption
from tuning_db.keys import ArtifactKey, Json, sha256_json, to_json

#: Search methods of this version, and what they are.
TUNERS: Final = {
    "auto": "sketches and templates in one search, trials where they pay",
    "autotvm": "our schedule templates only",
    "ansor": "sketches generated from the computation only",
    "none": "nothing measured: stored records decide, then stored cost models, then first guesses",
}
MAX_TRIALS: Final = 100_000
MAX_SECONDS: Final = 7 * 24 * 3600
#: Of 24 bits of float32; no int8 output comes near it.
MAX_SQNR_DB: Final = 150


class JobState(StrEnum):
    """QUEUED → RUNNING → SUCCEEDED | FAILED | CANCELLED, and RUNNING → QUEUED when a worker was lost."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self]

    def to(self, target: JobState) -> JobState:
        """`target`, or IllegalTransition."""
        if target not in TRANSITIONS[self]:
            raise IllegalTransition(f"a job that is {self} cannot become {target}")
        return target


TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.QUEUED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How hard to look. Not part of the key: more search is a new revision of the same library, only ever faster.

    Either limit ends the search, and the best that was found is published. Trials count measurements of this job,
    failed ones too, over all its attempts; seconds count the search alone, without import and final check.

    No trials means that nothing is measured: each operator is compiled with its best stored record, or else
    with what the stored cost model thinks best, or else with its template's first guess. Seconds then have no
    meaning, and are 0.
    """

    tuner: str = "auto"
    trials: int = 200
    seconds: float = 900.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tuner not in TUNERS:
            raise UnsupportedOption(
                f"tuner {self.tuner!r} is not one of {', '.join(map(repr, TUNERS))}", field="search.tuner"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise InvalidRequest("search.seed must be a whole number from 0 to 2147483647", field="search.seed")
        if self.tuner == "none":
            object.__setattr__(self, "trials", 0)
        if isinstance(self.trials, bool) or not isinstance(self.trials, int) or not 0 <= self.trials <= MAX_TRIALS:
            raise InvalidRequest(
                f"search.trials must be a whole number from 0 to {MAX_TRIALS}; with 0 nothing is measured",
                field="search.trials",
            )
        if self.trials == 0:
            # Nothing is measured, so a limit of time has no meaning: one spelling only, for comparing budgets.
            object.__setattr__(self, "seconds", 0.0)
        elif not 1 <= self.seconds <= MAX_SECONDS:
            raise InvalidRequest(
                f"search.seconds must be a number from 1 to {MAX_SECONDS}; to measure nothing, give 0 trials",
                field="search.seconds",
            )

    def covers(self, wanted: SearchConfig) -> bool:
        """Whether a job with this budget, finished or under way, answers a request for `wanted`.

        Only a search by the same tuner does, since what another one might find is not known; any job answers for
        "none", which asks for no search. The seed does not matter."""
        if wanted.tuner == "none":
            return True
        return self.tuner == wanted.tuner and self.trials >= wanted.trials and self.seconds >= wanted.seconds

    def budget_digest(self) -> str:
        """The same for searches that cover each other, and only for them: SHA-256 of all but the seed."""
        return sha256_json([self.tuner, self.trials, float(self.seconds)])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One request, parsed and resolved: which library, how hard to look for it, and how good it has to be.

    `min_sqnr_db` is what each output of a quantized model must keep at least on the calibration data, in decibels, for
    the library to be published. Like the budget, it changes no number of the library and is not in the key.
    """

    key: ArtifactKey
    search: SearchConfig = field(default_factory=SearchConfig)
    min_sqnr_db: float | None = None

    def __post_init__(self) -> None:
        if self.min_sqnr_db is None:
            return
        if self.key.quantization.calibration is None:
            raise InvalidRequest(
                "quantization.min_sqnr_db is judged on calibration data, and there is none; name some in "
                "quantization.calibration",
                field="quantization.min_sqnr_db",
            )
        if not 0 <= self.min_sqnr_db <= MAX_SQNR_DB:
            raise InvalidRequest(
                f"quantization.min_sqnr_db must be a number of decibels from 0 to {MAX_SQNR_DB}",
                field="quantization.min_sqnr_db",
            )
        object.__setattr__(self, "min_sqnr_db", float(self.min_sqnr_db) + 0.0)  # one spelling, of -0.0 too

    def answers(self, wanted: JobSpec) -> bool:
        """Whether a job of this spec, finished or under way, answers a request for `wanted`, of the same key: its
        budget covers the other's, and it lets no library pass that the other would refuse."""
        return self.search.covers(wanted.search) and (
            wanted.min_sqnr_db is None or (self.min_sqnr_db is not None and self.min_sqnr_db >= wanted.min_sqnr_db)
        )

    def budget_digest(self) -> str:
        """The same for specs of one key that answer each other, and only for them."""
        budget = self.search.budget_digest()
        return budget if self.min_sqnr_db is None else sha256_json([budget, self.min_sqnr_db])

    def to_json(self) -> dict[str, Json]:
        data: dict[str, Json] = {"key": self.key.to_json(), "search": to_json(self.search)}
        return data if self.min_sqnr_db is None else {**data, "min_sqnr_db": self.min_sqnr_db}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(ArtifactKey.from_json(data["key"]), SearchConfig.from_json(data["search"]), data.get("min_sqnr_db"))


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job FAILED. `kind` is stable: one of the kinds in `tuning_db.errors`, or an operator's or field's error."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands in its row at one moment."""

    id: str  #: 32 hexadecimal digits
    spec: JobSpec
    state: JobState
    attempt: int  #: how many times it has been claimed; 0 while nobody has
    created_at: dt.datetime  #: UTC, as are all times
    updated_at: dt.datetime
    claimed_by: str | None = None
    heartbeat_at: dt.datetime | None = None
    cancel_requested: bool = False
    trials_measured: int = 0  #: trials of this job in the store, over all attempts, failed ones too
    error: JobError | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write about a job, held by one attempt of one worker until another takes it away."""

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One line of a job's progress; `seq` counts from 1 within the job."""

    job_id: str
    seq: int
    type: str  #: "state", "stage", "trial", "progress", "warning", "quantization"
    data: dict[str, Json]
    at: dt.datetime
