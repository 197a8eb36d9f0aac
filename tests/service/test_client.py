"""The Python client against the real service, and against servers that misbehave on purpose."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from service.client import (
    CacheMissError,
    Event,
    IntegrityFailed,
    JobCancelled,
    JobFailed,
    ModelFilesRefused,
    RequestRefused,
    ServiceUnreachable,
    Tunery,
    WaitTimeout,
)
from tests.service.conftest import Service, relu_model
from tuning_db.jobs import JobError


@pytest.fixture
def client(service: Service) -> Iterator[Tunery]:
    with Tunery(service.url) as client:
        yield client


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(relu_model())
    return path


def test_submit_wait_fetch(service: Service, client: Tunery, model_file: Path, batch: int, tmp_path: Path) -> None:
    """A file goes in, events come while the job runs, and the verified library lies in the folder."""
    handle = client.submit(model_file, inputs={"x": [batch, 4]}, search={"trials": 8})
    assert (handle.state, handle.cached) == ("QUEUED", False)
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if event.type == "state" and event.data["state"] == "QUEUED":
            service.finish(handle.id, b"a library")

    job = handle.wait(60, on_event=on_event)
    assert job["state"] == handle.state == "SUCCEEDED"
    assert [event.data["state"] for event in events if event.type == "state"] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    assert events[-1].type == "end"
    fetched = handle.fetch(tmp_path / "a" / "b")
    assert fetched.library.read_bytes() == b"a library"
    assert json.loads(fetched.manifest_path.read_text()) == fetched.manifest
    assert (fetched.key, fetched.downloaded) == (handle.key, True)
    assert sorted(p.name for p in fetched.library.parent.iterdir()) == ["library.so", "manifest.json"]
    again = client.submit(model_file, inputs={"x": {"shape": [batch, 4], "dtype": "float32"}}, search={"trials": 8})
    assert (again.cached, again.id) == (True, handle.id)
    assert again.wait()["state"] == "SUCCEEDED"


def test_an_intact_copy_is_kept_and_a_damaged_one_replaced(
    service: Service, client: Tunery, model: str, tmp_path: Path
) -> None:
    """Fetching again sends nothing; a local copy that was altered is fetched anew."""
    key = service.publish(model, b"the bytes").key.digest()
    first = client.fetch(key, tmp_path)
    assert client.fetch(key, tmp_path).downloaded is False
    first.library.write_bytes(b"the bytez")
    healed = client.fetch(key, tmp_path)
    assert (healed.downloaded, healed.library.read_bytes()) == (True, b"the bytes")


def test_find_and_miss(service: Service, client: Tunery, model: str) -> None:
    """A question finds the manifest; a near miss says what differs."""
    artifact = service.publish(model, b"to be found")
    shape = list(artifact.key.inputs[0].shape)
    assert client.find(model, inputs={"x": shape})["key"] == artifact.key.digest()
    with pytest.raises(CacheMissError) as miss:
        client.find(model, inputs={"x": shape}, fast_math=True)
    assert miss.value.nearest[0]["differences"] == [{"field": "options.fast_math", "wanted": True, "stored": False}]
    with pytest.raises(CacheMissError):
        client.manifest("0" * 64)


def test_int8(service: Service, client: Tunery, model: str, tmp_path: Path) -> None:
    """Samples in a file or in a folder, or uploaded before, are the same samples, for `submit` and for `find`."""
    arrays = [np.random.default_rng(number).standard_normal((2, 4)).astype(np.float32) for number in range(3)]
    folder = tmp_path / "samples"
    for number, array in enumerate(arrays):
        (folder / str(number)).mkdir(parents=True)
        np.save(folder / str(number) / "x.npy", array)
    (folder / "notes.txt").write_text("no array")
    archive = tmp_path / "samples.npz"
    np.savez(archive, **{f"{number}/x": array for number, array in enumerate(arrays)})
    found = client.upload_calibration(folder)
    assert found == client.calibration(found["digest"])
    assert [array["name"] for array in found["arrays"]] == ["0/x", "1/x", "2/x"]
    handles = [
        client.submit(model, inputs={"x": [2, 4]}, quantization={"scheme": "int8", "calibration": samples})
        for samples in (folder, archive, found["digest"])
    ]
    assert len({handle.id for handle in handles}) == 1
    service.finish(handles[0].id, b"int8")
    wanted = {"scheme": "int8", "calibration": archive}
    assert client.find(model, inputs={"x": [2, 4]}, quantization=wanted)["key"] == handles[0].key
    with pytest.raises(CacheMissError):
        client.find(model, inputs={"x": [2, 4]}, quantization={**wanted, "method": "entropy"})
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelFilesRefused, match=r"holds no \.npy file"):
        client.upload_calibration(empty)


def test_refusals_carry_everything(client: Tunery, model: str) -> None:
    """A refusal is the service's own sentence, its type and field, the status and the request's id."""
    with pytest.raises(RequestRefused) as refused:
        client.submit(model, inputs={"x": [1, 2, 3]})
    error = refused.value
    assert (error.status, error.type, error.field) == (422, "/problems/shape-mismatch", "inputs.x.shape")
    assert "rank" in str(error)
    assert error.request_id


def test_a_model_that_is_too_large_is_a_refusal(service: Service, client: Tunery, tmp_path: Path) -> None:
    """The service stops reading at its limit, and the client still hears why."""
    path = tmp_path / "large.onnx"
    path.write_bytes(b"x" * (service.settings.max_upload_bytes + 2**22))
    with pytest.raises(RequestRefused) as refused:
        client.upload(path)
    assert (refused.value.status, refused.value.type) == (413, "/problems/too-large")


def beside(folder: Path, location: str = "sub/w.bin") -> tuple[Path, bytes]:
    """A model y = x + w whose w, 4 floats, lies in a data file; the file's bytes; and what it is called."""
    folder.mkdir(exist_ok=True)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    model = onnx.load_from_string(relu_model())
    model.graph.initializer.append(tensor)
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Add", ["x", "w"], ["y"]))
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path, bytes(range(16))


