"""Operators that TVM's importer converts wrongly, or not in every form, written as others that it converts right.

Each rewrite says what was wrong. What cannot be written as others is refused here by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from workers.frontend import lacking, quantized, recurrent
from workers.frontend.resize import resize, upsample
from workers.frontend.rewriting import FLOATS, Graph, Rewrite


def normalise(model: ModelProto, weights: Path | None = None) -> ModelProto:
    """The folded model, rewritten. UnsupportedOperator for a node that can be neither imported right nor rewritten."""
    return Graph(model, weights).rewrite(REWRITES)


def dropout(graph: Graph, node: NodeProto) -> bool:
    """The importer makes no mask, and knows nothing of training."""
    ratio = graph.value(node, 1)
    if graph.input(node, 2):
        training = graph.value(node, 2)
        if training is None or (bool(training) and (ratio is None or float(ratio) != 0.0)):
            raise graph.refuse(node, "it drops at random; export the model for inference (training_mode false)")
    graph.op("Identity", [node.input[0]], node.output[0])
    mask = graph.used(node, 1)
    if mask:
        shape = graph.shape(node.input[0])
        if shape is None:
            raise graph.refuse(node, "the shape of its mask depends on the data; remove the mask")
        graph.answer(np.ones(shape, graph.numpy_dtype(mask)), mask)
    return True


def batch_normalization(graph: Graph, node: NodeProto) -> bool:
    """In training mode, the importer computes the running statistics otherwise than the standard."""
    given = graph.attributes(node)
    if not given.get("training_mode", 0):
        return False
    x, scale, bias, mean, var = node.input
    shape = graph.shape(x)
    if shape is None:
        raise graph.refuse(node, "it is in training mode and the shape of its input is not known")
    axes = [axis for axis in range(len(shape)) if axis != 1]
    momentum = given.get("momentum", 0.9)
    wide = graph.constant(np.asarray([-1, *[1] * (len(shape) - 2)], np.int64))
    flat = graph.constant(np.asarray([-1], np.int64))
    current = graph.reduce_mean(x, axes)
    centred = graph.op("Sub", [x, current])
    variance = graph.reduce_mean(graph.op("Mul", [centred, centred]), axes)
    deviation = graph.op("Sqrt", [graph.op("Add", [variance, graph.scalar(given.get("epsilon", 1e-5), x)])])
    scaled = graph.op("Mul", [graph.op("Div", [centred, deviation]), graph.op("Reshape", [scale, wide])])
    graph.op("Add", [scaled, graph.op("Reshape", [bias, wide])], node.output[0])
    for index, (old, new) in enumerate(((mean, current), (var, variance)), start=1):
        if graph.used(node, index):
            kept = graph.op("Mul", [old, graph.scalar(momentum, old)])
            added = graph.op("Mul", [graph.op("Reshape", [new, flat]), graph.scalar(1 - momentum, old)])
            graph.op("Add", [kept, added], graph.used(node, index))
    return True


def layer_normalization(graph: Graph, node: NodeProto) -> bool:
    """The importer answers 0 for mean and deviation, and cannot normalise over every axis; TVM cannot float64."""
    given = graph.attributes(node)
    x, scale = node.input[0], node.input[1]
    shape = graph.shape(x)
    if shape is None:
        return False
    axis = given.get("axis", -1) % len(shape)
    mean_name, inverse_name = graph.used(node, 1), graph.used(node, 2)
    if not mean_name and not inverse_name and axis > 0 and graph.dtype(x) != TensorProto.DOUBLE:
        return False
    axes = list(range(axis, len(shape)))
    stash = given.get("stash_type", TensorProto.FLOAT)
    wide = graph.cast(x, stash) if graph.dtype(x) == TensorProto.FLOAT16 else x
    mean = graph.reduce_mean(wide, axes, mean_name)
    centred = graph.op("Sub", [wide, mean])
    variance = graph.reduce_mean(graph.op("Mul", [centred, centred]), axes)
    deviation = graph.op("Sqrt", [graph.op("Add", [variance, graph.scalar(given.get("epsilon", 1e-5), wide)])])
    inverse = graph.op("Div", [graph.scalar(1.0, wide), deviation], inverse_name)
    normal = graph.cast(graph.op("Mul", [centred, inverse]), graph.dtype(x))
    bias = graph.input(node, 2)
    scaled = graph.op("Mul", [normal, scale], "" if bias else node.output[0])
    if bias:
        graph.op("Add", [scaled, bias], node.output[0])
    return True


def rms_normalization(graph: Graph, node: NodeProto) -> bool:
    """TVM's kernel does not compile when it normalises over every axis."""
    given = graph.attributes(node)
    x = node.input[0]
    shape = graph.shape(x)
    if shape is None or given.get("axis", -1) % len(shape) > 0:
        return False
    wide = graph.cast(x, given.get("stash_type", TensorProto.FLOAT)) if graph.dtype(x) == TensorProto.FLOAT16 else x
    square = graph.reduce_mean(graph.op("Mul", [wide, wide]), range(len(shape)))
    deviation = graph.op("Sqrt", [graph.op("Add", [square, graph.scalar(given.get("epsilon", 1e-5), wide)])])
    normal = graph.cast(graph.op("Div", [wide, deviation]), graph.dtype(x))
    graph.op("Mul", [normal, node.input[1]], node.output[0])
    return True


