"""Operators that TVM's importer lacks and that are a few others: sequences turned round, norms, running products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from workers.frontend.rewriting import Graph, Rewrite

#: Elements of a running product: it is written as a product over all of them for each of them.
MOST_FACTORS: Final = 512


def reverse_sequence(graph: Graph, node: NodeProto) -> bool:
    """The first `sequence_lens[b]` steps of sequence b from the last to the first, the rest as it is.

    A gather of rows [time * batch], from computed places where the lengths depend on the data.
    """
    given, shape = graph.attributes(node), graph.shape(node.input[0])
    if shape is None:
        raise graph.refuse(node, "the shape of its input depends on the data")
    time_axis, batch_axis = given.get("time_axis", 0), given.get("batch_axis", 1)
    time, batch = shape[time_axis], shape[batch_axis]
    step = np.arange(time, dtype=np.int64).reshape(-1, 1)
    sequence = np.arange(batch, dtype=np.int64)
    if time_axis > batch_axis:
        step, sequence = step.reshape(1, -1), sequence.reshape(-1, 1)
    stride_step, stride_sequence = (batch, 1) if time_axis < batch_axis else (1, time)
    lengths = graph.value(node, 1)
    if lengths is not None:
        known = lengths.astype(np.int64).reshape(sequence.shape)
        places = np.where(step < known, known - 1 - step, step) * stride_step + sequence * stride_sequence
        rows = graph.constant(places.reshape(-1))
    else:
        steps = graph.constant(step)
        computed = graph.reshape(graph.cast(node.input[1], TensorProto.INT64), sequence.shape)
        last = graph.op("Sub", [computed, graph.constant(np.int64(1))])
        turned = graph.op("Where", [graph.op("Less", [steps, computed]), graph.op("Sub", [last, steps]), steps])
        placed = graph.op("Mul", [turned, graph.constant(np.int64(stride_step))])
        rows = graph.reshape(graph.op("Add", [placed, graph.constant(sequence * stride_sequence)]), [time * batch])
    flat = graph.reshape(node.input[0], [time * batch, *shape[2:]])
    graph.reshape(graph.op("Gather", [flat, rows], axis=0), shape, node.output[0])
    return True


def lp_normalization(graph: Graph, node: NodeProto) -> bool:
    """x divided by its norm along an axis, 0 where that is 0."""
    given, x = graph.attributes(node), node.input[0]
    norm = graph.reduce(f"ReduceL{given.get('p', 2)}", x, [given.get("axis", -1)])
    none = graph.op("Equal", [norm, graph.scalar(0, x)])
    graph.op("Div", [x, graph.op("Where", [none, graph.scalar(1, x), norm])], node.output[0])
    return True


def cum_prod(graph: Graph, node: NodeProto) -> bool:
    """For each element the product of all, those that do not belong to it replaced by 1."""
    given, x = graph.attributes(node), node.input[0]
    shape, axis_value = graph.shape(x), graph.value(node, 1)
    if shape is None or axis_value is None:
        raise graph.refuse(node, "the shape of its input or its axis depends on the data; make them constant")
    axis = int(axis_value.reshape(-1)[0]) % len(shape)
    size = shape[axis]
    if size > MOST_FACTORS:
        raise graph.refuse(
            node, f"it multiplies {size} elements, and at most {MOST_FACTORS} are done; shorten the axis"
        )
    belongs = np.tril(np.ones((size, size), bool), -1 if given.get("exclusive", 0) else 0)
    if given.get("reverse", 0):
        belongs = belongs[::-1, ::-1]
    mask = graph.constant(belongs.reshape(size, size, *[1] * (len(shape) - axis - 1)))
    spread = graph.reshape(x, [*shape[:axis], 1, *shape[axis:]])
    factors = graph.op("Where", [mask, spread, graph.scalar(1, x)])
    graph.reduce("ReduceProd", factors, [axis + 1], node.output[0], keep=False)
    return True


REWRITES: Final[Mapping[str, Rewrite]] = {
    "CumProd": cum_prod,
    "LpNormalization": lp_normalization,
    "ReverseSequence": reverse_sequence,
}
