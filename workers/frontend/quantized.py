"""Convolutions and matrix products of quantized tensors, which TVM's importer lacks, computed in integers.

Zero points are taken off first, products are summed in int32, and the sum is brought to the scale of the result in
float32, in the order and with the rounding (half to even) of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from workers.frontend.rewriting import Graph, Rewrite


def conv_integer(graph: Graph, node: NodeProto) -> bool:
    """x, w, and the zero points of each; int32 comes out."""
    x = _centred(graph, node, 0, 2)
    w = _centred(graph, node, 1, 3, channels_first=True)
    graph.op("Conv", [x, w], node.output[0], **graph.attributes(node))
    return True


def qlinear_conv(graph: Graph, node: NodeProto) -> bool:
    """x, w, y with a scale and a zero point each, those of w for each channel or for all, and a bias in int32."""
    weights = graph.shape(node.input[3])
    if weights is None:
        raise graph.refuse(node, "the shape of its weights depends on the data")
    x = _centred(graph, node, 0, 2)
    w = _centred(graph, node, 3, 5, channels_first=True)
    bias = [node.input[8]] if graph.input(node, 8) else []
    total = graph.op("Conv", [x, w, *bias], **graph.attributes(node))
    scale = _scale(graph, node, 1).reshape(()) * _scale(graph, node, 4) / _scale(graph, node, 6).reshape(())
    wide = scale.reshape([1, -1, *[1] * (len(weights) - 2)]) if scale.size > 1 else scale.reshape(())
    _requantize(graph, node, total, wide, 7)
    return True


def qlinear_matmul(graph: Graph, node: NodeProto) -> bool:
    """a, b, y with a scale and a zero point each: for all, for each row of a and y, for each column of b."""
    total = graph.op("MatMulInteger", [node.input[0], node.input[3], node.input[2], node.input[5]])
    a, b, y = _scale(graph, node, 1), _scale(graph, node, 4), _scale(graph, node, 6)
    _requantize(graph, node, total, _rows(a) * (b.reshape(()) if b.size == 1 else b) / _rows(y), 7)
    return True


def _rows(values: NDArray[Any]) -> NDArray[Any]:
    if values.size == 1:
        return values.reshape(())
    return values.reshape(-1, 1) if values.ndim == 1 else values


def _scale(graph: Graph, node: NodeProto, index: int) -> NDArray[np.float32]:
    value = graph.value(node, index)
    if value is None:
        raise graph.refuse(node, "its scales depend on the data; quantize the model statically, with constant scales")
    return value.astype(np.float32)


def _centred(graph: Graph, node: NodeProto, data: int, zero_point: int, channels_first: bool = False) -> str:
    """A tensor in int32 less its zero point, a constant if both are."""
    name = node.input[data]
    value, zero = graph.value(node, data), graph.value(node, zero_point)
    absent = not graph.input(node, zero_point) or (zero is not None and not zero.any())
    if value is not None and (absent or zero is not None):
        less = np.int32(0) if absent or zero is None else _wide(zero.astype(np.int32), value.ndim, channels_first)
        return graph.constant(value.astype(np.int32) - less)
    wide = graph.cast(name, TensorProto.INT32)
    if absent:
        return wide
    if zero is not None:
        shape = graph.shape(name) or ()
        if zero.size > 1 and channels_first and not shape:
            raise graph.refuse(node, "the shape of its weights depends on the data")
        return graph.op("Sub", [wide, graph.constant(_wide(zero.astype(np.int32), len(shape), channels_first))])
    sizes = graph.shape(node.input[zero_point])
    if sizes is None or any(size != 1 for size in sizes):
        raise graph.refuse(node, "its zero points depend on the data and are several; quantize by one for the tensor")
    scalar = graph.reshape(graph.cast(node.input[zero_point], TensorProto.INT32), [])
    return graph.op("Sub", [wide, scalar])


def _wide(zero: NDArray[Any], rank: int, channels_first: bool) -> NDArray[Any]:
    """A zero point for each channel, or one for all, in the shape that it is taken off in."""
    if zero.size == 1:
        return zero.reshape(())
    return zero.reshape([-1, *[1] * (rank - 1)]) if channels_first else zero


def _requantize(graph: Graph, node: NodeProto, total: str, scale: NDArray[Any], zero_point: int) -> None:
    zero = node.input[zero_point]
    dtype = graph.numpy_dtype(zero)
    offset = graph.value(node, zero_point)
    if offset is None:
        raise graph.refuse(node, "its zero points depend on the data; quantize the model statically")
    scaled = graph.op("Mul", [graph.cast(total, TensorProto.FLOAT), graph.constant(scale.astype(np.float32))])
    moved = graph.op("Add", [graph.op("Round", [scaled]), graph.constant(_rows(offset).astype(np.float32))])
    limits = np.iinfo(dtype)
    lower, upper = (graph.constant(np.float32(limit)) for limit in (limits.min, limits.max))
    kept = graph.op("Min", [graph.op("Max", [moved, lower]), upper])
    graph.cast(kept, graph.dtype(zero), node.output[0])


REWRITES: Final[Mapping[str, Rewrite]] = {
    "ConvInteger": conv_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
}
