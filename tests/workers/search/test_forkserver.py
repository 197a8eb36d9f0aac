"""The fork server: results, failures that are values, and processes that never outlive their purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers import steps
from workers.search.forkserver import ChildCrashed, ChildError, ChildTimeout, ForkServer, ServerDied, Step

DEADLINE_S = 60.0  #: for what must not time out


@pytest.fixture(scope="module")
def plain() -> Iterator[ForkServer]:
    """A server without TVM: it starts in a moment."""
    with ForkServer(["tests.workers.steps"]) as server:
        yield server


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within 30 s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_result(plain: ForkServer) -> None:
    """A call returns what the function returns, from a process with a session of its own."""
    assert plain.call(steps.add, 2, 3, deadline_s=DEADLINE_S) == 5
    session, pid = plain.call(steps.session, deadline_s=DEADLINE_S)
    assert session == pid
    assert pid not in (plain.pid, os.getpid())


def test_nothing_is_kept(plain: ForkServer) -> None:
    """What one call changes, the next does not see."""
    assert plain.call(steps.remember, 1, deadline_s=DEADLINE_S) == [1]
    assert plain.call(steps.remember, 2, deadline_s=DEADLINE_S) == [2]


def test_exception(plain: ForkServer) -> None:
    """An exception arrives with its type and message; a long one keeps its end."""
    with pytest.raises(ChildError, match=r"^ValueError: no such thing$"):
        plain.call(steps.fail, "no such thing", deadline_s=DEADLINE_S)
    with pytest.raises(ChildError) as caught:
        plain.call(steps.fail, "x" * 10_000 + "the point", deadline_s=DEADLINE_S)
    assert str(caught.value).endswith("the point")
    assert len(str(caught.value)) <= 2000
    with pytest.raises(ChildError, match="pickle"):
        plain.call(steps.unpicklable, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGKILL])
def test_signal(plain: ForkServer, number: signal.Signals) -> None:
    """A child that dies of a signal is reported by the signal's name, and the next call works."""
    with pytest.raises(ChildCrashed, match=f"died of {number.name}"):
        plain.call(steps.die, int(number), deadline_s=DEADLINE_S)
    assert plain.call(steps.add, 1, 1, deadline_s=DEADLINE_S) == 2


def test_crash(plain: ForkServer) -> None:
    """A real access to address 0 is a crash of that call alone."""
    with pytest.raises(ChildCrashed, match="SIGSEGV"):
        plain.call(steps.crash, deadline_s=DEADLINE_S)
    with pytest.raises(ChildCrashed, match="left with status 3"):
        plain.call(steps.leave, 3, deadline_s=DEADLINE_S)


def test_half_an_answer(plain: ForkServer) -> None:
    """A child that is killed while it answers is a crash, and does not take the server with it."""
    pid = plain.pid
    with pytest.raises(ChildCrashed, match="SIGKILL"):
        plain.call(steps.half_an_answer, deadline_s=DEADLINE_S)
    assert plain.call(steps.add, 1, 1, deadline_s=DEADLINE_S) == 2
    assert plain.pid == pid


def test_timeout_ends_the_whole_tree(plain: ForkServer, tmp_path: Path) -> None:
    """At its deadline a child is killed together with what it started (tvm#13778)."""
    note = tmp_path / "pids"
    with pytest.raises(ChildTimeout, match="killed after 3 s"):
        plain.call(steps.spawn_and_sleep, str(note), deadline_s=3)
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the tree")


@pytest.mark.parametrize("deadline_s", [0.0, 0.5])
def test_timeout_of_native_code(plain: ForkServer, deadline_s: float) -> None:
    """Native code that never gives control back is killed too, even before it has begun (tvm#11434)."""
    with pytest.raises(ChildTimeout):
        plain.call(steps.spin, deadline_s=deadline_s)
    assert plain.call(steps.add, 1, 1, deadline_s=DEADLINE_S) == 2


def test_one_that_hangs_holds_up_nobody(plain: ForkServer, tmp_path: Path) -> None:
    """Calls beside one that hangs are answered meanwhile."""
    note = tmp_path / "pid"
    hanging: Future[Any] = plain.submit(steps.sleep_for_ever, str(note), deadline_s=20)
    assert [plain.call(steps.add, i, 1, deadline_s=DEADLINE_S) for i in range(5)] == [1, 2, 3, 4, 5]
    assert not hanging.done()
    wait_until(note.exists, "the start of the child")
    os.kill(int(note.read_text()), signal.SIGKILL)
    with pytest.raises(ChildCrashed, match="SIGKILL"):
        hanging.result(timeout=DEADLINE_S)


