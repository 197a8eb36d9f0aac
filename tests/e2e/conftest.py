"""A whole service as users start it: `tunery up` as a process, a small real model, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.client import Tunery

TUNERY = str(Path(sys.executable).with_name("tunery"))

#: Faults are noticed quickly, and events told so: everything else is as users have it.
FAST = {
    "TUNERY_HEARTBEAT_TIMEOUT_S": "4",
    "TUNERY_SWEEP_INTERVAL_S": "0.5",
    "TUNERY_UNCLAIMED_AFTER_S": "3",
    "TUNERY_HEARTBEAT_INTERVAL_S": "0.5",
    "TUNERY_EVENT_POLL_S": "0.1",
}


def wait_for(condition: Callable[[], Any], timeout_s: float = 60, what: str = "") -> Any:
    """The first truthy answer of `condition`; fails the test when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what or condition}")


@dataclass
class Service:
    """A running `tunery up`."""

    url: str
    data_dir: Path
    process: subprocess.Popen[str]
    pids: Mapping[str, int]

    def processes(self) -> dict[int, str]:
        """pid → command line of every live process of this service, whatever its session or parent."""
        wanted = f"TUNERY_DATA_DIR={self.data_dir}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, part: str) -> int | None:
        """A process whose command line holds `part`."""
        return next((pid for pid, command in self.processes().items() if part in command), None)

    def job_processes(self) -> list[int]:
        """Processes of attempts: the tuning process, its fork server and every forked step."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if b"\0TUNERY_ATTEMPT=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query of the database answers."""
        with contextlib.closing(sqlite3.connect(f"file:{self.data_dir / 'tunery.db'}?mode=ro", uri=True)) as database:
            return database.execute(query).fetchall()

    def stored_trials(self) -> int:
        return int(self.rows("select count(*) from trials")[0][0])


@contextlib.contextmanager
def running(data_dir: Path, env: Mapping[str, str] = FAST) -> Iterator[Service]:
    """`tunery up` until the block ends; then nothing of it may be left."""
    data_dir.mkdir(parents=True, exist_ok=True)
    log = (data_dir / "up.log").open("w")
    process = subprocess.Popen(
        [TUNERY, "up", "--port", "0", "--json", "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **env}, start_new_session=True,
    )  # fmt: skip
    service = None
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (data_dir / "up.log").read_text()
        started = json.loads(line)
        service = Service(started["url"], data_dir.absolute(), process, started["pids"])
        yield service
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            log.close()
    wait_for(lambda: not service.processes(), 20, "no process is left behind")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions and a dense layer, batch left open, as an exporter would write it."""
    generator = np.random.default_rng(11)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array((generator.standard_normal(shape) * 0.1).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["scores"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 8, 28, 28])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        [weight("w1", 16, 8, 3, 3), weight("b1", 16), weight("w2", 32, 16, 3, 3), weight("b2", 32),
         weight("w3", 10, 32), weight("b3", 10)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path = tmp_path_factory.mktemp("models") / "small.onnx"
    onnx.save(model, path)
    return path


INPUTS = {"image": [1, 8, 28, 28]}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service") / "data") as started:
        yield started


@pytest.fixture
def client(service: Service) -> Iterator[Tunery]:
    with Tunery(service.url) as client:
        yield client
