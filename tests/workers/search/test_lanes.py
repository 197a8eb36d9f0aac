"""Builder and runners: failures become values that say what went wrong, one candidate's is nobody else's.

What is asked of runners is asked of each: of this machine's, of that for boards, with this machine as the board, and of
that for GPUs, with this machine's CPU in a GPU's place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.workers.conftest import Host
from tests.workers.devices import recordings
from tests.workers.lending import lent_board
from tests.workers.search import fake_gpu
from tests.workers.search.samples import CPU, double, matmul
from tuning_db.errors import DeviceLost
from tuning_db.keys import DeviceIdentity
from tuning_db.trials import Failed, FailureKind, Measured
from workers.devices.identity import gpu_identity_of
from workers.devices.tracker import Boards
from workers.search import forked_steps, gpu_sampling, intrinsics
from workers.search.candidates import Built, Candidate, Measurement
from workers.search.forkserver import ForkServer, ServerDied
from workers.search.lanes import GpuRunner, LocalBuilder, LocalRunner, Runner
from workers.search.rpc_lane import RpcRunner
from workers.search.space import Space

QUICK = Measurement(repeat=2, min_repeat_s=0.001, threads=1)
H100 = gpu_identity_of(replace(recordings.H100, driver=fake_gpu.MACHINE.driver))


@pytest.fixture(scope="module")
def candidates(server: ForkServer, host: Host) -> list[Candidate]:
    traces = server.call(forked_steps.propose, host.target_json, matmul(), Space(), [], None, CPU, 6, 1, deadline_s=120)
    return [Candidate(matmul(), trace) for trace in traces]


@pytest.fixture(scope="module")
def boards() -> Iterator[Boards]:
    with lent_board("lanes") as tracker:
        yield Boards(tracker, "lanes")


MakeRunner = Callable[[float], Runner]


@pytest.fixture
def make_gpu_runner(
    reference: Built, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float, DeviceIdentity], GpuRunner]]:
    """A runner for this machine's CPU in the place of an H100."""
    real, made = gpu_sampling.preload, []
    monkeypatch.setattr(gpu_sampling, "preload", lambda *given: (fake_gpu.INSTALL, *real(*given)))

    def make(timeout_s: float, device: DeviceIdentity) -> GpuRunner:
        made.append(GpuRunner(device, lambda: reference, QUICK, timeout_s=timeout_s))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.fixture(params=["local", "rpc", "gpu"])
