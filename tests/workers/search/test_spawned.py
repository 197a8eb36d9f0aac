"""A process that runs steps itself: what it answers, and what becomes of it when a step fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers import steps
from tests.workers.search.test_forkserver import is_running, wait_until
from workers.search.forkserver import ChildCrashed, ChildError, ChildFailed, ChildTimeout
from workers.search.spawned import NotStarted, Spawned


@pytest.fixture
def process() -> Iterator[Spawned]:
    with Spawned(["tests.workers.steps"]) as process:
        yield process


def test_steps_share_a_process(process: Spawned) -> None:
    """Calls come back with what the function returns, from one process that keeps what they leave behind."""
    assert process.call(steps.add, 2, 3, deadline_s=60) == 5
    pids = {process.call(steps.pid_after, 0.0, deadline_s=60) for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert [process.call(steps.remember, value, deadline_s=60) for value in (1, 2)] == [[1], [1, 2]]
    assert process.call(steps.size_of, b"x" * 5_000_000, deadline_s=60) == 5_000_000
    assert len(process.call(steps.large, 5_000_000, deadline_s=60)) == 5_000_000


@pytest.mark.parametrize(
    ("step", "arguments", "kind", "message"),
    [
        (steps.fail, ("no",), ChildError, "ValueError: no"),
        (steps.unpicklable, (), ChildError, "pickle"),
        (steps.crash, (), ChildCrashed, "died of SIGSEGV"),
        (steps.leave, (3,), ChildCrashed, "left with status 3"),
        (steps.pid_after, (3600.0,), ChildTimeout, "killed after 0.5 s"),
    ],
)
def test_failure_ends_the_process(
    process: Spawned, step: Callable[..., Any], arguments: tuple[Any, ...], kind: type[ChildFailed], message: str
) -> None:
    """A step that raises, crashes, leaves or hangs fails by name; its process is gone, and the next has another."""
    before = process.call(steps.pid_after, 0.0, deadline_s=60)
    with pytest.raises(kind, match=message):
        process.call(step, *arguments, deadline_s=0.5 if kind is ChildTimeout else 60)
    assert not is_running(before)
    assert process.call(steps.pid_after, 0.0, deadline_s=60) != before


def test_what_was_started_ends_too(process: Spawned, tmp_path: Path) -> None:
    """At its deadline a step is killed together with what it started."""
    note = tmp_path / "pids"
    with pytest.raises(ChildTimeout):
        process.call(steps.spawn_and_sleep, str(note), deadline_s=5)
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), "the end of both")


def test_not_started() -> None:
    """What keeps a process from serving is said by the call that needed it: an exception, or its end."""
    with (
        Spawned(["tests.workers.steps:fail:no device"]) as process,
        pytest.raises(NotStarted, match="ValueError: no device"),
    ):
        process.call(steps.add, 1, 1, deadline_s=60)
    with Spawned(["tests.workers.steps:crash_at_once:"]) as process, pytest.raises(NotStarted, match="SIGSEGV"):
        process.call(steps.add, 1, 1, deadline_s=60)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """When the process that made it is killed, it ends too."""
    note = tmp_path / "pid"
    program = f"""
from tests.workers import steps
from workers.search.spawned import Spawned
Spawned(["tests.workers.steps"]).call(steps.sleep_for_ever, {str(note)!r}, deadline_s=3600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the start of the step")
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not is_running(int(note.read_text())), "its end")
