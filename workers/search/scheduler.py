"""Spends a budget of trials and seconds over a model's operators, where it is expected to gain most.

Any-time: every outcome is stored before the next round begins, and the best library of that moment can be built from
the store. The search of a job that was interrupted goes on from its records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tuning_db.jobs import SearchConfig
from tuning_db.keys import Json
from tuning_db.trials import Failed, Measured, Trial
from workers.search import cost_model, forked_steps
from workers.search.candidates import Built, Candidate, Operator
from workers.search.cost_model import CostModel, Sample
from workers.search.forkserver import ChildFailed, ForkServer, ServerDied
from workers.search.lanes import Builder, Runner
from workers.search.records import Records
from workers.search.space import Space

#: An event of the job: its type and data.
Report = Callable[[str, dict[str, Json]], None]

_BATCH = 8  #: candidates of one operator in one round
_PROPOSE_TIMEOUT_S = 20.0
_TRAIN_TIMEOUT_S = 30.0
_FEATURIZE_TIMEOUT_S = 20.0
#: Stored outcomes of an operator that a new search learns from.
_REMEMBERED = 64
#: Outcomes wait this long at most before they are stored.
_FLUSH_S = 1.0
#: Fork servers that one search may lose before it gives up: something on this machine kills them.
_SERVERS_LOST = 5
#: The share of its time that an operator is assumed to win in its first round, before anything is known of it.
_FIRST_GAIN = 0.7
#: How much of a later round's expected gain is what is left, beside the trend of the last round (Ansor, section 6).
_OPTIMISM = 0.15


@dataclass(slots=True)
class _Progress:
    """What the search knows of one operator."""

    operator: Operator
    rounds: int = 0
    best_s: float | None = None
    last_gain_s: float = 0.0
    unguided: bool = False  #: guided proposals hung or crashed: its space is sampled instead
    exhausted: bool = False

    @property
    def now_s(self) -> float:
        """What a call costs as it would be compiled now."""
        return min(self.operator.untuned_s, self.best_s if self.best_s is not None else self.operator.untuned_s)

    @property
    def expected_gain_s(self) -> float:
        """Seconds of an inference that another round is expected to save."""
        if self.rounds == 0:
            return self.operator.weight * self.now_s * _FIRST_GAIN
        left = _OPTIMISM * self.now_s / self.rounds
        # A round that won nearly all there was does not promise the like again: others would wait for nothing.
        return self.operator.weight * min(self.now_s, (1 - _OPTIMISM) * self.last_gain_s + left)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """How a search ended."""

    trials: int  #: measured by this search, failures too
    failures: int
    elapsed_s: float
    reason: str  #: "trials", "seconds" or "exhausted"


@dataclass(slots=True)
class Scheduler:
    """One search. Collaborators are given; none is made here."""

    server: ForkServer
    target: str
    space: Space
    builder: Builder
    runner: Runner
    records: Records
    report: Report
    operators_at_once: int = 2  #: proposals made side by side, one a core
    clock: Callable[[], float] = time.monotonic
    _names: dict[str, str] = field(default_factory=dict)
    _samples: dict[tuple[str, str], Sample] = field(default_factory=dict)
    _model: CostModel | None = None
    _trained_on: int = 0
    _servers_lost: int = 0

    def run(
        self,
        operators: Sequence[Operator],
        config: SearchConfig,
        *,
        trials_before: int = 0,
        elapsed_before_s: float = 0,
    ) -> SearchResult:
        """Search until a limit is reached or nothing new can be proposed. `…_before` were spent by earlier attempts."""
        start_s = self.clock()
        end_s = start_s + config.seconds - elapsed_before_s
        progress = [_Progress(operator) for operator in operators]
        self._names = {operator.workload.digest: operator.name for operator in operators}
        self._remember(operators)
        for entry in progress:
            self._update(entry)
            if entry.best_s is not None:
                entry.rounds = 1
        measured = failures = 0
        round_number = 0
        while True:
            left = config.trials - trials_before - measured
            if left <= 0:
                reason = "trials"
                break
            if self.clock() >= end_s:
                reason = "seconds"
                break
            chosen = self._choose(progress, left)
            if not chosen:
                reason = "exhausted"
                break
            round_number += 1
            seed = config.seed * 1_000_003 + trials_before + measured + round_number
            candidates = self._propose(chosen, min(_BATCH, -(-left // len(chosen))), seed, end_s)[:left]
            tried, failed = self._measure(candidates, end_s, trials_before + measured, config.trials)
            measured += tried
            failures += failed
            for entry in chosen:
                entry.rounds += 1
                before_s = entry.now_s
                self._update(entry)
                entry.last_gain_s = before_s - entry.now_s
            self._train(config.seed)
            self.server.recycle_if_grown()
            self._report_progress(
                progress, chosen, trials_before + measured, config, elapsed_before_s + self.clock() - start_s
            )
        return SearchResult(measured, failures, self.clock() - start_s, reason)

    def _choose(self, progress: Sequence[_Progress], trials_left: int) -> list[_Progress]:
        """The operators of the next round. Deterministic: ties go to the operator that comes first in the model."""
        open_entries = [entry for entry in progress if not entry.exhausted]
        open_entries.sort(key=lambda entry: -entry.expected_gain_s)
        return open_entries[: min(self.operators_at_once, trials_left)]

    def _propose(self, chosen: Sequence[_Progress], count: int, seed: int, end_s: float) -> list[Candidate]:
        deadline_s = max(1.0, min(_PROPOSE_TIMEOUT_S, end_s - self.clock()))
        asked: list[tuple[_Progress, bool, Future[list[str]]]] = []
        for offset, entry in enumerate(chosen):
            workload = entry.operator.workload
            model = None if entry.unguided else self._model
            known = [
                (t.trace, t.outcome.run_s if isinstance(t.outcome, Measured) else ())
                for t in self.records.of(workload.digest)
            ]
            future = self.server.submit(
                forked_steps.propose,
                self.target, workload, self.space, known, model, count, (seed * 31 + offset) % (2**31 - 1) + 1,
                deadline_s=deadline_s,
            )  # fmt: skip
            asked.append((entry, model is not None, future))
        candidates = []
        for entry, guided, future in asked:
            try:
                traces = future.result()
            except ServerDied:
                # Nobody's fault here: a new server, and the operator is asked again in the next round.
                self._servers_lost += 1
                if self._servers_lost > _SERVERS_LOST:
                    raise
                self.server.recycle_if_grown()
            except ChildFailed as failure:
                if self.clock() < end_s:
                    # Evolution of some operators never returns from TVM's arithmetic; sampling them still does.
                    entry.exhausted = not guided
                    entry.unguided = True
                    self.report("warning", {"operator": entry.operator.name, "message": f"proposal {failure}"})
            else:
                entry.exhausted = not traces
                candidates += [Candidate(entry.operator.workload, trace) for trace in traces]
        return candidates

    def _measure(
        self, candidates: Sequence[Candidate], end_s: float, trials_before: int, trials: int
    ) -> tuple[int, int]:
        """Build all, then run one after the other; nothing is built while something is measured."""
        waiting: list[tuple[Candidate, Measured | Failed]] = []
        flushed_s = self.clock()
        tried = failed = 0

        def flush() -> None:
            """Into the store first: what an event says of a trial is true after a crash too."""
            nonlocal flushed_s
            self.records.add([Trial(c.workload.digest, c.trace, outcome) for c, outcome in waiting])
            for number, (candidate, outcome) in enumerate(waiting, start=trials_before + tried - len(waiting) + 1):
                self._report_trial(candidate, outcome, number, trials)
            waiting.clear()
            flushed_s = self.clock()

        for candidate, built in zip(candidates, self.builder.build(candidates), strict=True):
            outcome: Measured | Failed
            if isinstance(built, Built):
                if self.clock() >= end_s and tried:
                    break
                outcome = self.runner.run(built)
                self._learn(candidate, built, outcome)
            else:
                outcome = built
            tried += 1
            failed += isinstance(outcome, Failed)
            waiting.append((candidate, outcome))
            if self.clock() - flushed_s >= _FLUSH_S:
                flush()
        if waiting:
            flush()
        return tried, failed

    def _learn(self, candidate: Candidate, built: Built, outcome: Measured | Failed) -> None:
        if built.features is not None:
            median_s = outcome.median_s if isinstance(outcome, Measured) else None
            self._samples[candidate.workload.digest, candidate.digest] = Sample(
                candidate.workload.digest, built.features, median_s
            )

    def _remember(self, operators: Sequence[Operator]) -> None:
        """Learn from what the store holds of these operators already."""
        for operator in operators:
            trials = [t for t in self.records.of(operator.workload.digest) if isinstance(t.outcome, Measured)]
            if not trials:
                continue
            # Features cost as much as scheduling the candidate again: of many, a few from the best to the worst.
            trials.sort(key=lambda t: (t.outcome.median_s if isinstance(t.outcome, Measured) else 0.0, t.trace_digest))
            trials = trials[:: -(-len(trials) // _REMEMBERED)]
            candidates = [Candidate(operator.workload, trial.trace) for trial in trials]
            try:
                found = self.server.call(
                    forked_steps.featurize, self.target, candidates, deadline_s=_FEATURIZE_TIMEOUT_S
                )
            except ChildFailed:
                continue
            for trial, features in zip(trials, found, strict=True):
                if features is not None and isinstance(trial.outcome, Measured):
                    self._samples[trial.workload, trial.trace_digest] = Sample(
                        trial.workload, features, trial.outcome.median_s
                    )
        self._train(0)

    def _train(self, seed: int) -> None:
        """Train anew when a fifth more is known than the last time."""
        if len(self._samples) < max(cost_model.MIN_SAMPLES, self._trained_on * 1.2):
            return
        try:
            self._model = self.server.call(
                cost_model.train, list(self._samples.values()), seed, deadline_s=_TRAIN_TIMEOUT_S
            )
            self._trained_on = len(self._samples)
        except ChildFailed as failure:
            self.report("warning", {"message": f"the cost model was not trained: {failure}"})

    def _update(self, entry: _Progress) -> None:
        best = self.records.best(entry.operator.workload.digest)
        entry.best_s = None if best is None else best[1]

    def _report_trial(self, candidate: Candidate, outcome: Measured | Failed, trial: int, trials: int) -> None:
        best = self.records.best(candidate.workload.digest)
        self.report(
            "trial",
            {
                "trial": trial,
                "trials": trials,
                "operator": self._names[candidate.workload.digest],
                "outcome": "measured" if isinstance(outcome, Measured) else outcome.kind.value,
                "message": None if isinstance(outcome, Measured) else outcome.message[:500],
                "run_s": outcome.median_s if isinstance(outcome, Measured) else None,
                "best_s": None if best is None else best[1],
            },
        )

    def _report_progress(
        self,
        progress: Sequence[_Progress],
        chosen: Sequence[_Progress],
        measured: int,
        config: SearchConfig,
        elapsed_s: float,
    ) -> None:
        """What a round came to: the operators that it was spent on, and the whole model as it would be built now."""
        self.report(
            "progress",
            {
                "trials_measured": measured,
                "trials": config.trials,
                "elapsed_s": round(elapsed_s, 1),
                "seconds": config.seconds,
                "left_s": round(max(0.0, config.seconds - elapsed_s), 1),
                "predicted_s": sum(entry.operator.weight * entry.now_s for entry in progress),
                "operators": [
                    {
                        "operator": e.operator.name,
                        "rounds": e.rounds,
                        "best_s": e.now_s,
                        "untuned_s": e.operator.untuned_s,
                    }
                    for e in chosen
                ],
            },
        )
