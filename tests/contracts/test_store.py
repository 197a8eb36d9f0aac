"""What TuningStore promises, once on SQLite and once on PostgreSQL."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
import sqlalchemy as sa

from tests.samples import (
    DEVICE,
    FAST,
    TARGET,
    TOOLCHAIN,
    make_key,
    make_spec,
    make_trial,
    make_workload,
    sha256,
)
from tuning_db.calibration import CalibrationInfo
from tuning_db.catalog import Health, ModelInfo, PortSpec, Roof
from tuning_db.engine import open_engine, parse_url
from tuning_db.errors import (
    CacheMiss,
    Conflict,
    DatabaseUnavailable,
    IdempotencyConflict,
    IllegalTransition,
    InvalidRequest,
    NotFound,
    QueueFull,
    StaleAttempt,
    StorageFull,
    UnknownDevice,
)
from tuning_db.jobs import Claim, Job, JobError, JobSpec, JobState, SearchConfig
from tuning_db.keys import KEY_VERSION, BuildOptions, Json, QuantizationConfig, TensorSpec
from tuning_db.store import Swept, TuningStore, experience_query
from tuning_db.trials import Experience, Failed, FailureKind, Measured, StoredCostModel, Trial, Workload

T = TypeVar("T")
BEGINNING = dt.datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=dt.UTC)
LIBRARY = (sha256("a library"), 4096)


class Clock:
    """A time that passes only when told to."""

    def __init__(self) -> None:
        self.now = BEGINNING

    def __call__(self) -> dt.datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += dt.timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(database_url: str, clock: Clock) -> Iterator[TuningStore]:
    store = TuningStore(database_url, clock=clock)
    yield store
    store.close()


def run_sql(url: str, statement: str, **values: Any) -> None:
    """What somebody does with a database's own tool, past the store."""
    engine = open_engine(parse_url(url))
    try:
        with engine.begin() as connection:
            connection.execute(sa.text(statement), values)
    finally:
        engine.dispose()


def at_once(count: int, call: Callable[[int], T]) -> list[T]:
    """`call(0)` to `call(count - 1)` from as many threads, let go together."""
    barrier = threading.Barrier(count)

    def one(number: int) -> T:
        barrier.wait(timeout=60)
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def running(store: TuningStore, model: str = "a model", worker: str = "w1") -> tuple[Claim, Job]:
    claimed = store.claim(store.submit(make_spec(model)).job.id, worker)
    assert claimed is not None
    return claimed


def states(store: TuningStore, job_id: str) -> list[tuple[Any, Any]]:
    return [(e.data["state"], e.data["attempt"]) for e in store.events(job_id) if e.type == "state"]


def sweep(store: TuningStore, **changes: Any) -> Any:
    return store.sweep(**{"heartbeat_timeout_s": 60, "unclaimed_after_s": 30, "max_attempts": 3, **changes})


class TestModels:
    MODEL = ModelInfo(
        digest=sha256("graph"),
        blob=sha256("bytes"),
        format="onnx",
        size_bytes=5_000_000_000,
        inputs=(PortSpec("x\0\ud800", "float32", ("N", 3, None)),),
        outputs=(PortSpec("y", "int64", ()),),
    )

    def test_round_trip(self, store: TuningStore) -> None:
        """A model comes back as it was put, symbols and unknown dimensions, odd names and sizes over 4 GiB included."""
        assert store.add_model(self.MODEL) is True
        assert store.model(self.MODEL.digest) == self.MODEL

    def test_first_upload_stays(self, store: TuningStore) -> None:
        """A second upload of the same graph is told so, and the first one's bytes stay."""
        store.add_model(self.MODEL)
        assert store.add_model(replace(self.MODEL, blob=sha256("other bytes"))) is False
        assert store.model(self.MODEL.digest).blob == self.MODEL.blob

    def test_lost_bytes_are_replaced_once(self, store: TuningStore) -> None:
        """Another file takes the place of the lost one; whoever comes later with a third is told so."""
        store.add_model(self.MODEL)
        assert store.replace_model_blob(self.MODEL.digest, self.MODEL.blob, (sha256("second"), 7)) is True
        assert store.replace_model_blob(self.MODEL.digest, self.MODEL.blob, (sha256("third"), 8)) is False
        assert store.model(self.MODEL.digest) == replace(self.MODEL, blob=sha256("second"), size_bytes=7)

    def test_simultaneous_uploads(self, store: TuningStore) -> None:
        """Of ten uploads of one model at once, exactly one is the first."""
        assert sorted(at_once(10, lambda _: store.add_model(self.MODEL))) == [False] * 9 + [True]

    def test_unknown(self, store: TuningStore) -> None:
        """A model that nobody uploaded is NotFound."""
        with pytest.raises(NotFound, match="upload it"):
            store.model(sha256("nothing"))


class TestCalibrations:
    DATA = CalibrationInfo(
        digest=sha256("samples"),
        blob=sha256("an archive"),
        size_bytes=5_000_000_000,
        arrays=(TensorSpec("0/x\0", "float32", (1, 3, 8, 8)), TensorSpec("1/x\0", "int64", ())),
    )

    def test_round_trip(self, store: TuningStore) -> None:
        """Samples come back as they were put; a second archive of them is told so, and the first one's bytes stay."""
        assert store.add_calibration(self.DATA) is True
        assert store.add_calibration(replace(self.DATA, blob=sha256("another archive"))) is False
        assert store.calibration(self.DATA.digest) == self.DATA
        assert store.blob_is_referenced(self.DATA.blob)

    def test_lost_bytes_are_replaced_once(self, store: TuningStore) -> None:
        """Another archive takes the place of the lost one; whoever comes later with a third is told so."""
        store.add_calibration(self.DATA)
        assert store.replace_calibration_blob(self.DATA.digest, self.DATA.blob, (sha256("second"), 7)) is True
        assert store.replace_calibration_blob(self.DATA.digest, self.DATA.blob, (sha256("third"), 8)) is False
        assert store.calibration(self.DATA.digest) == replace(self.DATA, blob=sha256("second"), size_bytes=7)

    def test_unknown(self, store: TuningStore) -> None:
        """Samples that nobody uploaded are NotFound."""
        with pytest.raises(NotFound, match="upload it"):
            store.calibration(sha256("nothing"))


class TestDevices:
    def test_workers_are_counted_while_they_report(self, store: TuningStore, clock: Clock) -> None:
        """A device has as many workers as were seen within a minute, and stays listed when the last has gone."""
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        clock.advance(50)
        store.report_device("w2", DEVICE, TARGET, TOOLCHAIN)
        store.report_device("w2", DEVICE, TARGET, TOOLCHAIN)
        assert [(d.identity, d.workers, d.last_seen) for d in store.devices()] == [(DEVICE, 2, clock.now)]
        clock.advance(20)
        assert store.device(DEVICE.name).workers == 1
        clock.advance(3600)
        assert store.device(DEVICE.name).workers == 0

    def test_newest_report_wins(self, store: TuningStore, clock: Clock) -> None:
        """A device has one target and toolchain: those of the newest report, whichever worker it came from."""
        newer = replace(TOOLCHAIN, llvm="21.0.0")
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        clock.advance(1)
        store.report_device("w2", DEVICE, '{"kind":"llvm"}', newer)
        assert (store.device(DEVICE.name).target, store.device(DEVICE.name).toolchain) == ('{"kind":"llvm"}', newer)
        clock.advance(1)
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        assert (store.device(DEVICE.name).target, store.device(DEVICE.name).toolchain) == (TARGET, TOOLCHAIN)

    def test_same_name_other_features(self, store: TuningStore) -> None:
        """Machines of one model name that differ in what they can do are two devices."""
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        store.report_device("w2", replace(DEVICE, features=("avx2",)), TARGET, TOOLCHAIN)
        assert len(store.devices()) == 2

    def test_long_dead_workers_are_forgotten(self, store: TuningStore, clock: Clock, database_url: str) -> None:
        """Workers silent for over a day leave no rows behind once another one reports the device."""
        for number in range(5):
            store.report_device(f"old-{number}", DEVICE, TARGET, TOOLCHAIN)
        clock.advance(25 * 3600)
        store.report_device("new", DEVICE, TARGET, TOOLCHAIN)
        engine = open_engine(parse_url(database_url))
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT count(*) FROM devices")) == 1
        engine.dispose()

    def test_unknown(self, store: TuningStore) -> None:
        """A device that nobody has reported is an error that lists the names that are known."""
        with pytest.raises(UnknownDevice, match="tunery worker"):
            store.device("nothing")
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        with pytest.raises(UnknownDevice) as caught:
            store.device("nothing")
        assert caught.value.candidates == (DEVICE.name,)

    @pytest.mark.parametrize("column", ["identity", "toolchain"])
    def test_report_of_another_version(self, store: TuningStore, database_url: str, column: str) -> None:
        """A report that this version cannot read hides neither other devices nor the device's other workers."""
        other = replace(DEVICE, cores=4)
        for worker, device in (("w1", DEVICE), ("w2", DEVICE), ("w3", other)):
            store.report_device(worker, device, TARGET, TOOLCHAIN)
        run_sql(database_url, f"""UPDATE devices SET {column} = '{{"shape":"round"}}' WHERE worker = 'w2'""")
        assert {device.identity: device.workers for device in store.devices()} == {DEVICE: 1, other: 1}

    def test_jobs_are_counted(self, store: TuningStore) -> None:
        """A device says how many jobs run on it and how many wait for it."""
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        running(store, "one")
        store.submit(make_spec("two"))
        store.submit(make_spec("three"))
        store.submit(make_spec("elsewhere", device=replace(DEVICE, cores=4)))
        assert (store.device(DEVICE.name).busy, store.device(DEVICE.name).queued) == (1, 2)