def is_inf(graph: Graph, node: NodeProto) -> bool:
    """The importer forgets which sign is asked for."""
    given = graph.attributes(node)
    positive, negative = given.get("detect_positive", 1), given.get("detect_negative", 1)
    if positive and negative:
        return False
    x = node.input[0]
    if not positive and not negative:
        shape = graph.shape(x)
        if shape is None:
            raise graph.refuse(node, "it detects nothing, and the shape of its input is not known")
        graph.answer(np.zeros(shape, bool), node.output[0])
        return True
    sign = graph.op("Greater" if positive else "Less", [x, graph.scalar(0, x)])
    graph.op("And", [graph.op("IsInf", [x]), sign], node.output[0])
    return True


def mod(graph: Graph, node: NodeProto) -> bool:
    """Of floats with the sign of the divisor: the importer's floor loses infinities and the last digits."""
    if graph.attributes(node).get("fmod", 0) or graph.dtype(node.input[0]) not in FLOATS:
        return False
    x, y = node.input
    zero = graph.scalar(0, x)
    rest = graph.op("Mod", [x, y], fmod=1)
    opposite = graph.op("Xor", [graph.op("Less", [rest, zero]), graph.op("Less", [y, zero])])
    some = graph.op("Not", [graph.op("Equal", [rest, zero])])
    wraps = graph.op("And", [opposite, some])
    graph.op("Where", [wraps, graph.op("Add", [rest, y]), rest], node.output[0])
    return True


