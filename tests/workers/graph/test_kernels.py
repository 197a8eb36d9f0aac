"""Random operators, each taken apart into kernels: every template applies and equals ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.workers.conftest import Host
from tests.workers.graph.kernels import CPUS, check, take
from tests.workers.graph.nets import Net
from workers.graph.computations import Convolution, Pooling
from workers.search.templates.knobs import Cpu

CHANNELS = st.sampled_from((1, 2, 3, 5, 8, 16, 17, 24, 32, 34, 48, 60))
SIZES = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 11, 13, 14, 17, 19, 28))
CPU = st.sampled_from(CPUS)
SEEDS = st.integers(0, 1 << 16)


def examples(count: int) -> settings:
    """The same examples each time, and not made smaller where one fails: each is small, and takes a second."""
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip


@st.composite
def pads(draw: st.DrawFn, kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1)) -> list[int]:
    """None, what keeps the size, or something asymmetric, always less than the window."""
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    kind = draw(st.sampled_from(("none", "same", "any")))
    if kind == "none":
        return [0, 0, 0, 0]
    if kind == "same":
        return [reach[0] // 2, reach[1] // 2, reach[0] - reach[0] // 2, reach[1] - reach[1] // 2]
    return [draw(st.integers(0, reach[axis])) for axis in (0, 1, 0, 1)]


def result_size(size: int, kernel: int, stride: int, dilation: int, padding: int) -> int:
    return (size + padding - (kernel - 1) * dilation - 1) // stride + 1


@examples(110)
@given(
    batch=st.sampled_from((1, 1, 1, 2, 3)), channels=CHANNELS, out=CHANNELS, height=SIZES, width=SIZES,
    kernel=st.tuples(st.sampled_from((1, 1, 2, 3, 4, 5, 7)), st.sampled_from((1, 1, 2, 3, 5, 6))),
    strides=st.tuples(st.sampled_from((1, 1, 2, 3)), st.sampled_from((1, 1, 2))),
    dilation=st.tuples(st.sampled_from((1, 1, 2)), st.sampled_from((1, 1, 3))),
    relu=st.booleans(), cpu=CPU, seed=SEEDS, data=st.data(),
)  # fmt: skip
def test_convolutions(
    batch: int, channels: int, out: int, height: int, width: int, kernel: tuple[int, int], strides: tuple[int, int],
    dilation: tuple[int, int], relu: bool, cpu: Cpu, seed: int, data: st.DataObject, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Odd channels, prime and tiny maps, windows of all kinds, asymmetric padding, strides, dilation, small batches."""
    padding = data.draw(pads(kernel, dilation))
    for axis, size in enumerate((height, width)):
        reach = padding[axis] + padding[axis + 2]
        assume(result_size(size, kernel[axis], strides[axis], dilation[axis], reach) > 0)
    assume(batch * channels * out * height * width * kernel[0] * kernel[1] < 20_000_000)
    net = Net(seed)
    y = net.conv(net.input(batch, channels, height, width), channels, out, kernel, pads=padding, strides=strides,
                 dilations=dilation)  # fmt: skip
    taken = take(net.model(net("Relu", y) if relu else y), host, folder)
    assert any(isinstance(c, Convolution) for c in taken.computations().values())
    check(taken, host, cpu=cpu, count=2, seed=seed)


@examples(10)
@given(
    channels=st.sampled_from((16, 32)), out=st.sampled_from((16, 24, 40)), kernel=st.sampled_from((3, 3, 5)),
    height=st.sampled_from((4, 5, 7, 8, 12, 13)), width=st.sampled_from((4, 6, 7, 11, 12)),
    batch=st.sampled_from((1, 2)), padding=st.tuples(*[st.sampled_from((0, 1, 1, 2))] * 4),
    cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_winograd(
    channels: int, out: int, kernel: int, height: int, width: int, batch: int, padding: tuple[int, int, int, int],
    cpu: Cpu, seed: int, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Convolutions that Winograd's algorithm may compute, with tiles that reach over the edge of the picture."""
    assume(height + padding[0] + padding[2] >= kernel and width + padding[1] + padding[3] >= kernel)
    net = Net(seed)
    x = net.blocked(channels, height, width, batch)
    y = net("Relu", net.conv(x, channels, out, (kernel, kernel), pads=padding))
    check(take(net.model(y), host, folder), host, cpu=cpu, count=1, seed=seed)


@examples(40)
@given(
    groups=st.sampled_from((2, 3, 4, 5, 8)), per_group=st.sampled_from((1, 2, 3, 5, 16, 17, 32)),
    out_per_group=st.sampled_from((1, 2, 4, 5, 16, 17, 32)), size=st.sampled_from((1, 4, 7, 9)),
    kernel=st.sampled_from((1, 3)), stride=st.sampled_from((1, 2)), batch=st.sampled_from((1, 2)), cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_groups(
    groups: int, per_group: int, out_per_group: int, size: int, kernel: int, stride: int, batch: int, cpu: Cpu,
    seed: int, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Groups of whole blocks, groups that share a block, groups of one channel with several results each."""
    assume(groups * per_group * out_per_group < 4000)
    net = Net(seed)
    x = net.input(batch, groups * per_group, size, size)
    y = net.conv(x, groups * per_group, groups * out_per_group, (kernel, kernel), groups=groups,
                 pads=[kernel // 2] * 4, strides=[stride] * 2)  # fmt: skip
    check(take(net.model(net("Relu", y)), host, folder), host, cpu=cpu, count=2, seed=seed)


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
    for axis, size in enumerate((height, width)):
        reach = padding[axis] + padding[axis + 2]
        assume(result_size(size, kernel[axis], strides[axis], dilation, reach) > 0)
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
        assume(height + padding[0] + padding[2] >= kernel[0] and width + padding[1] + padding[3] >= kernel[1])
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
    kernel=st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((2, 3, 4))), batch=st.sampled_from((1, 2)),
    activation=st.sampled_from(("Relu", "Sigmoid", "LeakyRelu")), bias=st.booleans(), cpu=CPU, seed=SEEDS,
)  # fmt: skip
def test_transposed_convolutions(
    channels: int, out: int, height: int, width: int, kernel: tuple[int, int], batch: int, activation: str, bias: bool,
    cpu: Cpu, seed: int, host: Host, folder: Path,
) -> None:  # fmt: skip
    """Windows as large as their strides, bias and activation of each channel behind them."""
    net = Net(seed)
    x = net.input(batch, channels, height, width)
    y = net("ConvTranspose", x, net.weights(channels, out, *kernel), *([net.random(out)] if bias else []),
            strides=kernel)  # fmt: skip
    check(take(net.model(net(activation, y)), host, folder), host, cpu=cpu, count=2, seed=seed)
