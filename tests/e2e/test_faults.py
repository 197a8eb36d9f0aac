"""What becomes of a job when its processes are killed or it is cancelled: it finishes or ends, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Event, JobCancelled, Tunery
from tests.e2e.conftest import FAST, INPUTS, Service, running, wait_for


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that outlives the tests that leave all of it but jobs' processes alone."""
    with running(tmp_path_factory.mktemp("faults") / "data") as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Tunery]:
    with Tunery(service.url) as client:
        yield client


@pytest.mark.timeout(1200)
def test_kill_9_ten_times_at_random_moments(small_model: Path, tmp_path: Path) -> None:
    """A job whose process is killed ten times, whatever it is doing, measures as much as one that is left alone, and
    nothing twice."""
    generator = random.Random(3)
    kills, trials = 10, 40
    most_in_round = 24  # four of each operator, where there are as many cores
    # Some while they search, the others at any moment since they were started, which is before that as a rule.
    searching = set(generator.sample(range(1, kills + 1), 2))
    env = {**FAST, "TUNERY_MAX_ATTEMPTS": str(kills + 1)}
    with running(tmp_path / "data", env) as service, Tunery(service.url) as client:
        job = client.submit(small_model, inputs=INPUTS, search={"trials": trials, "seconds": 2000})
        for attempt in range(1, kills + 1):
            pid = wait_for(lambda n=attempt: service.pid_of(f"workers.tuning {job.id} {n} "), 60, "the attempt starts")
            stored = service.stored_trials()
            if attempt in searching and stored + most_in_round < trials:
                wait_for(lambda n=stored: service.stored_trials() > n, 240, "the attempt has measured something")
                time.sleep(generator.uniform(0, 0.5))
            else:
                time.sleep(generator.uniform(0, 4))
            os.kill(pid, signal.SIGKILL)
        job.wait(400)
        assert job.job["attempt"] == kills + 1
        assert job.job["trials_measured"] == service.stored_trials() == trials
        assert client.manifest(job.key)["search"]["ended_by"] == "trials"
        told = [event.data["trial"] for event in job.events() if event.type == "trial"]
        # What a killed process had stored but not told is not told later.
        assert told == sorted(set(told))
        assert told[-1] == trials


def test_one_job_outlives_each_process(small_model: Path, tmp_path: Path) -> None:
    """One job outlives the API, whose events are read on from where they broke; its fork server, for which no operator
    is given up; its tuning process, which freezes and is ended for its silence; the worker, which takes the job's
    processes with it, so that the sweep gives it to the next one; and `tunery up`, with which all ends, and of which
    the next one finishes the job. Nothing is measured twice."""
    trials = 48
    env = {**FAST, "TUNERY_SILENCE_TIMEOUT_S": "45", "TUNERY_MAX_ATTEMPTS": "4"}
    with running(tmp_path / "data", env) as service, Tunery(service.url) as client:

        def hear_of(**data: object) -> None:
            heard.append(next(events))
            while not data.items() <= heard[-1].data.items():
                heard.append(next(events))

        def wait_for_more(what: str) -> None:
            stored = service.stored_trials()
            wait_for(lambda: service.stored_trials() > stored, 120, what)

        job = client.submit(small_model, inputs=INPUTS, search={"trials": trials, "seconds": 400})
        heard, events = list[Event](), job.events(timeout_s=400)
        hear_of(trial=4)
        os.kill(service.pids["api"], signal.SIGKILL)
        server = service.pid_of("workers.search.forkserver")
        assert server is not None
        os.kill(server, signal.SIGKILL)
        wait_for_more("the search goes on with another fork server")
        assert service.rows("select attempt from jobs") == [(1,)]

        frozen = service.pid_of(f"workers.tuning {job.id} 1 ")
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        hear_of(state="RUNNING", attempt=2)
        assert frozen not in service.processes()
        wait_for_more("the second attempt measures")

        before = set(service.job_processes())
        assert before
        os.kill(service.pids["worker"], signal.SIGKILL)
        wait_for(lambda: not before & set(service.job_processes()), 5, "the dead worker's processes are gone")
        wait_for_more("the third attempt measures")

        os.kill(service.process.pid, signal.SIGKILL)
        wait_for(lambda: not service.processes(), 30, "everything ends with the supervisor")
        assert service.rows("select attempt from jobs") == [(3,)]
    with running(tmp_path / "data", env) as service, Tunery(service.url) as client:
        job = client.job(job.id)
        job.wait(240)
        assert job.job["attempt"] == 4
        # The job counts every trial that it measured; one that was measured twice would be stored once.
        assert job.job["trials_measured"] == service.stored_trials() == trials
        assert client.manifest(job.key)["search"]["ended_by"] == "trials"
        assert heard == list(job.events())[: len(heard)], "no event was lost with the API, or told twice"
        wait_for(lambda: not service.job_processes(), 10, "the job's processes are gone")
        wait_for(lambda: not list(Path(tempfile.gettempdir()).glob(f"tunery-job-{job.id}-*")), 10, "no file is left")


@pytest.mark.parametrize("moment", ["while candidates are built", "while candidates are measured"])
def test_cancel(service: Service, client: Tunery, small_model: Path, moment: str) -> None:
    """A cancelled job is CANCELLED within seconds, its process tree is gone, and what it measured is kept."""
    stored = service.stored_trials()
    job = client.submit(small_model, inputs=INPUTS, search={"trials": 400, "seconds": 400})
    seen = 0
    for event in job.events(timeout_s=120):
        seen += event.type == "trial"
        if moment == "while candidates are measured" and seen == 3:
            break
        # Between "search" and the first trial, candidates are proposed and built.
        if moment == "while candidates are built" and event.type == "stage" and event.data["stage"] == "search":
            wait_for(lambda: service.pid_of("workers.search.forkserver"), 10, "the fork server runs")
            break
    asked_s = time.monotonic()
    job.cancel()
    with pytest.raises(JobCancelled):
        job.wait(30)
    assert time.monotonic() - asked_s < 5
    assert not service.job_processes()
    kept = service.stored_trials() - stored
    assert kept == job.refresh()["trials_measured"]
    assert kept > 0 or moment == "while candidates are built"


def test_a_job_that_dies_each_time_fails_after_three_attempts(
    service: Service, client: Tunery, small_model: Path
) -> None:
    """A tuning process that is always killed is given up, with the signal named, and the worker that has seen jobs
    cancelled and dying takes the next one (tvm#19976)."""
    job = client.submit(small_model, inputs=INPUTS, search={"trials": 400, "seconds": 400})
    for attempt in (1, 2, 3):
        pid = wait_for(lambda n=attempt: service.pid_of(f"workers.tuning {job.id} {n} "), 60, "the attempt starts")
        os.kill(pid, signal.SIGABRT)
    wait_for(lambda: job.refresh()["state"] == "FAILED", 30, "the job is given up")
    assert job.job["error"]["kind"] == "process-died"
    assert "SIGABRT" in job.job["error"]["message"]
    following = client.submit(small_model, inputs={"image": [2, 8, 28, 28]}, search={"tuner": "none"})
    following.wait(120)
