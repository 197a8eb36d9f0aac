"""Uploads: what is kept, what is refused, and how early."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import socket
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import onnx
import psutil
import pytest

from service.uploads import MAX_FIELD_BYTES
from tests.service.conftest import Service, relu_model


def stored(service: Service) -> set[str]:
    """Names of all files below the blob folder."""
    return {str(path.relative_to(service.blobs.root)) for path in service.blobs.root.rglob("*") if path.is_file()}


def test_upload_is_new_once(service: Service) -> None:
    """201 and the ports for a new model; 200 and the same digest when it comes again, as another file too."""
    model = relu_model("M")
    first = service.http.post("/v1/models", files={"model": ("any/../name.onnx", model)})
    assert first.status_code == 201
    found = first.json()
    assert found["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["M", 4]}]
    assert found["format"] == "onnx"
    assert found["bytes"] == len(model)
    assert first.headers["location"] == f"/v1/models/{found['digest']}"
    again = service.http.post("/v1/models", files={"file": model})
    assert (again.status_code, again.json()) == (200, found)
    bare = service.http.post("/v1/models", content=model, headers={"content-type": "application/octet-stream"})
    assert (bare.status_code, bare.json()) == (200, found)
    assert service.http.get(first.headers["location"]).json() == found


def test_second_file_of_a_known_model_is_not_kept(service: Service, model: str) -> None:
    """The same graph under another producer's name is the same model, and the first file stays."""
    other = onnx.load_from_string(relu_model())
    other.producer_name = "somebody else"
    before = stored(service)
    answer = service.http.post("/v1/models", files={"model": other.SerializeToString()})
    assert (answer.status_code, answer.json()["digest"]) == (200, model)
    assert stored(service) == before


@pytest.mark.parametrize("how", ["gone", "damaged", "a folder"])
def test_second_file_heals_a_lost_one(service: Service, how: str) -> None:
    """When the first file's bytes are lost, another file of the same graph takes its place, and can be tuned."""
    content = relu_model(f"N_{how.replace(' ', '_')}")
    digest = service.upload(content)
    sha256 = hashlib.sha256(content).hexdigest()
    blob = service.settings.data_dir / "blobs" / sha256[:2] / sha256
    blob.unlink()
    if how == "damaged":
        blob.write_bytes(b"rotten")
    elif how == "a folder":
        blob.mkdir()
    other = onnx.load_from_string(content)
    other.producer_name = "somebody else"
    assert service.upload(other.SerializeToString()) == digest
    assert service.store.model(digest).blob == hashlib.sha256(other.SerializeToString()).hexdigest()
    assert service.submit(digest, 3).status_code == 201


@pytest.mark.parametrize(
    "content",
    [b"", b"not a model", b"\x00" * 1000, relu_model()[:-10], b"\x08\x09" + b"\xff" * 50, b"%PDF-1.7\n"],
    ids=["empty", "text", "zeros", "truncated", "garbage", "pdf"],
)
@pytest.mark.parametrize("bare", [False, True])
def test_what_is_no_model_leaves_nothing_behind(service: Service, content: bytes, bare: bool) -> None:
    """Bytes that cannot be read are 422 and are not kept."""
    before = stored(service)
    if bare:
        answer = service.http.post("/v1/models", content=content, headers={"content-type": "application/octet-stream"})
    else:
        answer = service.http.post("/v1/models", files={"model": content})
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/invalid-model"
    assert answer.json()["field"] == "model"
    assert stored(service) == before


def test_unsupported_operator_is_named(service: Service) -> None:
    """An operator that cannot be compiled is refused at once, with its name, node and opset."""
    answer = service.http.post("/v1/models", files={"model": relu_model(operator="StringNormalizer")})
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["type"] == "/problems/unsupported-operator"
    assert (problem["operator"], problem["node"], problem["opset"]) == ("StringNormalizer", "the_node", 17)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\x00b", "..%2f", "x" * 3000, 'q"; filename="z'])
def test_file_names_never_become_paths(service: Service, name: str) -> None:
    """Whatever the client calls its file, only the content names it."""
    before = stored(service)
    answer = service.http.post("/v1/models", files={"model": (name, relu_model())})
    assert answer.is_success
    new = stored(service) - before
    sha256 = hashlib.sha256(relu_model()).hexdigest()
    assert new <= {f"{sha256[:2]}/{sha256}"}


