"""What each part of the pipeline does to a small graph: it is named in every key, and a change must show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from onnx import ModelProto, helper
from tvm import relax

from tests.workers.conftest import Host, lower, run_pipeline
from tests.workers.models import conv_bn_relu, make_model, matmuls, normal, port
from workers.graph import pipeline, tasks
from workers.graph.constants import FoldWithNumpy


def kernels(model: ModelProto, host: Host, folder: Path) -> list[tuple[str, int]]:
    """Each distinct computation and how often an inference calls it."""
    _, imported = lower(model, host, folder)
    return [(task.name, task.calls) for task in tasks.extract(run_pipeline(imported, host))]


def chain() -> ModelProto:
    """Nine operators that are all computed element by element."""
    nodes = []
    previous = "x"
    for index, operator in enumerate(["Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Sqrt", "Erf", "Floor"]):
        nodes.append(helper.make_node(operator, [previous], [f"t{index}"]))
        previous = f"t{index}"
    nodes[-1].output[0] = "y"
    return make_model(nodes, [port("x", 2, 3)], [port("y", 2, 3)])


def common_subexpressions() -> ModelProto:
    """The same product twice, by two nodes."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("MatMul", ["x", "w"], ["b"]),
            helper.make_node("Softmax", ["a"], ["s"]),
            helper.make_node("Mul", ["s", "b"], ["y"]),
        ],
        [port("x", 4, 8)],
        [port("y", 4, 4)],
        {"w": normal(8, 4)},
    )


def foldable() -> ModelProto:
    """A product of two weights, which ONNX Runtime's and our folding both may compute."""
    return make_model(
        [helper.make_node("MatMul", ["v", "w"], ["c"]), helper.make_node("MatMul", ["x", "c"], ["y"])],
        [port("x", 4, 8)],
        [port("y", 4, 4)],
        {"v": normal(8, 8), "w": normal(8, 4)},
    )


def residual() -> ModelProto:
    return make_model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Sum", ["c", "x"], ["s"]),
            helper.make_node("Relu", ["s"], ["y"]),
        ],
        [port("x", 1, 8, 6, 6)],
        [port("y", 1, 8, 6, 6)],
        {"w": normal(8, 8, 3, 3)},
    )


@pytest.mark.parametrize(
    ("make", "distinct", "calls"),
    [
        (conv_bn_relu, 1, 1),  # convolution, folded batch normalisation, bias and ReLU
        (chain, 1, 1),
        (common_subexpressions, 2, 2),  # one product; softmax and multiplication fused
        (foldable, 1, 1),
        (residual, 1, 1),  # Sum of two is an addition, fused like one
        (matmuls, 3, 3),
    ],
)
def test_kernels(make: Callable[[], ModelProto], distinct: int, calls: int, host: Host, tmp_path: Path) -> None:
    """A graph comes down to as few kernels as fusion, folding and common subexpressions allow."""
    found = kernels(make(), host, tmp_path)
    assert (len(found), sum(count for _, count in found)) == (distinct, calls), found


def test_same_model_same_module(host: Host, tmp_path: Path) -> None:
    """The same model lowered twice gives structurally equal computations in the same order: records are found again."""
    found = [tasks.extract(run_pipeline(lower(matmuls(), host, tmp_path)[1], host)) for _ in range(2)]
    assert [task.structural_hash for task in found[0]] == [task.structural_hash for task in found[1]]
    for one, two in zip(*found, strict=True):
        assert tvm_ffi.structural_equal(one.module, two.module)


def test_numpy_folds_what_tvm_would_compile_kernels_for(host: Host, tmp_path: Path) -> None:
    """Biases reshaped, weights transposed and scales multiplied at import are constants without TVM's folding, the very
    same ones as with it."""
    model = make_model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("GlobalAveragePool", ["c"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gemm", ["f", "v", "d"], ["y"], transB=1, beta=0.3),
        ],
        [port("x", 1, 8, 6, 6)],
        [port("y", 1, 4)],
        {"w": normal(8, 8, 3, 3), "b": normal(8), "v": normal(4, 8), "d": normal(4)},
    )
    _, imported = lower(model, host, tmp_path)

    def folded(fold: tvm.transform.Pass) -> tvm.ir.IRModule:
        passes = [
            relax.transform.DecomposeOpsForInference(), fold,
            relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination(),
        ]  # fmt: skip
        with host.target, pipeline.pass_context():
            return tvm.transform.Sequential(passes)(imported.module)

    ours = folded(FoldWithNumpy())
    called = Counter(
        binding.value.op.name
        for block in ours["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    )
    assert called["relax.permute_dims"] == called["relax.multiply"] == 0
    assert called["relax.add"] == 2
    assert called["relax.reshape"] <= 1, "of what Flatten reads"
    assert tvm_ffi.structural_equal(ours, folded(relax.transform.FoldConstant()))
