"""A real uvicorn over a real SQLite file, and a stand-in for a worker that uses the store as a worker does."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from onnx import TensorProto, helper

from service.app import create_app
from service.settings import Settings
from tests.samples import DEVICE, TARGET, TOOLCHAIN
from tuning_db.blobs import BlobStore
from tuning_db.catalog import Artifact
from tuning_db.jobs import Claim
from tuning_db.layout import blob_dir
from tuning_db.migrations import upgrade
from tuning_db.store import TuningStore

_batches = itertools.count(2)

# Servers in threads would write into whichever test's captured output is open at that moment.
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())


@dataclass(frozen=True)
class Service:
    """A running service, and the parts behind it as a worker sees them."""

    url: str
    http: httpx.Client
    store: TuningStore
    blobs: BlobStore
    settings: Settings

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def upload(self, model: bytes) -> str:
        answer = self.http.post("/v1/models", files={"model": model})
        assert answer.is_success, answer.text
        return str(answer.json()["digest"])

    def submit(self, model: str, batch: int, **changes: Any) -> httpx.Response:
        return self.http.post("/v1/jobs", json={"model": model, "inputs": {"x": {"shape": [batch, 4]}}, **changes})

    def claim(self, job_id: str) -> Claim:
        claimed = self.store.claim(job_id, "worker-1")
        assert claimed is not None
        return claimed[0]

    def finish(self, job_id: str, library: bytes, latency_s: float = 0.001) -> Artifact:
        """What a worker does last: the bytes, then the row that points at them."""
        claim = self.claim(job_id)
        with self.blobs.writer() as writer:
            writer.write(library)
            blob = writer.commit()
        return self.store.publish(claim, blob, latency_s, {"check": {"agrees": True}})

    def publish(self, model: str, library: bytes) -> Artifact:
        """A finished job of its own for `library`."""
        return self.finish(self.submit(model, next(_batches)).json()["id"], library)


@contextmanager
def serving(settings: Settings, *, device: bool = True) -> Iterator[Service]:
    """The application in a thread, with one device reported unless told otherwise."""
    upgrade(settings.database_url)
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings), port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service ended while it started"
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    store = TuningStore(settings.database_url)
    try:
        if device:
            store.report_device("worker-1", DEVICE, TARGET, TOOLCHAIN)
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Service(url, http, store, BlobStore(blob_dir(settings.data_dir)), settings)
    finally:
        store.close()
        server.should_exit = True
        thread.join()


def quiet(data_dir: Path, **changes: Any) -> Settings:
    """Settings under which nothing happens by itself."""
    return Settings(**{"data_dir": data_dir, "sweep_interval_s": 3600, "event_poll_s": 0.02, **changes})


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests that leave it as they found it; each takes keys of its own."""
    with serving(quiet(tmp_path_factory.mktemp("service"), max_upload_bytes=8 * 2**20)) as running:
        yield running


@pytest.fixture
def own_service(tmp_path: Path) -> Callable[..., Any]:
    """For tests that need a service to themselves: call it with settings, use it in a `with` block."""

    def start(*, device: bool = True, **changes: Any) -> Any:
        return serving(quiet(tmp_path / "data", **changes), device=device)

    return start


def relu_model(symbol: str | None = "N", operator: str = "Relu") -> bytes:
    """y = f(x) for x of shape [symbol, 4]."""
    shape = [symbol, 4]
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], name="the_node")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


@pytest.fixture(scope="session")
def model(service: Service) -> str:
    """The digest of a model with one input, x: float32[N, 4]."""
    return service.upload(relu_model())


@pytest.fixture
def batch() -> int:
    """A size of N that no other test has used: a key of its own."""
    return next(_batches)
