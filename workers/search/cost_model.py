"""Predicts which candidates are fast: gradient-boosted trees over MetaSchedule's per-store features.

A candidate is a set of buffer stores with one feature row each; its score is the sum of the rows' predictions, fitted
to best seconds ÷ its seconds within its operator, 0 for a failure (as in Ansor's cost model). Training and prediction
run in forked children only: XGBoost's threads do not survive a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from workers.search.candidates import Features

_ROUNDS = 60
_PARAMETERS = {"max_depth": 8, "eta": 0.2, "gamma": 0.001, "min_child_weight": 0, "base_score": 0.0, "nthread": 1}
#: Below this many samples a model knows less than chance.
MIN_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One candidate whose outcome is known. `median_s` is None for a failure."""

    workload: str
    features: Features
    median_s: float | None


@dataclass(frozen=True, slots=True)
class CostModel:
    """A trained model, as XGBoost's own JSON: a format that holds no code."""

    booster_json: bytes

    def predict(self, features: Sequence[Features]) -> NDArray[np.float64]:
        """One score a candidate, higher is faster; about 1 for the best known."""
        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(self.booster_json))
        return _predict(booster, features)

    def to_tvm(self) -> Any:
        """The model as MetaSchedule calls it."""
        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(self.booster_json))
        return _TvmCostModel(booster)


def train(samples: Sequence[Sample], seed: int) -> CostModel | None:
    """None when there are too few samples to learn from."""
    if len(samples) < MIN_SAMPLES:
        return None
    best: dict[str, float] = {}
    for sample in samples:
        if sample.median_s is not None:
            best[sample.workload] = min(best.get(sample.workload, np.inf), sample.median_s)
    if not best:
        return None
    wanted = np.array([0.0 if s.median_s is None else best[s.workload] / s.median_s for s in samples])
    rows, candidate_of_row = _pack([sample.features for sample in samples])
    rows_of_candidate = np.bincount(candidate_of_row, minlength=len(samples))[candidate_of_row]

    def squared_error_of_sums(predicted: NDArray[Any], _: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        sums = np.bincount(candidate_of_row, weights=predicted, minlength=len(samples))
        # All rows of a candidate move at once; a second derivative of their number keeps the step from overshooting.
        return (sums - wanted)[candidate_of_row], rows_of_candidate.astype(np.float64)

    booster = xgboost.train(
        {**_PARAMETERS, "seed": seed},
        xgboost.DMatrix(rows, nthread=1),
        num_boost_round=_ROUNDS,
        obj=squared_error_of_sums,
    )
    return CostModel(bytes(booster.save_raw("json")))


def _pack(features: Sequence[Features]) -> tuple[Features, NDArray[np.int64]]:
    """All rows below each other, each with the number of its candidate's rows as one more feature, and which candidate
    each is of. Without that number a candidate of more stores would score higher for having more rows to sum."""
    counts = np.array([len(f) for f in features])
    rows = np.concatenate(features)
    return np.column_stack([rows, np.repeat(counts, counts).astype(rows.dtype)]), np.repeat(
        np.arange(len(features)), counts
    )


def _predict(booster: xgboost.Booster, features: Sequence[Features]) -> NDArray[np.float64]:
    scores = np.zeros(len(features))
    present = [i for i, f in enumerate(features) if f.size]
    if present:
        rows, candidate_of_row = _pack([features[i] for i in present])
        predicted = booster.predict(xgboost.DMatrix(rows, nthread=1), output_margin=True)
        scores[present] = np.bincount(candidate_of_row, weights=predicted, minlength=len(present))
    return scores


@derived_object
class _TvmCostModel(ms.cost_model.PyCostModel):  # type: ignore[misc]
    """Prediction for the evolution inside one proposal; what was learnt is decided outside."""

    def __init__(self, booster: xgboost.Booster) -> None:
        super().__init__()
        self._booster = booster
        self._extractor = ms.feature_extractor.PerStoreFeature()

    def predict(self, context: Any, candidates: Any) -> NDArray[np.float64]:
        features = [f.numpy().astype("float32") for f in self._extractor.extract_from(context, candidates)]
        return _predict(self._booster, features)

    def load(self, path: str) -> None:
        raise NotImplementedError("models live in memory")

    def save(self, path: str) -> None:
        raise NotImplementedError("models live in memory")

    def update(self, context: Any, candidates: Any, results: Any) -> None:
        """Learning happens between rounds, from the store's trials."""
