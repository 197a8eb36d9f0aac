"""Operators on quantized tensors, which TVM's importer lacks: those of the standard, and ONNX Runtime's own.

Where the weights are int8 around zero an operator becomes that of real numbers, between dequantization and
quantization: what `workers.graph` computes in integers. Of other convolutions and products zero points are taken off
first, products are summed in int32, and the sum is brought to the scale of the result in float32, in the order and
with the rounding (half to even) of ONNX Runtime.

Sums of dynamically quantized data become real numbers at once, by the product of two scales: these too are written as
products of real numbers, of data and weights that are dequantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from workers.frontend.recurrent import dynamic_quantize_lstm
from workers.frontend.rewriting import Graph, Rewrite


def conv_integer(graph: Graph, node: NodeProto) -> bool:
    """x, w, and the zero points of each; int32 comes out."""
    x = _centred(graph, node, 0, 2)
    w = _centred(graph, node, 1, 3, channels_first=True)
    graph.op("Conv", [x, w], node.output[0], **graph.attributes(node))
    return True


def qlinear_conv(graph: Graph, node: NodeProto) -> bool:
    """x, w, y with a scale and a zero point each, those of w for each channel or for all, and a bias in int32."""
    if _is_around_zero(graph, node, 3):
        x, bias = _real(graph, node, 0), [_real_bias(graph, node, 8, _scale(graph, node, 1) * _scale(graph, node, 4))]
        w = _real(graph, node, 3, axis=0)
        real = graph.op("Conv", [x, w, *filter(None, bias)], **graph.attributes(node))
        graph.op("QuantizeLinear", [real, *node.input[6:8]], node.output[0])
        return True
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
    b = graph.value(node, 3)
    if _is_around_zero(graph, node, 3) and b is not None and b.ndim == 2:
        real = graph.op("MatMul", [_real(graph, node, 0), _real(graph, node, 3, axis=1)])
        graph.op("QuantizeLinear", [real, *node.input[6:8]], node.output[0])
        return True
    total = graph.op("MatMulInteger", [node.input[0], node.input[3], node.input[2], node.input[5]])
    a, b, y = _scale(graph, node, 1), _scale(graph, node, 4), _scale(graph, node, 6)
    _requantize(graph, node, total, _rows(a) * (b.reshape(()) if b.size == 1 else b) / _rows(y), 7)
    return True


def _is_around_zero(graph: Graph, node: NodeProto, weights: int) -> bool:
    """Whether the weights are constant int8 without a zero point, and data and result have one for the whole tensor."""
    value, zero = graph.value(node, weights), graph.value(node, weights + 2)
    singles = [graph.value(node, index) for index in (1, 2, 6, 7)]
    return (
        value is not None
        and value.dtype == np.int8
        and (not graph.input(node, weights + 2) or (zero is not None and not zero.any()))
        and all(single is not None and single.size == 1 for single in singles)
        and graph.dtype(node.input[7]) == graph.dtype(node.input[0])
    )


def _real(graph: Graph, node: NodeProto, index: int, axis: int | None = None) -> str:
    """The real numbers of a tensor, whose scale and zero point are the next two inputs, along an axis if several."""
    scale, zero = graph.value(node, index + 1), graph.value(node, index + 2)
    parameters = list(filter(None, (graph.input(node, index + k) for k in (1, 2))))
    if axis is not None and scale is not None:
        # Of one form: the standard's operators take zero points of another.
        scale = scale.reshape(-1) if scale.size > 1 else scale.reshape(())
        value = graph.numpy_dtype(node.input[index])
        zeros = np.zeros((), value) if zero is None else zero.astype(value)
        zeros = np.broadcast_to(zeros.reshape(-1) if scale.ndim else zeros.reshape(-1)[0], scale.shape)
        parameters = [graph.constant(scale), graph.constant(np.ascontiguousarray(zeros).reshape(scale.shape))]
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    return graph.op("DequantizeLinear", [node.input[index], *parameters], **attributes)


def _real_bias(graph: Graph, node: NodeProto, index: int, scale: NDArray[np.float32]) -> str:
    """The real numbers of a bias in int32, which has the scale of what it is added to; "" if there is none."""
    if not graph.input(node, index):
        return ""
    scale = scale.reshape(-1) if scale.size > 1 else scale.reshape(())
    zeros = graph.constant(np.zeros(scale.shape, np.int32))
    return graph.op("DequantizeLinear", [node.input[index], graph.constant(scale), zeros], axis=0)


def _between(op_type: str, *operands: int, result: int) -> Rewrite:
    """An operator of ONNX Runtime's as the standard's `op_type`, between dequantization and quantization. `operands`
    and `result` are the places of integers, before scale and zero point, and of the result's scale."""

    def rewrite(graph: Graph, node: NodeProto) -> bool:
        attributes = graph.attributes(node)
        if attributes.pop("channels_last", 0):
            raise graph.refuse(node, "its channels come last; export the model with channels first")
        real = graph.op(op_type, [_real(graph, node, index) for index in operands], **attributes)
        parameters = filter(None, (graph.input(node, result), graph.input(node, result + 1)))
        graph.op("QuantizeLinear", [real, *parameters], node.output[0])
        return True

    return rewrite


