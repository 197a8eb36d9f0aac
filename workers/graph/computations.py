"""The computations that our templates schedule, in blocked layout: convolution, depthwise, pooling, Winograd, copies.

Data is NCHW[x]c: [batch, channel block, height, width, block], one block one cache line or more of channels. Which
channel a slot holds is the graph's business (`workers.graph.layout`): a computation knows slots only, and slots that
hold no channel are multiplied by weights of zero.

Every function of this module is a `PrimFunc` with the parameters data, weights, tables, other inputs of its prologue
and epilogue, result. Its blocks have fixed names, by which templates find them: `stage` (data padded, gathered or put
through the prologue), `sum` (the reduction), `result` (the epilogue, written to the last parameter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te, tirx

from workers.graph import integer, winograd
from workers.graph.integer import IntegerConvolution, IntegerDense
from workers.graph.memory import CONCAT_ATTR, LAYOUT_ATTR
from workers.graph.parts import BlockedConvolution, Fused, Shape5, Window, at, function_of


@dataclass(frozen=True, slots=True)
class Convolution(BlockedConvolution):
    """A convolution over blocked data, with what is fused to it.

    `plain_channels` is the number of channels of data that comes as plain NCHW, 0 where it comes blocked. With `table`
    slots of input are chosen for each block of output by a table [out_blocks, table] of slot numbers (groups that are
    no multiple of a block, shuffled channels); without, group g of `groups` reads its own run of blocks.
    """

    batch: int
    in_blocks: int
    height: int
    width: int
    out_blocks: int
    block: int
    in_slots: int  #: slots of input that hold channels, from the first to the last
    window: Window = field(default_factory=Window)
    groups: int = 1
    table: int = 0
    plain_channels: int = 0
    prologue: Fused = field(default_factory=Fused)
    epilogue: Fused = field(default_factory=Fused)
    data_dtype: str = "float32"  #: before the prologue
    weight_dtype: str = "float32"  #: or "float16": products are of float32 all the same

    @property
    def unit(self) -> int:
        """Input channels that are summed by the innermost loop: the largest that wastes no more than it must."""
        if self.table:
            return self.table
        if self.plain_channels:
            return self.plain_channels
        if self.groups > 1 or self.in_slots % self.block == 0:
            return self.block
        if self.in_slots < self.block:
            return self.in_slots
        return next(unit for unit in (8, 4, 2, 1) if -(-self.in_slots // unit) * unit - self.in_slots < 4)

    @property
    def in_units(self) -> int:
        """Runs of `unit` channels that one block of output sums over."""
        if self.table or self.plain_channels:
            return 1
        if self.groups > 1:
            return self.in_blocks // self.groups
        return -(-self.in_slots // self.unit)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_blocks, self.in_units, *self.window.kernel, self.unit, self.block)

    @property
    def flops(self) -> float:
        """Multiplications and additions of one call, those on empty slots included."""
        n, o, h, w, v = self.result_shape
        return 2.0 * n * o * h * w * v * self.in_units * self.unit * self.window.kernel[0] * self.window.kernel[1]


def pack_weights(computation: Computation, variant: str, weight: NDArray[Any]) -> NDArray[Any]:
    """Weights [out slots, in slots or reads, kh, kw], or of a depthwise window [slots, kh, kw], as a variant wants."""
    if isinstance(computation, Pooling):
        blocks, block = computation.blocks, computation.block
        return np.ascontiguousarray(weight.reshape(blocks, block, *weight.shape[1:]).transpose(0, 2, 3, 1))
    if isinstance(computation, IntegerConvolution | IntegerDense):
        return integer.pack_weights(computation, weight)
    assert isinstance(computation, Convolution | Dense)
    out_blocks, in_units, kh, kw, unit, block = computation.weight_shape
    if variant.startswith("winograd"):
        weight = winograd.transform_weights(weight, int(variant.removeprefix("winograd")))
        tile = weight.shape[0]
        parts = weight.reshape(tile, tile, out_blocks, block, in_units, unit)
        return np.ascontiguousarray(parts.transpose(0, 1, 2, 4, 5, 3))
    weight = weight[:, : in_units * unit]
    missing = in_units * unit - weight.shape[1]
    if missing:
        weight = np.pad(weight, ((0, 0), (0, missing), (0, 0), (0, 0)))
    return np.ascontiguousarray(weight.reshape(out_blocks, block, in_units, unit, kh, kw).transpose(0, 2, 4, 5, 3, 1))


def variants(computation: Computation, *, rounding: bool) -> dict[str, tvm.tirx.PrimFunc]:
    """Every function that computes this, by name. All have the same data, other inputs and result."""
    if isinstance(computation, Convolution):
        return convolution_variants(computation, rounding=rounding)
    if isinstance(computation, IntegerConvolution):
        return {"integer": integer.convolution(computation)}
    if isinstance(computation, IntegerDense):
        return {"integer": integer.dense(computation)}
    if isinstance(computation, Dense):
        return {"dense": dense(computation)}
    if isinstance(computation, BatchMatmul):
        return {"matmul": batch_matmul(computation)}
    if isinstance(computation, Pooling):
        return {"window": pooling(computation)}
    if isinstance(computation, Pointwise):
        return {"pointwise": pointwise(computation)}
    return {"copy": copy(computation)}


def convolution_variants(conv: Convolution, *, rounding: bool) -> dict[str, tvm.tirx.PrimFunc]:
    """Every computation of this convolution that may be the fastest, by name. All have equal data, other inputs and
    result; their weights differ (`pack`)."""
    variants = {}
    if conv.window.is_point:
        variants["flat"] = flat(conv)
    else:
        variants["direct"] = direct(conv)
    if rounding:
        variants |= {f"winograd{m}": winograd_function(conv, m) for m in winograd_tiles(conv)}
    return variants


def direct(conv: Convolution) -> tvm.tirx.PrimFunc:
    """The sum over channels and window, pixel by pixel."""
    (top, left, _, _), (sh, sw), (dh, dw) = conv.window.padding, conv.window.strides, conv.window.dilation
    kh_, kw_ = conv.window.kernel
    n_, o_, oh_, ow_, v_ = conv.result_shape
    data, weight, tables, pre, post = _parameters(conv, conv.weight_shape)
    load = _loader(conv, data, pre)
    staged = bool(conv.prologue) or any(conv.window.padding) or conv.plain_channels
    read = load
    if staged:
        reach_h, reach_w = (oh_ - 1) * sh + (kh_ - 1) * dh + 1, (ow_ - 1) * sw + (kw_ - 1) * dw + 1
        shape = (n_, 1 if conv.plain_channels else conv.in_blocks, reach_h, reach_w, conv.plain_channels or conv.block)

        def pad(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
            tests = _inside(h, reach_h, top, conv.height) + _inside(w, reach_w, left, conv.width)
            value = load(n, c, h - top, w - left, i)
            return te.if_then_else(te.all(*tests), value, tirx.const(0, "float32")) if tests else value

        stage = te.compute(shape, pad, name="stage")
        read = lambda n, c, h, w, i: stage[n, c, h, w, i]  # noqa: E731
    ic, kh, kw, ii = (
        te.reduce_axis((0, extent), name)
        for extent, name in zip((conv.in_units, kh_, kw_, conv.unit), ("ic", "kh", "kw", "ii"), strict=True)
    )
    slot = _slots(conv, tables)

    def product(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        block, lane = slot(o, ic, ii)
        factor = weight[o, ic, kh, kw, ii, v].astype("float32")
        term = read(n, block, h * sh + kh * dh, w * sw + kw * dw, lane) * factor
        return te.sum(term, axis=[ic, kh, kw, ii])

    total = te.compute((n_, o_, oh_, ow_, v_), product, name="sum")
    finish = conv.epilogue.behind(post)
    result = te.compute((n_, o_, oh_, ow_, v_), lambda *index: finish(total[index], index), name="result")
    geometry = {
        "n": n_, "o": o_, "h": oh_, "w": ow_, "v": v_, "ic": conv.in_units, "kh": kh_, "kw": kw_, "ii": conv.unit,
        "stride": sw, "staged": int(bool(staged)),
        "others": len(conv.epilogue.inputs), "indirect": int(bool(conv.table)), **_weight_bytes(conv),
    }  # fmt: skip
    return function_of([data, weight, *tables, *pre, *post, result], "conv", geometry)


def flat(conv: Convolution) -> tvm.tirx.PrimFunc:
    """A window of one pixel: pixels are one axis, whatever the width. Strides need the pixels gathered first."""
    n_, o_, oh_, ow_, v_ = conv.result_shape
    sh, sw = conv.window.strides
    pixels = oh_ * ow_
    data, weight, tables, pre, post = _parameters(conv, conv.weight_shape)
    load = _loader(conv, data, pre)
    staged = bool(conv.prologue) or (sh, sw) != (1, 1) or bool(conv.plain_channels)

    def pixel(n: Any, c: Any, p: Any, i: Any) -> Any:
        return load(n, c, (p // ow_) * sh, (p % ow_) * sw, i)

    read = pixel
    if staged:
        shape = (n_, 1 if conv.plain_channels else conv.in_blocks, pixels, conv.plain_channels or conv.block)
        stage = te.compute(shape, pixel, name="stage")
        read = lambda n, c, p, i: stage[n, c, p, i]  # noqa: E731
    ic, ii = te.reduce_axis((0, conv.in_units), "ic"), te.reduce_axis((0, conv.unit), "ii")
    slot = _slots(conv, tables)

    def product(n: Any, o: Any, p: Any, v: Any) -> Any:
        block, lane = slot(o, ic, ii)
        return te.sum(read(n, block, p, lane) * weight[o, ic, 0, 0, ii, v].astype("float32"), axis=[ic, ii])

    total = te.compute((n_, o_, pixels, v_), product, name="sum")
    finish = conv.epilogue.behind(post)
    result = te.compute(
        (n_, o_, pixels, v_),
        lambda n, o, p, v: finish(total[n, o, p, v], (n, o, p // ow_, p % ow_, v)),
        name="result",
    )
    geometry = {
        "n": n_, "o": o_, "h": 1, "w": pixels, "v": v_, "ic": conv.in_units, "kh": 1, "kw": 1, "ii": conv.unit,
        "stride": sw, "staged": int(staged),
        "others": len(conv.epilogue.inputs), "indirect": int(bool(conv.table)), **_weight_bytes(conv),
    }  # fmt: skip
    function = function_of([data, weight, *tables, *pre, *post, result], "conv", geometry)
    # The graph's tensors have height and width: the flat pixel axis is a matter of this computation alone.
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    schedule.transform_layout(
        schedule.get_sblock("result"), ("write", 0), lambda n, o, p, v: (n, o, p // ow_, p % ow_, v)
    )
    return schedule.mod["main"]


def winograd_tiles(conv: Convolution) -> tuple[int, ...]:
    """Output tiles that Winograd's algorithm may be tried with: none where it does not apply or cannot win."""
    window = conv.window
    square = window.kernel[0] == window.kernel[1] and window.kernel[0] in (3, 5)
    plain = window.strides == (1, 1) and window.dilation == (1, 1)
    if not square or not plain or conv.groups > 1 or conv.table or conv.plain_channels or conv.unit != conv.block:
        return ()
    if conv.weight_dtype != "float32":
        return ()  # transformed they are as many bytes again, and rounded once more
    _, _, oh, ow, _ = conv.result_shape
    tiles = (2, 4, 6) if window.kernel[0] == 3 else (2, 4)

    def is_addressable(m: int) -> bool:
        count = conv.batch * _rounded(oh, m) * _rounded(ow, m) // m**2
        slots = max(conv.in_units * conv.unit, conv.out_blocks * conv.block)
        return (m + window.kernel[0] - 1) ** 2 * slots * count < 2**31

    # A tile that is mostly outside of the picture multiplies zeros.
    return tuple(m for m in tiles if _rounded(oh, m) * _rounded(ow, m) < 1.8 * oh * ow and is_addressable(m))