def test_many_at_once(plain: ForkServer) -> None:
    """A hundred calls from many threads each get their own answer."""
    answers: dict[int, int] = {}

    def ask(first: int) -> None:
        futures = {i: plain.submit(steps.add, i, i, deadline_s=DEADLINE_S) for i in range(first, first + 25)}
        answers.update({i: future.result() for i, future in futures.items()})

    threads = [threading.Thread(target=ask, args=(25 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert answers == {i: 2 * i for i in range(100)}


def test_large_values(plain: ForkServer) -> None:
    """Arguments and results of many megabytes pass in both directions at once, and nobody waits for ever."""
    size = 4 << 20
    futures = [plain.submit(steps.large, size, deadline_s=DEADLINE_S) for _ in range(4)]
    futures += [plain.submit(steps.size_of, b"y" * size, deadline_s=DEADLINE_S) for _ in range(4)]
    results = [future.result(timeout=DEADLINE_S) for future in futures]
    assert [len(result) for result in results[:4]] + results[4:] == [size] * 8


def test_server_dies() -> None:
    """When the server is killed its calls fail, the next ones too, until it is replaced."""
    with ForkServer(["tests.workers.steps"]) as server:
        pid = server.pid
        pending: Future[int] = server.submit(steps.pid_after, 3600.0, deadline_s=3600)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerDied, match="fork server"):
            pending.result(timeout=DEADLINE_S)
        with pytest.raises(ServerDied, match="fork server"):
            server.call(steps.add, 1, 1, deadline_s=DEADLINE_S)
        assert server.recycle_if_grown() is True
        assert server.pid != pid
        assert server.call(steps.add, 1, 1, deadline_s=DEADLINE_S) == 2


def test_retrying(tmp_path: Path) -> None:
    """What a dying server has not answered is run again by a new one, in its place, and nothing else is; after too many
    deaths the caller is told."""
    with ForkServer(["tests.workers.steps"]) as server:
        counts = [tmp_path / str(number) for number in range(4)]
        steps_ = [
            Step(steps.count_and_die_once, (str(path), number == 2), DEADLINE_S) for number, path in enumerate(counts)
        ]
        assert server.call_all(steps_, at_once=1) == [1, 1, 2, 1]
        os.kill(server.pid, signal.SIGKILL)
        assert server.call_retrying(steps.add, 1, 2, deadline_s=DEADLINE_S) == 3
        with pytest.raises(ServerDied):
            server.call_retrying(steps.kill_server, deadline_s=DEADLINE_S)


def test_call_all(plain: ForkServer) -> None:
    """Results come in the order of the steps, at most so many at once, and a failure is a value in its place."""
    start_s = time.monotonic()
    results = plain.call_all(
        [
            Step(steps.pid_after, (0.3,), DEADLINE_S),
            Step(steps.fail, ("no",), DEADLINE_S),
            Step(steps.pid_after, (0.3,), DEADLINE_S),
            Step(steps.pid_after, (3600.0,), 0.2),
            Step(steps.add, (1, 2), DEADLINE_S),
        ],
        at_once=1,
    )
    assert time.monotonic() - start_s >= 0.8
    assert [type(result) for result in results] == [int, ChildError, int, ChildTimeout, int]
    assert results[4] == 3
    assert plain.call_all([], at_once=2) == []
    with pytest.raises(ChildCrashed):
        plain.call_retrying(steps.crash, deadline_s=DEADLINE_S)


def test_recycling(plain: ForkServer) -> None:
    """A server that has grown is replaced, and requests right after go to the new one; one that has not is kept."""
    pid = plain.pid
    assert plain.recycle_if_grown() is False
    assert plain.pid == pid
    with ForkServer(["tests.workers.steps"], max_bytes=1) as server:
        pid = server.pid
        for _ in range(5):
            assert server.recycle_if_grown() is True
            assert server.call(steps.add, 1, 1, deadline_s=DEADLINE_S) == 2
        assert not is_running(pid)


def test_close(tmp_path: Path) -> None:
    """Closing ends the server and every child, and calls after it fail at once."""
    server = ForkServer(["tests.workers.steps"])
    pid, note = server.pid, tmp_path / "pids"
    pending: Future[None] = server.submit(steps.spawn_and_sleep, str(note), deadline_s=3600)
    wait_until(note.exists, "the start of the children")
    server.close()
    pids = [pid, *map(int, note.read_text().split())]
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the tree")
    with pytest.raises(ServerDied):
        pending.result(timeout=DEADLINE_S)
    with pytest.raises(ServerDied, match="closed"):
        server.submit(steps.add, 1, 1, deadline_s=1)
    server.close()


def test_server_dies_with_its_parent(tmp_path: Path) -> None:
    """When the process that made a server is killed, server and children end with it (tvm#3602)."""
    note = tmp_path / "pid"
    program = f"""
from tests.workers import steps
from workers.search.forkserver import ForkServer
server = ForkServer(["tests.workers.steps"])
future = server.submit(steps.sleep_for_ever, {str(note)!r}, deadline_s=3600)
print(server.pid, flush=True)
future.result()
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        server_pid = int(owner.stdout.readline())
        wait_until(lambda: note.exists() and note.read_text() != "", "the start of the child")
        child_pid = int(note.read_text())
        assert is_running(server_pid)
        assert is_running(child_pid)
    finally:
        owner.kill()
        owner.communicate()
    wait_until(lambda: not is_running(server_pid) and not is_running(child_pid), "the end of server and child")


def test_memory_of_children_is_given_back(plain: ForkServer) -> None:
    """What calls allocate does not add up in the server."""
    before = psutil.Process(plain.pid).memory_info().rss
    for _ in range(10):
        plain.call(steps.grow, 100 << 20, deadline_s=DEADLINE_S)
    assert psutil.Process(plain.pid).memory_info().rss < before + (64 << 20)


def test_preload_calls() -> None:
    """What is preloaded as a call is done once, before any child is forked."""
    with ForkServer(["tests.workers.steps:remember:7"]) as server:
        assert server.call(steps.remember, 8, deadline_s=DEADLINE_S) == ["7", 8]