def qlinear_concat(graph: Graph, node: NodeProto) -> bool:
    """Scale and zero point of the result, then each tensor with its own."""
    parts = [_real(graph, node, index) for index in range(2, len(node.input), 3)]
    real = graph.op("Concat", parts, **graph.attributes(node))
    graph.op("QuantizeLinear", [real, *node.input[:2]], node.output[0])
    return True


def qgemm(graph: Graph, node: NodeProto) -> bool:
    """a, b, a bias in int32, and scale and zero point of the result, without which that is float32."""
    attributes = graph.attributes(node)
    columns = 0 if attributes.get("transB", 0) else 1
    scale = _scale(graph, node, 1) * _scale(graph, node, 4) * np.float32(attributes.get("alpha", 1.0))
    bias = _real_bias(graph, node, 6, scale)
    inputs = [_real(graph, node, 0), _real(graph, node, 3, axis=columns), *([bias] if bias else [])]
    if not graph.input(node, 7):
        graph.op("Gemm", inputs, node.output[0], **attributes)
        return True
    real = graph.op("Gemm", inputs, **attributes)
    graph.op("QuantizeLinear", [real, *filter(None, node.input[7:9])], node.output[0])
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

_SUMS: Final = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A sum of products whose result is multiplied by the product of two scales, those of its operands."""

    node: NodeProto
    cast: str  #: its result in float32
    scale: str  #: of the data
    weight_scale: NDArray[np.float32]  #: one, or one for each column or channel of output
    scales: str  #: the product of both
    result: str


def real_products(model: ModelProto, weights: Path | None = None) -> ModelProto:
    """The model with products of dynamically quantized data by weights around zero as products of real numbers, which
    `workers.graph` computes in integers again: as ONNX Runtime's `quantize_dynamic` writes them, a node of integers, a
    cast, and a multiplication by the product of the scales."""
    found = {scaled.result: scaled for scaled in _scaled(Graph(model, weights))}
    if not found:
        return model
    read = Counter(name for node in model.graph.node for name in node.input)
    multiplied = Counter(scaled.scales for scaled in found.values())
    gone = {name for scaled in found.values() for name in (scaled.node.output[0], scaled.cast)}
    gone |= {name for name, count in multiplied.items() if read[name] == count}

    def rewrite(graph: Graph, node: NodeProto) -> bool:
        scaled = found.get(node.output[0])
        if scaled is None:
            return node.output[0] in gone
        product, scale = scaled.node, scaled.weight_scale
        data = graph.op("DequantizeLinear", [product.input[0], scaled.scale, product.input[2]])
        weight = graph.value(product, 1)
        assert weight is not None
        zeros = graph.constant(np.full(scale.shape, _middle(weight), weight.dtype))
        axis = 1 if product.op_type == "MatMulInteger" else 0
        real = graph.op("DequantizeLinear", [product.input[1], graph.constant(scale), zeros], axis=axis)
        graph.op(_SUMS[product.op_type], [data, real], scaled.result, **graph.attributes(product))
        return True

    return Graph(model, weights).rewrite(dict.fromkeys((*_SUMS, "Cast", "Mul"), rewrite))


def _scaled(graph: Graph) -> Iterator[_Scaled]:
    for node in graph.nodes("Mul"):
        for first, second in ((0, 1), (1, 0)):
            cast, scales = graph.only_reader(node, first, "Cast"), graph.made_by(node, second, "Mul")
            product = None if cast is None else graph.only_reader(cast, 0, *_SUMS)
            if cast is None or scales is None or product is None or graph.dtype(cast.output[0]) != TensorProto.FLOAT:
                continue
            quantizes = graph.made_by(product, 0, "DynamicQuantizeLinear")
            if quantizes is None or [graph.input(product, 0), graph.input(product, 2)] != list(quantizes.output[::2]):
                continue
            places = [place for place in (0, 1) if scales.input[place] == quantizes.output[1]]
            scale = graph.value(scales, 1 - places[0]) if places else None
            fitting = None if scale is None else _weight_scale(graph, product, scale)
            if fitting is not None and scales.output[0] not in graph.outputs:
                yield _Scaled(
                    product, cast.output[0], quantizes.output[1], fitting, scales.output[0], node.output[0]
                )  # fmt: skip


def _weight_scale(graph: Graph, node: NodeProto, scale: NDArray[Any]) -> NDArray[np.float32] | None:
    """One, or one for each column or channel of output; None if the weights are not constants around zero."""
    weight, zero = graph.value(node, 1), graph.value(node, 3)
    if weight is None or weight.dtype not in (np.int8, np.uint8) or scale.dtype != np.float32:
        return None
    if zero is None and graph.input(node, 3):
        return None
    if np.any((0 if zero is None else zero) != _middle(weight)):
        return None
    if node.op_type == "MatMulInteger":
        count = weight.shape[-1]
        fits = weight.ndim == 2 and scale.ndim < 2
    else:
        count = weight.shape[0]
        alone = scale.size == 1 and scale.ndim <= weight.ndim
        row = (count, *[1] * (weight.ndim - 2))
        fits = alone or (scale.ndim <= weight.ndim and scale.shape[-weight.ndim + 1 :] == row)
    if not fits or scale.size not in (1, count):
        return None
    return scale.reshape(-1) if scale.size > 1 else scale.reshape(())


def _middle(weight: NDArray[Any]) -> int:
    """The zero point around which integers of this type lie."""
    return 128 if weight.dtype == np.uint8 else 0


#: Operators of ONNX Runtime's own.
CONTRIBUTED: Final[Mapping[str, Rewrite]] = {
    "com.microsoft.DynamicQuantizeLSTM": dynamic_quantize_lstm,
    "com.microsoft.QGemm": qgemm,
    "com.microsoft.QLinearAdd": _between("Add", 0, 3, result=6),
    "com.microsoft.QLinearAveragePool": _between("AveragePool", 0, result=3),
    "com.microsoft.QLinearConcat": qlinear_concat,
    "com.microsoft.QLinearGlobalAveragePool": _between("GlobalAveragePool", 0, result=3),
    "com.microsoft.QLinearLeakyRelu": _between("LeakyRelu", 0, result=3),
    "com.microsoft.QLinearMul": _between("Mul", 0, 3, result=6),
    "com.microsoft.QLinearSigmoid": _between("Sigmoid", 0, result=3),
}


def standard(model: ModelProto, weights: Path | None = None) -> ModelProto:
    """The model with ONNX Runtime's own operators on quantized tensors written as the standard's.

    UnsupportedOperator for one that reads a tensor whose shape depends on the data.
    """
    contributed = _contributed(model)
    while contributed:
        graph = Graph(model, weights)
        # Now what follows from their shapes is known too.
        model = onnx.shape_inference.infer_shapes(graph.rewrite(CONTRIBUTED), data_prop=True)
        left = _contributed(model)
        if len(left) == len(contributed):
            raise graph.refuse(left[0], "the shape of its input depends on the data")
        contributed = left
    return model


def _contributed(model: ModelProto) -> list[NodeProto]:
    return [node for node in model.graph.node if f"{node.domain}.{node.op_type}" in CONTRIBUTED]
