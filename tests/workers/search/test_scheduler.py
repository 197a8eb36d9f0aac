"""How a budget is spent, with made-up candidates: no device, no compiler, a clock that the runner moves on."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tests.samples import make_key
from tests.workers.conftest import make_claim
from tests.workers.search.samples import CPU, TEMPLATES, features, matmul_module
from tuning_db.catalog import Roof
from tuning_db.errors import StaleAttempt
from tuning_db.jobs import Claim, SearchConfig
from tuning_db.keys import Json, RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Failed, FailureKind, Measured, StoredCostModel, Workload, trace_digest
from workers.search import cost_model, forked_steps
from workers.search.candidates import Built, Candidate, Operator, Variant
from workers.search.cost_model import CostModel
from workers.search.forkserver import ChildError, ChildFailed, ChildTimeout, ForkServer, Step
from workers.search.records import Records
from workers.search.scheduler import Scheduler, SearchResult
from workers.search.space import Space
from workers.search.templates.knobs import Config, Cpu, Template

SCOPE = make_key().record_scope()
NAMES = ("large", "medium", "small")
UNSCHEDULED = "[[],[]]"


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def seconds_of(trace: str) -> float:
    """A made-up time, the same for the same trace: of a sketch 0.1 to 2 ms, of a template's choice 0.1 ms where its
    tile is 8 rows of 16 columns in parallel, more the further from it."""
    instructions, _ = json.loads(trace)
    if instructions and instructions[0][0] == "config":
        config = dict(instructions[0][1])
        away = abs(math.log2(config["rows"]) - 3) + abs(math.log2(config["columns"]) - 4)
        return 1e-4 * (1 + 0.5 * away + (not config["parallel"]))
    return 1e-4 * (1 + number_of(trace) % 20)


@functools.cache
def small_model() -> CostModel:
    """Nobody asks it anything, but it can be stored and loaded."""
    known = [cost_model.Sample("w", features(number), 1.0 + number) for number in range(20)]
    model = cost_model.train(known, 0)
    assert model is not None
    return model


@dataclass
class InlineServer:
    """Runs the steps here and now. Proposals are made up from the seed, `sizes` of them at most for each operator."""

    sizes: dict[str, int] = field(default_factory=dict)  #: by workload digest
    refuse: Callable[[str, bool], Exception | None] = lambda workload, guided: None
    refuse_config: Callable[[Config], bool] = lambda config: False
    proposals: list[tuple[str, bool]] = field(default_factory=list)
    featurized: list[list[str]] = field(default_factory=list)
    trained: list[tuple[int, CostModel | None]] = field(default_factory=list)  #: samples, and the model to go on from

    def call_all(self, steps: Sequence[Step], *, at_once: int) -> list[Any]:
        answers: list[Any] = []
        for step in steps:
            assert step.deadline_s > 0
            try:
                answers.append(self._run(step.function, *step.arguments))
            except ChildFailed as failure:
                answers.append(failure)
        return answers

    def call_retrying(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
        [answer] = self.call_all([Step(function, arguments, deadline_s)], at_once=1)
        if isinstance(answer, ChildFailed):
            raise answer
        return answer

    def recycle_if_grown(self) -> bool:
        return False

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is forked_steps.propose:
            return self._propose(*arguments)
        if function is forked_steps.schedule_configs:
            return self._schedule(*arguments)
        if function is forked_steps.featurize:
            self.featurized.append([candidate.trace for candidate in arguments[1]])
            return [features(number_of(candidate.trace)) for candidate in arguments[1]]
        if function is cost_model.train_configs:
            return cost_model.train_configs(*arguments)
        assert function is cost_model.train
        self.trained.append((len(arguments[0]), arguments[2]))
        return small_model()

    def _propose(
        self,
        target: str,
        workload: Workload,
        space: Space,
        parents: Sequence[tuple[str, tuple[float, ...]]],
        model: CostModel | None,
        cpu: Cpu,
        count: int,
        seed: int,
    ) -> list[str]:
        self.proposals.append((workload.digest, model is not None))
        error = self.refuse(workload.digest, model is not None)
        if error is not None:
            raise error
        size = self.sizes.get(workload.digest, 10**6)
        numbers = range(size) if size < 1000 else (number_of(f"{seed} {i}") for i in range(4 * count))
        return list(dict.fromkeys(json.dumps([[[workload.structural_hash, number]], []]) for number in numbers))

    def _schedule(
        self, workload: Workload, template: Template, cpu: Cpu, configs: Sequence[Config]
    ) -> list[str | None]:
        self.proposals.append((workload.digest, False))
        return [
            None if self.refuse_config(config) else json.dumps([[["config", sorted(config.items())]], []])
            for config in configs
        ]


@dataclass
class ValueBuilder:
    """Builds nothing. `check` is called before each batch."""

    fail: Callable[[Candidate], Failed | None] = lambda candidate: None
    check: Callable[[], None] = lambda: None
    built: list[list[Candidate]] = field(default_factory=list)
    libraries: set[int] = field(default_factory=set)  #: that were built and not removed

    def build(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        self.check()
        self.built.append(list(candidates))
        results: list[Built | Failed] = []
        for candidate in candidates:
            rows = features(number_of(candidate.trace)) if candidate.config is None else None
            result = self.fail(candidate) or Built(f"{candidate.workload.digest} {candidate.trace}", (), rows)
            if isinstance(result, Built):
                self.libraries.add(id(result))
            results.append(result)
        return results

    def remove(self, built: Built) -> None:
        self.libraries.remove(id(built))


@dataclass
class ValueRunner:
    """Gives every candidate its made-up time, and takes `cost_s` of the clock for it."""

    cost_s: float = 1.0
    fail: Callable[[Built], Failed | None] = lambda built: None
    seconds: Callable[[str], float] = seconds_of
    confirmed: Callable[[str], float] = seconds_of
    slower: dict[str, float] = field(default_factory=dict)  #: by workload digest
    sketch_factor: float = 1.0
    now_s: float = 0.0
    ran: list[str] = field(default_factory=list)
    hopeless: list[float | None] = field(default_factory=list)
    compared: list[list[str]] = field(default_factory=list)
    at_once: int = 1

    def run_all(self, wanted: Sequence[tuple[Built, float | None]]) -> list[Measured | Failed]:
        return [self.run(built, hopeless_s) for built, hopeless_s in wanted]

    def run(self, built: Built, hopeless_s: float | None) -> Measured | Failed:
        workload, trace = built.library.split(" ", 1)
        self.ran.append(trace)
        self.hopeless.append(hopeless_s)
        self.now_s += self.cost_s
        factor = self.slower.get(workload, 1.0) * (1.0 if '"config"' in trace else self.sketch_factor)
        return self.fail(built) or Measured((self.seconds(trace) * factor,) * 3)

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        traces = [built.library.split(" ", 1)[1] for built in candidates]
        self.compared.append(traces)
        self.now_s += 0.1
        return [Measured((self.confirmed(trace),) * 7) for trace in traces]


@dataclass
class Search:
    """A scheduler with made-up collaborators and a real store. Its operators allow sketches; `template` gives them a
    template too."""

    store: TuningStore
    claim: Claim
    scope: RecordScope = SCOPE
    template: bool = False
    tuner: str = "ansor"
    server: InlineServer = field(default_factory=InlineServer)
    builder: ValueBuilder = field(default_factory=ValueBuilder)
    runner: ValueRunner = field(default_factory=ValueRunner)
    events: list[tuple[str, dict[str, Json]]] = field(default_factory=list)
    flops: Mapping[str, float] = field(default_factory=lambda: {"large": 1e7, "medium": 3e6, "small": 1e6})
    roof: Roof | None = None

    def __post_init__(self) -> None:
        self.records = Records(self.store, self.claim, self.scope)
        modules = [matmul_module(32, 64, size, template=self.template) for size in (24, 16, 8)]
        self.workloads = dict(zip(self.flops, self.records.adopt(modules), strict=True))
        self.operators = [self.operator(name, flops) for name, flops in self.flops.items()]

    def operator(self, name: str, flops: float, weight: int = 1) -> Operator:
        return Operator(name, weight, (Variant("direct", self.workloads[name], True),), flops, 1e4)

    def run(
        self, trials: int = 40, seconds: float = 10_000, seed: int = 0, *, before: int = 0, before_s: float = 0
    ) -> SearchResult:
        self.scheduler = Scheduler(
            server=cast(ForkServer, self.server),
            target="{}",
            machine=CPU,
            templates=TEMPLATES,
            builder=self.builder,
            runner=self.runner,
            records=self.records,
            report=lambda type, data: self.events.append((type, data)),
            roof=self.roof,
            clock=lambda: self.runner.now_s,
        )
        return self.scheduler.run(
            self.operators,
            SearchConfig(self.tuner, trials=trials, seconds=seconds, seed=seed),
            trials_before=before,
            elapsed_before_s=before_s,
        )

    def stored(self) -> dict[str, list[str]]:
        """The traces in the store, by operator."""
        return {
            name: [trial.trace for trial in self.store.trials(self.scope, [workload.digest])]
            for name, workload in self.workloads.items()
        }

    def count(self) -> int:
        return sum(map(len, self.stored().values()))

    def of_type(self, type: str, stage: str = "search") -> list[dict[str, Json]]:
        return [data for found, data in self.events if found == type and data.get("stage", stage) == stage]


@pytest.fixture
def search(sqlite_store: TuningStore, claim: Claim) -> Search:
    return Search(sqlite_store, claim)


@pytest.fixture
def templates(sqlite_store: TuningStore, claim: Claim) -> Search:
    """A search over a template's choices alone."""
    return Search(sqlite_store, claim, template=True, tuner="autotvm")


