"""Which names of nodes a submission may exclude: every one that the quantizer will know, and no misspelt one."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import ModelProto, helper
from onnxruntime.quantization import registry

from tests.workers.frontend.test_onnx_model import celu, scaled
from tests.workers.models import conv_bn_relu, make_model, matmuls, normal, port, save
from tests.workers.quantize.test_quantize import residual_net
from tuning_db.errors import InvalidRequest
from tuning_db.keys import TensorSpec
from workers.frontend import onnx_model
from workers.frontend.operators import QUANTIZABLE
from workers.quantize import exclusions
from workers.quantize.__main__ import normalised


def unnamed() -> ModelProto:
    """Nodes without a name, one that makes a constant, and a transposition that Gemm takes in."""
    return make_model(
        [
            helper.make_node("Transpose", ["x"], ["t"], name="turn"),
            helper.make_node("Gemm", ["t", "w"], ["g"]),
            helper.make_node("Add", ["a", "a"], ["aa"]),
            helper.make_node("Add", ["g", "aa"], ["y"]),
        ],
        [port("x", 8, 2)],
        [port("y", 2, 4)],
        {"w": normal(8, 4), "a": normal(4, seed=1)},
    )


@pytest.mark.parametrize(
    "model", [residual_net(), matmuls(), unnamed(), scaled(), celu(), conv_bn_relu()],
    ids=["residual", "matmuls", "unnamed", "function", "standard-function", "batch-norm"],
)  # fmt: skip
def test_names_that_the_quantizer_knows_pass(model: ModelProto, tmp_path: Path) -> None:
    """Every node of the model that is quantized has a name that the check of the uploaded one lets pass, also where it
    was fused, came out of a function or was called by its output: reports tell such names."""
    inputs = tuple(
        TensorSpec(p.name, p.dtype, tuple(d if isinstance(d, int) else 3 for d in p.shape))
        for p in onnx_model.inputs_of(model)
    )
    names = [node.name for node in normalised(save(model, tmp_path), inputs, tmp_path, "int8").graph.node]
    uploaded = onnx_model.load(tmp_path / "model.onnx", leave_out_from_bytes=64)
    onnx_model.bind(uploaded, inputs)
    exclusions.check(uploaded, names)
    for name in (name for name in names if "/" not in name):
        with pytest.raises(InvalidRequest, match="the model has no node"):
            exclusions.check(uploaded, [*names, f"{name}9"])


def test_nearest_names() -> None:
    """What is misspelt is refused with the names that are nearest, or with where to find them."""
    with pytest.raises(InvalidRequest, match="no node 'block0_conv'; did you mean 'block0_conv") as caught:
        exclusions.check(residual_net(), ["stem", "block0_conv"])
    assert caught.value.field == "quantization.exclude"
    with pytest.raises(InvalidRequest, match="tunery inspect MODEL --nodes"):
        exclusions.check(matmuls(), ["?"])


def test_nodes_are_listed() -> None:
    """Nodes that int8 computes otherwise, as exclusions name them; what constants alone decide is none of them."""
    assert exclusions.nodes(unnamed()) == [("turn", "Transpose"), ("g", "Gemm"), ("y", "Add")]
    assert exclusions.nodes(conv_bn_relu())[0][1] == "Conv"


def test_operators_are_those_of_the_installed_quantizer() -> None:
    """The table says what ONNX Runtime's registries do, its own operators left out."""
    known = {*registry.QDQRegistry, *registry.QLinearOpsRegistry, *registry.IntegerOpsRegistry}
    assert known - {"Attention", "EmbedLayerNormalization"} == QUANTIZABLE


def test_what_is_meant() -> None:
    """A name means its node and what was fused into it, and nothing of a scope that is called the same."""
    names = ("layer", "layer/MatMulAddFusion", "layer/dense/MatMulAddFusion", "layer/dense", "layers/MatMulAddFusion")
    nodes = [helper.make_node("Relu", [f"t{place}"], [f"t{place + 1}"], name) for place, name in enumerate(names)]
    model = make_model(nodes, [port("t0", 2)], [port(f"t{len(names)}", 2)])
    assert exclusions.meant_by(model, ["layer"]) == ["layer", "layer/MatMulAddFusion"]
    assert exclusions.meant_by(model, ["layers", "layer/dense"]) == [
        "layers/MatMulAddFusion", "layer/dense/MatMulAddFusion", "layer/dense"
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="there is no node 'dense'"):
        exclusions.meant_by(model, ["dense"])
