"""What builds and what runs the candidates of a search, and both for the CPU of this machine: candidates are compiled
on every core, and measured alone. `rpc_lane` has the runner for boards.

Nothing is built while something is measured: a search of two cores that did so would measure its own compiler. That
costs the time of the shorter of the two, which is why measuring is kept short.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tuning_db.trials import Failed, FailureKind, Measured
from workers.devices.health import Conditions
from workers.search import forked_steps, sampling
from workers.search.candidates import Built, Candidate, Measurement
from workers.search.forkserver import ChildCrashed, ChildError, ChildFailed, ChildTimeout, ForkServer, Step
from workers.search.guards import Guard


class Builder(Protocol):
    """Turns candidates into something that a runner of the same device can run."""

    def build(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        """One result a candidate, in their order. Returns when all are done: nothing is left running."""

    def remove(self, built: Built) -> None:
        """It will not be run any more."""


class Runner(Protocol):
    """Measures what a builder made. One call at a time, with nothing else running on the measured cores."""

    @property
    def guard(self) -> Guard:
        """The judge of its trials, which tells how the device was meanwhile."""

    @property
    def at_once(self) -> int:
        """How many candidates to hand to `run_all`: as many as can be measured side by side, or one after the other
        without anybody waiting to hear of the first."""

    def run_all(self, wanted: Sequence[tuple[Built, float | None]]) -> list[Measured | Failed]:
        """One result a candidate, in their order. One above its seconds a call, where that is given, is hopeless and
        not measured more exactly than to know that."""

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        """Measure candidates in turns, more exactly than `run` does."""


class LocalBuilder:
    """Compiles on `workers` cores at once, each candidate in a forked child with its own deadline.

    The target may be another machine's, if there is a linker for it (`workers.linker`).
    """

    def __init__(self, server: ForkServer, target: str, *, workers: int, timeout_s: float = 15.0) -> None:
        self._server = server
        self._target = target
        self._workers = workers
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="tunery-build-"))

    def __enter__(self) -> LocalBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def build(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        steps = [
            Step(forked_steps.build, (self._target, candidate, str(self._folder)), self._timeout_s)
            for candidate in candidates
        ]
        results = self._server.call_all(steps, at_once=self._workers)
        kinds = (FailureKind.BUILD_ERROR, FailureKind.BUILD_TIMEOUT, FailureKind.BUILD_CRASH)
        return [failed(result, *kinds) if isinstance(result, ChildFailed) else result for result in results]

    def remove(self, built: Built) -> None:
        Path(built.library).unlink(missing_ok=True)


class LocalRunner:
    """Runs each candidate in a forked child; the clock of its deadline starts with the child, not in a queue."""

    def __init__(
        self, server: ForkServer, measurement: Measurement, *, timeout_s: float = 10.0, guard: Guard | None = None
    ) -> None:
        self._server = server
        self._measurement = measurement
        self._timeout_s = timeout_s
        self.guard = Guard() if guard is None else guard

    @property
    def at_once(self) -> int:
        return 1

    def run_all(self, wanted: Sequence[tuple[Built, float | None]]) -> list[Measured | Failed]:
        return [self.run(built, hopeless_s) for built, hopeless_s in wanted]

    def run(self, built: Built, hopeless_s: float | None = None) -> Measured | Failed:
        """`run_all` of one."""

        def once() -> tuple[Measured | Failed, str, Conditions | None]:
            try:
                run_s, found = self._server.call_retrying(
                    sampling.measure_guarded, built, self._measurement, hopeless_s, deadline_s=self._timeout_s
                )
            except ChildFailed as failure:
                kinds = (FailureKind.RUN_ERROR, FailureKind.RUN_TIMEOUT, FailureKind.RUN_CRASH)
                return failed(failure, *kinds), "", None
            return Measured(run_s), "", found

        return self.guard.measure(once)

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        deadline_s = self._timeout_s * len(candidates)
        try:
            found = self._server.call_retrying(
                sampling.measure_in_turn, list(candidates), self._measurement, deadline_s=deadline_s
            )
        except ChildFailed as failure:
            return failed(failure, FailureKind.RUN_ERROR, FailureKind.RUN_TIMEOUT, FailureKind.RUN_CRASH)
        return [Measured(run_s) for run_s in found]


def failed(failure: ChildFailed, error: FailureKind, timeout: FailureKind, crash: FailureKind) -> Failed:
    """What became of a candidate. A server that died for good is raised again: that was not the candidate."""
    if isinstance(failure, ChildError):
        return Failed(error, str(failure))
    if isinstance(failure, ChildCrashed):
        return Failed(crash, str(failure))
    if isinstance(failure, ChildTimeout):
        return Failed(timeout, str(failure))
    raise failure
