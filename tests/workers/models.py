"""Small ONNX models for tests, and how they are written to files."""

from __future__ import annotations

import site
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Standard normal numbers, small enough that sums of a few hundred products stay near 1."""
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(np.float32)


def port(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def make_model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: dict[str, NDArray[Any]] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    functions: Sequence[FunctionProto] = (),
) -> ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        list(inputs),
        list(outputs),
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    domains = {function.domain: 1 for function in functions} | {"": opset}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
        ir_version=ir_version,
        functions=list(functions),
    )


def save(model: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    onnx.save_model(model, path)
    return path


def text_model(file: str) -> Path:
    """A real model: one of PaddleOCR's, as rapidocr-onnxruntime ships them."""
    return next(Path(folder) / "rapidocr_onnxruntime/models" / file for folder in site.getsitepackages())


def matmuls() -> ModelProto:
    """Two matrix products side by side, added, softmax: `y = softmax(x·left + x·right)`."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "left"], ["a"], name="first"),
            helper.make_node("MatMul", ["x", "right"], ["b"], name="second"),
            helper.make_node("Add", ["a", "b"], ["c"], name="sum"),
            helper.make_node("Softmax", ["c"], ["y"], name="last", axis=-1),
        ],
        [port("x", "N", 8)],
        [port("y", "N", 4)],
        {"left": normal(8, 4, seed=1), "right": normal(8, 4, seed=2)},
    )


def conv_bn_relu(channels: int = 16, size: int = 14) -> ModelProto:
    """A 3x3 convolution with batch normalisation and ReLU, as exporters write it; the batch is symbolic."""
    bn = {name: normal(channels, seed=i) for i, name in enumerate(("scale", "shift", "mean"), start=3)}
    return make_model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"]),
            helper.make_node("Relu", ["n"], ["y"]),
        ],
        [port("x", "N", 8, size, size)],
        [port("y", "N", channels, size, size)],
        {"w": normal(channels, 8, 3, 3), **bn, "variance": np.abs(normal(channels, seed=9)) + 1},
    )


def determinant() -> ModelProto:
    """An operator that cannot be compiled, on data."""
    return make_model([helper.make_node("Det", ["x"], ["y"], name="volume")], [port("x", 5, 3, 3)], [port("y", 5)])
