"""Predicts which candidates are fast: gradient-boosted trees over MetaSchedule's per-store features.

A sketch is a set of buffer stores with one feature row each; its score is the sum of the rows' predictions, fitted
to best seconds ÷ its seconds within its operator, 0 for a failure (as in Ansor's cost model). Training and prediction
run in forked children only: XGBoost's threads do not survive a fork.

A template's choices have features of their own, one row a choice, and a model a template (`train_configs`).
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

from workers.said import first_line
from workers.search.candidates import Features

#: MetaSchedule's per-store features, and the number of a candidate's stores.
ROW_FEATURES = 165
_ROUNDS = 60
_PARAMETERS = {"max_depth": 8, "eta": 0.2, "gamma": 0.001, "min_child_weight": 0, "base_score": 0.0, "nthread": 1}
_CONFIG_ROUNDS = 80
_CONFIG_PARAMETERS = {
    "objective": "reg:squarederror", "max_depth": 8, "eta": 0.1, "subsample": 0.8, "colsample_bytree": 0.8,
    "min_child_weight": 2, "base_score": 0.0, "tree_method": "hist", "nthread": 1,
}  # fmt: skip
#: What is eight times slower than the best, and what fails, is told apart from nothing worse.
_SLOWEST = float(np.log(1 / 8))
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

    @property
    def feature_count(self) -> int:
        """How many features a row has for it. ValueError if it is no model."""
        return int(self.booster().num_features())

    @property
    def rounds(self) -> int:
        """How many trees it has."""
        return int(self.booster().num_boosted_rounds())

    def predict(self, features: Sequence[Features]) -> NDArray[np.float64]:
        """One score a candidate, higher is faster; about 1 for the best known."""
        return _predict(self.booster(), features)

    def to_tvm(self) -> Any:
        """The model as MetaSchedule calls it."""
        return _TvmCostModel(self.booster())

    def booster(self) -> xgboost.Booster:
        return _load(self.booster_json)


def train(samples: Sequence[Sample], seed: int, start: CostModel | None = None) -> CostModel | None:
    """None when there are too few samples to learn from. `start`, a model of other samples, is gone on from."""
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
        xgb_model=None if start is None else start.booster(),
    )
    return CostModel(bytes(booster.save_raw("json")))


@dataclass(frozen=True, slots=True)
class ConfigSample:
    """One choice of a template whose outcome is known. `median_s` is None for a failure."""

    workload: str
    features: tuple[float, ...]
    median_s: float | None


@dataclass(frozen=True, slots=True)
class ConfigModel:
    """A trained model of one template's choices, as XGBoost's own JSON: a format that holds no code."""

    booster_json: bytes

    @property
    def feature_count(self) -> int:
        """How many features a choice has for it. ValueError if it is no model."""
        return int(_load(self.booster_json).num_features())

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """One score a row, higher is faster: the logarithm of best seconds ÷ its seconds, among choices of one
        workload. Scores of different workloads cannot be compared."""
        scores: NDArray[np.float64] = (
            _load(self.booster_json).predict(xgboost.DMatrix(features, nthread=1)).astype(np.float64)
        )
        return scores


def _load(booster_json: bytes) -> xgboost.Booster:
    booster = xgboost.Booster({"nthread": 1})
    try:
        booster.load_model(bytearray(booster_json))
    except xgboost.core.XGBoostError as error:
        raise ValueError(f"not a model: {first_line(error)}") from None
    return booster


def train_configs(samples: Sequence[ConfigSample], seed: int) -> ConfigModel | None:
    """None when there are too few samples to learn from."""
    if len(samples) < MIN_SAMPLES:
        return None
    best: dict[str, float] = {}
    for sample in samples:
        if sample.median_s is not None:
            best[sample.workload] = min(best.get(sample.workload, np.inf), sample.median_s)
    known = [sample for sample in samples if sample.workload in best]
    if len(known) < MIN_SAMPLES:
        return None
    wanted = [_SLOWEST if s.median_s is None else max(_SLOWEST, np.log(best[s.workload] / s.median_s)) for s in known]
    booster = xgboost.train(
        {**_CONFIG_PARAMETERS, "seed": seed},
        xgboost.DMatrix(np.array([s.features for s in known], dtype=np.float32), np.array(wanted), nthread=1),
        num_boost_round=_CONFIG_ROUNDS,
    )
    return ConfigModel(bytes(booster.save_raw("json")))


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