@pytest.mark.parametrize("trials", [1, 7, 8, 9, 40])
def test_stops_at_trials(search: Search, trials: int) -> None:
    """Exactly as many candidates are tried as the budget allows, whatever the size of a round."""
    result = search.run(trials=trials)
    assert (result.trials, result.reason, result.failures) == (trials, "trials", 0)
    assert len(search.runner.ran) == search.count() == trials


def test_failures_count(search: Search) -> None:
    """A candidate that does not build or run is a trial too, and is stored with its reason."""
    failed = Failed(FailureKind.BUILD_ERROR, "no")
    search.builder.fail = lambda candidate: failed if number_of(candidate.trace) % 3 == 0 else None
    search.runner.fail = lambda built: (
        Failed(FailureKind.RUN_CRASH, "died of SIGSEGV") if number_of(built.library) % 3 == 1 else None
    )
    result = search.run(trials=30)
    outcomes = [t.outcome for w in search.workloads.values() for t in search.store.trials(SCOPE, [w.digest])]
    kinds = [o.kind for o in outcomes if isinstance(o, Failed)]
    assert (result.trials, len(outcomes), result.failures) == (30, 30, len(kinds))
    assert set(kinds) == {FailureKind.BUILD_ERROR, FailureKind.RUN_CRASH}
    assert search.store.job(search.claim.job_id).trials_measured == 30


