"""What one job has measured serves the next: twins need no trial, larger models only those of what is new."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.client import Tunery
from tests.e2e.conftest import Service
from tests.e2e.nets import image, write_net

TRIALS = 40


@dataclass(frozen=True)
class Done:
    """A finished job."""

    trials: int
    manifest: dict[str, Any]
    code: list[str]  #: of its library


def run(service: Service, model: Path, trials: int, folder: Path, batch: int = 1) -> Done:
    with Tunery(service.url) as client:
        search = {"trials": trials, "seconds": 200} if trials else {"trials": 0}
        job = client.submit(model, inputs=image(batch), search=search)
        assert not job.cached
        job.wait(240)
        fetched = client.fetch(job.key, folder / job.id)
        return Done(job.job["trials_measured"], fetched.manifest, code_of(fetched.library))


def code_of(library: Path) -> list[str]:
    """Its instructions without their operands, some of which are distances to weights: those of two libraries are the
    same if all their operators are computed by equal schedules."""
    listing = subprocess.run(
        ["objdump", "--disassemble", "--no-show-raw-insn", "--no-addresses", library],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    return [line.split()[0] for line in listing.splitlines() if line.startswith("\t")]


def trials_by_workload(service: Service) -> dict[int, int]:
    return dict(service.rows("select workload, count(*) from trials group by workload"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def guessed(service: Service, folder: Path) -> Done:
    """A job without trials on a store that holds nothing."""
    assert service.stored_trials() == 0
    return run(service, write_net(folder / "untried.onnx", seed=1), 0, folder)


@pytest.fixture(scope="module")
def first(service: Service, folder: Path, guessed: Done) -> Done:
    """The first job that measures."""
    return run(service, write_net(folder / "first.onnx", seed=2), TRIALS, folder)


@pytest.fixture(scope="module")
def twin(service: Service, folder: Path, first: Done) -> Done:
    """The first job's network with other weights, and no trials."""
    return run(service, write_net(folder / "twin.onnx", seed=3), 0, folder)


def test_no_trials_on_an_empty_store(guessed: Done, service: Service) -> None:
    """Nothing is measured, and the templates' first guesses make a library that agrees with ONNX Runtime."""
    assert guessed.trials == 0
    assert guessed.manifest["check"]["ok"]
    assert guessed.manifest["search"]["trials_measured"] == 0
    assert guessed.manifest["search"]["ended_by"] == "none"
    assert guessed.manifest["records"]["applied"] == 0


def test_a_fine_tuned_twin_needs_no_trial(first: Done, twin: Done, guessed: Done, service: Service) -> None:
    """With other weights the operators are the same: what was measured for one network is applied to the next."""
    assert first.trials == TRIALS == service.stored_trials()
    assert twin.trials == 0
    assert twin.manifest["check"]["ok"]
    assert twin.manifest["search"]["trials_measured"] == 0
    measured = twin.manifest["records"]["applied"]
    assert measured == first.manifest["records"]["applied"] > twin.manifest["records"]["tuned_tasks"] / 2
    assert twin.code != guessed.code


def test_twins_have_the_same_schedules(twin: Done, service: Service, folder: Path) -> None:
    """Equal records give equal code, whatever the weights are."""
    another = run(service, write_net(folder / "another.onnx", seed=4), 0, folder)
    assert another.code == twin.code
    assert another.manifest["records"] == twin.manifest["records"]


def test_a_larger_network_measures_what_is_new(first: Done, twin: Done, service: Service, folder: Path) -> None:
    """The operators that it shares with the first are hits: they take a tenth of the first's trials at most."""
    before = trials_by_workload(service)
    larger = run(service, write_net(folder / "larger.onnx", seed=5, larger=True), 8, folder)
    after = trials_by_workload(service)
    assert larger.trials == 8
    assert larger.manifest["check"]["ok"]
    on_shared = sum(after[workload] - count for workload, count in before.items())
    assert on_shared <= TRIALS / 10
    assert larger.manifest["records"]["applied"] > twin.manifest["records"]["applied"]


def test_what_was_learnt_serves_other_shapes(first: Done, service: Service, folder: Path) -> None:
    """Cost models of the templates are kept with the records, and a job of another batch goes by them without a
    trial: no record is its own."""
    models = {str(name) for (name,) in service.rows("select name from cost_models")}
    assert any(name.startswith("template/conv/") for name in models)
    stored = service.stored_trials()
    other = run(service, write_net(folder / "batch.onnx", seed=6), 0, folder, batch=2)
    assert other.manifest["check"]["ok"]
    assert service.stored_trials() == stored
