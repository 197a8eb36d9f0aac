"""Calibration data: uploaded as models are, named by its arrays alone, and matched with a model before any queue."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.conftest import Service, relu_model
from tests.service.test_models import ask_raw, stored


def samples(seed: int = 0, count: int = 3) -> NDArray[np.float32]:
    """[count, 2, 4]: samples of `relu_model` with N = 2."""
    return np.random.default_rng(seed).standard_normal((count, 2, 4)).astype(np.float32)


def npz(compressed: bool = False, **arrays: Any) -> bytes:
    stream = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(stream, **arrays)
    return stream.getvalue()


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def zipped(members: Mapping[str, bytes], year: int = 2000) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), data)
    return stream.getvalue()


def tarred(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def upload(service: Service, content: bytes) -> httpx.Response:
    return service.http.post("/v1/calibrations", files={"calibration": ("s.npz", content)})


def calibrate(service: Service, seed: int = 0) -> str:
    answer = upload(service, npz(x=samples(seed)))
    assert answer.is_success, answer.text
    return str(answer.json()["digest"])


def test_upload_is_new_once(service: Service) -> None:
    """201 and the arrays for new samples; 200 and the same digest when they come again, and GET lists them."""
    content = npz(x=samples(1), size=np.arange(3))
    first = upload(service, content)
    assert first.status_code == 201
    found = first.json()
    assert found["arrays"] == [
        {"name": "size", "dtype": "int64", "shape": [3]},
        {"name": "x", "dtype": "float32", "shape": [3, 2, 4]},
    ]
    assert found["bytes"] == len(content)
    assert first.headers["location"] == f"/v1/calibrations/{found['digest']}"
    assert service.http.get(first.headers["location"]).json() == found
    bare = service.http.post("/v1/calibrations", content=content, headers={"content-type": "application/octet-stream"})
    assert (bare.status_code, bare.json()) == (200, found)


def test_the_digest_is_of_the_arrays(service: Service) -> None:
    """Order, times, compression and kind of the archive, and files in it that are no arrays, make no other samples;
    another value, name, dtype or shape does. A second archive of known samples is not kept."""
    arrays = {f"{i}/x": samples(5)[i] for i in range(3)}
    members = {f"{name}.npy": npy(array) for name, array in arrays.items()}
    backwards = dict(reversed(members.items()))
    digest = upload(service, zipped(members)).json()["digest"]
    before = stored(service)
    for content in (
        zipped(backwards, 2026), npz(True, **arrays), tarred({f"./{n}": d for n, d in backwards.items()}),
        zipped({**members, "README.txt": b"hello", "__MACOSX/0/._x.npy": b"\0"}),
    ):  # fmt: skip
        answer = upload(service, content)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest)
    assert stored(service) == before
    others = [
        npz(**{**arrays, "0/x": samples(6)[0]}), npz(**{**arrays, "0/y": samples(5)[0]}),
        npz(**{**arrays, "0/x": samples(5)[0].astype(np.float16)}), npz(**{**arrays, "0/x": samples(5)[0].ravel()}),
    ]  # fmt: skip
    digests = [upload(service, content).json()["digest"] for content in others]
    assert len({digest, *digests}) == 5


def test_second_archive_heals_a_lost_one(service: Service) -> None:
    """When the first archive's bytes are lost, another one of the same samples takes its place."""
    content = npz(x=samples(7))
    digest = upload(service, content).json()["digest"]
    sha256 = hashlib.sha256(content).hexdigest()
    path = service.blobs.root / sha256[:2] / sha256
    path.unlink()
    model = service.upload(relu_model())
    asked = {"quantization": {"scheme": "int8", "calibration": digest}}
    lost = service.submit(model, 2, **asked)
    assert (lost.status_code, lost.json()["field"]) == (404, "quantization.calibration")
    again = npz(True, x=samples(7))
    assert upload(service, again).json()["digest"] == digest
    assert service.store.calibration(digest).blob == hashlib.sha256(again).hexdigest()
    assert service.submit(model, 2, **asked).status_code == 201


