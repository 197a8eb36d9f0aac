"""From fp32 ONNX with bound shapes to fp16 weights: each a float16 initializer, and a Cast to float32 that reads it.

What is computed stays float32, so that the model is what a library with float16 weights computes. Rounding is to the
nearest, of the weights as they are once BatchNormalization is folded into them. Biases stay float32: they are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tuning_db.errors import InvalidRequest
from tuning_db.keys import Json
from workers.graph.half import rounded
from workers.quantize.exclusions import meant_by
from workers.quantize.quantizer import refuse_quantized
from workers.quantize.request import SOURCE

#: Operators whose second input is weights, where it is constant.
WEIGHTED: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def halve(model: ModelProto, exclude: Sequence[str], target: Path) -> tuple[ModelProto, dict[str, Json]]:
    """Write `model` with its weights in float16 to `target`, itself beside it as `SOURCE`, and return the former.

    `model` is normalised, every node named. The weights of nodes that are excluded stay float32, and those that float16
    does not hold: ``{"float16": count, "float32": [{"node", "operator", "reason"}]}``, returned too, names the nodes.
    Raises InvalidRequest for an exclusion that names no node with weights, and if no weights come to float16.
    """
    refuse_quantized(model, "fp16")
    onnx.save_model(model, target.with_name(SOURCE))
    halved = ModelProto()
    halved.CopyFrom(model)
    graph = halved.graph
    fed = {value.name for value in graph.input}
    weights = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in fed
    }
    weighted = [
        node for node in graph.node if node.op_type in WEIGHTED and len(node.input) > 1 and node.input[1] in weights
    ]
    excluded = set(meant_by(halved, exclude))
    others = sorted(excluded - {node.name for node in weighted})
    if others:
        raise InvalidRequest(
            f"quantization.exclude: node {others[0]!r} has no weights that fp16 would round; leave it out",
            field="quantization.exclude",
        )
    taken = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
    taken.update(tensor.name for tensor in graph.initializer)
    count = 0
    kept: list[Json] = []
    casts: dict[str, str] = {}  #: by the float32 initializer, what the Cast gives
    nodes = []
    for node in weighted:
        name = node.input[1]
        half, reason = (None, "excluded") if node.name in excluded else rounded(numpy_helper.to_array(weights[name]))
        if half is None:
            kept.append({"node": node.name, "operator": node.op_type, "reason": reason})
            continue
        count += 1
        if name not in casts:
            stored, widened = _free(f"{name}/float16", taken), _free(f"{name}/rounded", taken)
            casts[name] = widened
            graph.initializer.append(numpy_helper.from_array(half, stored))
            nodes.append(
                helper.make_node(
                    "Cast", [stored], [widened], name=_free(f"{name}/widened", taken), to=TensorProto.FLOAT
                )
            )
        node.input[1] = casts[name]
    if not count:
        raise InvalidRequest(
            "fp16: the model holds no float32 weights of convolutions or matrix products, or all of them stay fp32; "
            "ask for the scheme 'none'",
            field="quantization.scheme",
        )
    nodes.extend(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    left = [tensor for tensor in graph.initializer if tensor.name in read or tensor.name not in casts]
    del graph.initializer[:]
    graph.initializer.extend(left)
    onnx.save_model(halved, target)
    return halved, {"float16": count, "float32": kept}


def _free(name: str, taken: set[str]) -> str:
    """`name`, or the first of `name_2`, `name_3`, … that is not taken; it is from now on."""
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    found = next(each for each in names if each not in taken)
    taken.add(found)
    return found
