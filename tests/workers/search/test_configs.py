"""Which choices of a template are proposed, on a template whose best is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.workers.search.samples import CPU, MatmulTemplate
from workers.search.configs import ConfigSpace
from workers.search.cost_model import ConfigModel, ConfigSample, train_configs
from workers.search.records import key_of
from workers.search.templates.knobs import Config, Geometry

TEMPLATE = MatmulTemplate()
GEOMETRY = {"m": 64, "n": 64, "k": 32}


def seconds_of(config: Config, geometry: Geometry) -> float:
    """Fastest with 8 rows and 16 columns, in parallel; slower with each doubling or halving."""
    away = abs(math.log2(config["rows"]) - 3) + abs(math.log2(config["columns"]) - 4)
    return geometry["m"] * geometry["n"] * geometry["k"] * 1e-9 * 1.5 ** (away + 2 * (1 - config["parallel"]))


def samples_of(geometry: Geometry, configs: Sequence[Config]) -> list[ConfigSample]:
    return [
        ConfigSample(str(geometry), tuple(TEMPLATE.features(geometry, c, CPU)), seconds_of(c, geometry))
        for c in configs
    ]


@pytest.fixture(scope="module")
def space() -> ConfigSpace:
    return ConfigSpace(TEMPLATE, GEOMETRY, CPU)


@pytest.fixture(scope="module")
def model() -> ConfigModel:
    """Trained on other sizes."""
    known: list[ConfigSample] = []
    for geometry in ({"m": 32, "n": 64, "k": 8}, {"m": 128, "n": 128, "k": 64}, {"m": 16, "n": 32, "k": 128}):
        known += samples_of(geometry, TEMPLATE.configs(geometry, CPU))
    trained = train_configs(known, 0)
    assert trained is not None
    return trained


def test_first_choices(space: ConfigSpace, model: ConfigModel) -> None:
    """Before anything was measured: the model's best, what was best for near workloads, and the first guess."""
    near: list[Config] = [{"rows": 2, "columns": 2, "parallel": 0}]
    chosen = space.choose(3, known=(), best=None, near=near, model=model, rng=random.Random(0))
    assert seconds_of(chosen[0], GEOMETRY) <= 1.5 * seconds_of({"rows": 8, "columns": 16, "parallel": 1}, GEOMETRY)
    assert chosen[1:] == [near[0], space.configs[0]]
    assert space.choose(3, known=(), best=None, near=near, model=None, rng=random.Random(0))[:2] == [
        near[0],
        space.configs[0],
    ]


def test_later_choices(space: ConfigSpace, model: ConfigModel) -> None:
    """With a model most choices are fast ones that were not measured; without, most are neighbours of the best."""
    best: Config = {"rows": 8, "columns": 32, "parallel": 1}
    known = {key_of(best)}
    guided = space.choose(8, known=known, best=best, near=(), model=model, rng=random.Random(1))
    times = sorted(seconds_of(config, GEOMETRY) for config in space.configs)
    assert sum(seconds_of(config, GEOMETRY) <= times[len(times) // 4] for config in guided) >= 5
    blind = space.choose(8, known=known, best=best, near=(), model=None, rng=random.Random(1))
    assert sum(sum(config[k] != best[k] for k in best) == 1 for config in blind) >= 4
    for chosen in (guided, blind):
        assert best not in chosen
        assert len({key_of(config) for config in chosen}) == 8


@pytest.mark.parametrize("guided", [True, False])
def test_every_choice_comes_once(space: ConfigSpace, model: ConfigModel, guided: bool) -> None:
    """Round after round every choice is proposed once, and then nothing is left."""
    known: set[frozenset[tuple[str, int]]] = set()
    rng = random.Random(2)
    best: Config | None = None
    for _ in range(100):
        chosen = space.choose(7, known=known, best=best, near=(), model=model if guided else None, rng=rng)
        assert not {key_of(config) for config in chosen} & known
        known |= {key_of(config) for config in chosen}
        best = min([*chosen, *([best] if best else [])], key=lambda c: seconds_of(c, GEOMETRY), default=None)
        if not chosen:
            break
    assert len(known) == len(space)


def test_deterministic(space: ConfigSpace, model: ConfigModel) -> None:
    """The same seed makes the same choices, another one does not."""
    best = space.configs[3]
    one, two, other = (
        space.choose(8, known=(), best=best, near=(), model=None, rng=random.Random(seed)) for seed in (1, 1, 2)
    )
    assert one == two != other


def test_closest(space: ConfigSpace) -> None:
    """Another workload's choice is taken as it is where it exists here, else the nearest by ratio; other knobs have no
    counterpart."""
    assert space.closest({"rows": 4, "columns": 8, "parallel": 1}) == {"rows": 4, "columns": 8, "parallel": 1}
    odd = ConfigSpace(TEMPLATE, {"m": 49, "n": 30, "k": 8}, CPU)
    assert odd.closest({"rows": 8, "columns": 16, "parallel": 1}) == {"rows": 7, "columns": 15, "parallel": 1}
    assert space.closest({"rows": 4}) is None


def test_promise(space: ConfigSpace, model: ConfigModel) -> None:
    """What is left promises much after a slow choice and nothing after the best."""
    slow: Config = {"rows": 1, "columns": 1, "parallel": 0}
    best: Config = {"rows": 8, "columns": 16, "parallel": 1}
    assert space.promise(slow, {key_of(slow)}, model) > 0.5
    assert space.promise(best, {key_of(best)}, model) < 0.2
    assert space.promise(best, {key_of(config) for config in space.configs}, model) == 0


def test_ranking_of_unseen_workload(space: ConfigSpace, model: ConfigModel) -> None:
    """A workload that the model never saw is ranked right."""
    times = np.array([seconds_of(config, GEOMETRY) for config in space.configs])
    ranks = np.argsort(np.argsort(model.predict(space.features))), np.argsort(np.argsort(-times))
    assert np.corrcoef(*ranks)[0, 1] > 0.8


def test_failures_are_learnt() -> None:
    """A choice of a kind that fails scores below most others, as if it were very slow."""
    configs = TEMPLATE.configs(GEOMETRY, CPU)
    known = [
        ConfigSample(s.workload, s.features, None if c["rows"] > 8 else s.median_s)
        for s, c in zip(samples_of(GEOMETRY, configs), configs, strict=True)
    ]
    model = train_configs(known, 0)
    assert model is not None
    scores = model.predict(np.array([s.features for s in known], dtype=np.float32))
    failed = np.array([s.median_s is None for s in known])
    assert scores[failed].max() < np.median(scores[~failed])
    assert train_configs([s for s in known if s.median_s is None] * 4, 0) is None


def test_model_that_is_none() -> None:
    """Bytes that are no model are refused."""
    with pytest.raises(ValueError, match="not a model"):
        _ = ConfigModel(b'{"learner": 1}').feature_count