class TestRoofs:
    ROOF = Roof(4.1e11, 3.8e10, 2.1e11, BEGINNING, TOOLCHAIN)

    def test_newest_stays(self, store: TuningStore) -> None:
        """A roof comes back as it was measured, and is what the device's listing shows; a later one replaces it."""
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        assert store.roof(DEVICE) is None
        assert store.device(DEVICE.name).roof is None
        store.put_roof(DEVICE, self.ROOF)
        assert store.roof(DEVICE) == self.ROOF == store.device(DEVICE.name).roof
        later = Roof(1 / 3, 2e9, 1e300, BEGINNING + dt.timedelta(days=1))
        store.put_roof(DEVICE, later)
        assert store.roof(DEVICE) == later == store.devices()[0].roof

    def test_of_one_device(self, store: TuningStore) -> None:
        """Another number of cores is another device with another roof; one that nobody has reported may have one."""
        store.put_roof(DEVICE, self.ROOF)
        other = replace(DEVICE, cores=4)
        assert store.roof(other) is None
        assert store.devices() == []
        store.report_device("w1", other, TARGET, TOOLCHAIN)
        store.report_device("w2", DEVICE, TARGET, TOOLCHAIN)
        assert {device.identity: device.roof for device in store.devices()} == {other: None, DEVICE: self.ROOF}

    @pytest.mark.parametrize("change", ["flops_per_s = 0", """toolchain = '{"shape":"round"}'"""])
    def test_unreadable(self, store: TuningStore, database_url: str, change: str) -> None:
        """A roof that cannot be, or of another version, is as none at all."""
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        store.put_roof(DEVICE, self.ROOF)
        run_sql(database_url, f"UPDATE roofs SET {change}")
        assert store.roof(DEVICE) is None
        assert store.device(DEVICE.name).roof is None

    def test_at_once(self, store: TuningStore) -> None:
        """Workers of one device that measure at once all succeed, and one figure is kept."""
        roofs = [replace(self.ROOF, flops_per_s=1e9 + n) for n in range(8)]
        at_once(8, lambda n: store.put_roof(DEVICE, roofs[n]))
        assert store.roof(DEVICE) in roofs


class TestHealths:
    def test_of_each_slot(self, store: TuningStore, clock: Clock) -> None:
        """A slot is as it was last, by the best that it ever was; the device drifts as much as its slowest slot, and a
        slot that nothing was measured on for a month is forgotten."""
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        assert (store.device(DEVICE.name).health, store.device(DEVICE.name).drift) == ((), None)
        one = Health("board:9090", 0.002, 0.002, 61.5, 1_500_000, "performance", clock())
        two = Health("board:9091", 0.004, 0.004, None, None, None, clock())
        store.put_health(DEVICE, [one, two])
        assert store.device(DEVICE.name).health == (one, two)
        assert store.device(DEVICE.name).drift == 0
        slower = replace(one, reference_s=0.003, best_reference_s=0.003, temperature_c=84.0)
        store.put_health(DEVICE, [slower, replace(two, reference_s=0.001, best_reference_s=0.001)])
        first, second = store.device(DEVICE.name).health
        assert first == replace(slower, best_reference_s=0.002)
        assert second.best_reference_s == 0.001
        assert store.device(DEVICE.name).drift == pytest.approx(0.5)
        assert store.device(DEVICE.name).roof is None
        clock.advance(31 * 24 * 3600)
        assert store.device(DEVICE.name).health == ()


class TestSubmit:
    def test_new_job(self, store: TuningStore, clock: Clock) -> None:
        """A first request makes a QUEUED job that holds all of the request, and says so in an event."""
        made = store.submit(make_spec())
        assert made.created
        assert made.job == Job(made.job.id, make_spec(), JobState.QUEUED, 0, clock.now, clock.now)
        assert store.job(made.job.id) == made.job
        assert [(e.seq, e.type, e.data, e.at) for e in store.events(made.job.id)] == [
            (1, "state", {"state": "QUEUED", "attempt": 0}, clock.now)
        ]

    def test_twenty_at_once(self, store: TuningStore) -> None:
        """Twenty equal requests at once make one job (codabench#2426, thumper#69)."""
        made = at_once(20, lambda _: store.submit(make_spec()))
        assert len({m.job.id for m in made}) == 1
        assert sum(m.created for m in made) == 1
        assert len(store.jobs()) == 1

    def test_from_several_processes(self, store: TuningStore, database_url: str) -> None:
        """Equal requests to several API processes at once make one job."""
        with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
            ids = list(pool.map(_submit_in_process, [database_url] * 12))
        assert len(set(ids)) == 1
        assert [job.id for job in store.jobs()] == ids[:1]

    def test_job_under_way_answers_what_it_covers(self, store: TuningStore) -> None:
        """A waiting or running job answers requests of no larger budget; more trials or seconds make a new one."""
        small = store.submit(make_spec(search=SearchConfig(tuner="none")))
        large = store.submit(make_spec())
        assert large.created
        _, job = running(store)
        assert job.id == large.job.id
        assert store.submit(make_spec(search=SearchConfig(trials=10, seconds=10, seed=7))).job.id == job.id
        assert store.submit(make_spec(search=SearchConfig(tuner="none"))).job.id == small.job.id
        assert store.submit(make_spec(search=SearchConfig(trials=64, seconds=61))).created
        assert len(store.jobs()) == 3

    def test_threshold(self, store: TuningStore) -> None:
        """A job answers requests of the same key with its threshold or a lower one; a higher one makes a job of its
        own, at any time."""
        key = make_key(quantization=QuantizationConfig("int8", calibration=sha256("samples")).resolved())
        search = SearchConfig(trials=8, seconds=60)
        first = store.submit(JobSpec(key, search, 20)).job
        assert [store.submit(JobSpec(key, search, wanted)).job.id for wanted in (None, 19, 20)] == [first.id] * 3
        second = store.submit(JobSpec(key, search, 30))
        assert second.created
        for job_id in (first.id, second.job.id):
            claimed = store.claim(job_id, "w1")
            assert claimed is not None
            store.publish(claimed[0], LIBRARY, 0.01, {})
        assert store.submit(JobSpec(key, search, 25)).job == store.job(second.job.id)
        assert store.submit(JobSpec(key, search, 31)).created

    def test_two_budgets_at_once(self, store: TuningStore) -> None:
        """Twenty requests at once for two budgets make at most one job for each, and nobody gets less than asked."""
        wanted = [SearchConfig(trials=8 * (1 + number % 2), seconds=60, seed=number) for number in range(20)]
        made = at_once(20, lambda number: store.submit(make_spec(search=wanted[number])))
        assert all(got.job.spec.search.covers(want) for got, want in zip(made, wanted, strict=True))
        assert sum(got.created for got in made) == len(store.jobs()) <= 2

    def test_finished_job_answers_what_it_covers(self, store: TuningStore) -> None:
        """A finished job answers requests of no larger budget; more trials or seconds make a new one."""
        claim, job = running(store)
        store.publish(claim, LIBRARY, 0.01, {})
        assert store.submit(make_spec(search=SearchConfig(trials=10, seconds=10, seed=7))).job.id == job.id
        assert store.submit(make_spec(search=SearchConfig(tuner="none"))).job.id == job.id
        assert store.submit(make_spec(search=SearchConfig(trials=65, seconds=60))).created

    def test_failed_job_does_not_answer(self, store: TuningStore) -> None:
        """After a failure or a cancel the same request is tried anew."""
        claim, _ = running(store)
        store.fail(claim, JobError("build-failed", "no"))
        second = store.submit(make_spec())
        store.request_cancel(second.job.id)
        assert second.created
        assert store.submit(make_spec()).created

    def test_other_keys_are_other_jobs(self, store: TuningStore) -> None:
        """A request that differs in one field of the key has a job of its own."""
        store.submit(make_spec())
        assert store.submit(make_spec(options=BuildOptions(fast_math=True))).created
        assert store.submit(make_spec(inputs=(TensorSpec("x", "float32", (8, 3, 48, 192)),))).created

    def test_queue_limit(self, store: TuningStore) -> None:
        """A full queue refuses new jobs, and still answers with those that exist."""
        first = store.submit(make_spec("one"), max_queued=1)
        with pytest.raises(QueueFull):
            store.submit(make_spec("two"), max_queued=1)
        assert store.submit(make_spec("one"), max_queued=1).job == first.job
        store.claim(first.job.id, "w1")
        assert store.submit(make_spec("two"), max_queued=1).created

    def test_damaged_library_is_built_again(self, store: TuningStore) -> None:
        """When a library's bytes are gone its key is a miss, and the next request makes a new job."""
        claim, job = running(store)
        store.publish(claim, LIBRARY, 0.01, {})
        assert store.drop_artifacts_of_blob(LIBRARY[0]) == 1
        assert store.drop_artifacts_of_blob(LIBRARY[0]) == 0
        with pytest.raises(CacheMiss):
            store.find_artifact(make_key())
        again = store.submit(make_spec())
        assert again.created
        assert again.job.id != job.id


def _submit_in_process(url: str) -> str:
    store = TuningStore(url)
    try:
        return store.submit(make_spec()).job.id
    finally:
        store.close()


