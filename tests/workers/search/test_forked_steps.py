"""Proposing, building and measuring real candidates, through the real fork server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.workers.conftest import Host
from tests.workers.search.samples import double, matmul
from tuning_db.trials import Workload, trace_digest
from workers.search import cost_model, forked_steps
from workers.search.candidates import Built, Candidate, Measurement, canonical_trace
from workers.search.cost_model import CostModel, Sample
from workers.search.forkserver import ChildError, ForkServer
from workers.search.space import Space

DEADLINE_S = 120.0
SPACE = Space(population=16, generations=2, parents=8)


def propose(
    server: ForkServer,
    host: Host,
    workload: Workload,
    measured: list[tuple[str, tuple[float, ...]]],
    model: CostModel | None,
    count: int,
    seed: int,
) -> list[str]:
    traces: list[str] = server.call(
        forked_steps.propose, host.target_json, workload, SPACE, measured, model, count, seed, deadline_s=DEADLINE_S
    )
    return traces


@pytest.fixture(scope="module")
def sampled(server: ForkServer, host: Host) -> list[str]:
    """Traces of a matrix product, sampled from its space."""
    return propose(server, host, matmul(), [], None, 24, 1)


@pytest.fixture(scope="module")
def history(sampled: list[str]) -> list[tuple[str, tuple[float, ...]]]:
    """The same with made-up times; every fifth has failed."""
    return [(trace, () if i % 5 == 4 else (1e-6 * (1 + i % 7),)) for i, trace in enumerate(sampled)]


@pytest.fixture(scope="module")
def model(server: ForkServer, host: Host, history: list[tuple[str, tuple[float, ...]]]) -> CostModel:
    candidates = [Candidate(matmul(), trace) for trace, _ in history]
    found = server.call(forked_steps.featurize, host.target_json, candidates, deadline_s=DEADLINE_S)
    samples = [Sample("w", rows, run_s[0] if run_s else None) for rows, (_, run_s) in zip(found, history, strict=True)]
    trained: CostModel = server.call(cost_model.train, samples, 0, deadline_s=DEADLINE_S)
    return trained


def test_sampling(sampled: list[str], server: ForkServer, host: Host) -> None:
    """Without a model, as many different traces as asked for; the seed decides which."""
    assert len(sampled) == 24
    assert len(set(sampled)) == 24
    assert propose(server, host, matmul(), [], None, 24, 1) == sampled
    assert propose(server, host, matmul(), [], None, 24, 2) != sampled
    assert all(trace == canonical_trace(json.loads(trace)) for trace in sampled)


def test_sampling_leaves_out_what_is_known(
    server: ForkServer, host: Host, sampled: list[str], history: list[tuple[str, tuple[float, ...]]]
) -> None:
    """What was measured, or has failed, is not proposed again, even with the same seed."""
    assert not set(propose(server, host, matmul(), history, None, 24, 1)) & set(sampled)


def test_guided(
    server: ForkServer, host: Host, sampled: list[str], history: list[tuple[str, tuple[float, ...]]], model: CostModel
) -> None:
    """With a model and a history, new traces are bred that were not measured; the seed decides which."""
    traces = propose(server, host, matmul(), history, model, 8, 1)
    assert 1 <= len(traces) <= 8
    assert len({trace_digest(trace) for trace in traces}) == len(traces)
    assert not set(traces) & set(sampled)
    assert propose(server, host, matmul(), history, model, 8, 1) == traces


def test_guided_prefers_what_the_model_prefers(
    server: ForkServer, host: Host, history: list[tuple[str, tuple[float, ...]]], model: CostModel
) -> None:
    """Bred candidates score higher by the model than sampled ones."""

    def mean_score(traces: list[str]) -> float:
        candidates = [Candidate(matmul(), trace) for trace in traces]
        found = server.call(forked_steps.featurize, host.target_json, candidates, deadline_s=DEADLINE_S)
        return float(np.mean(model.predict([rows for rows in found if rows is not None])))

    guided = propose(server, host, matmul(), history, model, 8, 3)
    assert mean_score(guided) > mean_score(propose(server, host, matmul(), [], None, 24, 4))


def test_small_space_runs_out(server: ForkServer, host: Host) -> None:
    """When everything in a space was measured there is nothing to propose."""
    known: list[tuple[str, tuple[float, ...]]] = []
    for seed in range(1, 12):
        traces = propose(server, host, double(), known, None, 8, seed)
        known += [(trace, (1e-6,)) for trace in traces]
        if not traces:
            break
    else:
        pytest.fail(f"{len(known)} traces of a space of a handful, and no end")
    assert known


def test_build_and_measure(server: ForkServer, host: Host, sampled: list[str], tmp_path: Path) -> None:
    """A candidate is built into a library with features, and runs as often as asked."""
    candidate = Candidate(matmul(), sampled[0])
    built: Built = server.call(forked_steps.build, host.target_json, candidate, str(tmp_path), deadline_s=DEADLINE_S)
    assert Path(built.library).parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [Path(built.library).name]
    assert [shape for _, shape in built.arguments] == [(16, 16)] * 3
    assert built.features is not None
    assert built.features.shape[1] == 164
    again = server.call(forked_steps.featurize, host.target_json, [candidate], deadline_s=DEADLINE_S)
    assert np.array_equal(again[0], built.features)
    run_s = server.call(
        forked_steps.measure, built, Measurement(repeat=4, min_repeat_s=0.001, threads=1), deadline_s=DEADLINE_S
    )
    assert len(run_s) == 4
    assert all(sample > 0 for sample in run_s)


def test_packed_weights_are_measured_as_packed(
    server: ForkServer, host: Host, conv_workload: Workload, tmp_path: Path
) -> None:
    """Where a schedule packs a constant weight, the candidate takes it packed: packing costs an inference nothing."""
    for trace in propose(server, host, conv_workload, [], None, 24, 1):
        candidate = Candidate(conv_workload, trace)
        if "TransformLayout" in trace:
            break
    else:
        pytest.fail("no sampled schedule packs the weights")
    built: Built = server.call(forked_steps.build, host.target_json, candidate, str(tmp_path), deadline_s=DEADLINE_S)
    shapes = [shape for _, shape in built.arguments]
    assert (shapes[0], shapes[-1]) == ((1, 8, 14, 14), (1, 16, 14, 14))
    assert shapes[1] != (16, 8, 3, 3)
    assert int(np.prod(shapes[1])) == 16 * 8 * 3 * 3
    assert server.call(forked_steps.measure, built, Measurement(1, 0.001, 1), deadline_s=DEADLINE_S)[0] > 0


def test_trace_of_another_computation(server: ForkServer, host: Host, sampled: list[str], tmp_path: Path) -> None:
    """A trace that does not fit its computation is an error with TVM's message, and leaves no file."""
    with pytest.raises(ChildError, match="Error"):
        server.call(
            forked_steps.build, host.target_json, Candidate(double(), sampled[0]), str(tmp_path), deadline_s=DEADLINE_S
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "uint8", "bool"])
def test_random_tensor(dtype: str, host: Host) -> None:
    """Arguments are floats in [0, 1) and integers that are valid as an index into anything."""
    array: Any = forked_steps.random_tensor(np.random.default_rng(0), dtype, (5, 7)).numpy()
    assert (str(array.dtype), array.shape) == (dtype, (5, 7))
    if dtype.startswith("float"):
        assert 0 <= array.min() < array.max() <= 1
    else:
        assert not array.any()


def test_memory_over_many_builds(server: ForkServer, host: Host, sampled: list[str], tmp_path: Path) -> None:
    """What fifty builds take does not add up in the server (tvm#11096)."""
    before = psutil.Process(server.pid).memory_info().rss
    futures = []
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        candidate = Candidate(matmul(), sampled[number % 24])
        futures.append(
            server.submit(forked_steps.build, host.target_json, candidate, str(folder), deadline_s=DEADLINE_S)
        )
    libraries = {future.result().library for future in futures}
    assert len(libraries) == 50
    assert psutil.Process(server.pid).memory_info().rss < before + (64 << 20)
