"""Libraries: found by key, served with validators and ranges, and never when damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.byteserving import parse_range
from tests.service.conftest import Service, relu_model
from tuning_db.catalog import Artifact

LIBRARY = bytes(range(256)) * 40
ETAG = f'"{hashlib.sha256(LIBRARY).hexdigest()}"'
WEAK = f"W/{ETAG}"


@pytest.fixture(scope="module")
def artifact(service: Service, model: str) -> Artifact:
    return service.publish(model, LIBRARY)


@pytest.fixture
def address(artifact: Artifact) -> str:
    return f"/v1/artifacts/{artifact.key.digest()}/library"


def blob_path(service: Service, sha256: str) -> Path:
    return service.blobs.root / sha256[:2] / sha256


def damage(path: Path) -> None:
    """Change one byte and nothing else: size and times stay."""
    times = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as stream:
        stream.seek(100)
        byte = stream.read(1)
        stream.seek(100)
        stream.write(bytes([byte[0] ^ 1]))
    import os

    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_manifest_by_key_and_by_query(service: Service, model: str, artifact: Artifact) -> None:
    """The same manifest is found by the key's digest and by what the key is made of."""
    digest = artifact.key.digest()
    by_key = service.http.get(f"/v1/artifacts/{digest}")
    assert by_key.status_code == 200
    manifest = by_key.json()
    assert manifest["key"] == digest
    assert manifest["key_fields"] == artifact.key.to_json()
    assert manifest["library"] == {"sha256": artifact.library, "bytes": len(LIBRARY)}
    assert manifest["check"] == {"agrees": True}, "what the worker wrote is there too"
    query = {"model": model, "input": str(artifact.key.inputs[0]), "device": artifact.key.device.name}
    assert service.http.get("/v1/artifacts", params=query).json() == manifest
    for link in manifest["links"].values():
        assert service.http.get(link).status_code == 200


@pytest.mark.parametrize(
    ("changes", "field", "wanted", "stored"),
    [
        ({"input": "x:float32[31337,4]"}, "inputs.x.shape", [31337, 4], None),
        ({"quantization": "fp16"}, "quantization.scheme", "fp16", "none"),
        ({"fast_math": "true"}, "options.fast_math", True, False),
        ({"winograd": "false"}, "options.winograd", False, True),
        ({"reassociation": "true"}, "options.reassociation", True, False),
    ],
)
def test_miss_names_the_field(
    own_service: Callable[..., Any], changes: dict[str, str], field: str, wanted: Any, stored: Any
) -> None:
    """A key that differs in one field is a miss that names that field, with both values."""
    with own_service() as service:
        model = service.upload(relu_model())
        artifact = service.publish(model, LIBRARY)
        query = {"model": model, "input": str(artifact.key.inputs[0]), **changes}
        miss = service.http.get("/v1/artifacts", params=query)
        assert miss.status_code == 404
        assert miss.json()["type"] == "/problems/cache-miss"
        stored = list(artifact.key.inputs[0].shape) if stored is None else stored
        assert miss.json()["nearest"] == [
            {"key": artifact.key.digest(), "differences": [{"field": field, "wanted": wanted, "stored": stored}]}
        ]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"input": "x:float32[2,4]"}, "model"),
        ({"model": "MODEL", "quantisation": "fp16"}, "quantisation"),
        ({"model": "MODEL", "input": "x"}, "input"),
        ({"model": "MODEL", "input": ["x:float32[2,4]", "x:float32[3,4]"]}, "input"),
        ({"model": "MODEL", "input": "x:float9[2,4]"}, "inputs.x.dtype"),
        ({"model": "MODEL", "input": "x:float32[2,5]"}, "inputs.x.shape"),
        ({"model": "MODEL", "input": "x:float32[2,4]", "quantization": "fp7"}, "quantization.scheme"),
        ({"model": "MODEL", "input": "x:float32[2,4]", "quantization": '{"sheme": "int8"}'}, "quantization.sheme"),
        ({"model": "MODEL", "input": "x:float32[2,4]", "quantization": "{"}, "quantization"),
        (
            {"model": "MODEL", "input": "x:float32[2,4]", "quantization": '{"scheme": "int8"}'},
            "quantization.calibration",
        ),
        (
            {"model": "MODEL", "input": "x:float32[2,4]", "quantization": '{"min_sqnr_db": 20}'},
            "quantization.min_sqnr_db",
        ),
        ({"model": "MODEL", "input": "x:float32[2,4]", "fast_math": "perhaps"}, "fast_math"),
        ({"model": "MODEL", "input": "x:float32[2,4]", "winograd": "perhaps"}, "winograd"),
    ],
)
def test_malformed_queries_name_the_field(service: Service, model: str, query: dict[str, Any], field: str) -> None:
    """A question that cannot be understood is 422, never quietly another question."""
    filled = {name: model if value == "MODEL" else value for name, value in query.items()}
    answer = service.http.get("/v1/artifacts", params=filled)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_whole_library(service: Service, address: str, artifact: Artifact) -> None:
    """GET gives the bytes with a strong tag of their content; HEAD the same headers without them."""
    got = service.http.get(address)
    assert (got.status_code, got.content) == (200, LIBRARY)
    assert got.headers["etag"] == ETAG
    assert got.headers["accept-ranges"] == "bytes"
    assert got.headers["cache-control"] == "no-cache"
    assert got.headers["content-disposition"] == f'attachment; filename="tunery-{artifact.key.digest()[:16]}.so"'
    head = service.http.head(address)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-disposition", "content-type", "accept-ranges"):
        assert head.headers[name] == got.headers[name]
    blob = service.http.get(f"/v1/blobs/{artifact.library}")
    assert (blob.content, blob.headers["etag"]) == (LIBRARY, ETAG)
    assert "immutable" in blob.headers["cache-control"]


