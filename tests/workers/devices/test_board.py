"""The board's agent, with a real tracker and TVM's real server on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tvm import rpc
from tvm.rpc.tracker import Tracker

from workers.devices import board, board_server, boards
from workers.devices.identity import CpuFacts, identity_of
from workers.devices.local_cpu import read_facts

KEY = "this-board"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within 90 s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    running = Tracker("127.0.0.1", 19190, 19290, silent=True)
    yield running
    running.terminate()


@pytest.fixture
def agent(tracker: Tracker, tmp_path: Path) -> Iterator[psutil.Process]:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "workers.devices.board", "--tracker", f"127.0.0.1:{tracker.port}", "--key", KEY,
            "--host", "127.0.0.1", "--port", "19090",
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    wait_until(lambda: free(tracker) == 1, "joining")
    yield psutil.Process(process.pid)
    process.terminate()
    process.wait(30)


def free(tracker: Tracker) -> int:
    """How many boards the tracker would give out at once."""
    summary = rpc.connect_tracker("127.0.0.1", tracker.port).summary()
    return int(summary["queue_info"].get(KEY, {"free": 0})["free"])


def open_session(tracker: Tracker) -> Any:
    return rpc.connect_tracker("127.0.0.1", tracker.port).request(KEY, session_timeout=60)


def close(session: Any) -> None:
    session.get_function("CloseRPCConnection")()


def test_join_and_probe(tracker: Tracker, agent: psutil.Process, tmp_path: Path) -> None:
    """A board that has joined tells who and how it is in a session; sessions write into the private folder alone."""
    session = open_session(tracker)
    answer = json.loads(session.get_function(board_server.PROBE)())
    assert identity_of(CpuFacts.from_json(answer["facts"])) == identity_of(read_facts())
    assert 0 < answer["free_memory_bytes"] <= psutil.virtual_memory().total
    assert answer["free_disk_bytes"] > 0
    session.upload(bytearray(b"inside"), "kernel.bin")
    assert session.download("kernel.bin") == b"inside"
    [written] = tmp_path.rglob("kernel.bin")
    assert written.relative_to(tmp_path).parts[0].startswith(f"tunery-board-{agent.pid}-")
    for name in ("../outside", str(tmp_path / "outside")):
        with pytest.raises(Exception, match="leaves the folder"):
            session.upload(bytearray(b"outside"), name)
    assert not list(tmp_path.rglob("outside"))
    close(session)
    agent.terminate()
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, "ending")
    assert not list(tmp_path.iterdir())


def test_server_comes_back(tracker: Tracker, agent: psutil.Process) -> None:
    """A server that was killed, or whose session died of a signal as of a kernel that crashed, is back by itself."""
    [server] = agent.children()
    server.kill()
    wait_until(lambda: not server.is_running(), "the end of the server")
    wait_until(lambda: free(tracker) == 1, "joining again")
    session = open_session(tracker)
    session.get_function(board_server.PROBE)()
    [server] = agent.children()
    [serving] = server.children()
    serving.send_signal(signal.SIGSEGV)
    wait_until(lambda: not server.is_running(), "the end of the server whose session crashed")
    wait_until(lambda: free(tracker) == 1, "joining after the crash")
    session = open_session(tracker)
    assert json.loads(session.get_function(board_server.PROBE)())["facts"]["cores"] > 0
    close(session)


def test_agent_killed(tracker: Tracker, agent: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is killed in the middle of a session leaves no process and no board at the tracker; its folder is
    removed by the next one, which leaves alone that of an agent that lives."""
    session = open_session(tracker)
    session.get_function(board_server.PROBE)()
    descendants = agent.children(recursive=True)
    assert len(descendants) == 2
    agent.kill()
    wait_until(lambda: not any(process.is_running() for process in descendants), "the end of server and session")
    wait_until(lambda: free(tracker) == 0, "leaving the tracker")
    agent.wait(30)
    living = tmp_path / f"tunery-board-{os.getpid()}-x"
    living.mkdir()
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board.remove_abandoned()
    assert list(tmp_path.iterdir()) == [living]


def test_boards_that_do_not_answer(tracker: Tracker, agent: psutil.Process) -> None:
    """Within a deadline a board is probed, or what is wrong is named: no tracker, no such key, in use, frozen."""
    at = ("127.0.0.1", tracker.port)
    report = boards.probe_board(at, KEY, deadline_s=60)
    assert report.identity == identity_of(read_facts())
    assert report.free_memory_bytes > 0
    with pytest.raises(boards.NoSuchBoard, match=f"'other'.*{KEY}"):
        boards.probe_board(at, "other", deadline_s=60)
    with pytest.raises(boards.TrackerUnreachable, match=r"127\.0\.0\.1:1:"):
        boards.probe_board(("127.0.0.1", 1), KEY, deadline_s=60)
    wait_until(lambda: free(tracker) == 1, "being free again")
    session = open_session(tracker)
    with pytest.raises(boards.BoardBusy, match=KEY):
        boards.probe_board(at, KEY, deadline_s=60)
    close(session)
    wait_until(lambda: free(tracker) == 1, "being free again")
    [server] = agent.children()
    server.suspend()
    with pytest.raises(boards.BoardSilent, match="frozen"):
        boards.probe_board(at, KEY, deadline_s=15)
    server.resume()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tracker", "here", "--key", "a"], "HOST:PORT"),
        (["--tracker", "here:9190", "--key", "a b"], "may hold"),
        (["--tracker", "here:9190", "--key", "a:b"], "may hold"),
        (["--tracker", "here:9190"], "--key"),
    ],
)
def test_wrong_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What TVM's protocol cannot carry is refused at once."""
    with pytest.raises(SystemExit) as ended:
        board.Board.parse(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_command() -> None:
    """`tunery board` is the agent."""
    command = [sys.executable, "-c", "from service.cli import main; main()", "board", "--tracker", "here", "--key", "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "HOST:PORT" in done.stderr) == (2, True)


def test_health(tmp_path: Path) -> None:
    """Governor and temperature are read as the kernel shows them; what it does not show is None."""
    assert board_server.governor(tmp_path) is None
    assert board_server.temperature_c(tmp_path) is None
    for number, name in enumerate(("performance", "ondemand", "ondemand")):
        folder = tmp_path / f"cpu{number}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
    for number, text in enumerate(("48312\n", "51000\n", "")):
        folder = tmp_path / f"thermal_zone{number}"
        folder.mkdir()
        (folder / "temp").write_text(text)
    assert board_server.governor(tmp_path) == "ondemand,performance"
    assert board_server.temperature_c(tmp_path) == 51.0


def test_board_needs_little() -> None:
    """A board needs none of what the service and the search are made of."""
    program = (
        "import sys, workers.devices.board, workers.devices.board_server\n"
        "print({'sqlalchemy', 'celery', 'pydantic', 'structlog', 'numpy', 'onnx', 'xgboost', 'tvm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
