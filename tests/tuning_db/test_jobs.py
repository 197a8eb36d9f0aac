"""Jobs: budgets, the legal transitions, and a model of a job's life that the store must agree with."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.samples import make_key, make_spec, make_trial, make_workload, sha256
from tuning_db.errors import IllegalTransition, InvalidRequest, StaleAttempt, UnsupportedOption
from tuning_db.jobs import (
    MAX_SECONDS,
    MAX_SQNR_DB,
    MAX_TRIALS,
    TRANSITIONS,
    TUNERS,
    Claim,
    JobError,
    JobSpec,
    JobState,
    SearchConfig,
)
from tuning_db.keys import QuantizationConfig
from tuning_db.store import RESENT_WITHIN, TuningStore

BUDGETS = st.builds(
    SearchConfig,
    tuner=st.sampled_from(sorted(TUNERS)),
    trials=st.just(0) | st.integers(1, MAX_TRIALS),
    seconds=st.floats(1, MAX_SECONDS),
    seed=st.integers(0, 2**31 - 1),
)


@given(one=st.sampled_from(JobState), two=st.sampled_from(JobState))
def test_transitions(one: JobState, two: JobState) -> None:
    """A state can be left only along the table, and a final one not at all."""
    if two in TRANSITIONS[one]:
        assert one.to(two) is two
    else:
        with pytest.raises(IllegalTransition, match=f"{one} cannot become {two}"):
            one.to(two)
    assert one.is_final is (one in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


@given(one=BUDGETS, two=BUDGETS)
def test_covers(one: SearchConfig, two: SearchConfig) -> None:
    """A finished search answers for exactly those of its tuner that would not have looked harder, whatever their
    seed; and every job for one that asks for no search."""
    no_harder = one.trials >= two.trials and one.seconds >= two.seconds
    assert one.covers(two) == (two.tuner == "none" or (one.tuner == two.tuner and no_harder))
    assert (one.budget_digest() == two.budget_digest()) == (one.covers(two) and two.covers(one))
    assert one.covers(SearchConfig(tuner="none", trials=5))


@pytest.mark.parametrize("tuner", ["auto", "autotvm", "ansor"])
def test_no_trials(tuner: str) -> None:
    """A search without trials is legal and has one spelling, whatever seconds were given; any search of the same
    tuner answers for it, and it answers for none that measures."""
    nothing = SearchConfig(tuner=tuner, trials=0)
    assert (nothing.trials, nothing.seconds) == (0, 0.0)
    assert nothing == SearchConfig(tuner=tuner, trials=0, seconds=60) == SearchConfig(tuner=tuner, trials=0, seconds=0)
    assert SearchConfig(tuner=tuner, trials=1, seconds=1).covers(nothing)
    assert not nothing.covers(SearchConfig(tuner=tuner, trials=1, seconds=1))
    assert not SearchConfig(tuner="none").covers(nothing)
    assert JobSpec.from_json(make_spec(search=nothing).to_json()).search == nothing


def test_default_tuner() -> None:
    """Who names no tuner gets sketches and templates in one search."""
    assert SearchConfig().tuner == "auto"


@pytest.mark.parametrize(
    ("field", "value"),
    [("trials", -1), ("trials", MAX_TRIALS + 1), ("trials", True), ("trials", 1.0), ("trials", None),
     ("seconds", 0), ("seconds", 0.5), ("seconds", MAX_SECONDS + 1), ("seconds", float("nan")),
     ("seconds", float("inf")), ("seed", -1), ("seed", 2**31), ("seed", True)],
)  # fmt: skip
def test_budget_limits(field: str, value: Any) -> None:
    """A budget outside its limits is refused with the field's name."""
    with pytest.raises(InvalidRequest) as caught:
        SearchConfig(**{field: value})
    assert caught.value.field == f"search.{field}"


@pytest.mark.parametrize("tuner", sorted(TUNERS))
def test_seed_limits_of_every_tuner(tuner: str) -> None:
    """A wrong seed is refused also where it would not be used."""
    with pytest.raises(InvalidRequest) as caught:
        SearchConfig(tuner=tuner, trials=0, seed=-1)
    assert caught.value.field == "search.seed"


def test_unknown_tuner() -> None:
    """A tuner that does not exist is refused with those that do."""
    with pytest.raises(UnsupportedOption, match="'auto', 'autotvm', 'ansor', 'none'") as caught:
        SearchConfig(tuner="random")
    assert caught.value.field == "search.tuner"


INT8 = make_key(quantization=QuantizationConfig("int8", calibration=sha256("samples")).resolved())
THRESHOLDS = st.none() | st.floats(0, MAX_SQNR_DB)


@given(search=BUDGETS, min_sqnr_db=THRESHOLDS)
def test_spec_round_trip(search: SearchConfig, min_sqnr_db: float | None) -> None:
    """A job's spec read back from its JSON is the same spec; one without a threshold is spelled as ever."""
    spec = JobSpec(INT8, search, min_sqnr_db)
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert set(make_spec(search=search).to_json()) == {"key", "search"}
    assert make_spec(search=search).budget_digest() == search.budget_digest()