@pytest.mark.parametrize(
    ("tags", "status"), [(ETAG, 200), ("*", 200), (f'"a", {ETAG}', 200), (WEAK, 412), ('"a"', 412), ("a", 412)]
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_if_match(service: Service, address: str, method: str, tags: str, status: int) -> None:
    """Who asks for certain bytes gets these, or 412 with the tag of those that are there."""
    for path in (address, f"/v1/blobs/{ETAG.strip(chr(34))}"):
        answer = service.http.request(method, path, headers={"if-match": tags})
        assert (answer.status_code, answer.headers["etag"]) == (status, ETAG)


@pytest.mark.parametrize(
    ("tags", "status"),
    [(ETAG, 304), (WEAK, 304), ("*", 304), (f'"a", {ETAG}', 304), (f'W/"a",{WEAK},"b"', 304), ('"a"', 200), ("a", 200)],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_if_none_match(service: Service, address: str, method: str, tags: str, status: int) -> None:
    """A tag in the list, `*` too, means that nothing is sent again."""
    answer = service.http.request(method, address, headers={"if-none-match": tags, "range": "bytes=0-9"})
    assert answer.status_code == (206 if status == 200 and method == "GET" else status)
    assert answer.headers["etag"] == ETAG
    if status == 304:
        assert answer.content == b""
        assert "content-length" not in answer.headers


SIZE = len(LIBRARY)


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=5-9", 5, 9),
        ("bytes=100-", 100, SIZE - 1),
        ("bytes=-7", SIZE - 7, SIZE - 1),
        (f"bytes=-{SIZE * 9}", 0, SIZE - 1),
        (f"bytes=5-{10**17}", 5, SIZE - 1),
        ("BYTES=5-9", 5, 9),
    ],
)
def test_range(service: Service, address: str, asked: str, first: int, last: int) -> None:
    """One range is 206 with exactly those bytes."""
    answer = service.http.get(address, headers={"range": asked})
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{SIZE}"
    assert answer.content == LIBRARY[first : last + 1]
    assert answer.headers["etag"] == ETAG


@pytest.mark.parametrize(
    "asked", ["bytes=5-4", "bytes=a-b", "bytes=-", "bytes", "items=0-5", "bytes=0-1,5-6", "bytes=1--2", "bytes= 5 - 9"]
)
def test_range_that_is_none_is_ignored(service: Service, address: str, asked: str) -> None:
    """An invalid or unknown range gives everything, never a wrong 206 (starlette#3388)."""
    answer = service.http.get(address, headers={"range": asked})
    assert (answer.status_code, answer.content) == (200, LIBRARY)
    assert "content-range" not in answer.headers


@pytest.mark.parametrize("asked", [f"bytes={SIZE}-", f"bytes={SIZE + 5}-{SIZE + 9}", "bytes=-0"])
def test_range_outside_is_416(service: Service, address: str, asked: str) -> None:
    """A range behind the end says how long the library is."""
    answer = service.http.get(address, headers={"range": asked})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{SIZE}"
    assert answer.json()["type"] == "/problems/range-not-satisfiable"


