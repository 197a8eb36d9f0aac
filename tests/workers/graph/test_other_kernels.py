"""Random pooling, transposed convolutions, chains, dense layers and products: every template equals ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.workers.conftest import Host
from tests.workers.graph.kernels import check, take
from tests.workers.graph.nets import Net
from tests.workers.graph.shapes import CPU, SEEDS, SIZES, assume_result, examples, pads
from workers.graph.computations import BatchMatmul, Dense, Pooling
from workers.search.templates.knobs import Cpu


@examples(30)
@given(
    channels=st.sampled_from((2, 3, 5, 16, 17, 24, 34)), height=SIZES, width=SIZES,
    kernel=st.tuples(st.sampled_from((1, 3, 5, 7)), st.sampled_from((1, 2, 3, 5))),
    strides=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2, 3))),
    dilation=st.sampled_from((1, 1, 2)), batch=st.sampled_from((1, 2, 3)), cpu=CPU, seed=SEEDS, data=st.data(),
)  # fmt: skip
def test_depthwise(
    channels: int, height: int, width: int, kernel: tuple[int, int], strides: tuple[int, int], dilation: int,
    batch: int, cpu: Cpu, seed: int, data: st.DataObject, host: Host, folder: Path,
) -> None:  # fmt: skip
    """A window over each channel alone."""
    padding = data.draw(pads(kernel, (dilation, dilation)))
    assume_result((height, width), kernel, strides, (dilation, dilation), padding)
    net = Net(seed)
    y = net.conv(net.input(batch, channels, height, width), channels, channels, kernel, groups=channels, pads=padding,
                 strides=strides, dilations=[dilation] * 2)  # fmt: skip
    taken = take(net.model(net("Clip", y, net.number(0), net.number(6))), host, folder)
    assert [c.kind for c in taken.computations().values() if isinstance(c, Pooling)] == ["depthwise"]
    check(taken, host, cpu=cpu, count=2, seed=seed)


@examples(45)
@given(
    operator=st.sampled_from(("MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean")),
    channels=st.sampled_from((3, 5, 16, 17, 34)), height=SIZES, width=SIZES,
    kernel=st.tuples(st.sampled_from((1, 2, 3, 5)), st.sampled_from((2, 3, 4))),
    strides=st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((1, 2))), ceil=st.booleans(), count=st.booleans(),
    batch=st.sampled_from((1, 2)), cpu=CPU, seed=SEEDS, data=st.data(),
)  # fmt: skip
def test_pooling(
    operator: str, channels: int, height: int, width: int, kernel: tuple[int, int], strides: tuple[int, int],
    ceil: bool, count: bool, batch: int, cpu: Cpu, seed: int, data: st.DataObject, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Maximum and average, padding counted or not, sizes rounded up or down, whole pictures."""
    net = Net(seed)
    x = net.blocked(channels, height, width, batch)
    if operator in ("MaxPool", "AveragePool"):
        padding = data.draw(pads(kernel))
        assume_result((height, width), kernel, (1, 1), (1, 1), padding)
        more = {"count_include_pad": int(count)} if operator == "AveragePool" else {}
        # How ONNX Runtime and TVM divide an average that is cut off by rounding up differs, so TVM keeps those.
        y = net(operator, x, kernel_shape=kernel, strides=strides, pads=padding,
                ceil_mode=int(ceil and operator == "MaxPool"), **more)  # fmt: skip
    elif operator == "GlobalAveragePool":
        y = net(operator, x)
    else:
        y = net(operator, x, axes=[2, 3], keepdims=int(count))
    taken = take(net.model(net("Relu", y)), host, folder)
    assert any(isinstance(c, Pooling) for c in taken.computations().values())
    check(taken, host, cpu=cpu, count=2, seed=seed)


