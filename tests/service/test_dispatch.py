"""Messages really travel: through a folder, and through Redis."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from service.app import sweep_once
from service.dispatch import Dispatcher
from service.inspector import Converter, Inspector
from service.services import Services
from tests.samples import make_spec
from tests.service.conftest import quiet
from tuning_db.blobs import BlobStore
from tuning_db.errors import BrokerUnavailable
from tuning_db.jobs import Job
from tuning_db.messages import EMBEDDED_BROKER, TUNE_TASK, broker_config, queue_for
from tuning_db.store import TuningStore


@pytest.fixture
def job(sqlite_url: str) -> Iterator[Job]:
    store = TuningStore(sqlite_url)
    yield store.submit(make_spec()).job
    store.close()


@pytest.fixture(params=["embedded", "redis"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """A broker that is up; the test runs once on each kind."""
    if request.param == "embedded":
        return EMBEDDED_BROKER
    url: str = request.getfixturevalue("redis_url")
    return url


@contextmanager
def dispatching(broker_url: str, data_dir: Path) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(broker_url, data_dir)
    try:
        yield dispatcher
    finally:
        dispatcher.close()


def received(broker_url: str, data_dir: Path, queue: str, count: int) -> list[Any]:
    """What a worker with the shared configuration finds in its queue."""
    app = Celery("a worker", set_as_current=False)
    app.config_from_object(broker_config(broker_url, data_dir))
    messages = []
    with app, app.connection_for_read() as connection, connection.SimpleQueue(queue) as box:
        for _ in range(count):
            message = box.get(timeout=10)
            message.ack()
            messages.append(message)
    return messages


def test_a_message_holds_one_id_in_json(broker_url: str, tmp_path: Path, job: Job) -> None:
    """What arrives is the task's name and the job's id, in JSON, in the queue of the job's device."""
    with dispatching(broker_url, tmp_path) as dispatcher:
        dispatcher.ping()
        dispatcher.send(job)
        dispatcher.send(job)
        messages = received(broker_url, tmp_path, queue_for(job.spec.key.device.name), 2)
    for message in messages:
        assert message.headers["task"] == TUNE_TASK
        assert message.payload[0] == [job.id]
        assert message.content_type == "application/json"


def test_both_sides_agree_that_only_json_is_read(tmp_path: Path) -> None:
    """A pickled message is refused, whoever wrote it (lmdeploy#4015)."""
    for url in (EMBEDDED_BROKER, "redis://localhost/0"):
        config = broker_config(url, tmp_path)
        assert config["accept_content"] == ["json"]
        assert config["task_serializer"] == "json"
        assert config["result_backend"] is None


def test_a_broker_that_is_away_is_told_within_seconds(tmp_path: Path, job: Job) -> None:
    """A refused connection is an error at once, not a request that hangs."""
    with dispatching("redis://127.0.0.1:1/0", tmp_path) as dispatcher:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="sent again"):
            dispatcher.send(job)
        with pytest.raises(BrokerUnavailable, match="TUNERY_BROKER_URL"):
            dispatcher.ping()
        assert time.monotonic() - began < 20


def test_a_broker_that_says_nothing_is_told_within_seconds(tmp_path: Path, job: Job) -> None:
    """A connection that is accepted and then silent ends in an error too."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with dispatching(url, tmp_path) as dispatcher:
            began = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                dispatcher.send(job)
            with pytest.raises(BrokerUnavailable):
                dispatcher.ping()
            assert time.monotonic() - began < 60


def test_a_full_redis_is_a_broker_that_is_away(redis_url: str, tmp_path: Path, job: Job) -> None:
    """At its memory limit Redis refuses the message, and the job waits for the sweep (celery#7801)."""
    import redis

    with redis.Redis.from_url(redis_url) as client, dispatching(redis_url, tmp_path) as dispatcher:
        limit = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(BrokerUnavailable):
                dispatcher.send(job)
        finally:
            client.config_set("maxmemory", limit)
        dispatcher.send(job)


def test_a_folder_that_is_gone_is_a_broker_that_is_away(tmp_path: Path, job: Job) -> None:
    """The embedded broker's folder is checked as a server would be."""
    with dispatching(EMBEDDED_BROKER, tmp_path) as dispatcher:
        (tmp_path / "broker" / "queue").rmdir()
        with pytest.raises(BrokerUnavailable):
            dispatcher.send(job)
        with pytest.raises(BrokerUnavailable):
            dispatcher.ping()


def test_what_could_not_be_sent_is_sent_by_the_next_sweep(sqlite_url: str, tmp_path: Path) -> None:
    """While the broker is away no waiting job loses its turn: as soon as it is back, one sweep sends every message."""
    now = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    store = TuningStore(sqlite_url, clock=lambda: now)
    jobs = [store.submit(make_spec(str(n))).job for n in range(3)]
    now += dt.timedelta(hours=1)
    queue = tmp_path / "broker" / "queue"
    with dispatching(EMBEDDED_BROKER, tmp_path) as dispatcher:
        inspector = Inspector(("false",), timeout_s=1, at_once=1)
        converter = Converter(("false",), timeout_s=1)
        services = Services(quiet(tmp_path), store, BlobStore(tmp_path / "blobs"), dispatcher, inspector, converter)
        queue.rmdir()
        for _ in range(2):
            sweep_once(services)
        queue.mkdir()
        sweep_once(services)
        assert len(list(queue.iterdir())) == 3
        sweep_once(services)
        assert len(list(queue.iterdir())) == 3
    messages = received(EMBEDDED_BROKER, tmp_path, queue_for(jobs[0].spec.key.device.name), 3)
    assert sorted(message.payload[0][0] for message in messages) == sorted(job.id for job in jobs)
    store.close()
