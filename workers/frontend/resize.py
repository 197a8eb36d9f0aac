"""Resize and Upsample as sums of weighted gathers along each axis, for what TVM's own resize computes otherwise.

TVM rounds scales to sizes and takes the scale back from the sizes, which moves every sample point when a scale times a
size is no whole number; it knows no antialiasing, no `axes` and no symmetric coordinates. Every resize is linear and
separable: along an axis, sample i is the sum over taps k of weight[k, i] * input[index[k, i]]. Both are constants here,
by the formulas of the standard (docs/Operators.md, Resize).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from workers.frontend.rewriting import FLOATS, Graph


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is sampled."""

    axis: int
    size: int  #: of the input
    scale: float
    out: int  #: of the output
    roi: tuple[float, float]


def resize(graph: Graph, node: NodeProto) -> bool:
    """Resize from opset 10 on. True if it was written anew."""
    given = graph.attributes(node)
    shape = graph.shape(node.input[0])
    old = graph.opset < 11
    scales, sizes = graph.value(node, 1 if old else 2), graph.value(node, 3)
    if scales is not None and scales.size == 0:
        scales = None
    if shape is None or (scales is None and sizes is None):
        raise graph.refuse(node, "its scales or sizes depend on the data; make them constants")
    if graph.input(node, 1) and not old and graph.value(node, 1) is None:
        raise graph.refuse(node, "its region of interest depends on the data; make it a constant")
    mode = given.get("mode", b"nearest").decode()
    coordinates = "asymmetric" if old else given.get("coordinate_transformation_mode", b"half_pixel").decode()
    rank = len(shape)
    axes = [axis % rank for axis in given.get("axes", range(rank))]
    roi = np.zeros(2 * len(axes)) if old or graph.value(node, 1) is None else graph.value(node, 1)
    if roi is None or roi.size != 2 * len(axes):
        roi = np.concatenate([np.zeros(len(axes)), np.ones(len(axes))])
    plan = _axes(shape, axes, scales, sizes, given.get("keep_aspect_ratio_policy", b"stretch").decode(), roi)
    if (
        not given.get("antialias", 0)
        and "axes" not in given
        and not old
        and _tvm_is_right(plan, shape, mode, coordinates)
    ):
        return False
    _write(graph, node, plan, mode, coordinates, "floor" if old else "", given)
    return True


def upsample(graph: Graph, node: NodeProto) -> bool:
    """Upsample, which Resize replaced at opset 10: asymmetric coordinates, rounded down."""
    given = graph.attributes(node)
    shape, scales = graph.shape(node.input[0]), graph.value(node, 1)
    if "scales" in given:
        scales = np.asarray(given["scales"])
    if shape is None or scales is None:
        raise graph.refuse(node, "its scales depend on the data; make them constants")
    axes = list(range(len(shape)))
    roi = np.zeros(2 * len(axes))
    mode = given.get("mode", b"nearest").decode()
    plan = _axes(shape, axes, scales, None, "stretch", roi)
    _write(graph, node, plan, mode, "asymmetric", "floor", given)
    return True


def _axes(
    shape: tuple[int, ...], axes: list[int], scales: Any, sizes: Any, policy: str, roi: NDArray[Any]
) -> list[_Axis]:
    plan = []
    if scales is None and policy != "stretch":
        ratios = [int(size) / shape[axis] for axis, size in zip(axes, sizes, strict=True)]
        ratio = min(ratios) if policy == "not_larger" else max(ratios)
        scales = [ratio] * len(axes)
        sizes = [math.floor(ratio * shape[axis] + 0.5) for axis in axes]
    for index, axis in enumerate(axes):
        size = shape[axis]
        start, end = float(roi[index]), float(roi[index + len(axes)])
        out = int(sizes[index]) if sizes is not None else math.floor(size * float(scales[index]))
        scale = float(scales[index]) if scales is not None else out / size
        plan.append(_Axis(axis, size, scale, out, (start, end)))
    return plan


def _tvm_is_right(plan: list[_Axis], shape: tuple[int, ...], mode: str, coordinates: str) -> bool:
    """Whole ratios of images of one to three spatial axes, in the modes that TVM computes as the standard does."""
    if len(shape) not in (3, 4, 5) or coordinates not in ("half_pixel", "asymmetric", "align_corners"):
        return False
    for axis in plan:
        if axis.axis < 2 and axis.out != axis.size:
            return False
        if axis.out < axis.size or axis.out % axis.size or abs(axis.scale * axis.size - axis.out) > 1e-6:
            return False
    return mode in ("nearest", "linear")