NAN = samples()
NAN[1, 0, 2] = np.nan
ENCRYPTED = bytearray(zipped({"x.npy": npy(samples())}))
ENCRYPTED[6] |= 1
ENCRYPTED[ENCRYPTED.rindex(b"PK\x01\x02") + 8] |= 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"neither" * 100, "neither a .npz or .zip nor"),
        (zipped({"x.npy": npy(samples())})[:-30], "neither a .npz or .zip nor"),
        (bytes(ENCRYPTED), "cannot be read"),
        (zipped({"readme.txt": b"hello"}), "no .npy file"),
        (tarred({"a.npy": npy(samples()), "./a.npy": npy(samples())}), "'a.npy' twice"),
        (zipped({"a.npy": npy(samples()), "b.npy": b"hello"}), "'b.npy' is not an array"),
        (zipped({"x.npy": npy(samples())[:-4]}), "'x.npy' is cut short"),
        (zipped({"x.npy": npy(samples()) + b"more"}), "'x.npy' goes on behind its array"),
        (zipped({"x.npy": npy(np.array([{}], dtype=object))}), "'x.npy' holds Python objects"),
        (npz(x=np.array(["text"])), "'x.npy' is <U4, which no input takes"),
        (npz(x=samples().astype(">f4")), "'x.npy' is >f4"),
        (npz(x=samples()[:0]), "'x.npy' holds no samples"),
        (npz(a=samples(), x=NAN), "'x.npy' holds NaN or infinity"),
        (npz(x=np.asfortranarray(samples())), "'x.npy' is stored by columns"),
        (zipped({"x" * 1100 + ".npy": npy(samples())}), "a name has 1 to 1000"),
    ],
)
def test_what_is_no_samples_leaves_nothing_behind(service: Service, content: bytes, says: str) -> None:
    """What cannot be calibrated with is 422, names the array, and is not kept; nothing is ever unpickled."""
    before = stored(service)
    answer = upload(service, content)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-calibration"), answer.text
    assert answer.json()["field"] == "calibration"
    assert says in answer.json()["detail"]
    assert stored(service) == before


def test_limits(service: Service) -> None:
    """What is announced as too large is refused before it is sent, and an archive that unpacks to more than samples
    need before it is unpacked."""
    head = (
        "POST /v1/calibrations HTTP/1.1\r\nHost: t\r\nContent-Type: application/octet-stream\r\n"
        "Content-Length: 3221225472\r\n\r\n"
    )
    assert ask_raw(service, head, lambda connection: None).startswith(b"HTTP/1.1 413 ")
    many = tarred({f"{i}/x.npy": b"" for i in range(10_001)})
    lying = zipped({f"{i}/x.npy": npy(samples()) for i in range(3)})
    for content in (many, b"PK\1\2".join(_claiming(entry) for entry in lying.split(b"PK\1\2"))):
        answer = upload(service, content)
        assert answer.status_code == 422
        assert "unpacks to more than 10000 arrays or 8 GiB" in answer.json()["detail"]


def _claiming(entry: bytes) -> bytes:
    """What follows the signature of an entry in a zip's directory, with nearly 4 GiB as its size."""
    return entry if entry.startswith(b"PK") else entry[:20] + (0xFFFFFFFE).to_bytes(4, "little") + entry[24:]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": samples().astype(np.float64)}, "'x.npy' is float64, input 'x' takes float32; convert it"),
        ({"x": samples()[..., :3]}, "'x.npy' has the shape [3, 2, 3]; input 'x' takes [2, 4]"),
        ({"y/z": samples()[0], "x": samples()}, None),
        ({"x": np.concatenate(list(samples())), "size": np.arange(3)}, "'size.npy' is int64, input 'x' takes"),
    ],
)
def test_samples_must_fit_the_model(
    service: Service, model: str, arrays: dict[str, NDArray[Any]], says: str | None
) -> None:
    """Samples whose names, dtypes or shapes are not those of the model's inputs are 422 before there is a job."""
    digest = upload(service, npz(**arrays)).json()["digest"]
    jobs = service.http.get("/v1/jobs").json()["jobs"][:1]
    answer = service.submit(model, 2, quantization={"scheme": "int8", "calibration": digest})
    if says is None:
        assert answer.status_code == 201, "with one input, arrays may have any name"
        return
    assert (answer.status_code, answer.json()["field"]) == (422, "quantization.calibration")
    assert says in answer.json()["detail"]
    assert service.http.get("/v1/jobs").json()["jobs"][:1] == jobs


