"""Errors as `application/problem+json` (RFC 9457): the one place where an error gets its HTTP status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from tuning_db import errors
from tuning_db.keys import NearestKey, to_json

#: RFC 9457 allows a relative type; this one stays the same wherever the service is mounted.
TYPE_PREFIX: Final = "/problems/"

#: Pieces of a request that an answer repeats are cut to this many characters.
_MAX_ECHO: Final = 120


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """What clients may rely on: `slug` ends the problem's type and never changes."""

    status: int
    slug: str
    title: str


KINDS: Final[Mapping[type[errors.TuneryError], ProblemKind]] = {
    errors.TuneryError: ProblemKind(500, "internal-error", "The service failed"),
    errors.InvalidRequest: ProblemKind(422, "invalid-request", "A field of the request is wrong"),
    errors.InvalidModel: ProblemKind(422, "invalid-model", "The model cannot be read"),
    errors.InvalidCalibration: ProblemKind(422, "invalid-calibration", "The calibration data cannot be read"),
    errors.UnsupportedFormat: ProblemKind(415, "unsupported-format", "The model is of a format that is not taken"),
    errors.UnsupportedOperator: ProblemKind(422, "unsupported-operator", "The model holds an unsupported operator"),
    errors.ShapeMismatch: ProblemKind(422, "shape-mismatch", "An input's shape does not fit the model"),
    errors.UnknownDevice: ProblemKind(422, "unknown-device", "No such device"),
    errors.UnsupportedOption: ProblemKind(422, "unsupported-option", "This version does not do that"),
    errors.NotFound: ProblemKind(404, "not-found", "Not found"),
    errors.CacheMiss: ProblemKind(404, "cache-miss", "No library under that key"),
    errors.Conflict: ProblemKind(409, "conflict", "The request contradicts what is stored"),
    errors.IllegalTransition: ProblemKind(409, "illegal-transition", "The job's state does not allow that"),
    errors.IdempotencyConflict: ProblemKind(409, "idempotency-conflict", "Idempotency-Key used with another body"),
    errors.StaleAttempt: ProblemKind(409, "stale-attempt", "Another worker holds the job"),
    errors.TooLarge: ProblemKind(413, "too-large", "Too many bytes"),
    errors.QueueFull: ProblemKind(503, "queue-full", "Too many jobs wait"),
    errors.StorageFull: ProblemKind(507, "storage-full", "No room to store that"),
    errors.SchemaMismatch: ProblemKind(503, "schema-mismatch", "The database has another schema"),
    errors.DatabaseUnavailable: ProblemKind(503, "database-unavailable", "The database does not answer"),
    errors.BlobCorrupt: ProblemKind(500, "blob-corrupt", "Stored bytes are damaged"),
    errors.BrokerUnavailable: ProblemKind(503, "broker-unavailable", "No worker could be woken"),
    # A job's failure is a field of the job. These have a status only in case one is raised while a request is served.
    errors.TuningFailed: ProblemKind(500, "tuning-failed", "The job failed"),
    errors.QuantizationFailed: ProblemKind(500, "quantization-failed", "The model could not be quantized"),
    errors.AccuracyTooLow: ProblemKind(500, "accuracy-too-low", "The quantized model keeps too little"),
    errors.ImportFailed: ProblemKind(500, "import-failed", "The model could not be imported"),
    errors.NoValidCandidate: ProblemKind(500, "no-valid-candidate", "No candidate built and ran"),
    errors.BuildFailed: ProblemKind(500, "build-failed", "The library did not compile"),
    errors.LoadFailed: ProblemKind(500, "load-failed", "The library does not load"),
    errors.DeviceLost: ProblemKind(500, "device-lost", "The device went away"),
    errors.CheckFailed: ProblemKind(500, "check-failed", "The library's numbers are wrong"),
    errors.ProcessDied: ProblemKind(500, "process-died", "The tuning process died"),
}


class Problem(JSONResponse):
    """A problem document with the status that it names."""

    media_type = "application/problem+json"

    def __init__(
        self, kind: ProblemKind, detail: str, *, headers: Mapping[str, str] | None = None, **members: Any
    ) -> None:
        document = {"type": TYPE_PREFIX + kind.slug, "title": kind.title, "status": kind.status, "detail": detail}
        super().__init__(
            document | {name: value for name, value in members.items() if value is not None},
            status_code=kind.status,
            headers=headers,
        )


