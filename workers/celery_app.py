"""The Celery application of a worker: JSON only, one queue for its device, one job at a time."""

from __future__ import annotations

from celery import Celery

from tuning_db.messages import broker_config
from workers.settings import Settings


def create_app(settings: Settings) -> Celery:
    """The same broker configuration as the API's."""
    app = Celery("tunery-worker")
    app.conf.update(broker_config(settings.broker_url, settings.data_dir))
    app.conf.worker_hijack_root_logger = False
    return app
