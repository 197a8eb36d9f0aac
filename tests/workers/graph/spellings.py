"""One layer of a transformer, each of its parts as different exporters spell it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from onnx import ModelProto

from tests.workers.graph.nets import Net

TOKENS: Final = 16
HEADS: Final = 4
SIZE: Final = 16  #: of a head
WIDTH: Final = HEADS * SIZE
INNER: Final = 2 * WIDTH

#: Of the net and a value.
Part = Callable[[Net, str], str]


def _integers(net: Net, *values: int) -> str:
    return net.constant(np.array(values))


# Normalisation of rows, with weights and a shift


def norm_operator(net: Net, x: str) -> str:
    return net("LayerNormalization", x, net.random(WIDTH, low=0.5, high=1.5), net.random(WIDTH), epsilon=1e-5)


def _scaled(net: Net, x: str) -> str:
    return net("Add", net("Mul", x, net.random(WIDTH, low=0.5, high=1.5)), net.random(WIDTH))


def _mean(net: Net, x: str, axis: int) -> str:
    """Operator set 18 made an input of the axes."""
    if net.opset < 18:
        return net("ReduceMean", x, axes=[axis])
    return net("ReduceMean", x, _integers(net, axis))


def norm_by_power(net: Net, x: str) -> str:
    """As torch's older exporter spells it."""
    centred = net("Sub", x, _mean(net, x, -1))
    variance = _mean(net, net("Pow", centred, net.number(2)), -1)
    return _scaled(net, net("Div", centred, net("Sqrt", net("Add", variance, net.number(1e-5)))))


def norm_by_product(net: Net, x: str) -> str:
    """Centred twice, squared by multiplication, by a reciprocal: as tf2onnx spells it."""
    centred = net("Sub", x, _mean(net, x, 2))
    again = net("Sub", x, _mean(net, x, 2))
    variance = _mean(net, net("Mul", again, again), 2)
    inverse = net("Reciprocal", net("Sqrt", net("Add", net.number(1e-5), variance)))
    return _scaled(net, net("Mul", centred, inverse))


def norm_factored(net: Net, x: str) -> str:
    """x·(g/σ) + (b − μ·(g/σ)), as TensorFlow computes it."""
    mean = _mean(net, x, -1)
    centred = net("Sub", x, mean)
    variance = _mean(net, net("Mul", centred, centred), -1)
    inverse = net("Reciprocal", net("Sqrt", net("Add", variance, net.number(1e-5))))
    factor = net("Mul", inverse, net.random(WIDTH, low=0.5, high=1.5))
    shift = net("Sub", net.random(WIDTH), net("Mul", mean, factor))
    return net("Add", net("Mul", x, factor), shift)


NORMS: Final[Mapping[str, Part]] = {
    "operator": norm_operator, "power": norm_by_power, "product": norm_by_product, "factored": norm_factored,
}  # fmt: skip


# GELU


def gelu_operator(net: Net, x: str) -> str:
    return net("Gelu", x)


def gelu_by_erf(net: Net, x: str) -> str:
    erf = net("Erf", net("Div", x, net.number(2**0.5)))
    return net("Mul", net("Mul", x, net("Add", erf, net.number(1))), net.number(0.5))


def gelu_halved_first(net: Net, x: str) -> str:
    erf = net("Erf", net("Mul", x, net.number(0.5**0.5)))
    return net("Mul", net("Mul", net.number(0.5), x), net("Add", net.number(1), erf))


def gelu_tanh_operator(net: Net, x: str) -> str:
    return net("Gelu", x, approximate="tanh")


def gelu_by_tanh(net: Net, x: str) -> str:
    cubed = net("Mul", net("Pow", x, net.number(3)), net.number(0.044715))
    tanh = net("Tanh", net("Mul", net("Add", x, cubed), net.number((2 / np.pi) ** 0.5)))
    return net("Mul", net("Mul", x, net.number(0.5)), net("Add", tanh, net.number(1)))


def gelu_by_sigmoid(net: Net, x: str) -> str:
    return net("Mul", x, net("Sigmoid", net("Mul", x, net.number(1.702))))


GELUS: Final[Mapping[str, Part]] = {
    "operator": gelu_operator, "erf": gelu_by_erf, "halved first": gelu_halved_first,
    "tanh operator": gelu_tanh_operator, "tanh": gelu_by_tanh, "sigmoid": gelu_by_sigmoid,
}  # fmt: skip


# Attention, with projections of queries, keys and values


def _projected(net: Net, x: str, scale: float = 1.0) -> str:
    y = net("Add", net("MatMul", x, net.weights(WIDTH, WIDTH)), net.random(WIDTH))
    return y if scale == 1.0 else net("Mul", y, net.number(scale))


def _heads(net: Net, x: str, *perm: int) -> str:
    return net("Transpose", net("Reshape", x, _integers(net, 1, TOKENS, HEADS, SIZE)), perm=list(perm))


