"""One job's view of the stored outcomes: shared by what is equal, hidden from everything else."""

from __future__ import annotations

import sqlite3
import statistics
from dataclasses import replace
from typing import Any

import pytest
import tvm_ffi
from tvm.s_tir import meta_schedule as ms

from tests.samples import make_key
from tests.workers.conftest import Host, make_claim, workload_of
from tests.workers.graph.test_tasks import Twins
from tests.workers.search.samples import CPU, matmul, matmul_module, templated
from tuning_db.errors import StaleAttempt
from tuning_db.jobs import Claim
from tuning_db.keys import BuildOptions, RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Failed, FailureKind, Measured, Trial, Workload
from workers.graph.tasks import normalize_mod
from workers.search import forked_steps
from workers.search.candidates import Candidate, Operator, Variant
from workers.search.forkserver import ForkServer
from workers.search.records import Records, key_of
from workers.search.space import Space

SCOPE = make_key().record_scope()


def trial(workload: Workload, number: int, outcome: Measured | Failed) -> Trial:
    return Trial(workload.digest, f'[[["trace",{number}]],[]]', outcome)


def measured(*milliseconds: float) -> Measured:
    return Measured(tuple(ms / 1000 for ms in milliseconds))


BROKEN = Failed(FailureKind.RUN_CRASH, "died of SIGSEGV")


def test_equal_workloads_share_their_records(sqlite_store: TuningStore, claim: Claim) -> None:
    """A computation that is equal but for the names in it takes the records of the one stored before (tvm#15548)."""
    one, two = (normalize_mod(Twins[name]) for name in ("one", "two"))
    assert workload_of(one) != workload_of(two)
    first = Records(sqlite_store, claim, SCOPE)
    [workload] = first.adopt([one])
    first.add([trial(workload, 1, measured(3, 1, 2))])
    second = Records(sqlite_store, make_claim(sqlite_store, "another model"), SCOPE)
    assert second.adopt([two]) == [workload]
    assert second.outcome(Candidate(workload, '[[["trace",1]],[]]')) == measured(3, 1, 2)
    assert second.best(workload.digest) == (trial(workload, 1, measured(3, 1, 2)), 0.002)


def test_two_spellings_of_one_computation(sqlite_store: TuningStore, claim: Claim) -> None:
    """Jobs that met a computation at the same time stored it twice; a later job has the records of both."""
    one, two = (normalize_mod(Twins[name]) for name in ("one", "two"))
    spellings = [workload_of(one), workload_of(two)]
    sqlite_store.put_workloads(SCOPE, spellings)
    for number, spelling in enumerate(spellings):
        sqlite_store.add_trials(claim, SCOPE, [trial(spelling, number, measured(2 - number))])
    records = Records(sqlite_store, make_claim(sqlite_store, "a later model"), SCOPE)
    [workload] = records.adopt([two])
    assert workload in spellings
    assert sorted(t.trace for t in records.of(workload.digest)) == ['[[["trace",0]],[]]', '[[["trace",1]],[]]']
    assert records.best(workload.digest) == (trial(workload, 1, measured(1)), 0.001)


def test_equal_hash_is_not_enough(sqlite_store: TuningStore, claim: Claim) -> None:
    """A stored workload that has the hash but is another computation is not taken (tvm#14188)."""
    module = matmul_module(16, 16, 16)
    impostor = Workload(workload_of(module).structural_hash, matmul(8, 8, 8).module)
    sqlite_store.put_workloads(SCOPE, [impostor])
    sqlite_store.add_trials(claim, SCOPE, [trial(impostor, 1, measured(1))])
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([module])
    assert workload == workload_of(module)
    assert list(records.of(workload.digest)) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(SCOPE, target='{"kind":"llvm","mcpu":"znver3","num-cores":2}'),  # tvm#15549
        replace(SCOPE, toolchain=replace(SCOPE.toolchain, tvm="0.28.0")),
        replace(SCOPE, toolchain=replace(SCOPE.toolchain, pipeline="another")),
        replace(SCOPE, device=replace(SCOPE.device, cores=4)),
        replace(SCOPE, options=BuildOptions(fast_math=True)),
    ],
)
def test_other_scopes_are_never_seen(other: RecordScope, sqlite_store: TuningStore, claim: Claim) -> None:
    """A record of another target, toolchain, pipeline, device or build option does not exist for this job."""
    module = matmul_module(16, 16, 16)
    theirs = Records(sqlite_store, claim, other)
    [workload] = theirs.adopt([module])
    theirs.add([trial(workload, 1, measured(1))])
    ours = Records(sqlite_store, claim, SCOPE)
    assert ours.adopt([module]) == [workload]
    assert ours.best(workload.digest) is None
    assert ours.outcome(Candidate(workload, '[[["trace",1]],[]]')) is None


