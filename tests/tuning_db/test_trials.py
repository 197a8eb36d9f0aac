"""Workloads, trials and cost models as values: what is part of their identity, and what they refuse to hold."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import xgboost
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import make_trial, make_workload
from tuning_db.errors import TooLarge
from tuning_db.trials import MAX_BOOSTER_BYTES, StoredCostModel, Trial, Workload

SIZES = st.dictionaries(st.text(max_size=8), st.integers(-(2**40), 2**40), max_size=5)


@given(sizes=SIZES, config=SIZES, name=st.text())
def test_templates_are_not_identity(sizes: dict[str, int], config: dict[str, int], name: str) -> None:
    """Template, geometry and configuration change neither a workload's digest nor a trial's; the values stay hashable
    and go to other processes."""
    plain = make_workload()
    made_for = replace(plain, template=name, geometry=sizes)
    trial, configured = make_trial(plain, 1), replace(make_trial(plain, 1), config=config)
    assert made_for.digest == plain.digest
    assert configured.trace_digest == trial.trace_digest
    assert made_for != plain
    assert configured != trial
    for value in (made_for, configured):
        assert pickle.loads(pickle.dumps(value)) == value
        assert len({value, pickle.loads(pickle.dumps(value))}) == 1


def test_nobody_else_holds_the_numbers() -> None:
    """A caller who goes on changing the dictionary that was given does not change the value; names are sorted."""
    sizes = {"n": 1, "c": 3}
    workload = replace(make_workload(), template="conv2d", geometry=sizes)
    trial = replace(make_trial(workload, 1), config=sizes)
    sizes["n"] = 2
    for held in (workload.geometry, trial.config):
        assert held is not None
        assert list(held.items()) == [("c", 3), ("n", 1)]


@pytest.mark.parametrize(("template", "geometry"), [("conv2d", None), (None, {"n": 1}), (None, {})])
def test_template_without_geometry(template: Any, geometry: Any) -> None:
    """A template without its sizes, or sizes of no template, cannot be learnt from and are refused."""
    with pytest.raises(ValueError, match="both or neither"):
        Workload("1", "m", template, geometry)


@pytest.mark.parametrize("value", [True, 1.5, "1", None])
def test_only_whole_numbers(value: Any) -> None:
    """A size or a knob's value is a whole number, and nothing that only looks like one."""
    with pytest.raises(ValueError, match="whole numbers"):
        Workload("1", "m", "conv2d", {"n": value})
    with pytest.raises(ValueError, match="whole numbers"):
        replace(make_trial(make_workload(), 1), config={"tile_x": value})
    with pytest.raises(ValueError, match="whole numbers"):
        Trial("w", "t", make_trial(make_workload(), 1).outcome, {1: 2})  # type: ignore[dict-item]


def booster() -> xgboost.Booster:
    rows = xgboost.DMatrix([[0.0], [1.0], [2.0]], label=[0.0, 1.0, 2.0])
    return xgboost.train({"max_depth": 2, "nthread": 1}, rows, num_boost_round=3)


def test_a_booster_is_kept_as_json() -> None:
    """What XGBoost saves as JSON is taken, and XGBoost reads it again."""
    stored = StoredCostModel(1, 3, bytes(booster().save_raw("json")), "three rows")
    again = xgboost.Booster(model_file=bytearray(stored.booster_json))
    assert again.num_boosted_rounds() == 3
    assert "learner" in json.loads(stored.booster_json)


@pytest.mark.parametrize("kind", ["ubj", "pickle", "[]", "{", "", "[" * 200_000])
def test_nothing_else_is_a_cost_model(kind: str) -> None:
    """XGBoost's binary format, pickles, and JSON that is no object are refused."""
    data = {"ubj": lambda: bytes(booster().save_raw("ubj")), "pickle": lambda: pickle.dumps({})}
    with pytest.raises(ValueError, match=r'save_raw\("json"\)'):
        StoredCostModel(1, 3, data[kind]() if kind in data else kind.encode())


def test_cost_model_size() -> None:
    """A model above the limit is refused with the limit, before it is read."""
    with pytest.raises(TooLarge, match="fewer or shallower") as caught:
        StoredCostModel(1, 3, b" " * (MAX_BOOSTER_BYTES + 1))
    assert caught.value.limit_bytes == MAX_BOOSTER_BYTES == 33_554_432
