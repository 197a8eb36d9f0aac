"""The board's agent and its server, with a real tracker and TVM's real server on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.workers.conftest import Host
from tests.workers.lending import free, joined, running_agent, running_tracker, wait_until
from workers.devices import board, board_roof, boards
from workers.devices.board_session import NotReady, Session
from workers.devices.health import conditions
from workers.devices.identity import CpuFacts, identity_of
from workers.devices.local_cpu import read_facts
from workers.devices.roof import RoofNotMeasured
from workers.devices.tracker import BoardBusy, Boards, NoSuchBoard, Tracker, TrackerUnreachable
from workers.search.forkserver import ChildError

KEY = "this-board"


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    with running_tracker() as tracker:
        yield tracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent")


@pytest.fixture(scope="module")
def agent(tracker: Tracker, folder: Path) -> Iterator[psutil.Process]:
    with running_agent(tracker, KEY, folder) as agent:
        yield agent


def open_session(tracker: Tracker) -> Session:
    return Session(tracker.request(KEY, timeout_s=60), timeout_s=600)


def test_join_and_probe(tracker: Tracker, agent: psutil.Process, folder: Path) -> None:
    """A board that has joined tells who and how it is; sessions write into the private folder alone, and a step is not
    begun with a file that has not arrived as it was sent, as on a disk that is full."""
    session = open_session(tracker)
    answer = session.probe()
    assert identity_of(CpuFacts.from_json(answer["facts"])) == identity_of(read_facts())
    assert 0 < answer["free_memory_bytes"] <= psutil.virtual_memory().total
    assert answer["free_disk_bytes"] > 0
    assert f"glibc {answer['glibc']}" == os.confstr("CS_GNU_LIBC_VERSION")
    source = folder.parent / "kernel.so"
    source.write_bytes(b"inside")
    session.upload(source, "kernel.so")
    assert session.download("kernel.so") == b"inside"
    [written] = folder.rglob("kernel.so")
    assert written.relative_to(folder).parts[0].startswith(f"tunery-board-{agent.pid}-")
    for name in ("../outside", str(folder / "outside")):
        with pytest.raises(Exception, match="leaves the folder"):
            session.upload(source, name)
    assert not list(folder.rglob("outside"))
    with pytest.raises(ChildError, match=r"kernel\.so"):
        session.run("infer", ["kernel.so", [], [], 1], deadline_s=60)
    written.write_bytes(b"in")
    with pytest.raises(NotReady, match=r"kernel\.so did not arrive as it was sent; \d+ bytes are free"):
        session.run("infer", ["kernel.so", [], [], 1], deadline_s=60)
    session.close()
    wait_until(lambda: free(tracker, KEY) == 1, "being free again")


def test_boards_that_do_not_answer(tracker: Tracker, agent: psutil.Process) -> None:
    """Within a deadline a board is probed, or what is wrong is named: no tracker, no such key (tvm#11058), in use,
    frozen."""
    report = boards.probe_board(tracker, KEY, wait_s=60, deadline_s=60)
    assert report.identity == identity_of(read_facts())
    assert report.free_memory_bytes > 0
    with pytest.raises(NoSuchBoard, match=f"'other'.*{KEY}"):
        boards.probe_board(tracker, "other")
    with pytest.raises(TrackerUnreachable, match=r"127\.0\.0\.1:1:"):
        boards.probe_board(Tracker("127.0.0.1", 1), KEY)
    session = open_session(tracker)
    with pytest.raises(BoardBusy, match=KEY):
        boards.probe_board(tracker, KEY, wait_s=0.1)
    session.close()
    wait_until(lambda: free(tracker, KEY) == 1, "being free again")
    [server] = agent.children()
    server.suspend()
    with pytest.raises(boards.BoardSilent, match="frozen"):
        boards.probe_board(tracker, KEY, deadline_s=1)
    server.resume()
    wait_until(lambda: free(tracker, KEY) == 1, "joining again")


def test_roof(tracker: Tracker, agent: psutil.Process, host: Host) -> None:
    """What a board can do at most is measured on it by the kernels that measure this machine; where no board serves
    that is said."""
    found = board_roof.measure(Boards(tracker, KEY, 60), host.identity, host.target_json)
    assert 1e8 < found.flops_per_s_one_thread <= found.flops_per_s < 1e15
    assert 1e7 < found.bytes_per_s < 1e13
    with pytest.raises(RoofNotMeasured, match="no board has joined under key 'nobody'"):
        board_roof.measure(Boards(tracker, "nobody", 0.5), host.identity, host.target_json)


def test_board_that_cannot_be_reached(tracker: Tracker, tmp_path: Path) -> None:
    """A board that tells the tracker an address at which nobody reaches it is named with that address, in the time that
    any board has to answer (tvm#11058)."""
    nowhere = "127.0.0.77"
    with (
        running_agent(tracker, "nowhere", tmp_path, arguments=["--address", nowhere]),
        pytest.raises(boards.BoardSilent, match=rf"key 'nowhere': the board at {nowhere}:\d+ could not be asked"),
    ):
        boards.probe_board(tracker, "nowhere")


def test_something_else_that_listens() -> None:
    """A server that is no tracker is named as that, at once."""
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TrackerUnreachable, match="is not a tracker"):
            Tracker("127.0.0.1", listener.getsockname()[1]).joined()
        thread.join()


_HANGING_CLIENT = """
import json, sys
from workers.devices.board_session import Session, import_client
from workers.devices.tracker import Tracker
import_client()
session = Session(Tracker("127.0.0.1", int(sys.argv[1])).request(sys.argv[2], timeout_s=60), timeout_s=600)
session.upload(sys.argv[3], "hangs.so")
print("runs", flush=True)
session.run("infer", ["hangs.so", [], [], 1], deadline_s=600)
"""


def test_client_killed_in_mid_session(tracker: Tracker, agent: psutil.Process, tmp_path: Path) -> None:
    """A board is free again at once when the client is killed, though a kernel runs on it that never ends
    (tvm#12779)."""
    (tmp_path / "hangs.c").write_text("__attribute__((constructor)) static void go(void) { for (;;) ; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "hangs.so", tmp_path / "hangs.c"], check=True)
    client = subprocess.Popen(
        [sys.executable, "-c", _HANGING_CLIENT, str(tracker.port), KEY, str(tmp_path / "hangs.so")],
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"runs\n"
    [server] = agent.children()
    # The session, who watches its client, and the step.
    wait_until(lambda: len(server.children(recursive=True)) == 3, "the step's start")
    descendants = server.children(recursive=True)
    assert free(tracker, KEY) == 0
    client.kill()
    client.wait()
    client.stdout.close()
    wait_until(lambda: free(tracker, KEY) == 1, "being free again", 10)
    wait_until(lambda: not any(process.is_running() for process in descendants), "the end of the kernel", 10)
    assert server.is_running()


def test_server_comes_back(tracker: Tracker, agent: psutil.Process) -> None:
    """A server that was killed, or whose session died of a signal, is back by itself."""
    session = open_session(tracker)
    session.probe()
    [server] = agent.children()
    [serving] = server.children()
    serving.send_signal(signal.SIGSEGV)
    wait_until(lambda: not server.is_running(), "the end of the server whose session crashed")
    wait_until(lambda: free(tracker, KEY) == 1, "joining after the crash")
    [server] = agent.children()
    server.kill()
    wait_until(lambda: not server.is_running(), "the end of the server")
    wait_until(lambda: free(tracker, KEY) == 1, "joining again")


def test_agent_ends(tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is killed in the middle of a session leaves no process and no board at the tracker; its folder is
    removed by the next one, which leaves alone that of an agent that lives. One that is told to end leaves nothing."""
    key = "mortal"
    with running_agent(tracker, key, tmp_path) as agent:
        session = Session(tracker.request(key, timeout_s=60), timeout_s=60)
        session.probe()
        descendants = agent.children(recursive=True)
        assert len(descendants) == 3  # server, session, and who watches its client
        agent.kill()
        wait_until(lambda: not any(process.is_running() for process in descendants), "the end of server and session")
        wait_until(lambda: joined(tracker, key) == 0, "leaving the tracker")
    living = tmp_path / f"tunery-board-{os.getpid()}-x"
    living.mkdir()
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board.remove_abandoned()
    assert list(tmp_path.iterdir()) == [living]
    living.rmdir()
    with running_agent(tracker, key, tmp_path):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


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
    """Governor, clock and temperature are read as the kernel shows them; what it does not show is None."""
    found = conditions(tmp_path)
    assert (found.temperature_c, found.khz, found.governor) == (None, None, None)
    for number, (name, khz) in enumerate((("performance", "600000"), ("ondemand", "1500000"), ("ondemand", ""))):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
        (folder / "scaling_cur_freq").write_text(khz)
    for number, text in enumerate(("48312\n", "51000\n", "")):
        folder = tmp_path / f"sys/class/thermal/thermal_zone{number}"
        folder.mkdir(parents=True)
        (folder / "temp").write_text(text)
    found = conditions(tmp_path)
    assert (found.temperature_c, found.khz, found.governor) == (51.0, 1_500_000, "ondemand,performance")
    assert found.reference_s > 0


def test_board_needs_little() -> None:
    """A board needs none of what the service and the search are made of."""
    program = (
        "import sys, workers.devices.board, workers.devices.board_server\n"
        "print({'sqlalchemy', 'celery', 'pydantic', 'structlog', 'numpy', 'onnx', 'xgboost', 'tvm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
