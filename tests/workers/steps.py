"""Functions that tests run in forked children of the fork server: well-behaved ones and others."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: What a child changes is gone with it.
seen: list[int] = []


def add(a: int, b: int) -> int:
    return a + b


def imported_by(module: str) -> list[str]:
    """What importing `module` imports anew, in this process."""
    before = set(sys.modules)
    importlib.import_module(module)
    return sorted(set(sys.modules) - before)


def fail(message: str) -> None:
    raise ValueError(message)


def leave(status: int) -> None:
    os._exit(status)


def crash() -> None:
    ctypes.string_at(0)


def crash_at_once(_nothing: str) -> None:
    crash()


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def pid_after(delay_s: float) -> int:
    time.sleep(delay_s)
    return os.getpid()


def session() -> tuple[int, int]:
    return os.getsid(0), os.getpid()


def remember(value: int) -> list[int]:
    seen.append(value)
    return seen


def large(size: int) -> bytes:
    return b"x" * size


def size_of(data: bytes) -> int:
    return len(data)


def unpicklable() -> Any:
    return lambda: None


def sleep_for_ever(note: str) -> None:
    """Never returns; the file `note` says who we are once everything is started."""
    Path(note).write_text(str(os.getpid()))
    time.sleep(3600)


def spawn_and_sleep(note: str) -> None:
    """A child that has a child, neither of which ends; `note` holds both pids."""
    inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    partial = Path(note + ".partial")
    partial.write_text(f"{os.getpid()} {inner.pid}")
    partial.rename(note)
    time.sleep(3600)


def spin() -> None:
    """Native code that holds the interpreter lock: no signal handler and no timer of Python's would stop it."""
    ctypes.PyDLL(None).sleep(3600)


def kill_server() -> None:
    """End the process that has forked this one."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def count_and_die_once(path: str, dies: bool) -> int:
    """How often it was called with this path, itself included; the first time its server dies of it, if asked."""
    with Path(path).open("a") as file:
        file.write("x")
    count = len(Path(path).read_text())
    if dies and count == 1:
        kill_server()
    return count


def half_an_answer() -> None:
    """Die with part of an answer written, as when the kernel kills for memory."""
    for entry in Path("/proc/self/fd").iterdir():
        # Standard error may be a pipe too; of others this child can write to its own alone.
        with contextlib.suppress(OSError):
            if int(entry.name) > 2 and str(entry.readlink()).startswith("pipe:"):
                os.write(int(entry.name), b"\x80\x05\x95\xff")
    os.kill(os.getpid(), signal.SIGKILL)


def grow(size: int) -> int:
    """What it takes is given back when it ends."""
    return len(bytearray(size).replace(b"\0", b"\1", 1))
