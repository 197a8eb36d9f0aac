"""CUDA's runtime of a GPU that is this process's memory, and that is as late as it may be.

Nothing that is enqueued to a stream runs before the host waits for it, or before something else that has to run waits
for it; so whoever forgets a wait reads numbers that are not there yet, or writes over numbers that are still needed.
With `random`, streams advance by themselves besides, as far as their waits let them. A clock tells when each thing
would end on a GPU with one engine for copies of each direction and one for kernels.

Kernels are launched by `Runtime.kernel`. Or, `at_once`, the host computes them itself, when whatever the default stream
waits for is done: as TVM does with a library for CPUs.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from types import SimpleNamespace
from typing import Any, Final

LEGACY: Final = 1


class Error(IntEnum):
    """As `cudaError_t`."""

    cudaSuccess = 0  # noqa: N815 its name there
    cudaErrorMemoryAllocation = 2  # noqa: N815 its name there
    cudaErrorIllegalAddress = 700  # noqa: N815 its name there


@dataclass
class Event:
    recorded: int = 0  #: how often it was
    reached: int = 0  #: the last of them that its stream has come to
    time_s: float = 0.0


@dataclass
class _Task:
    what: str  #: "copy", "kernel", "record" or "wait"
    run: Callable[[], None] = lambda: None
    seconds: float = 0.0
    engine: str = ""
    event: Event = field(default_factory=Event)
    count: int = 0  #: of the event's records, the one that is recorded or waited for
    enqueued_s: float = 0.0


@dataclass
class Runtime:
    """The module `cuda.bindings.runtime`."""

    random: Random | None = None
    forgotten: Callable[[str, Any], bool] = lambda _name, _stream: False  #: calls that do nothing, by name and stream
    refused: Callable[[str], bool] = lambda _name: False  #: calls that fail
    at_once: bool = False
    copy_s: float = 1.0
    clock_s: float = 0.0  #: the host's
    pinned: dict[int, Any] = field(default_factory=dict)
    streams: dict[int, deque[_Task]] = field(default_factory=lambda: {LEGACY: deque()})
    events: list[Event] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    broken: bool = False

    cudaError_t = Error  # noqa: N815
    cudaStreamLegacy = LEGACY  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815
    cudaEventDisableTiming = 2  # noqa: N815
    cudaHostAllocDefault = 0  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815

    def __post_init__(self) -> None:
        self._ends: dict[int, float] = {LEGACY: 0.0}
        self._engines: dict[str, float] = {}
        self._handles = itertools.count(LEGACY + 1)

    def kernel(self, run: Callable[[], None], seconds: float = 0.0) -> None:
        """Launch one on the default stream."""
        self._enqueue(LEGACY, _Task("kernel", run, seconds, "kernels"))

    def is_empty(self) -> bool:
        """Whether everything was freed again."""
        return not self.pinned and not self.events and set(self.streams) == {LEGACY}

    # --- What is called -----------------------------------------------------------------------------------------------

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Error, int | None]:  # noqa: N802 and so on: CUDA's names
        if self._is_refused("cudaStreamCreateWithFlags"):
            return Error.cudaErrorMemoryAllocation, None
        assert flags == self.cudaStreamNonBlocking
        stream = next(self._handles)
        self.streams[stream], self._ends[stream] = deque(), 0.0
        return Error.cudaSuccess, stream

    def cudaStreamDestroy(self, stream: int) -> tuple[Error]:  # noqa: N802
        assert not self.streams.pop(stream), "destroyed while work is left in it"
        return (Error.cudaSuccess,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Error, Event | None]:  # noqa: N802
        if self._is_refused("cudaEventCreateWithFlags"):
            return Error.cudaErrorMemoryAllocation, None
        assert flags == self.cudaEventDisableTiming
        self.events.append(Event())
        return Error.cudaSuccess, self.events[-1]

    def cudaEventDestroy(self, event: Event) -> tuple[Error]:  # noqa: N802
        self.events = [known for known in self.events if known is not event]
        return (Error.cudaSuccess,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Error, int | None]:  # noqa: N802
        if self._is_refused("cudaHostAlloc"):
            return Error.cudaErrorMemoryAllocation, None
        assert flags == self.cudaHostAllocDefault
        memory = (ctypes.c_uint8 * size)()
        self.pinned[ctypes.addressof(memory)] = memory
        return Error.cudaSuccess, ctypes.addressof(memory)

    def cudaFreeHost(self, ptr: int) -> tuple[Error]:  # noqa: N802
        assert not any(self.streams.values()), "freed while work is left"
        del self.pinned[ptr]
        return (Error.cudaSuccess,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: int, stream: int) -> tuple[Error]:  # noqa: N802
        if self._is_refused("cudaMemcpyAsync"):
            return (Error.cudaErrorIllegalAddress,)
        assert kind == self.cudaMemcpyKind.cudaMemcpyDefault
        assert (dst in self.pinned) != (src in self.pinned), "one end is pinned, the other one on the device"
        engine = "uploads" if src in self.pinned else "downloads"
        self.calls.append(engine)
        self._enqueue(stream, _Task("copy", lambda: _move(dst, src, count), self.copy_s, engine))
        return (Error.cudaSuccess,)

    def cudaEventRecord(self, event: Event, stream: int) -> tuple[Error]:  # noqa: N802
        event.recorded += 1
        self._enqueue(stream, _Task("record", event=event, count=event.recorded))
        return (Error.cudaSuccess,)

    def cudaStreamWaitEvent(self, stream: int, event: Event, flags: int) -> tuple[Error]:  # noqa: N802
        assert flags == 0
        if not self.forgotten("cudaStreamWaitEvent", stream):
            self._enqueue(stream, _Task("wait", event=event, count=event.recorded))
        return (Error.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Error]:  # noqa: N802
        if self._is_refused("cudaStreamSynchronize"):
            self.broken = True
        if not self.forgotten("cudaStreamSynchronize", stream):
            while self.streams[stream]:
                self._advance(stream)
            self.clock_s = max(self.clock_s, self._ends[stream])
        return (Error.cudaErrorIllegalAddress if self.broken else Error.cudaSuccess,)

    def cudaGetErrorString(self, error: Error) -> tuple[Error, bytes]:  # noqa: N802
        return Error.cudaSuccess, error.name.encode()

    # --- What happens then --------------------------------------------------------------------------------------------

    def _is_refused(self, name: str) -> bool:
        self.calls.append(name)
        return self.refused(name)

    def _enqueue(self, stream: int, task: _Task) -> None:
        task.enqueued_s = self.clock_s
        self.streams[stream].append(task)
        while self.at_once and self.streams[LEGACY]:
            self._advance(LEGACY)
        if self.random is not None:
            for _ in range(self.random.randrange(4)):
                ready = [name for name, tasks in self.streams.items() if tasks and not _waits(tasks[0])]
                if ready:
                    self._advance(self.random.choice(ready))

    def _advance(self, stream: int) -> None:
        """Run a stream's next task, and before it all that it waits for."""
        task = self.streams[stream][0]
        while _waits(task):
            self._advance(next(name for name, tasks in self.streams.items() if _records(tasks, task)))
        self.streams[stream].popleft()
        task.run()
        start_s = max(self._ends[stream], task.enqueued_s, self._engines.get(task.engine, 0.0))
        if task.what == "wait":
            start_s = max(start_s, task.event.time_s)
        self._ends[stream] = start_s + task.seconds
        if task.engine:
            self._engines[task.engine] = self._ends[stream]
        if task.what == "record":
            task.event.reached, task.event.time_s = task.count, self._ends[stream]


def _waits(task: _Task) -> bool:
    return task.what == "wait" and task.event.reached < task.count


def _records(tasks: deque[_Task], awaited: _Task) -> bool:
    return any(task.what == "record" and task.event is awaited.event for task in tasks)


def _move(dst: int, src: int, count: int) -> None:
    ctypes.memmove(dst, src, count)
