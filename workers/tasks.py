"""The one Celery task. It takes an id: the row is the truth, and a message that comes twice does nothing twice."""

from __future__ import annotations

from celery import Celery
from celery.signals import worker_shutting_down

from tuning_db.messages import TUNE_TASK
from workers.supervisor import Supervisor


def register(app: Celery, supervisor: Supervisor) -> None:
    """Bind the task to this worker's supervisor, and the worker's shutdown to the job that it runs."""

    @app.task(name=TUNE_TASK)  # type: ignore[untyped-decorator]
    def tune_job(job_id: str) -> None:
        supervisor.run(job_id)

    @worker_shutting_down.connect(weak=False)  # type: ignore[untyped-decorator]
    def stop(**_: object) -> None:
        supervisor.stopping.set()
