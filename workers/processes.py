"""How this package's processes hold on to each other: a child dies with its parent, and a whole tree can be found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Set in the environment of an attempt's process, and so in all of its descendants, whatever sessions they make.
ATTEMPT_VARIABLE: Final = "TUNERY_ATTEMPT"

#: Exit status of an attempt's process: what failed was this machine or the store, not the job.
RETRY: Final = 4

_PR_SET_PDEATHSIG: Final = 1
# Loaded now: between fork and the call nothing may be imported.
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux, prctl(2)).

    `parent_pid` is who that should be: if it is gone already, this process ends here.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def bound_memory() -> None:
    """Keep a model that needs too much from taking the machine: this process and each that it starts may not map more
    than the machine has, and are what the kernel ends first when memory runs out."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = physical_bytes if hard == resource.RLIM_INFINITY else min(physical_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def attempt_mark(job_id: str, attempt: int) -> str:
    return f"{job_id}:{attempt}"


def find_marked(mark: str) -> list[int]:
    """The pids of this user's processes that carry `mark`, zombies not counted."""
    return [pid for pid, found in _marked_processes() if found == mark]


def find_marks() -> set[str]:
    """The marks of all attempts that have a process on this host."""
    return {mark for _, mark in _marked_processes()}


def _marked_processes() -> Iterator[tuple[int, str]]:
    prefix = f"{ATTEMPT_VARIABLE}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # A zombie's environment reads as empty; another user's is not ours to read.
        with contextlib.suppress(OSError):
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(prefix):
                    yield int(entry.name), variable.removeprefix(prefix).decode(errors="replace")


def kill_marked(mark: str, *, timeout_s: float = 5.0) -> None:
    """Kill every process that carries `mark`, and those that they start meanwhile, until none is left."""
    deadline_s = time.monotonic() + timeout_s
    while (pids := find_marked(mark)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