@given(one=THRESHOLDS, two=THRESHOLDS)
def test_no_threshold_is_passed_by(one: float | None, two: float | None) -> None:
    """A job answers for another of its key and budget exactly if it lets pass no library that the other refuses."""
    specs = JobSpec(INT8, min_sqnr_db=one), JobSpec(INT8, min_sqnr_db=two)
    assert specs[0].answers(specs[1]) == ((one if one is not None else -1) >= (two if two is not None else -1))
    assert (specs[0].budget_digest() == specs[1].budget_digest()) == (one == two)


@pytest.mark.parametrize("threshold", [-1, MAX_SQNR_DB + 1, float("nan"), float("inf")])
def test_threshold_limits(threshold: float) -> None:
    """A threshold that is no number of decibels is refused, and so is any where there is nothing to judge by."""
    for key, value in ((INT8, threshold), (make_key(), 20.0)):
        with pytest.raises(InvalidRequest) as caught:
            JobSpec(key, min_sqnr_db=value)
        assert caught.value.field == "quantization.min_sqnr_db"


@dataclass
class Life:
    """What a job should look like, after all that was done to it."""

    model: str
    trials_budget: int
    created_at: dt.datetime
    state: JobState = JobState.QUEUED
    attempt: int = 0
    lost: int = 0
    trials: int = 0
    cancel: bool = False
    heartbeat_at: dt.datetime | None = None
    woken_at: dt.datetime | None = None
    queued_at: dt.datetime | None = None
    history: list[tuple[str, int]] = field(default_factory=lambda: [("QUEUED", 0)])

    def move(self, state: JobState) -> None:
        self.state = self.state.to(state)
        self.history.append((state.value, self.attempt))


HEARTBEAT_TIMEOUT_S, UNCLAIMED_AFTER_S, MAX_ATTEMPTS = 60, 30, 2
_runs = itertools.count()


