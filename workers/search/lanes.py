"""What builds and what runs the candidates of a search: they are compiled on every core, and measured alone, on the CPU
of this machine or on a GPU of it. `rpc_lane` has the runner for boards.

Nothing is built while something is measured: a search of two cores that did so would measure its own compiler. That
costs the time of the shorter of the two, which is why measuring is kept short.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tuning_db.errors import DeviceLost
from tuning_db.keys import DeviceIdentity
from tuning_db.trials import Failed, FailureKind, Measured
from workers.devices.health import Conditions
from workers.search import forked_steps, gpu_sampling, sampling
from workers.search.candidates import Built, Candidate, Measurement
from workers.search.forkserver import ChildCrashed, ChildError, ChildFailed, ChildTimeout, ForkServer, Step
from workers.search.guards import Guard
from workers.search.spawned import NotStarted, Spawned


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

    def close(self) -> None:
        """Leave the device to others."""


class LocalBuilder:
    """Compiles on `workers` cores at once, each candidate in a forked child with its own deadline.

    The target may be another machine's, if there is a linker for it (`workers.linker`). `step` and `options`: what
    compiles a candidate, and what it is told besides target, candidate and folder.
    """

    def __init__(
        self, server: ForkServer, target: str, *, workers: int, timeout_s: float = 15.0,
        step: Callable[..., Built] = forked_steps.build, options: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self._server = server
        self._target = target
        self._workers = workers
        self._timeout_s = timeout_s
        self._step = step
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="tunery-build-"))

    def __enter__(self) -> LocalBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def build(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        steps = [
            Step(self._step, (self._target, candidate, str(self._folder), *self._options), self._timeout_s)
            for candidate in candidates
        ]
        results = self._server.call_all(steps, at_once=self._workers)
        kinds = (FailureKind.BUILD_ERROR, FailureKind.BUILD_TIMEOUT, FailureKind.BUILD_CRASH)
        return [failed(result, *kinds) if isinstance(result, ChildFailed) else result for result in results]

    def remove(self, built: Built) -> None:
        Path(built.library).unlink(missing_ok=True)


class _StepRunner:
    """Runs one candidate after the other by steps of another process, whose deadlines start there and not in a queue.

    `call` is as `ForkServer.call_retrying`; `measure` and `compare` are the steps, `sampling.measure_guarded` and
    `sampling.measure_in_turn` or what does the same elsewhere.
    """

    def __init__(
        self, call: Callable[..., Any], measurement: Measurement, measure: Callable[..., Any],
        compare: Callable[..., Any], timeout_s: float, guard: Guard | None,
    ) -> None:  # fmt: skip
        self._call = call
        self._measurement = measurement
        self._measure = measure
        self._compare = compare
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
                run_s, found = self._call(
                    self._measure, built, self._measurement, hopeless_s, deadline_s=self._timeout_s
                )
            except ChildFailed as failure:
                kinds = (FailureKind.RUN_ERROR, FailureKind.RUN_TIMEOUT, FailureKind.RUN_CRASH)
                return failed(failure, *kinds), "", None
            return Measured(run_s), "", found

        return self.guard.measure(once)

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        deadline_s = self._timeout_s * len(candidates)
        try:
            found = self._call(self._compare, list(candidates), self._measurement, deadline_s=deadline_s)
        except ChildFailed as failure:
            return failed(failure, FailureKind.RUN_ERROR, FailureKind.RUN_TIMEOUT, FailureKind.RUN_CRASH)
        return [Measured(run_s) for run_s in found]

    def close(self) -> None:
        pass


class LocalRunner(_StepRunner):
    """On this machine's CPU, each candidate in a forked child."""

    def __init__(
        self, server: ForkServer, measurement: Measurement, *, timeout_s: float = 10.0, guard: Guard | None = None
    ) -> None:
        steps = (sampling.measure_guarded, sampling.measure_in_turn)
        super().__init__(server.call_retrying, measurement, *steps, timeout_s, guard)


class GpuRunner(_StepRunner):
    """On the GPU of this process's environment, candidates one after the other in a process that was started anew, and
    is once more after each that fails. DeviceLost if the GPU is not there then, or not the one of `identity`.

    `make_reference` compiles the kernel that tells the GPU's speed (`gpu_steps.build_reference`), when it is needed.
    """

    def __init__(
        self, identity: DeviceIdentity, make_reference: Callable[[], Built], measurement: Measurement, *,
        timeout_s: float = 10.0, guard: Guard | None = None,
    ) -> None:  # fmt: skip
        self._identity = identity
        self._make_reference = make_reference
        self._process: Spawned | None = None
        steps = (gpu_sampling.measure, gpu_sampling.measure_in_turn)
        super().__init__(self._on_gpu, measurement, *steps, timeout_s, guard)

    def _on_gpu(self, *call: Any, deadline_s: float) -> Any:
        if self._process is None:
            self._process = Spawned(gpu_sampling.preload(self._identity, self._make_reference()))
        try:
            return self._process.call(*call, deadline_s=deadline_s)
        except NotStarted as error:
            raise DeviceLost(str(error)) from None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def failed(failure: ChildFailed, error: FailureKind, timeout: FailureKind, crash: FailureKind) -> Failed:
    """What became of a candidate. A server that died for good is raised again: that was not the candidate."""
    if isinstance(failure, ChildError):
        return Failed(error, str(failure))
    if isinstance(failure, ChildCrashed):
        return Failed(crash, str(failure))
    if isinstance(failure, ChildTimeout):
        return Failed(timeout, str(failure))
    raise failure