class TestIdempotency:
    def test_same_pair_same_job(self, store: TuningStore) -> None:
        """A repeated POST gets its job again, even when that has failed since."""
        first = store.submit(make_spec(), idempotency=("k", sha256("body")))
        claimed = store.claim(first.job.id, "w1")
        assert claimed is not None
        store.fail(claimed[0], JobError("build-failed", "no"))
        again = store.submit(make_spec(), idempotency=("k", sha256("body")))
        assert (again.created, again.job.id, again.job.state) == (False, first.job.id, JobState.FAILED)

    def test_other_body_conflicts(self, store: TuningStore) -> None:
        """The same key with another body is refused and stores nothing."""
        store.submit(make_spec(), idempotency=("k", sha256("body")))
        with pytest.raises(IdempotencyConflict, match="new key"):
            store.submit(make_spec("two"), idempotency=("k", sha256("other body")))
        assert len(store.jobs()) == 1

    def test_several_are_stored_together(self, store: TuningStore) -> None:
        """Several specs of one request get a job each, the same ones when it is repeated; with room for one, none is
        stored; and the rows of further jobs are in nobody's way."""
        specs = [make_spec("m0"), make_spec("m1"), make_spec("m2")]
        with pytest.raises(QueueFull):
            store.submit_all(specs, idempotency=("k", sha256("body")), max_queued=2)
        assert store.jobs() == []
        first = store.submit_all(specs, idempotency=("k", sha256("body")), max_queued=3)
        assert [m.created for m in first] == [True] * 3
        assert [m.job.spec for m in first] == specs
        store.request_cancel(first[1].job.id)
        again = store.submit_all(specs, idempotency=("k", sha256("body")))
        assert [(m.created, m.job.id) for m in again] == [(False, m.job.id) for m in first]
        with pytest.raises(IdempotencyConflict):
            store.submit_all([make_spec("m3")], idempotency=("k", sha256("other body")))
        assert store.submit(make_spec("m3"), idempotency=("k1", sha256("body"))).created

    def test_key_is_remembered_for_an_existing_job(self, store: TuningStore) -> None:
        """A key that came with a request which an older job answers belongs to that job from then on."""
        first = store.submit(make_spec())
        store.submit(make_spec(), idempotency=("k", sha256("body")))
        store.request_cancel(first.job.id)
        assert store.submit(make_spec(), idempotency=("k", sha256("body"))).job.id == first.job.id

    def test_at_once(self, store: TuningStore) -> None:
        """Twenty copies of one POST at once make one job; two bodies under one key are never both accepted."""
        same = at_once(20, lambda _: store.submit(make_spec(), idempotency=("k", sha256("body"))))
        assert len({m.job.id for m in same}) == 1

        def either(number: int) -> str:
            try:
                made = store.submit(make_spec(f"m{number % 2}"), idempotency=("l", sha256(f"body {number % 2}")))
            except IdempotencyConflict:
                return "conflict"
            return made.job.id

        answers = at_once(10, either)
        assert answers.count("conflict") == 5
        assert len(set(answers)) == 2

    @pytest.mark.parametrize("key", ["", "k" * 256])
    def test_length(self, store: TuningStore, key: str) -> None:
        """A key that does not fit into its column is the client's error, on every database."""
        with pytest.raises(InvalidRequest, match="255"):
            store.submit(make_spec(), idempotency=(key, sha256("body")))


class TestLists:
    def test_pages(self, store: TuningStore) -> None:
        """Jobs come newest first, also those of one moment, in pages that neither repeat nor skip."""
        ids = [store.submit(make_spec(str(n))).job.id for n in range(5)]
        first = store.jobs(limit=2)
        second = store.jobs(limit=2, before=first[-1].id)
        third = store.jobs(limit=2, before=second[-1].id)
        assert [job.id for job in first + second + third] == ids[::-1]
        with pytest.raises(NotFound):
            store.jobs(before="nothing")

    def test_filters(self, store: TuningStore) -> None:
        """Jobs can be asked for by state and by device."""
        _, one = running(store, "one")
        two = store.submit(make_spec("two")).job
        other = store.submit(make_spec("three", device=replace(DEVICE, cores=64))).job
        assert [j.id for j in store.jobs(states=[JobState.RUNNING])] == [one.id]
        assert [j.id for j in store.jobs(states=[JobState.QUEUED, JobState.RUNNING])] == [other.id, two.id, one.id]
        assert [j.id for j in store.jobs(device=other.spec.key.device.name)] == [other.id]

    def test_job_of_another_version(self, store: TuningStore, database_url: str) -> None:
        """A job that this version cannot read is left out of lists, and is NotFound by itself."""
        old, new = store.submit(make_spec("old")).job, store.submit(make_spec("new")).job
        run_sql(
            database_url, "UPDATE jobs SET spec = :spec WHERE id = :id", spec='{"key":{"key_version":0}}', id=old.id
        )
        assert store.jobs() == [new]
        with pytest.raises(NotFound, match="another version"):
            store.job(old.id)

    def test_pages_around_another_version(self, store: TuningStore, database_url: str) -> None:
        """Jobs that cannot be read leave no page short: who reads on until one is sees every other job."""
        jobs = [store.submit(make_spec(str(n))).job for n in range(9)]
        for job in jobs[2:7]:
            run_sql(database_url, "UPDATE jobs SET spec = '{}' WHERE id = :id", id=job.id)
        seen = store.jobs(limit=3)
        assert [job.id for job in seen] == [jobs[n].id for n in (8, 7, 1)]
        assert [job.id for job in store.jobs(limit=3, before=seen[-1].id)] == [jobs[0].id]
        assert store.jobs(limit=0) == []

    def test_unknown(self, store: TuningStore) -> None:
        """A job that never was is NotFound; it has no events, and cannot be claimed."""
        with pytest.raises(NotFound, match="tunery jobs"):
            store.job("nothing")
        with pytest.raises(NotFound):
            store.request_cancel("nothing")
        assert store.events("nothing") == []
        assert store.claim("nothing", "w1") is None

    def test_events_in_portions(self, store: TuningStore, clock: Clock) -> None:
        """Events are numbered from 1 without gaps and can be read on from any of them."""
        claim, job = running(store)
        for number in range(5):
            clock.advance(1)
            store.append_event(claim, "trial", {"number": number, "best_us": 1.5, "text": "\0 \ud83d é"})
        events = store.events(job.id)
        assert [e.seq for e in events] == [1, 2, 3, 4, 5, 6, 7]
        assert events[6].data == {"number": 4, "best_us": 1.5, "text": "\0 \ud83d é"}
        assert events[6].at == clock.now
        assert store.events(job.id, after=3, limit=2) == events[3:5]
        assert store.events(job.id, after=7) == []

    def test_events_from_many_threads(self, store: TuningStore) -> None:
        """Events appended at once get different numbers, and none is lost."""
        claim, job = running(store)

        def append(number: int) -> None:
            for _ in range(5):
                store.append_event(claim, "progress", {"n": number})

        at_once(8, append)
        assert [e.seq for e in store.events(job.id)] == list(range(1, 43))


