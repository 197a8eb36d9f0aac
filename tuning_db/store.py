"""The tuning store: one method is one short transaction, and no session or row ever leaves it."""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Select, case, delete, exists, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from tuning_db.calibration import CalibrationInfo
from tuning_db.catalog import Artifact, Device, Health, ModelInfo, PortSpec, Roof
from tuning_db.engine import domain_errors, is_collision, open_engine, parse_url, sqlite_path, writer
from tuning_db.errors import (
    CacheMiss,
    Conflict,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    ProcessDied,
    QueueFull,
    StaleAttempt,
    TuneryError,
    TuningFailed,
    UnknownDevice,
)
from tuning_db.jobs import Claim, Job, JobError, JobEvent, JobSpec, JobState
from tuning_db.keys import (
    KEY_VERSION,
    ArtifactKey,
    DeviceIdentity,
    Json,
    RecordScope,
    TensorSpec,
    Toolchain,
    nearest,
    to_json,
)
from tuning_db.migrations import check_connection, check_schema
from tuning_db.models import (
    ArtifactRow,
    Base,
    CalibrationRow,
    CostModelRow,
    DeviceRow,
    EventRow,
    HealthRow,
    IdempotencyRow,
    JobRow,
    ModelRow,
    RoofRow,
    ScopeRow,
    TrialRow,
    WorkloadRow,
)
from tuning_db.trials import Experience, Failed, FailureKind, Measured, StoredCostModel, Trial, Workload, trace_digest

Clock = Callable[[], dt.datetime]
T = TypeVar("T")