def test_best(sqlite_store: TuningStore, claim: Claim) -> None:
    """The best has the lowest median; failures are known but never best."""
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([matmul_module(16, 16, 16)])
    assert records.best(workload.digest) is None
    records.add([trial(workload, 1, BROKEN)])
    assert records.best(workload.digest) is None
    records.add([trial(workload, 2, measured(1, 9, 9)), trial(workload, 3, measured(5, 5, 5))])
    assert records.best(workload.digest) == (trial(workload, 3, measured(5, 5, 5)), 0.005)
    assert records.outcome(Candidate(workload, '[[["trace",1]],[]]')) == BROKEN
    assert len(list(records.of(workload.digest))) == 3


def test_first_outcome_stays(sqlite_store: TuningStore, claim: Claim) -> None:
    """A candidate that came out twice has the outcome that the store has kept, in this view too."""
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([matmul_module(16, 16, 16)])
    records.add([trial(workload, 1, measured(5))])
    records.add([trial(workload, 1, measured(1))])
    again = Records(sqlite_store, claim, SCOPE)
    again.adopt([matmul_module(16, 16, 16)])
    assert records.best(workload.digest) == again.best(workload.digest) == (trial(workload, 1, measured(5)), 0.005)


def operators_of(*variants: list[Workload]) -> list[Operator]:
    """One operator for each list of workloads, each of which is a variant."""
    return [
        Operator(str(number), 1, tuple(Variant(str(i), w) for i, w in enumerate(workloads)), 1e6, 1e4)
        for number, workloads in enumerate(variants)
    ]


def test_chosen(sqlite_store: TuningStore, claim: Claim) -> None:
    """An operator's record is the best over all its variants; one without a measured trial has none."""
    records = Records(sqlite_store, claim, SCOPE)
    direct, winograd, alone, unknown = records.adopt([matmul_module(n, n, n) for n in (8, 16, 24, 32)])
    operators = operators_of([direct, winograd], [alone], [unknown])
    assert records.chosen(operators) == {}
    records.add(
        [
            trial(direct, 1, measured(2)),
            trial(winograd, 1, measured(3)),
            trial(winograd, 2, measured(1)),
            trial(alone, 1, measured(5)),
            trial(unknown, 1, BROKEN),
        ]
    )
    assert records.chosen(operators) == {
        "0": (operators[0].variants[1], trial(winograd, 2, measured(1))),
        "1": (operators[1].variants[0], trial(alone, 1, measured(5))),
    }


def test_confirmed(sqlite_store: TuningStore, claim: Claim) -> None:
    """What was measured again decides between those that were, over all variants, until a better trial comes; outcomes
    and the store stay as they are."""
    records = Records(sqlite_store, claim, SCOPE)
    one, two = records.adopt([matmul_module(n, n, n) for n in (8, 16)])
    [operator] = operators_of([one, two])
    trials = [trial(one, 1, measured(1)), trial(one, 2, measured(1.1)), trial(two, 1, measured(1.2))]
    records.add(trials)
    records.confirm(one.digest, {trials[0].trace_digest: measured(1.5), trials[1].trace_digest: measured(1.4)})
    records.confirm(two.digest, {trials[2].trace_digest: measured(1.3)})
    assert records.chosen([operator])["0"] == (operator.variants[1], trials[2])
    assert records.best(one.digest) == (trials[0], 0.001)
    assert list(sqlite_store.trials(SCOPE, [two.digest])) == [trials[2]]
    records.add([trial(two, 2, measured(1.25))])  # slower than the best of its variant
    assert records.chosen([operator])["0"] == (operator.variants[1], trials[2])


def test_order_is_metaschedules(sqlite_store: TuningStore, claim: Claim, server: ForkServer, host: Host) -> None:
    """The best records come in the order of MetaSchedule's database, without what failed; a workload is known by
    structural equality, as it is there. It sorts by mean, we by median: samples without outliers agree."""
    module = matmul_module(16, 16, 16)
    traces = server.call(
        forked_steps.propose, host.target_json, matmul(), Space(), [], None, CPU, 8, 1, deadline_s=120
    )[:8]
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([module])
    database = ms.database.MemoryDatabase()
    assert not database.has_workload(module)
    times = [(5, 5.2), (3, 3.1), (9, 9), None, (1, 1.3), (2, 2), (8, 8.5), (4, 4)]
    for trace, run_s in zip(traces, times, strict=True):
        outcome = BROKEN if run_s is None else Measured(run_s)
        records.add([Trial(workload.digest, trace, outcome)])
        # MetaSchedule spells a failure as 1e10 seconds.
        forked_steps.commit_record(database, workload, trace, run_s or (1e10,), host.target)
    for count in (1, 3, 20):
        theirs = database.get_top_k(database.commit_workload(module), count)
        theirs = [record for record in theirs if float(record.run_secs[0]) < 1e9]
        ours = records.top(workload.digest, count)
        assert [[float(s) for s in record.run_secs] for record in theirs] == [
            list(trial.outcome.run_s) for trial, _ in ours if isinstance(trial.outcome, Measured)
        ]
    twins = [normalize_mod(Twins[name]) for name in ("one", "two")]
    database.commit_workload(twins[0])
    first = records.adopt([twins[0]])
    for other in (twins[1], matmul_module(16, 16, 8)):
        known = Records(sqlite_store, claim, SCOPE).adopt([other])[0] in [*first, workload]
        assert known == database.has_workload(other)


