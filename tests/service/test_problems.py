"""Errors on the wire."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from service import problems
from service.app import create_app
from tests.samples import DEVICE
from tests.service.conftest import Service, quiet, relu_model
from tuning_db import errors


def test_every_public_error_is_mapped() -> None:
    """A new error without a status fails here, not in front of a user."""
    public = {c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    assert public == set(problems.KINDS)


def test_types_are_unique() -> None:
    """A client can tell every two errors apart by their type alone."""
    slugs = [kind.slug for kind in problems.KINDS.values()]
    assert len(slugs) == len(set(slugs))


def test_unknown_route_is_a_problem(service: Service) -> None:
    """A path that is not there is answered as every other error is."""
    answer = service.http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "/problems/not-found"
    assert answer.json()["status"] == 404


def test_wrong_method_names_the_right_ones(service: Service) -> None:
    """405 lists all methods of the path."""
    answer = service.http.put("/v1/jobs")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert answer.json()["type"] == "/problems/method-not-allowed"


async def _ask(app: Any, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(path, headers={"x-request-id": "abc-1"})


def test_unforeseen_error_tells_nothing_but_the_request_id(tmp_path: Any) -> None:
    """A bug answers 500 without its message or traceback, and with the id that finds them in the log."""
    import asyncio

    app = create_app(quiet(tmp_path))

    @app.get("/boom")
    def boom() -> None:
        raise RuntimeError("the password is hunter2")

    answer = asyncio.run(_ask(app, "/boom"))
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == "abc-1"
    assert "abc-1" in answer.json()["detail"]
    assert "hunter2" not in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("asked", ["", "a b", "x" * 65, 'evil"}{', "é".encode()])
def test_unsafe_request_ids_are_replaced(service: Service, asked: str | bytes) -> None:
    """Nothing that could break a line of the log is taken over from a client."""
    given = service.http.get("/healthz", headers={"x-request-id": asked}).headers["x-request-id"]
    assert len(given) == 32
    assert given.isalnum()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"inputs": {}}, "model"),
        ({"model": "m", "quantisation": {}}, "quantisation"),
        ({"model": "m", "search": {"trails": 3}}, "search.trails"),
        ({"model": "m", "search": {"trials": "3"}}, "search.trials"),
        ({"model": "m", "inputs": {"x": {"shape": "1,2"}}}, "inputs.x.shape"),
        ({"model": "m", "inputs": {"x": {"shape": [1, 2.5]}}}, "inputs.x.shape.1"),
        ({"model": "m", "inputs": {"x": {"shape": [True]}}}, "inputs.x.shape.0"),
        ({"model": "m", "inputs": {"x": {"shape": [10**4000]}}}, "inputs.x.shape.0"),
        ({"model": "m", "device": {"vndor": "x"}}, "device.vndor"),
        ({"model": "m", "device": 3}, "device"),
        ({"model": "m", "options": {"fast_math": "yes"}}, "options.fast_math"),
        ({"model": "m", "options": {"winograd": 0}}, "options.winograd"),
        ({"model": "m", "quantization": {"shceme": "int8"}}, "quantization.shceme"),
        ({"model": "m", "quantization": {"per_channel": "yes"}}, "quantization.per_channel"),
        ({"model": "m", "quantization": {"exclude": "conv"}}, "quantization.exclude"),
        ({"model": "m", "quantization": {"exclude": [""]}}, "quantization.exclude.0"),
        ([1], "body"),
    ],
)
def test_a_wrong_field_is_named(service: Service, body: Any, field: str) -> None:
    """Each field that does not parse is named by its dotted path, unknown ones too."""
    # Not through httpx's json=: Python's own spelling of 10**4000 is refused by Python.
    import json
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        text = json.dumps(body)
    finally:
        sys.set_int_max_str_digits(limit)
    answer = service.http.post("/v1/jobs", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/invalid-request"
    assert answer.json()["field"] == field


def test_names_given_twice_are_refused(service: Service, model: str) -> None:
    """A JSON object with two equal names is no request: whoever reads it would have to guess which one is meant."""
    twice = '"x": {"shape": [2, 4]}, "x": {"shape": [3, 4]}'
    for body, field in (
        (f'{{"model": "{model}", "inputs": {{{twice}}}}}', "x"),
        (f'{{"model": "{model}", "inputs": {{"x": {{"shape": [2, 4], "shape": [3, 4]}}}}}}', "shape"),
        (f'{{"model": "m", "model": "{model}", "inputs": {{"x": {{"shape": [2, 4]}}}}}}', "model"),
    ):
        answer = service.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert "twice" in answer.json()["detail"]
    spec = (None, f'{{"inputs": {{{twice}}}}}', "application/json")
    answer = service.http.post("/v1/jobs", files={"model": ("m", relu_model()), "spec": spec})
    assert (answer.status_code, answer.json()["field"]) == (422, "x")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream"])
def test_other_media_types_are_415(service: Service, model: str, kind: str) -> None:
    """JSON that is announced as something else is refused."""
    answer = service.http.post("/v1/jobs", content=f'{{"model": "{model}"}}', headers={"content-type": kind})
    assert (answer.status_code, answer.json()["type"]) == (415, "/problems/unsupported-media-type")
    assert "application/json" in answer.json()["detail"]


@pytest.mark.parametrize("trials", [-1, -(10**30), 100_001, 10**30, 10**4000])
def test_a_number_out_of_range_gets_the_range(service: Service, model: str, trials: int) -> None:
    """However large a budget is, the answer names the limits and does not repeat it."""
    digits = str(trials) if trials < 10**40 else "1" + "0" * 4000
    body = f'{{"model": "{model}", "inputs": {{"x": {{"shape": [2, 4]}}}}, "search": {{"trials": {digits}}}}}'
    answer = service.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["field"]) == (422, "search.trials")
    assert "from 0 to 100000" in answer.json()["detail"]
    assert len(answer.content) < 1500


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": "\\ud800"}'])
def test_what_is_no_json_is_refused(service: Service, body: bytes) -> None:
    """Broken, empty, absurdly nested or undecodable bodies are the client's fault."""
    answer = service.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["title"] == "A field of the request is wrong"


