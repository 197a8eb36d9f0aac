"""Where the next trials of an operator go: each way to look for its schedules is an arm, and tells what it hopes for.

An operator's arms are its variants' templates and its variants' sketches. What an arm has shown (its best, how much the
last rounds gained, what the cost model expects of what is left) is turned into the seconds that its next round is
expected to save: a multi-armed choice that is greedy on expected improvement. Equal histories give equal choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.search.candidates import SKETCHES, TEMPLATE, Operator, Variant
from workers.search.templates.knobs import Config

#: The share of its time that an arm is assumed to win in a round before it has shown anything.
_FIRST_SHARE: Final = 0.3
#: The share that sketches are expected to win over templates that have stalled.
_SKETCH_SHARE: Final = 0.08
#: An improvement below this share is noise.
_NOISE: Final = 0.01
#: An arm has stalled when as many trials as it took to find its best found nothing better, but not fewer or more.
_PATIENCE: Final = 32
_MOST_PATIENCE: Final = 96
#: Templates make way for sketches earlier: after this many trials without a better one.
_SKETCH_PATIENCE: Final = 16
#: An arm none of whose first trials ran is given up.
_HOPELESS: Final = 12
#: An operator this near to its roof is left alone.
_NEAR_ROOF: Final = 1.05


@dataclass(slots=True)
class Arm:
    """One way to look for an operator's schedules."""

    variant: Variant
    tuner: str  #: candidates.TEMPLATE or candidates.SKETCHES
    trials: int = 0  #: of this arm, those of earlier jobs too
    rounds: int = 0  #: of this search
    best_s: float | None = None
    best_config: Config | None = None  #: of a template
    last_gain: float = 0.0  #: share of its time that the last round saved
    dry_trials: int = 0  #: since its best was found
    promise: float | None = None  #: share of its best that the cost model still expects to save; None without a model
    unguided: bool = False  #: guided proposals hung or crashed: its space is sampled instead
    empty_rounds: int = 0  #: in a row that proposed nothing new
    exhausted: bool = False

    @property
    def is_stalled(self) -> bool:
        if self.exhausted:
            return True
        if self.best_s is None:
            return self.trials >= _HOPELESS
        return self.dry_trials >= min(_MOST_PATIENCE, max(_PATIENCE, self.trials - self.dry_trials))

    @property
    def makes_way(self) -> bool:
        """Whether a template has had its chance, so that sketches may have theirs."""
        return self.is_stalled or self.dry_trials >= _SKETCH_PATIENCE

    def observe(self, median_s: float | None, config: Config | None) -> None:
        """One more trial, of this choice of the template; None seconds are a failure."""
        self.trials += 1
        if median_s is not None and (self.best_s is None or median_s < self.best_s * (1 - _NOISE)):
            self.dry_trials = 0
        else:
            self.dry_trials += 1
        if median_s is not None and (self.best_s is None or median_s < self.best_s):
            self.best_s, self.best_config = median_s, config

    def end_round(self, before_s: float | None) -> None:
        """A round has ended that began with a best of `before_s`."""
        self.rounds += 1
        self.last_gain = 0.0 if before_s is None or self.best_s is None else 1 - self.best_s / before_s

    def reachable_s(self, floor_s: float) -> float | None:
        """What its next round is expected to come to at best; None if nothing is known."""
        if self.best_s is None:
            return None
        share = _FIRST_SHARE / (1 + self.trials / 8) / (1 + self.dry_trials / 16)
        if self.promise is not None:
            # The model is trusted by half: it was trained on few, and it picks its own errors first.
            share = (share + min(0.5, self.promise) / (1 + self.dry_trials / 8)) / 2
        return max(floor_s, self.best_s * (1 - max(share, self.last_gain / 2)))


@dataclass(slots=True)
class Search:
    """One operator's search: its arms and how far they have come."""

    operator: Operator
    arms: list[Arm]
    floor_s: float  #: the roof's bound of one call; 0 where no roof is known
    trial_limit: int | None = None  #: for an operator that the chosen tuner does not search

    @property
    def best_s(self) -> float | None:
        return min((arm.best_s for arm in self.arms if arm.best_s is not None), default=None)

    @property
    def trials(self) -> int:
        return sum(arm.trials for arm in self.arms)

    @property
    def bound_s(self) -> float:
        """What no schedule is believed to be faster than. What was faster proves the roof too low, as it is when the
        machine was busy while the roof was measured: it says nothing then."""
        best_s = self.best_s
        return self.floor_s if best_s is None or best_s >= self.floor_s * (1 - _NOISE) else 0.0

    @property
    def is_open(self) -> bool:
        """Whether another round may be worth it."""
        if self.trial_limit is not None and self.trials >= self.trial_limit:
            return False
        best_s = self.best_s
        if best_s is not None and best_s <= self.bound_s * _NEAR_ROOF:
            return False
        return self.next_arm() is not None

    def next_arm(self) -> Arm | None:
        """The arm of the next round: the one that hopes for most. None if none hopes for anything."""
        arms = [arm for arm in self._playable() if not arm.is_stalled]
        arm = max(arms, key=self._gain_of, default=None)  # the first of equals
        return arm if arm is not None and (self.best_s is None or self._gain_of(arm) > 0) else None

    def expected_gain_s(self, assumed_s: float) -> float:
        """Seconds of an inference that another round is expected to save; `assumed_s` is what one call is thought to
        take where nothing has been measured."""
        arm = self.next_arm()
        if arm is None:
            return 0.0
        gain_s = self._gain_of(arm) if self.best_s is not None else _FIRST_SHARE * assumed_s
        return self.operator.weight * gain_s

    def _playable(self) -> list[Arm]:
        """Sketches where no template applies, where the templates have had their chance, or while they are ahead."""
        templates = [arm for arm in self.arms if arm.tuner == TEMPLATE]
        best_s = self.best_s
        return [
            arm
            for arm in self.arms
            if arm.tuner != SKETCHES
            or all(template.makes_way for template in templates)
            or (arm.best_s is not None and arm.best_s == best_s)
        ]

    def _gain_of(self, arm: Arm) -> float:
        best_s = self.best_s
        if best_s is None:
            return float(arm.trials == 0)
        reachable_s = arm.reachable_s(self.bound_s)
        if reachable_s is None:
            if arm.trials:
                return 0.0
            share = _FIRST_SHARE if arm.tuner == TEMPLATE else _SKETCH_SHARE
            reachable_s = max(self.bound_s, best_s * (1 - share))
        return max(0.0, best_s - reachable_s)


def arms_of(operator: Operator, templates: frozenset[str], tuner: str) -> tuple[list[Arm], int | None]:
    """The arms that `tuner` searches an operator by, and how many trials it is given at most, if that is bounded.

    An operator that has nothing to make sketches from is not left out of a search by sketches alone: its templates'
    first guesses are measured, one trial.
    """
    by_template = [Arm(v, TEMPLATE) for v in operator.variants if v.workload.template in templates]
    by_sketches = [Arm(v, SKETCHES) for v in operator.variants if v.sketchable]
    if tuner == TEMPLATE:
        return by_template, None
    if tuner == SKETCHES:
        return (by_sketches, None) if by_sketches else (by_template[:1], 1)
    return by_template + by_sketches, None
