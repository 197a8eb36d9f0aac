"""Tuning jobs: submitted, listed, watched, cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal, TypeVar

import structlog
from fastapi import APIRouter, Header, HTTPException, Query, Request, Response
from pydantic import ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from service.problems import LocatedNotFound, invalid_request_of, shorten
from service.resolve import (
    artifact_of,
    check_library,
    key_for,
    known_calibration,
    known_device,
    known_model,
    refuse_on,
    refuse_range,
    uploaded_calibration,
    uploaded_model,
)
from service.routes.models import FILE_PARTS, keep_model
from service.schemas import Inward, JobIn, JobList, JobOut, JobPage, JobsQuery, TargetSpecIn
from service.services import Services, ServicesDep
from service.uploads import read_body, receive
from tuning_db.calibration import CalibrationInfo
from tuning_db.catalog import ModelInfo
from tuning_db.errors import BrokerUnavailable, CacheMiss, InvalidRequest, NotFound
from tuning_db.jobs import Job, JobSpec, JobState
from tuning_db.keys import sha256_json
from tuning_db.store import Submission

log = structlog.get_logger()
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Body = TypeVar("Body", bound=Inward)

_JOB_SCHEMA = JobIn.model_json_schema(ref_template="#/components/schemas/{model}")
#: The body is parsed here and not by the framework, so its parts are described here too.
SCHEMAS: dict[str, Any] = _JOB_SCHEMA.pop("$defs")

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _JOB_SCHEMA},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "model": {"type": "string", "format": "binary"},
                        "spec": {"type": "string", "description": "the JSON of a submission without its `model`"},
                    },
                    "required": ["model", "spec"],
                }
            },
        },
    }
}


@router.post("", status_code=201, response_model_exclude_none=True, openapi_extra=_BODY)
async def submit_job(
    request: Request,
    response: Response,
    services: ServicesDep,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> JobOut | JobList:
    """201 for a new job, 200 for the job that already answers: running, or finished with its library. For `shapes`, the
    jobs of all of them, and 201 if one is new; what is wrong with one refuses all."""
    if idempotency_key is not None and re.fullmatch(r"[\x21-\x7e]{1,200}", idempotency_key) is None:
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 200 visible ASCII characters without spaces", field="Idempotency-Key"
        )
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type.startswith("multipart/"):
        async with receive(
            request,
            services.blobs,
            file_parts=FILE_PARTS[:1],
            text_parts=("spec",),
            max_bytes=services.settings.max_upload_bytes,
        ) as upload:
            if "spec" not in upload.fields:
                raise InvalidRequest("the JSON part 'spec' is missing", field="spec")
            wanted = _parse(TargetSpecIn, upload.fields["spec"])
            wanted.quantization.to_config()
            wanted.search.to_config()
            wanted.inputs_of_jobs()
            model, _ = await keep_model(services, upload)
    elif content_type != "application/json":
        raise HTTPException(415, "send application/json, or multipart/form-data with the model and its spec")
    else:
        body = _parse(JobIn, await read_body(request))
        wanted = body
        model = await run_in_threadpool(known_model, services.store, body.model)
    submissions = await _submit(services, model, wanted, idempotency_key)
    response.status_code = 201 if any(submission.created for submission in submissions) else 200
    jobs = [
        JobOut.of(s.job, cached=not s.created and s.job.state is JobState.SUCCEEDED)  # a finished job answered it
        for s in submissions
    ]
    if wanted.shapes is not None:
        return JobList(jobs=jobs)
    response.headers["location"] = jobs[0].links.self
    return jobs[0]


@router.head("", response_model_exclude_none=True, include_in_schema=False)
@router.get("", response_model_exclude_none=True)
def list_jobs(query: Annotated[JobsQuery, Query()], request: Request, services: ServicesDep) -> JobPage:
    """Newest first; `next` is the address of the page after this one."""
    device = None if query.device is None else known_device(services.store, query.device).name
    before = None if query.before is None else _known_job(services, query.before, field="before").id
    jobs = services.store.jobs(states=tuple(query.state), device=device, limit=query.limit + 1, before=before)
    page = jobs[: query.limit]
    more = request.url.include_query_params(before=page[-1].id) if len(jobs) > query.limit else None
    return JobPage(jobs=[JobOut.of(job) for job in page], next=f"{more.path}?{more.query}" if more else None)


@router.head("/{job_id}", response_model_exclude_none=True, include_in_schema=False)
@router.get("/{job_id}", response_model_exclude_none=True)
def get_job(job_id: str, services: ServicesDep) -> JobOut:
    return JobOut.of(_known_job(services, job_id))


@router.post("/{job_id}/cancel", response_model_exclude_none=True)
def cancel_job(job_id: str, services: ServicesDep) -> JobOut:
    """A waiting job is CANCELLED at once; a running one by its worker, within seconds."""
    return JobOut.of(services.store.request_cancel(_known_job(services, job_id).id))


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def stream_events(
    job_id: str, services: ServicesDep, last_event_id: Annotated[str | None, Header()] = None
) -> EventSourceResponse:
    """Server-sent events: what the worker reports, in order, then one `end` with the job as it then stands."""
    job = await run_in_threadpool(_known_job, services, job_id)
    if last_event_id and not re.fullmatch(r"[0-9]{1,9}", last_event_id):
        raise InvalidRequest("Last-Event-ID is not the id of an event of this stream", field="Last-Event-ID")
    return EventSourceResponse(_events(services, job.id, int(last_event_id or 0)), ping=15)


async def _events(services: Services, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    while True:
        # The job first: events that were written before it ended are then all found by the reading that follows.
        job = await run_in_threadpool(services.store.job, job_id)
        while events := await run_in_threadpool(services.store.events, job_id, after=after):
            for event in events:
                after = event.seq
                yield ServerSentEvent(json.dumps(event.data), event=event.type, id=str(event.seq))
        if job.state.is_final:
            yield ServerSentEvent(json.dumps(JobOut.of(job).model_dump(mode="json", exclude_none=True)), event="end")
            return
        await asyncio.sleep(services.settings.event_poll_s)


async def _submit(
    services: Services, model: ModelInfo, wanted: TargetSpecIn, idempotency_key: str | None
) -> list[Submission]:
    """The submissions, one for each shape, once nothing is wrong with any of them."""
    specs, calibration, unknown = await run_in_threadpool(_resolve, services, model, wanted)
    if unknown:
        # What was built once needs no second look; a hit costs no process.
        path = await run_in_threadpool(uploaded_model, services.blobs, model)
        if calibration is not None:
            await run_in_threadpool(uploaded_calibration, services.blobs, calibration)
        keys = [specs[position].key for position in unknown]
        checks = [services.inspector.check(path, model.blob, key) for key in keys]
        for position, complaint in zip(unknown, await asyncio.gather(*checks, return_exceptions=True), strict=True):
            with _located(wanted, position):
                if complaint is not None:
                    raise complaint
    request_digest = sha256_json({"model": model.digest, **_canonical(wanted)})
    submissions = await run_in_threadpool(
        services.store.submit_all,
        specs,
        idempotency=(idempotency_key, request_digest) if idempotency_key is not None else None,
        max_queued=services.settings.max_queued,
    )
    for submission in submissions:
        if submission.created:
            try:
                await run_in_threadpool(services.dispatcher.send, submission.job)
            except BrokerUnavailable as error:
                # Stored is stored: the sweep sends it, and those after it, when the broker is back.
                log.warning("broker_unavailable", job=submission.job.id, reason=str(error))
                break
    return submissions


def _resolve(
    services: Services, model: ModelInfo, wanted: TargetSpecIn
) -> tuple[list[JobSpec], CalibrationInfo | None, list[int]]:
    """What each job is to do, the calibration data of all, and the positions of those whose library is not stored."""
    device = known_device(services.store, wanted.device)
    quantization, options = wanted.quantization.to_config(), wanted.options.to_options()
    refuse_on(device, quantization, options)
    specs: list[JobSpec] = []
    unknown: list[int] = []
    calibration = None
    if quantization.calibration is not None:
        calibration = known_calibration(services.store, quantization.calibration)
    for position, inputs in enumerate(wanted.inputs_of_jobs()):
        with _located(wanted, position):
            key = key_for(model, device, inputs, quantization, options)
            refuse_range(key)
            spec = JobSpec(key, wanted.search.to_config(), wanted.quantization.min_sqnr_db)
            if spec in specs:
                raise InvalidRequest("it is there already; give each shape once", field="inputs")
            if calibration is not None:
                calibration.arrange(key.inputs)
        specs.append(spec)
        try:
            check_library(services.store, services.blobs, artifact_of(services.store, key.digest()))
        except CacheMiss:
            unknown.append(position)
    return specs, calibration, unknown


@contextlib.contextmanager
def _located(wanted: TargetSpecIn, position: int) -> Iterator[None]:
    """What is wrong with one of several shapes says with which."""
    try:
        yield
    except InvalidRequest as error:
        if wanted.shapes is not None:
            error.args = (f"shape {position + 1} of {len(wanted.shapes)}: {error}",)
            if error.field.partition(".")[0] == "inputs":
                error.field = f"shapes.{position}{error.field.removeprefix('inputs')}"
        raise


def _canonical(wanted: TargetSpecIn) -> dict[str, Any]:
    spelled = wanted.model_dump(mode="json", exclude={"model"})
    # Requests that say nothing of later fields have the digest that they have always had.
    quantization = {name: value for name, value in spelled["quantization"].items() if value is not None}
    if spelled["shapes"] is None:
        del spelled["shapes"]
    if not spelled["options"]["reassociation"]:
        del spelled["options"]["reassociation"]
    return {**spelled, "quantization": quantization}


def _parse(kind: type[Body], body: bytes) -> Body:
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request_of(error) from None
    # The parser takes the last of two equal names, and says nothing; numbers are left as they are spelled.
    json.loads(body.decode(), object_pairs_hook=_refuse_duplicates, parse_int=str, parse_float=str)
    return parsed


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            name = shorten(name)
            raise InvalidRequest(f"{name!r} stands twice in one JSON object; send it once", field=name or "body")
        seen.add(name)


def _known_job(services: Services, job_id: str, *, field: Literal["before"] | None = None) -> Job:
    try:
        if re.fullmatch(r"[0-9a-f]{32}", job_id) is None:
            raise NotFound("a job's id is 32 lower-case hexadecimal digits")
        return services.store.job(job_id)
    except NotFound:
        message = f"no job {shorten(job_id, 80)!r}; GET /v1/jobs lists those there are"
        if field is not None:
            raise LocatedNotFound(message, field=field) from None
        raise NotFound(message) from None