def test_every_wish_is_a_key_of_its_own(service: Service, model: str) -> None:
    """Mode, samples, method, percentile, scales and exclusions make jobs of their own, defaults spelled out none; and a
    miss names each field that differs."""
    first, second = calibrate(service, 10), calibrate(service, 11)
    base = {"scheme": "int8", "calibration": first}
    answers = [
        service.submit(model, 2, quantization={**base, **changes})
        for changes in (
            {}, {"calibration": second}, {"mode": "dynamic"}, {"method": "entropy"}, {"method": "percentile"},
            {"method": "percentile", "percentile": 99.9}, {"per_channel": False}, {"exclude": ["y", "the_node"]},
        )
    ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [201] * len(answers), [a.text for a in answers]
    assert len({answer.json()["key"] for answer in answers}) == len(answers)
    shown = answers[0].json()["spec"]["quantization"]
    defaults = {"mode": "static", "method": "minmax", "per_channel": True, "exclude": []}
    assert shown == {"scheme": "int8", "calibration": first, **defaults}
    spelled = service.submit(model, 2, quantization=shown)
    assert (spelled.status_code, spelled.json()["id"]) == (200, answers[0].json()["id"])
    judged = service.submit(model, 2, quantization={**base, "min_sqnr_db": 20})
    assert (judged.status_code, judged.json()["key"]) == (201, answers[0].json()["key"])
    assert judged.json()["spec"]["quantization"]["min_sqnr_db"] == 20

    service.finish(answers[7].json()["id"], b"int8")
    wanted = {
        "model": model,
        "input": "x:float32[2,4]",
        "quantization": json.dumps({**base, "exclude": ["the_node", "y"]}),
    }
    assert service.http.get("/v1/artifacts", params=wanted).json()["key"] == answers[7].json()["key"]
    other = {**wanted, "quantization": json.dumps({**base, "calibration": second, "method": "entropy"})}
    miss = service.http.get("/v1/artifacts", params=other)
    assert miss.status_code == 404
    (near,) = [near for near in miss.json()["nearest"] if near["key"] == answers[7].json()["key"]]
    assert [difference["field"] for difference in near["differences"]] == [
        "quantization.calibration", "quantization.method", "quantization.exclude",
    ]  # fmt: skip


def test_unknown_samples_are_404(service: Service, model: str) -> None:
    """A digest that nobody uploaded is not found, and the field is named."""
    answer = service.submit(model, 2, quantization={"scheme": "int8", "calibration": "0" * 64})
    assert (answer.status_code, answer.json()["field"]) == (404, "quantization.calibration")


def test_exclusions_are_checked_at_the_submission(service: Service, model: str) -> None:
    """A name that is no node's is 422 before there is a job, with the nearest; those there are can be asked for."""
    jobs = service.http.get("/v1/jobs").json()["jobs"][:1]
    wanted = {"scheme": "int8", "mode": "dynamic", "exclude": ["the_nodes"]}
    answer = service.submit(model, 2, quantization=wanted)
    assert (answer.status_code, answer.json()["field"]) == (422, "quantization.exclude")
    assert "no node 'the_nodes'; did you mean 'the_node'?" in answer.json()["detail"]
    many = service.submit(model, 2, quantization=wanted | {"exclude": [f"{n}" * 200 for n in range(1000, 2000)]})
    assert (many.status_code, many.json()["field"]) == (422, "quantization.exclude")
    assert service.http.get("/v1/jobs").json()["jobs"][:1] == jobs
    nodes = service.http.get(f"/v1/models/{model}/nodes").json()
    assert nodes == {"nodes": [{"node": "the_node", "operator": "Relu"}], "more": 0}
