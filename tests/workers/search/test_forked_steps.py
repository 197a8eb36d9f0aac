"""Proposing, building and measuring real candidates, through the real fork server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tvm

from tests.workers.conftest import Host, workload_of
from tests.workers.search.samples import CPU, TEMPLATES, double, matmul, matmul_module, templated
from tuning_db.trials import Workload, trace_digest
from workers.search import cost_model, forked_steps, sampling
from workers.search.candidates import Built, Candidate, Measurement, canonical_trace
from workers.search.cost_model import CostModel, Sample
from workers.search.forkserver import ChildError, ForkServer
from workers.search.sketches import register_rule_broken
from workers.search.space import Space
from workers.search.templates import knobs

DEADLINE_S = 120.0
SPACE = Space(population=16, generations=2, parents=8)


def propose(
    server: ForkServer,
    host: Host,
    workload: Workload,
    parents: list[tuple[str, tuple[float, ...]]],
    model: CostModel | None,
    count: int,
    seed: int,
) -> list[str]:
    traces: list[str] = server.call(
        forked_steps.propose, host.target_json, workload, SPACE, parents, model, CPU, count, seed, deadline_s=DEADLINE_S
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


def parents_of(history: list[tuple[str, tuple[float, ...]]]) -> list[tuple[str, tuple[float, ...]]]:
    return sorted((h for h in history if h[1]), key=lambda h: h[1])[: SPACE.parents]


def test_guided(
    server: ForkServer, host: Host, sampled: list[str], history: list[tuple[str, tuple[float, ...]]], model: CostModel
) -> None:
    """With a model and parents, new traces are bred that were not measured; the seed decides which."""
    traces = propose(server, host, matmul(), parents_of(history), model, 24, 1)
    assert len({trace_digest(trace) for trace in traces}) == len(traces)
    assert len({*traces} - {*sampled}) >= 8
    assert propose(server, host, matmul(), parents_of(history), model, 24, 1) == traces


def test_guided_prefers_what_the_model_prefers(
    server: ForkServer, host: Host, history: list[tuple[str, tuple[float, ...]]], model: CostModel
) -> None:
    """Bred candidates score higher by the model than sampled ones."""

    def mean_score(traces: list[str]) -> float:
        candidates = [Candidate(matmul(), trace) for trace in traces]
        found = server.call(forked_steps.featurize, host.target_json, candidates, deadline_s=DEADLINE_S)
        return float(np.mean(model.predict([rows for rows in found if rows is not None])))

    guided = propose(server, host, matmul(), parents_of(history), model, 8, 3)
    assert mean_score(guided) > mean_score(propose(server, host, matmul(), [], None, 24, 4))


def test_small_space(server: ForkServer, host: Host) -> None:
    """A space of a handful gives a handful, however many are asked for, and the same ones again."""
    found = {trace for seed in range(1, 6) for trace in propose(server, host, double(), [], None, 32, seed)}
    assert 1 <= len(found) < 32


def test_what_breaks_the_register_rule_comes_last(server: ForkServer, host: Host) -> None:
    """Sampled schedules whose innermost tile fits registers and whole vectors come before those that cannot be fast."""
    traces = propose(server, host, matmul(64, 64, 64), [], None, 32, 1)
    schedules = [forked_steps.schedule_of(matmul(64, 64, 64), trace) for trace in traces]
    broken = [register_rule_broken(schedule, CPU) is not None for schedule in schedules]
    assert broken == sorted(broken)
    assert 0 < sum(broken) < len(broken)


def test_schedule_configs(server: ForkServer, host: Host, tmp_path: Path) -> None:
    """A template's choices become traces that replay, with the choice written at their head; one that the template
    cannot apply is None."""
    template = TEMPLATES["test-matmul"]
    workload = templated(32, 64, 16)
    assert workload.geometry is not None
    configs = [*template.configs(workload.geometry, CPU)[10:13], {"rows": 0, "columns": -1, "parallel": 1}]
    traces = server.call(forked_steps.schedule_configs, workload, template, CPU, configs, deadline_s=DEADLINE_S)
    assert traces[3] is None
    assert [knobs.config_of(template, trace) for trace in traces[:3]] == configs[:3]
    assert len(set(traces)) == 4
    assert traces == server.call(forked_steps.schedule_configs, workload, template, CPU, configs, deadline_s=DEADLINE_S)
    candidate = Candidate(workload, traces[0], configs[0])
    built: Built = server.call(forked_steps.build, host.target_json, candidate, str(tmp_path), deadline_s=DEADLINE_S)
    assert built.features is None, "a choice has features of its template"
    assert [shape for _, shape in built.arguments] == [(32, 16), (16, 64), (32, 64)]


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
        sampling.measure, built, Measurement(repeat=4, min_repeat_s=0.001, threads=1), deadline_s=DEADLINE_S
    )
    assert len(run_s) == 4
    assert all(sample > 0 for sample in run_s)


def test_hopeless_candidate(server: ForkServer, host: Host, sampled: list[str], tmp_path: Path) -> None:
    """A candidate that is slower than asked for is measured once, a faster one as often as asked."""
    built = server.call(
        forked_steps.build, host.target_json, Candidate(matmul(), sampled[0]), str(tmp_path), deadline_s=DEADLINE_S
    )
    for hopeless_s, samples in ((1e-12, 1), (3600.0, 3), (None, 3)):
        measurement = Measurement(3, 0.001, 1)
        assert len(server.call(sampling.measure, built, measurement, hopeless_s, deadline_s=DEADLINE_S)) == samples


def test_samples_that_disagree() -> None:
    """More samples are taken while the fastest disagree, three times as many at most, and the fastest are kept in their
    order; samples that agree are enough."""

    def settle(*seconds: float) -> tuple[int, tuple[float, ...]]:
        sampler = sampling.Sampler(None, [], [seconds[0]], None)
        while not sampler.is_settled(3, None):
            sampler.seconds.append(seconds[len(sampler.seconds)])
        return len(sampler.seconds), sampler.fastest(3)

    assert settle(1.01, 1.0, 1.02) == (3, (1.01, 1.0, 1.02))
    assert settle(1.0, 2.0, 1.01, 3.0, 1.02, 9.0) == (5, (1.0, 1.01, 1.02))
    assert settle(*(float(number) for number in range(9, 0, -1))) == (9, (3.0, 2.0, 1.0))


def test_unscheduled(server: ForkServer, host: Host, tmp_path: Path) -> None:
    """The empty trace is the computation as it is: a candidate like any other."""
    candidate = Candidate(matmul(), "[[],[]]")
    built = server.call(forked_steps.build, host.target_json, candidate, str(tmp_path), deadline_s=DEADLINE_S)
    assert server.call(sampling.measure, built, Measurement(2, 0.001, 1), deadline_s=DEADLINE_S)[0] > 0


def test_measure_in_turn(server: ForkServer, host: Host, sampled: list[str], tmp_path: Path) -> None:
    """Candidates that are compared have as many samples each, in their order, by the same clock."""
    built = [
        server.call(forked_steps.build, host.target_json, Candidate(workload, trace), str(tmp_path), deadline_s=60)
        for workload, trace in ((matmul(), sampled[0]), (matmul(256, 256, 256), "[[],[]]"))
    ]
    small, large = server.call(sampling.measure_in_turn, built, Measurement(5, 0.001, 1), deadline_s=DEADLINE_S)
    assert (len(small), len(large)) == (5, 5)
    assert 20 * min(small) < min(large)


def test_packed_weights_are_measured_as_packed(server: ForkServer, host: Host, tmp_path: Path) -> None:
    """Where a schedule packs a constant weight, the candidate takes it packed: packing costs an inference nothing."""
    function = matmul_module(32, 32, 32)["main"].with_attr("layout_free_buffers", [1])
    workload = workload_of(tvm.IRModule({"main": function}))
    for trace in propose(server, host, workload, [], None, 24, 1):
        candidate = Candidate(workload, trace)
        if "TransformLayout" in trace:
            break
    else:
        pytest.fail("no sampled schedule packs the weights")
    built: Built = server.call(forked_steps.build, host.target_json, candidate, str(tmp_path), deadline_s=DEADLINE_S)
    shapes = [shape for _, shape in built.arguments]
    assert (shapes[0], shapes[-1]) == ((32, 32), (32, 32))
    assert shapes[1] != (32, 32)
    assert built.weights == (1,)
    assert int(np.prod(shapes[1])) == 32 * 32
    assert server.call(sampling.measure, built, Measurement(1, 0.001, 1), deadline_s=DEADLINE_S)[0] > 0


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
    array: Any = sampling.random_tensor(np.random.default_rng(0), dtype, (5, 7)).numpy()
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


def test_weights_are_read_from_other_memory_in_each_call() -> None:
    """A kernel's weights come from another copy in each of the calls that are timed, its data always from the same."""
    sampling.fill_pool(str(1 << 20))
    built = Built(
        "unused.so", (("float32", (4, 8)), ("float32", (8, 1024)), ("float32", ()), ("float32", (4, 1024))), None,
        weights=(1, 2),
    )  # fmt: skip
    turns = sampling._arguments(built, np.random.default_rng(0), tvm.runtime.cpu())
    assert [argument.shape for argument in turns[0]] == [(4, 8), (8, 1024), (), (4, 1024)]
    assert len(turns) == (1 << 20) // (8 * 1024 * 4 + 64)
    addresses = [np.from_dlpack(turn[1]).ctypes.data for turn in turns]
    assert len(set(addresses)) == len(turns)
    assert all(address % 64 == 0 for address in addresses)
    assert len({np.from_dlpack(turn[0]).ctypes.data for turn in turns}) == 1