@pytest.mark.parametrize(
    ("body", "content_type", "field"),
    [
        (b"{}", "application/json", "Content-Type"),
        (b"x", "multipart/form-data", "Content-Type"),
        (b"garbage", "multipart/form-data; boundary=b", "body"),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nabc', "multipart/form-data; boundary=b", "body"),
        (
            b'--b\r\nContent-Disposition: form-data; name="weights"\r\n\r\nabc\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
            "weights",
        ),
        (b"--b\r\nX: y\r\n\r\nabc\r\n--b--\r\n", "multipart/form-data; boundary=b", "body"),
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nabc\r\n' * 2 + b"--b--\r\n",
            "multipart/form-data; boundary=b",
            "model",
        ),
        (b"--b--\r\n", "multipart/form-data; boundary=b", "model"),
    ],
    ids=["json", "no-boundary", "garbage", "ends-early", "other-part", "no-name", "two-files", "no-file"],
)
def test_malformed_bodies_are_refused(service: Service, body: bytes, content_type: str, field: str) -> None:
    """A body that is not what it should be is 422 and says what is wrong with it."""
    before = stored(service)
    answer = service.http.post("/v1/models", content=body, headers={"content-type": content_type})
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"] == field
    assert stored(service) == before


def tar_of(location: str, *members: tarfile.TarInfo) -> bytes:
    """A tar of a model whose weight is kept in `location`, and these members, empty."""
    model = onnx.load_from_string(relu_model())
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        info = tarfile.TarInfo("model.onnx")
        info.size = model.ByteSize()
        tar.addfile(info, io.BytesIO(model.SerializeToString()))
        for member in members:
            tar.addfile(member)
    return content.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tar_of("w.bin"), "tensor 'w' keeps its data in 'w.bin', which the archive does not hold"),
        (tar_of("../../etc/passwd"), "not a path inside the archive"),
        (tar_of("/etc/passwd"), "not a path inside the archive"),
        (tar_of("w", member("w", tarfile.SYMTYPE, "/etc/passwd")), "'w' is a symbolic link"),
        (tar_of("w", member("w", tarfile.LNKTYPE, "/etc/passwd")), "'w' is a hard link"),
        (tar_of("w", member("../w")), "would lie outside"),
        (tar_of("w", member("\udcff" * 200)), "does not hold"),
    ],
)
def test_archives_reach_nothing_outside(service: Service, content: bytes, says: str) -> None:
    """An archive whose model or members point elsewhere is 422 by name; no file of the machine is in the answer, and
    nothing is kept (onnx#3991)."""
    before = stored(service)
    answer = service.http.post("/v1/models", files={"model": ("model.onnx", content)})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-model")
    assert says in answer.json()["detail"]
    assert "root:" not in answer.text
    assert stored(service) == before


def ask_raw(service: Service, head: str, send_body: Callable[[socket.socket], None]) -> bytes:
    """All that the server says to a request whose body is sent by hand, until it closes the connection.

    A server that leaves it open fails the test with a timeout.
    """
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
        connection.sendall(head.encode())
        send_body(connection)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def test_announced_size_is_refused_before_the_body(service: Service) -> None:
    """3 GB in Content-Length is 413 before one byte of the body has been sent, and the connection is closed."""
    for content_type in ("application/octet-stream", "multipart/form-data; boundary=b"):
        head = (
            f"POST /v1/models HTTP/1.1\r\nHost: t\r\nContent-Type: {content_type}\r\nContent-Length: 3221225472\r\n\r\n"
        )
        answer = ask_raw(service, head, lambda connection: None)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"/problems/too-large"' in answer


@pytest.mark.parametrize("multipart", [False, True])
def test_unannounced_size_is_refused_as_soon_as_it_shows(service: Service, multipart: bool) -> None:
    """An endless chunked body is 413 a little after the limit; the server reads no further and keeps nothing."""
    before = stored(service)
    sent = 0
    limit = service.settings.max_upload_bytes

    def endless(connection: socket.socket) -> None:
        nonlocal sent
        if multipart:
            part = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        piece = b"10000\r\n" + b"\0" * 65536 + b"\r\n"
        try:
            while sent < 50 * limit:
                connection.sendall(piece)
                sent += 65536
        except (BrokenPipeError, ConnectionResetError):
            return

    content_type = "multipart/form-data; boundary=b" if multipart else "application/octet-stream"
    head = f"POST /v1/models HTTP/1.1\r\nHost: t\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = ask_raw(service, head, endless)
    assert sent < limit + 32 * 2**20, "what the kernel buffers, but not the whole body"
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert stored(service) == before