def _rounded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def winograd_function(conv: Convolution, outputs: int) -> tvm.tirx.PrimFunc:
    """F(outputs², kernel²): tiles of data are transformed, multiplied channel by channel, and transformed back.

    Its weights are transformed too (`pack_weights`): [tile, tile, out_blocks, in_units, unit, block].
    """
    taps = conv.window.kernel[0]
    tile = outputs + taps - 1
    (top, left, _, _) = conv.window.padding
    n_, o_, oh_, ow_, v_ = conv.result_shape
    rows, columns = -(-oh_ // outputs), -(-ow_ // outputs)
    tiles = n_ * rows * columns
    back, _, forth = winograd.matrices(outputs, taps)
    shape = (tile, tile, o_, conv.in_units, conv.unit, v_)
    data, weight, _, pre, post = _parameters(conv, shape)
    load = _loader(conv, data, pre)

    def pad(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        tests = _inside(h, rows * outputs + taps - 1, top, conv.height)
        tests += _inside(w, columns * outputs + taps - 1, left, conv.width)
        value = load(n, c, h - top, w - left, i)
        return te.if_then_else(te.all(*tests), value, tirx.const(0, "float32")) if tests else value

    stage = te.compute(
        (n_, conv.in_blocks, rows * outputs + taps - 1, columns * outputs + taps - 1, conv.block), pad, name="stage"
    )

    def row_of(p: Any) -> Any:
        return (p // columns) % rows

    half = te.compute(
        (conv.in_units, tiles, tile, tile, conv.unit),
        lambda c, p, a, j, i: winograd.combine(
            forth, a,
            lambda k: stage[p // (rows * columns), c, row_of(p) * outputs + k, (p % columns) * outputs + j, i],
        ),
        name="data_rows",
    )  # fmt: skip
    transformed = te.compute(
        (tile, tile, conv.in_units, tiles, conv.unit),
        lambda a, b, c, p, i: winograd.combine(forth, b, lambda k: half[c, p, a, k, i]),
        name="data_tiles",
    )
    ic, ii = te.reduce_axis((0, conv.in_units), "ic"), te.reduce_axis((0, conv.unit), "ii")
    total = te.compute(
        (tile, tile, o_, tiles, v_),
        lambda a, b, o, p, v: te.sum(transformed[a, b, ic, p, ii] * weight[a, b, o, ic, ii, v], axis=[ic, ii]),
        name="sum",
    )
    products = te.compute((tile, tile, o_, tiles, v_), lambda *index: total[index], name="products")
    rows_back = te.compute(
        (o_, tiles, outputs, tile, v_),
        lambda o, p, i, b, v: winograd.combine(back, i, lambda k: products[k, b, o, p, v]),
        name="result_rows",
    )
    pixels = te.compute(
        (o_, tiles, outputs, outputs, v_),
        lambda o, p, i, j, v: winograd.combine(back, j, lambda k: rows_back[o, p, i, k, v]),
        name="result_tiles",
    )
    finish = conv.epilogue.behind(post)

    def pixel(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        place = (n * rows + h // outputs) * columns + w // outputs
        return finish(pixels[o, place, h % outputs, w % outputs, v], (n, o, h, w, v))

    result = te.compute((n_, o_, oh_, ow_, v_), pixel, name="result")
    geometry = {
        "n": n_, "o": o_, "h": oh_, "w": ow_, "v": v_, "ic": conv.in_units, "ii": conv.unit, "outputs": outputs,
        "tile": tile, "rows": rows, "columns": columns, "others": len(conv.epilogue.inputs),
    }  # fmt: skip
    return function_of([data, weight, *pre, *post, result], "winograd", geometry)


def _parameters(conv: Convolution, weight_shape: Sequence[int]) -> tuple[Any, Any, list[Any], list[Any], list[Any]]:
    data = te.placeholder(conv.data_shape, conv.data_dtype, name="data")
    weight = te.placeholder(tuple(weight_shape), conv.weight_dtype, name="weight")
    tables = [te.placeholder((conv.out_blocks, conv.table), "int32", name="table")] if conv.table else []
    pre = conv.prologue.placeholders("pre")
    post = conv.epilogue.placeholders("post")
    return data, weight, tables, pre, post


def _weight_bytes(computation: Convolution | Dense) -> dict[str, int]:
    """What templates are told of weights that are not float32."""
    return {"weight_bytes": 2} if computation.weight_dtype == "float16" else {}


def _loader(conv: Convolution, data: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """One element of the data after the prologue, by batch, block, height, width and lane."""
    if conv.plain_channels:
        return lambda n, c, h, w, i: data[n, i, h, w]

    def load(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        index = (n, c, h, w, i)
        return conv.prologue.program.evaluate(data[index], [at(tensor, index) for tensor in inputs])

    return load


def _slots(conv: Convolution, tables: Sequence[Any]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Which block and lane of the data the sum reads, for a block of output and a place in the sum."""
    block = conv.block
    if conv.table:
        return lambda o, ic, ii: (tables[0][o, ii] // block, tables[0][o, ii] % block)
    if conv.plain_channels:
        return lambda o, ic, ii: (0, ii)
    if conv.groups > 1:
        per_group, out_per_group = conv.in_blocks // conv.groups, conv.out_blocks // conv.groups
        return lambda o, ic, ii: ((o // out_per_group) * per_group + ic, ii)
    if conv.unit == block or conv.in_slots < block:
        return lambda o, ic, ii: (ic, ii)
    return lambda o, ic, ii: ((ic * conv.unit + ii) // block, (ic * conv.unit + ii) % block)


@dataclass(frozen=True, slots=True)
class Pooling:
    """A window that is reduced within each slot: depthwise convolution, maximum, average.

    `kind` is "depthwise", "max" or "average"; `count_padding` says whether an average counts what is padded. Of uint8,
    without a prologue, the maximum is uint8 and sums are int32, of a depthwise convolution with int8 weights and the
    constants of `workers.graph.integer`; padding that counts is `zero` there.
    """

    kind: str
    batch: int
    blocks: int
    height: int
    width: int
    block: int
    window: Window
    count_padding: bool = False
    prologue: Fused = field(default_factory=Fused)
    epilogue: Fused = field(default_factory=Fused)
    data_dtype: str = "float32"  #: before the prologue
    zero: int = 0
    weight_dtype: str = "float32"  #: of a depthwise convolution of real numbers, or "float16"

    @property
    def read_dtype(self) -> str:
        """What the window is reduced over."""
        return self.prologue.program.dtype(self.data_dtype)

    @property
    def in_integers(self) -> bool:
        """Whether products of integers are summed."""
        return self.kind == "depthwise" and self.read_dtype == "uint8"

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.epilogue.program.dtype(self.read_dtype if self.kind == "max" else "float32")

    @property
    def data_shape(self) -> Shape5:
        return (self.batch, self.blocks, self.height, self.width, self.block)

    @property
    def result_shape(self) -> Shape5:
        return (self.batch, self.blocks, *self.window.extent(self.height, self.width), self.block)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.blocks, *self.window.kernel, self.block)

    @property
    def flops(self) -> float:
        n, c, h, w, v = self.result_shape
        return 2.0 * n * c * h * w * v * self.window.kernel[0] * self.window.kernel[1]


@dataclass(frozen=True, slots=True)
class Dense:
    """Rows of plain data [rows, length] times weights, to plain rows [rows, outputs].

    The other inputs of its epilogue are vectors [1, blocks, 1, 1, block], or as many plain rows.
    """

    rows: int
    length: int
    outputs: int
    block: int
    epilogue: Fused = field(default_factory=Fused)
    weight_dtype: str = "float32"  #: or "float16"

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.epilogue.program.dtype("float32")

    @property
    def unit(self) -> int:
        """Places of a row that are summed by the innermost loop."""
        return next(unit for unit in (16, 8, 4, 2, 1) if self.length % unit == 0)

    @property
    def blocks(self) -> int:
        return -(-self.outputs // self.block)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.blocks, self.length // self.unit, 1, 1, self.unit, self.block)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (self.rows, self.outputs)

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.length * self.blocks * self.block


def dense(computation: Dense) -> tvm.tirx.PrimFunc:
    """The function of a `Dense`: rows are its pixels, and places in a row its channels."""
    rows, blocks, block, unit = computation.rows, computation.blocks, computation.block, computation.unit
    units, outputs = computation.length // unit, computation.outputs
    data = te.placeholder((rows, computation.length), name="data")
    weight = te.placeholder(computation.weight_shape, computation.weight_dtype, name="weight")
    post = computation.epilogue.placeholders("post")
    # Rows of a power of two fall into the same sets of a cache: packed, a tile's numbers lie side by side.
    stage = te.compute((1, units, rows, unit), lambda n, c, p, i: data[p, c * unit + i], name="stage")
    ic, ii = te.reduce_axis((0, units), "ic"), te.reduce_axis((0, unit), "ii")
    total = te.compute(
        (1, blocks, rows, block),
        lambda n, o, p, v: te.sum(stage[n, ic, p, ii] * weight[o, ic, 0, 0, ii, v].astype("float32"), axis=[ic, ii]),
        name="sum",
    )

    whole = outputs % block == 0

    def finish(o: Any, p: Any, v: Any) -> Any:
        place = o * block + v if whole else tirx.min(o * block + v, outputs - 1)
        inputs = [tensor[p, place] if len(tensor.shape) == 2 else tensor[0, o, 0, 0, v] for tensor in post]
        return computation.epilogue.program.evaluate(total[0, o, p, v], inputs)

    geometry = {
        "n": 1, "o": blocks, "h": 1, "w": rows, "v": block, "ic": units, "kh": 1, "kw": 1, "ii": unit, "stride": 1,
        "staged": 1, "others": len(post), "indirect": 0,
        "tail": int(not whole), **_weight_bytes(computation),
    }  # fmt: skip
    if whole:
        result = te.compute((1, blocks, rows, block), lambda n, o, p, v: finish(o, p, v), name="result")
        function = function_of([data, weight, *post, result], "conv", geometry)
        schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
        schedule.transform_layout(schedule.get_sblock("result"), ("write", 0), lambda n, o, p, v: (p, o * block + v))
        return schedule.mod["main"]
    # The last block is not whole: it is computed, and what of it there is, is copied.
    blocked = te.compute((1, blocks, rows, block), lambda n, o, p, v: finish(o, p, v), name="result")
    cut = te.compute((rows, outputs), lambda p, j: blocked[0, j // block, p, j % block], name="cut")
    return function_of([data, weight, *post, cut], "conv", geometry)


#: What padding is worth to each kind of window.
_PADDING_VALUE = {"depthwise": 0.0, "average": 0.0, "max": -3.4028234663852886e38}


def pooling(pool: Pooling) -> tvm.tirx.PrimFunc:
    """The function of a `Pooling`."""
    (top, left, _, _), (sh, sw) = pool.window.padding, pool.window.strides
    (dh, dw), (kh_, kw_) = pool.window.dilation, pool.window.kernel
    n_, c_, oh_, ow_, v_ = pool.result_shape
    integers = pool.read_dtype == "uint8"
    data = te.placeholder(pool.data_shape, pool.data_dtype, name="data")
    weight_dtype = "int8" if pool.in_integers else pool.weight_dtype
    weights = [te.placeholder(pool.weight_shape, weight_dtype, name="weight")] if pool.kind == "depthwise" else []
    constants = integer.constants(pool.blocks, pool.block) if pool.in_integers else ()
    pre = pool.prologue.placeholders("pre")
    post = pool.epilogue.placeholders("post")

    def load(*index: Any) -> Any:
        return pool.prologue.program.evaluate(data[index], [at(tensor, index) for tensor in pre])

    staged = bool(pool.prologue) or any(pool.window.padding)
    read: Callable[..., Any] = load
    if staged:
        reach_h, reach_w = (oh_ - 1) * sh + (kh_ - 1) * dh + 1, (ow_ - 1) * sw + (kw_ - 1) * dw + 1

        def pad(n: Any, c: Any, h: Any, w: Any, v: Any) -> Any:
            tests = _inside(h, reach_h, top, pool.height) + _inside(w, reach_w, left, pool.width)
            value = load(n, c, h - top, w - left, v)
            filler = tirx.const(_PADDING_VALUE[pool.kind], "float32")
            if integers:
                filler = tirx.const(pool.zero if pool.count_padding or pool.in_integers else 0, "uint8")
            return te.if_then_else(te.all(*tests), value, filler) if tests else value

        stage = te.compute((n_, c_, reach_h, reach_w, v_), pad, name="stage")
        read = lambda *index: stage[index]  # noqa: E731
    kh, kw = te.reduce_axis((0, kh_), "kh"), te.reduce_axis((0, kw_), "kw")

    def reduce(n: Any, c: Any, h: Any, w: Any, v: Any) -> Any:
        value = read(n, c, h * sh + kh * dh, w * sw + kw * dw, v)
        if pool.kind == "max":
            return te.max(value, axis=[kh, kw])
        if integers:
            value = value.astype("int32")
        if weights:
            weight = weights[0][c, kh, kw, v]
            value *= weight.astype("int32" if integers else "float32")
        return te.sum(value, axis=[kh, kw])

    total = te.compute((n_, c_, oh_, ow_, v_), reduce, name="sum")
    finish = pool.epilogue.behind(post)

    def scaled(index: Sequence[Any]) -> Any:
        value = total[tuple(index)]
        if constants:
            return integer.real(value, constants, index)
        if pool.kind != "average":
            return value
        value = value.astype("float32")
        whole = tirx.const(1.0 / (kh_ * kw_), "float32")
        if pool.count_padding or not any(pool.window.padding):
            return value * whole
        rows = _covered(index[2], sh, top, kh_, dh, pool.height)
        columns = _covered(index[3], sw, left, kw_, dw, pool.width)
        return value / tirx.Cast("float32", rows * columns)

    result = te.compute((n_, c_, oh_, ow_, v_), lambda *index: finish(scaled(index), index), name="result")
    geometry = {
        "n": n_, "c": c_, "h": oh_, "w": ow_, "v": v_, "kh": kh_, "kw": kw_, "stride": sw, "staged": int(staged),
        "depthwise": int(pool.kind == "depthwise"), "others": len(pool.epilogue.inputs),
        **({"integers": 1} if pool.in_integers else {}),
    }  # fmt: skip
    return function_of([data, *weights, *constants, *pre, *post, result], "window", geometry)


def _inside(place: Any, reach: int, before: int, size: int) -> list[Any]:
    """What must hold for a place along a padded axis to hold data."""
    tests = []
    if before:
        tests.append(place >= before)
    if reach - before > size:
        tests.append(place < size + before)
    return tests


def _covered(place: Any, stride: int, before: int, kernel: int, dilation: int, size: int) -> Any:
    """How many elements of a window at `place` are not padding."""
    if dilation != 1:
        raise ValueError("an average over a dilated window with padding is not supported")
    start = place * stride - before
    return tirx.min(start + kernel, size) - tirx.max(start, 0)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A program over blocked data, each pixel of which may stand for `upsample` × `upsample` of the result."""

    batch: int
    blocks: int
    height: int  #: of the data
    width: int
    block: int
    upsample: tuple[int, int] = (1, 1)
    epilogue: Fused = field(default_factory=Fused)
    data_dtype: str = "float32"

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.epilogue.program.dtype(self.data_dtype)

    @property
    def data_shape(self) -> Shape5:
        return (self.batch, self.blocks, self.height, self.width, self.block)

    @property
    def result_shape(self) -> Shape5:
        rows, columns = self.upsample
        return (self.batch, self.blocks, self.height * rows, self.width * columns, self.block)

    @property
    def flops(self) -> float:
        return float(math.prod(self.result_shape) * len(self.epilogue.program.steps))


def pointwise(point: Pointwise) -> tvm.tirx.PrimFunc:
    """The function of a `Pointwise`."""
    data = te.placeholder(point.data_shape, point.data_dtype, name="data")
    post = point.epilogue.placeholders("post")
    rows, columns = point.upsample
    finish = point.epilogue.behind(post)
    result = te.compute(
        point.result_shape,
        lambda n, c, h, w, v: finish(data[n, c, h // rows, w // columns, v], (n, c, h, w, v)),
        name="result",
    )
    return function_of([data, *post, result], "copy", _copy_geometry(point.result_shape))


@dataclass(frozen=True, slots=True)
class Copy:
    """Data moved between layouts. `kind` says how:

    "block" plain NCHW → blocked, "plain" blocked → plain NCHW, "remap" blocked → blocked with other slots,
    "spread" depth to space: channel slots (c × rows + row) × columns + column → pixels, of which `size` are kept from
    `start` on; where `apart`, whole blocks of channels lie behind each other for each row and column, and vectors are
    copied whole. Where `table`, slots are looked up, else slot and channel are equal. "concat" puts the blocks of
    several tensors behind each other.
    """

    kind: str
    batch: int
    channels: int  #: of the plain tensor; of "spread", of the result
    height: int  #: of the data
    width: int
    block: int
    in_blocks: tuple[int, ...]
    out_blocks: int
    table: bool = False
    upsample: tuple[int, int] = (1, 1)
    apart: bool = False
    start: tuple[int, int] = (0, 0)
    size: tuple[int, int] | None = None  #: height and width of the result of "spread"; None for all that there is
    dtype: str = "float32"

    @property
    def result_shape(self) -> tuple[int, ...]:
        if self.kind == "plain":
            return (self.batch, self.channels, self.height, self.width)
        height, width = self.size or (self.height * self.upsample[0], self.width * self.upsample[1])
        return (self.batch, self.out_blocks, height, width, self.block)

    @property
    def data_shapes(self) -> tuple[tuple[int, ...], ...]:
        if self.kind == "block":
            return ((self.batch, self.channels, self.height, self.width),)
        return tuple((self.batch, blocks, self.height, self.width, self.block) for blocks in self.in_blocks)

    @property
    def table_shape(self) -> tuple[int, ...] | None:
        """The table's entries: for "block" and "remap" the channel or slot that each slot of the result takes, -1 for
        none; for "plain" the slot that each channel is in."""
        if not self.table:
            return None
        return (self.channels,) if self.kind == "plain" else (self.out_blocks * self.block,)

    @property
    def flops(self) -> float:
        return 0.0


def _not_negative(index: Any) -> Any:
    """The index, or 0 if it is less: what a `Select` reads where its condition does not hold. Both of its branches are
    read, but TVM simplifies each as if it were the one that is taken, and would leave `max` out."""
    return index & ~(index >> 31)


def copy(move: Copy) -> tvm.tirx.PrimFunc:
    """The function of a `Copy`; the table, where there is one, comes after the data."""
    sources = [te.placeholder(shape, move.dtype, name=f"data{k}") for k, shape in enumerate(move.data_shapes)]
    tables = [te.placeholder(move.table_shape, "int32", name="table")] if move.table_shape else []
    block, zero = move.block, tirx.const(0, move.dtype)
    source = sources[0]

    def element(*index: Any) -> Any:
        if move.kind == "plain":
            n, c, h, w = index
            slot = tables[0][c] if tables else c
            return source[n, slot // block, h, w, slot % block]
        n, o, h, w, v = index
        if move.kind == "concat":
            start, value = 0, None
            for tensor in sources:
                inside = tensor[n, o - start, h, w, v]
                value = inside if value is None else te.if_then_else(o >= start, inside, value)
                start += int(tensor.shape[1])
            return value
        slot = o * block + v
        if move.kind == "spread":
            rows, columns = move.upsample
            h, w = h + move.start[0], w + move.start[1]
            if move.apart:
                phase = h % rows * columns + w % columns
                return source[n, phase * move.out_blocks + o, h // rows, w // columns, v]
            slot = (slot * rows + h % rows) * columns + w % columns
            slot = tirx.min(slot, move.in_blocks[0] * block - 1)
            return source[n, slot // block, h // rows, w // columns, slot % block]
        limit = move.channels
        if tables:
            slot = tables[0][slot]
            read = _not_negative(slot)
            taken = source[n, read, h, w] if move.kind == "block" else source[n, read // block, h, w, read % block]
            return tirx.Select(slot >= 0, taken, zero)
        if move.out_blocks * block == limit:
            return source[n, slot, h, w]
        return tirx.Select(slot < limit, source[n, limit - 1 - _not_negative(limit - 1 - slot), h, w], zero)

    result = te.compute(move.result_shape, element, name="result")
    function = function_of([*sources, *tables, result], "copy", _copy_geometry(move.result_shape))
    function = function.with_attr(LAYOUT_ATTR, int(move.kind in ("block", "plain", "remap")))
    return function.with_attr(CONCAT_ATTR, 1) if move.kind == "concat" else function


def _copy_geometry(shape: Sequence[int]) -> dict[str, int]:
    return {"outer": math.prod(shape[:2]), "rows": math.prod(shape[2:-1]), "last": shape[-1], "axes": len(shape)}


@dataclass(frozen=True, slots=True)
class View:
    """A matrix for each item of a batch, as it lies in a plain tensor.

    With `heads` 0 the tensor is [batch, rows, columns]. Else it is [batch / heads × rows, heads × columns]: matrices of
    attention's heads lie beside each other in rows of all. `transposed` swaps rows and columns of every matrix.
    A row may hold matrices of others too, `beside` in all: these are then those from the one of number `first` on.
    """

    heads: int = 0
    transposed: bool = False
    first: int = 0
    beside: int = 0  #: 0: no others

    def shape(self, batch: int, rows: int, columns: int) -> tuple[int, ...]:
        """Of the tensor, for matrices rows × columns as they are read."""
        if self.transposed:
            rows, columns = columns, rows
        if not self.heads:
            return (batch, rows, columns)
        return (batch // self.heads * rows, (self.beside or self.heads) * columns)

    def index(self, rows: int, columns: int, b: Any, r: Any, c: Any) -> tuple[Any, ...]:
        """Where element (r, c) of matrix b is."""
        if self.transposed:
            rows, columns, r, c = columns, rows, c, r
        if not self.heads:
            return (b, r, c)
        return (b // self.heads * rows + r, (self.first + b % self.heads) * columns + c)

    def place(self, rows: int, columns: int, index: Sequence[Any], block: int) -> tuple[Any, ...]:
        """The reverse of `index` for what is not transposed: matrix, block of columns, row and column within it."""
        if not self.heads:
            b, r, c = index
        else:
            (row, column) = index
            b, r, c = row // rows * self.heads + column // columns, row % rows, column % columns
        return (b, c // block, r, c % block)


@dataclass(frozen=True, slots=True)
class BatchMatmul:
    """Products of pairs of matrices [rows, length] × [length, columns], neither of them constant."""

    batch: int
    rows: int
    length: int
    columns: int
    block: int
    left: View = field(default_factory=View)
    right: View = field(default_factory=View)
    result: View = field(default_factory=View)
    epilogue: Fused = field(default_factory=Fused)  #: without other inputs

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.epilogue.program.dtype("float32")

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.result.shape(self.batch, self.rows, self.columns)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.length * self.columns


def batch_matmul(product: BatchMatmul) -> tvm.tirx.PrimFunc:
    """The function of a `BatchMatmul`: the right matrices are packed as weights are, while it runs (block `pack`)."""
    batch, rows, length, columns, block = (
        product.batch, product.rows, product.length, product.columns, product.block,
    )  # fmt: skip
    unit = next(unit for unit in (16, 8, 4, 2, 1) if length % unit == 0)
    blocks, whole = -(-columns // block), columns % block == 0
    left = te.placeholder(product.left.shape(batch, rows, length), name="data")
    right = te.placeholder(product.right.shape(batch, length, columns), name="right")

    def packed(b: Any, o: Any, k: Any, v: Any) -> Any:
        # Behind the last column its numbers stand again: what they make is not copied out.
        column = o * block + v if whole else tirx.min(o * block + v, columns - 1)
        return right[product.right.index(length, columns, b, k, column)]

    pack = te.compute((batch, blocks, length, block), packed, name="pack")
    ic, ii = te.reduce_axis((0, length // unit), "ic"), te.reduce_axis((0, unit), "ii")

    def term(b: Any, o: Any, p: Any, v: Any) -> Any:
        k = ic * unit + ii
        return te.sum(left[product.left.index(rows, length, b, p, k)] * pack[b, o, k, v], axis=[ic, ii])

    total = te.compute((batch, blocks, rows, block), term, name="sum")
    result = te.compute(
        (batch, blocks, rows, block),
        lambda *index: product.epilogue.program.evaluate(total[index], []),
        name="result",
    )
    geometry = {
        "n": batch, "o": blocks, "h": 1, "w": rows, "v": block, "ic": length // unit, "kh": 1, "kw": 1, "ii": unit,
        "stride": 1, "staged": 0, "others": 0, "indirect": 0, "packed": 1,
        "tail": int(not whole), "rows_lie": int(whole and not product.right.transposed),
    }  # fmt: skip
    if not whole:
        cut = te.compute(
            product.result_shape, lambda *index: result[product.result.place(rows, columns, index, block)], name="cut"
        )
        return function_of([left, right, cut], "conv", geometry)
    function = function_of([left, right, result], "conv", geometry)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    schedule.transform_layout(
        schedule.get_sblock("result"),
        ("write", 0),
        lambda b, o, p, v: product.result.index(rows, columns, b, p, o * block + v),
    )
    return schedule.mod["main"]


Computation = Convolution | IntegerConvolution | IntegerDense | Dense | BatchMatmul | Pooling | Pointwise | Copy
