"""One library with functions for a few batches, run for every batch of a range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import helper
from tvm.runtime.vm import VirtualMachine

from tests.workers.models import make_model, normal, port, save
from tuning_db.keys import TensorSpec
from tuning_db.pieces import OutOfRange, Points
from tuning_db.ranged import Ranged
from workers.frontend.onnx_import import import_onnx
from workers.graph import pipeline
from workers.graph.rows import prove
from workers.packaging import library
from workers.packaging.running import outputs_of

POINTS = (1, 4)
HIGH = 9


def test_every_batch_of_a_range(tmp_path: Path) -> None:
    """A library of two functions, weights stored once, agrees with ONNX Runtime for every batch of the range, and is
    not reached by one that lies outside. One output holds the batch in its second axis, one has none."""
    weights = {"w": normal(64, 2047), "v": normal(2047, 3)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "s"], ["b"]),
        helper.make_node("Tanh", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["y"]),
        helper.make_node("Transpose", ["y"], ["t"], perm=[1, 0]),
        helper.make_node("Abs", ["s"], ["u"]),
    ]
    outputs = [port("y", "N", 3), port("t", 3, "N"), port("u", 2047)]
    path = save(make_model(nodes, [port("x", "N", 64), port("s", 2047)], outputs, weights), tmp_path)
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    modules = {}
    for point in POINTS:
        specs = (TensorSpec("x", "float32", (point, 64)), TensorSpec("s", "float32", (2047,)))
        imported = import_onnx(path, specs, tmp_path)
        with target, pipeline.pass_context():
            modules[f"main_{point}"] = pipeline.lower_operators()(pipeline.simplify()(imported.module))
    slabs = prove(modules[f"main_{POINTS[-1]}"], [0, None], POINTS[-1])
    built = tmp_path / "library.so"
    plans = library.compile_functions(library.merge(modules), target, built)
    assert set(plans) == set(modules)
    assert all(plan.kernels.total() for plan in plans.values())
    assert built.stat().st_size < 1.5 * sum(array.nbytes for array in weights.values())

    machine = VirtualMachine(tvm.runtime.load_module(str(built)), tvm.cpu())
    called: list[int] = []

    def run(point: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        called.append(point)
        return outputs_of(machine[f"main_{point}"](*map(tvm.runtime.tensor, arrays)))

    ranged = Ranged(
        Points(1, HIGH, {1: 1.0, 4: 2.0}),
        {point: lambda arrays, point=point: run(point, arrays) for point in POINTS},
        ["x", "s"],
        [0, None],
        slabs,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in range(1, HIGH + 1):
        x, s = normal(batch, 64, seed=batch), normal(2047, seed=-batch % 7)
        for wanted, got in zip(session.run(None, {"x": x, "s": s}), ranged([x, s]), strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert set(called) == set(POINTS)
    called.clear()
    with pytest.raises(OutOfRange, match="'x': dimension 0 is 10; the library serves 1 to 9"):
        ranged([normal(10, 64), normal(2047)])
    assert called == []
