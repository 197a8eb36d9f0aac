"""The runner for boards behind a tracker: one search's candidates are spread over all boards of the device.

Candidates are built as for this machine (`lanes.LocalBuilder`): LLVM compiles for the target, its linker links for it.
Here a finished library is sent to whichever board is free, in a process that can be killed, and the clock of its
deadline starts on the board. A candidate has failed when two boards have said so, or the only one; a board that is lost
says nothing of its candidate, which goes to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tuning_db.errors import DeviceLost
from tuning_db.keys import DeviceIdentity
from tuning_db.trials import Failed, FailureKind, Measured
from workers.devices import board_session
from workers.devices.board_session import ANSWER_S, CONNECT_S, Lost, Said, upload_s
from workers.devices.health import Conditions
from workers.devices.tracker import Boards
from workers.search.candidates import Built, Measurement
from workers.search.forkserver import SERVERS_LOST, ChildFailed, ForkServer, ServerDied
from workers.search.guards import Guard
from workers.search.lanes import failed

#: Candidates that are handed out at once, for each board: the slowest of them keeps the other boards waiting.
_EACH: Final = 4
#: A candidate that so many boards were lost with while it ran is taken to be why.
_LOST_WITH_IT: Final = 2
_PAUSE_S: Final = 0.5


class RpcRunner:
    """Measures on those boards that are of the device `identity`. `warn` is told of every board that was lost."""

    def __init__(
        self, server: ForkServer, boards: Boards, identity: DeviceIdentity, measurement: Measurement, *,
        timeout_s: float = 10.0, connect_s: float = CONNECT_S, warn: Callable[[str], None] = lambda message: None,
        guard: Guard | None = None,
    ) -> None:  # fmt: skip
        self._server = server
        self._boards = boards
        self._identity = identity
        self._measurement = measurement
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._warn = warn
        self.guard = Guard(warn) if guard is None else guard

    @property
    def at_once(self) -> int:
        count = self._boards.count()
        return _EACH * count if count > 1 else 1

    def run_all(self, wanted: Sequence[tuple[Built, float | None]]) -> list[Measured | Failed]:
        def run(built: Built, hopeless_s: float | None) -> Measured | Failed:
            arguments = [_sent(built), asdict(self._measurement), hopeless_s]

            def once() -> tuple[Measured | Failed, str, Conditions | None]:
                result = self._trial([built], "measure", arguments, self._timeout_s)
                if isinstance(result, Failed):
                    return result, "", None
                address, value = result
                return Measured(tuple(value["run_s"])), f"@{address}", Conditions.from_json(value["conditions"])

            return self.guard.measure(once)

        results: dict[int, Measured | Failed] = {}
        for _ in range(SERVERS_LOST):
            died = None
            with ThreadPoolExecutor(self._boards.count()) as pool:
                futures = {n: pool.submit(run, *wanted[n]) for n in range(len(wanted)) if n not in results}
            for number, future in futures.items():
                error = future.exception()
                if isinstance(error, ServerDied):
                    died = error
                else:
                    results[number] = future.result()
            if died is None:
                return [results[number] for number in range(len(wanted))]
            self._server.recycle_if_grown()
        raise died or ServerDied("the fork server died")

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        deadline_s = self._timeout_s * len(candidates)
        arguments = [[_sent(built) for built in candidates], asdict(self._measurement)]
        result = self._trial(candidates, "measure_in_turn", arguments, deadline_s)
        return result if isinstance(result, Failed) else [Measured(tuple(samples)) for samples in result[1]]

    def close(self) -> None:
        pass

    def _trial(
        self, libraries: Sequence[Built], step: str, arguments: Sequence[Any], deadline_s: float
    ) -> tuple[str, Any] | Failed:
        """The address of the board that ran the step, and what that returned; or Failed."""
        said_so: dict[str, Failed] = {}  # by board
        lost, warned = 0, ""
        end_s = time.monotonic() + self._boards.patience_s
        paths = [(built.library, Path(built.library).name) for built in libraries]
        missing = [path for path, _ in paths if not Path(path).is_file()]
        if missing:
            return Failed(FailureKind.RUN_ERROR, f"there is no {missing[0]}")
        patience_s = self._connect_s + upload_s([path for path, _ in paths]) + deadline_s + ANSWER_S
        while True:
            lease = self._boards.request()
            if lease.address in said_so and self._boards.count() > 1:
                lease.give_back()
                if time.monotonic() > end_s:
                    return said_so[lease.address]
                time.sleep(_PAUSE_S)
                continue
            answer: Said | Lost
            try:
                answer = self._server.call(
                    board_session.trial, lease, self._identity, paths, step, arguments, deadline_s, self._connect_s,
                    deadline_s=patience_s,
                )  # fmt: skip
            except ServerDied:
                raise
            except ChildFailed as failure:
                answer = Lost(f"the board at {lease.address} does not answer: {failure}")
            if isinstance(answer, Said):
                try:
                    return lease.address, answer.result()
                except ChildFailed as failure:
                    kinds = (FailureKind.RUN_ERROR, FailureKind.RUN_TIMEOUT, FailureKind.RUN_CRASH)
                    said_so[lease.address] = failed(failure, *kinds)
                if len(said_so) >= min(2, self._boards.count()):
                    return said_so[lease.address]
                continue
            if answer.message != warned:
                self._warn(answer.message)
            warned = answer.message
            lost += answer.running
            if lost >= _LOST_WITH_IT:
                return Failed(FailureKind.RUN_CRASH, f"{lost} boards were lost while it ran; {answer.message}")
            if time.monotonic() > end_s:
                raise DeviceLost(f"{answer.message}; tried for {self._boards.patience_s:g} s")
            time.sleep(_PAUSE_S)


def _sent(built: Built) -> dict[str, Any]:
    """`built` as the board knows it, by the name that its library has there. Features stay here."""
    return {"library": Path(built.library).name, "arguments": built.arguments, "weights": built.weights}
