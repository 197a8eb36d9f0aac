"""The application: its collaborators are built here, once, and closed here. `python -m service.app` serves it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import problems
from service.dispatch import Dispatcher
from service.inspector import Converter, Inspector
from service.routes import artifacts, calibrations, devices, health, jobs, models
from service.services import Services
from service.settings import InvalidSetting, Settings, read_settings
from tuning_db.blobs import BlobStore
from tuning_db.errors import BrokerUnavailable
from tuning_db.layout import blob_dir
from tuning_db.store import TuningStore

log = structlog.get_logger()

#: An upload whose file has not grown for so long belonged to a process that was killed.
_ABANDONED_S: Final = 3600.0

#: A client that names its request gets the same name back, if it is safe to write into a log.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_app(settings: Settings) -> FastAPI:
    """The service over an upgraded database. Nothing is opened before the lifespan begins."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        async with contextlib.AsyncExitStack() as stack:
            store = TuningStore(settings.database_url)
            stack.callback(store.close)
            dispatcher = Dispatcher(settings.broker_url, settings.data_dir)
            stack.callback(dispatcher.close)
            inspector = Inspector(
                settings.inspector, timeout_s=settings.inspector_timeout_s, at_once=settings.inspectors_at_once
            )
            stack.push_async_callback(inspector.close)
            converter = Converter(settings.converter, timeout_s=settings.converter_timeout_s)
            blobs = BlobStore(blob_dir(settings.data_dir))
            blobs.sweep_temp(_ABANDONED_S)
            services = Services(settings, store, blobs, dispatcher, inspector, converter)
            app.state.services = services
            sweep = asyncio.create_task(sweep_for_ever(services))
            stack.push_async_callback(_end, sweep)
            yield

    app = Api(
        title="Tunery",
        summary="Tunes a model for a device once, and hands the tuned library to everyone who asks again",
        lifespan=lifespan,
        responses=problems.RESPONSES,
        redirect_slashes=False,  # an address is right or wrong
    )
    routers = [module.router for module in (models, calibrations, jobs, artifacts, devices, health)]
    for router in routers:
        app.include_router(router)
    problems.install(app, [route for router in routers for route in router.routes])
    app.add_middleware(RequestLog)
    return app


class Api(FastAPI):
    """FastAPI whose description holds the schemas of the bodies that are not parsed by it."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document["components"]["schemas"] |= jobs.SCHEMAS
        return document


async def sweep_for_ever(services: Services) -> None:
    """Send again what nobody took, and requeue what lost its worker. Several API processes may do so at once: each
    row changes hands by compare-and-set, and a message sent twice is claimed once."""
    settings = services.settings
    while True:
        await asyncio.sleep(settings.sweep_interval_s)
        try:
            await run_in_threadpool(sweep_once, services)
        except Exception:
            # The database may be away for a while; without the sweep, lost jobs would stay lost when it is back.
            log.exception("sweep_failed")


def sweep_once(services: Services) -> None:
    settings = services.settings
    swept = services.store.sweep(
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        unclaimed_after_s=settings.unclaimed_after_s,
        max_attempts=settings.max_attempts,
    )
    for job in swept.failed:
        log.warning("job_given_up", job=job.id, attempts=job.attempt)
    waiting = [*swept.requeued, *swept.unclaimed]
    for number, job in enumerate(waiting):
        try:
            services.dispatcher.send(job)
        except BrokerUnavailable as error:
            log.warning("broker_unavailable", job=job.id, reason=str(error))
            # The rest would wait for the same timeout; the next sweep lists them again.
            services.store.not_woken([job.id for job in waiting[number:]])
            return
        log.info("job_sent_again", job=job.id, attempt=job.attempt)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class RequestLog:
    """Outermost: gives every request an id, logs it, and answers what nobody foresaw without telling why."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        path = problems.shorten(scope["path"])
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        started = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                log.info("client_left", method=scope["method"], path=path)
                return
            except Exception:
                log.exception("request_failed", method=scope["method"], path=path)
                if status:
                    raise  # half an answer is out; the server cuts the connection
                answer = problems.Problem(
                    problems.INTERNAL,
                    f"the service failed; its log says why under request id {request_id}",
                    headers={"connection": "close"},
                )
                await answer(scope, receive, send_with_id)
            log.info(
                "request",
                method=scope["method"],
                path=path,
                status=status,
                ms=round((time.perf_counter() - started) * 1000, 1),
            )


def configure_logging() -> None:
    """One JSON object a line on standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m service.app", description="Serve Tunery's HTTP API.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, help="serve this inherited, bound socket instead of opening one")
    options = parser.parse_args()
    configure_logging()
    try:
        app = create_app(read_settings())
    except InvalidSetting as error:
        raise SystemExit(str(error)) from None
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    sockets = [socket.socket(fileno=options.fd)] if options.fd is not None else None
    server.run(sockets=sockets)


if __name__ == "__main__":
    main()