def _joined(net: Net, x: str) -> str:
    return net("Reshape", net("Transpose", x, perm=[0, 2, 1, 3]), _integers(net, 1, TOKENS, WIDTH))


def _mask(net: Net) -> str:
    """Nobody looks at what comes later."""
    return net.constant(np.triu(np.full((1, 1, TOKENS, TOKENS), -1e9, "float32"), 1))


def attention_scores_divided(net: Net, x: str) -> str:
    """Keys transposed at once, the products divided, then masked."""
    q, k, v = _heads(net, _projected(net, x), 0, 2, 1, 3), _heads(net, _projected(net, x), 0, 2, 3, 1), None
    v = _heads(net, _projected(net, x), 0, 2, 1, 3)
    scores = net("Add", net("Div", net("MatMul", q, k), net.number(SIZE**0.5)), _mask(net))
    return _joined(net, net("MatMul", net("Softmax", scores, axis=-1), v))


def attention_queries_scaled(net: Net, x: str) -> str:
    """Queries scaled before their heads are cut, keys transposed twice."""
    q = _heads(net, _projected(net, x, SIZE**-0.5), 0, 2, 1, 3)
    k = net("Transpose", _heads(net, _projected(net, x), 0, 2, 1, 3), perm=[0, 1, 3, 2])
    v = _heads(net, _projected(net, x), 0, 2, 1, 3)
    scores = net("Add", net("MatMul", q, k), _mask(net))
    return _joined(net, net("MatMul", net("Softmax", scores, axis=-1), v))


def attention_both_scaled(net: Net, x: str) -> str:
    """Queries and keys by the root of the scale each, after their heads are cut: torch's attention."""
    q = _heads(net, _projected(net, x), 0, 2, 1, 3)
    k = net("Transpose", _heads(net, _projected(net, x), 0, 2, 1, 3), perm=[0, 1, 3, 2])
    v = _heads(net, _projected(net, x), 0, 2, 1, 3)
    root = net.number(SIZE**-0.25)
    scores = net("Add", net("MatMul", net("Mul", q, root), net("Mul", k, root)), _mask(net))
    return _joined(net, net("MatMul", net("Softmax", scores, axis=-1), v))


def attention_one_projection(net: Net, x: str) -> str:
    """One product for all three, split: as GPT-2 has it."""
    y = net("Add", net("MatMul", x, net.weights(WIDTH, 3 * WIDTH)), net.random(3 * WIDTH))
    y = net("Split", y, _integers(net, WIDTH, WIDTH, WIDTH), outputs=3, axis=-1)
    q, k, v = _heads(net, y, 0, 2, 1, 3), _heads(net, f"{y}_1", 0, 2, 3, 1), _heads(net, f"{y}_2", 0, 2, 1, 3)
    scores = net("Add", net("Mul", net("MatMul", q, k), net.number(SIZE**-0.5)), _mask(net))
    return _joined(net, net("MatMul", net("Softmax", scores, axis=-1), v))


def attention_operator(net: Net, x: str) -> str:
    """The standard's own, of four dimensions."""
    q, k, v = (_heads(net, _projected(net, x), 0, 2, 1, 3) for _ in range(3))
    return _joined(net, net("Attention", q, k, v, _mask(net)))


def attention_operator_of_rows(net: Net, x: str) -> str:
    """The standard's own, which cuts the heads itself."""
    q, k, v = (_projected(net, x) for _ in range(3))
    return net("Attention", q, k, v, _mask(net), q_num_heads=HEADS, kv_num_heads=HEADS)


ATTENTIONS: Final[Mapping[str, Part]] = {
    "divided": attention_scores_divided, "queries scaled": attention_queries_scaled,
    "both scaled": attention_both_scaled, "one projection": attention_one_projection,
    "operator": attention_operator, "operator of rows": attention_operator_of_rows,
}  # fmt: skip


def layer(attention: Part = attention_scores_divided, norm: Part = norm_operator, gelu: Part = gelu_by_erf,
          *, opset: int = 0) -> ModelProto:  # fmt: skip
    """An encoder's layer: attention, a sum and its normalisation; two dense layers, a sum and its normalisation."""
    newest = attention in (attention_operator, attention_operator_of_rows)
    net = Net(opset=opset or (23 if newest else 20 if gelu in (gelu_operator, gelu_tanh_operator) else 17))
    x = net.input(1, TOKENS, WIDTH)
    y = net("Add", net("MatMul", attention(net, x), net.weights(WIDTH, WIDTH)), net.random(WIDTH))
    x = norm(net, net("Add", y, x))
    y = gelu(net, net("Add", net("MatMul", x, net.weights(WIDTH, INNER)), net.random(INNER)))
    y = net("Add", net("MatMul", y, net.weights(INNER, WIDTH)), net.random(WIDTH))
    return net.model(norm(net, net("Add", y, x)))