def test_json_part_has_a_limit(service: Service) -> None:
    """A part that is not the model cannot be used to fill memory."""
    files = {"spec": (None, b" " * (MAX_FIELD_BYTES + 1)), "model": ("m", relu_model())}
    answer = service.http.post("/v1/jobs", files=files)
    assert answer.status_code == 413


def test_too_many_parts_are_refused(service: Service) -> None:
    """Parts are counted, and a name comes once."""
    body = b'--b\r\nContent-Disposition: form-data; name="spec"\r\n\r\n{}\r\n' * 2 + b"--b--\r\n"
    answer = service.http.post("/v1/jobs", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 422
    assert answer.json()["field"] == "spec"


def test_full_disk_is_507(service: Service) -> None:
    """When no room is left for the upload, the answer says so, and nothing is left of it."""
    before = stored(service)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses to let any file of this process, the server's thread included, grow further.
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, hard))
    try:
        answer = service.http.post(
            "/v1/models", content=os.urandom(6 * 2**20), headers={"content-type": "application/octet-stream"}
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.status_code == 507
    assert answer.json()["type"] == "/problems/storage-full"
    assert stored(service) == before


def test_full_disk_is_not_ready(service: Service) -> None:
    """While not even a page can be stored, /readyz is 503 and says where; then it is ready again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        answer = service.http.get("/readyz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.status_code == 503
    assert "free some space" in answer.json()["blobs"]
    assert service.http.get("/readyz").status_code == 200


def test_client_that_hangs_up_leaves_nothing(service: Service) -> None:
    """An upload that ends in the middle is forgotten, and the service goes on."""
    before = stored(service)
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/models HTTP/1.1\r\nHost: t\r\nContent-Type: application/octet-stream\r\n"
            b"Content-Length: 5000000\r\n\r\n" + b"x" * 3_000_000
        )
        deadline = time.monotonic() + 20
        while stored(service) == before:
            assert time.monotonic() < deadline, "the upload has begun"
            time.sleep(0.01)
    while stored(service) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stored(service) == before
    assert service.http.get("/healthz").status_code == 200


def script(tmp_path: Path, text: str) -> dict[str, Any]:
    """Settings for an inspector that is this Python script; the model's path is its first argument."""
    path = tmp_path / "inspector.py"
    path.write_text("import json, os, subprocess, sys, time\n" + text)
    return {"inspector": (sys.executable, str(path))}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("os.kill(os.getpid(), 11)", "signal 11, SIGSEGV"),
        ("os.abort()", "signal 6, SIGABRT"),
        ("sys.exit(3)", "code 3"),
        ("print('no json')", "code 0"),
        ("print('[1]')", "code 0"),
        ("print('{}')", "makes no sense"),
        ("print(json.dumps({'ok': True}))", "without its ports"),
        ("sys.stdout.write('x' * 10_000_000)", "longer than"),
    ],
)
def test_broken_parser_is_the_models_fault(
    own_service: Callable[..., Any], tmp_path: Path, text: str, says: str
) -> None:
    """Whatever a model does to the process that reads it, the upload is 422 and the service goes on."""
    with own_service(**script(tmp_path, text)) as service:
        answer = service.http.post("/v1/models", files={"model": b"anything"})
        assert answer.status_code == 422
        assert answer.json()["type"] == "/problems/invalid-model"
        assert says in answer.json()["detail"]
        assert stored(service) == set()
        assert service.http.get("/healthz").status_code == 200


def test_hanging_parser_is_ended_with_its_children(own_service: Callable[..., Any], tmp_path: Path) -> None:
    """A model that takes too long is 422, and the whole process group is gone."""
    pids = tmp_path / "pids"
    text = f"""
child = subprocess.Popen(["sleep", "600"])
open({str(pids)!r}, "w").write(json.dumps([os.getpid(), child.pid]))
time.sleep(600)
"""
    with own_service(inspector_timeout_s=2.0, **script(tmp_path, text)) as service:
        answer = service.http.post("/v1/models", files={"model": b"anything"})
        assert answer.status_code == 422
        assert "within 2 s" in answer.json()["detail"]
        started = json.loads(pids.read_text())
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in started) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in started if alive(pid)] == []


