"""Constants folded into each other: what steps multiply by and add goes into weights, or into sums of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.ir.expr import GenericConst

from workers.graph.integer import offsets
from workers.graph.pointwise import VALUE, Ref, Step
from workers.graph.quantized import Grid, Weights

Array = NDArray[Any]


def leading_affine(steps: Sequence[Step], operands: Sequence[Any], channels: int) -> tuple[int, Array, Array]:
    """How many steps from the first are x × constant + constant, one after the other, and what they come to."""
    scale, shift = np.ones(channels), np.zeros(channels)
    reads: dict[Ref, int] = {}
    for step in steps:
        for reference in step.arguments:
            reads[reference] = reads.get(reference, 0) + 1
    previous: Ref = VALUE
    count = 0
    for step in steps:
        if step.operator not in ("add", "subtract", "multiply", "divide") or reads.get(previous, 0) != 1:
            break
        first, second = step.arguments
        if previous not in (first, second):
            break
        other = second if first == previous else first
        if other[0] == "number":
            constant = np.full(channels, float(other[1]))
        elif other[0] == "input" and isinstance(operands[int(other[1])], GenericConst | np.ndarray):
            constant = channel_vector(operands[int(other[1])], channels).astype("float64")
        else:
            break
        if not np.isfinite(constant).all():
            break
        if step.operator == "add":
            shift = shift + constant
        elif step.operator == "multiply":
            scale, shift = scale * constant, shift * constant
        elif step.operator == "subtract":
            scale, shift = (scale, shift - constant) if first == previous else (-scale, constant - shift)
        elif first == previous and np.all(constant != 0):
            scale, shift = scale / constant, shift / constant
        else:
            break
        previous = ("step", count)
        count += 1
    return count, scale, shift


def fold_affine(
    steps: Sequence[Step], operands: Sequence[Any], channels: int
) -> tuple[Array, Array | None, list[Step], list[Any]]:
    """What the first steps multiply by, for the weights to take in; what they add; and the steps that are left."""
    count, scale, shift = leading_affine(steps, operands, channels)
    steps, operands = without(steps, operands, count)
    return scale, (shift if np.any(shift) else None), steps, operands


def merge_affine(steps: Sequence[Step], operands: Sequence[Any], channels: int) -> tuple[list[Step], list[Any]]:
    """The first steps as one multiplication and one addition, where they are more than that."""
    count, scale, shift = leading_affine(steps, operands, channels)
    if count < 2:
        return list(steps), list(operands)
    steps, operands = without(steps, operands, count)
    merged: list[Step] = []
    if np.any(scale != 1):
        merged.append(Step("multiply", (VALUE, ("input", len(operands)))))
        operands.append(scale)
    if np.any(shift):
        value: Ref = ("step", 0) if merged else VALUE
        merged.append(Step("add", (value, ("input", len(operands)))))
        operands.append(shift)
    return [*merged, *shifted(steps, len(merged))] if merged else steps, operands


def in_units(
    steps: Sequence[Step], operands: Sequence[Any], grid: Grid, weights: Weights
) -> tuple[Array, Array, list[Step], list[Any]]:
    """What is added to the sums of integers, int32, and what these are multiplied by, float32, both for each channel;
    and the steps that are left, on that product.

    A constant goes to the sums where it lies on their grid, as a quantized bias does. A quantization that follows goes
    into the factor, and bounds between, as of a ReLU, into its own.
    """
    channels = len(weights.scales)
    factor = np.float32(grid.scale) * weights.scales
    none = np.zeros(channels, np.int64)
    count, scale, shift = leading_affine(steps, operands, channels)
    steps, operands = list(steps), list(operands)
    added = offsets(grid.zero, weights.integers, none)
    if count and np.all(scale != 0):
        bias = shift / (factor.astype("float64") * scale)
        whole = np.rint(bias)
        if np.all(np.abs(bias - whole) <= 1e-3 + 3e-7 * np.abs(whole)) and np.abs(whole).max() < 2**31:
            try:
                added = offsets(grid.zero, weights.integers, whole.astype(np.int64))
            except OverflowError:
                pass
            else:
                factor = factor * scale.astype("float32")
                steps, operands = without(steps, operands, count)
    position, low, high = _quantizes_at(steps)
    if position is not None:
        _, (_, step), (_, zero), *_ = steps[position].arguments
        steps, operands = without(steps, operands, position)
        factor = factor / np.float32(step)
        numbers = (1.0, float(zero), low, high)
        steps[0] = Step("quantize", (VALUE, *(("number", number) for number in numbers)))
    return added, factor, steps, operands


def _quantizes_at(steps: Sequence[Step]) -> tuple[int | None, float, float]:
    """Which step quantizes the value, with nothing but bounds before it, and the bounds of the integer by all of them.
    None if none does."""
    reads: dict[Ref, int] = {}
    for step in steps:
        for reference in step.arguments:
            reads[reference] = reads.get(reference, 0) + 1
    bounds: list[tuple[float, float]] = []
    previous: Ref = VALUE
    for index, step in enumerate(steps):
        first, *others = step.arguments
        if first != previous or reads[previous] != 1 or any(kind != "number" for kind, _ in others):
            break
        numbers = [float(number) for _, number in others]
        if step.operator == "quantize":
            scale, zero, low, high = numbers
            for lower, upper in bounds:
                # Rounding keeps the order: bounds of real numbers are bounds of integers.
                least, most = (
                    float(np.clip(np.rint(np.float32(bound) / np.float32(scale)) + zero, low, high))
                    for bound in (lower, upper)
                )
                low, high = min(max(low, least), high), max(min(high, most), low)
            return index, low, high
        if step.operator == "relu":
            bounds.append((0.0, math.inf))
        elif step.operator == "clip" and numbers[0] <= numbers[1]:
            bounds.append((numbers[0], numbers[1]))
        elif step.operator == "maximum":
            bounds.append((numbers[0], math.inf))
        elif step.operator == "minimum":
            bounds.append((-math.inf, numbers[0]))
        else:
            break
        previous = ("step", index)
    return None, 0.0, 0.0


def without(steps: Sequence[Step], operands: Sequence[Any], count: int) -> tuple[list[Step], list[Any]]:
    """The steps after the first `count`, whose last result is now the value, and only the operands they read."""
    kept: list[Any] = []
    numbers: dict[int, int] = {}
    renamed = []
    for step in steps[count:]:
        references: list[Ref] = []
        for kind, which in step.arguments:
            if kind == "input":
                if int(which) not in numbers:
                    numbers[int(which)] = len(kept)
                    kept.append(operands[int(which)])
                references.append(("input", numbers[int(which)]))
            elif kind == "step":
                references.append(("step", int(which) - count) if int(which) >= count else VALUE)
            else:
                references.append((kind, which))
        renamed.append(Step(step.operator, tuple(references)))
    return renamed, kept


def shifted(steps: Sequence[Step], by: int = 1) -> list[Step]:
    """The same steps behind `by` new ones, on the result of the last of those."""

    def move(reference: Ref) -> Ref:
        if reference == VALUE:
            return ("step", by - 1)
        return ("step", int(reference[1]) + by) if reference[0] == "step" else reference

    return [Step(step.operator, tuple(map(move, step.arguments))) for step in steps]


def channel_vector(constant: Any, channels: int) -> Array:
    array = constant if isinstance(constant, np.ndarray) else constant.value.numpy()
    return np.broadcast_to(array.reshape(-1), (channels,))