def test_nothing_is_counted_through_again(
    sqlite_store: TuningStore, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the history, asking for the best or the few best looks at no outcome, and one more outcome is looked
    at once."""
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([matmul_module(16, 16, 16)])
    records.add([trial(workload, number, measured(1 + number % 997)) for number in range(5000)])
    again = Records(sqlite_store, claim, SCOPE)
    again.adopt([matmul_module(16, 16, 16)])
    looked_at: list[Any] = []
    median = statistics.median
    monkeypatch.setattr("tuning_db.trials.statistics.median", lambda run_s: looked_at.append(run_s) or median(run_s))
    operators = operators_of([workload])
    for _ in range(100):
        again.best(workload.digest)
        again.top(workload.digest, 16)
        again.chosen(operators)
        again.of(workload.digest)
    assert looked_at == []
    again.add([trial(workload, 5000, measured(0.5))])
    assert len(looked_at) == 1
    assert again.best(workload.digest) == (trial(workload, 5000, measured(0.5)), 0.0005)


def test_templates_of_workloads(sqlite_store: TuningStore, claim: Claim) -> None:
    """What a function's attributes say of template and geometry goes with the workload, and with its stored row."""
    records = Records(sqlite_store, claim, SCOPE)
    module = matmul_module(8, 16, 4, template=True)
    plain, made_for = records.adopt([matmul_module(8, 16, 4), module])
    assert (plain.template, plain.geometry) == (None, None)
    assert made_for == templated(8, 16, 4)
    configured = Trial(made_for.digest, '[[["trace",1]],[]]', measured(1), {"rows": 2, "columns": 4, "parallel": 1})
    records.add([configured])
    assert records.configs(made_for.digest) == {key_of(configured.config or {})}
    again = Records(sqlite_store, claim, SCOPE)
    assert again.adopt([module]) == [made_for]
    assert again.best(made_for.digest) == (configured, 0.001)
    [experience] = again.experience("test-matmul", 10)
    assert (experience.geometry, experience.config, experience.median_s) == (
        {"m": 8, "n": 16, "k": 4},
        configured.config,
        0.001,
    )
    assert again.experience_count("test-matmul") == 1


def edit(sqlite_url: str, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    try:
        with connection:
            assert connection.execute(statement, values).rowcount > 0
    finally:
        connection.close()


def test_edited_rows(sqlite_store: TuningStore, sqlite_url: str, claim: Claim) -> None:
    """A trace or a workload that was edited in the database is not used; the others are (tvm#14188)."""
    module = matmul_module(16, 16, 16)
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([module])
    records.add([trial(workload, 1, measured(1)), trial(workload, 2, measured(2))])
    edit(sqlite_url, "UPDATE trials SET trace = ? WHERE trace LIKE '%1]%'", '[[["edited"]],[]]')
    again = Records(sqlite_store, claim, SCOPE)
    [found] = again.adopt([module])
    assert found == workload
    assert list(again.of(workload.digest)) == [trial(workload, 2, measured(2))]
    edit(sqlite_url, "UPDATE workloads SET module = ?", matmul(8, 8, 8).module)
    last = Records(sqlite_store, claim, SCOPE)
    [found] = last.adopt([module])
    assert list(last.of(found.digest)) == []


def test_stale_attempt(sqlite_store: TuningStore, claim: Claim) -> None:
    """An attempt that lost its job can neither store outcomes nor see its own as stored."""
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([matmul_module(16, 16, 16)])
    sqlite_store.release(claim)
    assert sqlite_store.claim(claim.job_id, "another worker") is not None
    with pytest.raises(StaleAttempt):
        records.add([trial(workload, 1, measured(1))])
    assert list(records.of(workload.digest)) == []
    assert list(sqlite_store.trials(SCOPE, [workload.digest])) == []


def test_a_chosen_record_is_applied(sqlite_store: TuningStore, claim: Claim, server: ForkServer, host: Host) -> None:
    """MetaSchedule, given the chosen record, finds it for an equal module."""
    module = matmul_module(16, 16, 16)
    traces = server.call(
        forked_steps.propose, host.target_json, matmul(), Space(), [], None, CPU, 3, 1, deadline_s=120
    )[:3]
    records = Records(sqlite_store, claim, SCOPE)
    [workload] = records.adopt([module])
    times = (measured(3), measured(1), measured(2))
    records.add([Trial(workload.digest, trace, time) for trace, time in zip(traces, times, strict=True)])
    [(_, chosen)] = records.chosen(operators_of([workload])).values()
    database = ms.database.MemoryDatabase()
    forked_steps.commit_record(database, workload, chosen.trace, measured(1).run_s, host.target)
    found = database.query_tuning_record(module, host.target, "main")
    assert [float(s) for s in found.run_secs] == [0.001]
    assert tvm_ffi.structural_equal(
        database.query_schedule(module, host.target, "main").mod,
        forked_steps.schedule_of(workload, traces[1]).mod,
    )
