"""A whole search on this machine, from tasks to a library that is compared: all parts are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.workers.conftest import Compiled, Host, make_claim
from tuning_db.jobs import Claim, SearchConfig
from tuning_db.keys import BuildOptions, Json, RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Measured
from workers import toolchain
from workers.graph import tasks
from workers.packaging import library
from workers.packaging.reference import Comparison, run
from workers.search.candidates import Measurement, Operator
from workers.search.forkserver import ForkServer
from workers.search.lanes import LocalBuilder, LocalRunner
from workers.search.records import Records
from workers.search.scheduler import Scheduler, SearchResult
from workers.search.space import Space

SPACE = Space(population=16, generations=1, parents=8)


def search(
    store: TuningStore, claim: Claim, scope: RecordScope, compiled: Compiled, host: Host, server: ForkServer,
    *, trials: int, seed: int = 0, trials_before: int = 0,
) -> tuple[SearchResult, Records, list[Operator], list[tuple[str, dict[str, Json]]]]:  # fmt: skip
    found = tasks.extract(compiled.module)
    records = Records(store, claim, scope)
    operators = [
        # Untuned times so high that any record is better: what is asked here is not which one is.
        Operator(task.name, workload, task.calls, 3600.0)
        for task, workload in zip(found, records.adopt([task.module for task in found]), strict=True)
    ]
    events: list[tuple[str, dict[str, Json]]] = []
    with LocalBuilder(server, host.target_json, workers=2, timeout_s=120) as builder:
        scheduler = Scheduler(
            server=server,
            target=host.target_json,
            space=SPACE,
            builder=builder,
            runner=LocalRunner(server, Measurement(repeat=2, min_repeat_s=0.001, threads=1), timeout_s=60),
            records=records,
            report=lambda type, data: events.append((type, data)),
        )
        config = SearchConfig(trials=trials, seconds=600, seed=seed)
        result = scheduler.run(operators, config, trials_before=trials_before)
    return result, records, operators, events


def test_search(
    conv: Compiled, host: Host, server: ForkServer, sqlite_store: TuningStore, claim: Claim, tmp_path: Path
) -> None:
    """A search finds records, guided once it has learnt; the library built of them agrees with ONNX Runtime; a second
    job of another model with the same operator starts from them and measures none of them again."""
    scope = RecordScope(host.identity, host.target_json, toolchain.current(), BuildOptions())
    result, records, operators, events = search(sqlite_store, claim, scope, conv, host, server, trials=28)
    assert (result.trials, result.reason) == (28, "trials")
    assert not [data for type, data in events if type == "warning"]
    [operator] = operators
    outcomes = [trial.outcome for trial in records.of(operator.workload.digest)]
    assert len(outcomes) == 28
    assert sum(isinstance(outcome, Measured) for outcome in outcomes) == 28 - result.failures > 14

    [task] = tasks.extract(conv.module)
    scheduled = library.apply_schedules(
        conv.module, records.database(operators, host.target), host.target, task.functions
    )
    tuned = tmp_path / "tuned.so"
    library.compile_library(scheduled, host.target, tuned)
    comparison = Comparison(
        str(conv.reference), {"tuned": str(tuned), "untuned": str(conv.untuned)}, conv.inputs, 1, 1, 1e-4
    )
    checks: Any = run(comparison)["checks"]
    assert [checks[label]["problem"] for label in ("tuned", "untuned")] == [None, None]
    assert tuned.read_bytes() != conv.untuned.read_bytes()

    before = {trial.trace for trial in records.of(operator.workload.digest)}
    again, more, _, _ = search(
        sqlite_store, make_claim(sqlite_store, "another model"), scope, conv, host, server, trials=6
    )
    assert again.trials == 6
    after = {trial.trace for trial in more.of(operator.workload.digest)}
    assert before < after
    assert len(after) == 34