class JobLife(RuleBasedStateMachine):
    """Three keys, any number of jobs and attempts, old attempts that come back, time that passes, sweeps."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        # One database for all runs: each has keys of its own, and a time after everything of the one before.
        run = next(_runs)
        self.now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(days=run)
        self.models = [f"run {run} model {n}" for n in range(3)]
        self.lives: dict[str, Life] = {}
        self.claims: list[Claim] = []
        self.artifacts: dict[str, float] = {}
        self.store = TuningStore(self.url, clock=lambda: self.now)
        self.workload = make_workload()
        self.scope = make_spec().key.record_scope()
        self.store.put_workloads(self.scope, [self.workload])
        self.sweep_leftovers()

    def sweep_leftovers(self) -> None:
        self.store.sweep(heartbeat_timeout_s=1, unclaimed_after_s=1, max_attempts=1)

    def teardown(self) -> None:
        self.store.close()

    def any_job(self, data: st.DataObject) -> str:
        # By its place, since ids are random and Hypothesis wants the same choice to mean the same again.
        return list(self.lives)[data.draw(st.integers(0, len(self.lives) - 1))]

    def active(self, model: str, trials: int) -> str | None:
        """The oldest job under way whose budget covers as many trials."""
        return next(
            (
                i
                for i, j in self.lives.items()
                if j.model == model and not j.state.is_final and j.trials_budget >= trials
            ),
            None,
        )

    @rule(model=st.integers(0, 2), trials=st.sampled_from([10, 100]))
    def submit(self, model: int, trials: int) -> None:
        name = self.models[model]
        expected = self.active(name, trials)
        if expected is None and name in self.artifacts:
            expected = next(
                (
                    i
                    for i, j in reversed(self.lives.items())
                    if j.model == name and j.state is JobState.SUCCEEDED and j.trials_budget >= trials
                ),
                None,
            )
        made = self.store.submit(make_spec(name, search=SearchConfig(trials=trials)))
        assert made.created == (expected is None)
        if expected is None:
            assert made.job.id not in self.lives
            self.lives[made.job.id] = Life(name, trials, self.now, woken_at=self.now, queued_at=self.now)
        else:
            assert made.job.id == expected

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        job_id = self.any_job(data)
        life = self.lives[job_id]
        claimed = self.store.claim(job_id, "w")
        if life.state is not JobState.QUEUED:
            assert claimed is None
            return
        assert claimed is not None
        life.attempt += 1
        life.heartbeat_at = self.now
        life.move(JobState.RUNNING)
        assert claimed[0] == Claim(job_id, life.attempt)
        self.claims.append(claimed[0])

    @precondition(lambda self: self.claims)
    @rule(
        data=st.data(),
        what=st.sampled_from(["heartbeat", "trials", "event", "publish", "fail", "cancelled", "release"]),
        latency_s=st.floats(1e-6, 1),
    )
    def act(self, data: st.DataObject, what: str, latency_s: float) -> None:
        claim = self.claims[data.draw(st.integers(0, len(self.claims) - 1))]
        life = self.lives[claim.job_id]
        held = life.state is JobState.RUNNING and life.attempt == claim.attempt
        try:
            match what:
                case "heartbeat":
                    assert self.store.heartbeat(claim) == life.cancel
                case "trials":
                    self.store.add_trials(claim, self.scope, [make_trial(self.workload, n) for n in range(3)])
                case "event":
                    self.store.append_event(claim, "progress", {})
                case "publish":
                    artifact = self.store.publish(claim, (sha256(str(latency_s)), 1), latency_s, {})
                    best = min(latency_s, self.artifacts.get(life.model, 2))
                    assert artifact.latency_s == best
                case "fail":
                    self.store.fail(claim, JobError("build-failed", "no"))
                case "cancelled":
                    self.store.mark_cancelled(claim)
                case "release":
                    self.store.release(claim)
        except StaleAttempt:
            assert not held
            return
        assert held
        match what:
            case "heartbeat":
                life.heartbeat_at = self.now
            case "trials":
                life.trials += 3
            case "publish":
                self.artifacts[life.model] = best
                life.move(JobState.SUCCEEDED)
            case "fail":
                life.move(JobState.FAILED)
            case "cancelled":
                life.move(JobState.CANCELLED)
            case "release":
                life.woken_at, life.queued_at = None, self.now
                life.move(JobState.CANCELLED if life.cancel else JobState.QUEUED)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def request_cancel(self, data: st.DataObject) -> None:
        job_id = self.any_job(data)
        life = self.lives[job_id]
        if life.state in (JobState.SUCCEEDED, JobState.FAILED):
            with pytest.raises(IllegalTransition):
                self.store.request_cancel(job_id)
            return
        self.store.request_cancel(job_id)
        if life.state is JobState.QUEUED:
            life.move(JobState.CANCELLED)
        if life.state is JobState.RUNNING:
            life.cancel = True

    @rule(seconds=st.sampled_from([1, 29, 31, 61, 601]))
    def time_passes(self, seconds: int) -> None:
        self.now += dt.timedelta(seconds=seconds)

    @rule()
    def sweep(self) -> None:
        swept = self.store.sweep(
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, unclaimed_after_s=UNCLAIMED_AFTER_S, max_attempts=MAX_ATTEMPTS
        )
        requeued, failed, unclaimed = [], [], []
        for job_id, life in self.lives.items():
            if life.state is JobState.RUNNING:
                assert life.heartbeat_at is not None
                if (self.now - life.heartbeat_at).total_seconds() <= HEARTBEAT_TIMEOUT_S:
                    continue
                life.lost += 1
                if life.cancel:
                    life.move(JobState.CANCELLED)
                elif life.lost >= MAX_ATTEMPTS:
                    life.move(JobState.FAILED)
                    failed.append(job_id)
                else:
                    life.move(JobState.QUEUED)
                    life.woken_at = life.queued_at = self.now
                    requeued.append(job_id)
            elif life.state is JobState.QUEUED and self.is_forgotten(life):
                life.woken_at = self.now
                unclaimed.append(job_id)
        assert [j.id for j in swept.requeued] == requeued
        assert [j.id for j in swept.failed] == failed
        assert [j.id for j in swept.unclaimed if j.id in self.lives] == unclaimed

    def is_forgotten(self, life: Life) -> bool:
        if life.woken_at is None:
            return True
        assert life.queued_at is not None
        waited_s = (self.now - life.woken_at).total_seconds()
        as_long_as_before_s = (life.woken_at - life.queued_at).total_seconds()
        enough_s = min(as_long_as_before_s, RESENT_WITHIN * UNCLAIMED_AFTER_S)
        return waited_s > UNCLAIMED_AFTER_S and waited_s >= enough_s

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def message_fails(self, data: st.DataObject) -> None:
        job_id = self.any_job(data)
        self.store.not_woken([job_id])
        if self.lives[job_id].state is JobState.QUEUED:
            self.lives[job_id].woken_at = None

    @invariant()
    def agrees(self) -> None:
        for job_id, life in self.lives.items():
            job = self.store.job(job_id)
            assert (job.state, job.attempt, job.trials_measured) == (life.state, life.attempt, life.trials)
            assert job.created_at == life.created_at
            if job.state is JobState.RUNNING:
                assert (job.cancel_requested, job.heartbeat_at) == (life.cancel, life.heartbeat_at)
            events = self.store.events(job_id)
            assert [e.seq for e in events] == list(range(1, len(events) + 1))
            assert [(e.data["state"], e.data["attempt"]) for e in events if e.type == "state"] == life.history


def test_life_of_jobs(database_url: str) -> None:
    """Whatever is done to jobs in whatever order, the store agrees with a model of them that fits on a page."""

    class Here(JobLife):
        url = database_url

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
