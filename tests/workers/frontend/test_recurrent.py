"""LSTM, GRU and RNN written out step by step, against ONNX Runtime on the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper
from onnxruntime.quantization import quantize_dynamic

from tests.workers.conftest import Host, differences
from tests.workers.models import make_model, normal, port, save
from tuning_db.errors import UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend.onnx_import import import_onnx
from workers.frontend.recurrent import MOST_STEPS

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recognizer(steps: int = 12) -> ModelProto:
    """The end of a text recognizer as PyTorch exports it: two bidirectional LSTMs over the columns of an image."""
    nodes, weights = [], {}
    source = "x"
    for layer, size in enumerate((10, 16)):
        names = [f"w{layer}", f"r{layer}", f"b{layer}"]
        weights |= dict(zip(names, (normal(2, 32, size), normal(2, 32, 8, seed=1), normal(2, 64, seed=2)), strict=True))
        states = ["zeros", "zeros"]
        nodes += [
            helper.make_node(
                "LSTM", [source, *names, "", *states], [f"y{layer}", f"h{layer}", f"c{layer}"],
                direction="bidirectional", hidden_size=8,
            ),
            helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"t{layer}", "joined"], [f"s{layer}"]),
        ]  # fmt: skip
        source = f"s{layer}"
    weights |= {"zeros": np.zeros((2, 1, 8), np.float32), "joined": np.array([0, 0, -1])}
    return make_model(nodes, [port("x", steps, 1, 10)], [port("s1", steps, 1, 16), port("c1", 2, 1, 8)], weights)


def every_input(kind: str, lengths: tuple[int, ...], **attributes: Any) -> ModelProto:
    """Two directions of four steps over three sequences, with a state before the first that is fed."""
    gates = GATES[kind]
    weights = {
        "w": 4 * normal(2, gates * 5, 6),
        "r": 4 * normal(2, gates * 5, 5, seed=1),
        "b": 4 * normal(2, gates * 10, seed=2),
        "p": 4 * normal(2, 15, seed=3),
        "lengths": np.array(lengths, np.int32),
    }
    inputs = ["x", "w", "r", "b", "lengths", "h0"]
    outputs = [port("y", 4, 2, 3, 5), port("h", 2, 3, 5)]
    fed = [port("x", 4, 3, 6), port("h0", 2, 3, 5)]
    if kind == "LSTM":
        inputs += ["c0", "p"]
        outputs.append(port("c", 2, 3, 5))
        fed.append(port("c0", 2, 3, 5))
    node = helper.make_node(
        kind, inputs, [output.name for output in outputs], hidden_size=5, direction="bidirectional", **attributes
    )
    return make_model([node], fed, outputs, weights)


@pytest.mark.parametrize(
    "model",
    [
        recognizer(),
        every_input(
            "LSTM", (4, 1, 2), clip=0.7, activations=["HardSigmoid", "Affine", "Tanh", "Sigmoid", "Relu", "ScaledTanh"],
            activation_alpha=[0.3, 0.8, 1.1], activation_beta=[0.4, 0.1, 0.9],
        ),
        every_input("LSTM", (3, 3, 1), input_forget=1),
        every_input("GRU", (4, 1, 2), activations=["Sigmoid", "LeakyRelu", "HardSigmoid", "Tanh"]),
        every_input("GRU", (2, 3, 4), linear_before_reset=1, clip=0.5),
        every_input("RNN", (1, 4, 3), clip=0.4, activations=["Softsign", "Elu"]),
    ],
    ids=["recognizer", "lstm", "lstm-coupled", "gru", "gru-reset-after", "rnn"],
)  # fmt: skip
def test_equals_onnx_runtime(model: ModelProto, host: Host, tmp_path: Path) -> None:
    """Directions, states, lengths, peepholes, clipping and activations mean what they mean in ONNX Runtime."""
    assert differences(model, host, tmp_path) == []


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    "model",
    [recognizer(5), every_input("LSTM", (4, 4, 4), clip=2.5), every_input("LSTM", (3, 3, 3), input_forget=1)],
    ids=["recognizer", "clipped", "shorter"],
)
def test_dynamic_integers(model: ModelProto, per_channel: bool, host: Host, tmp_path: Path) -> None:
    """LSTMs as ONNX Runtime's dynamic quantizer writes them, one behind another too, are products of integers, whose
    numbers are those of ONNX Runtime."""
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(save(model, tmp_path), path, per_channel=per_channel, op_types_to_quantize=["LSTM"])
    quantized = onnx.load(path)
    assert {node.op_type for node in quantized.graph.node} & {"LSTM", "DynamicQuantizeLSTM"} == {"DynamicQuantizeLSTM"}
    assert differences(quantized, host, tmp_path) == []


def test_dynamic_integers_of_lengths(tmp_path: Path) -> None:
    """Sequences of several lengths share the scale of their states with what has ended: refused, with what to do."""
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(save(every_input("LSTM", (4, 1, 2)), tmp_path), path, op_types_to_quantize=["LSTM"])
    inputs = [("x", (4, 3, 6)), ("h0", (2, 3, 5)), ("c0", (2, 3, 5))]
    with pytest.raises(UnsupportedOperator, match=r"DynamicQuantizeLSTM .* different lengths.* bind a batch of 1"):
        import_onnx(path, [TensorSpec(name, "float32", shape) for name, shape in inputs], tmp_path)


def test_too_many_steps(tmp_path: Path) -> None:
    """A sequence whose steps are too many to be written out is refused by the node's name, with how many may be."""
    steps = MOST_STEPS // 2 + 1
    with pytest.raises(
        UnsupportedOperator, match=f"operator LSTM .* takes {2 * steps} steps, and at most {MOST_STEPS}"
    ):
        import_onnx(save(recognizer(steps), tmp_path), (TensorSpec("x", "float32", (steps, 1, 10)),), tmp_path)
