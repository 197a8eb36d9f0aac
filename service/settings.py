"""What the API process is told from outside: environment variables that begin with TUNERY_."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from tuning_db.layout import default_database_url
from tuning_db.messages import EMBEDDED_BROKER

Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Read once at start; every field has a default that works on one machine with nothing else installed."""

    model_config = SettingsConfigDict(env_prefix="TUNERY_", frozen=True, extra="forbid")

    data_dir: Path = Path(".tunery")
    database_url: str = ""  #: empty: SQLite under `data_dir`
    broker_url: str = EMBEDDED_BROKER
    max_upload_bytes: Annotated[int, Field(gt=0)] = 8 * 2**30  #: a model with its data files, or samples
    max_queued: Annotated[int, Field(gt=0)] = 10_000  #: jobs that may wait for a worker at one time

    inspector: tuple[str, ...] = (sys.executable, "-m", "workers.frontend.inspect")
    inspector_timeout_s: Seconds = 120.0  #: on a busy machine too; its time on the processor is bounded by itself
    inspectors_at_once: Annotated[int, Field(gt=0)] = 2
    #: What makes ONNX of other formats. Another interpreter may be named, with packages that the API does without.
    converter: tuple[str, ...] = (sys.executable, "-m", "workers.frontend.convert")
    converter_timeout_s: Seconds = 300.0

    sweep_interval_s: Seconds = 5.0
    heartbeat_timeout_s: Seconds = 30.0
    unclaimed_after_s: Seconds = 30.0
    max_attempts: Annotated[int, Field(gt=0)] = 3
    event_poll_s: Seconds = 0.5  #: how often a stream of events looks for new ones

    @model_validator(mode="after")
    def _place_database(self) -> Self:
        data_dir = self.data_dir.absolute()
        object.__setattr__(self, "data_dir", data_dir)
        if not self.database_url:
            object.__setattr__(self, "database_url", default_database_url(data_dir))
        return self


class InvalidSetting(Exception):
    """`str(error)` names the environment variable and says what it wants."""


def read_settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        complaint = error.errors()[0]
        name = f"TUNERY_{'.'.join(map(str, complaint['loc'])).upper()}"
        raise InvalidSetting(f"{name} is {complaint['input']!r}: {complaint['msg']}; correct it or unset it") from None
    except SettingsError as error:
        raise InvalidSetting(f"a TUNERY_ variable that wants JSON is something else: {error}") from None


if __name__ == "__main__":  # `tunery up` asks so before it starts anything
    try:
        read_settings()
    except InvalidSetting as error:
        raise SystemExit(str(error)) from None
