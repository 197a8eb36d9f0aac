"""What becomes of a search's trials when boards are several, and when they fail: real agents of this machine."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.workers.conftest import Host
from tests.workers.lending import free, joined, running_agent, running_tracker, wait_until
from tuning_db.errors import DeviceLost
from tuning_db.trials import Failed, FailureKind, Measured
from workers.devices.board_session import Session
from workers.devices.tracker import Boards, Tracker
from workers.search.candidates import Built, Measurement
from workers.search.forkserver import ForkServer
from workers.search.rpc_lane import RpcRunner

KEY = "twins"
ONCE = Measurement(repeat=1, min_repeat_s=0.0, threads=1)


@pytest.fixture(scope="module")
def running() -> Iterator[ExitStack]:
    """What keeps the tracker running: a test ends it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def tracker(running: ExitStack) -> Tracker:
    return running.enter_context(running_tracker())


@pytest.fixture(scope="module")
def agents(tracker: Tracker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """Two boards of one identity."""
    folder = tmp_path_factory.mktemp("agents")
    with (
        running_agent(tracker, KEY, folder, count=1) as first,
        running_agent(tracker, KEY, folder, count=2) as second,
    ):
        yield [first, second]


@pytest.fixture
def twins(tracker: Tracker, agents: list[psutil.Process]) -> Boards:
    """Both boards, free."""
    wait_until(lambda: free(tracker, KEY) == 2, "both boards being free")
    return Boards(tracker, KEY, patience_s=60)


def kernel(folder: Path, name: str, body: str) -> Built:
    """A candidate without arguments that runs the C statements `body` in each call."""
    source = folder / f"{name}.c"
    source.write_text(
        "#include <unistd.h>\n"
        f"int __tvm_ffi_main(void *self, void *arguments, int count, void *result) {{ {body} return 0; }}\n"
    )
    subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
    return Built(str(source.with_suffix(".so")), (), None)


def steps(agent: psutil.Process) -> int:
    """How many steps run on its board: its processes besides the server and the session."""
    return max(0, len(agent.children(recursive=True)) - 2)


def test_trials_are_spread(
    server: ForkServer, host: Host, twins: Boards, agents: list[psutil.Process], tmp_path: Path
) -> None:
    """Two boards measure at the same time, and outcomes come in the candidates' order. The kernels sleep: a core for
    each board is not to be had everywhere."""
    candidates = [kernel(tmp_path, f"sleeps{number}", f"usleep({300 + 100 * number}000);") for number in range(3)]
    runner = RpcRunner(server, twins, host.identity, ONCE)
    assert runner.at_once > 1
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(runner.run_all, [(candidate, None) for candidate in candidates])
        wait_until(lambda: all(steps(agent) for agent in agents), "both boards measuring")
        outcomes = result.result()
    found = [outcome.run_s[0] for outcome in outcomes if isinstance(outcome, Measured)]
    assert len(found) == 3
    assert found == sorted(found)
    # Each board is judged by its own speed.
    assert set(runner.guard.level) == {f"@{address}" for address in twins.tracker.boards(KEY)}


def test_both_boards_are_asked(
    server: ForkServer, host: Host, twins: Boards, agents: list[psutil.Process], tmp_path: Path
) -> None:
    """A candidate that crashes has failed when both boards have said so, and both are free again: nothing was lost."""
    warnings: list[str] = []
    runner = RpcRunner(server, twins, host.identity, ONCE, warn=warnings.append)
    servers = [agent.children()[0].pid for agent in agents]
    [outcome] = runner.run_all([(kernel(tmp_path, "crashes", "*(volatile int *)0 = 1;"), None)])
    assert outcome == Failed(FailureKind.RUN_CRASH, "died of SIGSEGV")
    wait_until(lambda: free(twins.tracker, KEY) == 2, "both boards being free")
    assert [agent.children()[0].pid for agent in agents] == servers
    assert warnings == []


def test_board_killed_in_mid_measure(
    server: ForkServer, host: Host, twins: Boards, agents: list[psutil.Process], tmp_path: Path
) -> None:
    """A board that dies while a candidate runs says nothing of it: the next board measures it (tvm#10240). The dead
    one's server is back by itself."""
    warnings: list[str] = []
    runner = RpcRunner(server, twins, host.identity, ONCE, warn=warnings.append)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(runner.run_all, [(kernel(tmp_path, "sleeps", "usleep(700000);"), None)])
        wait_until(lambda: any(steps(agent) for agent in agents), "a step's start")
        [agent] = [agent for agent in agents if steps(agent)]
        agent.children()[0].kill()
        [outcome] = result.result()
    assert isinstance(outcome, Measured)
    assert outcome.run_s[0] >= 0.7
    assert len(warnings) == 1
    wait_until(lambda: free(twins.tracker, KEY) == 2, "both boards being free")


def test_kernel_that_never_ends(
    server: ForkServer, host: Host, twins: Boards, agents: list[psutil.Process], tmp_path: Path
) -> None:
    """A kernel that never ends is killed on the board when its time is up, and has failed when both boards have said
    so; both are free again, and nothing of it runs on."""
    warnings: list[str] = []
    runner = RpcRunner(server, twins, host.identity, ONCE, timeout_s=1, warn=warnings.append)
    [outcome] = runner.run_all([(kernel(tmp_path, "hangs", "for (;;) ;"), None)])
    assert outcome == Failed(FailureKind.RUN_TIMEOUT, "killed after 1 s")
    wait_until(lambda: free(twins.tracker, KEY) == 2, "both boards being free")
    assert not any(steps(agent) for agent in agents)
    assert warnings == []


def test_time_in_the_queue(server: ForkServer, host: Host, twins: Boards, tmp_path: Path) -> None:
    """What a candidate waits until a board is free for it is no part of its deadline (tvm#13963)."""
    timeout_s = 2.0
    sessions = [Session(twins.request(), timeout_s=600) for _ in range(2)]
    runner = RpcRunner(server, twins, host.identity, ONCE, timeout_s=timeout_s)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(runner.run_all, [(kernel(tmp_path, "quick", ""), None)])
        time.sleep(timeout_s + 0.5)
        assert not result.done()
        for session in sessions:
            session.close()
        [outcome] = result.result()
    assert isinstance(outcome, Measured)


def test_frozen_board(
    server: ForkServer, host: Host, twins: Boards, agents: list[psutil.Process], tmp_path: Path
) -> None:
    """A board that does not answer in time is passed over, and serves again when it thaws; when all are frozen for
    longer than anybody is to wait the device is lost, and the message says of which board."""
    warnings: list[str] = []
    runner = RpcRunner(server, twins, host.identity, ONCE, connect_s=1.5, warn=warnings.append)
    built = kernel(tmp_path, "quick", "")
    frozen = agents[0].children()[0]
    frozen.suspend()
    outcomes = runner.run_all([(built, None)] * 3)
    assert [type(outcome) for outcome in outcomes] == [Measured] * 3
    assert [warning for warning in warnings if "does not answer" in warning]
    other = agents[1].children()[0]
    other.suspend()
    impatient = RpcRunner(server, replace(twins, patience_s=1.0), host.identity, ONCE, connect_s=1.5)
    with pytest.raises(DeviceLost, match=r"127\.0\.0\.1"):
        impatient.run_all([(built, None)])
    frozen.resume()
    other.resume()
    wait_until(lambda: free(twins.tracker, KEY) == 2, "both boards being free")


def test_disk_is_full(
    server: ForkServer, host: Host, twins: Boards, agents: list[psutil.Process], tmp_path: Path
) -> None:
    """A board that cannot keep the library, as when its disk is full, is passed over: the candidate has not failed."""
    warnings: list[str] = []
    runner = RpcRunner(server, twins, host.identity, ONCE, warn=warnings.append)
    full = agents[0].children()[0]
    limits = full.rlimit(resource.RLIMIT_FSIZE)
    full.rlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    outcomes = runner.run_all([(kernel(tmp_path, "quick", ""), None)] * 3)
    full.rlimit(resource.RLIMIT_FSIZE, limits)
    assert [type(outcome) for outcome in outcomes] == [Measured] * 3
    assert any("did not arrive as it was sent" in warning for warning in warnings)


def test_board_of_another_device(server: ForkServer, host: Host, twins: Boards, tmp_path: Path) -> None:
    """Boards of another identity than the job's are not measured on, and are named."""
    other = replace(host.identity, model="Other")
    runner = RpcRunner(server, replace(twins, patience_s=0.5), other, ONCE)
    with pytest.raises(DeviceLost, match=f"is a {host.identity.name}, not a {other.name}"):
        runner.run_all([(kernel(tmp_path, "quick", ""), None)])


def test_nobody_has_joined(server: ForkServer, host: Host, twins: Boards, tmp_path: Path) -> None:
    """Without any board the device is lost when nobody is to wait any longer; keys that there are are named."""
    runner = RpcRunner(server, Boards(twins.tracker, "nobody", patience_s=0.5), host.identity, ONCE)
    with pytest.raises(DeviceLost, match=f"under key 'nobody'; keys there are: {KEY}"):
        runner.run_all([(kernel(tmp_path, "quick", ""), None)])


def test_tracker_restarts(server: ForkServer, host: Host, twins: Boards, running: ExitStack, tmp_path: Path) -> None:
    """While the tracker is away a trial waits; boards and trial come back by themselves."""
    runner = RpcRunner(server, replace(twins, patience_s=300), host.identity, ONCE)
    running.close()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(runner.run_all, [(kernel(tmp_path, "quick", ""), None)])
        running.enter_context(running_tracker(twins.tracker.port))
        [outcome] = result.result()
    assert isinstance(outcome, Measured)
    wait_until(lambda: joined(twins.tracker, KEY) == 2, "both boards joining again")