def make_runner(request: pytest.FixtureRequest, server: ForkServer, host: Host) -> MakeRunner:
    """A runner with so many seconds for a candidate."""
    if request.param == "local":
        return lambda timeout_s: LocalRunner(server, QUICK, timeout_s=timeout_s)
    if request.param == "gpu":
        return partial(request.getfixturevalue("make_gpu_runner"), device=H100)
    boards: Boards = request.getfixturevalue("boards")
    return lambda timeout_s: RpcRunner(server, boards, host.identity, QUICK, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def reference(
    server: ForkServer, host: Host, candidates: list[Candidate], tmp_path_factory: pytest.TempPathFactory
) -> Built:
    folder = str(tmp_path_factory.mktemp("reference"))
    built: Built = server.call(forked_steps.build, host.target_json, candidates[0], folder, deadline_s=120)
    return built


def run(runner: Runner, built: Built, hopeless_s: float | None = None) -> Measured | Failed:
    [outcome] = runner.run_all([(built, hopeless_s)])
    return outcome


@pytest.fixture
def builder(server: ForkServer, host: Host) -> Iterator[LocalBuilder]:
    with LocalBuilder(server, host.target_json, workers=2, timeout_s=120) as builder:
        yield builder


def test_build_and_run(make_runner: MakeRunner, builder: LocalBuilder, candidates: list[Candidate]) -> None:
    """Results come in the order of the candidates, and a library is gone once it was removed. One that is hopeless is
    sampled once."""
    results = builder.build(candidates)
    assert len(results) == len(candidates)
    runner = make_runner(60)
    outcomes = runner.run_all([(built, 0.0) for built in results if isinstance(built, Built)])
    assert [len(outcome.run_s) for outcome in outcomes if isinstance(outcome, Measured)] == [1] * len(candidates)
    for candidate, built in zip(candidates, results, strict=True):
        assert isinstance(built, Built)
        assert candidate.digest[:20] in built.library
        outcome = run(runner, built)
        assert isinstance(outcome, Measured)
        assert len(outcome.run_s) == 2
        builder.remove(built)
        assert not Path(built.library).exists()
    assert builder.build([]) == []


def test_compare(make_runner: MakeRunner, builder: LocalBuilder, candidates: list[Candidate]) -> None:
    """Candidates that are compared get one outcome each; that one of them cannot be run is a failure of the
    comparison, not an exception."""
    built = [b for b in builder.build(candidates[:3]) if isinstance(b, Built)]
    runner = make_runner(60)
    outcomes = runner.compare(built)
    assert isinstance(outcomes, list)
    assert [len(outcome.run_s) for outcome in outcomes] == [2, 2, 2]
    failed = runner.compare([*built, Built("gone.so", (), None)])
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.RUN_ERROR


def test_failures_of_builds(builder: LocalBuilder, candidates: list[Candidate]) -> None:
    """A candidate that does not build is a failure with TVM's message; those beside it are built."""
    wrong = Candidate(double(), candidates[0].trace)
    damaged = Candidate(matmul(), json.dumps([[["NoSuchInstruction", [], [], []]], []]))
    first, second, third = builder.build([wrong, candidates[0], damaged])
    assert isinstance(first, Failed)
    assert (first.kind, bool(first.message)) == (FailureKind.BUILD_ERROR, True)
    assert isinstance(second, Built)
    assert isinstance(third, Failed)
    assert "NoSuchInstruction" in third.message


def test_build_that_takes_too_long(server: ForkServer, host: Host, candidates: list[Candidate]) -> None:
    """A build past its deadline is killed, and is a failure of its own kind."""
    with LocalBuilder(server, host.target_json, workers=1, timeout_s=0.0) as builder:
        [result] = builder.build(candidates[:1])
    assert result == Failed(FailureKind.BUILD_TIMEOUT, "killed after 0 s")


def test_server_that_dies(host: Host, candidates: list[Candidate]) -> None:
    """A candidate whose fork server was killed is built, and measured, by a new one: it has not failed."""
    with (
        ForkServer(intrinsics.preload(host.intrinsics)) as server,
        LocalBuilder(server, host.target_json, workers=2, timeout_s=120) as builder,
    ):
        os.kill(server.pid, signal.SIGKILL)
        built = builder.build(candidates[:2])
        os.kill(server.pid, signal.SIGKILL)
        outcomes = [LocalRunner(server, QUICK, timeout_s=60).run(b) for b in built if isinstance(b, Built)]
        server.close()
        with pytest.raises(ServerDied):
            LocalRunner(server, QUICK).run(Built("gone", (), None))
    assert [type(outcome) for outcome in outcomes] == [Measured, Measured]


def test_folder(server: ForkServer, host: Host, candidates: list[Candidate]) -> None:
    """Whatever was built and not measured is removed when the builder is closed."""
    with LocalBuilder(server, host.target_json, workers=1, timeout_s=120) as builder:
        [built] = builder.build(candidates[:1])
        assert isinstance(built, Built)
        folder = Path(built.library).parent
        assert folder.is_dir()
    assert not folder.exists()


def library(folder: Path, start: str) -> Built:
    """A shared library that runs the C statements `start` when it is loaded."""
    assert shutil.which("gcc"), "these tests need gcc, as the README says"
    source, path = folder / "candidate.c", folder / "candidate.so"
    source.write_text(f"#include <stdlib.h>\n__attribute__((constructor)) static void go(void) {{ {start} }}\n")
    subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "-o", path, source], check=True)
    return Built(str(path), (("float32", (4,)),), None)


@pytest.mark.parametrize(
    ("start", "kind", "message"),
    [
        ("*(volatile int *)0 = 1;", FailureKind.RUN_CRASH, "died of SIGSEGV"),
        ("abort();", FailureKind.RUN_CRASH, "died of SIGABRT"),
        ('__asm__(".byte 0x0f, 0x0b");', FailureKind.RUN_CRASH, "died of SIGILL"),
        ("_Exit(3);", FailureKind.RUN_CRASH, "left with status 3"),
        ("for (;;) ;", FailureKind.RUN_TIMEOUT, "killed after 1 s"),
    ],
)
def test_candidate_that_breaks_its_process(
    start: str, kind: FailureKind, message: str, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """A candidate that crashes, leaves or hangs is a failure with its reason."""
    built = library(tmp_path, start)
    assert run(make_runner(1), built) == Failed(kind, message)


def test_library_without_a_kernel(make_runner: MakeRunner, tmp_path: Path) -> None:
    """A library that loads but has nothing to run is an error with its message."""
    outcome = run(make_runner(60), library(tmp_path, ""))
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.RUN_ERROR
    assert "main" in outcome.message


def test_file_that_is_no_library(make_runner: MakeRunner, tmp_path: Path) -> None:
    """A damaged library, or one that is missing, is an error with its message."""
    path = tmp_path / "candidate.so"
    path.write_bytes(b"not a library")
    for name in ("candidate.so", "missing-candidate.so"):
        outcome = run(make_runner(60), Built(str(path.with_name(name)), (), None))
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.RUN_ERROR
        assert "candidate.so" in outcome.message


def test_a_gpu_that_is_not_the_one(
    make_gpu_runner: Callable[[float, DeviceIdentity], GpuRunner], reference: Built
) -> None:
    """A GPU is measured on only while it is the one of the job, and says how it was; that another one is there, or
    none, ends the job and fails no candidate."""
    runner = make_gpu_runner(60, H100)
    assert isinstance(run(runner, reference), Measured)
    [found] = runner.guard.latest.values()
    assert (found.temperature_c, found.khz) == (41.0, 1_980_000)
    other = make_gpu_runner(60, replace(H100, driver="570.1"))
    with pytest.raises(DeviceLost, match=r"this GPU is a .* driver 580"):
        run(other, reference)