@examples(20)
@given(
    channels=st.sampled_from((1, 3, 8, 16, 17, 34)), out=st.sampled_from((1, 2, 5, 16, 17, 24)),
    height=st.sampled_from((1, 3, 7, 8)), width=st.sampled_from((1, 4, 5, 11)),
    kernel=st.tuples(st.sampled_from((1, 2, 3, 5)), st.sampled_from((2, 3, 4))),
    strides=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2, 3))) | st.none(),
    pads=st.tuples(*[st.sampled_from((0, 1))] * 4), more=st.tuples(*[st.sampled_from((0, 1))] * 2),
    batch=st.sampled_from((1, 2)),
    activation=st.sampled_from(("Relu", "Sigmoid", "LeakyRelu")), bias=st.booleans(), cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_transposed_convolutions(
    channels: int, out: int, height: int, width: int, kernel: tuple[int, int], strides: tuple[int, int] | None,
    pads: tuple[int, int, int, int], more: tuple[int, int], batch: int, activation: str, bias: bool, cpu: Cpu,
    seed: int, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Windows as large as their strides and others, pixels cut off and added at the edges; bias and activation."""
    strides = strides or kernel
    more = (min(more[0], strides[0] - 1), min(more[1], strides[1] - 1))
    for axis, (size, taps) in enumerate(zip((height, width), kernel, strict=True)):
        assume((size - 1) * strides[axis] + taps + more[axis] - pads[axis] - pads[axis + 2] > 0)
    net = Net(seed)
    x = net.input(batch, channels, height, width)
    y = net("ConvTranspose", x, net.weights(channels, out, *kernel), *([net.random(out)] if bias else []),
            strides=strides, pads=pads, output_padding=more)  # fmt: skip
    # What only pads rows that are cut off again is left to TVM.
    usual = all(pads[axis] // strides[axis] <= (kernel[axis] - 1) // strides[axis] for axis in (0, 1))
    assume(usual)
    check(take(net.model(net(activation, y)), host, folder), host, cpu=cpu, count=2, seed=seed)


UNARY = st.sampled_from(("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish", "HardSigmoid", "Swish", "Gelu", "Clip",
                         "Abs", "Neg", "Exp", "Sqrt", "Erf"))  # fmt: skip
BINARY = st.tuples(
    st.sampled_from(("Add", "Sub", "Mul", "Div")),
    st.sampled_from(("number", "channels", "itself", "start", "squeezed", "other")),
    st.booleans(),
)
STEPS = st.lists(UNARY | BINARY, min_size=1, max_size=6)


def apply(net: Net, step: str | tuple[str, str, bool], x: str, start: str, channels: int) -> str:
    """One elementwise operator, or one that is several in ONNX."""
    if isinstance(step, str):
        if step == "Swish":
            return net("Mul", x, net("Sigmoid", x))
        if step == "Gelu":
            erf = net("Erf", net("Div", x, net.number(2**0.5)))
            return net("Mul", net("Mul", x, net("Add", erf, net.number(1))), net.number(0.5))
        if step == "Clip":
            return net("Clip", x, net.number(-1), net.number(1.5))
        if step == "Exp":
            return net("Exp", net("Clip", x, net.number(-3), net.number(3)))
        if step == "Sqrt":
            return net("Sqrt", net("Abs", x))
        return net(step, x, **({"alpha": 0.1} if step == "LeakyRelu" else {}))
    operator, kind, left = step
    if kind == "number":
        other = net.number(1.5)
    elif kind == "channels":
        other = net.random(1, channels, 1, 1, low=0.5, high=1.5)
    elif kind == "itself":
        other = x
    elif kind == "start":
        other = start
    elif kind == "squeezed":
        other = net("Sigmoid", net("GlobalAveragePool", start))
    else:
        other = net("Tanh", net.conv(start, channels, channels, (1, 1), groups=channels))
    if operator == "Div":  # by nothing near to zero
        if left:
            x, other = other, x
        return net("Div", x, net("Add", net("Abs", other), net.number(0.5)))
    return net(operator, other, x) if left else net(operator, x, other)


@examples(45)
@given(
    channels=st.sampled_from((1, 3, 16, 17, 20, 34)), size=st.sampled_from(((1, 1), (3, 5), (4, 4))),
    batch=st.sampled_from((1, 2)), steps=STEPS, end=st.sampled_from(("conv", "pool", "both", "nothing")),
    cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_chains(
    channels: int, size: tuple[int, int], batch: int, steps: list[str | tuple[str, str, bool]], end: str, cpu: Cpu,
    seed: int, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Elementwise operators behind a convolution and in front of another: activations, constants and channels on either
    side, values used twice, tensors of one pixel spread over all, divisions whose empty lanes are 0 / 0."""
    net = Net(seed)
    x = start = net.blocked(channels, *size, batch)
    for step in steps:
        x = apply(net, step, x, start, channels)
    ends = []
    if end in ("conv", "both"):
        ends.append(net.conv(x, channels, 5))
    if end in ("pool", "both"):
        ends.append(net("GlobalAveragePool", x))
    check(take(net.model(*ends or [x]), host, folder), host, cpu=cpu, count=2, seed=seed)


@examples(30)
@given(
    leading=st.sampled_from(((1,), (5,), (2, 3), (1, 7, 2), (3, 1))), length=st.sampled_from((1, 3, 16, 24, 37, 64)),
    outputs=st.sampled_from((1, 5, 16, 17, 48)), bias=st.booleans(), again=st.booleans(),
    activation=st.sampled_from(("Relu", "Tanh", "Identity")), cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_dense_layers(
    leading: tuple[int, ...], length: int, outputs: int, bias: bool, again: bool, activation: str, cpu: Cpu, seed: int,
    host: Host, folder: Path,
) -> None:  # fmt: skip
    """Rows of any length times constant weights, bias, activation and as many rows behind it, one after the other."""
    net = Net(seed)
    x = net.input(*leading, length)
    y = net("MatMul", x, net.weights(length, outputs))
    if bias:
        y = net("Add", net.random(outputs), y)
    y = net(activation, y)
    if again:
        y = net("Add", net("MatMul", y, net.weights(outputs, outputs)), y)
    taken = take(net.model(y), host, folder)
    assert any(isinstance(c, Dense) for c in taken.computations().values())
    check(taken, host, cpu=cpu, count=2, seed=seed)


@examples(20)
@given(
    batch=st.sampled_from((1, 2)), rows=st.sampled_from((1, 3, 8, 16, 19)), heads=st.sampled_from((1, 1, 2, 3)),
    size=st.sampled_from((16, 32, 5, 12, 20)), projected=st.booleans(), cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_attention(
    batch: int, rows: int, heads: int, size: int, projected: bool, cpu: Cpu, seed: int, host: Host, folder: Path
) -> None:
    """Products of heads that are cut from rows and laid beside each other again, a single head among them."""
    net, width = Net(seed), heads * size
    x = net.input(batch, rows, width)
    apart, together = (net.constant(np.array(s)) for s in ((batch, rows, heads, size), (batch, rows, width)))

    def head(perm: tuple[int, ...]) -> str:
        of = net("MatMul", x, net.weights(width, width)) if projected else x
        return net("Transpose", net("Reshape", of, apart), perm=perm)

    scores = net("Mul", net("MatMul", head((0, 2, 1, 3)), head((0, 2, 3, 1))), net.number(size**-0.5))
    mixed = net("MatMul", net("Softmax", scores, axis=-1), head((0, 2, 1, 3)))
    y = net("Reshape", net("Transpose", mixed, perm=[0, 2, 1, 3]), together)
    taken = take(net.model(net("MatMul", y, net.weights(width, 7))), host, folder)
    products = [c for c in taken.computations().values() if isinstance(c, BatchMatmul)]
    assert len(products) == (size > 5) + (rows > 3)  # of the others most of a vector would be thrown away
    check(taken, host, cpu=cpu, count=2, seed=seed)
