"""The Dockerfiles' steps really work, up to what needs a container engine: install, start, answer, stop."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.deployment import dockerfiles
from tests.deployment.dockerfiles import ROOT, Stage, environment
from tests.service.conftest import relu_model

API = dockerfiles.read(ROOT / "docker/api.Dockerfile")
WORKER = dockerfiles.read(ROOT / "docker/worker-cpu.Dockerfile")
INSTALL_TIMEOUT_S = 900


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Both builder stages carried out, each below a folder in place of its image's root.

    Side by side, since pip waits more than it computes; removed at once, since they are large.
    """
    roots = {name: tmp_path_factory.mktemp(name) for name in ("api", "worker")}
    with ThreadPoolExecutor() as pool:
        list(pool.map(dockerfiles.build, (API[0], WORKER[0]), (roots["api"], roots["worker"])))
    yield roots
    for root in roots.values():
        shutil.rmtree(root)


@pytest.mark.timeout(INSTALL_TIMEOUT_S)
def test_the_api_image_migrates_starts_reads_a_model_and_stops(roots: dict[str, Path]) -> None:
    """From the pinned requirements and the wheel alone, the API becomes healthy, takes an upload and obeys SIGTERM."""
    final = API[-1]
    programs = _venv(final, roots["api"]) / "bin"
    data = roots["api"] / "var/lib/tunery"
    data.mkdir(parents=True)
    env = {**environment(programs), "TUNERY_DATA_DIR": str(data)}

    # The command of the migrate service: the wheel holds the migrations, and the command finds them.
    subprocess.run([programs / "tunery", "db", "upgrade"], cwd=data, env=env, check=True, capture_output=True)
    # Only `CMD`'s port is changed, in both places where it stands: another one may be in use here.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [port if part == "8000" else part for part in final.only("CMD").exec_form]
    health = [part.replace(":8000/", f":{port}/") for part in _health_command(final)]
    with _running([str(programs / command[0]), *command[1:]], data, env) as process:
        deadline = time.monotonic() + 60
        while subprocess.run([programs / health[0], *health[1:]], env=env, check=False, capture_output=True).returncode:
            assert process.poll() is None, "the API ended while it started"
            assert time.monotonic() < deadline, "the API is not healthy"
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/models", files={"model": relu_model()}, timeout=60)
        assert answer.status_code == 201, answer.text
        assert [port["name"] for port in answer.json()["inputs"]] == ["x"]
        process.send_signal(_stop_signal(final))
        # uvicorn shuts down, then dies of the signal that it was sent.
        assert process.wait(timeout=30) == -_stop_signal(final)


def test_the_health_check_fails_while_nothing_answers() -> None:
    """HEALTHCHECK's command exits with an error when no API listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening: connections are refused
        url = f":{closed.getsockname()[1]}/"
        health = [part.replace(":8000/", url) for part in _health_command(API[1])]
        assert subprocess.run(health, check=False, capture_output=True, timeout=30).returncode != 0


@pytest.mark.timeout(INSTALL_TIMEOUT_S)
def test_the_worker_image_probes_this_machine_with_a_tested_toolchain(roots: dict[str, Path]) -> None:
    """From the pinned requirements and the wheel alone, the worker knows its device and runs a tested toolchain."""
    final, root = WORKER[-1], roots["worker"]
    python = _venv(final, root) / "bin/python"

    def run(*arguments: str) -> str:
        env = environment(python.parent)
        done = subprocess.run(
            [python, *arguments], cwd=root, env=env, check=False, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    probed = json.loads(run("-m", "workers.devices.probe"))
    assert probed["identity"]["kind"] == "cpu"
    assert probed["identity"]["cores"] > 0
    assert json.loads(probed["target"])["kind"] == "llvm"
    run("-c", "from workers import toolchain; toolchain.check(toolchain.installed())")
    typed = run("-c", "import service, workers, tuning_db as t; print(service.__path__, workers.__path__, t.__path__)")
    assert typed.count(str(root)) == 3, "the wheel's packages were imported, not the checkout's"
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    assert all((site / room / "py.typed").is_file() for room in ("service", "workers", "tuning_db"))
    # The command as the image starts it: it refuses arguments with its usage, so it was found and imported.
    started = [*final.only("CMD").exec_form[1:], "--no-such-option"]
    refused = subprocess.run(
        [python, *started], cwd=root, env=environment(python.parent), check=False, capture_output=True, text=True
    )
    assert (refused.returncode, refused.stderr.split(" ")[0]) == (2, "usage:")


@pytest.mark.parametrize("stages", [API, WORKER], ids=["api", "worker-cpu"])
def test_images_run_as_nobody_special_and_from_a_pinned_base(stages: tuple[Stage, ...]) -> None:
    """Both stages start from one Python of one Debian release, and the process is not root."""
    assert {stage.base for stage in stages} == {"python:3.11-slim-bookworm"}
    assert stages[-1].only("USER").rest == "10001:10001"
    assert "--uid 10001 " in " ".join(i.rest for i in stages[-1].instructions if i.name == "RUN")


def _venv(final: Stage, root: Path) -> Path:
    """Where the final stage takes its environment from."""
    (copied,) = (i.rest for i in final.instructions if i.name == "COPY")
    option, source, target = copied.split()
    assert (option, source) == ("--from=builder", target), "an environment works only where it was made"
    return dockerfiles.below(root, source)


def _health_command(final: Stage) -> list[str]:
    command: list[str] = json.loads(final.only("HEALTHCHECK").rest.partition(" CMD ")[2])
    return command


def _stop_signal(final: Stage) -> signal.Signals:
    return signal.Signals[final.only("STOPSIGNAL").rest]


@contextmanager
def _running(command: list[str], cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
