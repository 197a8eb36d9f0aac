"""The stored outcomes of a job's operators, within exactly one scope: what is known already is not measured again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import tvm
import tvm_ffi
from tvm.s_tir import meta_schedule as ms

from tuning_db.jobs import Claim
from tuning_db.keys import RecordScope
from tuning_db.store import TuningStore
from tuning_db.trials import Failed, Measured, Trial, Workload
from workers.search.candidates import Candidate, Operator
from workers.search.forked_steps import commit_record, to_tvm_workload


class Records:
    """One job's view of the store.

    MetaSchedule's own databases ignore the target in their queries; this one holds one scope (device, target,
    toolchain, pipeline and options), so a record of anything else cannot reach it.
    """

    def __init__(self, store: TuningStore, claim: Claim, scope: RecordScope) -> None:
        self._store = store
        self._claim = claim
        self._scope = scope
        self._outcomes: dict[str, dict[str, Trial]] = {}

    def adopt(self, modules: Sequence[tvm.ir.IRModule]) -> list[Workload]:
        """The workload under which each module's records are kept, and load those.

        It is the stored one that is structurally equal, whatever its variables are called, else the module itself,
        which is stored. The hash alone decides nothing: equality is compared.
        """
        fresh = [Workload(*map(str, ms.database.Workload(module).as_json())) for module in modules]
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
            adopted.append(equal[0])
            spellings |= {known.digest: equal[0].digest for known in equal}
        self._store.put_workloads(self._scope, adopted)
        self._outcomes = {workload.digest: {} for workload in adopted}
        for trial in self._store.trials(self._scope, list(spellings)):
            digest = spellings[trial.workload]
            self._outcomes[digest].setdefault(trial.trace_digest, replace(trial, workload=digest))
        return adopted

    def add(self, trials: Sequence[Trial]) -> None:
        """Into the store first, then into this view. StaleAttempt if the job is no longer ours."""
        self._store.add_trials(self._claim, self._scope, trials)
        for trial in trials:
            self._outcomes[trial.workload].setdefault(trial.trace_digest, trial)

    def of(self, workload: str) -> Iterable[Trial]:
        """Every outcome known of a workload."""
        return self._outcomes[workload].values()

    def outcome(self, candidate: Candidate) -> Measured | Failed | None:
        """What is known of a candidate: it need not be measured."""
        trial = self._outcomes[candidate.workload.digest].get(candidate.digest)
        return None if trial is None else trial.outcome

    def best(self, workload: str) -> tuple[Trial, float] | None:
        """The measured trial with the lowest median, and that median in seconds; failures are never best."""
        measured = [
            (trial.outcome.median_s, digest, trial)
            for digest, trial in self._outcomes[workload].items()
            if isinstance(trial.outcome, Measured)
        ]
        if not measured:
            return None
        median_s, _, trial = min(measured, key=lambda m: m[:2])
        return trial, median_s

    def chosen(self, operators: Iterable[Operator]) -> dict[str, Trial]:
        """The record that each operator is compiled with: its best, where that beats the code without a schedule."""
        chosen = {}
        for operator in operators:
            best = self.best(operator.workload.digest)
            if best is not None and best[1] < operator.untuned_s:
                chosen[operator.workload.digest] = best[0]
        return chosen

    def database(self, operators: Iterable[Operator], target: tvm.target.Target) -> ms.database.MemoryDatabase:
        """The chosen records as MetaSchedule applies them: one a workload, so that it has no choice."""
        database = ms.database.MemoryDatabase()
        workloads = {operator.workload.digest: operator.workload for operator in operators}
        for digest, trial in self.chosen(operators).items():
            assert isinstance(trial.outcome, Measured)
            commit_record(database, workloads[digest], trial.trace, trial.outcome.run_s, target)
        return database
