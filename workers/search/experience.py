"""What earlier searches of a scope teach about a template: what was fast for sizes near these, and its cost model.

The model is kept in the store from one job to the next. It is trained again when it was made for another version of the
template, or when a fifth more outcomes are known than it was trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tuning_db.keys import Json
from tuning_db.trials import Measured, StoredCostModel, Trial
from workers.search import cost_model
from workers.search.cost_model import ConfigModel, ConfigSample
from workers.search.forkserver import ChildFailed, ForkServer
from workers.search.records import Records
from workers.search.templates.knobs import Config, Cpu, Geometry, Gpu, Template

#: Outcomes of one template that a search learns from: the newest.
LIMIT: Final = 6000
#: Counts up when training or what a score means changes.
FORMAT: Final = 1
_TRAIN_TIMEOUT_S: Final = 30.0
_GROWTH: Final = 1.2


@dataclass(slots=True)
class TemplateExperience:
    """One template, over all workloads of the job's scope."""

    template: Template[Any]
    machine: Cpu | Gpu
    records: Records
    report: Callable[[str, dict[str, Json]], None]
    model: ConfigModel | None = None
    _samples: dict[tuple[str, frozenset[tuple[str, int]]], ConfigSample] = field(default_factory=dict)
    _best: dict[str, tuple[float, Geometry, Config]] = field(default_factory=dict)  #: by workload digest
    _known: int = 0  #: outcomes of the whole scope, also those beyond `LIMIT`
    _trained_on: int = 0  #: of them
    _stored_on: int = 0

    @property
    def name(self) -> str:
        """Under which the store keeps the model."""
        return f"template/{self.template.name}/{self.template.version}"

    def load(self) -> None:
        """What the store holds: outcomes, and the model if it is not stale. To be called once, before anything else."""
        self._known = self.records.experience_count(self.template.name)
        # Oldest first, as what this job adds comes last.
        for experience in reversed(self.records.experience(self.template.name, LIMIT)):
            self._add(experience.workload, experience.geometry, experience.config, experience.median_s)
        stored = self.records.cost_model(self.name)
        if stored is None or stored.format_version != FORMAT:
            return
        model = ConfigModel(stored.booster_json)
        problem = None
        try:
            count = model.feature_count
            sample = next(iter(self._samples.values()), None)
            if sample is not None and len(sample.features) != count:
                problem = f"it takes {count} features, a choice of {self.template.name!r} has {len(sample.features)}"
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            self.report("warning", {"message": f"the stored cost model {self.name!r} was discarded: {problem}"})
            return
        self.model, self._trained_on, self._stored_on = model, stored.trained_on, stored.trained_on

    def learn(self, geometry: Geometry, trial: Trial) -> None:
        """One more outcome, of this job."""
        if trial.config is not None:
            median_s = trial.outcome.median_s if isinstance(trial.outcome, Measured) else None
            self._add(trial.workload, geometry, trial.config, median_s)
            self._known += 1

    def near(self, workload: str, geometry: Geometry, count: int) -> list[Config]:
        """The best choices of the `count` other workloads whose sizes are nearest, by ratio."""
        found = sorted(
            (_distance(geometry, other), digest, config)
            for digest, (_, other, config) in self._best.items()
            if digest != workload and set(other) == set(geometry)
        )
        return [config for _, _, config in found[:count]]

    def train(self, server: ForkServer, seed: int) -> None:
        """Train anew if a fifth more is known than the last time."""
        if len(self._samples) < cost_model.MIN_SAMPLES or self._known < self._trained_on * _GROWTH:
            return
        try:
            model = server.call_retrying(
                cost_model.train_configs, list(self._samples.values())[-LIMIT:], seed, deadline_s=_TRAIN_TIMEOUT_S
            )
        except ChildFailed as failure:
            self.report("warning", {"message": f"the cost model {self.name!r} was not trained: {failure}"})
            return
        self._trained_on = self._known
        self.model = model if model is not None else self.model

    def save(self) -> None:
        """Into the store, if more is known than what the stored model was trained on."""
        if self.model is not None and self._trained_on > self._stored_on:
            note = json.dumps({"template": self.template.name, "version": self.template.version}, sort_keys=True)
            stored = StoredCostModel(FORMAT, self._trained_on, self.model.booster_json, note)
            self.records.put_cost_model(self.name, stored)
            self._stored_on = self._trained_on

    def _add(self, workload: str, geometry: Geometry, config: Config, median_s: float | None) -> None:
        if set(config) != set(self.template.knobs):
            return  # of a version with other knobs
        try:
            features = tuple(self.template.features(geometry, config, self.machine))
        except (KeyError, ArithmeticError):
            return  # of a version with another geometry
        self._samples[workload, frozenset(config.items())] = ConfigSample(workload, features, median_s)
        if median_s is not None and (workload not in self._best or median_s < self._best[workload][0]):
            self._best[workload] = median_s, geometry, config


def _distance(one: Geometry, other: Geometry) -> float:
    return math.sqrt(sum((_scale(one[name]) - _scale(other[name])) ** 2 for name in one))


def _scale(size: int) -> float:
    return math.log2(size) + 1 if size > 0 else float(size)
