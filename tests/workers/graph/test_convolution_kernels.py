"""Random convolutions, taken apart into kernels: every template applies and equals ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.workers.conftest import Host
from tests.workers.graph.kernels import check, take
from tests.workers.graph.nets import Net
from tests.workers.graph.shapes import CHANNELS, CPU, SEEDS, SIZES, assume_result, examples, pads
from workers.graph.computations import Convolution
from workers.search.templates.knobs import Cpu


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
    assume_result((height, width), kernel, strides, dilation, padding)
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
