"""Small networks for whole jobs: one of every kind of layer, its fine-tuned twins, and a larger one that shares most
of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

CHANNELS = 16


def write_net(path: Path, seed: int, *, larger: bool = False) -> Path:
    """Two convolutions, a depthwise one, pooling, a dense layer and a softmax, in ONNX; the batch is left open.

    The weights come from `seed` alone. `larger` has one more convolution, 5x5, between two layers of equal shape.
    """
    generator = np.random.default_rng(seed)
    weights: dict[str, Any] = {}
    nodes: list[NodeProto] = []

    def conv(data: str, name: str, channels_in: int, kernel: int, groups: int = 1) -> str:
        shape = (CHANNELS, channels_in // groups, kernel, kernel)
        weights[f"{name}_w"] = generator.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5
        weights[f"{name}_b"] = generator.standard_normal(CHANNELS) * 0.1
        nodes.append(
            helper.make_node(
                "Conv", [data, f"{name}_w", f"{name}_b"], [f"{name}_c"],
                kernel_shape=[kernel, kernel], pads=[kernel // 2] * 4, group=groups,
            )
        )  # fmt: skip
        nodes.append(helper.make_node("Relu", [f"{name}_c"], [name]))
        return name

    last = conv("image", "first", 3, 3)
    last = conv(last, "second", CHANNELS, 3)
    if larger:
        last = conv(last, "wide", CHANNELS, 5)
    last = conv(last, "depthwise", CHANNELS, 3, groups=CHANNELS)
    weights["dense_w"] = generator.standard_normal((10, CHANNELS)) * 0.3
    weights["dense_b"] = generator.standard_normal(10) * 0.1
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "dense_w", "dense_b"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["N", 3, 28, 28])],
        [helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def image(batch: int = 1) -> dict[str, list[int]]:
    """The shapes of its inputs."""
    return {"image": [batch, 3, 28, 28]}
