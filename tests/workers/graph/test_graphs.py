"""What small graphs become: how many kernels, where layouts change, and that structures compute the right thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from tvm import relax, tirx

from tests.workers.conftest import Host, lower
from tests.workers.graph.kernels import BLOCK, check, plain, take
from tests.workers.graph.nets import Net
from tests.workers.models import make_model, matmuls, normal, port
from workers.graph import pipeline
from workers.graph.blocked import BlockedGraph
from workers.graph.computations import Computation, Convolution, Copy, Pointwise
from workers.graph.nodes import NotBlockable


def residual(net: Net, x: str, channels: int, out: int, stride: int = 1) -> str:
    """ResNet's basic block."""
    y = net("Relu", net.conv(x, channels, out, (3, 3), pads=[1] * 4, strides=[stride] * 2))
    y = net.conv(y, out, out, (3, 3), pads=[1] * 4)
    if stride > 1 or out != channels:
        x = net.conv(x, channels, out, strides=[stride] * 2)
    return net("Relu", net("Add", y, x))


def resnet(channels: int = 16) -> ModelProto:
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 16, 16), 3, channels, (3, 3), pads=[1] * 4))
    x = net("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    x = residual(net, residual(net, x, channels, channels), channels, 2 * channels, stride=2)
    return net.model(x)


def densenet(growth: int = 12) -> ModelProto:
    """Normalisation and ReLU in front of each convolution, whose result is appended to what it read."""
    net = Net()
    x, channels = net.conv(net.input(1, 3, 8, 8), 3, 20, (3, 3), pads=[1] * 4), 20
    for _ in range(2):
        y = net("Mul", x, net.random(1, channels, 1, 1, low=0.5, high=1.5))
        y = net("Relu", net("Add", y, net.random(1, channels, 1, 1)))
        x = net("Concat", x, net.conv(y, channels, growth, (3, 3), pads=[1] * 4), axis=1)
        channels += growth
    return net.model(x)


def shufflenet(channels: int = 24) -> ModelProto:
    """A shuffle of channels between a grouped convolution and a depthwise one."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, channels, 7, 7), channels, channels, groups=3))
    apart = net.constant(np.array([1, 3, channels // 3, 7, 7]))
    whole = net.constant(np.array([1, channels, 7, 7]))
    x = net("Reshape", net("Transpose", net("Reshape", x, apart), perm=[0, 2, 1, 3, 4]), whole)
    x = net.conv(x, channels, channels, (3, 3), groups=channels, pads=[1] * 4)
    return net.model(net.conv(x, channels, channels, groups=3))


def squeeze_and_excite(channels: int = 20) -> ModelProto:
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 9, 9), 3, channels, (3, 3), pads=[1] * 4))
    s = net("Relu", net.conv(net("GlobalAveragePool", x), channels, 5))
    s = net("HardSigmoid", net.conv(s, 5, channels), alpha=1 / 6, beta=0.5)
    return net.model(net.conv(net("Mul", x, s), channels, 17))


def classifier(channels: int = 40) -> ModelProto:
    """Convolution, mean over the picture, two dense layers."""
    net = Net()
    x = net("Relu", net.conv(net.input(2, 3, 6, 6), 3, channels, (3, 3)))
    x = net("Flatten", net("GlobalAveragePool", x))
    x = net("Relu", net("Gemm", x, net.weights(channels, 30), net.random(30)))
    return net.model(net("Add", net("MatMul", x, net.weights(30, 10)), net.random(10)))


def moves(computations: dict[str, Computation]) -> Counter[str]:
    return Counter(c.kind for c in computations.values() if isinstance(c, Copy))


def calls(module: object) -> list[str]:
    """The kernels that `main` calls and the operators that are left to TVM, in order."""
    found = []
    for block in module["main"].body.blocks:  # type: ignore[index]
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                name = binding.value.op.name
                found.append(binding.value.args[0].name_hint if name == "relax.call_tir" else name)
    return found


@pytest.mark.parametrize(
    ("make", "kernels", "copies"),
    [
        # 6 convolutions with ReLU and addition in them, one pooling. The first reads the picture as it is.
        (resnet, 8, {"plain": 1}),
        # Normalisation is inside of the convolutions. Each concatenation is one copy of blocks.
        (densenet, 6, {"concat": 2, "plain": 1}),
        # The shuffle is a matter of tables.
        (shufflenet, 5, {"block": 1, "plain": 1}),
        # Pooling, two convolutions of one pixel; the product is in front of the last convolution.
        (squeeze_and_excite, 6, {"plain": 1}),
        # Flatten is nothing; both dense layers are convolutions of one pixel.
        (classifier, 5, {"plain": 1}),
    ],
)
def test_layouts_change_at_the_borders_alone(
    make: Callable[[], ModelProto], kernels: int, copies: dict[str, int], host: Host, tmp_path: Path
) -> None:
    """A network of convolutions stays in blocked layout from its first convolution to its end."""
    module, computations = take(make(), host, tmp_path).graph.emit(plain)
    called = [name for name in calls(module) if name in computations]
    assert len(called) == kernels, called
    assert dict(moves({str(i): computations[name] for i, name in enumerate(called)})) == copies
    assert [name for name in calls(module) if name.startswith("relax.") and name != "relax.reshape"] == []


@pytest.mark.parametrize("make", [resnet, densenet, shufflenet, squeeze_and_excite, classifier])
def test_networks_compute_what_the_reference_does(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """The networks above, each kernel by its template's first guess and another choice."""
    check(take(make(), host, tmp_path), host, count=1)


def test_prologues_are_absorbed(host: Host, tmp_path: Path) -> None:
    """DenseNet's normalisation and ReLU are computed where the convolution reads, from the tensor without them."""
    computations = take(densenet(), host, tmp_path).computations()
    inner = [c for c in computations.values() if isinstance(c, Convolution) and not c.plain_channels]
    assert len(inner) == 2
    assert all([step.operator for step in c.prologue.program.steps] == ["multiply", "add", "relu"] for c in inner)
    assert not any(isinstance(c, Pointwise) for c in computations.values())


def diamond() -> ModelProto:
    """A value that is used twice, once as an output; two outputs, one of which is used inside."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 5, 5), 3, 18))
    y = net.conv(x, 18, 34, (3, 3), pads=[1] * 4)
    return net.model(net("Sub", net.number(1), net("Mul", x, x)), x, net("Relu", y), y)


def odd_concat() -> ModelProto:
    """Tensors of odd channels behind each other, the same one twice, and a convolution that reads them all."""
    net = Net()
    x = net.input(2, 3, 6, 6)
    a, b, c = net.conv(x, 3, 5), net("Relu", net.conv(x, 3, 17)), net.conv(x, 3, 1)
    joined = net("Concat", a, b, c, a, axis=1)
    return net.model(net.conv(net("Relu", joined), 28, 20, (3, 3)), joined)


def mixed_residual() -> ModelProto:
    """A sum of tensors whose channels lie in different slots: a concatenation of odd parts and a convolution."""
    net = Net()
    x = net.input(1, 3, 6, 6)
    joined = net("Concat", net.conv(x, 3, 5), net.conv(x, 3, 19), axis=1)
    grouped = net.conv(net("Relu", net.conv(x, 3, 24)), 24, 24, (3, 3), groups=4, pads=[1] * 4)
    inorder = net("Relu", net.conv(x, 3, 24))
    total = net("Add", net("Add", joined, grouped), inorder)
    return net.model(net.conv(total, 24, 9), net("Div", inorder, net("Exp", joined)))


def upsampled() -> ModelProto:
    """Nearest neighbours by 2 × 3, added to a larger map, as in a feature pyramid."""
    net = Net()
    small, large = net.blocked(21, 3, 4), net.blocked(21, 6, 12)
    bigger = net("Resize", small, "", net.constant(np.array([1, 1, 2, 3], "float32")),
                 mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    return net.model(net("Relu", net("Add", bigger, large)))


def constants_on_both_sides() -> ModelProto:
    """Constants of a number, of channels, left and right of every operator."""
    net = Net()
    x = net.conv(net.input(2, 3, 4, 5), 3, 19)
    x = net("Sub", net.random(1, 19, 1, 1), x)
    x = net("Div", x, net.random(19, 1, 1, low=1, high=2))
    x = net("Mul", net.number(3), net("Relu", x))
    x = net("Div", net.number(2), net("Add", net("Exp", x), net.random(1, 19, 1, 1, low=0.1)))
    x = net("Clip", x, net.number(0.1), net.number(0.75))
    return net.model(net.conv(net("Sub", net.number(1), x), 19, 7))


def prologues() -> ModelProto:
    """Normalisation and ReLU in front of a depthwise convolution, of groups that share blocks, of strides, of padding
    around one pixel: what is padded is 0, not what the prologue makes of 0."""
    net = Net()
    x = net.conv(net.input(2, 3, 7, 6), 3, 20)

    def before() -> str:
        y = net("Mul", x, net.random(20, 1, 1, low=0.5, high=1.5))
        return net("Relu", net("Add", y, net.random(1, 20, 1, 1, low=0.5, high=1)))

    return net.model(
        net.conv(before(), 20, 20, (3, 3), groups=20, pads=[1] * 4),
        net.conv(before(), 20, 10, (3, 3), groups=5, pads=[1, 0, 1, 2]),
        net.conv(before(), 20, 9, strides=[2, 3]),
        net.conv(before(), 20, 6, pads=[1, 2, 0, 1]),
        net("AveragePool", before(), kernel_shape=[3, 3], pads=[1] * 4),
    )


def shuffled() -> ModelProto:
    """Two shuffles after each other, added to what was not shuffled, read by groups and joined with other tensors."""
    net = Net()
    x = net.conv(net.input(1, 3, 5, 5), 3, 36)
    y = net("Relu", x)
    for groups in (3, 4):
        y = net("Reshape", y, net.constant(np.array([1, groups, 36 // groups, 5, 5])))
        y = net("Reshape", net("Transpose", y, perm=[0, 2, 1, 3, 4]), net.constant(np.array([1, 36, 5, 5])))
    z = net.conv(net("Relu", y), 36, 36, (3, 3), groups=6, pads=[1] * 4)
    joined = net("Concat", net("Add", z, y), net("Relu", z), axis=1)
    return net.model(net.conv(joined, 72, 4, groups=4), net("Add", x, y))


def long_chain() -> ModelProto:
    """More steps than one kernel takes."""
    net = Net()
    x = net.conv(net.input(1, 3, 4, 4), 3, 17)
    for number in range(40):
        x = net("Add", x, net.number(0.1)) if number % 2 else net("Tanh", x)
    return net.model(net.conv(x, 17, 3))


@pytest.mark.parametrize(
    "make", [prologues, shuffled, long_chain, diamond, odd_concat, mixed_residual, upsampled, constants_on_both_sides]
)
def test_structures(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """Several outputs, values used twice, odd parts joined, differently laid out tensors combined."""
    check(take(make(), host, tmp_path), host, count=2)


def quotient(net: Net, x: str) -> str:
    """0 / (0 + 0): the constant holds 0 too where there is no channel."""
    return net(
        "Div", net.conv(x, 3, 17), net("Add", net("Abs", net.conv(x, 3, 17)), net.random(1, 17, 1, 1, low=1, high=2))
    )


def quotient_of_a_pool(net: Net, x: str) -> str:
    y = net("MaxPool", net.conv(x, 3, 17), kernel_shape=[2, 2], pads=[0, 0, 1, 1])
    return net("Div", y, net.random(1, 17, 1, 1, low=1, high=2))


def reciprocal(net: Net, x: str) -> str:
    """1 / 0."""
    return net(
        "Div", net.number(1), net("Add", net("Abs", net.conv(x, 3, 17)), net.random(1, 17, 1, 1, low=0.5, high=1))
    )


def root(net: Net, x: str) -> str:
    """√(0 - 1)."""
    y = net("Add", net("Abs", net.conv(x, 3, 17)), net.random(1, 17, 1, 1, low=2, high=3))
    return net("Sqrt", net("Sub", y, net.number(1)))


def overflow(net: Net, x: str) -> str:
    """e^100."""
    return net(
        "Exp",
        net(
            "Add",
            net("Sub", net("Abs", net.conv(x, 3, 17)), net.random(1, 17, 1, 1, low=100, high=101)),
            net.number(100),
        ),
    )


def infinity(net: Net, x: str) -> str:
    """0 × ∞."""
    return net("Tanh", net("Mul", net("Abs", net.conv(x, 3, 17)), net.number(np.inf)))


@pytest.mark.parametrize("make", [quotient, quotient_of_a_pool, reciprocal, root, overflow, infinity])
def test_lanes_without_channels_stay_finite(make: Callable[[Net, str], str], host: Host, tmp_path: Path) -> None:
    """What is computed in a lane that holds no channel reaches no channel, though its weights are zero: 0 × NaN."""
    net = Net()
    y = make(net, net.input(1, 3, 5, 5))
    check(take(net.model(net.conv(y, 17, 8, (3, 3)), net.conv(y, 17, 8)), host, tmp_path), host, count=1)


def no_convolution() -> ModelProto:
    net = Net()
    return net.model(net("Softmax", net("Add", net.input(4, 8), net.input(4, 8)), axis=-1))


def doubles() -> ModelProto:
    return make_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [port("x", 4, 8, dtype=TensorProto.DOUBLE)],
        [port("y", 4, 3, dtype=TensorProto.DOUBLE)],
        {"w": normal(8, 3).astype("float64")},
    )


def integers() -> ModelProto:
    return make_model(
        [helper.make_node("Add", ["x", "x"], ["a"]), helper.make_node("Mul", ["a", "x"], ["y"])],
        [port("x", 4, 8, dtype=TensorProto.INT64)],
        [port("y", 4, 8, dtype=TensorProto.INT64)],
    )


def huge() -> ModelProto:
    """Four thousand million pixels: their numbers do not fit 32 bits."""
    net = Net()
    return net.model(net("Relu", net.conv(net.input(1, 3, 65536, 65536), 3, 8)))


@pytest.mark.parametrize("make", [no_convolution, doubles, integers, huge])
def test_what_is_not_ours_is_left_to_tvm(make: Callable[[], ModelProto], host: Host, tmp_path: Path) -> None:
    """Nothing to block, other types than float32, and tensors that 32-bit indices do not reach."""
    taken = take(make(), host, tmp_path)
    assert taken.graph.is_empty
    assert taken.computations() == {}


def test_shapes_that_are_not_known(host: Host, tmp_path: Path) -> None:
    """A module with a symbolic dimension is refused, by the reason."""
    _, imported = lower(matmuls(), host, tmp_path)
    builder = relax.BlockBuilder()
    rows = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 8), "float32"))
    with builder.function("main", [rows]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.relu(rows))
        builder.emit_func_output(out)
    with pytest.raises(NotBlockable, match="not known before the model runs"):
        BlockedGraph(builder.get(), BLOCK)
    with host.target, pipeline.pass_context():
        assert not BlockedGraph(pipeline.simplify()(imported.module), BLOCK).is_empty
