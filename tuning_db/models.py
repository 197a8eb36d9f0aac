"""The rows, as SQLAlchemy sees them. They never leave this package: `store.py` turns them into frozen values."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, Integer, LargeBinary, String, Text, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

#: Counts up by itself. SQLite does that only for a column that is spelled INTEGER.
Serial = BigInteger().with_variant(Integer(), "sqlite")
Digest = String(64)


class UtcDateTime(TypeDecorator[dt.datetime]):
    """A moment: aware on the way in, UTC on the way out. SQLite keeps no zone, so there the text is always UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a stored time needs a zone: use datetime.now(UTC)")
        value = value.astimezone(dt.UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        dt.datetime: UtcDateTime(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }


class ModelRow(Base):
    __tablename__ = "models"

    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    blob: Mapped[str] = mapped_column(Digest, index=True)
    format: Mapped[str] = mapped_column(String(32))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    inputs: Mapped[list[Any]]
    outputs: Mapped[list[Any]]
    created_at: Mapped[dt.datetime]


class CalibrationRow(Base):
    __tablename__ = "calibrations"

    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    blob: Mapped[str] = mapped_column(Digest, index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    arrays: Mapped[list[Any]]
    created_at: Mapped[dt.datetime]


class DeviceRow(Base):
    """One worker's last report of the device it is attached to."""

    __tablename__ = "devices"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    worker: Mapped[str] = mapped_column(String(255), primary_key=True)
    identity: Mapped[dict[str, Any]]
    target: Mapped[str] = mapped_column(Text)
    toolchain: Mapped[dict[str, Any]]
    last_seen: Mapped[dt.datetime]


class RoofRow(Base):
    """The newest measurement of what a device can do at most, whichever worker made it."""

    __tablename__ = "roofs"

    device: Mapped[str] = mapped_column(String(128), primary_key=True)
    flops_per_s: Mapped[float]
    bytes_per_s: Mapped[float]
    flops_per_s_one_thread: Mapped[float]
    measured_at: Mapped[dt.datetime]
    toolchain: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class HealthRow(Base):
    """How a slot of a device was when it was last measured on."""

    __tablename__ = "healths"

    device: Mapped[str] = mapped_column(String(128), primary_key=True)
    slot: Mapped[str] = mapped_column(String(255), primary_key=True)
    reference_s: Mapped[float]
    best_reference_s: Mapped[float]
    temperature_c: Mapped[float | None]
    khz: Mapped[int | None]
    governor: Mapped[str | None] = mapped_column(String(255))
    measured_at: Mapped[dt.datetime]


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        # At most one job of a key and budget is under way: what makes twenty equal requests at once into one job.
        Index(
            "uq_jobs_active_key_budget",
            "key_digest",
            "budget_digest",
            unique=True,
            sqlite_where=text("state IN ('QUEUED', 'RUNNING')"),
            postgresql_where=text("state IN ('QUEUED', 'RUNNING')"),
        ),
        Index("ix_jobs_key_state", "key_digest", "state"),
        Index("ix_jobs_state_device", "state", "device"),
    )

    number: Mapped[int] = mapped_column(Serial, primary_key=True)  #: the order in which jobs were made
    id: Mapped[str] = mapped_column(String(32), unique=True)
    key_digest: Mapped[str] = mapped_column(Digest)
    budget_digest: Mapped[str] = mapped_column(Digest)
    device: Mapped[str] = mapped_column(String(128))
    spec: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int]
    lost: Mapped[int]  #: attempts whose worker vanished; a worker that hands its job back is not counted
    created_at: Mapped[dt.datetime]
    updated_at: Mapped[dt.datetime]
    claimed_by: Mapped[str | None] = mapped_column(String(255))
    heartbeat_at: Mapped[dt.datetime | None]
    cancel_requested: Mapped[bool]
    trials_measured: Mapped[int]
    error_kind: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(Text)
    events: Mapped[int]  #: the `seq` of the newest event, counted up under this row's lock
    woken_at: Mapped[dt.datetime | None]  #: when a message was last sent for it; NULL: none is on its way


class EventRow(Base):
    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    type: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    at: Mapped[dt.datetime]


class IdempotencyRow(Base):
    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_sha256: Mapped[str] = mapped_column(Digest)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[dt.datetime]


class ScopeRow(Base):
    __tablename__ = "record_scopes"

    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    data: Mapped[dict[str, Any]]
    created_at: Mapped[dt.datetime]


class WorkloadRow(Base):
    """A workload within a scope. Trials point to its number, which is an eighth of the two digests it stands for."""

    __tablename__ = "workloads"
    __table_args__ = (
        Index("uq_workloads_scope_digest", "scope", "digest", unique=True),
        Index("ix_workloads_scope_structural_hash", "scope", "structural_hash"),
        Index("ix_workloads_scope_template", "scope", "template"),
    )

    number: Mapped[int] = mapped_column(Serial, primary_key=True)
    scope: Mapped[str] = mapped_column(ForeignKey("record_scopes.digest"))
    digest: Mapped[str] = mapped_column(Digest)
    structural_hash: Mapped[str] = mapped_column(String(255))
    template: Mapped[str | None] = mapped_column(String(255))
    geometry: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[dt.datetime]
    module: Mapped[str] = mapped_column(Text)  # last: SQLite reads all that stands before a column


class TrialRow(Base):
    """One outcome: `run_s` of a measured candidate, or `kind` and `message` of a failed one."""

    __tablename__ = "trials"
    __table_args__ = (
        # Finds what a template's configurations gave among all the trials that sketches gave.
        Index(
            "ix_trials_experience",
            "workload",
            sqlite_where=text("config IS NOT NULL"),
            postgresql_where=text("config IS NOT NULL"),
        ),
    )

    workload: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("workloads.number"), primary_key=True, autoincrement=False
    )
    trace_digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    run_s: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    kind: Mapped[str | None] = mapped_column(String(32))
    config: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[dt.datetime]
    message: Mapped[str | None] = mapped_column(Text)
    trace: Mapped[str] = mapped_column(Text)  # last, as a workload's module


class CostModelRow(Base):
    """The newest cost model of a scope by that name."""

    __tablename__ = "cost_models"

    scope: Mapped[str] = mapped_column(ForeignKey("record_scopes.digest"), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    format_version: Mapped[int]
    trained_on: Mapped[int]
    note: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[dt.datetime]
    booster_sha256: Mapped[str] = mapped_column(Digest)
    booster: Mapped[bytes] = mapped_column(LargeBinary)


class ArtifactRow(Base):
    """The newest revision under a key."""

    __tablename__ = "artifacts"

    key_digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    model: Mapped[str] = mapped_column(Digest, index=True)
    device: Mapped[str] = mapped_column(String(128), index=True)
    key: Mapped[dict[str, Any]]
    revision: Mapped[int]
    library: Mapped[str] = mapped_column(Digest, index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    latency_s: Mapped[float]
    manifest: Mapped[dict[str, Any]]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[dt.datetime]
