"""Which of a template's choices to try next. All are ranked, a few are tried: there are some thousands at most."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.search.cost_model import ConfigModel
from workers.search.records import key_of
from workers.search.templates.knobs import Config, Cpu, Geometry, Gpu, Template

#: The share of later proposals that is drawn at random (epsilon-greedy): what a model never sees it never learns.
_RANDOM_SHARE = 0.15


class ConfigSpace:
    """The choices of one template for one workload."""

    def __init__(self, template: Template[Any], geometry: Geometry, machine: Cpu | Gpu) -> None:
        self._template = template
        self._geometry = geometry
        self._machine = machine
        self.configs: Sequence[Config] = template.configs(geometry, machine)
        self._numbers = {key_of(config): number for number, config in enumerate(self.configs)}

    def __len__(self) -> int:
        return len(self.configs)

    @functools.cached_property
    def features(self) -> NDArray[np.float32]:
        """One row a choice."""
        rows = [self._template.features(self._geometry, config, self._machine) for config in self.configs]
        return np.array(rows, dtype=np.float32)

    @functools.cached_property
    def _values(self) -> NDArray[np.float64]:
        """The knobs of each choice on a scale where neighbours are 1 apart: the rank of each value among its knob's."""
        columns = []
        for knob in self._template.knobs:
            values = [config[knob] for config in self.configs]
            ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
            columns.append([ranks[value] for value in values])
        return np.array(columns, dtype=np.float64).reshape(len(columns), len(self.configs)).T

    def closest(self, config: Config) -> Config | None:
        """The choice of this workload that is most like another workload's; None if their knobs are not the same."""
        if not self.configs or set(config) != set(self._template.knobs):
            return None
        if (number := self._numbers.get(key_of(config))) is not None:
            return self.configs[number]
        # Sizes count by their ratio. Zero and below are flags.
        wanted = np.array([_scale(config[knob]) for knob in self._template.knobs])
        found = np.array([[_scale(own[knob]) for knob in self._template.knobs] for own in self.configs])
        return self.configs[int(np.argmin(((found - wanted) ** 2).sum(axis=1)))]

    def choose(
        self,
        count: int,
        *,
        known: Collection[frozenset[tuple[str, int]]],
        best: Config | None,
        near: Iterable[Config],
        model: ConfigModel | None,
        rng: random.Random,
    ) -> list[Config]:
        """Up to `count` choices that are not in `known`, those that are expected to be fast first.

        Before anything is measured (`best` is None): what the model ranks highest, what was best for the nearest
        workloads, the template's first guess, in turns. Afterwards the model's ranking, the neighbours of the best,
        and a few drawn at random. Deterministic for the state of `rng`.
        """
        if not self.configs:
            return []
        open_numbers = [number for key, number in self._numbers.items() if key not in known]
        chosen: dict[int, None] = {}
        drawn = iter(rng.sample(open_numbers, len(open_numbers)))
        ranked = iter(self._ranked(open_numbers, model)) if model is not None else drawn
        if best is None:
            firsts = [self._numbers[key_of(own)] for config in near if (own := self.closest(config)) is not None]
            firsts = [number for number in firsts if key_of(self.configs[number]) not in known]
            guess = [number for number in open_numbers if number == 0]
            first: list[Iterator[int]] = [ranked, iter(firsts), iter(guess)]
            sources = first if model is not None else [itertools.chain(firsts[:1], guess, firsts[1:], drawn)]
        else:
            neighbours = iter(self._neighbours(best, open_numbers, rng))
            for _ in range(count):
                if rng.random() < _RANDOM_SHARE:
                    _take(drawn, chosen)
            sources = [ranked, ranked, neighbours] if model is not None else [neighbours, drawn]
        turn = 0
        while len(chosen) < min(count, len(open_numbers)):
            # One source at least holds every open choice, so this ends.
            _take(sources[turn % len(sources)], chosen)
            turn += 1
        return [self.configs[number] for number in chosen][:count]

    def promise(self, best: Config, known: Collection[frozenset[tuple[str, int]]], model: ConfigModel) -> float:
        """The share of the best's time that the model believes the best choice not yet tried would save; 0 to 1."""
        open_numbers = [number for key, number in self._numbers.items() if key not in known]
        number = self._numbers.get(key_of(best))
        if not open_numbers or number is None:
            return 0.0
        scores = model.predict(self.features)
        return float(max(0.0, 1 - math.exp(scores[number] - scores[open_numbers].max())))

    def _ranked(self, numbers: Sequence[int], model: ConfigModel | None) -> list[int]:
        """By the model, best first; without one in the template's own order."""
        if model is None or not numbers:
            return list(numbers)
        scores = model.predict(self.features[list(numbers)])
        return [numbers[i] for i in np.argsort(-scores, kind="stable")]

    def _neighbours(self, best: Config, numbers: Sequence[int], rng: random.Random) -> list[int]:
        """The choices that differ least from the best, in a random order among equals."""
        own = self._numbers.get(key_of(best))
        if own is None or not numbers:
            return []
        steps = np.abs(self._values[list(numbers)] - self._values[own])
        # One knob that is moved far is nearer than several that are moved a little: knobs mean different things.
        distance = np.minimum(steps, 3).sum(axis=1) + 2 * (steps > 0).sum(axis=1)
        tie = [rng.random() for _ in numbers]
        return [numbers[i] for i in np.lexsort((tie, distance))]


def _take(source: Iterable[int], chosen: dict[int, None]) -> None:
    """The next of the source that is not chosen yet, if there is any."""
    for number in source:
        if number not in chosen:
            chosen[number] = None
            return


def _scale(value: int) -> float:
    return math.log2(value) + 1 if value > 0 else 0.0
