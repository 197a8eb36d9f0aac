"""What an inference of a library calls, and the memory of its intermediates, on small graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.samples import make_key
from tests.workers.conftest import Host, differences, lower
from tests.workers.graph.nets import Net
from tests.workers.graph.test_graphs import densenet, resnet
from tests.workers.graph.test_operators import attention
from tuning_db.jobs import Claim
from tuning_db.store import TuningStore
from workers.graph import pipeline
from workers.graph.memory import MemoryPlan, PlaceIntermediates
from workers.graph.operators import Model
from workers.packaging import library
from workers.search.candidates import Choice
from workers.search.records import Records

SCOPE = make_key().record_scope()


def plan_of(module: object, host: Host, store: TuningStore, claim: Claim) -> MemoryPlan:
    with host.target, pipeline.pass_context():
        model = Model(pipeline.simplify()(module), host.target, host.cpu.lanes, winograd=False)
    operators = model.extract(Records(store, claim, SCOPE).adopt)
    assembled = model.assemble({o.name: Choice(o.variants[0], None, None, None) for o in operators})
    place = PlaceIntermediates()
    with host.target, pipeline.pass_context():
        pipeline.lower_to_vm(place)(assembled)
    assert place.plan.kernels.total() <= sum(operator.weight for operator in operators)
    return place.plan


def kinds(plan: MemoryPlan) -> Counter[str]:
    """Calls by kind: a kernel's name without its number."""
    found: Counter[str] = Counter()
    for name, calls in plan.kernels.items():
        found[re.sub(r"_?\d+$", "", name)] += calls
    return found


@pytest.mark.parametrize(
    ("make", "expected", "concatenations"),
    [
        # Two blocks of two convolutions, one with a convolution beside: additions and ReLUs are in the convolutions.
        (resnet, {"conv3x3": 5, "max_pool": 1, "conv1x1": 1, "plain": 1}, 0),
        # BatchNorm and ReLU in front of a convolution are in it; parts are written where they belong.
        (densenet, {"conv3x3": 3, "plain": 1}, 2),
        (lambda: attention(2, rows=32), {"dense": 2, "matmul": 2, "softmax": 1, "reshape": 1}, 0),
    ],
)
def test_kernels_of_small_graphs(
    make: Callable[[], ModelProto], expected: dict[str, int], concatenations: int, host: Host,
    sqlite_store: TuningStore, claim: Claim, tmp_path: Path,
) -> None:  # fmt: skip
    """Elementwise operators are fused into what is heavy, layouts change at the edges, concatenations are dropped."""
    _, imported = lower(make(), host, tmp_path)
    plan = plan_of(imported.module, host, sqlite_store, claim)
    assert (dict(kinds(plan)), plan.concatenations) == (expected, concatenations)
    # A result that is only called another shape is copied: outputs share memory with nothing.
    assert plan.layout_transforms == expected.get("plain", 0) + expected.get("reshape", 0)
    assert 0 < plan.planned_bytes < plan.unplanned_bytes


def test_transforms_are_told_by_what_they_do(
    host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path
) -> None:
    """A transposition by itself counts as a transform of layout; one in a kernel that computes, a slice and a kernel
    that has the word in its name do not."""
    net = Net()
    x, y = net.input(4, 6), net.input(6, 4)
    turned = net("Transpose", x, perm=[1, 0])
    model = net.model(
        net("Softmax", turned, axis=-1), net("Exp", net("Transpose", y, perm=[1, 0])),
        net("Slice", y, *(net.constant(np.array([n])) for n in (1, 3, 0))),
    )  # fmt: skip
    _, imported = lower(model, host, tmp_path)
    plan = plan_of(imported.module, host, sqlite_store, claim)
    assert plan.layout_transforms == 1
    assert sum("transpose" in name for name in plan.kernels) == 2, plan.kernels


def test_the_plan_of_a_compiled_library(host: Host, tmp_path: Path) -> None:
    """Compiling tells what the library calls."""
    _, imported = lower(attention(), host, tmp_path)
    with host.target, pipeline.pass_context():
        module = pipeline.lower_operators()(pipeline.simplify()(imported.module))
    plan = library.compile_library(module, host.target, tmp_path / "it.so")
    assert plan.kernels.total() >= 6
    assert plan.planned_bytes < plan.unplanned_bytes


def ranked() -> ModelProto:
    """The largest three, by their values and by what lies in their places elsewhere, and nothing of them given out."""
    net = Net()
    values = net("TopK", net("Relu", net.input(2, 9)), net.constant(np.array([3])), axis=1, outputs=2)
    chosen = net("GatherElements", net("Neg", net.input(2, 9)), f"{values}_1", axis=1)
    return net.model(net("Mul", net("Exp", values), chosen))


def test_what_is_handed_to_the_runtime(host: Host, tmp_path: Path) -> None:
    """Tensors that TVM's runtime sorts, or sorts into, share no storage: it reads and writes at a storage's begin."""
    assert differences(ranked(), host, tmp_path) == []
