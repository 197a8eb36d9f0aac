"""Builder and runner for the CPU of this machine: candidates are compiled on every core, and measured alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from tuning_db.trials import Failed, FailureKind, Measured
from workers.search import forked_steps
from workers.search.candidates import Built, Candidate, Measurement
from workers.search.forkserver import ChildCrashed, ChildError, ChildFailed, ForkServer, ServerDied


class Builder(Protocol):
    """Turns candidates into something that a runner of the same device can run."""

    def build(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        """One result a candidate, in their order. Returns when all are done: nothing is left running."""


class Runner(Protocol):
    """Measures what a builder made. One at a time, with nothing else running on the measured cores."""

    def run(self, built: Built) -> Measured | Failed: ...


class LocalBuilder:
    """Compiles on `workers` cores at once, each candidate in a forked child with its own deadline."""

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
        try:
            return self._build_all(candidates)
        except ServerDied:
            # A new server, and all once more: a candidate that was lost with the old one has not failed.
            self._server.recycle_if_grown()
            return self._build_all(candidates)

    def _build_all(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        with ThreadPoolExecutor(self._workers, thread_name_prefix="build") as pool:
            return list(pool.map(self._build_one, candidates))

    def _build_one(self, candidate: Candidate) -> Built | Failed:
        future: Future[Built] = self._server.submit(
            forked_steps.build, self._target, candidate, str(self._folder), deadline_s=self._timeout_s
        )
        try:
            return future.result()
        except ChildFailed as failure:
            return _failed(failure, FailureKind.BUILD_ERROR, FailureKind.BUILD_TIMEOUT, FailureKind.BUILD_CRASH)


class LocalRunner:
    """Runs each candidate in a forked child; the clock of its deadline starts with the child, not in a queue."""

    def __init__(self, server: ForkServer, measurement: Measurement, *, timeout_s: float = 10.0) -> None:
        self._server = server
        self._measurement = measurement
        self._timeout_s = timeout_s

    def run(self, built: Built) -> Measured | Failed:
        try:
            return self._measure(built)
        except ServerDied:
            self._server.recycle_if_grown()
            return self._measure(built)
        finally:
            Path(built.library).unlink(missing_ok=True)

    def _measure(self, built: Built) -> Measured | Failed:
        try:
            run_s = self._server.call(forked_steps.measure, built, self._measurement, deadline_s=self._timeout_s)
            return Measured(run_s)
        except ChildFailed as failure:
            return _failed(failure, FailureKind.RUN_ERROR, FailureKind.RUN_TIMEOUT, FailureKind.RUN_CRASH)


def _failed(failure: ChildFailed, error: FailureKind, timeout: FailureKind, crash: FailureKind) -> Failed:
    """What became of a candidate. ServerDied is raised again: that was not the candidate."""
    if isinstance(failure, ServerDied):
        raise failure
    if isinstance(failure, ChildError):
        return Failed(error, str(failure))
    return Failed(crash if isinstance(failure, ChildCrashed) else timeout, str(failure))