def test_all_fail(search: Search) -> None:
    """When nothing runs the search still ends at its budget, and has no record to offer (tvm#6612)."""
    search.runner.fail = lambda built: Failed(FailureKind.RUN_ERROR, "the device is gone")
    result = search.run(trials=20)
    assert (result.trials, result.failures, result.reason) == (20, 20, "trials")
    assert all(search.records.best(w.digest) is None for w in search.workloads.values())
    assert search.records.chosen(search.operators) == {}
    assert {choice.trial for choice in search.scheduler.choice().values()} == {None}
    assert search.of_type("trial")[0]["message"] == "the device is gone"


def test_stops_at_seconds(search: Search) -> None:
    """When the time is up what runs is finished and nothing else begins; it is stored all the same. A tenth of the
    time at most is kept for comparing the best, which takes no longer than there is time."""
    result = search.run(trials=1000, seconds=25)
    assert result.reason == "seconds"
    assert result.trials == len(search.runner.ran) == search.count() == 24
    assert 24 <= result.elapsed_s <= 25


def test_seconds_of_earlier_attempts_count(search: Search) -> None:
    """An attempt goes on with what its predecessors left of trials and seconds."""
    assert search.run(trials=1000, seconds=25, before_s=20).trials == 4
    assert search.run(trials=30, before=22).trials == 8
    assert search.run(trials=30, before=30).trials == 0
    assert search.run(seconds=25, before_s=25).reason == "seconds"


