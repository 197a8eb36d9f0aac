"""How processes hold on to each other, with real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import psutil
import pytest

from workers.processes import ATTEMPT_VARIABLE, attempt_mark, find_marked, kill_marked

SLEEP = "import time; print('ready', flush=True); time.sleep(3600)"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within 30 s"
        time.sleep(0.02)


@pytest.fixture
def mark() -> str:
    return attempt_mark(uuid.uuid4().hex, 1)


def start(program: str, mark: str | None = None) -> subprocess.Popen[str]:
    environment = dict(os.environ) | ({} if mark is None else {ATTEMPT_VARIABLE: mark})
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_kill_marked(mark: str) -> None:
    """Every process that carries the mark is killed, whatever session it made; others are left alone."""
    daemon = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print("ready", flush=True)
time.sleep(3600)
"""
    process, other = start(daemon, mark), start(SLEEP, mark + "0")
    try:
        found = find_marked(mark)
        assert process.pid in found
        assert len(found) == 2
        kill_marked(mark)
        assert find_marked(mark) == []
        assert process.wait(timeout=30) == -9
        assert other.poll() is None
    finally:
        end(process)
        end(other)


def test_kill_marked_that_keep_coming(mark: str) -> None:
    """Processes that are started while the others are being killed are killed too."""
    breeder = """
import subprocess, sys, time
print("ready", flush=True)
while True:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    time.sleep(0.01)
"""
    process = start(breeder, mark)
    try:
        wait_until(lambda: len(find_marked(mark)) > 5, "a family of five")
        kill_marked(mark)
        assert find_marked(mark) == []
    finally:
        kill_marked(mark)
        end(process)


def test_nobody_marked(mark: str) -> None:
    """Without such a process there is nothing to do, and this process is never among them."""
    assert find_marked(mark) == []
    kill_marked(mark)


def test_die_with_parent() -> None:
    """A process that asked for it is killed by the kernel when its parent is."""
    child = (
        "import os, sys, time; from workers.processes import die_with_parent; "
        "die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(3600)"
    )
    parent = f"""
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", {child!r}, str(os.getpid())], stdout=subprocess.PIPE, text=True, start_new_session=True
)
print("ready", child.stdout.readline(), flush=True)
time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        assert psutil.pid_exists(pid)
    finally:
        end(process)
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        "the child's end",
    )


def test_parent_that_is_gone_already() -> None:
    """A process whose parent has ended before it could ask ends at once."""
    program = (
        "import sys; from workers.processes import die_with_parent; "
        "die_with_parent(int(sys.argv[1])); print('still here')"
    )
    someone_else = 1 if os.getpid() != 1 else 2
    done = subprocess.run(
        [sys.executable, "-c", program, str(someone_else)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