def test_huge_input_is_not_repeated(service: Service) -> None:
    """An error about a long value or name stays short."""
    long = "x" * 100_000
    for body in ({"model": long}, {"model": "m", long: 1}, {"model": "m", "device": long}):
        answer = service.http.post("/v1/jobs", json=body)
        assert answer.status_code == 422
        assert len(answer.content) < 1500


def test_a_json_body_has_a_limit(service: Service) -> None:
    """More JSON than any job needs is 413, not memory."""
    body = b'{"model": "' + b"x" * 2**20 + b'"}'
    answer = service.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["limit_bytes"] == 2**20


HOSTILE = [
    "..",
    "../x",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f",
    "%00",
    "a%00b",
    "/etc/passwd",
    "%ff",
    "a" * 5000,
    "'; --",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/{}",
        "/v1/models/{}/nodes",
        "/v1/calibrations/{}",
        "/v1/jobs/{}",
        "/v1/jobs/{}/events",
        "/v1/artifacts/{}",
        "/v1/artifacts/{}/library",
        "/v1/blobs/{}",
        "/v1/devices/{}",
    ],
)
def test_names_in_paths_never_become_paths(service: Service, path: str, name: str) -> None:
    """Whatever stands where a name should is a 404 problem: no file is touched, no statement fails."""
    answer = service.http.get(path.format(name))
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.content) < 1500


@pytest.mark.parametrize("name", ["../x", "\x00", "a\x00b", "/etc/passwd", "'; --"])
def test_names_in_queries_and_bodies_are_refused(service: Service, model: str, name: str) -> None:
    """Hostile names of models, devices, inputs and jobs are 422 wherever they are given."""
    ask: list[Callable[[], httpx.Response]] = [
        lambda: service.http.get("/v1/artifacts", params={"model": name, "input": "x:float32[2,4]"}),
        lambda: service.http.get("/v1/artifacts", params={"model": model, "device": name, "input": "x:float32[2,4]"}),
        lambda: service.http.get("/v1/artifacts", params={"model": model, "input": f"{name}:float32[2,4]"}),
        lambda: service.http.get("/v1/jobs", params={"device": name}),
        lambda: service.http.post("/v1/jobs", json={"model": name}),
        lambda: service.http.post("/v1/jobs", json={"model": model, "device": name}),
        lambda: service.http.post("/v1/jobs", json={"model": model, "device": {"board": name}}),
        lambda: service.http.post("/v1/jobs", json={"model": model, "inputs": {name: {"shape": [2, 4]}}}),
    ]
    statuses = [request().status_code for request in ask]
    assert statuses == [404, 422, 422, 422, 404, 422, 422, 422]


def test_an_unknown_page_start_is_refused(service: Service) -> None:
    """`before` must be a job's id."""
    answer = service.http.get("/v1/jobs", params={"before": "\x00"})
    assert answer.status_code == 404
    assert answer.json()["field"] == "before"


def test_unknown_query_fields_are_refused(service: Service) -> None:
    """A misspelled filter of the jobs does not quietly list all of them."""
    answer = service.http.get("/v1/jobs", params={"sate": "QUEUED"})
    assert (answer.status_code, answer.json()["field"]) == (422, "sate")


def test_head_is_get_without_the_body(service: Service, model: str, batch: int) -> None:
    """HEAD answers with the status and the headers of GET, for what is there and for what is not."""
    job = service.submit(model, batch).json()
    service.finish(job["id"], b"a library")
    key, nothing = job["key"], "0" * 64
    for path in (
        "/healthz", "/readyz", "/v1/jobs", f"/v1/jobs/{job['id']}", f"/v1/models/{model}", "/v1/devices",
        f"/v1/devices/{DEVICE.name}", f"/v1/artifacts?model={model}&input=x:float32[{batch},4]",
        f"/v1/artifacts/{key}", f"/v1/artifacts/{nothing}", f"/v1/jobs/{nothing}", f"/v1/models/{nothing}",
    ):  # fmt: skip
        got, head = service.http.get(path), service.http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        for name in ("content-type", "content-length"):
            assert head.headers[name] == got.headers[name], path
        assert (got.status_code == 404) == (nothing in path)


def test_description_is_whole(service: Service) -> None:
    """The OpenAPI document lists the contract's routes, and every reference in it leads somewhere."""
    import re

    answer = service.http.get("/openapi.json")
    document = answer.json()
    assert {"/v1/jobs", "/v1/models", "/v1/calibrations", "/v1/artifacts/{key}/library", "/readyz"} <= set(
        document["paths"]
    )
    referred = set(re.findall(r'"\$ref":\s*"#/components/schemas/([^"]+)"', answer.text))
    assert {"SearchIn", "JobOut"} <= referred
    assert referred <= set(document["components"]["schemas"])
    assert "#/$defs" not in answer.text
