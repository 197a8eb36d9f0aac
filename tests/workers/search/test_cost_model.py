"""The cost model on synthetic candidates whose true speed is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.workers.search.samples import features
from workers.search import cost_model
from workers.search.candidates import Features
from workers.search.cost_model import MIN_SAMPLES, CostModel, Sample
from workers.search.forkserver import ForkServer


def seconds_of(rows: Features) -> float:
    """The true time: every store costs what its features say, and the stores of a candidate add up. So a candidate of
    more stores is slower, which a sum over its rows alone would have the other way round."""
    return float(np.sum(1e-3 * np.exp(rows[:, 3] * 2) * (1 + (rows[:, 7] > 0.5))))


def samples(workload: str, first: int, count: int, scale: float = 1.0) -> list[Sample]:
    found = [features(seed, rows=1 + seed % 4) for seed in range(first, first + count)]
    return [Sample(workload, rows, scale * seconds_of(rows)) for rows in found]


def rank_correlation(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    """Spearman's."""
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (one, two))
    return float(np.corrcoef(first, second)[0, 1])


@pytest.fixture(scope="module")
def model(server: ForkServer) -> CostModel:
    """Trained in a forked child, as the search does it."""
    trained = server.call(cost_model.train, samples("w", 0, 300), 0, deadline_s=60)
    assert isinstance(trained, CostModel)
    return trained


def test_learns_a_ranking(model: CostModel) -> None:
    """Candidates that the model never saw are ranked by their true speed, far better than by chance."""
    unseen = samples("w", 10_000, 200)
    speed = np.array([1 / s.median_s for s in unseen if s.median_s is not None])
    assert rank_correlation(model.predict([s.features for s in unseen]), speed) > 0.8


def test_best_known_scores_about_one(model: CostModel) -> None:
    """The score is the speed relative to the best that was measured."""
    known = samples("w", 0, 300)
    fastest = min(known, key=lambda s: s.median_s or np.inf)
    slowest = max(known, key=lambda s: s.median_s or 0)
    best, worst = model.predict([fastest.features, slowest.features])
    assert 0.7 < best < 1.2
    assert worst < 0.3


def test_operators_of_different_size(server: ForkServer) -> None:
    """An operator a thousand times slower than another does not spoil what is learnt of both."""
    mixed = samples("fast", 0, 150) + samples("slow", 1000, 150, scale=1000)
    trained = server.call(cost_model.train, mixed, 0, deadline_s=60)
    for scale in (1.0, 1000.0):
        unseen = samples("any", 10_000, 100, scale)
        speed = np.array([1 / s.median_s for s in unseen if s.median_s is not None])
        assert rank_correlation(trained.predict([s.features for s in unseen]), speed) > 0.7


def test_failures_are_learnt(server: ForkServer) -> None:
    """What tends to fail is ranked below what runs slowly."""

    def fails(rows: Features) -> bool:
        return bool(rows[0, 11] > 0.5)

    known = [s if not fails(s.features) else Sample("w", s.features, None) for s in samples("w", 0, 300)]
    trained = server.call(cost_model.train, known, 0, deadline_s=60)
    unseen = samples("w", 10_000, 200)
    scores = trained.predict([s.features for s in unseen])
    failing = np.array([fails(s.features) for s in unseen])
    assert scores[failing].mean() < scores[~failing].mean() - 0.1
    assert scores[failing].mean() < 0.15


def test_round_trip(model: CostModel, server: ForkServer) -> None:
    """A model predicts the same after it went to another process; its bytes are JSON, which holds no code."""
    unseen = [features(seed) for seed in range(50)]
    expected = model.predict(unseen)
    assert np.array_equal(model.predict(unseen), expected)
    assert np.array_equal(server.call(predict, model, unseen, deadline_s=60), expected)
    assert "learner" in json.loads(model.booster_json)


def predict(model: CostModel, candidates: list[Features]) -> NDArray[np.float64]:
    return model.predict(candidates)


def test_same_samples_same_model(model: CostModel, server: ForkServer) -> None:
    """Training is deterministic for a seed."""
    assert server.call(cost_model.train, samples("w", 0, 300), 0, deadline_s=60) == model


def test_candidate_without_features(model: CostModel) -> None:
    """A candidate without a single store scores 0, and does not shift the scores of others."""
    empty = np.zeros((0, 164), dtype=np.float32)
    some = [features(1), features(2)]
    scores = model.predict([some[0], empty, some[1]])
    assert scores[1] == 0
    assert np.array_equal(scores[[0, 2]], model.predict(some))
    assert model.predict([empty]).tolist() == [0]


def test_too_little_to_learn_from(server: ForkServer) -> None:
    """With too few samples, or failures alone, there is no model."""
    assert server.call(cost_model.train, samples("w", 0, MIN_SAMPLES - 1), 0, deadline_s=60) is None
    failures = [Sample("w", features(seed), None) for seed in range(50)]
    assert server.call(cost_model.train, failures, 0, deadline_s=60) is None
    assert server.call(cost_model.train, samples("w", 0, MIN_SAMPLES), 0, deadline_s=60) is not None
