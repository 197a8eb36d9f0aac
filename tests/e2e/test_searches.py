"""Whole jobs by each tuner: what they tell, what they publish, and what their records are to the jobs that come.

A job costs 20 seconds before and after its search, so there is one for each thing to be seen, on one service.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.client import Event, Tunery
from tests.e2e.conftest import TUNERY, Service
from tests.e2e.nets import image, write_net

#: Enough for every operator's first batch.
TRIALS = 40
#: Of the other tuners: enough for the convolutions, which do most of the work and come first.
FEW = 16
#: Never the limit that ends a search.
SECONDS = 500
#: Each has a batch of its own, so that no tuner finds the records of another. One may not use Winograd's algorithm.
BATCHES = {"auto": 1, "autotvm": 2, "ansor": 3}
WITHOUT_WINOGRAD = "autotvm"
VARIANTS = {"direct", "flat", "winograd2", "winograd4", "winograd6", "window", "dense", "pointwise", "copy", "plain"}


@dataclass(frozen=True)
class Done:
    """A finished job and all that it told."""

    trials: int
    budget: int
    tuner: str
    manifest: dict[str, Any]
    events: list[Event]
    stored: dict[int, int]  #: trials by workload, of all jobs so far

    def of(self, type: str) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.type == type]


def run(service: Service, model: Path, trials: int, tuner: str = "auto", batch: int = 1, winograd: bool = True) -> Done:
    events: list[Event] = []
    search = {"tuner": tuner, "trials": trials, **({"seconds": SECONDS} if trials else {})}
    with Tunery(service.url) as client:
        job = client.submit(model, inputs=image(batch), search=search, options={"winograd": winograd})
        assert not job.cached
        job.wait(280, on_event=events.append)
        stored = dict(service.rows("select workload, count(*) from trials group by workload"))
        return Done(job.job["trials_measured"], trials, tuner, client.manifest(job.key), events, stored)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nets")


@pytest.fixture(scope="module")
def net(folder: Path) -> Path:
    return write_net(folder / "net.onnx", seed=1)


@pytest.fixture(scope="module")
def first(service: Service, net: Path) -> Done:
    """The first job of this service, by the default tuner."""
    return run(service, net, TRIALS)


@pytest.fixture(scope="module", params=BATCHES)
def done(request: pytest.FixtureRequest, service: Service, net: Path, first: Done) -> Done:
    """A job by each tuner."""
    tuner: str = request.param
    if tuner == "auto":
        return first
    return run(service, net, FEW, tuner, BATCHES[tuner], winograd=tuner != WITHOUT_WINOGRAD)


@pytest.fixture(scope="module")
def twin(service: Service, folder: Path, first: Done) -> Done:
    """The first job's network with other weights, and no trials."""
    return run(service, write_net(folder / "twin.onnx", seed=2), 0)


# One job


def test_a_library_that_agrees(done: Done) -> None:
    """The job succeeds by its tuner, and its library computes what ONNX Runtime does."""
    assert done.manifest["check"]["ok"]
    assert done.manifest["search"]["tuner"] == done.tuner
    assert 0 < done.manifest["search"]["trials_measured"] == done.trials <= done.budget
    tuners = {trial["tuner"] for trial in done.of("trial")}
    # Sketches alone still take one choice of a template where there is nothing to sketch.
    assert tuners <= {"autotvm": {"autotvm"}, "ansor": {"ansor", "autotvm"}, "auto": {"ansor", "autotvm"}}[done.tuner]
    assert tuners >= {"autotvm": {"autotvm"}, "ansor": {"ansor"}, "auto": {"autotvm"}}[done.tuner]


def test_the_manifest_says_what_was_chosen(done: Done) -> None:
    """How many operators and kernels the graph has, how many of them have a measured schedule, and which variants are
    in use, where the tuned library was the faster one."""
    graph, records = done.manifest["graph"], done.manifest["records"]
    assert graph["operators"] >= 6
    assert graph["nodes_before"] >= graph["nodes_after"] >= graph["operators"]
    assert graph["kernels_before"] > 0
    assert 0 <= graph["layout_transforms"] < graph["kernels"]
    assert 0 < graph["intermediates_bytes"]["planned"] < graph["intermediates_bytes"]["unplanned"]
    assert 0 < records["tuned_tasks"] <= graph["operators"]
    assert set(records["variants"]) <= VARIANTS
    if done.manifest["variant"] == "tuned":
        assert graph["kernels"] >= 6  # an operator that only reshapes is none
        assert records["applied"] == records["tuned_tasks"]
        assert sum(records["variants"].values()) == graph["operators"]
    else:
        assert (records["applied"], records["variants"]) == (0, {})


