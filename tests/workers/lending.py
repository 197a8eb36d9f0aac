"""A tracker and board agents of this machine, as tests of boards start them: real processes on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from workers.devices.tracker import BoardUnusable, Tracker


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)


_TRACKER = """
import sys
from tvm.rpc.tracker import PopenTrackerServerState
PopenTrackerServerState("127.0.0.1", int(sys.argv[1]), int(sys.argv[1]) + 1, silent=True).thread.join()
"""


@contextlib.contextmanager
def running_tracker(port: int | None = None) -> Iterator[Tracker]:
    """TVM's tracker, on a free port if none is given."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", _TRACKER, str(port)],
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    tracker = Tracker("127.0.0.1", port)

    def answers() -> bool:
        assert process.poll() is None, "the tracker ended"
        with contextlib.suppress(BoardUnusable):
            tracker.joined()
            return True
        return False

    try:
        wait_until(answers, "the tracker's start")
        yield tracker
    finally:
        process.kill()
        process.wait()


def free(tracker: Tracker, key: str) -> int:
    """How many boards the tracker would give out at once."""
    return int(tracker._summary()["queue_info"].get(key, {"free": 0})["free"])


def joined(tracker: Tracker, key: str) -> int:
    try:
        return len(tracker.boards(key))
    except BoardUnusable:
        return 0


@contextlib.contextmanager
def running_agent(
    tracker: Tracker, key: str, folder: Path, *, python: Sequence[str] = (sys.executable,), count: int = 1,
    arguments: Sequence[str] = (),
) -> Iterator[psutil.Process]:  # fmt: skip
    """An agent that has joined as board number `count` of its key. `folder`: its temporary files lie there."""
    process = subprocess.Popen(
        [
            *python, "-m", "workers.devices.board", "--tracker", f"127.0.0.1:{tracker.port}", "--key", key,
            "--host", "127.0.0.1", "--port", "19300", *arguments,
        ],
        env={**os.environ, "TMPDIR": str(folder)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: free(tracker, key) >= count, "joining")
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def lent_board(key: str) -> Iterator[Tracker]:
    """A tracker that one board has joined: this machine."""
    with (
        running_tracker() as tracker,
        tempfile.TemporaryDirectory() as folder,
        running_agent(tracker, key, Path(folder)),
    ):
        yield tracker
