"""Runs one job on this worker: the tuning process is started, watched, and ended with its whole tree.

The worker's own process never imports TVM. What the tuning process does (hang, crash, eat the memory) ends one attempt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from tuning_db.errors import DatabaseUnavailable, ProcessDied, StaleAttempt, StorageFull
from tuning_db.jobs import Claim, Job, JobError
from tuning_db.layout import log_dir
from tuning_db.store import TuningStore
from workers.processes import ATTEMPT_VARIABLE, RETRY, attempt_mark, find_marks, kill_marked
from workers.said import last_line
from workers.settings import Settings

_log = structlog.get_logger()

_SCRATCH_PREFIX: Final = "tunery-job-"


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Collaborators of a worker. `stopping` is set when the worker has been told to end."""

    settings: Settings
    store: TuningStore
    stopping: threading.Event

    def run(self, job_id: str) -> None:
        """Claim the job and run it, again if its process is lost, up to the number of attempts allowed.

        Ends quietly when the job is not to be claimed: another worker won it, or it was cancelled while it waited.
        """
        while not self.stopping.is_set():
            claimed = self.store.claim(job_id, self.settings.worker_name)
            if claimed is None:
                _log.info("not claimed", job=job_id)
                return
            if not self._attempt(*claimed):
                return

    def _attempt(self, claim: Claim, job: Job) -> bool:
        """One attempt, watched to its end. True if the job was put back and is to be tried again."""
        log = _log.bind(job=claim.job_id, attempt=claim.attempt)
        log.info("attempt starts", model=job.spec.key.model, device=job.spec.key.device.name)
        mark = attempt_mark(claim.job_id, claim.attempt)
        log_path = log_dir(self.settings.data_dir) / f"job-{claim.job_id}-{claim.attempt}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _make_scratch(claim.job_id)
        with log_path.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.tuning", claim.job_id, str(claim.attempt), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_measuring_environment(), ATTEMPT_VARIABLE: mark, "TMPDIR": str(scratch)},
                start_new_session=True,
            )
        try:
            return self._watch(claim, process, log_path)
        except StaleAttempt as error:
            log.warning("attempt is stale", message=str(error))
            return False
        finally:
            process.kill()
            process.wait()
            kill_marked(mark)
            shutil.rmtree(scratch, ignore_errors=True)
            log.info("attempt ended", status=process.returncode)

    def _watch(self, claim: Claim, process: subprocess.Popen[bytes], log_path: Path) -> bool:
        deadline_s = time.monotonic() + self.settings.job_timeout_s
        heard_s, last_event = time.monotonic(), 0
        while True:
            try:
                process.wait(self.settings.heartbeat_interval_s)
            except subprocess.TimeoutExpired:
                pass
            else:
                return self._ended(claim, process.returncode, log_path)
            if self.stopping.is_set():
                self._end(process, claim)
                self.store.release(claim)
                return False
            if time.monotonic() >= deadline_s:
                self._end(process, claim)
                self.store.fail(
                    claim, JobError("time-limit", f"the job ran for {self.settings.job_timeout_s:g} s, its limit")
                )
                return False
            try:
                cancelled = self.store.heartbeat(claim)
                if events := self.store.events(claim.job_id, after=last_event):
                    heard_s, last_event = time.monotonic(), events[-1].seq
            except (DatabaseUnavailable, StorageFull) as error:
                # Keep working: if the store is silent for too long, the sweep gives the job away, and the next
                # heartbeat says so. But a process that froze in a transaction is itself what locks the store.
                _log.warning("heartbeat not stored", job=claim.job_id, message=str(error))
                cancelled = False
            if cancelled:
                self._end(process, claim)
                self.store.mark_cancelled(claim)
                return False
            if time.monotonic() - heard_s > self.settings.silence_timeout_s:
                self._end(process, claim)
                return self._lost(claim, f"said nothing for {self.settings.silence_timeout_s:g} s and was ended")

    def _end(self, process: subprocess.Popen[bytes], claim: Claim) -> None:
        """The whole tree is gone when the row says that the job has ended."""
        process.kill()
        process.wait()
        kill_marked(attempt_mark(claim.job_id, claim.attempt))

    def _ended(self, claim: Claim, status: int, log_path: Path) -> bool:
        """The tuning process left by itself: what becomes of the job?"""
        job = self.store.job(claim.job_id)
        if job.state.is_final or job.attempt != claim.attempt:
            return False
        if status < 0:
            name = signal.Signals(-status).name
            hint = ", which is what the kernel sends when memory runs out" if name == "SIGKILL" else ""
            return self._lost(claim, f"died of {name}{hint}")
        if status == RETRY:
            return self._lost(claim, f"could not go on: {_said_last(log_path)}")
        self.store.fail(
            claim,
            JobError(
                "internal-error",
                f"the tuning process left with status {status}: {_said_last(log_path)}; its log is {log_path.name} "
                "in the worker's log folder",
            ),
        )
        return False

    def _lost(self, claim: Claim, how: str) -> bool:
        """The process is gone, and the job is not to blame yet: put it back, up to the number of attempts allowed."""
        if self.store.heartbeat(claim):
            self.store.mark_cancelled(claim)
            return False
        if claim.attempt < self.settings.max_attempts:
            _log.warning("attempt lost", job=claim.job_id, attempt=claim.attempt, how=how)
            self.store.release(claim)
            return True
        self.store.fail(claim, JobError(ProcessDied.kind, f"the tuning process {how}, in attempt {claim.attempt} too"))
        return False


def _make_scratch(job_id: str) -> Path:
    """A folder for all that an attempt writes on the way; one that a killed worker left of this job is removed."""
    prefix = f"{_SCRATCH_PREFIX}{job_id}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix))


def remove_abandoned_scratch() -> None:
    """What attempts of killed workers on this host have left, whatever became of their jobs."""
    marked = {mark.partition(":")[0] for mark in find_marks()}
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH_PREFIX}*"):
        job_id = left.name.removeprefix(_SCRATCH_PREFIX).partition("-")[0]
        # A folder is made a moment before the process that carries its job's mark.
        with contextlib.suppress(OSError):
            if job_id not in marked and time.time() - left.stat().st_mtime > 60:
                shutil.rmtree(left, ignore_errors=True)


def _measuring_environment() -> dict[str, str]:
    """TVM would bind its threads to cores, and put two on one when a core is busy; one library's idle threads would
    spin on the core on which another is measured."""
    return {"TVM_BIND_THREADS": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _said_last(log: Path) -> str:
    return last_line(log.read_text(errors="replace")[-4000:], "it said nothing")