def test_trials_are_told(done: Done) -> None:
    """Each trial says what was tried and how, the best of its operator so far, what the whole model is predicted to
    take, and how much time is left."""
    trials = done.of("trial")
    assert [trial["trial"] for trial in trials] == list(range(1, len(trials) + 1))
    best_s: dict[str, float] = defaultdict(lambda: float("inf"))
    left_s = float(SECONDS)
    for trial in trials:
        assert trial["stage"] == "search"
        assert trial["variant"] in VARIANTS
        assert trial["trials"] == done.budget
        assert (trial["outcome"] == "measured") == (trial["run_s"] is not None)
        if trial["best_s"] is not None:
            assert 0 < trial["best_s"] <= best_s[trial["operator"]]
            best_s[trial["operator"]] = trial["best_s"]
            assert trial["predicted_s"] >= trial["best_s"]
        assert 0 <= trial["left_s"] <= left_s
        left_s = trial["left_s"]
    assert best_s


def test_progress_is_told(done: Done) -> None:
    """Each round says which operators it was spent on and where the whole model stands."""
    progress = [data for data in done.of("progress") if data["stage"] == "search"]
    assert [p["trials_measured"] for p in progress] == sorted(p["trials_measured"] for p in progress)
    assert progress[-1]["trials_measured"] == done.manifest["search"]["trials_measured"]
    assert all(0 <= p["left_s"] <= SECONDS and p["seconds"] == SECONDS and p["trials"] == done.budget for p in progress)
    assert progress[-1]["predicted_s"] > 0
    for part in (part for p in progress for part in p["operators"]):
        assert part["variant"] in VARIANTS
        assert part["tuner"] in BATCHES
        assert part["trials"] > 0
    # What is compared at the end says what was compared: the candidates' first times and those measured in turns.
    for told in (data for data in done.of("progress") if data["stage"] == "confirm"):
        [part] = told["operators"]
        assert all(candidate["confirmed_s"] > 0 and candidate["run_s"] > 0 for candidate in part["candidates"])


def test_without_winograd(done: Done, service: Service, net: Path) -> None:
    """`--no-winograd` is part of the key, and no trial of such a job is spent on Winograd's algorithm."""
    tried = {trial["variant"] for trial in done.of("trial")} | set(done.manifest["records"]["variants"])
    forbidden = done.tuner == WITHOUT_WINOGRAD
    assert done.manifest["key_fields"]["options"]["winograd"] is not forbidden
    assert not (forbidden and any(name.startswith("winograd") for name in tried))
    shape = f"image={','.join(map(str, image(BATCHES[done.tuner])['image']))}"
    found = [
        subprocess.run(
            [TUNERY, "key", str(net), "--input", shape, *options],
            env={**os.environ, "TUNERY_URL": service.url}, stdout=subprocess.PIPE, text=True, check=False,
        )
        for options in ([], ["--no-winograd"])
    ]  # fmt: skip
    assert [process.returncode for process in found] == ([3, 0] if forbidden else [0, 3])
    key = found[forbidden].stdout.strip()
    with Tunery(service.url) as client:
        assert client.find(net, inputs=image(BATCHES[done.tuner]), winograd=not forbidden)["key"] == key


# The jobs after it


def test_what_was_learnt_is_kept(first: Done, service: Service) -> None:
    """A job leaves a cost model of its busiest template beside its records."""
    assert "template/conv/" in {str(name)[:14] for (name,) in service.rows("select name from cost_models")}


def test_a_fine_tuned_twin_needs_no_trial(first: Done, twin: Done) -> None:
    """With other weights the operators are the same: what was measured for one network is applied to the next."""
    assert first.trials == TRIALS
    assert twin.trials == 0
    assert twin.manifest["search"]["trials_measured"] == 0
    assert twin.manifest["search"]["ended_by"] == "none"
    assert twin.manifest["check"]["ok"]
    operators = twin.manifest["graph"]["operators"]
    assert twin.manifest["records"]["tuned_tasks"] == first.manifest["records"]["tuned_tasks"] == operators


def test_a_larger_network_measures_what_is_new(first: Done, service: Service, folder: Path) -> None:
    """A tenth of the first job's trials suffices to know every operator of a network that shares most of its own with
    the first one: those are hits, and none of the trials is spent on them."""
    larger = run(service, write_net(folder / "larger.onnx", seed=3, larger=True), TRIALS // 10)
    assert larger.manifest["check"]["ok"]
    assert larger.trials == TRIALS // 10
    operators = larger.manifest["graph"]["operators"]
    assert operators == first.manifest["graph"]["operators"] + 1
    assert larger.manifest["records"]["tuned_tasks"] == operators
    assert all(count == first.stored[workload] for workload, count in larger.stored.items() if workload in first.stored)
    assert len({trial["operator"] for trial in larger.of("trial")}) == 1
