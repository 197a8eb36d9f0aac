"""Spends a budget of trials and seconds over a model's operators, where it is expected to gain most.

Every operator gets a small first batch, heavy ones first; then rounds go where the expected gain on a whole inference
is largest (`arms`). A round proposes candidates (templates' choices ranked by `configs`, sketches bred by
MetaSchedule), builds them on all cores and measures them one after the other.

Any-time: every outcome is stored before the next round begins, and `choice()` answers at every moment. The search of a
job that was interrupted goes on from its records.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tuning_db.catalog import Roof
from tuning_db.jobs import SearchConfig
from tuning_db.keys import Json
from tuning_db.trials import Failed, Measured, StoredCostModel, Trial
from workers.search import cost_model, forked_steps, sampling
from workers.search.arms import Arm, Search, arms_of
from workers.search.candidates import SKETCHES, TEMPLATE, Built, Candidate, Choice, Operator, Variant
from workers.search.configs import ConfigSpace
from workers.search.cost_model import CostModel, Sample
from workers.search.experience import TemplateExperience
from workers.search.forkserver import ChildFailed, ForkServer, Step
from workers.search.lanes import Builder, Runner
from workers.search.records import ConfigKey, Records, key_of
from workers.search.space import Space
from workers.search.templates.knobs import Config, Cpu, Gpu, Template

#: An event of the job: its type and data.
Report = Callable[[str, dict[str, Json]], None]

_PROPOSE_TIMEOUT_S: Final = 20.0
_TRAIN_TIMEOUT_S: Final = 30.0
_FEATURIZE_TIMEOUT_S: Final = 20.0
_SCHEDULE_TIMEOUT_S: Final = 20.0
#: Sketches of one round for one template choice: evolving them costs as much as measuring several.
_SKETCHES_FOR_ONE: Final = 2
#: Stored outcomes of a workload's sketches that a new search learns from.
_REMEMBERED: Final = 64
#: Outcomes wait this long at most before they are stored.
_FLUSH_S: Final = 1.0
#: A candidate this much slower than its operator's best is not measured more exactly.
_HOPELESS: Final = 2.0
#: Nearest workloads whose best choices are tried first.
_NEAREST: Final = 3
#: Rounds in a row without anything new after which a space of sketches counts as exhausted.
_EMPTY_ROUNDS: Final = 2
#: Candidates of an operator that are compared again at the end, if they are within this ratio of the best.
_CONFIRMED: Final = 4
_CONFIRMED_RATIO: Final = 1.15
#: A variant that takes at most so many times as long as the chosen one, alone, may be the better one in the model.
_NEARLY: Final = 1.3
#: Seconds that are kept for comparing the best of one operator, up to a share of the search.
_CONFIRM_S: Final = 0.6
_CONFIRM_SHARE: Final = 0.1
#: Name and format of the stored cost model of sketches.
_SKETCH_MODEL: Final = "sketches"
_SKETCH_FORMAT: Final = 1
#: Trees after which a model is not gone on from: it would only grow.
_MAX_ROUNDS: Final = 360
#: No schedule at all, which is what the best of an operator without a template has to beat.
_UNSCHEDULED: Final = "[[],[]]"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """How a search ended."""

    trials: int  #: measured by this search, failures too
    failures: int
    elapsed_s: float
    reason: str  #: "trials", "seconds", "exhausted", or "none" where nothing was to be measured


@dataclass(frozen=True, slots=True)
class _Pick:
    """A part of one round: so many candidates of one arm."""

    search: Search
    arm: Arm
    count: int
    is_first: bool = False  #: of its operator


@dataclass(frozen=True, slots=True)
class _Proposal:
    pick: _Pick
    candidate: Candidate


@dataclass(slots=True)
class Scheduler:
    """One search over the operators of one model. Collaborators are given; none is made here.

    `run(operators, config)` searches; `choice()` then, or at any moment during it, says how each operator is compiled.
    With a tuner of "none", or no trials, `run` only loads what is known, and `choice()` goes by records and models.

    `templates` by name; a variant whose template is not among them is treated as if it had none.
    """

    server: ForkServer
    target: str
    machine: Cpu | Gpu
    templates: Mapping[str, Template[Any]]
    builder: Builder
    runner: Runner
    records: Records
    report: Report
    roof: Roof | None = None  #: of the device; without it no operator is known to be as fast as it can be
    last_cache_bytes: int = 32 << 20  #: of the device: what fits there is thought to be there
    sketches: Space = field(default_factory=Space)
    batch: int = 4  #: candidates of one operator in one round
    operators_at_once: int = 2  #: in one round: proposals are made side by side, one a core
    clock: Callable[[], float] = time.monotonic
    _searches: list[Search] = field(default_factory=list)
    _experience: dict[str, TemplateExperience] = field(default_factory=dict)
    _spaces: dict[str, ConfigSpace] = field(default_factory=dict)  #: by workload digest
    _refused: dict[str, set[ConfigKey]] = field(default_factory=dict)  #: choices that a template could not apply
    #: By operator: median seconds, candidate and library of its best, fastest first.
    _kept: dict[str, list[tuple[float, Candidate, Built]]] = field(default_factory=dict)
    _samples: dict[tuple[str, str], Sample] = field(default_factory=dict)
    _remembered: set[str] = field(default_factory=set)
    _sketch_start: CostModel | None = None
    _sketch_start_on: int = 0
    _sketch_model: CostModel | None = None
    _sketches_trained_on: int = 0
    _guesses: dict[str, Choice] = field(default_factory=dict)
    _config: SearchConfig = field(default_factory=SearchConfig)
    _began_s: float = 0.0  #: by the clock, as if earlier attempts had come right before this one
    _trials: int = 0  #: of all attempts
    _end_s: float = 0.0  #: of proposing; comparing has a little more

    def run(
        self,
        operators: Sequence[Operator],
        config: SearchConfig,
        *,
        trials_before: int = 0,
        elapsed_before_s: float = 0,
    ) -> SearchResult:
        """Search until a limit is reached or nothing more is expected. `…_before` were spent by earlier attempts."""
        start_s = self.clock()
        self._config, self._trials, self._began_s = config, trials_before, start_s - elapsed_before_s
        measures = config.tuner != "none" and config.trials > 0
        self._load(operators, config.tuner if measures else "none")
        if not measures:
            return SearchResult(0, 0, self.clock() - start_s, "none")
        self._end_s = self._began_s + config.seconds
        self._end_s -= min(_CONFIRM_SHARE * config.seconds, _CONFIRM_S * len(operators))
        failures = round_number = 0
        while True:
            left = config.trials - self._trials
            if left <= 0:
                reason = "trials"
                break
            if self.clock() >= self._end_s:
                reason = "seconds"
                break
            picks = self._pick(left)
            if not picks:
                reason = "exhausted"
                break
            round_number += 1
            proposals = self._propose(picks, config.seed * 1_000_003 + self._trials + round_number)[:left]
            failures += self._measure(proposals)
            self._train({pick.arm.variant.workload.template for pick in picks if pick.arm.tuner == TEMPLATE})
            self._update_promises(picks)
            self.server.recycle_if_grown()
            self._report_progress("search", [_told(pick) for pick in picks])
        self._confirm()
        self._save()
        return SearchResult(self._trials - trials_before, failures, self.clock() - start_s, reason)

    def choice(self) -> dict[str, Choice]:
        """By operator's name, how it would be compiled now.

        The best record of any of its variants; where nothing was measured, what the cost model of its preferred
        variant's template thinks best, else that template's first guess; without a template, the variant as it is.
        """
        operators = [search.operator for search in self._searches]
        chosen = self.records.chosen(operators)
        self._guess([o for o in operators if o.name not in chosen and o.name not in self._guesses])
        choices = {}
        for operator in operators:
            if operator.name in chosen:
                variant, trial = chosen[operator.name]
                choices[operator.name] = Choice(variant, trial, trial.config, trial.trace)
            else:
                choices[operator.name] = self._guesses[operator.name]
        return choices

    def second_choice(self) -> dict[str, Choice]:
        """`choice()` with the best of another variant wherever that is nearly as fast alone; empty if it nowhere is.

        Within a model variants get into each other's way in another manner than alone: which of the two is better for
        the whole is for a measurement of the whole to say.
        """
        first = self.choice()
        second = dict(first)
        for search in self._searches:
            chosen = first[search.operator.name]
            if not isinstance(chosen.trial and chosen.trial.outcome, Measured):
                continue
            assert chosen.trial is not None
            assert isinstance(chosen.trial.outcome, Measured)
            others = [
                (best[1], order, variant, best[0])
                for order, variant in enumerate(search.operator.variants)
                if variant != chosen.variant and (best := self.records.best(variant.workload.digest)) is not None
            ]
            if others:
                median_s, _, variant, trial = min(others, key=lambda other: other[:2])
                if median_s <= _NEARLY * chosen.trial.outcome.median_s:
                    second[search.operator.name] = Choice(variant, trial, trial.config, trial.trace)
        return second if second != first else {}

    # What is known at the beginning

    def _load(self, operators: Sequence[Operator], tuner: str) -> None:
        self._searches = []
        for operator in operators:
            arms, limit = arms_of(operator, frozenset(self.templates), tuner if tuner != "none" else "auto")
            for arm in arms:
                self._load_arm(arm)
            self._searches.append(Search(operator, arms, self._floor_s(operator), limit))
            for variant in operator.variants:
                self._load_template(variant)
        if any(arm.tuner == SKETCHES for search in self._searches for arm in search.arms):
            self._load_sketch_model()
        self._train({*self._experience})
        self._save()

    def _load_arm(self, arm: Arm) -> None:
        """How far earlier searches have come with it."""
        for trial in self.records.of(arm.variant.workload.digest):
            if (trial.config is None) != (arm.tuner == SKETCHES):
                continue
            arm.observe(trial.outcome.median_s if isinstance(trial.outcome, Measured) else None, trial.config)
        arm.dry_trials = 0  # the store does not tell in which order they came

    def _load_template(self, variant: Variant) -> None:
        name = variant.workload.template
        if name is not None and name in self.templates and name not in self._experience:
            experience = TemplateExperience(self.templates[name], self.machine, self.records, self.report)
            experience.load()
            self._experience[name] = experience

    def _load_sketch_model(self) -> None:
        stored = self.records.cost_model(_SKETCH_MODEL)
        if stored is None or stored.format_version != _SKETCH_FORMAT:
            return
        model = CostModel(stored.booster_json)
        try:
            problem = None
            if model.feature_count != cost_model.ROW_FEATURES:
                problem = f"it takes {model.feature_count} features, a store has {cost_model.ROW_FEATURES}"
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            self.report("warning", {"message": f"the stored cost model {_SKETCH_MODEL!r} was discarded: {problem}"})
            return
        self._sketch_model = model
        if model.rounds <= _MAX_ROUNDS:
            self._sketch_start, self._sketch_start_on = model, stored.trained_on

    def _floor_s(self, operator: Operator) -> float:
        """What no schedule of it is believed to be faster than: its operations at the peak, its bytes at the speed of
        memory. What lies in a cache is not bounded by memory: data that fit into one, for the kernel before has just
        written them, and weights of which all copies fit."""
        if self.roof is None:
            return 0.0
        moved = operator.bytes
        if moved <= self.last_cache_bytes:
            weights = operator.constant_bytes
            moved = weights if weights * sampling.MAX_COPIES > self.last_cache_bytes else 0.0
        return max(operator.flops / self.roof.flops_per_s, moved / self.roof.bytes_per_s)

    # Where the next round goes

    def _pick(self, left: int) -> list[_Pick]:
        """The parts of the next round. Deterministic: ties go to the operator that comes first in the model."""
        searches = [s for s in self._searches if s.is_open]
        unseen = [s for s in searches if s.trials == 0]
        if unseen:
            # An interrupted search shall have covered what an inference does most of.
            unseen.sort(key=lambda s: (-s.operator.weight * s.operator.flops, -s.operator.weight * s.operator.bytes))
            picks = [pick for s in unseen[: self.operators_at_once] for pick in self._first_picks(s)]
        else:
            assumed_s = {s.operator.name: self._assumed_s(s) for s in searches}
            searches.sort(key=lambda s: -s.expected_gain_s(assumed_s[s.operator.name]))
            picks = [self._next_pick(s) for s in searches[: self.operators_at_once]]
        bounded: list[_Pick] = []
        for pick in picks:
            count = min(pick.count, left - sum(p.count for p in bounded))
            if count > 0:
                bounded.append(_Pick(pick.search, pick.arm, count, pick.is_first))
        return bounded

    def _first_picks(self, search: Search) -> list[_Pick]:
        """The first batch of an operator, shared out over its templates, one at least for each."""
        arms = [arm for arm in search.arms if arm.tuner == TEMPLATE]
        if not arms:
            return [_Pick(search, search.arms[0], self.batch * _SKETCHES_FOR_ONE, is_first=True)]
        limit = search.trial_limit or max(self.batch, len(arms))
        counts = [limit // len(arms) + (number < limit % len(arms)) for number in range(len(arms))]
        return [_Pick(search, arm, count) for arm, count in zip(arms, counts, strict=True)]

    def _next_pick(self, search: Search) -> _Pick:
        arm = search.next_arm()
        assert arm is not None  # it is open
        count = self.batch if arm.tuner == TEMPLATE else self.batch * _SKETCHES_FOR_ONE
        return _Pick(search, arm, count)

    def _assumed_s(self, search: Search) -> float:
        """What one call takes, or is thought to take at the speed of what has been measured."""
        if search.best_s is not None:
            return search.best_s
        known = [(s.operator.flops, s.best_s) for s in self._searches if s.best_s is not None]
        flops, seconds = (sum(column) for column in zip(*known, strict=True)) if known else (0.0, 0.0)
        if not flops or not seconds:
            return search.floor_s
        return max(search.floor_s, search.operator.flops * seconds / flops)

    @property
    def _predicted_s(self) -> float | None:
        """An inference as it would be compiled now; operators without a measured trial at the speed of the others."""
        if all(search.best_s is None for search in self._searches):
            return None
        return sum(search.operator.weight * self._assumed_s(search) for search in self._searches)

    # Candidates

    def _propose(self, picks: Sequence[_Pick], seed: int) -> list[_Proposal]:
        deadline_s = max(1.0, min(_PROPOSE_TIMEOUT_S, self._end_s - self.clock()))
        asked: list[tuple[_Pick, list[Config]]] = []
        steps = []
        for offset, pick in enumerate(picks):
            part_seed = (seed * 31 + offset) % (2**31 - 1) + 1
            if pick.arm.tuner == TEMPLATE:
                configs = self._choose_configs(pick, part_seed)
                if not configs:
                    pick.arm.exhausted = True
                    continue
                steps.append(self._scheduling(pick.arm.variant, configs))
            else:
                configs = []
                steps.append(self._sketching(pick, part_seed, deadline_s))
            asked.append((pick, configs))
        proposals = []
        for (pick, configs), answer in zip(
            asked, self.server.call_all(steps, at_once=self.operators_at_once), strict=True
        ):
            if isinstance(answer, ChildFailed):
                if self.clock() < self._end_s:
                    self._proposal_failed(pick, configs, answer)
            elif pick.arm.tuner == TEMPLATE:
                proposals += self._scheduled(pick, configs, answer)
            else:
                proposals += self._sketched(pick, answer)
        return proposals

    def _choose_configs(self, pick: _Pick, seed: int) -> list[Config]:
        workload = pick.arm.variant.workload
        assert workload.template is not None
        assert workload.geometry is not None
        experience = self._experience[workload.template]
        best = pick.arm.best_config
        return self._space(pick.arm.variant).choose(
            pick.count,
            known=self._tried(pick.arm.variant),
            best=best,
            near=experience.near(workload.digest, workload.geometry, _NEAREST) if best is None else (),
            model=experience.model,
            rng=random.Random(seed),
        )

    def _scheduling(self, variant: Variant, configs: list[Config]) -> Step:
        assert variant.workload.template is not None
        template = self.templates[variant.workload.template]
        arguments = (variant.workload, template, self.machine, configs)
        return Step(forked_steps.schedule_configs, arguments, _SCHEDULE_TIMEOUT_S)

    def _sketching(self, pick: _Pick, seed: int, deadline_s: float) -> Step:
        workload = pick.arm.variant.workload
        self._remember(pick.arm.variant)
        model = None if pick.arm.unguided else self._sketch_model
        parents = [
            (trial.trace, trial.outcome.run_s)
            for trial, _ in self.records.top(workload.digest, self.sketches.parents)
            if isinstance(trial.outcome, Measured) and trial.config is None and trial.trace != _UNSCHEDULED
        ]
        # What was measured before is offered again, and what breaks the register rule comes last: ask for more.
        count = 2 * pick.count + len(parents)
        arguments = (self.target, workload, self.sketches, parents, model, self.machine, count, seed)
        return Step(forked_steps.propose, arguments, deadline_s)

    def _scheduled(self, pick: _Pick, configs: Sequence[Config], traces: Sequence[str | None]) -> list[_Proposal]:
        variant = pick.arm.variant
        proposals = []
        for config, trace in zip(configs, traces, strict=True):
            if trace is None:
                self._refused.setdefault(variant.workload.digest, set()).add(key_of(config))
                self._warn(pick, f"template {variant.workload.template!r} cannot apply {json.dumps(dict(config))}")
            else:
                candidate = Candidate(variant.workload, trace, config)
                if self.records.outcome(candidate) is None:
                    proposals.append(_Proposal(pick, candidate))
        return proposals

    def _sketched(self, pick: _Pick, traces: Sequence[str]) -> list[_Proposal]:
        workload = pick.arm.variant.workload
        first = [_UNSCHEDULED] if pick.is_first else []
        found = [Candidate(workload, trace) for trace in [*first, *traces]]
        new = [candidate for candidate in found if self.records.outcome(candidate) is None][: pick.count]
        pick.arm.empty_rounds = 0 if new else pick.arm.empty_rounds + 1
        pick.arm.exhausted = pick.arm.empty_rounds >= _EMPTY_ROUNDS
        return [_Proposal(pick, candidate) for candidate in new]

    def _proposal_failed(self, pick: _Pick, configs: Sequence[Config], failure: ChildFailed) -> None:
        if pick.arm.tuner == TEMPLATE:
            # One of them hung or crashed; there are others.
            refused = self._refused.setdefault(pick.arm.variant.workload.digest, set())
            refused.update(key_of(config) for config in configs)
        else:
            # Evolution of some operators never returns from TVM's arithmetic; sampling them still does.
            pick.arm.exhausted = pick.arm.unguided or self._sketch_model is None
            pick.arm.unguided = True
        self._warn(pick, f"proposal {failure}")

    def _tried(self, variant: Variant) -> set[ConfigKey]:
        digest = variant.workload.digest
        return {*self.records.configs(digest), *self._refused.get(digest, ())}

    def _space(self, variant: Variant) -> ConfigSpace:
        workload = variant.workload
        if workload.digest not in self._spaces:
            assert workload.template is not None
            template = self.templates[workload.template]
            self._spaces[workload.digest] = ConfigSpace(template, workload.geometry or {}, self.machine)
        return self._spaces[workload.digest]

    def _guess(self, operators: Sequence[Operator]) -> None:
        """Fill `_guesses`: for each operator the first of its choices that its template can be applied with."""
        waiting = [(operator, self._guessable(operator)) for operator in operators]
        while waiting:
            asked = []
            for operator, choices in waiting:
                choice = next(choices, None)
                if choice is None:
                    self._guesses[operator.name] = Choice(operator.variants[0], None, None, None)
                else:
                    asked.append((operator, choices, *choice))
            steps = [self._scheduling(variant, [config]) for _, _, variant, config in asked]
            answers = self.server.call_all(steps, at_once=self.operators_at_once)
            waiting = []
            for (operator, choices, variant, config), answer in zip(asked, answers, strict=True):
                if isinstance(answer, ChildFailed):
                    self.report("warning", {"operator": operator.name, "message": f"first guess {answer}"})
                elif answer[0] is not None:
                    self._guesses[operator.name] = Choice(variant, None, config, answer[0])
                    continue
                waiting.append((operator, choices))

    def _guessable(self, operator: Operator) -> Iterator[tuple[Variant, Config]]:
        """What may be guessed for an operator, the likeliest first: few choices of each variant's template."""
        for variant in operator.variants:
            workload = variant.workload
            if workload.template is None or workload.template not in self.templates:
                continue
            experience = self._experience[workload.template]
            configs = self._space(variant).choose(
                3,
                known=self._tried(variant),
                best=None,
                near=experience.near(workload.digest, workload.geometry or {}, _NEAREST),
                model=experience.model,
                rng=random.Random(self._config.seed),
            )
            yield from ((variant, config) for config in configs)

    # Outcomes

    def _measure(self, proposals: Sequence[_Proposal]) -> int:
        """Build all, then run one after the other; nothing is built while something is measured. How many failed."""
        waiting: list[tuple[_Proposal, Measured | Failed]] = []
        flushed_s = self.clock()
        failed = 0

        def flush() -> None:
            """Into the store first: what an event says of a trial is true after a crash too."""
            nonlocal flushed_s
            self.records.add([_trial(p.candidate, outcome) for p, outcome in waiting])
            for proposal, outcome in waiting:
                self._trials += 1
                self._report_trial(proposal, outcome)
            waiting.clear()
            flushed_s = self.clock()

        before_s = {id(p.pick): (p.pick, p.pick.arm.best_s) for p in proposals}
        built_all = self.builder.build([proposal.candidate for proposal in proposals])
        pairs = list(zip(proposals, built_all, strict=True))
        number = 0
        while number < len(pairs):
            group = pairs[number : number + self.runner.at_once]
            if number and self.clock() >= self._end_s and any(isinstance(built, Built) for _, built in group):
                self._drop(built_all[number:])
                break
            for (proposal, built), outcome in zip(group, self._run(group), strict=True):
                failed += isinstance(outcome, Failed)
                self._learn(proposal, built, outcome)
                waiting.append((proposal, outcome))
            number += len(group)
            if self.clock() - flushed_s >= _FLUSH_S:
                flush()
        if waiting:
            flush()
        for pick, before in before_s.values():
            pick.arm.end_round(before)
        return failed

    def _run(self, group: Sequence[tuple[_Proposal, Built | Failed]]) -> list[Measured | Failed]:
        """One outcome each; what did not build has failed already."""
        wanted = []
        for proposal, built in group:
            if isinstance(built, Built):
                best_s = proposal.pick.search.best_s
                wanted.append((built, None if best_s is None else _HOPELESS * best_s))
        measured = iter(self.runner.run_all(wanted) if wanted else ())
        return [next(measured) if isinstance(built, Built) else built for _, built in group]

    def _learn(self, proposal: _Proposal, built: Built | Failed, outcome: Measured | Failed) -> None:
        candidate = proposal.candidate
        workload = candidate.workload
        median_s = outcome.median_s if isinstance(outcome, Measured) else None
        proposal.pick.arm.observe(median_s, candidate.config)
        if workload.template is not None and candidate.config is not None:
            self._experience[workload.template].learn(workload.geometry or {}, _trial(candidate, outcome))
        if not isinstance(built, Built):
            return
        if built.features is not None:
            sample = Sample(workload.digest, built.features, median_s)
            self._samples[workload.digest, candidate.digest] = sample
        # Libraries of an operator's best stay until they are compared; all others are removed at once.
        kept = self._kept.setdefault(proposal.pick.search.operator.name, [])
        if median_s is None:
            self.builder.remove(built)
        else:
            kept.append((median_s, candidate, built))
            kept.sort(key=lambda k: (k[0], k[1].digest))
            best_s = kept[0][0]
            while len(kept) > _CONFIRMED or kept[-1][0] > _CONFIRMED_RATIO * best_s:
                self.builder.remove(kept.pop()[2])

    def _drop(self, unused: Sequence[Built | Failed]) -> None:
        for built in unused:
            if isinstance(built, Built):
                self.builder.remove(built)

    # The best again

    def _confirm(self) -> None:
        """Measure the best few of each operator again, in turns, and choose by that.

        The lowest of many noisy medians is too low (the winner's curse), and what the machine did at the time favours
        one candidate over another; measured in turns they are comparable. Heavy operators come first, in case the time
        does not suffice for all."""
        searches = [s for s in self._searches if s.best_s is not None]
        searches.sort(key=lambda s: -s.operator.weight * (s.best_s or 0.0))
        for search in searches:
            if self.clock() >= self._began_s + self._config.seconds:
                break
            contenders = self._contenders(search)
            if len(contenders) < 2:
                continue
            candidates = [candidate for candidate, _ in contenders]
            built = self._libraries(search, candidates)
            runnable = [(c, b) for c, b in zip(candidates, built, strict=True) if isinstance(b, Built)]
            outcomes = self.runner.compare([b for _, b in runnable])
            self._drop(built)
            if isinstance(outcomes, Failed):
                self.report("warning", {"operator": search.operator.name, "message": f"comparing: {outcomes.message}"})
                continue
            told: list[Json] = []
            for (candidate, _), outcome in zip(runnable, outcomes, strict=True):
                self.records.confirm(candidate.workload.digest, {candidate.digest: outcome})
                run_s = next(median_s for c, median_s in contenders if c is candidate)
                told.append({"trace": candidate.digest, "run_s": run_s, "confirmed_s": outcome.median_s})
            self._report_progress("confirm", [{"operator": search.operator.name, "candidates": told}])
        for kept in self._kept.values():
            self._drop([built for _, _, built in kept])
        self._kept.clear()

    def _contenders(self, search: Search) -> list[tuple[Candidate, float]]:
        """The best of an operator over all its variants, fastest first, with their medians."""
        found = [
            (Candidate(variant.workload, trial.trace, trial.config), median_s)
            for variant in search.operator.variants
            for trial, median_s in self.records.top(variant.workload.digest, _CONFIRMED)
        ]
        found.sort(key=lambda f: (f[1], f[0].digest))
        return [(c, median_s) for c, median_s in found[:_CONFIRMED] if median_s <= _CONFIRMED_RATIO * found[0][1]]

    def _libraries(self, search: Search, candidates: Sequence[Candidate]) -> list[Built | Failed]:
        """Those that were kept, and those of earlier jobs built again."""
        kept = {(c.workload.digest, c.digest): b for _, c, b in self._kept.pop(search.operator.name, [])}
        missing = [c for c in candidates if (c.workload.digest, c.digest) not in kept]
        again = dict(zip(missing, self.builder.build(missing), strict=True)) if missing else {}
        wanted = [kept.pop((c.workload.digest, c.digest)) if c not in again else again[c] for c in candidates]
        self._drop(list(kept.values()))
        return wanted

    # Cost models

    def _remember(self, variant: Variant) -> None:
        """Learn from what the store holds of a workload's sketches already."""
        workload = variant.workload
        if workload.digest in self._remembered:
            return
        self._remembered.add(workload.digest)
        top = [(t, s) for t, s in self.records.top(workload.digest, 10**9) if t.config is None]
        # Features cost as much as scheduling the candidate again: of many, a few from the best to the worst.
        top = [(t, s) for t, s in top if (workload.digest, t.trace_digest) not in self._samples]
        top = top[:: max(1, -(-len(top) // _REMEMBERED))]
        if not top:
            return
        candidates = [Candidate(workload, trial.trace) for trial, _ in top]
        try:
            found = self.server.call_retrying(
                forked_steps.featurize, self.target, candidates, deadline_s=_FEATURIZE_TIMEOUT_S
            )
        except ChildFailed:
            return
        for (trial, median_s), features in zip(top, found, strict=True):
            if features is not None:
                self._samples[workload.digest, trial.trace_digest] = Sample(workload.digest, features, median_s)
        self._train(set())

    def _train(self, templates: Collection[str | None]) -> None:
        """Train anew what has learnt a fifth more than the last time."""
        for name in sorted(name for name in templates if name is not None):
            self._experience[name].train(self.server, self._config.seed)
        if len(self._samples) < max(cost_model.MIN_SAMPLES, self._sketches_trained_on * 1.2):
            return
        try:
            model = self.server.call_retrying(
                cost_model.train, list(self._samples.values()), self._config.seed, self._sketch_start,
                deadline_s=_TRAIN_TIMEOUT_S,
            )  # fmt: skip
        except ChildFailed as failure:
            self.report("warning", {"message": f"the cost model was not trained: {failure}"})
            return
        self._sketches_trained_on = len(self._samples)
        self._sketch_model = model if model is not None else self._sketch_model

    def _update_promises(self, picks: Sequence[_Pick]) -> None:
        """What the cost models expect of what is left, for the arms that a round was spent on."""
        for arm in [pick.arm for pick in picks if pick.arm.tuner == TEMPLATE]:
            workload = arm.variant.workload
            assert workload.template is not None
            model = self._experience[workload.template].model
            if model is not None and arm.best_config is not None:
                tried = self._tried(arm.variant)
                arm.promise = self._space(arm.variant).promise(arm.best_config, tried, model)

    def _save(self) -> None:
        """Cost models that have learnt something, for the jobs that come."""
        for experience in self._experience.values():
            experience.save()
        if self._sketch_model is not None and self._sketches_trained_on:
            trained_on = self._sketch_start_on + self._sketches_trained_on
            note = "MetaSchedule's per-store features"
            stored = StoredCostModel(_SKETCH_FORMAT, trained_on, self._sketch_model.booster_json, note)
            self.records.put_cost_model(_SKETCH_MODEL, stored)

    # Events

    def _warn(self, pick: _Pick, message: str) -> None:
        self.report(
            "warning", {"operator": pick.search.operator.name, "variant": pick.arm.variant.name, "message": message}
        )

    @property
    def _left_s(self) -> float:
        return round(max(0.0, self._began_s + self._config.seconds - self.clock()), 1)

    def _report_trial(self, proposal: _Proposal, outcome: Measured | Failed) -> None:
        search, arm = proposal.pick.search, proposal.pick.arm
        self.report(
            "trial",
            {
                "stage": "search",
                "trial": self._trials,
                "trials": self._config.trials,
                "operator": search.operator.name,
                "variant": arm.variant.name,
                "tuner": arm.tuner,
                "outcome": "measured" if isinstance(outcome, Measured) else outcome.kind.value,
                "message": None if isinstance(outcome, Measured) else outcome.message[:500],
                "run_s": outcome.median_s if isinstance(outcome, Measured) else None,
                "best_s": search.best_s,
                "predicted_s": self._predicted_s,
                "left_s": self._left_s,
            },
        )

    def _report_progress(self, stage: str, operators: list[Json]) -> None:
        """What a round came to: the operators that it was spent on, and the whole model as it would be built now."""
        self.report(
            "progress",
            {
                "stage": stage,
                "trials_measured": self._trials,
                "trials": self._config.trials,
                "elapsed_s": round(self.clock() - self._began_s, 1),
                "seconds": self._config.seconds,
                "left_s": self._left_s,
                "predicted_s": self._predicted_s,
                "unmeasured": sum(search.best_s is None for search in self._searches),
                "operators": operators,
            },
        )


def _told(pick: _Pick) -> dict[str, Json]:
    """A part of a round, for its event."""
    return {
        "operator": pick.search.operator.name,
        "variant": pick.arm.variant.name,
        "tuner": pick.arm.tuner,
        "trials": pick.arm.trials,
        "best_s": pick.search.best_s,
        "arm_best_s": pick.arm.best_s,
        "bound_s": pick.search.floor_s or None,
    }


def _trial(candidate: Candidate, outcome: Measured | Failed) -> Trial:
    return Trial(candidate.workload.digest, candidate.trace, outcome, candidate.config)