def test_exhausted(search: Search) -> None:
    """When no operator has anything new, the search ends before its budget, with everything measured once, the
    computation without a schedule included."""
    search.server.sizes = {w.digest: size for w, size in zip(search.workloads.values(), (11, 3, 0), strict=True)}
    result = search.run(trials=1000)
    assert (result.reason, result.trials) == ("exhausted", 17)
    assert {name: len(traces) for name, traces in search.stored().items()} == {"large": 12, "medium": 4, "small": 1}


def test_nothing_to_search(search: Search) -> None:
    """Without operators there is nothing to do, and that is no error."""
    search.operators = []
    result = search.run()
    assert (result.reason, result.trials) == ("exhausted", 0)


def test_resume(search: Search) -> None:
    """Another attempt measures nothing that is in the store, and learns from it."""
    search.run(trials=40)
    before = set(search.runner.ran)
    again = Search(search.store, search.claim)
    # The same seed and the same spaces: what is proposed first is what was measured before.
    again.server.sizes = search.server.sizes = dict.fromkeys((w.digest for w in again.workloads.values()), 60)
    again.run(trials=80, before=40)
    assert len(again.runner.ran) == 40
    assert not set(again.runner.ran) & before
    assert again.server.proposals[0][1], "the first proposal is guided by what was stored"


def test_long_history(search: Search) -> None:
    """Of a long history a new search learns from some outcomes of each operator, from the best to the slowest."""
    search.operators = search.operators[:1]
    search.runner.seconds = lambda trace: 1 / (1 + len(search.runner.ran))  # ever faster, or it would end
    assert search.run(trials=200).reason == "trials"
    again = Search(search.store, search.claim)
    again.operators = again.operators[:1]
    again.run(trials=201, before=200)
    [learnt] = again.server.featurized
    assert 40 <= len(learnt) <= 64
    order = [search.runner.ran.index(trace) for trace in learnt]
    assert order == sorted(order, reverse=True)
    assert (order[0], order[-1] < 10) == (199, True)


def test_never_twice(search: Search) -> None:
    """Within a search no candidate is tried twice, the failed ones neither."""
    search.server.sizes = dict.fromkeys((w.digest for w in search.workloads.values()), 50)
    search.runner.fail = lambda built: (
        Failed(FailureKind.RUN_TIMEOUT, "killed") if number_of(built.library) % 2 else None
    )
    search.run(trials=150)
    tried = [trace_digest(trace) for trace in search.runner.ran]
    assert len(tried) - tried.count(trace_digest(UNSCHEDULED)) == len({*tried} - {trace_digest(UNSCHEDULED)}) > 100
    assert tried.count(trace_digest(UNSCHEDULED)) == 3, "one an operator"


def test_every_operator_gets_trials(search: Search) -> None:
    """Every operator is tried once the budget allows a round for each, however small its share (tvm#10366)."""
    search.run(trials=40)
    assert all(len(traces) >= 8 for traces in search.stored().values())


def test_most_goes_where_most_is_to_gain(search: Search) -> None:
    """An operator that takes nearly all of the time is searched in every round, beside the others in turn."""
    large = search.workloads["large"]
    # All get ever faster, so none is given up.
    search.runner.seconds = lambda trace: (1000 if large.structural_hash in trace else 1) / (1 + len(search.runner.ran))
    search.run(trials=100)
    assert all(large in {candidate.workload for candidate in batch} for batch in search.builder.built[2:-3])
    assert min(map(len, search.stored().values())) >= 8


def test_calls_weigh(search: Search) -> None:
    """What an inference computes most of comes first."""
    search.operators = [
        search.operator("medium", 1e6),
        search.operator("small", 1e6, weight=50),
        search.operator("large", 1e6, weight=5),
    ]
    search.run(trials=16)
    counts = {name: len(traces) for name, traces in search.stored().items()}
    assert counts == {"small": 8, "large": 8, "medium": 0}


