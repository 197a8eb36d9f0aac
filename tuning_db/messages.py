"""What the API and the workers say to each other over the broker: one task, one queue a device, one id a message."""

from __future__ import annotations

from typing import Final

TUNE_TASK: Final = "tunery.tune"


def queue_for(device: str) -> str:
    """The queue that workers of the device named `device` (`DeviceIdentity.name`) consume."""
    return f"tunery.tune.{device}"
