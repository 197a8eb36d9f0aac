"""The main job on boards: emulated aarch64 boards of two CPUs, their tracker, a service and a worker for each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
import psutil
import pytest

from service.client import CacheMissError, Event, Tunery
from tests.boards import emulated
from tests.e2e.conftest import FAST, TUNERY, Service, running, wait_for
from tests.e2e.nets import write_net
from tests.workers.lending import running_agent, running_tracker
from tuning_db.keys import TensorSpec, canonical_json
from workers.devices.boards import probe_board
from workers.devices.identity import mcpu_of
from workers.devices.targets import target_of
from workers.devices.tracker import Tracker
from workers.linker import linker_for
from workers.packaging.on_board import OnBoard
from workers.packaging.reference import Comparison

pytestmark = [
    pytest.mark.boards,
    pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing())),
]

#: Key → qemu's name of its boards' CPU.
BOARDS = {"pi4": "cortex-a72", "pi5": "cortex-a76"}


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    with running_tracker() as tracker:
        yield tracker


@pytest.fixture(scope="module")
def agents(tracker: Tracker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, psutil.Process]]:
    """A board of each kind."""
    agents = {
        key: running_agent(tracker, key, tmp_path_factory.mktemp(key), python=[str(emulated.python_of(cpu))])
        for key, cpu in BOARDS.items()
    }
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        # Emulated, a start takes 10 s.
        yield dict(zip(agents, pool.map(stack.enter_context, agents.values()), strict=True))


INPUTS = {"image": [1, 3, 28, 28]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_net(tmp_path_factory.mktemp("model") / "net.onnx", 1)


@dataclass
class Farm:
    """A service with a worker for each kind of board."""

    service: Service
    devices: Mapping[str, str]  #: key → the name of its device
    workers: Mapping[str, psutil.Process]


@contextlib.contextmanager
def running_worker(service: Service, tracker: Tracker, key: str) -> Iterator[psutil.Process]:
    with (service.data_dir / f"worker-{key}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                TUNERY, "worker", "--data-dir", str(service.data_dir), "--tracker", f"127.0.0.1:{tracker.port}",
                "--key", key,
            ],
            env={**os.environ, **FAST, "TUNERY_REPORT_INTERVAL_S": "1"}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log,
        )  # fmt: skip
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def farm(
    tracker: Tracker, agents: Mapping[str, psutil.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Farm]:
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(running(tmp_path_factory.mktemp("farm") / "data"))
        workers = {key: stack.enter_context(running_worker(service, tracker, key)) for key in BOARDS}
        client = stack.enter_context(Tunery(service.url))
        devices: dict[str, str] = {}

        def all_known() -> bool:
            found = {device["identity"]["model"]: device["name"] for device in client.devices()}
            devices.update({"pi4": found.get("Cortex-A72 r0p3", ""), "pi5": found.get("Cortex-A76 r4p1", "")})
            return all(devices.values())

        wait_for(all_known, 120, "both kinds of board are known")
        yield Farm(service, devices, workers)


def test_the_emulated_cpus_are_what_their_boards_say(agents: Mapping[str, psutil.Process]) -> None:
    """The features that each board tells are there: what the kernel tells a program of the CPU has them too."""
    program = (
        "import ctypes, json, re, pathlib\n"
        "bits = {'asimd': 1, 'atomics': 8, 'fphp': 9, 'asimdrdm': 12, 'asimddp': 20}\n"
        "word = ctypes.CDLL(None).getauxval(16)\n"
        "told = re.search('Features.*: (.*)', pathlib.Path('/proc/cpuinfo').read_text())[1].split()\n"
        "print(json.dumps([sorted(n for n in bits if word >> bits[n] & 1), sorted(n for n in bits if n in told)]))"
    )
    found = {}
    for cpu in BOARDS.values():
        done = subprocess.run([emulated.python_of(cpu), "-c", program], capture_output=True, text=True, check=True)
        there, told = json.loads(done.stdout)
        assert there == told
        found[cpu] = "asimddp" in told
    assert found == {"cortex-a72": False, "cortex-a76": True}


#: Until a board that lost its power is on again.
AWAY_S = 20


def test_a_model_is_tuned_checked_and_fetched_for_a_board(
    farm: Farm, agents: Mapping[str, psutil.Process], model: Path, tmp_path: Path
) -> None:
    """A job for one board is tuned on it over RPC, its library is checked there against ONNX Runtime and fetched; the
    same request for the other board is a miss that names the CPU feature. That the board dies while it measures and is
    back after 20 s costs the job nothing but time (tvm#10240)."""
    agent = agents["pi4"]
    killed: list[psutil.Process] = []

    def kill(event: Event) -> None:
        if event.type == "trial" and not killed:
            agent.suspend()
            killed.extend(agent.children(recursive=True))
            for process in killed:
                process.kill()
            threading.Timer(AWAY_S, agent.resume).start()

    with Tunery(farm.service.url) as client:
        job = client.submit(model, inputs=INPUTS, device=farm.devices["pi4"], search={"trials": 8, "seconds": 300})
        job.wait(500, on_event=kill)
        assert job.job["trials_measured"] == 8
        assert killed
        assert not {process.pid for process in killed} & {process.pid for process in agent.children(recursive=True)}
        manifest = client.fetch(job.key, tmp_path / "library").manifest
        assert manifest["check"]["ok"]
        assert manifest["search"]["failed_trials"] == 0
        [device] = [device for device in client.devices() if device["name"] == farm.devices["pi4"]]
        assert (device["workers"], device["busy"], len(device["health"])) == (1, 0, 1)
        assert manifest["records"]["applied"] > 0
        assert set(manifest["latency"]) == {"untuned", "tuned"}
        [library] = (tmp_path / "library").glob("*.so")
        # ELF's e_machine: AArch64.
        assert library.read_bytes()[18:20] == bytes([183, 0])
        # It asks for no version of the board's C library (yangao07/longcallD#30).
        assert b"GLIBC_" not in library.read_bytes()
        with pytest.raises(CacheMissError) as miss:
            client.find(model, inputs=INPUTS, device=farm.devices["pi5"])
        different = {d["field"]: d for d in miss.value.nearest[0]["differences"]}
        wanted, stored = (set(different["device.features"][side]) for side in ("wanted", "stored"))
        assert "dotprod" in wanted - stored


def test_a_library_with_instructions_that_a_board_lacks(
    tracker: Tracker, agents: Mapping[str, psutil.Process], model: Path, tmp_path: Path
) -> None:
    """Code that may use dot products is refused by a board without them before it runs; forced, it dies of SIGILL, and
    that is said with the feature."""
    report = probe_board(tracker, "pi4", wait_s=60, deadline_s=120)
    target = json.loads(target_of(report.identity, mcpu_of(report.facts)))
    target["mattr"] = [*target["mattr"], "+dotprod"]
    source, library = tmp_path / "dot.s", tmp_path / "dot.so"
    source.write_text(
        ".arch armv8.2-a+dotprod\n.text\ngo: sdot v0.4s, v1.16b, v2.16b\nret\n"
        '.section .init_array, "aw"\n.xword go\n'  # runs when the library is loaded
    )
    subprocess.run([emulated.ASSEMBLER, "-o", source.with_suffix(".o"), source], check=True)
    linker_for("aarch64").link(library, [source.with_suffix(".o")])
    bound = onnx.load(model)
    for value in (*bound.graph.input, *bound.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(bound, tmp_path / "bound.onnx")
    said = {}
    for force in (False, True):
        board = OnBoard(
            f"127.0.0.1:{tracker.port}",
            "pi4",
            asdict(report.identity),
            canonical_json(target).decode(),
            120,
            60,
            force=force,
        )
        comparison = Comparison(
            str(tmp_path / "bound.onnx"), {"tuned": str(library)}, (TensorSpec("image", "float32", (1, 3, 28, 28)),),
            report.identity.cores, board=board,
        )  # fmt: skip
        spec = tmp_path / "comparison.json"
        spec.write_text(comparison.to_json())
        done = subprocess.run(
            [sys.executable, "-m", "workers.packaging.reference", str(spec), str(os.getpid())],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said[force] = json.loads(done.stdout)["failed"]
    assert said[False].startswith("refused before it ran: its target may use dotprod")
    assert "died of SIGILL" in said[True]
    assert "may use dotprod, which the board has not" in said[True]
