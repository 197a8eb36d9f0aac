"""What a worker process is told from outside: environment variables that begin with TUNERY_."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tuning_db.layout import default_database_url
from tuning_db.messages import EMBEDDED_BROKER
from workers.devices.tracker import Tracker

Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Read once at start. The API reads the same names from the same environment; each ignores the other's own."""

    model_config = SettingsConfigDict(env_prefix="TUNERY_", frozen=True, extra="ignore")

    data_dir: Path = Path(".tunery")
    database_url: str = ""  #: empty: SQLite under `data_dir`
    broker_url: str = EMBEDDED_BROKER
    worker_name: str = ""  #: empty: host name and pid
    gpu: str = ""  #: number, as nvidia-smi counts, or UUID of the NVIDIA GPU that is driven; empty: none is
    tracker: str = ""  #: HOST:PORT of the tracker whose boards are driven; empty: this machine's CPU is
    board_key: str = ""  #: the key that they have joined under
    board_patience_s: Seconds = 120.0  #: boards that are all away for so long are lost, and so is the job
    heartbeat_interval_s: Seconds = 1.0  #: also how soon a cancel is noticed
    report_interval_s: Seconds = 20.0  #: how often the device is reported
    max_attempts: Annotated[int, Field(gt=0)] = 3  #: attempts at a job whose process is lost
    silence_timeout_s: Seconds = 900.0  #: a tuning process that reports nothing for so long is taken to hang
    job_timeout_s: Seconds = 8 * 24 * 3600.0  #: past any search: import, search, check and all

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        if bool(self.tracker) != bool(self.board_key):
            raise ValueError("a tracker and the key of its boards come together: TUNERY_TRACKER and TUNERY_BOARD_KEY")
        if self.tracker and self.gpu:
            raise ValueError("a worker drives a GPU or boards, not both: TUNERY_GPU, TUNERY_TRACKER")
        if self.tracker:
            Tracker.parse(self.tracker)
        data_dir = self.data_dir.absolute()
        object.__setattr__(self, "data_dir", data_dir)
        if not self.database_url:
            object.__setattr__(self, "database_url", default_database_url(data_dir))
        if not self.worker_name:
            object.__setattr__(self, "worker_name", f"{socket.gethostname()}-{os.getpid()}")
        return self