@pytest.mark.parametrize("tag", [WEAK, '"other"', "Tue, 01 Dec 2026 00:00:00 GMT", ETAG.strip('"')])
def test_if_range_with_another_tag_gives_everything(service: Service, address: str, tag: str) -> None:
    """A resume joins only bytes of the same strong tag (aiohttp#13480)."""
    answer = service.http.get(address, headers={"range": "bytes=5-9", "if-range": tag})
    assert (answer.status_code, answer.content) == (200, LIBRARY)
    same = service.http.get(address, headers={"range": "bytes=5-9", "if-range": ETAG})
    assert (same.status_code, same.content) == (206, LIBRARY[5:10])


def test_range_of_nothing() -> None:
    """An empty file has no range at all."""
    assert parse_range("bytes=0-0", 0) == "unsatisfiable"
    assert parse_range("bytes=-1", 0) == "unsatisfiable"
    assert parse_range(None, 0) is None


def test_retuned_library_has_another_tag(service: Service, model: str, batch: int) -> None:
    """After a faster revision, the old tag no longer validates, and an interrupted download starts anew."""
    first = service.finish(service.submit(model, batch).json()["id"], b"old" * 1000, latency_s=0.002)
    address = f"/v1/artifacts/{first.key.digest()}/library"
    old_tag = service.http.head(address).headers["etag"]
    service.finish(service.submit(model, batch, search={"trials": 9999}).json()["id"], b"new" * 1000, latency_s=0.001)
    answer = service.http.get(address, headers={"range": "bytes=100-", "if-range": old_tag})
    assert (answer.status_code, answer.content) == (200, b"new" * 1000)
    assert service.http.get(address, headers={"if-none-match": old_tag}).status_code == 200


@pytest.mark.parametrize("how", ["damaged", "truncated", "missing", "a link", "a folder"])
@pytest.mark.parametrize("asked", ["library", "blob", "manifest", "query", "submit"])
def test_damaged_bytes_are_never_served(service: Service, model: str, batch: int, how: str, asked: str) -> None:
    """An altered, short or lost library is a miss whoever asks first, and the next submission builds it again."""
    library = f"library of {batch}".encode() * 50
    job_id = service.submit(model, batch).json()["id"]
    artifact = service.finish(job_id, library)
    key = artifact.key.digest()
    path = blob_path(service, artifact.library)
    if how == "damaged":
        damage(path)
    elif how == "truncated":
        path.chmod(0o600)
        path.write_bytes(library[:-1])
    else:
        path.unlink()
        if how == "a link":
            path.symlink_to("/etc/passwd")
        elif how == "a folder":
            path.mkdir()
    query = {"model": model, "input": f"x:float32[{batch},4]"}
    first: dict[str, Callable[[], httpx.Response]] = {
        "library": lambda: service.http.get(f"/v1/artifacts/{key}/library"),
        "blob": lambda: service.http.get(f"/v1/blobs/{artifact.library}"),
        "manifest": lambda: service.http.get(f"/v1/artifacts/{key}"),
        "query": lambda: service.http.get("/v1/artifacts", params=query),
        "submit": lambda: service.submit(model, batch),
    }
    answer = first[asked]()
    if asked == "submit":
        assert answer.status_code == 201
    else:
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    for path_asked in (f"/v1/artifacts/{key}/library", f"/v1/artifacts/{key}", f"/v1/blobs/{artifact.library}"):
        assert service.http.get(path_asked).status_code == 404
    again = service.submit(model, batch)
    assert again.json()["id"] != job_id
    assert again.json()["state"] == "QUEUED"
    service.finish(again.json()["id"], library)
    assert service.http.get(f"/v1/artifacts/{key}/library").content == library


def test_open_download_survives_eviction(service: Service, model: str) -> None:
    """Who has begun to download gets the end too; the next one gets a miss (bazel-remote#893)."""
    library = b"0123456789abcdef" * 2**20
    artifact = service.publish(model, library)
    with service.http.stream("GET", f"/v1/artifacts/{artifact.key.digest()}/library") as stream:
        pieces = stream.iter_raw(65536)
        got = next(pieces)
        service.blobs.delete(artifact.library)
        got += b"".join(pieces)
    assert got == library
    assert service.http.get(f"/v1/artifacts/{artifact.key.digest()}/library").status_code == 404