def test_stored_before_the_next_round(search: Search) -> None:
    """When a round begins everything that was tried before is in the store, and events tell of nothing else."""
    counts: list[tuple[int, int, int]] = []

    def check() -> None:
        told = len(search.of_type("trial"))
        counts.append((search.count(), sum(map(len, search.builder.built)), told))

    search.builder.check = check
    search.run(trials=40)
    assert len(counts) >= 3
    assert all(stored == tried == told for stored, tried, told in counts)


def test_stored_within_a_round(search: Search) -> None:
    """Outcomes of slow candidates reach the store one by one: a crash loses the last at most."""
    stored: list[int] = []
    search.runner.fail = lambda built: stored.append(search.count())
    search.run(trials=10)
    assert stored == list(range(10))


def test_job_that_was_taken_away(search: Search) -> None:
    """When another attempt holds the job the search stops at its next write."""
    search.builder.check = lambda: take_away(search)
    with pytest.raises(StaleAttempt):
        search.run()
    assert search.count() == 0


def take_away(search: Search) -> None:
    search.store.release(search.claim)
    assert search.store.claim(search.claim.job_id, "another worker") is not None


def timeout(*guided: bool) -> Callable[[str, bool], Exception | None]:
    return lambda workload, is_guided: ChildTimeout("killed after 20 s") if is_guided in guided else None


def test_guided_proposals_that_hang(search: Search) -> None:
    """An operator whose guided proposals never come is sampled from then on, and the search goes on."""
    search.server.refuse = timeout(True)
    result = search.run(trials=120)
    assert (result.trials, result.reason) == (120, "trials")
    warnings = search.of_type("warning")
    assert sorted(str(w["operator"]) for w in warnings) == sorted(NAMES)
    assert all("killed after 20 s" in str(w["message"]) for w in warnings)
    guided = [workload for workload, is_guided in search.server.proposals if is_guided]
    assert len(guided) == len(set(guided)) == 3


def test_proposals_that_always_hang(search: Search) -> None:
    """An operator that cannot even be sampled is given up; the others are searched (tvm#18423, tvm#12330)."""
    bad = search.workloads["large"].digest
    search.server.refuse = lambda workload, _: ChildError("ScheduleError: no") if workload == bad else None
    result = search.run(trials=40)
    assert (result.trials, result.reason) == (40, "trials")
    assert search.stored()["large"] == []
    assert [w["operator"] for w in search.of_type("warning")] == ["large"]
    search.server.refuse = timeout(True, False)
    result = search.run(trials=100, before=40)
    assert (result.trials, result.reason) == (0, "exhausted")


def test_seed(sqlite_store: TuningStore) -> None:
    """The same seed tries the same candidates in the same order; another one does not."""
    searches = []
    for index, seed in enumerate((5, 5, 6)):
        search = Search(sqlite_store, make_claim(sqlite_store, f"model {index}"), replace(SCOPE, target=str(index)))
        search.run(trials=60, seed=seed)
        searches.append(search)
    one, two, other = (search.runner.ran for search in searches)
    assert one == two
    assert one != other


def test_events(search: Search) -> None:
    """Each trial is told with its number, and each round with what was spent and what the model would take now."""
    search.run(trials=43, before=3)
    trials = search.of_type("trial")
    assert [t["trial"] for t in trials] == list(range(4, 44))
    assert all(t["operator"] in NAMES and t["outcome"] == "measured" for t in trials)
    assert {(t["stage"], t["variant"], t["tuner"]) for t in trials} == {("search", "direct", "ansor")}
    assert [t["left_s"] for t in trials] == [10_000 - number for number in range(1, 41)]
    progress = search.of_type("progress")
    assert progress[-1]["trials_measured"] == 43
    assert progress[-1]["elapsed_s"] == 40
    # What is told of comparing is progress too, with the same figures.
    assert all(progress[-1].keys() == p.keys() for p in search.of_type("progress", "confirm"))
    assert [p["unmeasured"] for p in progress][:3] == [1, 0, 0]
    predicted = [float(str(p["predicted_s"])) for p in progress if p["unmeasured"] == 0]
    assert predicted == sorted(predicted, reverse=True)
    best = [min(seconds_of(t) for t in ts) for ts in search.stored().values()]
    assert predicted[-1] == pytest.approx(sum(best))


def config_of(built: str) -> dict[str, int]:
    return dict(json.loads(built)[0][0][1])


