"""Whole models: divided into operators, every operator scheduled, assembled, compiled and compared as a job does it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.samples import make_key
from tests.workers.conftest import Host, lower
from tests.workers.graph.nets import Net
from tests.workers.graph.test_graphs import classifier, densenet, diamond, odd_concat, resnet, squeeze_and_excite
from tests.workers.models import conv_bn_relu, make_model, matmuls, normal, port
from tuning_db.errors import BuildFailed
from tuning_db.jobs import Claim
from tuning_db.store import TuningStore
from workers.graph import pipeline
from workers.graph.operators import Model
from workers.packaging import library
from workers.packaging.reference import Comparison, run
from workers.search.candidates import Choice, Operator
from workers.search.forked_steps import schedule_configs
from workers.search.records import Records
from workers.search.templates.knobs import Cpu
from workers.search.templates.registry import TEMPLATES

SCOPE = make_key().record_scope()


def choose(operator: Operator, cpu: Cpu, generator: random.Random) -> Choice:
    """Any variant under any choice of its template; as it is where it has none."""
    variant = generator.choice(operator.variants)
    workload = variant.workload
    if workload.template is None:
        return Choice(variant, None, None, None)
    template = TEMPLATES[workload.template]
    config = generator.choice(template.configs(dict(workload.geometry or {}), cpu))
    [trace] = schedule_configs(workload, template, cpu, [config])
    assert trace is not None, (operator.name, variant.name, config)
    return Choice(variant, None, config, trace)


def attention(heads: int = 1, rows: int = 8) -> ModelProto:
    """Projected queries, keys and values; heads cut apart and joined; what was read is added at the end."""
    net, size = Net(), 16
    width = heads * size
    x = net.input(2, rows, width)
    apart, together = (net.constant(np.array(s)) for s in ((2, rows, heads, size), (2, rows, width)))
    q, k, v = (
        net("Transpose", net("Reshape", net("MatMul", x, net.weights(width, width)), apart), perm=perm)
        for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    )
    mixed = net("MatMul", net("Softmax", net("MatMul", q, k), axis=-1), v)
    joined = net("Reshape", net("Transpose", mixed, perm=[0, 2, 1, 3]), together)
    return net.model(net("Add", net("MatMul", joined, net.weights(width, width)), x))


def rows_regrouped() -> ModelProto:
    """A product whose rows are divided into heads only afterwards: not heads of the product."""
    net = Net()
    x = net.input(2, 6, 16)
    product = net("MatMul", x, net("Transpose", net.input(2, 16, 16), perm=[0, 2, 1]))
    apart = net("Reshape", product, net.constant(np.array([2, 2, 3, 16])))
    return net.model(net("Reshape", net("Transpose", apart, perm=[0, 2, 1, 3]), net.constant(np.array([2, 3, 32]))))


def halves() -> ModelProto:
    return make_model(
        [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])],
        [port("x", 1, 8, 6, 6, dtype=TensorProto.FLOAT16)],
        [port("y", 1, 8, 4, 4, dtype=TensorProto.FLOAT16)],
        {"w": normal(8, 8, 3, 3).astype("float16")},
    )


def not_ours() -> ModelProto:
    """Neither convolution nor product, and integers in between."""
    net = Net()
    x = net.input(3, 20)
    return net.model(
        net("Softmax", net("Transpose", x, perm=[1, 0]), axis=0),
        net("Cast", net("ArgMax", x, axis=1), to=TensorProto.FLOAT),
    )


def islands() -> ModelProto:
    """Operators that are TVM's between convolutions, and reshapes of blocked tensors."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 8, 8), 3, 20, (3, 3), pads=[1] * 4))
    y = net("Softmax", x, axis=1)
    y = net("Pad", net.conv(y, 20, 18), net.constant(np.array([0, 0, 1, 0, 0, 0, 0, 1])), mode="reflect")
    y = net("Reshape", net.conv(y, 18, 12, (2, 2)), net.constant(np.array([1, 3, 4, 8, 8])))
    flat = net("Reshape", x, net.constant(np.array([20, 64])))
    return net.model(net("ReduceMax", y, axes=[2], keepdims=0), net("MatMul", flat, net.weights(64, 5)))


