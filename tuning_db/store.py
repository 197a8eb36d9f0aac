"""The tuning store: one method is one short transaction, and no session or row ever leaves it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuning_db.catalog import Artifact, Device, ModelInfo
from tuning_db.jobs import Claim, Job, JobError, JobEvent, JobSpec, JobState
from tuning_db.keys import ArtifactKey, DeviceIdentity, Json, NearestKey, RecordScope, Toolchain
from tuning_db.trials import Trial, Workload

Clock = Callable[[], dt.datetime]


@dataclass(frozen=True, slots=True)
class Submission:
    """What a POST came to: `created` is False when an existing job answers it."""

    job: Job
    created: bool


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: jobs to wake workers for again, and jobs given up."""

    requeued: tuple[Job, ...]  #: RUNNING jobs whose heartbeat stopped, now QUEUED
    unclaimed: tuple[Job, ...]  #: QUEUED jobs that nobody took within the grace period: their message is sent again
    failed: tuple[Job, ...]  #: jobs that lost their worker on the last attempt allowed


class TuningStore:
    """SQLite or PostgreSQL behind SQLAlchemy. Safe to share between threads and to open in many processes.

    The schema is made by Alembic alone (`tuning_db.migrations`, `upgrade(url)`); opening a store whose schema is
    older or newer than this code is an error that says which command to run.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None: ...
    def close(self) -> None: ...
    def ping(self) -> None:
        """Raises if the database does not answer or its schema is not this code's. Writes nothing."""

    # models
    def add_model(self, model: ModelInfo) -> bool:
        """Remember an uploaded model; False if its digest is known already (the first upload's bytes stay)."""

    def model(self, digest: str) -> ModelInfo:
        """NotFound if nobody uploaded it."""

    # devices
    def report_device(
        self, worker: str, identity: DeviceIdentity, target: str, toolchain: Toolchain
    ) -> None:
        """A worker says what it is attached to: at its start, and again every 20 s while it lives."""

    def devices(self) -> list[Device]: ...
    def device(self, name: str) -> Device:
        """UnknownDevice, with the names that are known."""

    # jobs, as the API sees them
    def submit(
        self, spec: JobSpec, *, idempotency: tuple[str, str] | None = None, max_queued: int | None = None
    ) -> Submission:
        """The job that answers `spec`, or a new QUEUED one.

        Answers it: the QUEUED or RUNNING job of the same key (at most one exists: a partial unique index), else the
        newest SUCCEEDED job of that key whose budget covers the request, if its artifact is still there.
        `idempotency` is the header's key and the SHA-256 of the request's body: the same pair gives the same job
        again, whatever has become of it; the same key with another body raises IdempotencyConflict.
        Twenty calls at once make one job.
        """

    def job(self, job_id: str) -> Job: ...
    def jobs(self, *, states: Sequence[JobState] = (), device: str | None = None, limit: int = 50,
             before: str | None = None) -> list[Job]:
        """Newest first; `before` is the id of the last job of the page before."""

    def events(self, job_id: str, *, after: int = 0, limit: int = 500) -> list[JobEvent]:
        """Events with seq > `after`, in order. Reads only."""

    def request_cancel(self, job_id: str) -> Job:
        """QUEUED becomes CANCELLED at once; RUNNING is marked, and its worker ends it; final ones: IllegalTransition,
        except that cancelling a CANCELLED job is the same answer again."""

    # jobs, as their worker sees them
    def claim(self, job_id: str, worker: str) -> tuple[Claim, Job] | None:
        """Compare-and-set QUEUED → RUNNING with attempt + 1; None when it is not QUEUED: a lost race ends quietly."""

    def heartbeat(self, claim: Claim) -> bool:
        """True if a cancel was requested. StaleAttempt if the claim is no longer the newest or the job has ended."""

    def append_event(self, claim: Claim, type: str, data: Mapping[str, Json]) -> None: ...
    def put_workloads(self, scope: RecordScope, workloads: Sequence[Workload]) -> None:
        """Idempotent. Rows are written in the order of their digests, so that two jobs cannot deadlock."""

    def add_trials(self, claim: Claim, scope: RecordScope, trials: Sequence[Trial]) -> None:
        """Store outcomes; a (workload, trace) already there stays as it is. StaleAttempt as above.

        Every trial given is counted in the job's `trials_measured`, in the same transaction.
        """

    def trials(self, scope: RecordScope, workloads: Sequence[str]) -> Iterator[Trial]:
        """All stored outcomes of these workloads (digests) within exactly this scope. A row whose workload or trace
        no longer matches its digest is left out and logged: an edited row is never used."""

    def publish(self, claim: Claim, artifact_blob: tuple[str, int], latency_s: float,
                manifest: Mapping[str, Json]) -> Artifact:
        """The job's library under its key, and the job SUCCEEDED, in one transaction.

        A slower library than the stored revision leaves that in place (the job still succeeds); a faster one becomes
        the next revision. Returns the artifact that now stands under the key."""

    def fail(self, claim: Claim, error: JobError) -> None: ...
    def mark_cancelled(self, claim: Claim) -> None: ...
    def release(self, claim: Claim) -> None:
        """RUNNING → QUEUED: the worker is shutting down, and another may continue from the records."""

    def sweep(self, *, heartbeat_timeout_s: float, unclaimed_after_s: float, max_attempts: int) -> Swept:
        """Requeue RUNNING jobs whose heartbeat stopped, or FAIL them (kind ``process-died``) after `max_attempts`;
        a lost RUNNING job with a cancel requested becomes CANCELLED; list QUEUED jobs that nobody took since their
        last `unclaimed_after_s` (each is listed once per such period)."""

    # artifacts
    def artifact(self, key_digest: str) -> Artifact:
        """NotFound if there is none."""

    def find_artifact(self, key: ArtifactKey) -> Artifact:
        """The artifact under exactly this key; the stored key is compared field by field, not by digest alone.
        CacheMiss with the nearest stored keys of the same model, else of the same device, else any."""

    def blob_is_referenced(self, sha256: str) -> bool: ...
    def drop_artifacts_of_blob(self, sha256: str) -> int:
        """Forget artifacts whose library's bytes were found damaged or missing: their keys become misses, and the
        next submit of that key makes a new job, which finds its records and builds the library again."""
