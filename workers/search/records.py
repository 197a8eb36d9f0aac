"""The stored outcomes of a job's operators, within exactly one scope: what is known already is not measured again."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm.s_tir import meta_schedule as ms

from tuning_db.jobs import Claim
from tuning_db.keys import RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Experience, Failed, Measured, StoredCostModel, Trial, Workload
from workers.search.candidates import Candidate, Operator, Variant
from workers.search.forked_steps import to_tvm_workload
from workers.search.templates.knobs import Config, template_of

#: A config that can be looked up: its knobs and values, in no order.
ConfigKey: TypeAlias = frozenset[tuple[str, int]]


def key_of(config: Config) -> ConfigKey:
    return frozenset(config.items())


@dataclass(slots=True)
class _Known:
    """What is known of one workload. Kept up with each outcome: nothing is ever counted through again."""

    trials: dict[str, Trial] = field(default_factory=dict)  #: by trace digest
    configs: set[ConfigKey] = field(default_factory=set)
    ranking: list[tuple[float, str]] = field(default_factory=list)  #: median seconds and trace digest, fastest first
    confirmed: dict[str, Measured] = field(default_factory=dict)  #: by trace digest

    def add(self, trials: Iterable[Trial]) -> None:
        measured = []
        for trial in trials:
            digest = trial.trace_digest
            if digest in self.trials:
                continue
            self.trials[digest] = trial
            if trial.config is not None:
                self.configs.add(key_of(trial.config))
            if isinstance(trial.outcome, Measured):
                measured.append((trial.outcome.median_s, digest))
        before = self.ranking[:1]
        if len(measured) > 16:  # a history: sorted at once
            self.ranking = sorted(self.ranking + measured)
        else:
            for standing in measured:
                bisect.insort(self.ranking, standing)
        if self.ranking[:1] != before:
            # The new best was not among those that were compared: what they said of each other is out of date.
            self.confirmed.clear()


class Records:
    """One job's view of the store.

    MetaSchedule's own databases ignore the target in their queries; this one holds one scope (device, target,
    toolchain, pipeline and options), so a record of anything else cannot reach it.
    """

    def __init__(self, store: TuningStore, claim: Claim, scope: RecordScope) -> None:
        self._store = store
        self._claim = claim
        self._scope = scope
        self._known: dict[str, _Known] = {}

    def adopt(self, modules: Sequence[tvm.ir.IRModule]) -> list[Workload]:
        """The workload under which each module's records are kept, and load those.

        It is the stored one that is structurally equal, whatever its variables are called, else the module itself,
        which is stored. The hash alone decides nothing: equality is compared. Give the modules of all variants of all
        operators; template and geometry are read from the attributes of each one's function.
        """
        fresh = [_workload(module) for module in modules]
        stored: dict[str, list[Workload]] = {}
        for workload in self._store.workloads(self._scope, [w.structural_hash for w in fresh]):
            stored.setdefault(workload.structural_hash, []).append(workload)
        adopted = []
        spellings: dict[str, str] = {}
        for module, workload in zip(modules, fresh, strict=True):
            # Two jobs that met an operator at the same time may have stored it twice: the records of both are its own.
            equal = [
                known
                for known in stored.get(workload.structural_hash, ())
                if tvm_ffi.structural_equal(to_tvm_workload(known).mod, module)
            ] or [workload]
            # The attributes are part of what is equal, so they are the stored one's too, whatever its row says.
            adopted.append(replace(equal[0], template=workload.template, geometry=workload.geometry))
            spellings |= {known.digest: equal[0].digest for known in equal}
        self._store.put_workloads(self._scope, adopted)
        self._known |= {workload.digest: _Known() for workload in adopted}
        history: dict[str, list[Trial]] = {}
        for trial in self._store.trials(self._scope, list(spellings)):
            digest = spellings[trial.workload]
            history.setdefault(digest, []).append(replace(trial, workload=digest))
        for digest, trials in history.items():
            self._known[digest].add(trials)
        return adopted

    def add(self, trials: Sequence[Trial]) -> None:
        """Into the store first, then into this view. StaleAttempt if the job is no longer ours."""
        self._store.add_trials(self._claim, self._scope, trials)
        for trial in trials:
            self._known[trial.workload].add([trial])

    def confirm(self, workload: str, outcomes: Mapping[str, Measured]) -> None:
        """What trials, by trace digest, took when they were measured again in turns.

        It decides between them in this job's choice. The store keeps each trial's first outcome, which is comparable
        with all others of its workload, and these are not counted as trials.
        """
        self._known[workload].confirmed |= outcomes

    def of(self, workload: str) -> Collection[Trial]:
        """Every outcome known of a workload, in the order of the store."""
        return self._known[workload].trials.values()

    def configs(self, workload: str) -> Collection[ConfigKey]:
        """The choices of the workload's template whose outcome is known."""
        return self._known[workload].configs

    def outcome(self, candidate: Candidate) -> Measured | Failed | None:
        """What is known of a candidate: it need not be measured."""
        trial = self._known[candidate.workload.digest].trials.get(candidate.digest)
        return None if trial is None else trial.outcome

    def best(self, workload: str) -> tuple[Trial, float] | None:
        """The measured trial with the lowest median, and that median in seconds; failures are never best."""
        known = self._known[workload]
        if not known.ranking:
            return None
        median_s, digest = known.ranking[0]
        return known.trials[digest], median_s

    def top(self, workload: str, count: int) -> list[tuple[Trial, float]]:
        """The measured trials with the lowest medians, and those in seconds, fastest first."""
        known = self._known[workload]
        return [(known.trials[digest], median_s) for median_s, digest in known.ranking[:count]]

    def chosen(self, operators: Iterable[Operator]) -> dict[str, tuple[Variant, Trial]]:
        """By operator's name, the variant and the record that it would be compiled with now: the best of those that
        were confirmed in turns, else the best of all; nothing for an operator without a measured trial."""
        chosen = {}
        for operator in operators:
            standings = []
            for order, variant in enumerate(operator.variants):
                known = self._known[variant.workload.digest]
                for digest, outcome in known.confirmed.items():
                    standings.append((0, outcome.median_s, order, digest))
                if known.ranking and not known.confirmed:
                    standings.append((1, known.ranking[0][0], order, known.ranking[0][1]))
            if standings:
                _, _, order, digest = min(standings)
                variant = operator.variants[order]
                chosen[operator.name] = variant, self._known[variant.workload.digest].trials[digest]
        return chosen

    def experience(self, template: str, limit: int) -> list[Experience]:
        """Outcomes of this scope with a template, of whatever model, newest first."""
        return self._store.experience(self._scope, template, limit)

    def experience_count(self, template: str) -> int:
        return self._store.experience_count(self._scope, template)

    def cost_model(self, name: str) -> StoredCostModel | None:
        """The cost model that earlier jobs of this scope left."""
        return self._store.cost_model(self._scope, name)

    def put_cost_model(self, name: str, model: StoredCostModel) -> None:
        self._store.put_cost_model(self._scope, name, model)


def _workload(module: tvm.ir.IRModule) -> Workload:
    structural_hash, text = map(str, ms.database.Workload(module).as_json())
    template, geometry = template_of(module["main"]) or (None, None)
    return Workload(structural_hash, text, template, geometry)
