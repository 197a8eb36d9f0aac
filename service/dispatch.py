"""Wakes workers: sends a job's id to its device's queue. The only place of the service that knows Celery."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery
from kombu.exceptions import KombuError

from tuning_db.errors import BrokerUnavailable
from tuning_db.jobs import Job
from tuning_db.messages import TUNE_TASK, broker_config, queue_for

#: For each attempt to reach the broker, of which the Redis client makes a few: a request waits seconds, not minutes,
#: for one that does not answer. The sweep sends the message later.
_TIMEOUT_S = 2.0


class Dispatcher:
    """Sends messages, never receives. Safe to share between threads."""

    def __init__(self, broker_url: str, data_dir: Path) -> None:
        self._app = Celery("tunery", set_as_current=False)
        config = broker_config(broker_url, data_dir)
        config["broker_transport_options"] |= {
            "socket_connect_timeout": _TIMEOUT_S,
            "socket_timeout": _TIMEOUT_S,
            # Kombu's own default is to try for ever while the request waits.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0,
            "interval_max": 0,
        }
        config["broker_connection_timeout"] = _TIMEOUT_S
        self._app.config_from_object(config)
        connection = self._app.connection_for_write()
        #: What the transport's library raises for a broker that is away, full or broken.
        self._errors = (KombuError, OSError, *connection.connection_errors, *connection.channel_errors)
        self._folder: str | None = config["broker_transport_options"].get("data_folder_in")

    def send(self, job: Job) -> None:
        """Put the job's id on its device's queue. BrokerUnavailable if that did not work within seconds.

        Nothing is declared: a message to a queue's name arrives whether or not a worker has been there yet, and
        concurrent declarations are what Kombu's file transport is not safe against.
        """
        try:
            self._app.send_task(
                TUNE_TASK,
                args=[job.id],
                queue=queue_for(job.spec.key.device.name),
                ignore_result=True,
                retry=False,
                declare=[],
            )
        except self._errors as error:
            raise BrokerUnavailable(
                f"job {job.id} is stored, but the broker does not answer ({error}); it is sent again when it does"
            ) from error

    def ping(self) -> None:
        """BrokerUnavailable unless a message could be sent now."""
        try:
            if self._folder is not None:
                if not os.access(self._folder, os.W_OK | os.X_OK):
                    raise BrokerUnavailable(f"the broker's folder {self._folder} is not writable; check its owner")
                return
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, timeout=_TIMEOUT_S)
        except self._errors as error:
            raise BrokerUnavailable(f"the broker does not answer: {error}; check TUNERY_BROKER_URL") from error

    def close(self) -> None:
        self._app.close()
