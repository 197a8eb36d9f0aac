"""Convolution in integers: uint8 data times int8 weights into int32 sums, requantized to uint8 as they are written.

Real numbers are scale × (integer − zero point), ONNX's QuantizeLinear; weights have a scale for each channel of output
and no zero point. With x, w, y the integers,

    y = clip(round(m · (Σ w·x + c)) + zero_y, low, high),   c = bias − zero_x · Σ w,   m = scale_x · scale_w / scale_y

where padding is x = zero_x, which is zero in real numbers. `c` and `m` are constants of each slot of output
(`constants`). Rounding is to the nearest, halves to even, and a ReLU is the lower bound `low` = zero_y: so computes
ONNX Runtime's QLinearConv (Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic
-Only Inference", CVPR 2018, with the multiplier in float32).

Data is blocked as in `workers.graph.computations`. Weights come in fours of slots, [out blocks, in blocks, kh, kw,
block / 4, block, 4]: what the dot products of `vpdpbusd` (VNNI) read in one load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te, tirx

from workers.graph.computations import Shape5, Window
from workers.search.templates.knobs import GEOMETRY_ATTR, TEMPLATE_ATTR

#: Neighbouring slots of input that one dot product sums.
FOUR: Final = 4


@dataclass(frozen=True, slots=True)
class QuantizedConvolution:
    """A convolution of uint8 blocks, without groups. Slots that hold no channel have weights of zero."""

    batch: int
    in_blocks: int
    height: int
    width: int
    out_blocks: int
    block: int  #: slots in a block, a multiple of four
    data_zero: int
    result_zero: int
    low: int = 0  #: bounds of the result, 0 to 255
    high: int = 255
    window: Window = field(default_factory=Window)

    def __post_init__(self) -> None:
        if self.block % FOUR or not 0 <= self.low <= self.high <= 255:
            raise ValueError(f"blocks of {self.block}, results from {self.low} to {self.high}")

    @property
    def data_shape(self) -> Shape5:
        return (self.batch, self.in_blocks, self.height, self.width, self.block)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_blocks, self.in_blocks, *self.window.kernel, self.block // FOUR, self.block, FOUR)

    @property
    def result_shape(self) -> Shape5:
        return (self.batch, self.out_blocks, *self.window.extent(self.height, self.width), self.block)

    @property
    def operations(self) -> float:
        """Multiplications and additions of one call, those on empty slots included."""
        n, o, h, w, v = self.result_shape
        return 2.0 * n * o * h * w * v * self.in_blocks * self.block * self.window.kernel[0] * self.window.kernel[1]


def pack_weights(conv: QuantizedConvolution, weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """Weights [out slots, in slots, kh, kw] as the function of `convolution` takes them."""
    o, c, kh, kw, fours, block, four = conv.weight_shape
    parts = weight.reshape(o, block, c, fours, four, kh, kw)
    return np.ascontiguousarray(parts.transpose(0, 2, 5, 6, 3, 1, 4))


def constants(
    conv: QuantizedConvolution,
    weight: NDArray[np.int8],
    bias: NDArray[np.int32],
    scales: tuple[float, NDArray[np.float32], float],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """What is added to the sums and what they are multiplied by, both [out blocks, block].

    `weight` is [out slots, in slots, kh, kw], `bias` [out slots] in units of scale_x · scale_w; `scales` are those of
    data, weights [out slots] and result. OverflowError if 32 bits may be too few for a channel's sum.
    """
    data, channels, result = scales
    wide = weight.astype(np.int64)
    added = bias.astype(np.int64) - conv.data_zero * wide.sum((1, 2, 3))
    # The furthest that a sum gets on the way, in whatever order it is taken, and with the constant.
    up, down = (255 * np.maximum(sign * wide, 0).sum((1, 2, 3)) for sign in (1, -1))
    if max(np.abs(added).max(), up.max(), down.max(), (added + up).max(), (down - added).max()) >= 2**31:
        raise OverflowError("the sums of a channel may need more than 32 bits")
    # In the order of ONNX Runtime, so that both round the same: (x · w) / y.
    factor = np.float32(data) * channels.astype(np.float32) / np.float32(result)
    shape = (conv.out_blocks, conv.block)
    return added.astype(np.int32).reshape(shape), factor.astype(np.float32).reshape(shape)


def convolution(conv: QuantizedConvolution) -> tvm.tirx.PrimFunc:
    """A function of data, weights, what is added and what is multiplied (`constants`), and the result.

    Blocks: `stage` (data padded, if it has to be), `sum`, `result`.
    """
    (top, left, _, _), (sh, sw), (dh, dw) = conv.window.padding, conv.window.strides, conv.window.dilation
    kh_, kw_ = conv.window.kernel
    n_, o_, oh_, ow_, v_ = conv.result_shape
    data = te.placeholder(conv.data_shape, "uint8", name="data")
    weight = te.placeholder(conv.weight_shape, "int8", name="weight")
    added = te.placeholder((o_, v_), "int32", name="added")
    factor = te.placeholder((o_, v_), "float32", name="factor")
    read = data
    staged = any(conv.window.padding)
    if staged:
        reach_h, reach_w = (oh_ - 1) * sh + (kh_ - 1) * dh + 1, (ow_ - 1) * sw + (kw_ - 1) * dw + 1

        def pad(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
            inside = te.all(h >= top, h < top + conv.height, w >= left, w < left + conv.width)
            return te.if_then_else(inside, data[n, c, h - top, w - left, i], tirx.const(conv.data_zero, "uint8"))

        read = te.compute((n_, conv.in_blocks, reach_h, reach_w, conv.block), pad, name="stage")
    extents = (conv.in_blocks, kh_, kw_, conv.block // FOUR, FOUR)
    ic, kh, kw, fours, four = (
        te.reduce_axis((0, extent), name)
        for extent, name in zip(extents, ("ic", "kh", "kw", "fours", "four"), strict=True)
    )

    def product(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        x = read[n, ic, h * sh + kh * dh, w * sw + kw * dw, fours * FOUR + four].astype("int32")
        return te.sum(x * weight[o, ic, kh, kw, fours, v, four].astype("int32"), axis=[ic, kh, kw, fours, four])

    total = te.compute((n_, o_, oh_, ow_, v_), product, name="sum")

    def requantize(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        real = (total[n, o, h, w, v] + added[o, v]).astype("float32") * factor[o, v]
        whole = tirx.nearbyint(real) + tirx.const(conv.result_zero, "float32")
        low, high = tirx.const(conv.low, "float32"), tirx.const(conv.high, "float32")
        # Through int32: there is an instruction for it, and the value fits.
        return tirx.min(tirx.max(whole, low), high).astype("int32").astype("uint8")

    result = te.compute((n_, o_, oh_, ow_, v_), requantize, name="result")
    geometry = {
        "n": n_, "o": o_, "h": oh_, "w": ow_, "v": v_, "ic": conv.in_blocks, "kh": kh_, "kw": kw_, "ii": conv.block,
        "stride": sw, "staged": int(staged),
    }  # fmt: skip
    function = te.create_prim_func([data, weight, added, factor, result])
    text = json.dumps(geometry, sort_keys=True)
    return function.with_attr({TEMPLATE_ATTR: "integer", GEOMETRY_ATTR: text, "tirx.noalias": True})
