"""Convolution in integers: uint8 data times int8 weights into int32 sums, with what is fused to it as they are written.

Real numbers are scale × (integer − zero point), ONNX's QuantizeLinear; weights have a scale for each channel of output
and no zero point. With x and w the integers, the real numbers that the epilogue starts from are

    m · (Σ w·x + c),   c = bias − zero_x · Σ w,   m = scale_x · scale_w

where padding is x = zero_x, which is zero in real numbers. `c` and `m` are constants of each slot of output; a
quantization that follows at once has its scale in `m` too. Rounding is to the nearest, halves to even, and a ReLU is
the lower bound of the integers: so computes ONNX Runtime's QLinearConv (Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018, with the multiplier in float32).

Of data that is quantized dynamically zero point and scale are known at run time only, one tensor of both
(`workers.graph.dynamic`). The constants are then Σ w and scale_w, and a bias is a step of the epilogue:

    scale_x · scale_w · (Σ w·x − zero_x · Σ w)

Data is blocked as in `workers.graph.computations`. Weights come in fours of slots, [out blocks, in units, kh, kw,
unit / 4, block, 4]: what the dot products of `vpdpbusd` (VNNI) read in one load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te, tirx

from workers.graph.parts import BlockedConvolution, Fused, Window, function_of
from workers.search.templates.knobs import BELOW

#: Neighbouring slots of input that one dot product sums.
FOUR: Final = 4


@dataclass(frozen=True, slots=True)
class IntegerConvolution(BlockedConvolution):
    """A convolution of uint8. Slots that hold no channel have weights of zero.

    Of `groups`, channels lie in order: each block of output reads the run of blocks that holds what its groups read,
    and weights are zero where that is another group's.

    `plain_channels` is the number of channels of data that comes as plain NCHW, 0 where it comes blocked. Plain data
    may be float32, which `prologue` quantizes.
    """

    batch: int
    in_blocks: int
    height: int
    width: int
    out_blocks: int
    block: int  #: slots in a block, a multiple of four
    data_zero: int
    window: Window = field(default_factory=Window)
    plain_channels: int = 0
    prologue: Fused = field(default_factory=Fused)
    epilogue: Fused = field(default_factory=Fused)
    signed: bool = False  #: whether data is read less 128, as int8: `added` is then of a zero point that much lower
    groups: int = 1
    group_channels: tuple[int, int] = (0, 0)  #: of each of several groups, in and out
    dynamic: bool = False  #: whether the data's grid is known at run time only; `data_zero` is then of no meaning

    def __post_init__(self) -> None:
        if self.block % FOUR or (self.prologue and not self.plain_channels):
            raise ValueError(f"blocks of {self.block}, a prologue of {len(self.prologue.program.steps)} steps")
        if self.dynamic and (self.prologue or self.groups > 1):
            raise ValueError("a grid that is known at run time only, of groups or behind a prologue")
        if self.groups > 1 and (self.plain_channels or not all(self.group_channels)):
            raise ValueError(f"{self.groups} groups of {self.group_channels} channels")

    def first_block(self, out_block: Any) -> Any:
        """Of those that a block of output reads, which is a number or an expression."""
        if self.groups == 1:
            return 0
        inside, outside = self.group_channels
        return (out_block * self.block // outside) * inside // self.block

    @property
    def reads(self) -> int:
        """Blocks of data that each block of output sums over."""
        if self.groups == 1:
            return self.in_blocks
        inside, outside = self.group_channels
        longest = 0
        for out_block in range(self.out_blocks):
            last = min((out_block + 1) * self.block, self.groups * outside) - 1
            end = -(-(last // outside + 1) * inside // self.block)
            longest = max(longest, end - self.first_block(out_block))
        return longest

    @property
    def unit(self) -> int:
        """Slots of input in a unit of weights: a block, or all plain channels in whole fours."""
        return -(-self.plain_channels // FOUR) * FOUR or self.block

    @property
    def data_dtype(self) -> str:
        return "float32" if self.prologue else "uint8"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_blocks, self.reads, *self.window.kernel, self.unit // FOUR, self.block, FOUR)

    @property
    def flops(self) -> float:
        """Multiplications and additions of integers in one call, those on empty slots included."""
        n, o, h, w, v = self.result_shape
        return 2.0 * n * o * h * w * v * self.reads * self.unit * self.window.kernel[0] * self.window.kernel[1]


def pack_weights(conv: IntegerConvolution | IntegerDense, weight: NDArray[Any]) -> NDArray[Any]:
    """int8 weights [out slots, in slots or plain channels, kh, kw] as the function of `convolution` takes them."""
    o, c, kh, kw, fours, block, four = conv.weight_shape
    if isinstance(conv, IntegerConvolution) and conv.groups > 1:
        weight = _spread(conv, weight)
    weight = np.pad(weight, ((0, 0), (0, c * fours * four - weight.shape[1]), (0, 0), (0, 0)))
    parts = weight.reshape(o, block, c, fours, four, kh, kw)
    return np.ascontiguousarray(parts.transpose(0, 2, 5, 6, 3, 1, 4))


def _spread(conv: IntegerConvolution, weight: NDArray[Any]) -> NDArray[Any]:
    """Weights [out slots, channels of a group, kh, kw] where each stands in the run of blocks that is read."""
    inside, outside = conv.group_channels
    spread = np.zeros((len(weight), conv.reads * conv.block, *conv.window.kernel), weight.dtype)
    for channel in range(conv.groups * outside):
        begin = channel // outside * inside - conv.first_block(channel // conv.block) * conv.block
        spread[channel, begin : begin + inside] = weight[channel]
    return spread


def constants(blocks: int, block: int) -> tuple[Any, Any]:
    """Parameters: what is added to the sums of a function of integers, and what these are multiplied by."""
    return te.placeholder((blocks, block), "int32", name="added"), te.placeholder((blocks, block), name="factor")


def real(total: Any, constants: tuple[Any, Any], index: Sequence[Any]) -> Any:
    """The real number, or where that is quantized the quotient, that a sum stands for at [n, block, h, w, slot]."""
    added, factor = constants
    _, block, _, _, slot = index
    return (total + added[block, slot]).astype("float32") * factor[block, slot]


def _grids(product: IntegerConvolution | IntegerDense) -> list[Any]:
    """Parameters of a function of integers behind its constants: the grid of its data, if it has one at run time."""
    return [te.placeholder((2,), name="grid")] if product.dynamic else []


def _real_of(
    product: IntegerConvolution | IntegerDense, total: Any, constants: tuple[Any, Any], grids: Sequence[Any],
    index: Sequence[Any],
) -> Any:  # fmt: skip
    if not grids:
        return real(total, constants, index)
    [grid], (sums, scale), (_, block, _, _, slot) = grids, constants, index
    zero = grid[1].astype("int32") - (BELOW if product.signed else 0)
    return (total - zero * sums[block, slot]).astype("float32") * (grid[0] * scale[block, slot])


def offsets(zero: int, weight: NDArray[np.int8], bias: NDArray[np.int64]) -> NDArray[np.int32]:
    """What is added to the sum of each row of `weight`, [rows, …]; `bias` [rows] is in units of scale_x · scale_w.

    OverflowError if 32 bits may be too few for a row's sum.
    """
    wide = weight.astype(np.int64).reshape(weight.shape[0], -1)
    added: NDArray[np.int64] = bias - zero * wide.sum(1)
    # The furthest that a sum gets on the way, in whatever order it is taken, and with the constant.
    up, down = (255 * np.maximum(sign * wide, 0).sum(1) for sign in (1, -1))
    if max(np.abs(added).max(), up.max(), down.max(), (added + up).max(), (down - added).max()) >= 2**31:
        raise OverflowError("the sums of a channel may need more than 32 bits")
    return added.astype(np.int32)


def run_constants(zeros: tuple[int, int], weight: NDArray[np.int8]) -> NDArray[np.int32]:
    """What a zero point that is known at run time only is multiplied by and taken off the sum of each row of `weight`,
    [rows, …], with. OverflowError if 32 bits may be too few for a zero point between these two."""
    for zero in zeros:
        offsets(zero, weight, np.zeros(len(weight), np.int64))
    sums: NDArray[np.int32] = weight.reshape(len(weight), -1).sum(1, dtype=np.int32)
    return sums


def convolution(conv: IntegerConvolution) -> tvm.tirx.PrimFunc:
    """A function of data, weights, what is added to the sums and what these are multiplied by (both [out blocks,
    block]), the grid of the data if that is known at run time only, other inputs of the epilogue, and the result.

    Blocks: `quantized` (of plain float32), `stage` (data padded, or its few channels side by side), `sum`, `result`.
    """
    (top, left, _, _), (sh, sw), (dh, dw) = conv.window.padding, conv.window.strides, conv.window.dilation
    kh_, kw_ = conv.window.kernel
    n_, o_, oh_, ow_, v_ = conv.result_shape
    channels = conv.plain_channels
    data = te.placeholder(conv.data_shape, conv.data_dtype, name="data")
    weight = te.placeholder(conv.weight_shape, "int8", name="weight")
    added, factor = constants(o_, v_)
    grids = _grids(conv)
    outside = grids[0][1].astype("uint8") if grids else tirx.const(conv.data_zero, "uint8")
    post = conv.epilogue.placeholders("post")
    read = data
    if conv.prologue:
        program = conv.prologue.program
        read = te.compute(data.shape, lambda *index: program.evaluate(data[index], []), name="quantized")
    staged = any(conv.window.padding) or bool(channels)
    if staged:
        source = read
        reach_h, reach_w = (oh_ - 1) * sh + (kh_ - 1) * dh + 1, (ow_ - 1) * sw + (kw_ - 1) * dw + 1

        def pad(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
            inside = te.all(h >= top, h < top + conv.height, w >= left, w < left + conv.width)
            if channels:
                # Behind the last channel it stands again: there are weights of zero.
                value = source[n, tirx.min(i, channels - 1), h - top, w - left]
            else:
                value = source[n, c, h - top, w - left, i]
            return te.if_then_else(inside, value, outside)

        read = te.compute((n_, conv.in_blocks, reach_h, reach_w, conv.unit), pad, name="stage")
    extents = (conv.reads, kh_, kw_, conv.unit // FOUR, FOUR)
    ic, kh, kw, fours, four = (
        te.reduce_axis((0, extent), name)
        for extent, name in zip(extents, ("ic", "kh", "kw", "fours", "four"), strict=True)
    )

    def product(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        # The last blocks of output may reach beyond the data, where their weights are zero.
        c = ic if conv.groups == 1 else tirx.min(conv.first_block(o) + ic, conv.in_blocks - 1)
        x = read[n, c, h * sh + kh * dh, w * sw + kw * dw, fours * FOUR + four].astype("int32")
        if conv.signed:
            x = x - BELOW
        return te.sum(x * weight[o, ic, kh, kw, fours, v, four].astype("int32"), axis=[ic, kh, kw, fours, four])

    total = te.compute((n_, o_, oh_, ow_, v_), product, name="sum")
    finish = conv.epilogue.behind(post)

    result = te.compute(
        (n_, o_, oh_, ow_, v_),
        lambda *index: finish(_real_of(conv, total[index], (added, factor), grids, index), index),
        name="result",
    )
    geometry = {
        "n": n_, "o": o_, "h": oh_, "w": ow_, "v": v_, "ic": conv.reads, "kh": kh_, "kw": kw_, "ii": conv.unit,
        "stride": sw, "staged": int(staged), "quantized": int(bool(conv.prologue)), "plain": int(bool(channels)),
        "others": len(post), "bytes": int(conv.dtype == "uint8"),
        **({"signed": 1} if conv.signed else {}),
    }  # fmt: skip
    return function_of([data, weight, added, factor, *grids, *post, result], "integer", geometry)


@dataclass(frozen=True, slots=True)
class IntegerDense:
    """Rows of plain uint8 [rows, length] times int8 weights, to plain rows [rows, outputs], a whole number of blocks.

    The other inputs of its epilogue are vectors [1, blocks, 1, 1, block], or as many plain rows.
    """

    rows: int
    length: int  #: a multiple of four
    outputs: int
    block: int
    signed: bool = False
    epilogue: Fused = field(default_factory=Fused)
    dynamic: bool = False

    def __post_init__(self) -> None:
        if not self.fits(self.length, self.outputs, self.block):
            raise ValueError(f"rows of {self.length}, {self.outputs} outputs in blocks of {self.block}")

    @staticmethod
    def fits(length: int, outputs: int, block: int) -> bool:
        """Whether there is such a computation."""
        return length % FOUR == 0 and outputs % block == 0

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.epilogue.program.dtype("float32")

    @property
    def blocks(self) -> int:
        return self.outputs // self.block

    @property
    def unit(self) -> int:
        """Places of a row that are summed by the innermost loops."""
        return next(unit for unit in (16, 8, 4) if self.length % unit == 0)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.blocks, self.length // self.unit, 1, 1, self.unit // FOUR, self.block, FOUR)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (self.rows, self.outputs)

    @property
    def flops(self) -> float:
        """Multiplications and additions of integers in one call."""
        return 2.0 * self.rows * self.length * self.outputs


def dense(product: IntegerDense) -> tvm.tirx.PrimFunc:
    """The function of an `IntegerDense`: rows are its pixels, and places in a row its channels."""
    rows, blocks, block, unit = product.rows, product.blocks, product.block, product.unit
    data = te.placeholder((rows, product.length), "uint8", name="data")
    weight = te.placeholder(product.weight_shape, "int8", name="weight")
    added, factor = constants(blocks, block)
    grids = _grids(product)
    post = product.epilogue.placeholders("post")
    extents = (product.length // unit, 1, 1, unit // FOUR, FOUR)
    ic, kh, kw, fours, four = (
        te.reduce_axis((0, extent), name)
        for extent, name in zip(extents, ("ic", "kh", "kw", "fours", "four"), strict=True)
    )

    def term(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        x = data[w, ic * unit + fours * FOUR + four].astype("int32")
        if product.signed:
            x = x - BELOW
        return te.sum(x * weight[o, ic, kh, kw, fours, v, four].astype("int32"), axis=[ic, kh, kw, fours, four])

    total = te.compute((1, blocks, 1, rows, block), term, name="sum")

    def finish(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        inputs = [tensor[w, o * block + v] if len(tensor.shape) == 2 else tensor[0, o, 0, 0, v] for tensor in post]
        value = _real_of(product, total[n, o, h, w, v], (added, factor), grids, (n, o, h, w, v))
        return product.epilogue.program.evaluate(value, inputs)

    result = te.compute((1, blocks, 1, rows, block), finish, name="result")
    geometry = {
        "n": 1, "o": blocks, "h": 1, "w": rows, "v": block, "ic": product.length // unit, "kh": 1, "kw": 1, "ii": unit,
        "stride": 1, "staged": 0, "quantized": 0, "plain": 0, "others": len(post),
        "bytes": int(product.dtype == "uint8"),
        **({"signed": 1} if product.signed else {}),
    }  # fmt: skip
    function = function_of([data, weight, added, factor, *grids, *post, result], "integer", geometry)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    schedule.transform_layout(schedule.get_sblock("result"), ("write", 0), lambda n, o, h, w, v: (w, o * block + v))
    return schedule.mod["main"]
