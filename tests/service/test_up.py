"""`tunery up` as a user runs it, with a worker of three lines in place of the one that needs TVM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

WORKER = """
import os, time
from pathlib import Path
from tests.samples import DEVICE, TARGET, TOOLCHAIN
from tuning_db.store import TuningStore

if Path("refuse").exists():
    raise SystemExit("TVM 0.1 is not a tested version")
store = TuningStore(os.environ["TUNERY_DATABASE_URL"])
while True:
    store.report_device("worker-1", DEVICE, TARGET, TOOLCHAIN)
    time.sleep(0.5)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to run in, whose `workers` comes before the real one."""
    package = tmp_path / "workers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(WORKER)
    return tmp_path


@contextmanager
def up(place: Path, *arguments: str, settings: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TUNERY_")}
    command = [sys.executable, "-m", "service.cli", "up", "--port", "0", "--data-dir", "data", *arguments]
    process = subprocess.Popen(
        command,
        cwd=place,
        env={**environment, "PYTHONPATH": str(root), **(settings or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What `up --json` prints when everything runs."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    document: dict[str, Any] = json.loads(line)
    return document


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "this should have happened long ago"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_up_runs_restarts_and_stops(place: Path) -> None:
    """It says where it answers, brings back a child that was killed under the same address, and stops both."""
    with up(place, "--json") as process:
        started = ready(process)
        url, pids = started["url"], started["pids"]
        assert len(started["devices"]) == 1
        assert (place / "data" / "url").read_text().strip() == url
        assert httpx.get(f"{url}/readyz", timeout=30).json() == {"database": "ok", "blobs": "ok", "broker": "ok"}

        os.kill(pids["api"], signal.SIGKILL)
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200, "a request waits for the new process"
        before = seen(url)
        os.kill(pids["worker"], signal.SIGKILL)
        wait_until(lambda: gone(pids["worker"]) and seen(url) > before)

        with up(place) as second:
            _, complaint = second.communicate(timeout=60)
            assert second.returncode == 5
            assert "another `tunery up`" in complaint

        # The old worker may have reported itself once more just before it was killed.
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert all(gone(pid) for pid in children)
        assert not (place / "data" / "url").exists()


def seen(url: str) -> str:
    """When the worker last reported its device."""
    return str(httpx.get(f"{url}/v1/devices", timeout=60).json()["devices"][0]["last_seen"])


def test_children_do_not_outlive_a_killed_up(place: Path) -> None:
    """SIGKILL leaves no API and no worker behind."""
    with up(place, "--json") as process:
        pids = ready(process)["pids"].values()
        process.kill()
        wait_until(lambda: all(gone(pid) for pid in pids))


def test_a_worker_that_refuses_to_start_ends_up(place: Path) -> None:
    """When the worker gives up at once, so does `up`, with the worker's own reason."""
    (place / "refuse").touch()
    with up(place) as process:
        output, complaint = process.communicate(timeout=120)
    assert process.returncode == 5
    assert output == ""
    assert "TVM 0.1 is not a tested version" in complaint


@pytest.mark.parametrize(
    ("arguments", "setting", "code", "says"),
    [
        (("--data-dir", "/proc/nope"), {}, 2, "--data-dir"),
        (("--data-dir", "workers/__init__.py"), {}, 2, "--data-dir"),
        ((), {"TUNERY_MAX_UPLOAD_BYTES": "zz"}, 2, "TUNERY_MAX_UPLOAD_BYTES is 'zz'"),
        ((), {"TUNERY_INSPECTOR": "zz"}, 2, "inspector"),
        (("--host", "nosuch.invalid"), {}, 5, "--host 'nosuch.invalid'"),
        (("--host", "192.0.2.1"), {}, 5, "--host '192.0.2.1'"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    place: Path, arguments: tuple[str, ...], setting: dict[str, str], code: int, says: str
) -> None:
    """A wrong option or variable is named before anything is started."""
    with up(place, *arguments, settings=setting) as process:
        output, complaint = process.communicate(timeout=60)
    assert (process.returncode, output) == (code, "")
    assert says in complaint
    assert "Traceback" not in complaint
    assert "--port 0" not in complaint
    assert not (place / "data" / "logs" / "api.log").exists()


def test_a_taken_port_is_said(place: Path) -> None:
    """A port that somebody else has is named, with the way out."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        up(place, "--port", str(taken.getsockname()[1])) as process,
    ):
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "--port 0" in complaint
