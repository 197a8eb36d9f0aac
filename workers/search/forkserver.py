"""One warm process that has TVM imported and forks a child for each native step that may hang, crash or leak.

Building a candidate, measuring it and proposing new ones all run code of TVM and LLVM that has been seen to loop for
minutes, to abort, and to grow without bound; and importing TVM costs seconds. So the import is paid once, each step
runs in a forked child with a session and a deadline of its own, and what a step leaks dies with it.

The server itself never runs a kernel, trains a model or starts a thread: threads do not survive a fork. It keeps no
state between requests, so it can be replaced at any time, which the client does when it has grown or died.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Final

import psutil

from workers.processes import die_with_parent

_HEADER: Final = struct.Struct("!Q")
_START_SERVER: Final = "import sys; from workers.search.forkserver import main; main(sys.argv[1:])"
#: A server that has grown past this is replaced between two batches.
MAX_SERVER_BYTES: Final = 2 << 30
#: Servers that one client may lose before it gives up: something on this machine kills them.
SERVERS_LOST: Final = 5


class ChildFailed(Exception):
    """A forked step gave no result."""


class ChildError(ChildFailed):
    """The step raised; the message is the exception's own."""


class ChildTimeout(ChildFailed):
    """The step was still running at its deadline, and was killed with all its descendants."""


class ChildCrashed(ChildFailed):
    """The step died of a signal or left without an answer."""


class ServerDied(ChildFailed):
    """The server ended before the step did: no fault of the step's."""


#: What a child can come to, but for an answer.
_FAILURES: Final = {"error": ChildError, "timeout": ChildTimeout, "crash": ChildCrashed}