def test_templates(templates: Search) -> None:
    """A template's first guess is tried at once, and the search closes in on the best of its choices, never trying one
    twice; each is stored with its configuration."""
    templates.operators = templates.operators[:1]
    templates.run(trials=36)
    tried = [config_of(trace) for trace in templates.runner.ran]
    space = TEMPLATES["test-matmul"].configs({"m": 32, "n": 64, "k": 24}, CPU)
    assert tried[0] == space[0]
    assert len({tuple(sorted(config.items())) for config in tried}) == 36 < len(space) == 70
    assert min(map(seconds_of, templates.runner.ran)) == 1e-4
    assert {"rows": 8, "columns": 16, "parallel": 1} in tried
    stored = templates.store.trials(SCOPE, [templates.workloads["large"].digest])
    assert {tuple(sorted((trial.config or {}).items())) for trial in stored} == {
        tuple(sorted(config.items())) for config in tried
    }


def test_experience_of_near_workloads(templates: Search) -> None:
    """What was best for the nearest workload is among the first choices of another, in the same job or a later one."""
    templates.operators = templates.operators[:1]
    templates.run(trials=60)
    again = Search(templates.store, templates.claim, template=True, tuner="autotvm")
    again.operators = again.operators[1:]
    again.run(trials=64, before=60)
    assert {"rows": 8, "columns": 16, "parallel": 1} in [config_of(trace) for trace in again.runner.ran]


def test_cost_model_is_kept(templates: Search) -> None:
    """A job leaves its cost model in its scope; the next does not train it again until a fifth more is known."""
    templates.run(trials=60)
    stored = templates.records.cost_model("template/test-matmul/1")
    assert stored is not None
    assert 40 <= stored.trained_on <= 60
    again = Search(templates.store, templates.claim, template=True, tuner="autotvm")
    again.run(trials=0)
    assert again.records.cost_model("template/test-matmul/1") == stored
    other = Search(templates.store, templates.claim, replace(SCOPE, target="other"), template=True, tuner="autotvm")
    assert other.records.cost_model("template/test-matmul/1") is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda booster: b'{"version": [3, 0, 0]}', "not a model"),
        (lambda booster: other_features(), "2 features"),
    ],
)
def test_stored_cost_model_that_is_useless(templates: Search, change: Callable[[bytes], bytes], reason: str) -> None:
    """A stored model that cannot be read, or that wants other features, is discarded with a warning and replaced."""
    name = "template/test-matmul/1"
    templates.run(trials=40)
    stored = templates.records.cost_model(name)
    assert stored is not None
    broken = replace(stored, booster_json=change(stored.booster_json))
    templates.records.put_cost_model(name, broken)
    again = Search(templates.store, templates.claim, template=True, tuner="autotvm")
    again.run(trials=0)
    [warning] = again.of_type("warning")
    assert reason in str(warning["message"])
    repaired = again.records.cost_model(name)
    assert repaired is not None
    assert repaired.booster_json != broken.booster_json
    assert repaired.trained_on == 40


def other_features() -> bytes:
    samples = [cost_model.ConfigSample("w", (float(n), 1.0), 1.0 + n) for n in range(20)]
    model = cost_model.train_configs(samples, 0)
    assert model is not None
    return model.booster_json


def test_cost_model_of_another_format(templates: Search) -> None:
    """A stored model of another format is trained anew without a word: that is what the number is for."""
    name = "template/test-matmul/1"
    templates.run(trials=40)
    templates.records.put_cost_model(name, StoredCostModel(99, 10**6, b"{}"))
    again = Search(templates.store, templates.claim, template=True, tuner="autotvm")
    again.run(trials=0)
    stored = again.records.cost_model(name)
    assert stored is not None
    assert (stored.format_version, stored.trained_on) == (1, 40)
    assert again.of_type("warning") == []


def test_sketch_model_is_kept(search: Search) -> None:
    """The cost model of sketches is gone on from by the next job, which learns of its own candidates."""
    search.run(trials=40)
    stored = search.records.cost_model("sketches")
    assert stored is not None
    again = Search(search.store, search.claim, replace(SCOPE, target="new"))
    again.records.put_cost_model("sketches", stored)
    again.run(trials=40)
    assert again.server.proposals[0][1], "guided from the first proposal on"
    assert again.server.trained[0][1] == CostModel(stored.booster_json)
    kept = again.records.cost_model("sketches")
    assert kept is not None
    assert kept.trained_on > stored.trained_on


