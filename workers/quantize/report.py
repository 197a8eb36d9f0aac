"""What quantization costs: the quantized model against fp32 on the user's samples, output by output, layer by layer.

SQNR is the signal-to-quantization-noise ratio in decibels, 10 log10(Σ x² / Σ (x − y)²) over all samples, x of the fp32
model, y of the quantized one; None where they are equal. A layer has two: `own_sqnr_db`, where it is fed what the fp32
model feeds it, so that all noise is of its own weights and inputs being quantized; and `sqnr_db` within the quantized
model, with all that came before. Layers are sorted by the first, worst first: that is the order in which to try what
leaving them out saves. A layer that is left out keeps the noise of inputs that others want quantized, and stays listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from tuning_db.keys import Json
from workers.quantize.samples import Sample, Samples

_SHADOW: Final = "quantized/"
#: What the quantizer calls a tensor before quantization if its own name has to be that of the dequantized one.
_BEFORE_QUANTIZATION: Final = "_QuantizeLinear_Input"
_QUANTIZED: Final = {"DequantizeLinear", "MatMulInteger", "ConvInteger"}
#: What makes float32 weights of those in float16.
_WIDENED: Final = "Cast"


@dataclass(slots=True)
class _Power:
    """Sums over samples from which SQNR and cosine come."""

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    quantized: float = 0.0

    def add(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        x, y = x.astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1)
        self.signal += float(x @ x)
        self.noise += float((x - y) @ (x - y))
        self.product += float(x @ y)
        self.quantized += float(y @ y)

    @property
    def sqnr_db(self) -> float | None:
        if self.noise == 0:
            return None
        # A signal of nothing but zeros has no ratio; a hundred orders below the noise sorts first and is JSON.
        return 10 * math.log10(max(self.signal, self.noise * 1e-10) / self.noise)

    @property
    def cosine(self) -> float | None:
        length = math.sqrt(self.signal * self.quantized)
        return self.product / length if length else None


@dataclass(slots=True)
class _Layer:
    """A node of the fp32 model, what it is compared by, and the sums of that."""

    node: NodeProto
    output: str  #: the fp32 model's tensor
    shadow: str  #: the quantized model's
    #: The ReLU or Clip that the quantizer took away, since the zero point of the next QuantizeLinear does the same:
    #: `output` is of it, and `shadow` is put through it first.
    activation: NodeProto | None
    own: _Power = field(default_factory=_Power)
    within: _Power = field(default_factory=_Power)


def compare(model: ModelProto, quantized: ModelProto, samples: Samples, scratch: Path) -> dict[str, Json]:
    """``{"samples", "outputs": [{"output", "cosine", "sqnr_db", "top1_agreement"}], "layers": [{"node", "operator",
    "output", "own_sqnr_db", "sqnr_db"}]}`` of `quantized`, made of `model`.

    The quantized model is run as its graph says, between DequantizeLinear and QuantizeLinear in floats: integer kernels
    differ by rounding. Outputs that are integers have no SQNR, and `top1_agreement`, the part of rows with the same
    largest entry, only [n, classes] has.
    """
    outputs = _compare_outputs(model, quantized, samples)
    layers = _quantized_layers(model, quantized)
    for isolated in (True, False):
        probe = scratch / f"probe-{isolated}.onnx"
        onnx.save_model(_probe(model, quantized, layers, isolated=isolated), probe)
        session = _session(probe.read_bytes(), optimise=False)
        wanted = [output.name for output in session.get_outputs()]
        for sample in samples:
            values = dict(zip(wanted, session.run(wanted, sample), strict=True))
            for number, layer in enumerate(layers):
                power = layer.own if isolated else layer.within
                power.signal += float(values[f"signal/{number}"])
                power.noise += float(values[f"noise/{number}"])
    layers.sort(key=lambda layer: (_order(layer.own), _order(layer.within), layer.node.name))
    return {
        "samples": len(samples),
        "outputs": list(outputs),
        "layers": [
            {
                "node": layer.node.name,
                "operator": layer.node.op_type,
                "output": layer.output,
                "own_sqnr_db": layer.own.sqnr_db,
                "sqnr_db": layer.within.sqnr_db,
            }
            for layer in layers
        ],
    }


def _order(power: _Power) -> float:
    return math.inf if power.sqnr_db is None else power.sqnr_db


def _session(model: bytes, *, optimise: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        # Fusing would take away the very tensors that are compared.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _compare_outputs(model: ModelProto, quantized: ModelProto, samples: Samples) -> list[dict[str, Json]]:
    reference = _session(model.SerializeToString(), optimise=True)
    # Optimised, ONNX Runtime quantizes the weights of excluded convolutions all the same, by one scale each.
    candidate = _session(quantized.SerializeToString(), optimise=False)
    names = [output.name for output in reference.get_outputs()]
    powers = {name: _Power() for name in names}
    floats, agreed, rows = set(names), dict.fromkeys(names, 0), dict.fromkeys(names, 0)

    def add(sample: Sample) -> None:
        for name, x, y in zip(names, reference.run(names, sample), candidate.run(names, sample), strict=True):
            if x.dtype.kind != "f":
                floats.discard(name)
                continue
            powers[name].add(x, y)
            if x.ndim == 2 and x.shape[1] > 1:
                rows[name] += len(x)
                agreed[name] += int(np.count_nonzero(x.argmax(1) == y.argmax(1)))

    for sample in samples:
        add(sample)
    return [
        {
            "output": name,
            "cosine": powers[name].cosine if name in floats else None,
            "sqnr_db": powers[name].sqnr_db if name in floats else None,
            "top1_agreement": agreed[name] / rows[name] if rows[name] else None,
        }
        for name in names
    ]


def _quantized_layers(model: ModelProto, quantized: ModelProto) -> list[_Layer]:
    """The nodes of `model` that `quantized` computes in another way, from tensors that both have."""
    shared = _tensors(model)
    producers = {name: node for node in quantized.graph.node for name in node.output}
    makers = {name: node for node in model.graph.node for name in node.output}
    layers = []
    for node in model.graph.node:
        output = node.output[0]
        shadow = output + _BEFORE_QUANTIZATION if output + _BEFORE_QUANTIZATION in producers else output
        if shadow not in producers or node.op_type in _PASSED_ON:
            continue
        ends, seen = {shadow}, set()
        operators: set[str] = set()
        while ends:
            name = ends.pop()
            seen.add(name)
            producer = producers.get(name)
            if producer is not None:
                operators.add(producer.op_type)
                ends |= {source for source in producer.input if source not in shared and source not in seen}
        if not operators & _QUANTIZED and _WIDENED not in operators - {node.op_type}:
            continue
        maker = makers.get(node.input[0])
        if node.op_type in ("Relu", "Clip") and producers[shadow].op_type != node.op_type and maker is not None:
            layers.append(_Layer(maker, output, shadow, node))
        else:
            layers.append(_Layer(node, output, shadow, None))
    return layers


#: Operators that move values: what their inputs lost to quantization is not their noise.
_PASSED_ON: Final = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Gather", "Split"}


def _tensors(model: ModelProto) -> set[str]:
    graph = model.graph
    return {
        *(name for node in graph.node for name in node.output),
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
    } - {""}


def _probe(model: ModelProto, quantized: ModelProto, layers: Sequence[_Layer], *, isolated: bool) -> ModelProto:
    """Both models in one graph that gives, for layer i, the energies `signal/i` and `noise/i`.

    The quantized model's tensors have other names there. Isolated, what reads a tensor that the fp32 model has too
    reads the fp32 model's: every layer gets unspoilt inputs.
    """
    probe = ModelProto()
    probe.CopyFrom(quantized)
    graph = probe.graph
    shared = _tensors(model)
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    fp32_weights = {tensor.name for tensor in model.graph.initializer}
    for node in graph.node:
        node.name = _SHADOW + node.name
        node.input[:] = [
            name if not name or name in given or (isolated and name in shared) else _SHADOW + name
            for name in node.input
        ]
        node.output[:] = [name and _SHADOW + name for name in node.output]
    kept = [tensor for tensor in graph.initializer if tensor.name not in fp32_weights]
    del graph.initializer[:], graph.value_info[:], graph.output[:]
    graph.initializer.extend([*model.graph.initializer, *kept])
    shadow_nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*model.graph.node, *shadow_nodes])
    for number, layer in enumerate(layers):
        x, y = layer.output, _SHADOW + layer.shadow
        if layer.activation is not None:
            activation = NodeProto()
            activation.CopyFrom(layer.activation)
            activation.input[0], activation.output[0], activation.name = y, f"activated/{number}", f"activated/{number}"
            graph.node.append(activation)
            y = f"activated/{number}"
        graph.node.extend(
            [
                helper.make_node("Sub", [x, y], [f"difference/{number}"]),
                helper.make_node("ReduceSumSquare", [f"difference/{number}"], [f"noise/{number}"], keepdims=0),
                helper.make_node("ReduceSumSquare", [x], [f"signal/{number}"], keepdims=0),
            ]
        )
        graph.output.extend(
            helper.make_tensor_value_info(f"{kind}/{number}", onnx.TensorProto.FLOAT, [])
            for kind in ("signal", "noise")
        )
    return probe
