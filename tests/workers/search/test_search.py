"""A whole search on this machine, from tasks to a library that is compared: all parts are real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm

from tests.workers.conftest import Host, make_claim
from tests.workers.search.samples import CPU, TEMPLATES, matmul_module
from tuning_db.jobs import Claim, SearchConfig
from tuning_db.keys import BuildOptions, Json, RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Measured
from workers import toolchain
from workers.search import forked_steps
from workers.search.candidates import SKETCHES, TEMPLATE, Choice, Measurement, Operator, Variant
from workers.search.forkserver import ForkServer
from workers.search.lanes import LocalBuilder, LocalRunner
from workers.search.records import Records
from workers.search.scheduler import Scheduler, SearchResult
from workers.search.space import Space

SPACE = Space(population=16, generations=1, parents=8)


@dataclass
class Job:
    """One job's search of some modules, each the only variant of its operator."""

    store: TuningStore
    host: Host
    server: ForkServer
    modules: Sequence[tvm.ir.IRModule]
    model: str = "a model"
    sketchable: bool = True
    events: list[tuple[str, dict[str, Json]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scope = RecordScope(self.host.identity, self.host.target_json, toolchain.current(), BuildOptions())
        self.claim: Claim = make_claim(self.store, self.model)
        self.records = Records(self.store, self.claim, self.scope)
        self.operators = [
            Operator(f"operator {number}", 1, (Variant("direct", workload, self.sketchable),), 1e6, 1e4)
            for number, workload in enumerate(self.records.adopt(self.modules))
        ]

    def search(self, tuner: str, trials: int, seed: int = 0) -> tuple[SearchResult, dict[str, Choice]]:
        with LocalBuilder(self.server, self.host.target_json, workers=2, timeout_s=120) as builder:
            scheduler = Scheduler(
                server=self.server,
                target=self.host.target_json,
                machine=CPU,
                templates=TEMPLATES,
                builder=builder,
                runner=LocalRunner(self.server, Measurement(repeat=2, min_repeat_s=0.001, threads=1), timeout_s=60),
                records=self.records,
                report=lambda type, data: self.events.append((type, data)),
                sketches=SPACE,
            )
            config = SearchConfig(tuner, trials=trials, seconds=600, seed=seed)
            return scheduler.run(self.operators, config), scheduler.choice()

    def of(self, number: int = 0) -> list[Any]:
        return list(self.records.of(self.operators[number].variants[0].workload.digest))

    def warnings(self) -> list[dict[str, Json]]:
        return [data for type, data in self.events if type == "warning"]


def computes_a_product(choice: Choice, target: tvm.target.Target, sizes: tuple[int, int, int]) -> bool:
    """Whether the choice's code still multiplies matrices, of m × k and k × n."""
    m, n, k = sizes
    assert choice.trace is not None
    module = forked_steps.schedule_of(choice.variant.workload, choice.trace).mod
    compiled = tvm.compile(module, target=target)
    rng = np.random.default_rng(0)
    a, b = rng.random((m, k), dtype=np.float32), rng.random((k, n), dtype=np.float32)
    c = tvm.runtime.tensor(np.zeros((m, n), dtype=np.float32))
    compiled["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), c)
    return bool(np.allclose(c.numpy(), a @ b, rtol=1e-4))


def test_sketches(host: Host, server: ForkServer, sqlite_store: TuningStore) -> None:
    """A search finds records, guided once it has learnt, and the best computes what it should; a second job of another
    model with the same operator starts from them and measures none of them again."""
    modules = [matmul_module(32, 32, 64)]
    job = Job(sqlite_store, host, server, modules)
    result, choices = job.search("ansor", 28)
    assert (result.trials, result.reason) == (28, "trials")
    assert not job.warnings()
    outcomes = [trial.outcome for trial in job.of()]
    assert len(outcomes) == 28
    assert sum(isinstance(outcome, Measured) for outcome in outcomes) == 28 - result.failures > 14
    assert choices["operator 0"].trial in job.of()
    assert computes_a_product(choices["operator 0"], host.target, (32, 32, 64))

    before = {trial.trace for trial in job.of()}
    again = Job(sqlite_store, host, server, modules, "another model")
    assert again.search("ansor", 6)[0].trials == 6
    after = {trial.trace for trial in again.of()}
    assert before < after
    assert len(after) == 34


def test_templates(host: Host, server: ForkServer, sqlite_store: TuningStore) -> None:
    """A search over a template's choices stores each with its configuration, the best of them computes what it should,
    and what was learnt is there for the next job, which needs no trial to choose better than the first guess."""
    job = Job(sqlite_store, host, server, [matmul_module(64, 64, 64, template=True)])
    result, choices = job.search("autotvm", 24)
    assert (result.trials, result.failures, result.reason) == (24, 0, "trials")
    assert not job.warnings()
    trials = job.of()
    configs = [tuple(sorted(trial.config.items())) for trial in trials]
    assert len(set(configs)) == 24
    chosen = choices["operator 0"]
    assert chosen.trial is not None
    assert chosen.config == chosen.trial.config
    assert computes_a_product(chosen, host.target, (64, 64, 64))
    confirmed = [data for type, data in job.events if type == "progress" and data["stage"] == "confirm"]
    assert len(confirmed) <= 1

    other = Job(sqlite_store, host, server, [matmul_module(64, 128, 64, template=True)], "another model")
    result, choices = other.search("autotvm", 0)
    assert (result.trials, result.reason, other.of()) == (0, "none", [])
    guess = choices["operator 0"]
    assert guess.trial is None
    assert computes_a_product(guess, host.target, (64, 128, 64))
    assert other.records.cost_model("template/test-matmul/1") is not None
    times = {}
    for config in (guess.config, TEMPLATES["test-matmul"].configs({"m": 64, "n": 128, "k": 64}, CPU)[0]):
        [trace] = forked_steps.schedule_configs(guess.variant.workload, TEMPLATES["test-matmul"], CPU, [config or {}])
        assert trace is not None
        times[trace] = config
    assert len(times) == 2, "the model knows better than the first guess, one row and one column a tile"


@pytest.mark.parametrize("tuner", ["auto", "ansor", "autotvm"])
def test_tuners(tuner: str, host: Host, server: ForkServer, sqlite_store: TuningStore) -> None:
    """Templates alone, sketches alone, or both, and each says in its events which it was."""
    modules = [matmul_module(32, 32, 32, template=True), matmul_module(32, 32, 16)]
    job = Job(sqlite_store, host, server, modules)
    result, choices = job.search(tuner, 24)
    tuners = {data["tuner"] for type, data in job.events if type == "trial"}
    assert result.failures == 0
    assert not job.warnings()
    assert tuners == {"auto": {TEMPLATE, SKETCHES}, "ansor": {SKETCHES}, "autotvm": {TEMPLATE}}[tuner]
    assert choices["operator 0"].trial is not None
    assert (choices["operator 1"].trial is None) == (tuner == "autotvm")


def test_sketches_of_an_operator_that_has_none(host: Host, server: ForkServer, sqlite_store: TuningStore) -> None:
    """A search by sketches alone measures one choice of an operator that allows no sketches, and uses that."""
    job = Job(sqlite_store, host, server, [matmul_module(32, 32, 32, template=True)], sketchable=False)
    result, choices = job.search("ansor", 24)
    assert (result.trials, result.reason) == (1, "exhausted")
    assert choices["operator 0"].config == job.of()[0].config