def test_choices_that_cannot_be_applied(templates: Search) -> None:
    """A choice that the template cannot apply costs no trial, is told, and is not tried again."""
    templates.server.refuse_config = lambda config: config["rows"] > 4
    templates.operators = templates.operators[:1]
    result = templates.run(trials=200)
    assert result.reason == "exhausted"
    assert all(config_of(trace)["rows"] <= 4 for trace in templates.runner.ran)
    warnings = [str(w["message"]) for w in templates.of_type("warning")]
    assert all("test-matmul" in w and '"rows"' in w for w in warnings)
    assert len(warnings) == len(set(warnings)) > 0


def two_variants(search: Search, *, sketchable: bool = False) -> list[str]:
    """One operator that can be computed as "large" or as "small"; the structural hashes of both."""
    variants = tuple(Variant(name, search.workloads[name], sketchable) for name in ("large", "small"))
    search.operators = [Operator("operator", 3, variants, 1e6, 1e4)]
    return [variant.workload.structural_hash for variant in variants]


def test_best_variant_wins(templates: Search) -> None:
    """Each variant is tried, the faster one gets most trials, and it is the choice."""
    two_variants(templates)
    templates.runner.slower = {templates.workloads["large"].digest: 3.0}
    templates.run(trials=40)
    counts = {name: len(traces) for name, traces in templates.stored().items()}
    assert counts["large"] >= 2
    assert counts["small"] > 4 * counts["large"]
    choice = templates.scheduler.choice()["operator"]
    assert choice.variant.name == "small"
    assert choice.trial is not None
    assert seconds_of(choice.trial.trace) == 1e-4


def test_auto_gives_sketches_what_templates_leave(search: Search) -> None:
    """Sketches wait until the templates have had their chance, then get trials, and keep them where they win."""
    for factor in (0.01, 100.0):
        auto = Search(search.store, search.claim, replace(SCOPE, target=str(factor)), template=True, tuner="auto")
        auto.operators = auto.operators[:1]
        auto.runner.sketch_factor = factor
        auto.run(trials=90)
        tuners = [str(t["tuner"]) for t in auto.of_type("trial")]
        first = tuners.index("ansor")
        assert 16 <= first < 60
        if factor < 1:
            assert tuners[first:].count("ansor") > 0.7 * len(tuners[first:])
            choice = auto.scheduler.choice()["large"]
            assert choice.trial is not None
            assert choice.config is None
        else:
            assert tuners.count("ansor") <= 40


def test_sketches_for_what_has_no_template(search: Search) -> None:
    """An operator without a template is searched by sketches from the first round, its plain code among them."""
    search.tuner = "auto"
    search.run(trials=24)
    assert {t["tuner"] for t in search.of_type("trial")} == {"ansor"}
    assert all(UNSCHEDULED in traces for traces in search.stored().values())