def torch_program() -> bytes:
    """As much of one as the inspector looks at."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("program/archive_format", "pt2")
    return content.getvalue()


PROGRAM = torch_program()

#: Called with a format, a file and a target.
CONVERTER = """
import json, os, sys
from pathlib import Path
format, file, target = sys.argv[1:]
assert format == "pt2" and Path(file).read_bytes()[:2] == b"PK"
secrets = [name for name in os.environ if name.startswith("TUNERY_") or "SECRET" in name]
assert not secrets and Path.cwd() == Path(target).parent == Path(os.environ["HOME"]), secrets
with open({count!r}, "a") as count:
    count.write("x")
Path(target).write_bytes(bytes.fromhex({model!r}))
print(json.dumps({{"ok": True}}))
"""


def test_another_format_is_converted_once(
    own_service: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a format that has a converter is kept as the ONNX model that comes of it, under that model's digest;
    sent again, it is not converted again, unless what came of it was lost. The converter is told no secrets."""
    monkeypatch.setenv("TUNERY_DATABASE_PASSWORD", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    script, count, model = tmp_path / "converter.py", tmp_path / "count", relu_model("C")
    script.write_text(CONVERTER.format(count=str(count), model=model.hex()))
    with own_service(converter=(sys.executable, str(script))) as service:
        first = service.http.post("/v1/models", files={"model": ("model.onnx", PROGRAM)})
        assert (first.status_code, first.json()["format"]) == (201, "pt2"), first.text
        assert first.json()["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["C", 4]}]
        sha256 = hashlib.sha256(model).hexdigest()
        assert stored(service) == {f"{sha256[:2]}/{sha256}"}
        again = service.http.post("/v1/models", files={"model": PROGRAM})
        assert (again.status_code, again.json()) == (200, first.json())
        assert count.read_text() == "x"
        assert service.upload(model) == first.json()["digest"]
        service.blobs.delete(sha256)
        assert service.http.post("/v1/models", files={"model": PROGRAM}).json() == first.json()
        assert count.read_text() == "xx"
        assert service.submit(first.json()["digest"], 3).status_code == 201


@pytest.mark.parametrize(
    ("text", "status", "slug", "says"),
    [
        ("os.abort()", 422, "invalid-model", "crashed the converter (signal 6, SIGABRT)"),
        ("time.sleep(60)", 422, "invalid-model", "within 2 s"),
        ("print(json.dumps({'ok': True}))", 422, "invalid-model", "wrote nothing"),
        ("open(sys.argv[3], 'wb').write(b'no'); print(json.dumps({'ok': True}))", 422, "invalid-model", "not an ONNX"),
        (
            "print(json.dumps({'ok': False, 'error': {'type': 'UnsupportedFormat', 'message': 'a', 'format': 'b'}}))",
            415, "unsupported-format", "a",
        ),
    ],
)  # fmt: skip
def test_failed_conversion_leaves_nothing(
    own_service: Callable[..., Any], tmp_path: Path, text: str, status: int, slug: str, says: str
) -> None:
    """Whatever becomes of the converter, the answer says it, and nothing is kept."""
    changes = {"converter": script(tmp_path, text)["inspector"], "converter_timeout_s": 2.0 if "sleep" in text else 60}
    with own_service(**changes) as service:
        answer = service.http.post("/v1/models", files={"model": PROGRAM})
        assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{slug}")
        assert says in answer.json()["detail"]
        assert stored(service) == set()


def test_format_that_nothing_takes_is_415(service: Service) -> None:
    """A known format without a converter is 415, with its name and what to send instead."""
    before = stored(service)
    answer = service.http.post("/v1/models", files={"model": ("model.onnx", b"GGUF\x03\0\0\0")})
    assert (answer.status_code, answer.json()["type"]) == (415, "/problems/unsupported-format")
    assert answer.json()["format"] == "gguf"
    assert "send the model as ONNX" in answer.json()["detail"]
    assert stored(service) == before


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_equal_uploads_together_start_one_parser(own_service: Callable[..., Any], tmp_path: Path) -> None:
    """The same bytes sent by many at once are parsed once, and once more never."""
    from concurrent.futures import ThreadPoolExecutor

    count = tmp_path / "count"
    text = f"""
open({str(count)!r}, "a").write("x")
time.sleep(0.5)
print(json.dumps({{"ok": True, "digest": "ab" * 32, "format": "onnx", "inputs": [], "outputs": []}}))
"""
    with own_service(**script(tmp_path, text)) as service:

        def upload(_: int) -> httpx.Response:
            return httpx.post(f"{service.url}/v1/models", files={"model": b"anything"}, timeout=60)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(upload, range(8)))
        assert {answer.json()["digest"] for answer in answers} == {"ab" * 32}
        assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
        assert count.read_text() == "x"