@dataclass(frozen=True, slots=True)
class Step:
    """A module-level function to be run in a forked child, and how long it may take there."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Request:
    id: int
    function: str  #: "module:name", imported by the server
    arguments: tuple[Any, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    id: int
    outcome: str  #: "ok", or of `_FAILURES`
    value: Any


class ForkServer:
    """Client of the warm process. Thread-safe; closing it ends the server and every child.

    `preload` says what the server does before it serves, so that every child has it already: "module" to import, or
    "module:function:argument" to call.
    """

    def __init__(self, preload: Sequence[str], *, max_bytes: int = MAX_SERVER_BYTES) -> None:
        self._preload = tuple(preload)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Not the same lock: a full socket may hold up a request until answers are taken, which needs the other one.
        self._send_lock = threading.Lock()
        self._next_id = 0
        self._pending: dict[int, Future[Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._receiver: threading.Thread | None = None
        self._hung_up = self._closed = False
        self._lost = 0
        self._start()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def submit(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Future[Any]:
        """Run a module-level function in a forked child; the clock starts when the child does.

        The future raises ChildError, ChildTimeout, ChildCrashed or ServerDied. Arguments and result are pickled: both
        sides are this program, and nothing from outside is ever unpickled.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._socket is None:
                raise ServerDied("the fork server is closed")
            request = _Request(self._next_id, name_of(function), arguments, deadline_s)
            self._next_id += 1
            self._pending[request.id] = future
            connection = self._socket
        try:
            with self._send_lock:
                send(connection, request)
        except OSError as error:
            with self._lock:
                self._hung_up = True
                lost = self._pending.pop(request.id, None)
            if lost is not None:  # else the receiver has seen it first
                lost.set_exception(ServerDied(f"the fork server is gone: {error}"))
        return future

    def call(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
        """`submit` and wait."""
        return self.submit(function, *arguments, deadline_s=deadline_s).result()

    def call_retrying(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
        """`call`, and once more by a new server if the server died of something else. ServerDied only after
        `SERVERS_LOST` of them. Call it when nothing else is pending."""
        [result] = self.call_all([Step(function, arguments, deadline_s)], at_once=1)
        if isinstance(result, ChildFailed):
            raise result
        return result

    def call_all(self, steps: Sequence[Step], *, at_once: int) -> list[Any]:
        """`call_retrying` of every step, `at_once` side by side. One result a step, in their order; a step that failed
        has its ChildFailed there. What a dying server had answered already is not run again."""
        results: dict[int, Any] = {}
        while len(results) < len(steps):
            died = self._call_missing(steps, results, at_once)
            if died is not None:
                self._lost += 1
                if self._lost > SERVERS_LOST:
                    raise died
                self.recycle_if_grown()
        return [results[number] for number in range(len(steps))]

    def _call_missing(self, steps: Sequence[Step], results: dict[int, Any], at_once: int) -> ServerDied | None:
        waiting = [number for number in range(len(steps)) if number not in results][::-1]
        running: dict[Future[Any], int] = {}
        died: ServerDied | None = None
        while running or (waiting and died is None):
            while waiting and died is None and len(running) < at_once:
                number = waiting.pop()
                step = steps[number]
                running[self.submit(step.function, *step.arguments, deadline_s=step.deadline_s)] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                error = future.exception()
                if isinstance(error, ServerDied):
                    died = error
                else:
                    results[number] = future.result() if error is None else error
        return died

    def recycle_if_grown(self) -> bool:
        """Replace the server if it has died or grown past `max_bytes`. Call it when nothing is pending."""
        if self._closed:
            raise ServerDied("the fork server is closed")
        try:
            # A process that is ending shuts its socket before it can be waited for.
            alive = not self._hung_up and self._process is not None and self._process.poll() is None
            if alive and psutil.Process(self.pid).memory_info().rss <= self._max_bytes:
                return False
        except psutil.NoSuchProcess:
            pass
        self._stop()
        self._start()
        return True

    def close(self) -> None:
        self._closed = True
        self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            # Not -m: the classes that cross the socket must have the same module name on both sides.
            [sys.executable, "-c", _START_SERVER, str(theirs.fileno()), str(os.getpid()), *self._preload],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._hung_up = False
        self._receiver = threading.Thread(target=self._receive, args=(ours,), name="forkserver-answers", daemon=True)
        self._receiver.start()

    def _stop(self) -> None:
        with self._lock:
            connection, process = self._socket, self._process
            self._socket = self._process = None
        if connection is not None:
            # The server ends its children and itself when the connection is shut.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if process is not None:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._receiver is not None:
            # It fails what is still pending, which must not be a request to the next server.
            self._receiver.join()
        if connection is not None:
            connection.close()

    def _receive(self, connection: socket.socket) -> None:
        while True:
            try:
                answer = receive(connection)
            except (OSError, EOFError):
                break
            with self._lock:
                future = self._pending.pop(answer.id)
            if answer.outcome == "ok":
                future.set_result(answer.value)
            else:
                future.set_exception(_FAILURES[answer.outcome](answer.value))
        with self._lock:
            self._hung_up = True
            lost = list(self._pending.values())
            self._pending.clear()
        for future in lost:
            future.set_exception(ServerDied("the fork server died"))


def name_of(function: Callable[..., Any]) -> str:
    """A module-level function as another process imports it."""
    return f"{function.__module__}:{function.__qualname__}"


def function_of(name: str) -> Callable[..., Any]:
    """The function that `name_of` named."""
    module, function = name.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def what_it_said(error: Exception) -> str:
    """An exception's type and message, of a long one the end."""
    return "".join(traceback.format_exception_only(error)).strip()[-2000:]


def how_it_ended(exit_code: int) -> str:
    """What became of a process, by its exit status, negative for a signal."""
    return f"died of {signal.Signals(-exit_code).name}" if exit_code < 0 else f"left with status {exit_code}"


def prepare(entry: str) -> None:
    """Do what is to be done before a process serves: import "module", or call "module:function:argument"."""
    module, _, call = entry.partition(":")
    if call:
        function, _, argument = call.partition(":")
        function_of(f"{module}:{function}")(argument)
    else:
        importlib.import_module(module)


def send(connection: socket.socket, message: object) -> None:
    """To `receive` of the other side, which is this program too."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(_HEADER.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Raises EOFError when the other side has shut."""
    size = _HEADER.unpack(_read_exactly(connection, _HEADER.size))[0]
    return pickle.loads(_read_exactly(connection, size))  # noqa: S301 - from our own other half


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


class _Child:
    """A forked step, as the process that forked it sees it. `inherited` are sockets that the child must not keep."""

    def __init__(self, request: _Request, *inherited: socket.socket) -> None:
        self.request = request
        self.pipe, write = os.pipe()
        self.output = bytearray()
        parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            for connection in inherited:
                connection.close()
            _run_child(request, write, parent_pid)
        os.close(write)
        self.deadline = time.monotonic() + request.deadline_s

    def read(self) -> tuple[str, Any] | None:
        """What it came to, once there is nothing more to be read of it. Call it when there is something."""
        part = os.read(self.pipe, 1 << 20)
        if part:
            self.output += part
            return None
        try:
            outcome, value = pickle.loads(self.output)  # noqa: S301 - from our own child
        except Exception:  # nothing, or what a child had written when it was killed
            outcome, value = "crash", None
        status = self._end()
        if outcome == "crash":
            value = how_it_ended(os.waitstatus_to_exitcode(status))
        return outcome, value

    def kill(self) -> tuple[str, Any]:
        """What it comes to at its deadline."""
        self._end()
        return "timeout", f"killed after {self.request.deadline_s:g} s"

    def _end(self) -> int:
        """Kill whatever is left of the child's session and return its wait status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # It may not have come to making its session yet.
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


def call_in_child(function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
    """Run a module-level function in a forked child of this process, and wait. Raises ChildError, ChildTimeout or
    ChildCrashed. For a process that is as bare as a fork server: threads do not survive a fork."""
    child = _Child(_Request(0, name_of(function), arguments, deadline_s))
    result = None
    with selectors.DefaultSelector() as selector:
        selector.register(child.pipe, selectors.EVENT_READ)
        while result is None:
            left_s = child.deadline - time.monotonic()
            result = child.read() if selector.select(max(0.0, left_s)) else child.kill()
    os.close(child.pipe)
    outcome, value = result
    if outcome != "ok":
        raise _FAILURES[outcome](value)
    return value


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}

    def serve(self) -> None:
        while True:
            next_deadline = min((child.deadline for child in self._children.values()), default=None)
            wait_s = None if next_deadline is None else max(0.0, next_deadline - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._connection:
                    try:
                        request = receive(self._connection)
                    except (EOFError, OSError):
                        for child in self._children.values():
                            child.kill()
                        return
                    self._fork(request)
                else:
                    self._read(self._children[key.fd])
            now = time.monotonic()
            for child in [c for c in self._children.values() if c.deadline <= now]:
                self._forget(child)
                self._answer(child, *child.kill())

    def _fork(self, request: _Request) -> None:
        child = _Child(request, self._connection)
        self._children[child.pipe] = child
        self._selector.register(child.pipe, selectors.EVENT_READ)

    def _read(self, child: _Child) -> None:
        result = child.read()
        if result is not None:
            self._forget(child)
            self._answer(child, *result)

    def _forget(self, child: _Child) -> None:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]

    def _answer(self, child: _Child, outcome: str, value: Any) -> None:
        send(self._connection, _Answer(child.request.id, outcome, value))


def _run_child(request: _Request, pipe: int, server_pid: int) -> None:
    """Body of the forked child; never returns."""
    status = 1
    try:
        os.setsid()
        die_with_parent(server_pid)
        try:
            answer = ("ok", function_of(request.function)(*request.arguments))
            data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            data = pickle.dumps(("error", what_it_said(error)))
        with os.fdopen(pipe, "wb") as out:
            out.write(data)
        status = 0
    finally:
        # Neither destructors nor exit handlers: a child that has answered has nothing left to do, and TVM's hang.
        os._exit(status)


def main(arguments: Sequence[str]) -> None:
    die_with_parent(int(arguments[1]))
    connection = socket.socket(fileno=int(arguments[0]))
    for entry in arguments[2:]:
        prepare(entry)
    _Server(connection).serve()
