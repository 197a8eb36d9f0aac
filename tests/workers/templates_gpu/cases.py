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
                arrays.append(np.asarray(generator.integers(-4, 5, shape) / 2, dtype))
            else:
                arrays.append(np.asarray(generator.integers(-8, 9, shape), dtype))
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


def vector(columns: int, summed: int, *, right: str = "jk", dtype: str = "float32", after: str = "bias") -> Case:
    """A product with one row."""
    return product(1, columns, summed, right=right, dtype=dtype, after=after)


def depthwise(channels: int, image: tuple[int, int], *, window: int = 3, stride: int = 1) -> Case:
    data = placeholder((1, channels, *image), "data")
    weight = placeholder((channels, 1, window, window), "weight")
    out = topi.nn.depthwise_conv2d_nchw(data, weight, stride, window // 2, 1, "float32")
    return case(f"depthwise {channels} {image} {window} {stride}", [data, weight], topi.nn.relu(out))


def rows(kind: str, leading: Sequence[int], row: int, dtype: str = "float32") -> Case:
    """A function over rows of `row` numbers; `leading` are the axes that count them."""
    shape = (*leading, row)
    last = len(shape) - 1
    x = placeholder(shape, "x", dtype)
    name = f"{kind} {shape} {dtype}"
    wide = topi.cast(x, "float32") if dtype != "float32" else x
    if kind == "softmax":
        return case(name, [x], topi.cast(topi.nn.softmax(wide, axis=-1), dtype))
    if kind == "masked softmax":
        mask = placeholder(shape, "mask", dtype)
        return case(name, [x, mask], topi.nn.softmax(wide * 0.125 + topi.cast(mask, "float32"), axis=-1))
    if kind == "softmax over columns":
        return case(name, [x], topi.nn.softmax(wide, axis=max(0, last - 1)))
    if kind == "layer_norm":
        gamma, beta = placeholder((row,), "gamma"), placeholder((row,), "beta")
        return case(name, [x, gamma, beta], topi.nn.relu(topi.nn.layer_norm(wide, gamma, beta, [last], 1e-5)))
    if kind == "rms_norm":
        gamma = placeholder((row,), "gamma")
        return case(name, [x, gamma], topi.nn.rms_norm(wide, gamma, [last], 1e-5))
    if kind == "sum":
        return case(name, [x], topi.sum(wide, axis=last))
    if kind == "max":
        return case(name, [x], topi.max(wide, axis=last, keepdims=True))
    if kind == "all":
        return case(name, [x], topi.sum(wide))
    if kind == "mean":
        return case(name, [x], topi.tanh(topi.sum(wide, axis=last, keepdims=True) / float(row)))
    if kind == "columns":
        return case(name, [x], topi.sum(wide, axis=max(0, last - 1)) / 4.0)
    if kind == "two":
        return case(name, [x], topi.sum(wide, axis=last), topi.max(wide, axis=last))
    raise AssertionError(kind)


ROW_KINDS = (
    "softmax", "masked softmax", "softmax over columns", "layer_norm", "rms_norm", "sum", "max", "all", "mean",
    "columns", "two",
)  # fmt: skip


def pool(kind: str, channels: int, image: tuple[int, int], *, window: int = 3, stride: int = 2) -> Case:
    data = placeholder((1, channels, *image), "data")
    if kind == "global":
        return case(f"pool {kind} {channels} {image}", [data], topi.nn.global_pool(data, "avg"))
    padding = window // 2
    out = topi.nn.pool2d(data, [window] * 2, [stride] * 2, [1, 1], [padding] * 4, kind)
    return case(f"pool {kind} {channels} {image} {window} {stride}", [data], out)


def elements(kind: str, shape: Sequence[int], dtype: str = "float32") -> Case:
    """A function without reductions."""
    x = placeholder(shape, "x", dtype)
    name = f"{kind} {tuple(shape)} {dtype}"
    if kind == "chain":
        y = placeholder(shape[1:], "y", dtype)
        return case(name, [x, y], topi.multiply(topi.tanh(x + y) + tvm.tirx.const(1, dtype), x))
    if kind == "transpose":
        order = [0, *reversed(range(1, len(shape)))]
        return case(name, [x], topi.exp(topi.transpose(x, order)))
    if kind == "concat":
        y = placeholder([shape[0], shape[1] + 1, *shape[2:]], "y", dtype)
        return case(name, [x, y], topi.concatenate((x, y), 1))
    if kind == "pad":
        return case(name, [x], topi.nn.pad(x, [1] * len(shape), [2] * len(shape)))
    if kind == "cast":
        return case(name, [x], topi.cast(x, "float16" if dtype == "float32" else "float32"))
    if kind == "reshape":
        return case(name, [x], topi.reshape(topi.nn.relu(x), (int(np.prod(shape)),)))
    if kind == "gather":
        where = placeholder((4,), "where", "int32")
        return case(name, [x, where], topi.take(x, where, axis=1, mode="clip"))
    if kind == "split":
        first, second = topi.split(x, [1], axis=0)
        return case(name, [x], first, second)
    raise AssertionError(kind)


ELEMENT_KINDS = ("chain", "transpose", "concat", "pad", "cast", "reshape", "gather", "split")
