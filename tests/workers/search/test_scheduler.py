"""How a budget is spent, with made-up candidates: no device, no compiler, a clock that the runner moves on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tests.samples import make_key
from tests.workers.conftest import make_claim
from tests.workers.search.samples import features, matmul_module
from tuning_db.errors import StaleAttempt
from tuning_db.jobs import Claim, SearchConfig
from tuning_db.keys import Json, RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Failed, FailureKind, Measured, Workload, trace_digest
from workers.search import cost_model, forked_steps
from workers.search.candidates import Built, Candidate, Operator
from workers.search.cost_model import CostModel
from workers.search.forkserver import ChildError, ChildTimeout, ForkServer
from workers.search.records import Records
from workers.search.scheduler import Scheduler, SearchResult
from workers.search.space import Space

SCOPE = make_key().record_scope()
NAMES = ("large", "medium", "small")


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def seconds_of(trace: str) -> float:
    """A made-up time, the same for the same trace: 0.1 to 2 ms."""
    return 1e-4 * (1 + number_of(trace) % 20)


@dataclass
class InlineServer:
    """Runs the steps here and now. Proposals are made up from the seed, `sizes` of them at most for each operator."""

    sizes: dict[str, int] = field(default_factory=dict)  #: by workload digest
    refuse: Callable[[str, bool], Exception | None] = lambda workload, guided: None
    proposals: list[tuple[str, bool]] = field(default_factory=list)
    featurized: list[list[str]] = field(default_factory=list)
    seen: list[list[str]] = field(default_factory=list)  #: traces that each proposal was told are known

    def submit(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Future[Any]:
        assert deadline_s > 0
        future: Future[Any] = Future()
        try:
            future.set_result(self._run(function, *arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
        return self.submit(function, *arguments, deadline_s=deadline_s).result()

    def recycle_if_grown(self) -> bool:
        return False

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is forked_steps.propose:
            return self._propose(*arguments)
        if function is forked_steps.featurize:
            self.featurized.append([candidate.trace for candidate in arguments[1]])
            return [features(number_of(candidate.trace)) for candidate in arguments[1]]
        assert function is cost_model.train
        assert len(arguments[0]) >= cost_model.MIN_SAMPLES
        return CostModel(b"")  # nobody asks it here

    def _propose(
        self,
        target: str,
        workload: Workload,
        space: Space,
        measured: Sequence[tuple[str, tuple[float, ...]]],
        model: CostModel | None,
        count: int,
        seed: int,
    ) -> list[str]:
        self.proposals.append((workload.digest, model is not None))
        error = self.refuse(workload.digest, model is not None)
        if error is not None:
            raise error
        size = self.sizes.get(workload.digest, 10**6)
        known = {trace for trace, _ in measured}
        self.seen.append(sorted(known))
        numbers = range(size) if size < 1000 else (number_of(f"{seed} {i}") for i in range(4 * count))
        traces = (json.dumps([[[workload.structural_hash, number]], []]) for number in numbers)
        return [trace for trace in dict.fromkeys(traces) if trace not in known][:count]


@dataclass
class ValueBuilder:
    """Builds nothing. `check` is called before each batch."""

    fail: Callable[[Candidate], Failed | None] = lambda candidate: None
    check: Callable[[], None] = lambda: None
    built: list[list[Candidate]] = field(default_factory=list)

    def build(self, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        self.check()
        self.built.append(list(candidates))
        return [self.fail(c) or Built(c.trace, (), features(number_of(c.trace))) for c in candidates]


@dataclass
class ValueRunner:
    """Gives every candidate its made-up time, and takes `cost_s` of the clock for it."""

    cost_s: float = 1.0
    fail: Callable[[Built], Failed | None] = lambda built: None
    now_s: float = 0.0
    ran: list[str] = field(default_factory=list)

    def run(self, built: Built) -> Measured | Failed:
        self.ran.append(built.library)
        self.now_s += self.cost_s
        return self.fail(built) or Measured((seconds_of(built.library),) * 3)


@dataclass
class Search:
    """A scheduler with made-up collaborators and a real store."""

    store: TuningStore
    claim: Claim
    scope: RecordScope = SCOPE
    server: InlineServer = field(default_factory=InlineServer)
    builder: ValueBuilder = field(default_factory=ValueBuilder)
    runner: ValueRunner = field(default_factory=ValueRunner)
    events: list[tuple[str, dict[str, Json]]] = field(default_factory=list)
    untuned_s: dict[str, float] = field(default_factory=lambda: {"large": 0.1, "medium": 0.03, "small": 0.01})

    def __post_init__(self) -> None:
        self.records = Records(self.store, self.claim, self.scope)
        modules = [matmul_module(8, 8, size) for size in (24, 16, 8)]
        self.workloads = dict(zip(self.untuned_s, self.records.adopt(modules), strict=True))
        self.operators = [Operator(name, self.workloads[name], 1, untuned) for name, untuned in self.untuned_s.items()]

    def run(
        self, trials: int = 40, seconds: float = 10_000, seed: int = 0, *, before: int = 0, before_s: float = 0
    ) -> SearchResult:
        scheduler = Scheduler(
            server=cast(ForkServer, self.server),
            target="{}",
            space=Space(),
            builder=self.builder,
            runner=self.runner,
            records=self.records,
            report=lambda type, data: self.events.append((type, data)),
            clock=lambda: self.runner.now_s,
        )
        return scheduler.run(
            self.operators,
            SearchConfig(trials=trials, seconds=seconds, seed=seed),
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

    def of_type(self, type: str) -> list[dict[str, Json]]:
        return [data for found, data in self.events if found == type]


@pytest.fixture
def search(sqlite_store: TuningStore, claim: Claim) -> Search:
    return Search(sqlite_store, claim)


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
    assert search.of_type("trial")[0]["message"] == "the device is gone"


def test_stops_at_seconds(search: Search) -> None:
    """When the time is up what runs is finished and nothing else begins; it is stored all the same."""
    result = search.run(trials=1000, seconds=25)
    assert result.reason == "seconds"
    assert result.trials == len(search.runner.ran) == search.count() == 25
    assert result.elapsed_s == 25


def test_seconds_of_earlier_attempts_count(search: Search) -> None:
    """An attempt goes on with what its predecessors left of trials and seconds."""
    assert search.run(trials=1000, seconds=25, before_s=20).trials == 5
    assert search.run(trials=30, before=22).trials == 8
    assert search.run(trials=30, before=30).trials == 0
    assert search.run(seconds=25, before_s=25).reason == "seconds"


def test_exhausted(search: Search) -> None:
    """When no operator has anything new, the search ends before its budget, with everything measured once."""
    search.server.sizes = {w.digest: size for w, size in zip(search.workloads.values(), (11, 3, 0), strict=True)}
    result = search.run(trials=1000)
    assert (result.reason, result.trials) == ("exhausted", 14)
    assert {name: len(traces) for name, traces in search.stored().items()} == {"large": 11, "medium": 3, "small": 0}


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
    first = again.server.proposals[0][0]
    assert again.server.seen[0] == sorted(t for t in before if json.loads(t)[0][0][0] == hash_of(again, first))


def test_long_history(search: Search) -> None:
    """Of a long history a new search learns from some outcomes of each operator, from the best to the slowest."""
    search.operators = search.operators[:1]
    search.run(trials=200)
    again = Search(search.store, search.claim)
    again.run(trials=201, before=200)
    [learnt] = again.server.featurized
    times = sorted(seconds_of(trace) for trace in search.runner.ran)
    assert 40 <= len(learnt) <= 64
    assert seconds_of(learnt[0]) == times[0]
    assert seconds_of(learnt[-1]) >= times[-10]


def hash_of(search: Search, digest: str) -> str:
    return next(w.structural_hash for w in search.workloads.values() if w.digest == digest)


def test_never_twice(search: Search) -> None:
    """Within a search no candidate is tried twice, the failed ones neither."""
    search.server.sizes = dict.fromkeys((w.digest for w in search.workloads.values()), 50)
    search.runner.fail = lambda built: (
        Failed(FailureKind.RUN_TIMEOUT, "killed") if number_of(built.library) % 2 else None
    )
    search.run(trials=150)
    tried = [trace_digest(candidate.trace) for batch in search.builder.built for candidate in batch]
    assert len(tried) == len(set(tried)) == 150


def test_every_operator_gets_trials(search: Search) -> None:
    """Every operator is tried once the budget allows a round for each, however small its share (tvm#10366)."""
    search.run(trials=40)
    assert all(len(traces) >= 8 for traces in search.stored().values())


def test_most_goes_where_most_is_to_gain(search: Search) -> None:
    """An operator that takes nearly all of the time is searched in every round, beside the others in turn."""
    search.operators = [
        Operator(name, search.workloads[name], 1, untuned_s)
        for name, untuned_s in (("small", 1e-5), ("large", 1.0), ("medium", 1e-5))
    ]
    search.run(trials=100)
    large = search.workloads["large"]
    assert all(large in {candidate.workload for candidate in batch} for batch in search.builder.built)
    assert all(len(traces) >= 8 for traces in search.stored().values())


def test_calls_weigh(search: Search) -> None:
    """An operator that an inference calls often comes first."""
    search.operators = [
        Operator("medium", search.workloads["medium"], 1, 0.01),
        Operator("small", search.workloads["small"], 50, 0.01),
        Operator("large", search.workloads["large"], 5, 0.01),
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
    search.run(trials=20, before=3)
    trials = search.of_type("trial")
    assert [t["trial"] for t in trials] == list(range(4, 21))
    assert all(t["operator"] in NAMES and t["outcome"] == "measured" for t in trials)
    progress = search.of_type("progress")
    assert progress[-1]["trials_measured"] == 20
    assert progress[-1]["elapsed_s"] == 17
    predicted = [float(str(p["predicted_s"])) for p in progress]
    assert predicted == sorted(predicted, reverse=True)
    best = {n: min([*(seconds_of(t) for t in ts), search.untuned_s[n]]) for n, ts in search.stored().items()}
    assert predicted[-1] == pytest.approx(sum(best.values()))
