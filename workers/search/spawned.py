"""One process that was started anew and runs native steps itself, one after the other: for what does not survive a
fork, as CUDA does not.

A step that fails in any way ends the process, since what it left behind (a context that answers every call with the
same error) would fail the next one too. Another is started when there is a next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from workers.processes import die_with_parent
from workers.search.forkserver import (
    ChildCrashed,
    ChildError,
    ChildTimeout,
    function_of,
    how_it_ended,
    name_of,
    prepare,
    receive,
    send,
    what_it_said,
)

_START: Final = "import sys; from workers.search.spawned import main; main(sys.argv[1:])"
#: Within this a process has imported TVM and has its device.
START_S: Final = 120.0


class NotStarted(Exception):
    """The process could not do what it does before it serves. The message is its own."""


class Spawned:
    """Client of the process. Not thread-safe.

    `preload` is as `ForkServer`'s: "module" to import, or "module:function:argument" to call. What that raises is
    `NotStarted`, from `call`.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Spawned:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
        """Run a module-level function there. Raises ChildError, ChildTimeout, ChildCrashed or NotStarted.

        The deadline's clock starts when the process is ready.
        """
        if self._socket is None:
            self._start()
        connection = self._socket
        assert connection is not None
        outcome, value = self._exchange(connection, (name_of(function), arguments), deadline_s)
        if outcome == "ok":
            return value
        status = self._end()
        if outcome == "error":
            raise ChildError(value)
        if outcome == "timeout":
            raise ChildTimeout(f"killed after {deadline_s:g} s")
        raise ChildCrashed(how_it_ended(status))

    def close(self) -> None:
        self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid()), *self._preload],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._socket = ours
        outcome, value = self._exchange(ours, None, START_S)
        if outcome != "ok":
            status = self._end()
            raise NotStarted(
                {"error": value, "timeout": f"not ready after {START_S:g} s"}.get(outcome) or how_it_ended(status)
            )

    def _exchange(self, connection: socket.socket, request: object, timeout_s: float) -> tuple[str, Any]:
        """What the process answers to a request, or, without one, says first."""
        connection.settimeout(timeout_s)
        try:
            if request is not None:
                send(connection, request)
            outcome, value = receive(connection)
        except TimeoutError:
            return "timeout", None
        except (OSError, EOFError):
            return "crash", None
        return str(outcome), value

    def _end(self) -> int:
        """Kill it with all that it started; its wait status, negative for a signal."""
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is None:
            return 0
        # One that crashed is about to have its own status.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def main(arguments: Sequence[str]) -> None:
    die_with_parent(int(arguments[1]))
    connection = socket.socket(fileno=int(arguments[0]))

    def get_ready() -> None:
        for entry in arguments[2:]:
            prepare(entry)

    with contextlib.suppress(EOFError, OSError):  # nobody listens any more
        going = _answer(connection, get_ready)
        while going:
            function, values = receive(connection)
            going = _answer(connection, partial(function_of(function), *values))
    # Neither destructors nor exit handlers: they would wait for a device that hangs.
    os._exit(0)


def _answer(connection: socket.socket, call: Callable[[], Any]) -> bool:
    """Send what the call comes to; whether that is an answer."""
    try:
        send(connection, ("ok", call()))
    except Exception as error:
        send(connection, ("error", what_it_said(error)))
        return False
    return True