#: A worker reports its device every 20 s; one that has missed three reports is not counted as a slot.
WORKER_SEEN_WITHIN: Final = dt.timedelta(seconds=60)
#: A worker that has been silent for this long is forgotten when another one reports the same device.
WORKER_FORGOTTEN_AFTER: Final = dt.timedelta(days=1)
#: How a slot was is told for so long after it was last measured on.
HEALTH_FORGOTTEN_AFTER: Final = dt.timedelta(days=30)
#: A miss compares the wanted key with so many stored ones, newest first.
NEAREST_AMONG: Final = 1000
#: A job that waits long has its message sent again at growing intervals, up to so many times the first one.
RESENT_WITHIN: Final = 20
_STREAM_ROWS: Final = 500
_IDS_AT_ONCE: Final = 500  #: in one statement; databases limit how many values it may have

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submission:
    """What a POST came to: `created` is False when an existing job answers it."""

    job: Job
    created: bool


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: jobs to wake workers for again, and jobs given up."""

    requeued: tuple[Job, ...]  #: RUNNING jobs whose heartbeat stopped, now QUEUED
    unclaimed: tuple[Job, ...]  #: QUEUED jobs that nobody took for long: their message is sent again
    failed: tuple[Job, ...]  #: jobs that lost their worker on the last attempt allowed


class TuningStore:
    """SQLite or PostgreSQL behind SQLAlchemy. Safe to share between threads and to open in many processes.

    The schema is made by Alembic alone (`tuning_db.migrations`, `upgrade(url)`); opening a store whose schema is
    older or newer than this code is an error that says which command to run.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._url = parse_url(url)
        self._clock: Clock = clock or (lambda: dt.datetime.now(dt.UTC))
        check_schema(url)
        self._engine = open_engine(self._url)
        self._writer = writer(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    def ping(self) -> None:
        """Raises if the database does not answer or its schema is not this code's. Writes nothing."""
        path = sqlite_path(self._url)
        if path is not None and not path.exists():
            # The open connections would go on in a file without a name, and new ones would make an empty one.
            raise DatabaseUnavailable(f"the database's file {path} is gone; put it back, then restart")
        self._read(lambda session: check_connection(session.connection()))

    # models
    def add_model(self, model: ModelInfo) -> bool:
        """Remember an uploaded model; False if its digest is known already (the first upload's bytes stay)."""

        def write(session: Session) -> bool:
            row = {
                "digest": model.digest,
                "blob": model.blob,
                "format": model.format,
                "size_bytes": model.size_bytes,
                "inputs": to_json(model.inputs),
                "outputs": to_json(model.outputs),
                "created_at": self._clock(),
            }
            statement = self._insert(ModelRow).values(row).on_conflict_do_nothing().returning(ModelRow.digest)
            return session.scalar(statement) is not None

        return self._write(write)

    def replace_model_blob(self, digest: str, old: str, new: tuple[str, int]) -> bool:
        """Let the model point to another file of the same graph and weights, given by SHA-256 and size, because the
        `old` one's bytes were lost. False if it does not point to `old` any more: somebody else was quicker."""

        def write(session: Session) -> bool:
            blob, size_bytes = new
            replaced = session.scalar(
                update(ModelRow)
                .where(ModelRow.digest == digest, ModelRow.blob == old)
                .values(blob=blob, size_bytes=size_bytes)
                .returning(ModelRow.digest)
            )
            return replaced is not None

        return self._write(write)

    def model(self, digest: str) -> ModelInfo:
        """NotFound if nobody uploaded it."""

        def read(session: Session) -> ModelInfo:
            row = session.get(ModelRow, digest)
            if row is None:
                raise NotFound(f"no model {digest!r} is stored; upload it first")
            return ModelInfo(
                digest=row.digest,
                blob=row.blob,
                format=row.format,
                size_bytes=row.size_bytes,
                inputs=tuple(map(PortSpec.from_json, row.inputs)),
                outputs=tuple(map(PortSpec.from_json, row.outputs)),
            )

        return self._read(read)

    # calibration data
    def add_calibration(self, calibration: CalibrationInfo) -> bool:
        """Remember uploaded samples; False if their digest is known already (the first upload's bytes stay)."""

        def write(session: Session) -> bool:
            row = {
                "digest": calibration.digest,
                "blob": calibration.blob,
                "size_bytes": calibration.size_bytes,
                "arrays": to_json(calibration.arrays),
                "created_at": self._clock(),
            }
            statement = self._insert(CalibrationRow).values(row).on_conflict_do_nothing()
            return session.scalar(statement.returning(CalibrationRow.digest)) is not None

        return self._write(write)

    def replace_calibration_blob(self, digest: str, old: str, new: tuple[str, int]) -> bool:
        """As `replace_model_blob`, for another archive of the same arrays."""

        def write(session: Session) -> bool:
            blob, size_bytes = new
            replaced = session.scalar(
                update(CalibrationRow)
                .where(CalibrationRow.digest == digest, CalibrationRow.blob == old)
                .values(blob=blob, size_bytes=size_bytes)
                .returning(CalibrationRow.digest)
            )
            return replaced is not None

        return self._write(write)

    def calibration(self, digest: str) -> CalibrationInfo:
        """NotFound if nobody uploaded it."""

        def read(session: Session) -> CalibrationInfo:
            row = session.get(CalibrationRow, digest)
            if row is None:
                raise NotFound(f"no calibration data {digest!r} is stored; upload it first")
            return CalibrationInfo(row.digest, row.blob, row.size_bytes, tuple(map(TensorSpec.from_json, row.arrays)))

        return self._read(read)

    # devices
    def report_device(self, worker: str, identity: DeviceIdentity, target: str, toolchain: Toolchain) -> None:
        """A worker says what it is attached to: at its start, and again every 20 s while it lives."""

        def write(session: Session) -> None:
            now = self._clock()
            report = {
                "identity": to_json(identity),
                "target": target,
                "toolchain": to_json(toolchain),
                "last_seen": now,
            }
            statement = self._insert(DeviceRow).values(name=identity.name, worker=worker, **report)
            session.execute(statement.on_conflict_do_update(index_elements=["name", "worker"], set_=report))
            # Workers are named anew at each start, so without this the list of the dead would only grow.
            session.execute(
                delete(DeviceRow).where(
                    DeviceRow.name == identity.name,
                    DeviceRow.worker != worker,
                    DeviceRow.last_seen < now - WORKER_FORGOTTEN_AFTER,
                )
            )

        self._write(write)

    def devices(self) -> list[Device]:
        return self._read(self._devices)

    def device(self, name: str) -> Device:
        """UnknownDevice, with the names that are known."""

        def read(session: Session) -> Device:
            known = {device.name: device for device in self._devices(session)}
            if name not in known:
                names = ", ".join(known) or "none yet: start a worker on it with: tunery worker"
                raise UnknownDevice(f"no worker has reported a device {name!r}; known: {names}", candidates=[*known])
            return known[name]

        return self._read(read)

    def put_roof(self, device: DeviceIdentity, roof: Roof) -> None:
        """What the device can do at most, in place of what was measured before. Nobody need have reported it."""

        def write(session: Session) -> None:
            values = {
                "flops_per_s": roof.flops_per_s,
                "bytes_per_s": roof.bytes_per_s,
                "flops_per_s_one_thread": roof.flops_per_s_one_thread,
                "measured_at": roof.measured_at,
                "toolchain": to_json(roof.toolchain),
            }
            row = self._insert(RoofRow).values(device=device.name, **values)
            session.execute(row.on_conflict_do_update(index_elements=["device"], set_=values))

        self._write(write)

    def roof(self, device: DeviceIdentity) -> Roof | None:
        """None if nobody has measured it."""

        def read(session: Session) -> Roof | None:
            row = session.get(RoofRow, device.name)
            return None if row is None else _readable_roof(row)

        return self._read(read)

    def put_health(self, device: DeviceIdentity, found: Sequence[Health]) -> None:
        """How slots of a device are now. Of each the best is kept over all that were ever put."""

        def write(session: Session) -> None:
            now = self._clock()
            for health in found:
                values = {field.name: getattr(health, field.name) for field in fields(health) if field.name != "slot"}
                row = self._insert(HealthRow).values(device=device.name, slot=health.slot, **values)
                better = case(
                    (HealthRow.best_reference_s < row.excluded.best_reference_s, HealthRow.best_reference_s),
                    else_=row.excluded.best_reference_s,
                )
                update = {**values, "best_reference_s": better}
                session.execute(row.on_conflict_do_update(index_elements=["device", "slot"], set_=update))
            # Boards change their addresses, and containers their names.
            session.execute(delete(HealthRow).where(HealthRow.measured_at < now - HEALTH_FORGOTTEN_AFTER))

        self._write(write)

    def _devices(self, session: Session) -> list[Device]:
        counted = session.execute(
            select(JobRow.device, JobRow.state, func.count())
            .where(JobRow.state.in_([JobState.QUEUED.value, JobState.RUNNING.value]))
            .group_by(JobRow.device, JobRow.state)
        )
        jobs = {(device, state): count for device, state, count in counted}
        by_name: dict[str, list[tuple[DeviceRow, DeviceIdentity, Toolchain]]] = {}
        for row in session.scalars(select(DeviceRow).order_by(DeviceRow.name, DeviceRow.last_seen, DeviceRow.worker)):
            if (said := _readable_report(row)) is not None:
                by_name.setdefault(row.name, []).append((row, *said))
        roofs = {row.device: _readable_roof(row) for row in session.scalars(select(RoofRow))}
        healths: dict[str, list[Health]] = {}
        forgotten = self._clock() - HEALTH_FORGOTTEN_AFTER
        for found in session.scalars(select(HealthRow).order_by(HealthRow.device, HealthRow.slot)):
            if found.measured_at >= forgotten:
                told = {field.name: getattr(found, field.name) for field in fields(Health)}
                healths.setdefault(found.device, []).append(Health(**told))
        alive_since = self._clock() - WORKER_SEEN_WITHIN
        return [
            Device(
                identity=identity,
                target=newest.target,
                toolchain=toolchain,
                last_seen=newest.last_seen,
                workers=sum(row.last_seen >= alive_since for row, _, _ in reports),
                busy=jobs.get((name, JobState.RUNNING.value), 0),
                queued=jobs.get((name, JobState.QUEUED.value), 0),
                roof=roofs.get(name),
                health=tuple(healths.get(name, ())),
            )
            for name, reports in by_name.items()
            for newest, identity, toolchain in reports[-1:]
        ]

    # jobs, as the API sees them
    def submit(
        self, spec: JobSpec, *, idempotency: tuple[str, str] | None = None, max_queued: int | None = None
    ) -> Submission:
        """As `submit_all`, for one."""
        return self.submit_all([spec], idempotency=idempotency, max_queued=max_queued)[0]

    def submit_all(
        self, specs: Sequence[JobSpec], *, idempotency: tuple[str, str] | None = None, max_queued: int | None = None
    ) -> list[Submission]:
        """For each spec the job that answers it, or a new QUEUED one: all in one transaction, so that all are stored or
        none.

        Answers it: the oldest QUEUED or RUNNING job of the same key whose budget covers the request, else the newest
        SUCCEEDED one that covers it, if the key's artifact is still there. A request for more than these makes a job
        of its own, which goes on from the records of the smaller ones; so does one for a quantized library that has to
        be better than those asked for so far.
        `idempotency` is the header's key and the SHA-256 of the request's body: the same pair gives the same jobs
        again, whatever has become of them; the same key with another body raises IdempotencyConflict.
        Twenty equal calls at once make one job: a partial unique index allows one unfinished job a key and budget.
        QueueFull instead of a new job when `max_queued` jobs wait already.
        """
        if idempotency is not None and not 0 < len(idempotency[0]) <= 255:
            raise InvalidRequest("an Idempotency-Key has 1 to 255 characters", field="Idempotency-Key")

        # Two calls that both find nothing both insert; the unique indexes let one through, and the other is run
        # again from its start (`_write`), where it finds the job of the first.
        def write(session: Session) -> list[Submission]:
            return [self._submit(session, spec, row, max_queued) for spec, row in zip(specs, rows, strict=True)]

        # A row names one job. No header's key holds a blank, so that the rows of further jobs meet no other request's.
        rows = [
            None
            if idempotency is None
            else (idempotency[0] if number == 0 else f"{idempotency[0]} {number}", *idempotency)
            for number in range(len(specs))
        ]
        return self._write(write)

    def _submit(
        self, session: Session, spec: JobSpec, idempotency: tuple[str, str, str] | None, max_queued: int | None
    ) -> Submission:
        """`idempotency` is the row's key, the header's, and the body's SHA-256."""
        if idempotency is not None:
            known = session.get(IdempotencyRow, idempotency[0])
            if known is not None:
                if known.body_sha256 != idempotency[2]:
                    raise IdempotencyConflict(
                        f"Idempotency-Key {idempotency[1]!r} came before with another body, for job "
                        f"{known.job_id}; use a new key for a new request"
                    )
                return Submission(_job(_job_row(session, known.job_id)), created=False)
        row = self._answering(session, spec)
        created = row is None
        if row is None:
            row = self._new_job(session, spec, max_queued)
        if idempotency is not None:
            session.add(
                IdempotencyRow(key=idempotency[0], body_sha256=idempotency[2], job_id=row.id, created_at=self._clock())
            )
        session.flush()
        return Submission(_job(row), created)

    def _answering(self, session: Session, spec: JobSpec) -> JobRow | None:
        digest = spec.key.digest()
        of_key = select(JobRow).where(JobRow.key_digest == digest)
        active = of_key.where(_is_active()).order_by(JobRow.number)
        succeeded = of_key.where(JobRow.state == JobState.SUCCEEDED.value).order_by(JobRow.number.desc())
        for statement in (active, succeeded):
            for row in session.scalars(statement):
                job = _readable_job(row)
                if job is not None and job.spec.answers(spec):
                    return row
            # Without a library that is served, no finished job is an answer.
            artifact = session.get(ArtifactRow, digest)
            if artifact is None or _readable_artifact(artifact) is None:
                return None
        return None

    def _new_job(self, session: Session, spec: JobSpec, max_queued: int | None) -> JobRow:
        if max_queued is not None:
            # Not exact when several ask at the same moment: it keeps a flood out, it does not count heads.
            waiting = session.scalar(
                select(func.count()).select_from(JobRow).where(JobRow.state == JobState.QUEUED.value)
            )
            if waiting is not None and waiting >= max_queued:
                raise QueueFull(f"{waiting} jobs are waiting already; this service takes no more now, try again later")
        now = self._clock()
        row = JobRow(
            id=uuid.uuid4().hex,
            key_digest=spec.key.digest(),
            budget_digest=spec.budget_digest(),
            device=spec.key.device.name,
            spec=spec.to_json(),
            state=JobState.QUEUED.value,
            attempt=0,
            lost=0,
            created_at=now,
            updated_at=now,
            cancel_requested=False,
            trials_measured=0,
            events=1,
            woken_at=now,
        )
        session.add(row)
        session.flush()
        session.add(_state_event(row))
        return row

    def job(self, job_id: str) -> Job:
        return self._read(lambda session: _job(_job_row(session, job_id)))

    def jobs(
        self, *, states: Sequence[JobState] = (), device: str | None = None, limit: int = 50, before: str | None = None
    ) -> list[Job]:
        """Newest first; `before` is the id of the last job of the page before. As many as `limit` while there are so
        many, those of other versions, which cannot be read, not counted."""

        def read(session: Session) -> list[Job]:
            statement = select(JobRow).order_by(JobRow.number.desc()).limit(limit)
            if states:
                statement = statement.where(JobRow.state.in_([state.value for state in states]))
            if device is not None:
                statement = statement.where(JobRow.device == device)
            if before is not None:
                statement = statement.where(JobRow.number < _job_row(session, before).number)
            found: list[Job] = []
            rows = session.scalars(statement).all()
            while rows and len(found) < limit:
                found += _readable(rows)
                rows = session.scalars(statement.where(JobRow.number < rows[-1].number)).all()
            return found[:limit]

        return self._read(read)

    def events(self, job_id: str, *, after: int = 0, limit: int = 500) -> list[JobEvent]:
        """Events with seq > `after`, in order. Reads only."""

        def read(session: Session) -> list[JobEvent]:
            rows = session.scalars(
                select(EventRow)
                .where(EventRow.job_id == job_id, EventRow.seq > after)
                .order_by(EventRow.seq)
                .limit(limit)
            )
            return [JobEvent(row.job_id, row.seq, row.type, row.data, row.at) for row in rows]

        return self._read(read)

    def request_cancel(self, job_id: str) -> Job:
        """QUEUED becomes CANCELLED at once; RUNNING is marked, and its worker ends it; final ones: IllegalTransition,
        except that cancelling a CANCELLED job is the same answer again."""

        def write(session: Session) -> Job:
            row = _job_row(session, job_id, lock=True)
            state = JobState(row.state)
            if state is JobState.CANCELLED:
                return _job(row)
            state.to(JobState.CANCELLED)
            if state is JobState.RUNNING:
                if not row.cancel_requested:
                    row.cancel_requested = True
                    row.updated_at = self._clock()
                    session.flush()
                return _job(row)
            cancelled = self._move(session, row.id, [], JobState.CANCELLED, cancel_requested=True)
            assert cancelled is not None, "the row is locked"
            return _job(cancelled)

        return self._write(write)

    # jobs, as their worker sees them
    def claim(self, job_id: str, worker: str) -> tuple[Claim, Job] | None:
        """Compare-and-set QUEUED → RUNNING with attempt + 1; None when it is not QUEUED: a lost race ends quietly."""

        def write(session: Session) -> tuple[Claim, Job] | None:
            row = self._move(
                session,
                job_id,
                [JobRow.state == JobState.QUEUED.value],
                JobState.RUNNING,
                attempt=JobRow.attempt + 1,
                claimed_by=worker,
                heartbeat_at=self._clock(),
            )
            return None if row is None else (Claim(row.id, row.attempt), _job(row))

        return self._write(write)

    def heartbeat(self, claim: Claim) -> bool:
        """True if a cancel was requested. StaleAttempt if the claim is no longer the newest or the job has ended."""
        return self._write(lambda session: self._touch(session, claim, heartbeat_at=self._clock()).cancel_requested)

    def append_event(self, claim: Claim, type: str, data: Mapping[str, Json]) -> None:
        def write(session: Session) -> None:
            row = self._touch(session, claim, events=JobRow.events + 1)
            session.add(EventRow(job_id=row.id, seq=row.events, type=type, data=dict(data), at=self._clock()))

        self._write(write)

    def put_workloads(self, scope: RecordScope, workloads: Sequence[Workload]) -> None:
        """Idempotent. Rows are written in the order of their digests, so that two jobs cannot deadlock.

        One that is stored without a template gets the one given. Conflict for another template or geometry than the
        stored ones: what is known of its configurations would be read as something else."""

        def write(session: Session) -> None:
            now = self._clock()
            digest = self._put_scope(session, scope, now)
            rows = {
                workload.digest: {
                    "scope": digest,
                    "digest": workload.digest,
                    "structural_hash": workload.structural_hash,
                    "template": workload.template,
                    "geometry": to_json(workload.geometry),
                    "created_at": now,
                    "module": workload.module,
                }
                for workload in sorted(workloads, key=lambda workload: workload.template is not None)
            }
            self._insert_new(session, WorkloadRow, [rows[name] for name in sorted(rows)])
            for workload in sorted(workloads, key=lambda workload: workload.digest):
                if workload.template is not None:
                    _put_template(session, digest, workload)

        self._write(write)

    def _put_scope(self, session: Session, scope: RecordScope, now: dt.datetime) -> str:
        """The scope's digest, once there is a row of it to refer to."""
        digest = scope.digest()
        self._insert_new(session, ScopeRow, [{"digest": digest, "data": scope.to_json(), "created_at": now}])
        return digest

    def workloads(self, scope: RecordScope, structural_hashes: Sequence[str]) -> list[Workload]:
        """The stored workloads of this scope with one of these hashes: candidates for being structurally equal.

        A row that no longer matches its digest is left out and logged."""

        def read(session: Session) -> list[Workload]:
            rows = session.scalars(
                select(WorkloadRow)
                .where(WorkloadRow.scope == scope.digest(), WorkloadRow.structural_hash.in_(set(structural_hashes)))
                .order_by(WorkloadRow.number)
            )
            return [workload for row in rows if (workload := _unedited_workload(row)) is not None]

        return self._read(read)

    def add_trials(self, claim: Claim, scope: RecordScope, trials: Sequence[Trial]) -> None:
        """Store outcomes; a (workload, trace) already there stays as it is. StaleAttempt as above.

        Every trial given is counted in the job's `trials_measured`, in the same transaction. NotFound for a workload
        that was not put into the scope before. ValueError for a configuration of a workload without a template:
        nobody could ever tell what it means.
        """

        def write(session: Session) -> None:
            now = self._clock()
            self._touch(session, claim, trials_measured=JobRow.trials_measured + len(trials), updated_at=now)
            known = _known_workloads(session, scope, {trial.workload for trial in trials})
            rows: dict[tuple[str, str], dict[str, Any]] = {}
            for trial in trials:
                if trial.workload not in known:
                    raise NotFound(f"workload {trial.workload} is not in this scope; call put_workloads first")
                number, template = known[trial.workload]
                if trial.config is not None and template is None:
                    raise ValueError(f"workload {trial.workload} has no template; call put_workloads with it first")
                row = {
                    "workload": number,
                    "trace_digest": trial.trace_digest,
                    "config": to_json(trial.config),
                    "job_id": claim.job_id,
                    "created_at": now,
                    "trace": trial.trace,
                }
                match trial.outcome:
                    case Measured(run_s):
                        row |= {"run_s": list(run_s), "kind": None, "message": None}
                    case Failed(kind, message):
                        row |= {"run_s": None, "kind": kind.value, "message": _plain(message)}
                rows.setdefault((trial.workload, trial.trace_digest), row)
            self._insert_new(session, TrialRow, [rows[name] for name in sorted(rows)])

        self._write(write)

    def trials(self, scope: RecordScope, workloads: Sequence[str]) -> Iterator[Trial]:
        """All stored outcomes of these workloads (digests) within exactly this scope. A row whose workload or trace
        no longer matches its digest is left out and logged: an edited row is never used.

        They are those of one moment, however long the reading takes; close the iterator if it is not read to its end.
        """
        with domain_errors(self._url), Session(self._engine) as session:
            names: dict[int, str] = {}
            rows = session.scalars(
                select(WorkloadRow).where(WorkloadRow.scope == scope.digest(), WorkloadRow.digest.in_(set(workloads)))
            )
            for row in rows:
                if _unedited_workload(row) is not None:
                    names[row.number] = row.digest
            # Plain columns, fetched in portions: a hundred thousand of them do not become a hundred thousand objects.
            found = session.execute(
                select(
                    TrialRow.workload,
                    TrialRow.trace_digest,
                    TrialRow.run_s,
                    TrialRow.kind,
                    TrialRow.config,
                    TrialRow.message,
                    TrialRow.trace,
                )
                .where(TrialRow.workload.in_(names))
                .order_by(TrialRow.workload, TrialRow.trace_digest),
                execution_options={"yield_per": _STREAM_ROWS},
            )
            with closing(found):
                for number, digest, run_s, kind, config, message, trace in found:
                    if trace_digest(trace) != digest:
                        _log.error("trace %s was edited in the database; it is not used", digest)
                        continue
                    try:
                        outcome = Failed(FailureKind(kind), message) if run_s is None else Measured(tuple(run_s))
                        trial = Trial(names[number], trace, outcome, config)
                    except ValueError as error:
                        _log.warning("trace %s has an outcome that this version does not know: %s", digest, error)
                        continue
                    yield trial

    def experience(self, scope: RecordScope, template: str, limit: int) -> list[Experience]:
        """What became of the template's configurations, of all its workloads within exactly this scope: the newest
        `limit` of them, newest first, failures too."""

        def read(session: Session) -> list[Experience]:
            found = session.execute(experience_query(scope, template, limit))
            return [
                Experience(digest, geometry, config, None if run_s is None else Measured(tuple(run_s)).median_s)
                for digest, geometry, config, run_s in found
            ]

        return self._read(read)

    def experience_count(self, scope: RecordScope, template: str) -> int:
        """How many there are, without a limit."""
        count = select(func.count()).select_from(TrialRow).join(WorkloadRow, WorkloadRow.number == TrialRow.workload)
        return self._read(lambda session: session.scalar(count.where(*_of_template(scope, template))) or 0)

    def put_cost_model(self, scope: RecordScope, name: str, model: StoredCostModel) -> None:
        """Keep `model` for exactly this scope, in place of the one of that name. Of two puts the later one stays."""

        def write(session: Session) -> None:
            now = self._clock()
            values = {
                "format_version": model.format_version,
                "trained_on": model.trained_on,
                "note": _plain(model.note),
                "updated_at": now,
                "booster_sha256": hashlib.sha256(model.booster_json).hexdigest(),
                "booster": model.booster_json,
            }
            row = self._insert(CostModelRow).values(scope=self._put_scope(session, scope, now), name=name, **values)
            session.execute(row.on_conflict_do_update(index_elements=["scope", "name"], set_=values))

        self._write(write)

    def cost_model(self, scope: RecordScope, name: str) -> StoredCostModel | None:
        """The scope's cost model of that name. None if there is none, or if its bytes are no longer what was put."""

        def read(session: Session) -> StoredCostModel | None:
            row = session.get(CostModelRow, (scope.digest(), name))
            if row is None:
                return None
            if hashlib.sha256(row.booster).hexdigest() != row.booster_sha256:
                _log.error("cost model %r of scope %s is damaged; it is not used", name, row.scope)
                return None
            return StoredCostModel(row.format_version, row.trained_on, row.booster, row.note)

        return self._read(read)

    def publish(
        self, claim: Claim, artifact_blob: tuple[str, int], latency_s: float, manifest: Mapping[str, Json]
    ) -> Artifact:
        """The job's library under its key, and the job SUCCEEDED, in one transaction.

        A slower library than the stored revision leaves that in place (the job still succeeds); a faster one becomes
        the next revision. Returns the artifact that now stands under the key."""
        if not (math.isfinite(latency_s) and latency_s > 0):
            raise ValueError(f"latency_s is {latency_s!r}: nothing could ever be compared with it")

        def write(session: Session) -> Artifact:
            job = self._end(session, claim, JobState.SUCCEEDED)
            key = JobSpec.from_json(job.spec).key
            row = session.get(ArtifactRow, job.key_digest, with_for_update=True)
            if row is None:
                row = ArtifactRow(
                    key_digest=job.key_digest,
                    model=key.model,
                    device=key.device.name,
                    key=key.to_json(),
                    revision=0,
                    latency_s=math.inf,
                )
                session.add(row)
            elif _readable_artifact(row) is None:
                # It is served to nobody, so that its latency says nothing: else the key would stay a miss for ever.
                row.model, row.device, row.key, row.latency_s = key.model, key.device.name, key.to_json(), math.inf
            if latency_s < row.latency_s:
                row.revision += 1
                row.library, row.size_bytes = artifact_blob
                row.latency_s = latency_s
                row.manifest = dict(manifest)
                row.job_id = job.id
                row.created_at = self._clock()
            session.flush()
            return _artifact(row)

        return self._write(write)

    def fail(self, claim: Claim, error: JobError) -> None:
        self._write(lambda session: self._end(session, claim, JobState.FAILED, error))

    def mark_cancelled(self, claim: Claim) -> None:
        self._write(lambda session: self._end(session, claim, JobState.CANCELLED))

    def release(self, claim: Claim) -> None:
        """RUNNING → QUEUED: the worker is shutting down, and another may continue from the records.

        RUNNING → CANCELLED if a cancel was requested. The next sweep lists the job as unclaimed, whatever its age,
        since no message for it is on its way. Such an attempt does not count as a lost one."""

        def write(session: Session) -> None:
            if self._touch(session, claim).cancel_requested:
                self._end(session, claim, JobState.CANCELLED)
            else:
                self._requeue(session, claim, woken_at=None)

        self._write(write)

    def sweep(self, *, heartbeat_timeout_s: float, unclaimed_after_s: float, max_attempts: int) -> Swept:
        """Requeue RUNNING jobs whose heartbeat stopped, or FAIL them (kind ``process-died``) after `max_attempts`;
        a lost RUNNING job with a cancel requested becomes CANCELLED; list QUEUED jobs that nobody took: each one
        after `unclaimed_after_s`, then after having waited twice as long as the time before, but at least once in
        `RESENT_WITHIN` such periods. QUEUED jobs of an older key version FAIL, since nobody can ever take them."""

        def write(session: Session) -> Swept:
            now = self._clock()
            requeued: list[Job] = []
            unclaimed: list[Job] = []
            failed: list[Job] = []
            silent = JobRow.heartbeat_at < now - dt.timedelta(seconds=heartbeat_timeout_s)
            lost = select(JobRow).where(JobRow.state == JobState.RUNNING.value, silent).order_by(JobRow.number)
            for row in session.scalars(lost).all():
                # Each update asks again, under the row's lock: a heartbeat or another sweep may have come between.
                still = [JobRow.state == JobState.RUNNING.value, JobRow.attempt == row.attempt, silent]
                times = row.lost + 1
                if row.cancel_requested:
                    self._move(session, row.id, still, JobState.CANCELLED, lost=times)
                elif times >= max_attempts:
                    error = JobError(
                        ProcessDied.kind,
                        f"worker {row.claimed_by} vanished in attempt {row.attempt}, and {times} of {max_attempts} "
                        "attempts were lost so; look into that worker's log, then submit the job again",
                    )
                    moved = self._move(session, row.id, still, JobState.FAILED, error, lost=times)
                    failed += [] if moved is None else _readable([moved])
                else:
                    moved = self._move(session, row.id, still, JobState.QUEUED, lost=times, woken_at=now, **_UNCLAIMED)
                    requeued += [] if moved is None else _readable([moved])
            forgotten = or_(JobRow.woken_at.is_(None), JobRow.woken_at < now - dt.timedelta(seconds=unclaimed_after_s))
            still_waiting = [JobRow.state == JobState.QUEUED.value, forgotten]
            waiting = select(JobRow.id, JobRow.woken_at, JobRow.updated_at).where(*still_waiting)
            at_least_every = dt.timedelta(seconds=unclaimed_after_s * RESENT_WITHIN)
            for job_id, woken_at, queued_at in session.execute(waiting.order_by(JobRow.number)).all():
                # Messages for a busy worker wait in its queue: sent at equal intervals they would only pile up there.
                if woken_at is not None and now - woken_at < min(woken_at - queued_at, at_least_every):
                    continue
                woken = session.scalars(
                    update(JobRow).where(JobRow.id == job_id, *still_waiting).values(woken_at=now).returning(JobRow),
                    execution_options=_AS_STORED,
                ).all()
                unclaimed += _readable(woken)
                for row in woken:
                    if _is_outdated(row):
                        _log.warning("job %s is given up: its key is of an older version", row.id)
                        self._move(session, row.id, [JobRow.state == JobState.QUEUED.value], JobState.FAILED, _OUTDATED)
            return Swept(tuple(requeued), tuple(unclaimed), tuple(failed))

        return self._write(write)

    def not_woken(self, job_ids: Sequence[str]) -> None:
        """No message could be sent for these QUEUED jobs, which a sweep had listed: the next one lists them again."""

        def write(session: Session) -> None:
            for start in range(0, len(job_ids), _IDS_AT_ONCE):
                some = JobRow.id.in_(job_ids[start : start + _IDS_AT_ONCE])
                session.execute(
                    update(JobRow).where(some, JobRow.state == JobState.QUEUED.value).values(woken_at=None),
                    execution_options=_AS_STORED,
                )

        self._write(write)

    # artifacts
    def artifact(self, key_digest: str) -> Artifact:
        """NotFound if there is none."""

        def read(session: Session) -> Artifact:
            row = session.get(ArtifactRow, key_digest)
            artifact = None if row is None else _readable_artifact(row)
            if artifact is None:
                raise NotFound(f"no artifact is stored under the key {key_digest!r}")
            return artifact

        return self._read(read)

    def find_artifact(self, key: ArtifactKey) -> Artifact:
        """The artifact under exactly this key; the stored key is compared field by field, not by digest alone.
        CacheMiss with the nearest stored keys of the same model, else of the same device, else any."""

        def read(session: Session) -> Artifact:
            row = session.get(ArtifactRow, key.digest())
            artifact = None if row is None else _readable_artifact(row)
            if artifact is not None and not key.diff(artifact.key):
                return artifact
            anyone = select(ArtifactRow.key).order_by(ArtifactRow.created_at.desc()).limit(NEAREST_AMONG)
            for statement in (
                anyone.where(ArtifactRow.model == key.model),
                anyone.where(ArtifactRow.device == key.device.name),
                anyone,
            ):
                stored = [found for data in session.scalars(statement) if (found := _readable_key(data)) is not None]
                if stored:
                    break
            near = nearest(key, stored)
            why = "; ".join(map(str, near[0].differences)) if near else "nothing is stored yet"
            raise CacheMiss(f"no library for this key ({why}); submit a job for it with: tunery submit", nearest=near)

        return self._read(read)

    def blob_is_referenced(self, sha256: str) -> bool:
        def read(session: Session) -> bool:
            return any(
                session.scalar(select(exists().where(column == sha256)))
                for column in (ModelRow.blob, CalibrationRow.blob, ArtifactRow.library)
            )

        return self._read(read)

    def drop_artifacts_of_blob(self, sha256: str) -> int:
        """Forget artifacts whose library's bytes were found damaged or missing: their keys become misses, and the
        next submit of that key makes a new job, which finds its records and builds the library again."""

        def write(session: Session) -> int:
            dropped = session.scalars(
                delete(ArtifactRow).where(ArtifactRow.library == sha256).returning(ArtifactRow.key_digest)
            )
            return len(dropped.all())

        return self._write(write)

    # transactions
    def _read(self, read: Callable[[Session], T]) -> T:
        return self._run(read, Session(self._engine))

    def _write(self, write: Callable[[Session], T]) -> T:
        return self._run(write, Session(self._writer))

    def _run(self, work: Callable[[Session], T], session: Session) -> T:
        """`work` in one transaction; from its start again if it collided with another one, as databases ask for."""
        collided = Retrying(
            retry=retry_if_exception(is_collision),
            wait=wait_random_exponential(multiplier=0.01, max=0.5),
            stop=stop_after_attempt(20) | stop_after_delay(60),
            reraise=True,
        )

        def once() -> T:
            with session, session.begin():
                return work(session)

        with domain_errors(self._url):
            return collided(once)

    # statements
    def _insert(self, row: type[Base]) -> postgresql.Insert | sqlite.Insert:
        return postgresql.insert(row) if self._engine.dialect.name == "postgresql" else sqlite.insert(row)

    def _insert_new(self, session: Session, row: type[Base], values: Sequence[Mapping[str, Any]]) -> None:
        """Insert those that are not there yet, in the order given."""
        if values:
            session.connection().execute(self._insert(row).on_conflict_do_nothing(), values)

    def _move(
        self,
        session: Session,
        job_id: str,
        still: Sequence[ColumnElement[bool]],
        state: JobState,
        error: JobError | None = None,
        **values: Any,
    ) -> JobRow | None:
        """The one way a job changes its state: compare-and-set, with the event that tells of it. None if `still` no
        longer holds."""
        now = self._clock()
        if error is not None:
            values |= {"error_kind": error.kind, "error_message": _plain(error.message)}
        row = session.scalars(
            update(JobRow)
            .where(JobRow.id == job_id, *still)
            .values(state=state.value, updated_at=now, events=JobRow.events + 1, **values)
            .returning(JobRow),
            execution_options=_AS_STORED,
        ).one_or_none()
        if row is not None:
            session.add(_state_event(row))
            session.flush()
        return row

    def _touch(self, session: Session, claim: Claim, **values: Any) -> JobRow:
        """Change the job's row, and hold its lock till the end of the transaction, if `claim` still holds the job."""
        row = session.scalars(
            update(JobRow)
            .where(JobRow.id == claim.job_id, *_held(claim))
            .values({"attempt": JobRow.attempt, **values})
            .returning(JobRow),
            execution_options=_AS_STORED,
        ).one_or_none()
        if row is None:
            raise _stale(claim)
        return row

    def _end(self, session: Session, claim: Claim, state: JobState, error: JobError | None = None) -> JobRow:
        row = self._move(session, claim.job_id, _held(claim), state, error)
        if row is None:
            raise _stale(claim)
        return row

    def _requeue(self, session: Session, claim: Claim, **values: Any) -> None:
        if self._move(session, claim.job_id, _held(claim), JobState.QUEUED, **_UNCLAIMED, **values) is None:
            raise _stale(claim)


#: What a job that waits again no longer has.
_UNCLAIMED: Final[Mapping[str, Any]] = {"claimed_by": None, "heartbeat_at": None}
_OUTDATED: Final = JobError(
    TuningFailed.kind, "an older version of Tunery made this job, and no worker of this one can do it; submit it again"
)
#: What an update returns is what the session holds from then on.
_AS_STORED: Final = {"synchronize_session": False, "populate_existing": True}


def _is_active() -> ColumnElement[bool]:
    return JobRow.state.in_([JobState.QUEUED.value, JobState.RUNNING.value])


def _held(claim: Claim) -> list[ColumnElement[bool]]:
    return [JobRow.state == JobState.RUNNING.value, JobRow.attempt == claim.attempt]


def _stale(claim: Claim) -> StaleAttempt:
    return StaleAttempt(f"attempt {claim.attempt} no longer holds job {claim.job_id}: stop, and write nothing")


def _job_row(session: Session, job_id: str, *, lock: bool = False) -> JobRow:
    statement = select(JobRow).where(JobRow.id == job_id)
    row = session.scalars(statement.with_for_update() if lock else statement).one_or_none()
    if row is None:
        raise NotFound(f"no job {job_id!r}; list them with: tunery jobs")
    return row


def _readable_report(row: DeviceRow) -> tuple[DeviceIdentity, Toolchain] | None:
    """None for one of another version, which must not keep all other devices from being used."""
    try:
        return DeviceIdentity.from_json(row.identity), Toolchain.from_json(row.toolchain)
    except (ValueError, LookupError, TypeError) as error:
        _log.warning("worker %s reports %s as another version of Tunery does: %s", row.worker, row.name, error)
        return None


def _readable_roof(row: RoofRow) -> Roof | None:
    """None for one of another version, or of figures that cannot be: as if nobody had measured."""
    try:
        return Roof(
            flops_per_s=row.flops_per_s,
            bytes_per_s=row.bytes_per_s,
            flops_per_s_one_thread=row.flops_per_s_one_thread,
            measured_at=row.measured_at,
            toolchain=None if row.toolchain is None else Toolchain.from_json(row.toolchain),
        )
    except (ValueError, LookupError, TypeError) as error:
        _log.warning("the roof of %s cannot be read: %s", row.device, error)
        return None


def _known_workloads(session: Session, scope: RecordScope, digests: set[str]) -> dict[str, tuple[int, str | None]]:
    """digest → number and template of the workloads that are stored."""
    rows = session.execute(
        select(WorkloadRow.digest, WorkloadRow.number, WorkloadRow.template).where(
            WorkloadRow.scope == scope.digest(), WorkloadRow.digest.in_(digests)
        )
    )
    return {row.digest: (row.number, row.template) for row in rows}


def _put_template(session: Session, scope: str, workload: Workload) -> None:
    """Say of a stored workload what it is made for, if nobody has said so yet."""
    where = (WorkloadRow.scope == scope, WorkloadRow.digest == workload.digest)
    stored = session.execute(select(WorkloadRow.template, WorkloadRow.geometry).where(*where)).one()
    if stored.template is None:
        unsaid = update(WorkloadRow).where(*where, WorkloadRow.template.is_(None))
        session.execute(unsaid.values(template=workload.template, geometry=to_json(workload.geometry)))
        stored = session.execute(select(WorkloadRow.template, WorkloadRow.geometry).where(*where)).one()
    if (stored.template, stored.geometry) != (workload.template, workload.geometry):
        raise Conflict(
            f"workload {workload.digest} is stored for template {stored.template!r} with {stored.geometry}, not for "
            f"{workload.template!r} with {workload.geometry}; a template that changes its meaning needs a new version "
            "of the graph pipeline, or a new name"
        )


def _of_template(scope: RecordScope, template: str) -> list[ColumnElement[bool]]:
    return [WorkloadRow.scope == scope.digest(), WorkloadRow.template == template, TrialRow.config.is_not(None)]


def experience_query(scope: RecordScope, template: str, limit: int) -> Select[tuple[str, Any, Any, Any]]:
    """Workload's digest, geometry, configuration and samples, the newest first. Both steps go through an index:
    workloads by scope and template, then those of their trials that have a configuration."""
    return (
        select(WorkloadRow.digest, WorkloadRow.geometry, TrialRow.config, TrialRow.run_s)
        .join(TrialRow, TrialRow.workload == WorkloadRow.number)
        .where(*_of_template(scope, template))
        .order_by(TrialRow.created_at.desc(), TrialRow.workload, TrialRow.trace_digest)
        .limit(limit)
    )


def _unedited_workload(row: WorkloadRow) -> Workload | None:
    try:
        workload = Workload(row.structural_hash, row.module, row.template, row.geometry)
    except ValueError:
        workload = None
    if workload is None or workload.digest != row.digest:
        _log.error("workload %s was edited in the database; its records are not used", row.digest)
        return None
    return workload


def _state_event(row: JobRow) -> EventRow:
    data: dict[str, Json] = {"state": row.state, "attempt": row.attempt}
    if row.error_kind is not None:
        data["error"] = {"kind": row.error_kind, "message": row.error_message}
    return EventRow(job_id=row.id, seq=row.events, type="state", data=data, at=row.updated_at)


def _job(row: JobRow) -> Job:
    try:
        spec = JobSpec.from_json(row.spec)
    except (TuneryError, ValueError, LookupError, TypeError) as error:
        raise NotFound(
            f"job {row.id} was made by another version of Tunery, this one cannot read it: {error}"
        ) from None
    return Job(
        id=row.id,
        spec=spec,
        state=JobState(row.state),
        attempt=row.attempt,
        created_at=row.created_at,
        updated_at=row.updated_at,
        claimed_by=row.claimed_by,
        heartbeat_at=row.heartbeat_at,
        cancel_requested=row.cancel_requested,
        trials_measured=row.trials_measured,
        error=None if row.error_kind is None else JobError(row.error_kind, row.error_message or ""),
    )


def _readable_job(row: JobRow) -> Job | None:
    """None for a job of another version, which must not keep the list of all the others from being shown."""
    try:
        return _job(row)
    except NotFound as error:
        _log.warning("%s", error)
        return None


def _is_outdated(row: JobRow) -> bool:
    """Whether the job was made by an older version. A newer one's may still be done, by that version's workers."""
    key = row.spec.get("key")
    version = key.get("key_version") if isinstance(key, dict) else None
    return isinstance(version, int) and version < KEY_VERSION


def _readable(rows: Sequence[JobRow]) -> list[Job]:
    return [job for row in rows if (job := _readable_job(row)) is not None]


def _artifact(row: ArtifactRow) -> Artifact:
    return Artifact(
        key=ArtifactKey.from_json(row.key),
        revision=row.revision,
        library=row.library,
        size_bytes=row.size_bytes,
        latency_s=row.latency_s,
        manifest=row.manifest,
        job_id=row.job_id,
        created_at=row.created_at,
    )


def _readable_artifact(row: ArtifactRow) -> Artifact | None:
    """None if its key is of another version, or was edited so that it is not the one it is stored under."""
    key = _readable_key(row.key)
    if key is None or key.digest() != row.key_digest:
        _log.error("the artifact under %s holds another key; it is not served", row.key_digest)
        return None
    return _artifact(row)


def _readable_key(data: Mapping[str, Any]) -> ArtifactKey | None:
    try:
        return ArtifactKey.from_json(data)
    except (TuneryError, ValueError, LookupError, TypeError):
        return None


def _plain(text: str) -> str:
    """What a crashed process said, without what no database takes: NUL, and bytes that were never UTF-8."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
