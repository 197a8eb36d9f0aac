"""LSTM, GRU and RNN, which TVM's importer lacks, written step by step: the number of steps is known when they are.

What does not depend on the step before, the product of the inputs and their weights, is one matrix product for all
steps. The steps of a direction are alike, so that one kernel is compiled for them all. ONNX Runtime's
DynamicQuantizeLSTM is an LSTM whose products are of integers: inputs are quantized by the range of all steps, the state
by its own at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from workers.frontend.rewriting import Graph, Rewrite

#: Steps of a node, over its directions: each is a few nodes, and import and build take their time for every node.
MOST_STEPS: Final = 512

#: How many gates an operator has, and the functions that it applies if none are given.
_GATES: Final[Mapping[str, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
_QUANTIZED: Final = "DynamicQuantizeLSTM"
_FUNCTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}

#: Functions with parameters, and what the standard gives those that are absent; None if nothing.
_PARAMETERS: Final[Mapping[str, dict[str, float | None]]] = {
    "affine": {"alpha": None, "beta": None},
    "elu": {"alpha": 1.0},
    "hardsigmoid": {"alpha": 0.2, "beta": 0.5},
    "leakyrelu": {"alpha": 0.01},
    "scaledtanh": {"alpha": None, "beta": None},
    "thresholdedrelu": {"alpha": 1.0},
}
_PLAIN: Final[Mapping[str, str]] = {
    name.lower(): name
    for name in (
        "Elu HardSigmoid LeakyRelu Relu Sigmoid Softplus Softsign Tanh ThresholdedRelu".split()  # noqa: SIM905
    )
}

#: The first that has DynamicQuantizeLinear.
_QUANTIZES_OPSET: Final = 11

#: The state between steps, [batch, hidden] each; None where it is zero. Only LSTM has a second.
_State = tuple[str | None, str | None]
_Step = tuple[str, str | None]


def time_first(model: ModelProto) -> ModelProto:
    """`layout` 1 as transpositions around `layout` 0: ONNX Runtime, which folds and is the reference, has only that."""
    nodes = []
    for node in model.graph.node:
        layout = next((a for a in node.attribute if a.name == "layout"), None)
        if node.domain not in ("", "ai.onnx") or node.op_type not in _GATES or layout is None or layout.i == 0:
            nodes.append(node)
            continue
        node.attribute.remove(layout)
        stem, after = f"tunery/time_first/{len(nodes)}", []
        for place in (0, 5, 6):
            if place < len(node.input) and node.input[place]:
                turned = f"{stem}/in_{place}"
                nodes.append(helper.make_node("Transpose", [node.input[place]], [turned], turned, perm=[1, 0, 2]))
                node.input[place] = turned
        for place, perm in enumerate(([2, 0, 1, 3], [1, 0, 2], [1, 0, 2])):
            if place < len(node.output) and node.output[place]:
                turned = f"{stem}/out_{place}"
                after.append(helper.make_node("Transpose", [turned], [node.output[place]], turned, perm=perm))
                node.output[place] = turned
        nodes += [node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def dynamic_quantize_lstm(graph: Graph, node: NodeProto) -> bool:
    """As `recurrent`. It stays while the shape of its input is not known: ONNX infers none behind such a node, so one
    that feeds another is written out first."""
    if graph.opset < _QUANTIZES_OPSET:
        raise graph.refuse(node, f"it is written as operators of operator set {_QUANTIZES_OPSET}; convert the model")
    shape, lengths = graph.shape(node.input[0]), graph.value(node, 4)
    if shape is None:
        return False
    if graph.input(node, 4) and shape[1] > 1 and (lengths is None or np.any(lengths != lengths[0])):
        # ONNX Runtime quantizes the states of a batch by one range, in which it has zeros for those that have ended.
        raise graph.refuse(
            node,
            "the sequences of its batch may have different lengths, on which the scale of all its states would depend; "
            "bind a batch of 1, or export the model without sequence_lens",
        )
    return recurrent(graph, node)


def recurrent(graph: Graph, node: NodeProto) -> bool:
    """The equations of the standard, with every attribute that it defines."""
    given = graph.attributes(node)
    x, shape = node.input[0], graph.shape(node.input[0])
    if shape is None:
        raise graph.refuse(node, "the shape of its input depends on the data")
    time, batch, _ = shape
    direction = given.get("direction", b"forward").decode()
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    if time * len(backward) > MOST_STEPS:
        raise graph.refuse(
            node,
            f"it takes {time * len(backward)} steps, and at most {MOST_STEPS} are written out; "
            "bind a shorter sequence, or cut it into several",
        )
    flat = graph.reshape(x, [time * batch, shape[2]])
    masks = [_running(graph, node, step, batch) for step in range(time)]
    outputs: tuple[list[str], ...] = ([], [], [])
    for index, (cell, reverse) in enumerate(zip(_cells(graph, node, len(backward)), backward, strict=True)):
        h, c = _initial(graph, node, 5, index), _initial(graph, node, 6, index)
        projected = graph.op("Add", [cell.input_weights.times(flat), cell.bias])
        inputs = graph.split(projected, [batch] * time, 0)
        written = [""] * time
        zeros = graph.constant(np.zeros((batch, cell.hidden), graph.numpy_dtype(x)))
        for step in reversed(range(time)) if reverse else range(time):
            mask = masks[step]
            if mask is False:
                written[step] = zeros
                continue
            new_h, new_c = cell.step(inputs[step], (h, c))
            written[step] = new_h
            if isinstance(mask, str):
                written[step] = graph.op("Where", [mask, new_h, zeros])
                new_h = graph.op("Where", [mask, new_h, h or zeros])
                new_c = graph.op("Where", [mask, new_c, c or zeros]) if new_c else None
            h, c = new_h, new_c
        joined = graph.op("Concat", written, axis=0) if time > 1 else written[0]
        outputs[0].append(graph.reshape(joined, [time, 1, batch, cell.hidden]))
        outputs[1].append(graph.reshape(h or zeros, [1, batch, cell.hidden]))
        outputs[2].append(graph.reshape(c or zeros, [1, batch, cell.hidden]))
    for index, axis in enumerate((1, 0, 0)):
        if graph.used(node, index):
            graph.op("Concat", outputs[index], graph.used(node, index), axis=axis)
    return True


@dataclass(frozen=True)
class _Weights:
    """What the inputs or the state are multiplied by, constant in the graph."""

    graph: Graph
    name: str  #: of the initializer of a product, once for all steps, before the columns
    array: NDArray[Any]  #: [rows, gates * hidden]
    scale: NDArray[np.float32] | None = None  #: of integers: [] or [gates * hidden]
    zero: NDArray[Any] | None = None  #: of integers: [] or [gates * hidden]

    def times(self, x: str, columns: slice = slice(None)) -> str:
        """The product of `x` [batch, rows] and some of the columns, in real numbers."""
        op, weights = self.graph.op, self._constant("", self.array, columns)
        if self.scale is None or self.zero is None:
            return op("MatMul", [x, weights])
        quantized, step, zero = self.graph.dynamically_quantized(x)
        scale = self._constant("/scale", self.scale, columns)
        total = op("MatMulInteger", [quantized, weights, zero, self._constant("/zero", self.zero, columns)])
        return op("Mul", [self.graph.cast(total, TensorProto.FLOAT), op("Mul", [step, scale])])

    def _constant(self, what: str, array: NDArray[Any], columns: slice) -> str:
        return _once(self.graph, f"{self.name}{what}/{columns.start}", array[..., columns] if array.ndim else array)


@dataclass(frozen=True)
class _Cell:
    """One direction: its weights as constants, and what one step does."""

    graph: Graph
    kind: str
    hidden: int
    input_weights: _Weights  #: [inputs, gates * hidden]
    bias: str  #: [gates * hidden], all of it that may be added before the steps
    state_weights: _Weights  #: [hidden, gates * hidden]
    state_bias: NDArray[Any]  #: [hidden], what GRU adds before it resets
    peepholes: NDArray[Any] | None  #: [3, hidden], of input, output and forget gate
    functions: tuple[Callable[[str], str], ...]
    reset_after: bool  #: GRU: linear_before_reset
    coupled: bool  #: LSTM: input_forget

    def step(self, x: str, state: _State) -> _Step:
        """The state after one step; `x` [batch, gates * hidden] is what the step's input adds to the gates."""
        return {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.kind](x, state)

    def _rnn(self, x: str, state: _State) -> _Step:
        return self.functions[0](self._plus_state(x, state[0], slice(None))), None

    def _gru(self, x: str, state: _State) -> _Step:
        op, size, h = self.graph.op, self.hidden, state[0]
        f, g = self.functions
        gates, candidate = self.graph.split(x, [2 * size, size], 1)
        if not self.reset_after:
            gates = f(self._plus_state(gates, h, slice(0, 2 * size)))
            update, reset = self.graph.split(gates, [size, size], 1)
            kept = op("Mul", [reset, h]) if h else None
            new = g(self._plus_state(candidate, kept, slice(2 * size, None)))
        else:
            bias = _once(self.graph, f"{self.bias}/bias", self.state_bias)
            if h:
                moved = self.state_weights.times(h)
                moved_gates, moved = self.graph.split(moved, [2 * size, size], 1)
                gates, bias = op("Add", [gates, moved_gates]), op("Add", [moved, bias])
            update, reset = self.graph.split(f(gates), [size, size], 1)
            new = g(op("Add", [candidate, op("Mul", [reset, bias])]))
        fresh = op("Mul", [op("Sub", [self.graph.scalar(1, x), update]), new])
        return (op("Add", [fresh, op("Mul", [update, h])]) if h else fresh), None

    def _lstm(self, x: str, state: _State) -> _Step:
        op, size, (h, c) = self.graph.op, self.hidden, state
        f, g, last = self.functions
        i, o, forget, new = self.graph.split(self._plus_state(x, h, slice(None)), [size] * 4, 1)
        if c:
            i, forget = self._peep(i, c, 0), self._peep(forget, c, 2)
        i = f(i)
        cell = op("Mul", [i, g(new)])
        if c:
            kept = op("Sub", [self.graph.scalar(1, x), i]) if self.coupled else f(forget)
            cell = op("Add", [op("Mul", [kept, c]), cell])
        return op("Mul", [f(self._peep(o, cell, 1)), last(cell)]), cell

    def _peep(self, gate: str, cell: str, index: int) -> str:
        if self.peepholes is None:
            return gate
        weights = _once(self.graph, f"{self.bias}/peephole {index}", self.peepholes[index])
        return self.graph.op("Add", [gate, self.graph.op("Mul", [cell, weights])])

    def _plus_state(self, x: str, h: str | None, columns: slice) -> str:
        if h is None:
            return x
        return self.graph.op("Add", [x, self.state_weights.times(h, columns)])


