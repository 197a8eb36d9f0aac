"""Functions that templates for GPUs are tested on, as the graph pipeline lowers operators to them, or nearly so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te, tirx, topi

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A function to be scheduled; what it computes is what it computes unscheduled."""

    name: str
    function: tirx.PrimFunc
    outputs: int = 1  #: of its parameters, the last

    def arguments(self) -> list[Array]:
        """Random inputs; outputs of numbers that nothing computes."""
        generator = np.random.default_rng(7)
        parameters = [([int(size) for size in p.shape], str(p.dtype)) for p in self.function.params]
        arrays = []
        for shape, dtype in parameters[: len(parameters) - self.outputs]:
            if dtype.startswith("float"):
                # Halves of small integers: their products and sums are exact in every order and precision.
                arrays.append((generator.integers(-4, 5, shape) / 2).astype(dtype))
            else:
                arrays.append(generator.integers(-8, 9, shape).astype(dtype))
        for shape, dtype in parameters[len(parameters) - self.outputs :]:
            arrays.append(np.full(shape, np.nan if dtype.startswith("float") else 77, dtype))
        return arrays

    def wanted(self) -> list[Array]:
        """What the function computes of `arguments`, unscheduled."""
        compiled = tvm.compile(tvm.IRModule({"main": self.function}), target="llvm")
        tensors = [tvm.runtime.tensor(array) for array in self.arguments()]
        compiled["main"](*tensors)
        return [tensor.numpy() for tensor in tensors[len(tensors) - self.outputs :]]


def placeholder(shape: Sequence[int], name: str, dtype: str = "float32") -> Any:
    return te.placeholder(tuple(shape), dtype, name)


def case(name: str, inputs: list[Any], *outputs: Any) -> Case:
    return Case(name, te.create_prim_func([*inputs, *outputs]), len(outputs))


def product(
    rows: int, columns: int, summed: int, *, batch: int = 1, left: str = "ik", right: str = "kj",
    dtype: str = "float32", after: str = "",
) -> Case:  # fmt: skip
    """out[b, i, j] = sum of left · right over k, with axes of the matrices in the orders given, and what follows."""
    sizes = {"i": rows, "j": columns, "k": summed}
    total = "int32" if dtype == "int8" else "float32"
    b = [batch] if batch > 1 else []
    x = placeholder([*b, *(sizes[axis] for axis in left)], "x", dtype)
    y = placeholder([*b, *(sizes[axis] for axis in right)], "y", dtype)
    k = te.reduce_axis((0, summed), "k")

    def compute(*at: Any) -> Any:
        *leading, i, j = at
        axes = {"i": i, "j": j, "k": k}
        term = [m[(*leading, *(axes[a] for a in order))] for m, order in ((x, left), (y, right))]
        return te.sum(term[0].astype(total) * term[1].astype(total), axis=k)

    out = te.compute((*b, rows, columns), compute, name="product")
    extra, out = follow(out, after, dtype)
    return case(f"product {batch}x{rows}x{columns}x{summed} {left},{right} {dtype} {after}", [x, y, *extra], out)


def follow(out: Any, after: str, dtype: str) -> tuple[list[Any], Any]:
    """What graphs compute of a product's result: a cast, a bias, a residual, an activation."""
    shape = [int(size) for size in out.shape]
    if after == "":
        return [], out
    if dtype == "int8":
        # Sums of int8 that leave it are not the same in C, which adds in int, as in LLVM.
        out = topi.clip(out, -100, 100)
    if after == "cast":
        return [], topi.cast(out, dtype)
    if after == "bias":
        bias = placeholder([1] * (len(shape) - 1) + shape[-1:], "bias", str(out.dtype))
        return [bias], topi.nn.relu(topi.add(out, bias))
    if after == "residual":
        narrow = topi.cast(out, dtype)
        other = placeholder(shape, "other", dtype)
        return [other], topi.nn.relu(topi.add(narrow, other))
    if after == "reshape":
        return [], topi.reshape(topi.cast(out, dtype), (shape[0], int(np.prod(shape[1:]))))
    raise AssertionError(after)


def convolution(
    batch: int, channels: int, filters: int, image: tuple[int, int], *, window: tuple[int, int] = (3, 3),
    stride: int = 1, padding: int = 1, dilation: int = 1, dtype: str = "float32", after: str = "",
) -> Case:  # fmt: skip
    total = "int32" if dtype == "int8" else "float32"
    data = placeholder((batch, channels, *image), "data", dtype)
    weight = placeholder((filters, channels, *window), "weight", dtype)
    out = topi.nn.conv2d(data, weight, stride, padding, dilation, "NCHW", "OIHW", total)
    extra, out = follow(out, after, dtype)
    return case(
        f"convolution {batch}x{channels}x{filters}x{image} {window} {stride} {padding} {dilation} {dtype} {after}",
        [data, weight, *extra], out,
    )  # fmt: skip