def spread_integers() -> ModelProto:
    """Integers spread over new axes and combined, as in tvm#17947, whose tuned library held 9 wrong ones of 60."""
    return make_model(
        [
            helper.make_node("Expand", ["x", "shape"], ["e"]),
            helper.make_node("Mul", ["e", "c"], ["m"]),
            helper.make_node("ReduceSum", ["m", "axis"], ["s"], keepdims=1),
            helper.make_node("Sub", ["e", "s"], ["y"]),
        ],
        [port("x", 4, 1, dtype=TensorProto.INT64)],
        [port("y", 5, 4, 3, dtype=TensorProto.INT64), port("e", 5, 4, 3, dtype=TensorProto.INT64)],
        {"shape": np.array([5, 4, 3]), "c": np.arange(-251, 252, 9)[:15].reshape(5, 1, 3), "axis": np.array([0])},
    )


MODELS = [resnet, densenet, squeeze_and_excite, classifier, diamond, odd_concat, conv_bn_relu, matmuls, attention,
          rows_regrouped, halves, not_ours, islands, spread_integers]  # fmt: skip


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_assembled_models(
    make: Callable[[], ModelProto], seed: int, host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path
) -> None:
    """Any choice for every operator gives a library that agrees with ONNX Runtime."""
    inputs, imported = lower(make(), host, tmp_path)
    with host.target, pipeline.pass_context():
        simplified = pipeline.simplify()(imported.module)
    model = Model(simplified, host.target, host.cpu.lanes, winograd=True)
    operators = model.extract(Records(sqlite_store, claim, SCOPE).adopt)
    generator = random.Random(seed)
    choices = {operator.name: choose(operator, host.cpu, generator) for operator in operators}
    library.compile_library(model.assemble(choices), host.target, tmp_path / "tuned.so")
    comparison = Comparison(
        str(imported.bound), {"tuned": str(tmp_path / "tuned.so")}, inputs, threads=2, rounds=1,
        min_sample_s=1e-4,
    )  # fmt: skip
    checks = run(comparison)["checks"]
    assert isinstance(checks, dict)
    verdict = checks["tuned"]
    assert isinstance(verdict, dict)
    assert verdict["problem"] is None, {name: choice.config for name, choice in choices.items()}


def extracted(make: Callable[[], ModelProto], host: Host, store: TuningStore, claim: Claim, folder: Path, *,
              winograd: bool = True) -> tuple[Model, list[Operator]]:  # fmt: skip
    _, imported = lower(make(), host, folder)
    with host.target, pipeline.pass_context():
        model = Model(pipeline.simplify()(imported.module), host.target, host.cpu.lanes, winograd)
    return model, model.extract(Records(store, claim, SCOPE).adopt)


def test_operators_of_a_model(host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path) -> None:
    """Each operator once with its calls, its variants by name, and the template and geometry of each."""
    _, operators = extracted(resnet, host, sqlite_store, claim, tmp_path)
    by_name = {operator.name: operator for operator in operators}
    # Equal convolutions are one operator: the first of each block; with an addition and ReLU behind it another.
    assert sum(operator.weight for operator in operators) == 8
    assert all(v.workload.template in TEMPLATES for operator in operators for v in operator.variants)
    kinds = {tuple(v.name for v in operator.variants) for operator in operators}
    assert ("direct", "winograd2", "winograd4", "winograd6") in kinds or any("winograd2" in k for k in kinds)
    assert by_name["max_pool_0"].variants[0].name == "window"
    assert [operator.name for operator in operators][-1].startswith("plain")


def test_without_rounding(host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path) -> None:
    """A request that forbids Winograd's algorithm gets the other variants alone."""
    _, operators = extracted(resnet, host, sqlite_store, claim, tmp_path, winograd=False)
    names = {variant.name for operator in operators for variant in operator.variants}
    assert names == {"direct", "flat", "window", "copy"}


def test_models_without_a_kernel_of_ours(host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path) -> None:
    """What TVM lowers are operators too, each with a template for plain loops."""
    _, operators = extracted(not_ours, host, sqlite_store, claim, tmp_path)
    assert operators
    assert {v.workload.template for operator in operators for v in operator.variants} <= {"generic", "rowwise"}


def test_records_of_other_functions(host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path) -> None:
    """A choice whose workload is not the model's own is an error, not an untuned library."""
    model, [operator, *_] = extracted(not_ours, host, sqlite_store, claim, tmp_path)
    _, [other, *_] = extracted(tanh, host, sqlite_store, claim, tmp_path)
    wrong = choose(other, host.cpu, random.Random(0))
    variant = replace(operator.variants[0], workload=wrong.variant.workload)
    with pytest.raises(BuildFailed, match="did not take their record"):
        model.assemble({operator.name: Choice(variant, None, wrong.config, wrong.trace)})


def tanh() -> ModelProto:
    net = Net()
    return net.model(net("Tanh", net.input(5, 7)))