def space_to_depth(graph: Graph, node: NodeProto) -> bool:
    """The importer knows the order depth-column-row alone."""
    given = graph.attributes(node)
    if given.get("mode", b"DCR") == b"DCR":
        return False
    shape, block = graph.shape(node.input[0]), int(given["blocksize"])
    if shape is None:
        raise graph.refuse(node, "the shape of its input depends on the data")
    n, c, h, w = shape
    split = graph.constant(np.asarray([n, c, h // block, block, w // block, block], np.int64))
    joined = graph.constant(np.asarray([n, c * block * block, h // block, w // block], np.int64))
    turned = graph.op("Transpose", [graph.op("Reshape", [node.input[0], split])], perm=[0, 1, 3, 5, 2, 4])
    graph.op("Reshape", [turned, joined], node.output[0])
    return True


def bit_shift(graph: Graph, node: NodeProto) -> bool:
    """Shifts by more bits than there are, which a processor takes modulo their number, give what shifting one by one
    would."""
    x, by = node.input
    dtype = np.dtype(graph.numpy_dtype(x))
    bits = dtype.itemsize * 8
    constant = graph.value(node, 1)
    if constant is not None and bool(((constant >= 0) & (constant < bits)).all()):
        return False
    direction = graph.attributes(node).get("direction", b"LEFT")
    too_far = graph.op("Not", [graph.op("Less", [by, graph.scalar(bits, by)])])
    if dtype.kind == "i":
        too_far = graph.op("Or", [too_far, graph.op("Less", [by, graph.scalar(0, by)])])
    zero = graph.scalar(0, x)
    shifted = graph.op("BitShift", [x, graph.op("Where", [too_far, graph.scalar(0, by), by])], direction=direction)
    rest = zero
    if dtype.kind == "i" and direction == b"RIGHT":
        rest = graph.op("Where", [graph.op("Less", [x, zero]), graph.scalar(-1, x), zero])
    graph.op("Where", [too_far, rest, shifted], node.output[0])
    return True


def conv_transpose(graph: Graph, node: NodeProto) -> bool:
    """The importer ignores `output_shape`, from which the standard takes the pads."""
    given = graph.attributes(node)
    if "output_shape" not in given:
        return False
    x, w = graph.shape(node.input[0]), graph.shape(node.input[1])
    if x is None or w is None:
        raise graph.refuse(node, "the shape of its input depends on the data")
    spatial = len(x) - 2
    wanted = given.pop("output_shape")[-spatial:]
    strides, dilations = given.get("strides", [1] * spatial), given.get("dilations", [1] * spatial)
    extra = list(given.pop("output_padding", [0] * spatial))
    upper = given.pop("auto_pad", b"NOTSET") == b"SAME_UPPER"
    begin, end = [], []
    for i in range(spatial):
        total = strides[i] * (x[2 + i] - 1) + extra[i] + (w[2 + i] - 1) * dilations[i] + 1 - wanted[i]
        if total < 0:
            # More than is computed: the rest is padding at the end, of less than one step.
            if extra[i] - total >= strides[i]:
                raise graph.refuse(node, "its output_shape is larger than what it computes")
            extra[i], total = extra[i] - total, 0
        begin.append(total // 2 if upper else total - total // 2)
        end.append(total - begin[-1])
    graph.op("ConvTranspose", list(node.input), node.output[0], **given, pads=begin + end, output_padding=extra)
    return True


def softplus(graph: Graph, node: NodeProto) -> bool:
    """`log(1 + z)` loses the digits of a small z: `log(u) * z / (u - 1)` with u = 1 + z does not (HP-15C's method, in
    Goldberg, What Every Computer Scientist Should Know About Floating-Point Arithmetic, theorem 4)."""
    _softplus(graph, node.input[0], node.output[0])
    return True


def mish(graph: Graph, node: NodeProto) -> bool:
    """The importer's overflows."""
    x = node.input[0]
    graph.op("Mul", [x, graph.op("Tanh", [_softplus(graph, x, "")])], node.output[0])
    return True


def _softplus(graph: Graph, x: str, output: str) -> str:
    one = graph.scalar(1, x)
    z = graph.op("Exp", [graph.op("Neg", [graph.op("Abs", [x])])])
    u = graph.op("Add", [one, z])
    exact = graph.op("Div", [graph.op("Mul", [graph.op("Log", [u]), z]), graph.op("Sub", [u, one])])
    logarithm = graph.op("Where", [graph.op("Equal", [u, one]), z, exact])
    return graph.op("Add", [graph.op("Max", [x, graph.scalar(0, x)]), logarithm], output)


def power(graph: Graph, node: NodeProto) -> bool:
    """TVM has no power of integers, and none of two types: as ONNX Runtime does, through double."""
    x, y = node.input
    kind, other = graph.dtype(x), graph.dtype(y)
    if kind in FLOATS and kind == other:
        return False
    if kind in FLOATS:
        graph.op("Pow", [x, graph.cast(y, kind)], node.output[0])
        return True
    double = graph.op("Pow", [graph.cast(x, TensorProto.DOUBLE), graph.cast(y, TensorProto.DOUBLE)])
    graph.cast(double, kind, node.output[0])
    return True


def clip(graph: Graph, node: NodeProto) -> bool:
    """TVM answers NaN everywhere where a bound is NaN, which ONNX Runtime takes for none."""
    bounds = [graph.value(node, place) for place in (1, 2)]
    if not any(bound is not None and bound.dtype.kind == "f" and np.isnan(bound).any() for bound in bounds):
        return False
    kept = [
        name if bound is None or not np.isnan(bound).any() else ""
        for name, bound in zip((*node.input[1:], "", "")[:2], bounds, strict=True)
    ]
    graph.op("Clip", [node.input[0], *kept] if any(kept) else [node.input[0]], node.output[0])
    return True


def reduce_bool(graph: Graph, node: NodeProto) -> bool:
    """TVM has no largest or smallest of truths."""
    return reduction(graph, node) or _reduced_as(graph, node, TensorProto.BOOL, TensorProto.UINT8)


def reduction(graph: Graph, node: NodeProto) -> bool:
    """Over no axes, where that does not stand for all, the importer hands its input on; each element is still reduced
    by itself."""
    given, axes = graph.attributes(node), graph.value(node, 1)
    if not given.get("noop_with_empty_axes", 0) or "axes" in given:
        return False
    if graph.input(node, 1) and (axes is None or axes.size):
        return False
    x, output = node.input[0], node.output[0]
    if node.op_type in ("ReduceL1", "ReduceL2"):
        graph.op("Abs", [x], output)
    elif node.op_type == "ReduceLogSum":
        graph.op("Log", [x], output)
    elif node.op_type == "ReduceSumSquare":
        graph.op("Mul", [x, x], output)
    else:
        graph.op("Identity", [x], output)
    return True


def reduce_mean(graph: Graph, node: NodeProto) -> bool:
    """TVM's mean of int32 is an int64."""
    return reduction(graph, node) or _reduced_as(graph, node, TensorProto.INT32, TensorProto.INT64)


def _reduced_as(graph: Graph, node: NodeProto, dtype: int, other: int) -> bool:
    """A reduction of `dtype` by way of `other`."""
    if graph.dtype(node.input[0]) != dtype:
        return False
    numbers = graph.cast(node.input[0], other)
    reduced = graph.op(node.op_type, [numbers, *node.input[1:]], **graph.attributes(node))
    graph.cast(reduced, dtype, node.output[0])
    return True


def equal(graph: Graph, node: NodeProto) -> bool:
    """LLVM is given a comparison of floats for truths, and does not compile it."""
    if graph.dtype(node.input[0]) != TensorProto.BOOL:
        return False
    graph.op("Not", [graph.op("Xor", list(node.input))], node.output[0])
    return True


def top_k(graph: Graph, node: NodeProto) -> bool:
    """TVM's runtime finds out that it cannot sort int16 when it is asked to."""
    if graph.dtype(node.input[0]) == TensorProto.INT16:
        raise graph.refuse(node, "int16 is not sorted; cast its input to int32")
    return False


def one_hot(graph: Graph, node: NodeProto) -> bool:
    """The importer's converter fails for every type of values but Python's own."""
    depth, shape = graph.value(node, 1), graph.shape(node.input[0])
    if depth is None or shape is None:
        raise graph.refuse(node, "its depth depends on the data; make it a constant")
    size = int(depth.reshape(-1)[0])
    axis = graph.attributes(node).get("axis", -1) % (len(shape) + 1)
    index = graph.cast(node.input[0], TensorProto.INT64)
    negative = graph.op("Less", [index, graph.constant(np.asarray(0, np.int64))])
    index = graph.op("Where", [negative, graph.op("Add", [index, graph.constant(np.asarray(size, np.int64))]), index])
    wide = graph.constant(np.asarray([*shape[:axis], 1, *shape[axis:]], np.int64))
    places = np.arange(size, dtype=np.int64).reshape([size if i == axis else 1 for i in range(len(shape) + 1)])
    hit = graph.op("Equal", [graph.op("Reshape", [index, wide]), graph.constant(places)])
    off, on = (
        graph.op("Reshape", [graph.op("Gather", [node.input[2], graph.constant(np.asarray([i], np.int64))], axis=0),
                             graph.constant(np.asarray([1] * (len(shape) + 1), np.int64))])
        for i in (0, 1)
    )  # fmt: skip
    graph.op("Where", [hit, on, off], node.output[0])
    return True


def eye_like(graph: Graph, node: NodeProto) -> bool:
    """A constant, once the shape is known; the importer refuses another type than the input's."""
    shape = graph.shape(node.input[0])
    if shape is None:
        return False
    given = graph.attributes(node)
    eye = np.eye(shape[0], shape[1], k=given.get("k", 0)).astype(graph.numpy_dtype(node.output[0]))
    graph.answer(eye, node.output[0])
    return True


def shape_of(graph: Graph, node: NodeProto) -> bool:
    """A constant, once the shape is known: the importer's shape values fit few operators."""
    shape = graph.shape(node.input[0])
    if shape is None:
        return False
    given = graph.attributes(node)
    part = shape[given.get("start", 0) : given.get("end", len(shape))]
    value = np.asarray(math.prod(shape) if node.op_type == "Size" else part, np.int64)
    graph.answer(value, node.output[0])
    return True


def max_pool(graph: Graph, node: NodeProto) -> bool:
    """The importer makes no indices."""
    if graph.used(node, 1):
        raise graph.refuse(node, "the positions of its maxima are not done; export the model without them")
    return False


def cast_of_constant(graph: Graph, node: NodeProto) -> bool:
    """ONNX Runtime, where it has no kernel of float16, casts constants after it has folded the others."""
    value, to = graph.value(node, 0), graph.attributes(node)["to"]
    if value is None or graph.dtype(node.input[0]) not in FLOATS or to not in FLOATS or node.output[0] in graph.outputs:
        return False
    graph.answer(value.astype(helper.tensor_dtype_to_np_dtype(to)), node.output[0])
    return True


def sequence_position(graph: Graph, node: NodeProto) -> bool:
    """The importer counts from the begin, whatever the sign."""
    position = 1 if node.op_type == "SequenceErase" else 2
    if graph.input(node, position):
        value = graph.value(node, position)
        if value is None or int(value) < 0:
            raise graph.refuse(node, "its position is negative or depends on the data; count from the begin instead")
    return False


REWRITES: Final[Mapping[str, Rewrite]] = {
    "BatchNormalization": batch_normalization,
    "BitShift": bit_shift,
    "Cast": cast_of_constant,
    "Clip": clip,
    "ConvTranspose": conv_transpose,
    "Dropout": dropout,
    "Equal": equal,
    "EyeLike": eye_like,
    "IsInf": is_inf,
    "LayerNormalization": layer_normalization,
    "MaxPool": max_pool,
    "Mish": mish,
    "Mod": mod,
    "OneHot": one_hot,
    "Pow": power,
    "RMSNormalization": rms_normalization,
    "ReduceMax": reduce_bool,
    "ReduceMean": reduce_mean,
    "ReduceMin": reduce_bool,
    **dict.fromkeys(
        (f"Reduce{of}" for of in ("L1", "L2", "LogSum", "LogSumExp", "Prod", "Sum", "SumSquare")), reduction
    ),
    "Resize": resize,
    "SequenceErase": sequence_position,
    "SequenceInsert": sequence_position,
    "Shape": shape_of,
    "Size": shape_of,
    "Softplus": softplus,
    "SpaceToDepth": space_to_depth,
    "TopK": top_k,
    "Upsample": upsample,
    **lacking.REWRITES,
    **quantized.REWRITES,
    **recurrent.REWRITES,
}