def test_data_files_are_sent_with_their_model(client: Tunery, tmp_path: Path) -> None:
    """A model whose weights lie in a file beside it is uploaded with it, and is the model with its weights inside;
    it may be a link into a folder of files by content."""
    path, data = beside(tmp_path / "a")
    (path.parent / "sub").mkdir()
    (path.parent / "sub" / "w.bin").write_bytes(data)
    inside = onnx.load(path)
    whole = tmp_path / "whole.onnx"
    onnx.save_model(inside, whole)
    digest = client.upload(path)
    assert client.upload(whole) == digest

    store, links = tmp_path / "store", tmp_path / "links"
    store.mkdir()
    (links / "sub").mkdir(parents=True)
    path.rename(store / "0a")
    (store / "0b").write_bytes(data)
    (links / "net.onnx").symlink_to(store / "0a")
    (links / "sub" / "w.bin").symlink_to(store / "0b")
    assert client.upload(links / "net.onnx") == digest


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link", "missing", "a/../../secret"])
def test_files_outside_are_not_sent(location: str, tmp_path: Path) -> None:
    """A model from elsewhere cannot have its user's files sent, and a missing data file is named; nothing is sent."""
    (tmp_path / "secret").write_bytes(bytes(16))
    path, _ = beside(tmp_path / "a", location)
    (path.parent / "link").symlink_to(tmp_path / "secret")
    with Tunery("http://127.0.0.1:1", attempts=1) as client, pytest.raises(ModelFilesRefused) as caught:
        client.upload(path)
    assert location in str(caught.value)


def test_what_is_no_model_is_left_to_the_service(client: Tunery, tmp_path: Path) -> None:
    """The client sends what it cannot read, and the service says what is wrong with it."""
    path = tmp_path / "x"
    for content in (b"not a model", b"\xff" * 100, b"\x3a\x05\x2a\x7f"):
        path.write_bytes(content)
        with pytest.raises(RequestRefused) as caught:
            client.upload(path)
        assert caught.value.type == "/problems/invalid-model"


def test_ends_that_are_no_success(service: Service, client: Tunery, model: str, batch: int) -> None:
    """A failed job, a cancelled one and one that takes too long are three different errors."""
    slow = client.submit(model, inputs={"x": [batch, 4]})
    with pytest.raises(WaitTimeout, match="tunery wait"):
        slow.wait(0.3)
    slow.cancel()
    with pytest.raises(JobCancelled):
        slow.wait()
    failing = client.submit(model, inputs={"x": [batch, 4]})
    service.store.fail(service.claim(failing.id), JobError("check-failed", "outputs differ by 3"))
    with pytest.raises(JobFailed, match="differ by 3") as failed:
        client.job(failing.id).wait()
    assert failed.value.kind == "check-failed"


def test_pages_are_joined(service: Service, client: Tunery, model: str, batch: int) -> None:
    """Listing follows the pages as far as it needs to."""
    mine = client.submit(model, inputs={"x": [batch, 4]}).id
    assert client.jobs(limit=1)[0]["id"] == mine
    assert client.jobs(states=["QUEUED"], device=client.devices()[0]["name"])[0]["id"] == mine