def _write(
    graph: Graph, node: NodeProto, plan: list[_Axis], mode: str, coordinates: str, rounding: str, given: dict[str, Any]
) -> None:
    result = node.input[0]
    crops = coordinates == "tf_crop_and_resize"
    changed = [axis for axis in plan if axis.out != axis.size or axis.scale != 1.0 or crops]
    if mode != "nearest" and graph.dtype(result) not in FLOATS:
        raise graph.refuse(node, f"mode {mode} of integers is not done; cast to float before and back after it")
    rounding = rounding or given.get("nearest_mode", b"round_prefer_floor").decode()
    beyond: list[tuple[int, NDArray[np.bool_]]] = []
    for axis in sorted(changed, key=lambda axis: axis.out - axis.size):
        x = _coordinates(axis, coordinates)
        if mode == "nearest":
            index = _nearest(x, rounding).clip(0, axis.size - 1)[None]
            weight = None
        else:
            index, weight = _taps(x, axis, mode, given)
        if crops:
            beyond.append((axis.axis, (x < 0) | (x > axis.size - 1)))
        result = _gather(graph, result, axis.axis, index, weight, len(graph.shape(node.input[0]) or ()))
    for axis_number, outside in beyond:
        if outside.any():
            shape = [1] * len(graph.shape(node.input[0]) or ())
            shape[axis_number] = outside.size
            value = graph.scalar(given.get("extrapolation_value", 0.0), node.input[0])
            result = graph.op("Where", [graph.constant(outside.reshape(shape)), value, result])
    graph.op("Identity", [result], node.output[0])


def _gather(
    graph: Graph, name: str, axis: int, index: NDArray[np.int64], weight: NDArray[Any] | None, rank: int
) -> str:
    total = ""
    shape = [1] * rank
    shape[axis] = index.shape[1]
    for tap, positions in enumerate(index):
        if weight is not None and not weight[tap].any():
            continue
        term = graph.op("Gather", [name, graph.constant(positions)], axis=axis)
        if weight is not None:
            factor = graph.constant(weight[tap].reshape(shape).astype(graph.numpy_dtype(name)))
            term = graph.op("Mul", [term, factor])
        total = graph.op("Add", [total, term]) if total else term
    return total


def _coordinates(axis: _Axis, mode: str) -> NDArray[np.float64]:
    """Where in the input each sample of the output lies."""
    i = np.arange(axis.out, dtype=np.float64)
    length = axis.scale * axis.size
    if mode == "align_corners":
        return i * (axis.size - 1) / (length - 1) if length != 1 else i * 0
    if mode == "asymmetric":
        return i / axis.scale
    if mode == "tf_crop_and_resize":
        start, end = axis.roi
        if axis.out == 1:
            return i * 0 + 0.5 * (start + end) * (axis.size - 1)
        return start * (axis.size - 1) + i * (end - start) * (axis.size - 1) / (axis.out - 1)
    x = (i + 0.5) / axis.scale - 0.5
    if mode == "pytorch_half_pixel" and axis.out == 1:
        return i * 0 - 0.5
    if mode == "half_pixel_symmetric":
        return x + axis.size / 2 * (1 - axis.out / length)
    return x


def _nearest(x: NDArray[np.float64], rounding: str) -> NDArray[np.int64]:
    x = np.round(x, 9)  # what is whole but for rounding is whole
    rounded = {
        "round_prefer_floor": np.ceil(x - 0.5),
        "round_prefer_ceil": np.floor(x + 0.5),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }[rounding]
    return np.asarray(rounded).astype(np.int64)


def _taps(
    x: NDArray[np.float64], axis: _Axis, mode: str, given: dict[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions and weights, [tap, sample]."""
    narrow = min(axis.scale, 1.0) if given.get("antialias", 0) else 1.0
    reach = 1 if mode == "linear" else 2
    floor = np.floor(x)
    first = math.floor(-reach / narrow) + 1
    steps = np.arange(first, reach - first + (1 if mode == "linear" else 0) if narrow < 1 else reach + 1)
    distance = np.abs(steps[:, None] - (x - floor)[None]) * narrow
    if mode == "linear":
        weight = np.clip(1 - distance, 0, None)
    else:
        a = given.get("cubic_coeff_a", -0.75)
        d2, d3 = distance**2, distance**3
        near = (a + 2) * d3 - (a + 3) * d2 + 1
        far = a * d3 - 5 * a * d2 + 8 * a * distance - 4 * a
        weight = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    position = floor[None].astype(np.int64) + steps[:, None]
    if given.get("exclude_outside", 0):
        weight = np.where((position < 0) | (position >= axis.size), 0.0, weight)
    return position.clip(0, axis.size - 1), weight / weight.sum(axis=0, keepdims=True)
