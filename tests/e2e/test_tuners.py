"""Each tuner on a network with a convolution, a depthwise one, a dense layer and a softmax; and what a job tells."""

from __future__ import annotations

import json
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

TRIALS = 24
SECONDS = 200
#: Each has a batch of its own, so that no tuner finds the records of another.
BATCHES = {"auto": 1, "autotvm": 2, "ansor": 3}
VARIANTS = {"direct", "flat", "winograd2", "winograd4", "winograd6", "window", "dense", "pointwise", "copy", "plain"}


@dataclass(frozen=True)
class Done:
    """A finished job and all that it told."""

    key: str
    manifest: dict[str, Any]
    events: list[Event]

    def of(self, type: str) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.type == type]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_net(tmp_path_factory.mktemp("net") / "net.onnx", seed=1)


@pytest.fixture(scope="module", params=BATCHES)
def tuner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def done(tuner: str, service: Service, net: Path) -> Done:
    events: list[Event] = []
    with Tunery(service.url) as client:
        search = {"tuner": tuner, "trials": TRIALS, "seconds": SECONDS}
        job = client.submit(net, inputs=image(BATCHES[tuner]), search=search)
        job.wait(280, on_event=events.append)
        return Done(job.key, client.manifest(job.key), events)


def test_a_library_that_agrees(tuner: str, done: Done) -> None:
    """The job succeeds by its tuner, and its library computes what ONNX Runtime does."""
    assert done.manifest["check"]["ok"]
    assert done.manifest["search"]["tuner"] == tuner
    assert 0 < done.manifest["search"]["trials_measured"] <= TRIALS
    tuners = {trial["tuner"] for trial in done.of("trial")}
    # Sketches alone still take one choice of a template where there is nothing to sketch.
    assert tuners <= {"autotvm": {"autotvm"}, "ansor": {"ansor", "autotvm"}, "auto": {"ansor", "autotvm"}}[tuner]
    assert tuners >= {"autotvm": {"autotvm"}, "ansor": {"ansor"}, "auto": {"autotvm"}}[tuner]


def test_the_manifest_says_what_was_chosen(done: Done) -> None:
    """How many operators and kernels the graph has, how many schedules were applied, and which variants are in use."""
    graph, records = done.manifest["graph"], done.manifest["records"]
    assert graph["kernels"] >= graph["operators"] == records["tuned_tasks"] >= 6
    assert 0 < records["applied"] <= records["tuned_tasks"]
    assert set(records["variants"]) <= VARIANTS
    assert sum(records["variants"].values()) == records["tuned_tasks"]


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
        assert trial["trials"] == TRIALS
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
    assert all(0 <= p["left_s"] <= SECONDS and p["seconds"] == SECONDS and p["trials"] == TRIALS for p in progress)
    assert progress[-1]["predicted_s"] > 0
    for part in (part for p in progress for part in p["operators"]):
        assert part["variant"] in VARIANTS
        assert part["tuner"] in BATCHES
        assert part["trials"] > 0
    # What is compared at the end says what was compared: the candidates' first times and those measured in turns.
    for told in (data for data in done.of("progress") if data["stage"] == "confirm"):
        [part] = told["operators"]
        assert all(candidate["confirmed_s"] > 0 and candidate["run_s"] > 0 for candidate in part["candidates"])


def test_without_winograd(service: Service, net: Path, tmp_path: Path) -> None:
    """`--no-winograd` is part of the key, and no operator of its library is computed by Winograd's algorithm."""
    shape = f"image={','.join(map(str, image()['image']))}"
    output = tmp_path / "library"
    # Only enough trials to reach the convolutions, which come first: they do most of the work.
    search = ["--trials", "12", "--seconds", str(SECONDS)]

    def tunery(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [TUNERY, *arguments, "--input", shape, "--json"]
        return subprocess.run(
            command, env={**os.environ, "TUNERY_URL": service.url}, stdout=subprocess.PIPE, text=True, check=False
        )

    assert tunery("key", str(net), "--no-winograd").returncode == 3
    submitted = tunery("submit", str(net), "--no-winograd", *search, "--output", str(output))
    assert submitted.returncode == 0, submitted.stdout
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["check"]["ok"]
    assert manifest["key_fields"]["options"]["winograd"] is False
    assert manifest["records"]["variants"]
    assert not [name for name in manifest["records"]["variants"] if name.startswith("winograd")]
    with Tunery(service.url) as client:
        assert client.find(net, inputs=image(), winograd=False)["key"] == manifest["key"]
        wanted = client.submit(net, inputs=image(), search={"tuner": "none"})
        wanted.wait(120)
        assert wanted.key != manifest["key"]