def test_nobody_there() -> None:
    """No connection is one error that says what to do, whatever was asked."""
    with Tunery("http://127.0.0.1:1", attempts=2) as client:
        for ask in (client.devices, lambda: client.job("0" * 32), lambda: client.submit("0" * 64)):
            with pytest.raises(ServiceUnreachable, match="tunery up"):
                ask()
        assert client.ready() is False


Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def answering(answer: Callable[[str, str, dict[str, str]], Answer]) -> Iterator[str]:
    """A server that says what it is told to: answer(method, path, headers)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, body = answer(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), "connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - http.server's name

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_passing_faults_are_survived_with_one_idempotency_key() -> None:
    """502 and 503 are asked again, a submission with the same key each time; then the answer counts."""
    seen: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        seen.append(headers.get("idempotency-key", ""))
        if len(seen) < 3:
            return 500 + len(seen) + 1, {}, b""
        return 200, {}, json.dumps({"id": "1", "state": "QUEUED", "key": "k"}).encode()

    with answering(answer) as url, Tunery(url) as client:
        assert client.submit("0" * 64).id == "1"
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0]


def test_lasting_faults_are_the_services_own_words() -> None:
    """A service that stays at 503 is a refusal with its sentence, after the retries; 500 is not asked again."""
    counts = {"/v1/devices": 0, "/v1/jobs": 0}

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        counts[path.partition("?")[0]] += 1
        body = json.dumps({"type": "/problems/queue-full", "detail": "come back later"}).encode()
        return (503 if path == "/v1/devices" else 500), {"content-type": "application/problem+json"}, body

    with answering(answer) as url, Tunery(url, attempts=3) as client:
        with pytest.raises(RequestRefused, match="come back later") as refused:
            client.devices()
        assert refused.value.status == 503
        with pytest.raises(RequestRefused):
            client.jobs()
    assert counts == {"/v1/devices": 3, "/v1/jobs": 1}


def test_something_else_on_the_port() -> None:
    """A web server that is not Tunery is named as such."""
    with (
        answering(lambda *_: (200, {}, b"<html>hello</html>")) as url,
        Tunery(url) as client,
        pytest.raises(ServiceUnreachable, match="check the address"),
    ):
        client.devices()


def test_wrong_bytes_are_not_kept(tmp_path: Path) -> None:
    """Bytes that are not what the manifest names are an error, and leave the folder as it was."""
    wanted = hashlib.sha256(b"right").hexdigest()

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.endswith("/library"):
            return 200, {"etag": f'"{wanted}"'}, b"wrong"
        return 200, {}, json.dumps({"key": "k", "library": {"sha256": wanted}}).encode()

    (tmp_path / "library.so").write_bytes(b"older")
    with answering(answer) as url, Tunery(url) as client, pytest.raises(IntegrityFailed, match="fetch again"):
        client.fetch("a" * 64, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]
    assert (tmp_path / "library.so").read_bytes() == b"older"


def test_a_short_transfer_is_asked_again(tmp_path: Path) -> None:
    """A connection that breaks in the middle of the bytes costs a second request, not a broken file."""
    wanted = hashlib.sha256(b"right").hexdigest()
    tries: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.endswith("/library"):
            tries.append(path)
            body = b"ri" if len(tries) == 1 else b"right"
            return 200, {"etag": f'"{wanted}"', "content-length": "5"}, body
        return 200, {}, json.dumps({"key": "k", "library": {"sha256": wanted}}).encode()

    with answering(answer) as url, Tunery(url) as client:
        assert client.fetch("a" * 64, tmp_path).library.read_bytes() == b"right"
    assert len(tries) == 2


def test_a_broken_stream_is_taken_up_where_it_broke() -> None:
    """Events that were seen are not seen again after a reconnect, and none is lost."""
    asked: list[str | None] = []
    job = {"id": "1", "state": "QUEUED", "key": "k"}

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if not path.endswith("/events"):
            return 200, {}, json.dumps(job).encode()
        asked.append(headers.get("last-event-id"))
        if len(asked) == 1:
            return 200, {}, b": ping\n\nid: 1\nevent: trial\ndata: {}\n\nid: 2\nevent: trial\ndata: {}\n\n"
        if len(asked) == 2:
            return 503, {}, b""
        end = json.dumps({**job, "state": "SUCCEEDED"}).encode()
        return 200, {}, b"id: 3\nevent: trial\ndata: {}\n\nevent: end\ndata: " + end + b"\n\n"

    seen: list[Event] = []
    with answering(answer) as url, Tunery(url) as client:
        assert client.job("1").wait(60, on_event=seen.append)["state"] == "SUCCEEDED"
    assert [event.seq for event in seen] == [1, 2, 3, None]
    assert asked == [None, "2", "2"]
