"""What the API and the workers say to each other over the broker: one task, one queue a device, one id a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tuning_db.layout import broker_dir

TUNE_TASK: Final = "tunery.tune"

#: The broker that needs no server: messages are files in a folder beside the database.
EMBEDDED_BROKER: Final = "filesystem://"


def queue_for(device: str) -> str:
    """The queue that workers of the device named `device` (`DeviceIdentity.name`) consume."""
    return f"tunery.tune.{device}"


def broker_config(broker_url: str, data_dir: Path) -> dict[str, Any]:
    """Celery's configuration for `broker_url`, the same on both sides of the broker.

    Messages are JSON only, so that whoever can write to the broker cannot make a worker unpickle anything. They are
    acknowledged when received: the row is the truth, and a message that is lost or delivered twice costs nothing,
    because the sweep sends it again and a claim is won once. No result is kept in the broker.
    Makes the embedded broker's folders under `data_dir` if that is the broker.
    """
    return {
        "broker_url": broker_url,
        "broker_transport_options": _transport_options(broker_url, data_dir),
        "broker_connection_retry_on_startup": True,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "result_backend": None,
        "task_ignore_result": True,
        "task_acks_late": False,
        # A queue is declared by its name alone: direct, durable, made when first used.
        "task_create_missing_queues": True,
        # One job at a time: a message that waits in a busy worker's memory could be taken by an idle one.
        "worker_prefetch_multiplier": 1,
        "enable_utc": True,
        "timezone": "UTC",
    }


def _transport_options(broker_url: str, data_dir: Path) -> dict[str, Any]:
    if broker_url.startswith("filesystem:"):
        root = broker_dir(data_dir)
        queue, control, processed = root / "queue", root / "control", root / "processed"
        for folder in (queue, control, processed):
            folder.mkdir(parents=True, exist_ok=True)
        return {
            "data_folder_in": str(queue),
            "data_folder_out": str(queue),
            "control_folder": str(control),
            "processed_folder": str(processed),
            "store_processed": False,
            # A look into an empty folder; by itself Kombu's file transport looks once a second.
            "polling_interval": 0.2,
        }
    if broker_url.startswith(("redis:", "rediss:")):
        # Messages are acknowledged at once, so this only bounds how long one stays with a worker that died holding it.
        return {
            "visibility_timeout": 3600,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
            "retry_on_timeout": True,
        }
    return {}
