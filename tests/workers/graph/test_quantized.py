"""Quantized models, as ONNX Runtime's quantizer writes them, in integers from first quantization to last."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from tests.workers.conftest import Host
from tests.workers.graph.kernels import check, plain, take
from tests.workers.graph.nets import Net
from tests.workers.graph.test_graphs import calls, classifier, resnet
from tests.workers.models import save


class Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime publishes no types
    """Four samples of standard normal numbers."""

    def __init__(self, model: ModelProto) -> None:
        generator = np.random.default_rng(0)
        shapes = {x.name: [d.dim_value for d in x.type.tensor_type.shape.dim] for x in model.graph.input}
        self._samples: Iterator[dict[str, Any]] = iter(
            [
                {name: generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
                for _ in range(4)
            ]
        )

    def get_next(self) -> dict[str, Any] | None:
        return next(self._samples, None)


def quantized(
    model: ModelProto, folder: Path, activation: Any = QuantType.QUInt8, *, per_channel: bool = True
) -> ModelProto:
    """The model with quantization and dequantization round every operator."""
    logging.disable(logging.WARNING)
    try:
        quantize_static(
            save(model, folder, "float.onnx"), folder / "quantized.onnx", Reader(model), quant_format=QuantFormat.QDQ,
            per_channel=per_channel, activation_type=activation, weight_type=QuantType.QInt8,
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(folder / "quantized.onnx")


def quanta(model: ModelProto) -> dict[str, float]:
    """The scale of each output that is dequantized last."""
    numbers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    outputs = {output.name for output in model.graph.output}
    return {
        node.output[0]: float(numbers[node.input[1]])
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.output[0] in outputs
    }


def point() -> ModelProto:
    """A convolution of one pixel with ReLU."""
    net = Net()
    return net.model(net("Relu", net.conv(net.input(1, 24, 6, 6), 24, 20)))


def in_blocks(host: Host, folder: Path, model: ModelProto) -> list[str]:
    """What an inference calls."""
    module, _ = take(model, host, folder).graph.emit(plain)
    return calls(module)


@pytest.mark.parametrize("make", [point, resnet, classifier])
def test_networks_are_computed_in_integers(make: Any, host: Host, tmp_path: Path) -> None:
    """Within a quantum of ONNX Runtime's unoptimised graph."""
    model = quantized(make(), tmp_path)
    taken = take(model, host, tmp_path)
    module, _ = taken.graph.emit(plain)
    print(calls(module))
    check(taken, host, count=1, quanta=quanta(model))