def test_roof(templates: Search) -> None:
    """An operator that is within five percent of what the device can do is left alone."""
    # 1e7 operations in 1e-4 seconds: what the best choice reaches.
    templates.roof = Roof(1e11, 1e12, 5e10, dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
    templates.run(trials=200)
    counts = {name: len(traces) for name, traces in templates.stored().items()}
    assert counts["large"] < counts["medium"]
    assert {
        t["bound_s"] for p in templates.of_type("progress") for t in p["operators"] if t["operator"] == "large"
    } == {1e-4}


@pytest.mark.parametrize(
    ("moved", "constant", "bound_s"),
    [
        (1e6, 0.0, 1e-4),  # data in a cache: the operations alone
        (1e6, 1e6, 1e-3),  # weights of which only some copies fit into the cache
        (1e6, 1e3, 1e-4),  # weights of which all copies fit
        (6e7, 1e3, 6e-2),  # data that no cache holds
    ],
)
def test_the_roof_of_memory(templates: Search, moved: float, constant: float, bound_s: float) -> None:
    """What has to come from main memory bounds an operator as well, where that takes longer than its operations."""
    templates.roof = Roof(1e11, 1e9, 5e10, dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
    templates.operators = [replace(templates.operators[0], bytes=moved, constant_bytes=constant)]
    templates.run(trials=4)
    [told] = templates.of_type("progress")[0]["operators"]
    assert told["bound_s"] == pytest.approx(bound_s)


def test_hopeless_candidates_are_told(templates: Search) -> None:
    """A runner is told from which time on a candidate is not worth more repeats: twice the operator's best so far."""
    templates.operators = templates.operators[:1]
    templates.run(trials=20)
    best_s = math.inf
    for trace, hopeless_s in zip(templates.runner.ran, templates.runner.hopeless, strict=True):
        assert hopeless_s == (None if best_s == math.inf else 2 * best_s)
        best_s = min(best_s, seconds_of(trace))


def test_confirmation(templates: Search) -> None:
    """The best within 15 percent are compared in turns at the end; that decides, is no trial, and leaves the stored
    outcomes as they are."""
    templates.operators = templates.operators[:1]
    templates.runner.seconds = lambda trace: 1e-4 * (1 + number_of(trace) % 100 / 1000)
    templates.runner.confirmed = lambda trace: 1.5e-4 + number_of(trace[::-1]) % 100 / 1e9
    result = templates.run(trials=24)
    [compared] = templates.runner.compared
    order = sorted(templates.runner.ran, key=lambda trace: (templates.runner.seconds(trace), trace_digest(trace)))
    assert compared == order[:4]
    assert (result.trials, templates.count()) == (24, 24)
    choice = templates.scheduler.choice()["large"]
    assert choice.trial is not None
    assert choice.trial.trace == min(compared, key=templates.runner.confirmed)
    [event] = templates.of_type("progress", "confirm")
    [told] = event["operators"]
    assert [c["confirmed_s"] for c in told["candidates"]] == [templates.runner.confirmed(trace) for trace in compared]
    assert templates.builder.libraries == set()


def test_libraries_are_removed(templates: Search) -> None:
    """During a search no more than the best few libraries of each operator are kept, afterwards none."""
    kept: list[int] = []
    templates.builder.check = lambda: kept.append(len(templates.builder.libraries))
    templates.runner.fail = lambda built: (
        Failed(FailureKind.RUN_CRASH, "died") if number_of(built.library) % 5 == 0 else None
    )
    templates.run(trials=60)
    assert 0 < max(kept) <= 12
    assert templates.builder.libraries == set()


def test_choice_at_every_moment(templates: Search) -> None:
    """Before an operator was measured the choice is its template's first guess, afterwards its best so far."""
    seen: list[list[bool]] = []
    templates.builder.check = lambda: seen.append([c.trial is None for c in templates.scheduler.choice().values()])
    templates.run(trials=24)
    assert seen[0] == [True, True, True]
    assert seen[1] == [False, False, True]
    assert seen[-1] == [False, False, False]
    for name, choice in templates.scheduler.choice().items():
        assert choice.trial is not None
        assert choice.trace == choice.trial.trace
        assert choice.variant.workload == templates.workloads[name]


@pytest.mark.parametrize("tuner", ["auto", "autotvm", "ansor", "none"])
def test_without_trials(templates: Search, tuner: str) -> None:
    """Nothing is measured, and each operator has the record that is stored, or the choice that the model ranks first,
    or what its template guesses; without a template, its plain code."""
    templates.operators = templates.operators[:1]
    templates.run(trials=60)
    templates.runner.ran.clear()
    again = Search(templates.store, templates.claim, template=True, tuner=tuner)
    plain = again.records.adopt([matmul_module(8, 8, 8)])[0]
    again.operators.append(Operator("plain", 1, (Variant("direct", plain, True),), 1e3, 1e3))
    result = again.run(trials=0)
    assert (result.trials, result.reason, again.runner.ran, again.events) == (0, "none", [], [])
    choices = again.scheduler.choice()
    assert choices["large"].trial is not None
    assert choices["medium"].trial is None
    assert seconds_of(str(choices["medium"].trace)) <= 1.5e-4, "learnt from the large one"
    assert (choices["plain"].trace, choices["plain"].config) == (None, None)