class TestClaims:
    def test_one_winner(self, store: TuningStore) -> None:
        """Of sixteen workers that take a job at once, one gets it and the others learn so quietly."""
        job = store.submit(make_spec()).job
        won = [c for c in at_once(16, lambda n: store.claim(job.id, f"w{n}")) if c is not None]
        assert len(won) == 1
        claim, claimed = won[0]
        assert (claim.attempt, claimed.state, claimed.claimed_by) == (1, JobState.RUNNING, store.job(job.id).claimed_by)
        assert states(store, job.id) == [("QUEUED", 0), ("RUNNING", 1)]

    def test_second_delivery(self, store: TuningStore) -> None:
        """A message delivered twice starts nothing, neither while the job runs nor after (celery#5935, pretix#2058)."""
        claim, job = running(store)
        assert store.claim(job.id, "w2") is None
        store.publish(claim, LIBRARY, 0.01, {})
        assert store.claim(job.id, "w2") is None
        assert store.job(job.id).attempt == 1

    def test_heartbeat(self, store: TuningStore, clock: Clock) -> None:
        """A heartbeat is remembered, and tells the worker when a cancel was requested."""
        claim, job = running(store)
        clock.advance(5)
        assert store.heartbeat(claim) is False
        assert store.job(job.id).heartbeat_at == clock.now
        assert store.request_cancel(job.id).cancel_requested
        assert store.heartbeat(claim) is True

    @pytest.mark.parametrize("how", ["taken over", "succeeded", "failed", "cancelled", "released"])
    def test_stale_attempt_writes_nothing(self, store: TuningStore, clock: Clock, how: str) -> None:
        """An attempt that no longer holds its job can neither heartbeat, report, record, publish, fail nor release."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        workload = make_workload()
        store.put_workloads(scope, [workload])
        match how:
            case "taken over":
                clock.advance(61)
                assert [j.id for j in sweep(store).requeued] == [job.id]
                assert store.claim(job.id, "w2") is not None
            case "succeeded":
                store.publish(claim, LIBRARY, 0.01, {})
            case "failed":
                store.fail(claim, JobError("build-failed", "no"))
            case "cancelled":
                store.mark_cancelled(claim)
            case "released":
                store.release(claim)
        before, events = store.job(job.id), store.events(job.id)
        for write in (
            lambda: store.heartbeat(claim),
            lambda: store.append_event(claim, "trial", {}),
            lambda: store.add_trials(claim, scope, [make_trial(workload, 1)]),
            lambda: store.publish(claim, (sha256("stale"), 1), 1e-9, {}),
            lambda: store.fail(claim, JobError("x", "y")),
            lambda: store.mark_cancelled(claim),
            lambda: store.release(claim),
        ):
            with pytest.raises(StaleAttempt, match="attempt 1 no longer holds"):
                write()
        assert store.job(job.id) == before
        assert store.events(job.id) == events
        assert list(store.trials(scope, [workload.digest])) == []
        assert not store.blob_is_referenced(sha256("stale"))

    def test_failure_is_told(self, store: TuningStore) -> None:
        """A failed job keeps kind and message, in its row and in its last event, whatever bytes the message held."""
        claim, job = running(store)
        store.fail(claim, JobError("build-failed", "exit 139: \0\udc80 é"))
        error = store.job(job.id).error
        assert error == JobError("build-failed", "exit 139: \ufffd? é")
        assert store.events(job.id)[-1].data == {
            "state": "FAILED",
            "attempt": 1,
            "error": {"kind": error.kind, "message": error.message},
        }

    def test_release(self, store: TuningStore, clock: Clock) -> None:
        """A worker that shuts down hands its job back; the next sweep has it woken, and the next claim is attempt 2."""
        claim, job = running(store)
        store.release(claim)
        released = store.job(job.id)
        assert (released.state, released.claimed_by, released.heartbeat_at) == (JobState.QUEUED, None, None)
        assert [j.id for j in sweep(store).unclaimed] == [job.id]
        again = store.claim(job.id, "w2")
        assert again is not None
        assert again[0].attempt == 2

    def test_release_of_a_cancelled_job(self, store: TuningStore) -> None:
        """A worker that shuts down while a cancel is pending does not bring the job back to life."""
        claim, job = running(store)
        store.request_cancel(job.id)
        store.release(claim)
        assert store.job(job.id).state is JobState.CANCELLED


class TestCancel:
    def test_queued(self, store: TuningStore) -> None:
        """A waiting job is cancelled at once, cannot be claimed, and the same answer comes again."""
        job = store.submit(make_spec()).job
        cancelled = store.request_cancel(job.id)
        assert cancelled.state is JobState.CANCELLED
        assert store.request_cancel(job.id) == cancelled
        assert store.claim(job.id, "w1") is None
        assert states(store, job.id) == [("QUEUED", 0), ("CANCELLED", 0)]

    def test_running(self, store: TuningStore) -> None:
        """A running job is only marked; its worker ends it."""
        claim, job = running(store)
        assert store.request_cancel(job.id).state is JobState.RUNNING
        assert store.request_cancel(job.id).cancel_requested
        store.mark_cancelled(claim)
        assert store.job(job.id).state is JobState.CANCELLED
        assert states(store, job.id) == [("QUEUED", 0), ("RUNNING", 1), ("CANCELLED", 1)]

    def test_final(self, store: TuningStore) -> None:
        """What has succeeded or failed cannot be cancelled."""
        claim, succeeded = running(store)
        store.publish(claim, LIBRARY, 0.01, {})
        claim, failed = running(store, "two")
        store.fail(claim, JobError("x", "y"))
        for job in (succeeded, failed):
            with pytest.raises(IllegalTransition):
                store.request_cancel(job.id)

    def test_against_a_claim(self, store: TuningStore) -> None:
        """A cancel and a claim at the same moment end in one of two ways: cancelled at once, or running and marked."""
        for number in range(10):
            job = store.submit(make_spec(str(number))).job
            calls = (partial(store.request_cancel, job.id), partial(store.claim, job.id, "w1"))
            _, claimed = at_once(2, lambda n, calls=calls: calls[n]())  # type: ignore[misc]
            now = store.job(job.id)
            if claimed is None:
                assert now.state is JobState.CANCELLED
            else:
                assert (now.state, now.cancel_requested) == (JobState.RUNNING, True)


class TestRecords:
    def test_round_trip(self, store: TuningStore) -> None:
        """Outcomes come back as they were measured, failures with their words, and every one counts for the job."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        one, two = make_workload("one"), make_workload("two")
        store.put_workloads(scope, [two, one])
        store.put_workloads(scope, [one, two])
        trials = [
            make_trial(one, 1, Measured((0.1 + 0.2, 1e-9, 0.25))),
            make_trial(one, 2, Failed(FailureKind.RUN_CRASH, "SIGSEGV é\n")),
            make_trial(two, 1, Failed(FailureKind.BUILD_TIMEOUT, "")),
        ]
        store.add_trials(claim, scope, trials)
        assert _sorted(store.trials(scope, [one.digest, two.digest])) == _sorted(trials)
        assert list(store.trials(scope, [two.digest])) == trials[2:]
        assert list(store.trials(scope, [])) == []
        assert store.job(job.id).trials_measured == 3

    def test_message_that_no_database_takes(self, store: TuningStore) -> None:
        """What a crashed process printed is kept, with NUL and broken UTF-8 replaced."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        store.add_trials(claim, scope, [make_trial(workload, 1, Failed(FailureKind.RUN_ERROR, "a\0b\udcff"))])
        assert [t.outcome for t in store.trials(scope, [workload.digest])] == [
            Failed(FailureKind.RUN_ERROR, "a\ufffdb?")
        ]

    def test_first_outcome_stays(self, store: TuningStore) -> None:
        """A candidate measured again keeps its first outcome, within one batch too; each is counted."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        slower = make_trial(workload, 1, Measured((9.0,)))
        store.add_trials(claim, scope, [make_trial(workload, 1), slower])
        store.add_trials(claim, scope, [slower])
        assert list(store.trials(scope, [workload.digest])) == [make_trial(workload, 1)]
        assert store.job(job.id).trials_measured == 3

    @pytest.mark.parametrize(
        "change",
        [
            {"target": '{"kind":"llvm","mcpu":"znver4","num-cores":2}'},
            {"device": replace(DEVICE, features=("avx2",))},
            {"toolchain": replace(TOOLCHAIN, tvm="0.28.0")},
            {"toolchain": replace(TOOLCHAIN, pipeline="tunery-cpu-2")},
            {"options": BuildOptions(fast_math=True)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_scopes_are_apart(self, store: TuningStore, change: dict[str, Any]) -> None:
        """Records of another device, target, toolchain, pipeline or option are never used (tvm#15549, #18224)."""
        claim, job = running(store)
        workload = make_workload()
        store.put_workloads(job.spec.key.record_scope(), [workload])
        store.add_trials(claim, job.spec.key.record_scope(), [make_trial(workload, 1)])
        elsewhere = make_key(**change).record_scope()
        assert list(store.trials(elsewhere, [workload.digest])) == []
        store.put_workloads(elsewhere, [workload])
        assert list(store.trials(elsewhere, [workload.digest])) == []

    def test_models_share_records(self, store: TuningStore) -> None:
        """Two models on one device share the records of an operator that both have."""
        claim, job = running(store, "one")
        workload = make_workload()
        store.put_workloads(job.spec.key.record_scope(), [workload])
        store.add_trials(claim, job.spec.key.record_scope(), [make_trial(workload, 1)])
        _, other = running(store, "two")
        assert len(list(store.trials(other.spec.key.record_scope(), [workload.digest]))) == 1

    def test_choices_of_algorithm_share_records(self, store: TuningStore) -> None:
        """A job that may not use Winograd's algorithm has another key, and the records of what it does compute."""
        claim, job = running(store)
        workload = make_workload()
        store.put_workloads(job.spec.key.record_scope(), [workload])
        store.add_trials(claim, job.spec.key.record_scope(), [make_trial(workload, 1)])
        other = store.submit(make_spec(options=BuildOptions(winograd=False)))
        assert other.created
        assert len(list(store.trials(other.job.spec.key.record_scope(), [workload.digest]))) == 1

    @pytest.mark.parametrize("column", ["module", "structural_hash"])
    def test_edited_workload(
        self, store: TuningStore, database_url: str, column: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Records of a workload row that was edited by hand are left out and logged (tvm#14188)."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        good, edited = make_workload("good"), make_workload("edited")
        store.put_workloads(scope, [good, edited])
        store.add_trials(claim, scope, [make_trial(good, 1), make_trial(edited, 1)])
        run_sql(database_url, f"UPDATE workloads SET {column} = 'x' WHERE digest = :digest", digest=edited.digest)
        assert list(store.trials(scope, [good.digest, edited.digest])) == [make_trial(good, 1)]
        assert edited.digest in caplog.text

    def test_edited_trace(self, store: TuningStore, database_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """A trace edited by hand no longer matches its digest: it is left out and logged."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        trials = [make_trial(workload, n) for n in range(3)]
        store.add_trials(claim, scope, trials)
        edited = trials[1].trace_digest
        run_sql(database_url, "UPDATE trials SET trace = trace || ' ' WHERE trace_digest = :digest", digest=edited)
        assert _sorted(store.trials(scope, [workload.digest])) == _sorted([trials[0], trials[2]])
        assert edited in caplog.text

    def test_failure_of_a_later_version(self, store: TuningStore, database_url: str) -> None:
        """A kind of failure that a later version wrote is left out after a roll-back, without an error."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        store.add_trials(claim, scope, [make_trial(workload, 1, Failed(FailureKind.RUN_ERROR, "x"))])
        run_sql(database_url, "UPDATE trials SET kind = 'melted'")
        assert list(store.trials(scope, [workload.digest])) == []

    def test_unknown_workload(self, store: TuningStore) -> None:
        """Trials of a workload that was never put are refused as a whole, and not counted."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        with pytest.raises(NotFound, match="put_workloads"):
            store.add_trials(claim, scope, [make_trial(workload, 1), make_trial(make_workload("other"), 1)])
        assert list(store.trials(scope, [workload.digest])) == []
        assert store.job(job.id).trials_measured == 0

    def test_reading_is_of_one_moment(self, store: TuningStore) -> None:
        """What is added while records are read does not appear among them, and neither side waits for the other."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        store.add_trials(claim, scope, [make_trial(workload, n) for n in range(2000)])
        reading = store.trials(scope, [workload.digest])
        first = next(reading)
        store.add_trials(claim, scope, [make_trial(workload, n) for n in range(2000, 4000)])
        seen = [first, *reading]
        assert len(seen) == 2000
        assert _sorted(seen) == _sorted(make_trial(workload, n) for n in range(2000))
        assert len(list(store.trials(scope, [workload.digest]))) == 4000

    def test_a_reading_given_up(self, store: TuningStore) -> None:
        """Readings that are closed half-way hold no connection: more of them than there are connections do no harm."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        store.add_trials(claim, scope, [make_trial(workload, n) for n in range(1000)])
        for _ in range(60):
            reading = store.trials(scope, [workload.digest])
            next(reading)
            reading.close()  # type: ignore[attr-defined]
        assert store.heartbeat(claim) is False

    def test_overlapping_batches_in_reverse_order(self, store: TuningStore) -> None:
        """Two jobs that commit the same records in opposite orders do not deadlock (chancy#89, prom-analytics#598)."""
        claims = [running(store, name)[0] for name in ("one", "two", "three", "four")]
        scope = make_key().record_scope()
        workloads = [make_workload(str(n)) for n in range(20)]

        def work(number: int) -> None:
            order = workloads if number % 2 else workloads[::-1]
            for round_ in range(5):
                store.put_workloads(scope, order)
                batch = [make_trial(w, 10 * round_ + n) for w in order for n in range(10)]
                store.add_trials(claims[number], scope, batch if number % 2 else batch[::-1])

        at_once(4, work)
        assert len(list(store.trials(scope, [w.digest for w in workloads]))) == 1000
        assert [store.job(c.job_id).trials_measured for c in claims] == [1000] * 4

    def test_no_deadlock_to_survive(self, postgres_url: str) -> None:
        """Every job locks records in one order, so that PostgreSQL has no deadlock to end, however slow it is."""
        run_sql(
            postgres_url,
            """
            CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_sleep(0.01); RETURN NEW; END $$""",
        )
        run_sql(postgres_url, "CREATE TRIGGER slow AFTER INSERT ON trials FOR EACH ROW EXECUTE FUNCTION slow()")
        store = TuningStore(postgres_url)
        claims = [running(store, name)[0] for name in ("one", "two")]
        scope, workload = make_key().record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        trials = [make_trial(workload, n) for n in range(30)]
        at_once(2, lambda n: store.add_trials(claims[n], scope, trials if n else trials[::-1]))
        assert len(list(store.trials(scope, [workload.digest]))) == 30
        store.close()  # a connection hands in its counts when it ends
        with psycopg.connect(postgres_url) as connection:
            counted = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            assert connection.execute(counted).fetchone() == (0,)

    def test_hundred_thousand(self, store: TuningStore, database_url: str) -> None:
        """Among a hundred thousand records, those of one workload are found through an index, and all are streamed."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        workloads = [make_workload(str(n)) for n in range(100)]
        store.put_workloads(scope, workloads)
        for start in range(0, 100, 20):
            store.add_trials(
                claim,
                scope,
                [Trial(w.digest, f"[{n}]", FAST) for w in workloads[start : start + 20] for n in range(1000)],
            )
        asked: list[tuple[str, Any]] = []

        def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if "FROM trials" in statement:
                asked.append((statement, parameters))

        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        try:
            assert sum(1 for _ in store.trials(scope, [workloads[7].digest])) == 1000
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", note)
        ((statement, parameters),) = asked
        engine = open_engine(parse_url(database_url))
        with engine.connect() as connection:
            connection.execute(sa.text("ANALYZE"))
            explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
            rows = connection.exec_driver_sql(explain + statement, parameters)
            plan = "\n".join(str(row[-1]) for row in rows)
        engine.dispose()
        assert re.search(r"SEARCH trials USING INDEX|Index Scan (using|on) trials_pkey", plan), plan
        assert not re.search(r"SCAN trials|Seq Scan", plan), plan
        assert sum(1 for _ in store.trials(scope, [w.digest for w in workloads])) == 100_000


def _sorted(trials: Any) -> list[Trial]:
    return sorted(trials, key=lambda t: (t.workload, t.trace))


def made_for(template: str, name: str = "conv", **geometry: int) -> Workload:
    """A workload that is made for a schedule template."""
    return replace(make_workload(name), template=template, geometry=geometry)


def configured(workload: Workload, number: int, outcome: Measured | Failed = FAST) -> Trial:
    """A trial that a template's configuration gave."""
    return replace(make_trial(workload, number, outcome), config={"tile_x": number, "unroll": 0})


class TestTemplates:
    def test_round_trip(self, store: TuningStore) -> None:
        """A workload comes back with its template and sizes, a trial with its configuration, others without."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        conv, other = made_for("conv2d", n=1, c=3, h=224), make_workload("other")
        store.put_workloads(scope, [conv, other])
        assert store.workloads(scope, [conv.structural_hash, other.structural_hash]) == [
            replace(conv, geometry={"c": 3, "h": 224, "n": 1}),
            other,
        ]
        trials = [configured(conv, 1), configured(conv, 2, Failed(FailureKind.RUN_ERROR, "x")), make_trial(conv, 3)]
        store.add_trials(claim, scope, [*trials, make_trial(other, 1)])
        assert _sorted(store.trials(scope, [conv.digest])) == trials
        assert [t.config for t in store.trials(scope, [other.digest])] == [None]

    def test_told_later(self, store: TuningStore) -> None:
        """A workload stored without a template gets the one that is given later, and never loses it again."""
        scope, conv = make_key().record_scope(), made_for("conv2d", n=1)
        store.put_workloads(scope, [make_workload("conv")])
        store.put_workloads(scope, [conv])
        store.put_workloads(scope, [make_workload("conv")])
        assert store.workloads(scope, [conv.structural_hash]) == [conv]

    @pytest.mark.parametrize("backwards", [False, True])
    def test_told_once_in_a_batch(self, store: TuningStore, backwards: bool) -> None:
        """Of two spellings of one workload in a batch, the one that names a template is kept, in either order."""
        scope, conv = make_key().record_scope(), made_for("conv2d", n=1)
        batch = [conv, make_workload("conv")]
        store.put_workloads(scope, batch[::-1] if backwards else batch)
        assert store.workloads(scope, [conv.structural_hash]) == [conv]

    @pytest.mark.parametrize("other", [made_for("dense", n=1), made_for("conv2d", n=2), made_for("conv2d", m=1)])
    def test_contradiction(self, store: TuningStore, other: Workload) -> None:
        """Another template or geometry for a stored workload is refused, and nothing of that batch is stored."""
        scope, conv = make_key().record_scope(), made_for("conv2d", n=1)
        store.put_workloads(scope, [conv])
        with pytest.raises(Conflict, match="new version of the graph pipeline"):
            store.put_workloads(scope, [other, make_workload("another")])
        assert store.workloads(scope, [conv.structural_hash]) == [conv]
        assert store.workloads(scope, [make_workload("another").structural_hash]) == []

    def test_told_at_once(self, store: TuningStore) -> None:
        """Jobs that name a workload's template at the same moment all succeed; of two names, one wins."""
        scope = make_key().record_scope()
        workloads = [made_for("conv2d", str(n), n=n) for n in range(20)]
        plain = [make_workload(str(n)) for n in range(20)]
        at_once(6, lambda n: store.put_workloads(scope, [plain, workloads, workloads[::-1]][n % 3]))
        assert store.workloads(scope, [w.structural_hash for w in workloads]) == sorted(
            workloads, key=lambda w: w.digest
        )

        store.put_workloads(scope, [make_workload("conv")])
        names = ("one", "two")

        def tell(number: int) -> bool:
            try:
                store.put_workloads(scope, [made_for(names[number], n=1)])
            except Conflict:
                return False
            return True

        told = at_once(2, tell)
        assert sorted(told) == [False, True]
        (stored,) = store.workloads(scope, [make_workload("conv").structural_hash])
        assert stored.template == names[told.index(True)]

    @pytest.mark.parametrize("geometry", [None, '{"n":true}'])
    def test_edited_geometry(self, store: TuningStore, database_url: str, geometry: str | None) -> None:
        """A workload whose sizes were made unreadable by hand is left out, with its trials; the others are used."""
        claim, job = running(store)
        scope, edited, good = job.spec.key.record_scope(), made_for("conv2d", "edited", n=1), made_for("conv2d", n=2)
        store.put_workloads(scope, [edited, good])
        store.add_trials(claim, scope, [configured(edited, 1), configured(good, 2)])
        run_sql(database_url, "UPDATE workloads SET geometry = :new WHERE digest = :d", new=geometry, d=edited.digest)
        assert store.workloads(scope, [edited.structural_hash, good.structural_hash]) == [good]
        assert list(store.trials(scope, [edited.digest, good.digest])) == [configured(good, 2)]

    def test_edited_configuration(self, store: TuningStore, database_url: str) -> None:
        """A trial whose configuration was made unreadable by hand is left out."""
        claim, job = running(store)
        scope, conv = job.spec.key.record_scope(), made_for("conv2d", n=1)
        store.put_workloads(scope, [conv])
        store.add_trials(claim, scope, [configured(conv, 1), configured(conv, 2)])
        edited = configured(conv, 1).trace_digest
        run_sql(
            database_url, "UPDATE trials SET config = :new WHERE trace_digest = :d", new='{"tile_x":"wide"}', d=edited
        )
        assert list(store.trials(scope, [conv.digest])) == [configured(conv, 2)]

    def test_configuration_without_a_template(self, store: TuningStore) -> None:
        """A configuration that nobody could read is refused as a whole batch, and not counted."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        with pytest.raises(ValueError, match="has no template"):
            store.add_trials(claim, scope, [make_trial(workload, 1), configured(workload, 2)])
        assert list(store.trials(scope, [workload.digest])) == []
        assert store.job(job.id).trials_measured == 0


class TestExperience:
    def test_newest_first(self, store: TuningStore, clock: Clock) -> None:
        """The newest outcomes of a template come first, of all its workloads, failures as None, no more than asked."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        one, two = made_for("conv2d", "one", n=1), made_for("conv2d", "two", n=2)
        store.put_workloads(scope, [one, two])
        outcomes = [(one, Measured((3.0, 1.0, 2.0))), (two, Failed(FailureKind.RUN_TIMEOUT, "slow")), (one, FAST)]
        expected = []
        for number, (workload, outcome) in enumerate(outcomes):
            clock.advance(1)
            store.add_trials(claim, scope, [configured(workload, number, outcome), make_trial(workload, 100 + number)])
            assert workload.geometry is not None
            median_s = [2.0, None, 0.002][number]
            config = {"tile_x": number, "unroll": 0}
            expected.insert(0, Experience(workload.digest, workload.geometry, config, median_s))
        assert store.experience(scope, "conv2d", 10) == expected
        assert store.experience(scope, "conv2d", 2) == expected[:2]
        assert store.experience(scope, "conv2d", 0) == []
        assert store.experience_count(scope, "conv2d") == 3

    def test_of_one_moment(self, store: TuningStore) -> None:
        """Outcomes of one batch have an order too: two readings are equal, and a shorter one is the longer one's
        beginning."""
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        workloads = [made_for("conv2d", str(n), n=n) for n in range(4)]
        store.put_workloads(scope, workloads)
        store.add_trials(claim, scope, [configured(w, n) for w in workloads for n in range(5)])
        whole = store.experience(scope, "conv2d", 100)
        assert len(whole) == 20
        assert store.experience(scope, "conv2d", 100) == whole
        assert store.experience(scope, "conv2d", 7) == whole[:7]

    def test_of_nothing_else(self, store: TuningStore) -> None:
        """Outcomes of another template, of another scope or without a configuration are not among them."""
        claim, job = running(store)
        scope, elsewhere = job.spec.key.record_scope(), make_key(target='{"kind":"c"}').record_scope()
        conv, dense, plain = made_for("conv2d", n=1), made_for("dense", "dense", n=1), make_workload("plain")
        for each in (scope, elsewhere):
            store.put_workloads(each, [conv, dense, plain])
        store.add_trials(claim, scope, [configured(dense, 1), make_trial(conv, 2), make_trial(plain, 3)])
        store.add_trials(claim, elsewhere, [configured(conv, 4)])
        assert store.experience(scope, "conv2d", 10) == []
        assert store.experience_count(scope, "conv2d") == 0
        assert [e.config["tile_x"] for e in store.experience(elsewhere, "conv2d", 10)] == [4]
        assert [e.workload for e in store.experience(scope, "dense", 10)] == [dense.digest]
        assert store.experience_count(scope, "nothing") == 0

    def test_hundred_thousand(self, sqlite_url: str) -> None:
        """Among a hundred thousand outcomes, those of a template are found through indexes: no table is walked
        through."""
        store = TuningStore(sqlite_url)
        claim, job = running(store)
        scope = job.spec.key.record_scope()
        workloads = [made_for(f"template {n % 4}", str(n), n=n) for n in range(100)]
        store.put_workloads(scope, workloads)
        for workload in workloads:
            trials = [replace(make_trial(workload, 0), trace=f"[{n}]", config={"n": n}) for n in range(1000)]
            store.add_trials(claim, scope, trials)
        assert store.experience_count(scope, "template 1") == 25_000
        newest = store.experience(scope, "template 1", 1500)
        assert [(e.geometry["n"], e.median_s) for e in newest] == [(97, 0.002)] * 1000 + [(93, 0.002)] * 500
        store.close()

        engine = open_engine(parse_url(sqlite_url))
        query = experience_query(scope, "template 1", 1500).compile(engine, compile_kwargs={"literal_binds": True})
        with engine.connect() as connection:
            for analyzed in (False, True):
                plan = [row.detail for row in connection.execute(sa.text(f"EXPLAIN QUERY PLAN {query}"))]
                assert plan[:2] == [
                    "SEARCH workloads USING INDEX ix_workloads_scope_template (scope=? AND template=?)",
                    "SEARCH trials USING INDEX ix_trials_experience (workload=?)",
                ]
                assert not [step for step in plan[2:] if "SCAN" in step or "SEARCH" in step]
                if not analyzed:  # with what SQLite knows of the tables, and without
                    connection.execute(sa.text("ANALYZE"))
        engine.dispose()


class TestCostModels:
    MODEL = StoredCostModel(3, 4000, b'{"learner": {"name": "\xc3\xa9"}}', "note")

    def test_newest_stays(self, store: TuningStore) -> None:
        """A model comes back byte for byte; a later one of its name takes its place, one of another name does not."""
        scope = make_key().record_scope()
        assert store.cost_model(scope, "conv2d") is None
        store.put_cost_model(scope, "conv2d", self.MODEL)
        store.put_cost_model(scope, "dense", replace(self.MODEL, trained_on=1))
        assert store.cost_model(scope, "conv2d") == self.MODEL
        newer = StoredCostModel(4, 5000, b'{"learner": {}}')
        store.put_cost_model(scope, "conv2d", newer)
        assert store.cost_model(scope, "conv2d") == newer
        assert store.cost_model(scope, "dense") == replace(self.MODEL, trained_on=1)

    def test_of_one_scope(self, store: TuningStore) -> None:
        """Another device, target, toolchain or option never sees it; another model of the same scope does."""
        store.put_cost_model(make_key().record_scope(), "conv2d", self.MODEL)
        for change in (
            {"device": replace(DEVICE, cores=4)},
            {"target": '{"kind":"c"}'},
            {"toolchain": replace(TOOLCHAIN, pipeline="tunery-cpu-2")},
            {"options": BuildOptions(fast_math=True)},
        ):
            assert store.cost_model(make_key(**change).record_scope(), "conv2d") is None
        assert store.cost_model(make_key(model=sha256("other")).record_scope(), "conv2d") == self.MODEL

    def test_damaged(self, store: TuningStore, database_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """A model whose bytes changed in the database is not handed out, and may be put again."""
        scope = make_key().record_scope()
        store.put_cost_model(scope, "conv2d", self.MODEL)
        run_sql(database_url, "UPDATE cost_models SET booster = :other", other=b"{}")
        assert store.cost_model(scope, "conv2d") is None
        assert "conv2d" in caplog.text
        store.put_cost_model(scope, "conv2d", self.MODEL)
        assert store.cost_model(scope, "conv2d") == self.MODEL

    def test_large(self, store: TuningStore) -> None:
        """A model of several MiB is kept whole."""
        large = replace(self.MODEL, booster_json=b'{"trees": "' + b"x" * (8 * 2**20) + b'"}')
        store.put_cost_model(make_key().record_scope(), "conv2d", large)
        assert store.cost_model(make_key().record_scope(), "conv2d") == large

    def test_at_once(self, store: TuningStore) -> None:
        """Jobs that put models of one name at once, in a scope that is new too, all succeed; one of them is kept."""
        scope = make_key().record_scope()
        models = [StoredCostModel(1, n, b'{"n": %d}' % n) for n in range(8)]
        at_once(8, lambda n: store.put_cost_model(scope, "conv2d", models[n]))
        assert store.cost_model(scope, "conv2d") in models


class TestArtifacts:
    def test_publish(self, store: TuningStore, clock: Clock) -> None:
        """The library stands under its key and the job has succeeded, in one step."""
        claim, job = running(store)
        clock.advance(10)
        manifest: dict[str, Json] = {"inputs": [{"name": "x"}], "latency": {"raw_s": [0.1, 1e-7]}}
        published = store.publish(claim, LIBRARY, 0.01, manifest)
        assert (published.key, published.revision, published.library, published.size_bytes) == (make_key(), 1, *LIBRARY)
        assert (published.latency_s, published.manifest, published.job_id) == (0.01, manifest, job.id)
        assert published.created_at == clock.now
        assert store.artifact(make_key().digest()) == published
        assert store.find_artifact(make_key()) == published
        assert store.job(job.id).state is JobState.SUCCEEDED
        assert states(store, job.id)[-1] == ("SUCCEEDED", 1)

    @pytest.mark.parametrize(("latency_s", "revision"), [(0.02, 1), (0.01, 1), (0.005, 2)])
    def test_only_ever_faster(self, store: TuningStore, latency_s: float, revision: int) -> None:
        """A faster library is the next revision; one that is slower or as fast leaves the stored one in place."""
        first, _ = running(store)
        kept = store.publish(first, LIBRARY, 0.01, {"n": 1})
        again = store.submit(make_spec(search=SearchConfig(trials=5000))).job
        claimed = store.claim(again.id, "w1")
        assert claimed is not None
        now = store.publish(claimed[0], (sha256("second"), 5), latency_s, {"n": 2})
        assert now.revision == revision
        assert now == store.artifact(make_key().digest())
        assert (now == kept) is (revision == 1)
        assert (now.library == sha256("second")) is (revision == 2)
        assert store.job(again.id).state is JobState.SUCCEEDED

    @pytest.mark.parametrize("latency_s", [float("nan"), float("inf"), 0.0, -1.0])
    def test_no_latency(self, store: TuningStore, latency_s: float) -> None:
        """A latency that nothing could be compared with is a fault of the caller, and publishes nothing."""
        claim, job = running(store)
        with pytest.raises(ValueError, match="latency_s"):
            store.publish(claim, LIBRARY, latency_s, {})
        assert store.job(job.id).state is JobState.RUNNING

    def test_nearest(self, store: TuningStore) -> None:
        """A miss names the nearest keys and what differs: of the same model, else of the same device, else any."""
        with pytest.raises(CacheMiss, match="nothing is stored"):
            store.find_artifact(make_key())
        far = make_spec("far", device=replace(DEVICE, cores=64))
        near = make_spec("near", options=BuildOptions(fast_math=True))
        for spec in (far, near):
            claimed = store.claim(store.submit(spec).job.id, "w1")
            assert claimed is not None
            store.publish(claimed[0], LIBRARY, 0.01, {})

        def differing(key: Any) -> list[list[str]]:
            with pytest.raises(CacheMiss) as caught:
                store.find_artifact(key)
            return [[d.field for d in n.differences] for n in caught.value.nearest]

        assert differing(make_key(model=near.key.model)) == [["options.fast_math"]]
        assert differing(make_key(model=sha256("unseen"))) == [["model", "options.fast_math"]]
        elsewhere = replace(DEVICE, cores=128)
        assert [names[0] for names in differing(make_key(model=sha256("unseen"), device=elsewhere))] == ["model"] * 2

    def test_edited_key(self, store: TuningStore, database_url: str) -> None:
        """An artifact whose stored key was edited is a miss under both keys, never served for another one."""
        claim, _ = running(store)
        store.publish(claim, LIBRARY, 0.01, {})
        changed = '"fast_math":true'
        run_sql(
            database_url,
            "UPDATE artifacts SET key = "
            + (
                "replace(key, :old, :new)"
                if database_url.startswith("sqlite")
                else "replace(key::text, :old, :new)::json"
            ),
            old='"fast_math":false',
            new=changed,
        )
        with pytest.raises(NotFound):
            store.artifact(make_key().digest())
        for key in (make_key(), make_key(options=BuildOptions(fast_math=True))):
            with pytest.raises(CacheMiss):
                store.find_artifact(key)
        again = store.submit(make_spec())
        assert again.created, "the finished job has no library that is served"
        claimed = store.claim(again.job.id, "w1")
        assert claimed is not None
        published = store.publish(claimed[0], (sha256("slower"), 5), 0.02, {})
        assert (published.library, published.latency_s) == (sha256("slower"), 0.02)
        assert store.find_artifact(make_key()) == published

    def test_key_of_another_version(self, store: TuningStore, database_url: str) -> None:
        """An artifact under a key of another version is a miss, and is not offered as a near one (pytorch#150494)."""
        claim, _ = running(store)
        store.publish(claim, LIBRARY, 0.01, {})
        run_sql(database_url, "UPDATE artifacts SET key = :key", key='{"key_version":99}')
        with pytest.raises(CacheMiss) as caught:
            store.find_artifact(make_key())
        assert caught.value.nearest == ()

    def test_references(self, store: TuningStore) -> None:
        """A blob is in use while a model, samples or an artifact point to it."""
        claim, _ = running(store)
        store.publish(claim, LIBRARY, 0.01, {})
        store.add_model(TestModels.MODEL)
        assert store.blob_is_referenced(LIBRARY[0])
        assert store.blob_is_referenced(TestModels.MODEL.blob)
        assert not store.blob_is_referenced(sha256("nothing"))
        store.drop_artifacts_of_blob(LIBRARY[0])
        assert not store.blob_is_referenced(LIBRARY[0])


class TestSweep:
    def test_lost_worker(self, store: TuningStore, clock: Clock) -> None:
        """A job whose heartbeat stopped is requeued once, with its records (vandalizer#804, posthog#55494)."""
        claim, job = running(store)
        scope, workload = job.spec.key.record_scope(), make_workload()
        store.put_workloads(scope, [workload])
        store.add_trials(claim, scope, [make_trial(workload, 1)])
        clock.advance(59)
        store.heartbeat(claim)
        clock.advance(59)
        assert sweep(store).requeued == ()
        clock.advance(2)
        swept = sweep(store)
        assert [(j.id, j.state, j.claimed_by) for j in swept.requeued] == [(job.id, JobState.QUEUED, None)]
        assert swept.unclaimed == ()
        assert sweep(store).requeued == ()
        again = store.claim(job.id, "w2")
        assert again is not None
        assert (again[0].attempt, again[1].trials_measured) == (2, 1)
        assert states(store, job.id) == [("QUEUED", 0), ("RUNNING", 1), ("QUEUED", 1), ("RUNNING", 2)]

    def test_attempts_run_out(self, store: TuningStore, clock: Clock) -> None:
        """A job that kills its worker each time fails after the attempts allowed (celery#1628, OasisPlatform#975)."""
        _, job = running(store)
        for _ in range(2):
            clock.advance(61)
            assert len(sweep(store).requeued) == 1
            assert store.claim(job.id, "w1") is not None
        clock.advance(61)
        swept = sweep(store)
        assert (swept.requeued, [j.id for j in swept.failed]) == ((), [job.id])
        error = store.job(job.id).error
        assert error is not None
        assert error.kind == "process-died"
        assert "w1" in error.message
        assert store.submit(make_spec()).created

    def test_releases_are_not_losses(self, store: TuningStore, clock: Clock) -> None:
        """Workers that are restarted in good order do not use up a job's attempts."""
        claim, job = running(store)
        for _ in range(5):
            store.release(claim)
            claimed = store.claim(job.id, "w1")
            assert claimed is not None
            claim = claimed[0]
        clock.advance(61)
        assert [j.id for j in sweep(store, max_attempts=2).requeued] == [job.id]

    def test_lost_while_cancelling(self, store: TuningStore, clock: Clock) -> None:
        """A job whose worker vanished with a cancel pending is cancelled, not started again."""
        _, job = running(store)
        store.request_cancel(job.id)
        clock.advance(61)
        assert sweep(store).requeued == ()
        assert store.job(job.id).state is JobState.CANCELLED

    def test_unclaimed(self, store: TuningStore, clock: Clock) -> None:
        """A job that nobody takes is listed once per period, until somebody does."""
        job = store.submit(make_spec()).job
        assert sweep(store).unclaimed == ()
        clock.advance(31)
        assert [j.id for j in sweep(store).unclaimed] == [job.id]
        assert sweep(store).unclaimed == ()
        clock.advance(31)
        assert [j.id for j in sweep(store).unclaimed] == [job.id]
        store.claim(job.id, "w1")
        clock.advance(3600)
        assert sweep(store, heartbeat_timeout_s=10**6).unclaimed == ()

    def test_messages_do_not_pile_up(self, store: TuningStore, clock: Clock) -> None:
        """A job that waits long behind others is listed at growing intervals, of ten minutes at most."""
        job = store.submit(make_spec()).job
        listed = []
        for second in range(0, 3600, 20):
            if sweep(store).unclaimed:
                listed.append(second)
            clock.advance(20)
        assert listed == [40, 80, 160, 320, 640, 1240, 1840, 2440, 3040]
        assert store.claim(job.id, "w1") is not None

    def test_not_woken(self, store: TuningStore, clock: Clock) -> None:
        """Waiting jobs whose message could not be sent are listed by the very next sweep, however many they are."""
        jobs = [store.submit(make_spec(str(n))).job.id for n in range(3)]
        clock.advance(31)
        assert [j.id for j in sweep(store).unclaimed] == jobs
        store.claim(jobs[0], "w1")
        store.not_woken([*jobs[:2], *(f"{n:032x}" for n in range(2000))])
        assert [j.id for j in sweep(store).unclaimed] == [jobs[1]]
        assert sweep(store).unclaimed == ()

    def test_older_key_version(self, store: TuningStore, database_url: str, clock: Clock) -> None:
        """A waiting job of an older version fails, so that it neither fills the queue nor waits for ever; one of a
        newer version is left to its own workers."""
        old, new = (store.submit(make_spec(name)).job.id for name in ("old", "new"))
        for job_id, version in ((old, KEY_VERSION - 1), (new, KEY_VERSION + 1)):
            run_sql(
                database_url,
                "UPDATE jobs SET spec = :spec WHERE id = :id",
                spec=json.dumps({"key": {"key_version": version}}),
                id=job_id,
            )
        clock.advance(31)
        assert sweep(store) == Swept((), (), ())
        assert states(store, old) == [("QUEUED", 0), ("FAILED", 0)]
        assert "submit it again" in str(store.events(old)[-1].data)
        assert states(store, new) == [("QUEUED", 0)]
        with pytest.raises(QueueFull):
            store.submit(make_spec("third"), max_queued=1)
        assert store.submit(make_spec("third"), max_queued=2).created

    def test_two_sweepers(self, store: TuningStore, clock: Clock) -> None:
        """Sweeps at the same moment handle each job once between them."""
        lost = {running(store, f"lost {n}")[1].id for n in range(10)}
        waiting = {store.submit(make_spec(f"waiting {n}")).job.id for n in range(10)}
        clock.advance(61)
        swept = at_once(4, lambda _: sweep(store))
        assert sorted(j.id for s in swept for j in s.requeued) == sorted(lost)
        assert sorted(j.id for s in swept for j in s.unclaimed) == sorted(waiting)
        for job_id in lost:
            assert states(store, job_id) == [("QUEUED", 0), ("RUNNING", 1), ("QUEUED", 1)]

    def test_late_heartbeats(self, store: TuningStore, clock: Clock) -> None:
        """A heartbeat at the moment of the sweep either keeps the job or learns that it is lost, never both."""
        claims = [running(store, str(n))[0] for n in range(8)]
        clock.advance(61)

        def act(number: int) -> bool:
            if number == 8:
                sweep(store)
                return True
            try:
                store.heartbeat(claims[number])
            except StaleAttempt:
                return False
            return True

        kept = at_once(9, act)
        for number, claim in enumerate(claims):
            expected = JobState.RUNNING if kept[number] else JobState.QUEUED
            assert store.job(claim.job_id).state is expected


class TestDatabase:
    def test_times(self, database_url: str) -> None:
        """Times are stored as moments: a clock in another zone comes back in UTC, to the microsecond."""
        zone = dt.timezone(dt.timedelta(hours=5, minutes=30))
        store = TuningStore(database_url, clock=lambda: BEGINNING.astimezone(zone))
        job = store.submit(make_spec()).job
        read = store.job(job.id)
        assert read.created_at == BEGINNING
        assert read.created_at.tzinfo is dt.UTC
        store.close()

    def test_clock_without_a_zone(self, database_url: str) -> None:
        """A time without a zone is refused rather than guessed at."""
        store = TuningStore(database_url, clock=lambda: BEGINNING.replace(tzinfo=None))
        with pytest.raises(sa.exc.StatementError, match="zone"):
            store.submit(make_spec())
        store.close()

    def test_another_process_sees_it(self, store: TuningStore, database_url: str) -> None:
        """What one store has committed, another one over the same database reads."""
        job = store.submit(make_spec()).job
        other = TuningStore(database_url)
        assert other.job(job.id) == job
        other.close()

    def test_ping(self, store: TuningStore) -> None:
        """A database that answers with the right schema pings."""
        store.ping()

    def test_collision_is_tried_again(self, postgres_url: str) -> None:
        """A transaction that PostgreSQL ends for a deadlock or a serialization failure is run again from its start."""
        run_sql(postgres_url, "CREATE SEQUENCE collisions")
        run_sql(
            postgres_url,
            """
            CREATE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                CASE nextval('collisions')  -- not rolled back: the first two inserts fail, the third does not
                    WHEN 1 THEN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01';
                    WHEN 2 THEN RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001';
                    ELSE RETURN NEW;
                END CASE;
            END $$""",
        )
        run_sql(
            postgres_url, "CREATE TRIGGER collide BEFORE INSERT ON job_events FOR EACH ROW EXECUTE FUNCTION collide()"
        )
        store = TuningStore(postgres_url)
        made = store.submit(make_spec())
        assert made.created
        assert len(store.jobs()) == 1
        assert [e.seq for e in store.events(made.job.id)] == [1]
        store.close()

    def test_postgresql_is_full(self, postgres_url: str) -> None:
        """PostgreSQL's "disk full" is StorageFull, and nothing of the transaction stays."""
        store = TuningStore(postgres_url)
        run_sql(
            postgres_url,
            """
            CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$""",
        )
        run_sql(
            postgres_url, "CREATE TRIGGER full_disk BEFORE INSERT ON job_events FOR EACH ROW EXECUTE FUNCTION no_room()"
        )
        with pytest.raises(StorageFull, match="free some"):
            store.submit(make_spec())
        assert store.jobs() == []
        store.close()

    def test_sqlite_is_full(self, sqlite_url: str) -> None:
        """SQLite's "database or disk is full" is StorageFull, nothing of the transaction stays, and reading goes on."""

        def no_growth(connection: sqlite3.Connection, _record: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")

        sa.event.listen(sa.pool.Pool, "connect", no_growth)
        try:
            store = TuningStore(sqlite_url)
            model = replace(TestModels.MODEL, inputs=(PortSpec("x" * 100_000, "float32", ()),))
            with pytest.raises(StorageFull, match="free some"):
                store.add_model(model)
            with pytest.raises(NotFound):
                store.model(model.digest)
            store.close()
        finally:
            sa.event.remove(sa.pool.Pool, "connect", no_growth)

    def test_postgresql_is_gone(self, postgres_admin_url: str, postgres_url: str) -> None:
        """A database out of reach is DatabaseUnavailable; one that is back is used again without a restart."""
        store = TuningStore(postgres_url)
        store.ping()
        name = postgres_url.rpartition("/")[2]
        with psycopg.connect(postgres_admin_url, autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            with pytest.raises(DatabaseUnavailable, match="check that it runs"):
                store.ping()
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            store.ping()
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            assert store.jobs() == []
        store.close()

    def test_sqlite_is_gone(self, sqlite_url: str) -> None:
        """An SQLite file that was taken away is noticed."""
        store = TuningStore(sqlite_url)
        Path(str(parse_url(sqlite_url).database)).unlink()
        with pytest.raises(DatabaseUnavailable, match="gone"):
            store.ping()
        store.close()

    def test_nobody_listens(self) -> None:
        """A server that is not there is DatabaseUnavailable, in words that do not show the password."""
        with pytest.raises(DatabaseUnavailable) as caught:
            TuningStore("postgresql://me:secret@127.0.0.1:1/none")
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://localhost/x"])
    def test_url(self, url: str) -> None:
        """A database that cannot hold what several processes share is refused by its URL."""
        with pytest.raises(InvalidRequest, match="give sqlite:"):
            TuningStore(url)

    def test_reads_do_not_write_sqlite(self, sqlite_url: str) -> None:
        """Every read answers while another process holds SQLite's write lock (BentoML#5551)."""
        self._reads_while(sqlite_url, self._held_write_lock)

    def test_reads_do_not_write_postgresql(self, postgres_admin_url: str, postgres_url: str) -> None:
        """Every read answers on a PostgreSQL database that takes no writes."""
        self._reads_while(postgres_url, lambda url: self._read_only(postgres_admin_url, url))

    @staticmethod
    def _reads_while(url: str, begin: Callable[[str], Callable[[], None]]) -> None:
        store = TuningStore(url)
        store.report_device("w1", DEVICE, TARGET, TOOLCHAIN)
        store.add_model(TestModels.MODEL)
        claim, job = running(store)
        workload = made_for("conv2d", n=1)
        scope = job.spec.key.record_scope()
        store.put_workloads(scope, [workload])
        store.add_trials(claim, scope, [configured(workload, 1)])
        store.put_cost_model(scope, "conv2d", TestCostModels.MODEL)
        store.put_roof(DEVICE, TestRoofs.ROOF)
        store.publish(claim, LIBRARY, 0.01, {})
        store.close()
        end = begin(url)
        try:
            store.ping()
            assert store.model(TestModels.MODEL.digest) == TestModels.MODEL
            assert len(store.devices()) == 1
            assert store.device(DEVICE.name).busy == 0
            assert store.job(job.id).state is JobState.SUCCEEDED
            assert len(store.jobs()) == 1
            assert len(store.events(job.id)) == 3
            assert len(list(store.trials(scope, [workload.digest]))) == 1
            assert len(store.experience(scope, "conv2d", 10)) == store.experience_count(scope, "conv2d") == 1
            assert store.cost_model(scope, "conv2d") == TestCostModels.MODEL
            assert store.roof(DEVICE) == TestRoofs.ROOF
            assert store.find_artifact(make_key()) == store.artifact(make_key().digest())
            assert store.blob_is_referenced(LIBRARY[0])
        finally:
            end()
        store.close()

    @staticmethod
    def _held_write_lock(url: str) -> Callable[[], None]:
        connection = sqlite3.connect(str(parse_url(url).database), isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM artifacts")
        return connection.close

    @staticmethod
    def _read_only(admin_url: str, url: str) -> Callable[[], None]:
        with psycopg.connect(admin_url, autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET default_transaction_read_only = on")
        with pytest.raises(sa.exc.InternalError, match="read-only"):
            run_sql(url, "DELETE FROM artifacts")
        return lambda: None

    def test_pollers_and_writers(self, database_url: str) -> None:
        """Fifty pollers and four writers at once: nobody meets "database is locked" (BentoML#5551, podly#140)."""
        api, worker = TuningStore(database_url), TuningStore(database_url)
        claims = [running(worker, str(n), f"w{n}")[0] for n in range(4)]
        scope, workload = make_key().record_scope(), make_workload()
        worker.put_workloads(scope, [workload])
        done = threading.Event()
        polled = [0] * 50

        def act(number: int) -> None:
            barrier.wait(timeout=60)
            if number < 4:
                for n in range(12):
                    worker.add_trials(claims[number], scope, [make_trial(workload, 100 * number + n)])
                    worker.append_event(claims[number], "trial", {"n": n})
                    worker.heartbeat(claims[number])
            else:
                while not done.is_set():
                    job_id = claims[number % 4].job_id
                    assert api.job(job_id).state is JobState.RUNNING
                    api.events(job_id, after=polled[number - 4])
                    polled[number - 4] += 1

        barrier = threading.Barrier(54)
        with ThreadPoolExecutor(54) as pool:
            acting = [pool.submit(act, n) for n in range(54)]
            try:
                for writer in acting[:4]:
                    writer.result(timeout=120)
            finally:
                done.set()
            for poller in acting[4:]:
                poller.result(timeout=60)
        assert all(polled)
        assert [api.job(c.job_id).trials_measured for c in claims] == [12] * 4
        assert [len(api.events(c.job_id)) for c in claims] == [14] * 4
        api.close()
        worker.close()

    def test_forked_child(self, database_url: str) -> None:
        """A store opened before a fork serves parent and child at once: they share no connection (Celery's prefork)."""
        store = TuningStore(database_url)
        job = store.submit(make_spec()).job

        def work() -> None:
            for number in range(100):
                assert store.job(job.id).id == job.id
                store.submit(make_spec(f"{os.getpid()} {number}"))

        children = [get_context("fork").Process(target=work) for _ in range(2)]
        for child in children:
            child.start()
        work()
        for child in children:
            child.join(timeout=120)
        assert [child.exitcode for child in children] == [0, 0]
        assert len(store.jobs(limit=1000)) == 301
        store.close()