class LocatedNotFound(errors.NotFound):
    """Something that the request refers to does not exist; `field` says where the request named it."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


def kind_of(error: errors.TuneryError) -> ProblemKind:
    return next(KINDS[base] for base in type(error).__mro__ if base in KINDS)


def problem_of(error: errors.TuneryError) -> Problem:
    """`error` as an answer, with the members that its class carries."""
    members: dict[str, Any] = {}
    for name in ("field", "format", "operator", "node", "opset", "limit_bytes"):
        if (value := getattr(error, name, None)) is not None:
            members[name] = shorten(value) if isinstance(value, str) else value
    if isinstance(error, errors.UnknownDevice):
        members["candidates"] = list(error.candidates)
    if isinstance(error, errors.CacheMiss):
        members["nearest"] = [nearest_to_wire(near) for near in error.nearest]
    kind = kind_of(error)
    headers = {}
    if kind.status in (413, 507):
        # The rest of the body is not read, so nothing else can be said over this connection.
        headers["connection"] = "close"
    if kind.status == 503:
        headers["retry-after"] = "5"
    return Problem(kind, str(error), headers=headers, **members)


def nearest_to_wire(near: NearestKey) -> dict[str, Any]:
    return {"key": near.key.digest(), "differences": [to_json(difference) for difference in near.differences]}


def invalid_request_of(
    error: ValidationError | RequestValidationError, *, within: str | None = None
) -> errors.InvalidRequest:
    """The first complaint of pydantic as ours: names the field, which lies `within` another one if that is given, does
    not repeat what was sent."""
    complaint = error.errors()[0]
    path = [] if within is None else [within]
    path += [str(step) for step in complaint["loc"] if step not in ("body", "query", "path", "header")]
    if path[:2] in (["device", "by-name"], ["device", "by-attributes"]):
        del path[1]  # pydantic's name for the branch of the union, not a field
    for place in range(3, len(path)):
        if path[place - 2] == "shape" and path[place] in ("a-size", "a-range"):
            del path[place]  # the same
            break
    field = shorten(".".join(path)) or "body"
    if complaint["type"] == "extra_forbidden":
        return errors.InvalidRequest(f"{field} is not a field of this request; check its spelling", field=field)
    if complaint["type"] == "missing":
        return errors.InvalidRequest(f"{field} is missing", field=field)
    message = re.sub(r"\s+", " ", str(complaint["msg"]))
    return errors.InvalidRequest(f"{field}: {shorten(message, 300)}", field=field)


def shorten(text: str, limit: int = _MAX_ECHO) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


#: How OpenAPI describes every answer that is not a success.
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "A problem document (RFC 9457); clients compare its `type`.",
        "content": {
            Problem.media_type: {
                "schema": {
                    "type": "object",
                    "required": ["type", "title", "status", "detail"],
                    "properties": {
                        "type": {"type": "string", "enum": sorted({TYPE_PREFIX + k.slug for k in KINDS.values()})},
                        "title": {"type": "string"},
                        "status": {"type": "integer"},
                        "detail": {"type": "string"},
                        "field": {"type": "string", "description": "the dotted path of the field that is wrong"},
                        "candidates": {"type": "array", "items": {"type": "string"}},
                        "nearest": {"type": "array", "items": {"type": "object"}},
                    },
                }
            }
        },
    }
}

INTERNAL: Final = KINDS[errors.TuneryError]


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Every error of `app` leaves as a problem document; an unforeseen one is answered by the outermost middleware.
    `routes` are what a 405 looks through: the framework's own names the methods of the first that fits only."""

    @app.exception_handler(errors.TuneryError)
    def tunery_error(request: Request, error: errors.TuneryError) -> Problem:
        return problem_of(error)

    @app.exception_handler(RequestValidationError)
    def validation_error(request: Request, error: RequestValidationError) -> Problem:
        return problem_of(invalid_request_of(error))

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Problem:
        phrase = HTTPStatus(error.status_code).phrase
        detail = {
            404: f"{shorten(request.url.path)!r} is not a resource of this service; /docs lists what is",
            405: f"{request.method} is not allowed here; see the Allow header",
        }.get(error.status_code, str(error.detail))
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            headers["allow"] = ", ".join(sorted(_methods_at(routes, request)))
        kind = ProblemKind(error.status_code, re.sub(r"[^a-z]+", "-", phrase.lower()), phrase)
        return Problem(kind, detail, headers=headers)


def _methods_at(routes: Sequence[BaseRoute], request: Request) -> set[str]:
    fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in fitting for method in getattr(route, "methods", None) or ()}