def _once(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """One initializer for all steps."""
    return name if graph.shape(name) is not None else graph.constant(array, name)


def _cells(graph: Graph, node: NodeProto, directions: int) -> list[_Cell]:
    kind = "LSTM" if node.op_type == _QUANTIZED else node.op_type
    given, gates = graph.attributes(node), _GATES[kind]
    places = (3, 7, 8, 9, 10, 11) if node.op_type == _QUANTIZED else (3, 7)
    absent = [bool(graph.input(node, place)) and graph.value(node, place) is None for place in (1, 2, *places)]
    if any(absent):
        raise graph.refuse(node, "its weights are computed while the model runs; fold them into initializers")
    inputs, states = _weights(graph, node, 1), _weights(graph, node, 2)
    bias, peepholes = graph.value(node, 3), graph.value(node, 7)
    hidden = states[0].array.shape[0]
    functions = _functions(graph, node, kind, directions)
    reset_after = bool(given.get("linear_before_reset", 0)) and kind == "GRU"
    numbers = graph.numpy_dtype(node.input[0])
    cells = []
    for index in range(directions):
        both = np.zeros((2, gates * hidden), numbers) if bias is None else bias[index].reshape(2, -1)
        added = both[0] + both[1]
        if reset_after:
            added[2 * hidden :] = both[0][2 * hidden :]
        cells.append(
            _Cell(
                graph, kind, hidden, inputs[index], graph.constant(added), states[index], both[1][-hidden:],
                None if peepholes is None else peepholes[index].reshape(3, hidden), functions[index], reset_after,
                bool(given.get("input_forget", 0)),
            )
        )  # fmt: skip
    return cells


def _weights(graph: Graph, node: NodeProto, place: int) -> list[_Weights]:
    """Those of each direction. Integers lie transposed, and have scales and zero points among the last inputs: one for
    a direction, or one for each column of it."""
    array = graph.value(node, place)
    assert array is not None
    of = f"tunery/{node.output[0] or node.output[-1]}/{('inputs', 'states')[place - 1]}"
    names = [f"{of}/{index}" for index in range(len(array))]
    if node.op_type != _QUANTIZED:
        return [_Weights(graph, name, part.T) for name, part in zip(names, array, strict=True)]
    scale, zero = graph.value(node, 6 + 2 * place), graph.value(node, 7 + 2 * place)
    if scale is None or zero is None:
        raise graph.refuse(node, "its weights have no scale or no zero point")
    return [_Weights(graph, *parts) for parts in zip(names, array, scale, zero, strict=True)]


def _functions(graph: Graph, node: NodeProto, kind: str, directions: int) -> list[tuple[Callable[[str], str], ...]]:
    """For each direction its functions. Parameters are taken in turn by those functions that have them, as ONNX Runtime
    reads them."""
    given, default = graph.attributes(node), _FUNCTIONS[kind]
    names = [name.decode() for name in given.get("activations", [])] or list(default) * directions
    if len(names) != len(default) * directions:
        raise graph.refuse(node, f"it has {len(names)} activations instead of {len(default) * directions}")
    rest = {key: list(given.get(f"activation_{key}", [])) for key in ("alpha", "beta")}
    made = []
    for index, name in enumerate(names):
        parameters = {}
        for key, usual in _PARAMETERS.get(name.lower(), {}).items():
            value = rest[key].pop(0) if rest[key] else usual
            if value is None:
                raise graph.refuse(node, f"its activation {name} has no {key}; give activation_{key}")
            parameters[key] = value
        if name.lower() not in _PLAIN and not parameters:
            raise graph.refuse(node, f"its activation {name} is not one of the standard's")
        # The cell passes its last function as it is in ONNX Runtime, though the standard clips what functions take.
        last = kind == "LSTM" and index % len(default) == 2
        made.append(_function(graph, name.lower(), parameters, None if last else given.get("clip")))
    return [tuple(made[i : i + len(default)]) for i in range(0, len(made), len(default))]


def _function(graph: Graph, name: str, parameters: Mapping[str, Any], clip: float | None) -> Callable[[str], str]:
    def apply(x: str) -> str:
        if clip is not None:
            x = graph.op("Max", [graph.op("Min", [x, graph.scalar(clip, x)]), graph.scalar(-clip, x)])
        if name in _PLAIN:
            return graph.op(_PLAIN[name], [x], **parameters)
        alpha, beta = graph.scalar(parameters["alpha"], x), graph.scalar(parameters["beta"], x)
        if name == "affine":
            return graph.op("Add", [graph.op("Mul", [x, alpha]), beta])
        return graph.op("Mul", [graph.op("Tanh", [graph.op("Mul", [x, beta])]), alpha])

    return apply


def _running(graph: Graph, node: NodeProto, step: int, batch: int) -> str | bool:
    """Whether the sequences are longer than `step`: all, none, or the name of a mask [batch, 1]."""
    lengths = graph.input(node, 4)
    if not lengths:
        return True
    known = graph.value(node, 4)
    if known is None:
        return graph.op("Greater", [graph.reshape(lengths, [batch, 1]), graph.scalar(step, lengths)])
    longer = known > step
    if longer.all():
        return True
    return graph.constant(longer.reshape(batch, 1)) if longer.any() else False


def _initial(graph: Graph, node: NodeProto, place: int, direction: int) -> str | None:
    """A state before the first step, None if it is zero."""
    name, value = graph.input(node, place), graph.value(node, place)
    if not name or (value is not None and not value.any()):
        return None
    if value is not None:
        return graph.constant(value[direction])
    return graph.op("Gather", [name, graph.constant(np.asarray(direction, np.int64))], axis=0)


REWRITES: Final[Mapping[str, Rewrite]] = {"GRU": recurrent, "LSTM": recurrent, "RNN": recurrent}
