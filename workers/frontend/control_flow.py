"""Loop and Scan whose number of steps is known before the model runs, written out step by step.

`If` needs nothing here: ONNX Runtime puts the branch in its place that a constant condition takes, also one that became
constant because it depends on the number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tuning_db.errors import UnsupportedOperator
from workers.frontend import onnx_model

#: Of one node: steps, and nodes that they become. Import and build take their time for every node.
MOST_STEPS: Final = 512
MOST_NODES: Final = 16384


def has_loops(model: ModelProto) -> bool:
    """Whether a loop is left, at the top of the graph: the loops inside it come there when it is written out."""
    return any(node.op_type in ("Loop", "Scan") and node.domain in ("", "ai.onnx") for node in model.graph.node)


def unroll(model: ModelProto) -> ModelProto:
    """The model, its constants folded, with the outermost loops written out and the types of all tensors.

    UnsupportedOperator for a loop whose steps depend on the data or are too many.
    """
    return onnx.shape_inference.infer_shapes(_Unrolled(model).model(), data_prop=True)


class _Unrolled:
    """A model on its way from one with loops to one without."""

    def __init__(self, model: ModelProto) -> None:
        self._model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        self._opset = onnx_model.opset_of(model)
        self._nodes: list[NodeProto] = []
        self._constants = _constants_of(self._model.graph)
        self._shapes = {
            value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            for value in (*self._model.graph.input, *self._model.graph.value_info, *self._model.graph.output)
            if value.type.tensor_type.HasField("shape")
        }
        self._shapes |= {tensor.name: list(tensor.dims) for tensor in self._model.graph.initializer}
        self._shapes |= {name: list(array.shape) for name, array in self._constants.items()}

    def model(self) -> ModelProto:
        """The model without the loops that it had at the top."""
        # Names of initializers and nodes' outputs must not meet those of an earlier round.
        rounds = sum(entry.key == "tunery.unrolled" for entry in self._model.metadata_props)
        for index, node in enumerate(self._model.graph.node):
            stem = f"tunery/loop_{rounds}_{index}"
            if node.op_type == "Loop" and node.domain in ("", "ai.onnx"):
                self._loop(node, stem)
            elif node.op_type == "Scan" and node.domain in ("", "ai.onnx"):
                self._scan(node, stem)
            else:
                self._nodes.append(node)
        del self._model.graph.node[:]
        self._model.graph.node.extend(self._nodes)
        self._model.metadata_props.add(key="tunery.unrolled", value="")
        return self._model

    def _loop(self, node: NodeProto, stem: str) -> None:
        body = _attribute(node, "body")
        trips = self._constants.get(node.input[0]) if node.input[0] else None
        begins: Any = self._constants.get(node.input[1]) if len(node.input) > 1 and node.input[1] else np.True_
        goes_on = self._goes_on(body)
        if begins is None or goes_on is None:
            raise self._refuse(node, "whether it goes on depends on the data; export it with a fixed number of steps")
        if trips is None and (node.input[0] or goes_on):
            raise self._refuse(node, "how often it runs depends on the data; make its trip count a constant")
        steps = 1 if trips is None else max(0, int(trips.reshape(-1)[0]))
        steps = steps if goes_on else min(steps, 1)
        steps = steps if begins else 0
        self._check_size(node, body, steps)
        state, count = list(node.input[2:]), len(node.input) - 2
        stacked: list[list[str]] = [[] for _ in body.output[1 + count :]]
        shared = self._share(body, stem)
        for step in range(steps):
            number = self._constant(np.int64(step), f"{stem}/number/{step}")
            on = self._constant(np.True_, f"{stem}/on/{step}")
            _, *results = self._step(body, shared, [number, on, *state], f"{stem}/{step}")
            state = results[:count]
            for index, result in enumerate(results[count:]):
                at = f"{stem}/stacked/{step}/{index}"
                stacked[index].append(self._with_axis("Unsqueeze", result, 0, at))
        self._finish(node, state, stacked, [0] * len(stacked))

    def _scan(self, node: NodeProto, stem: str) -> None:
        if self._opset < 9:
            raise self._refuse(node, "it is of operator set 8; convert the model to operator set 9 or later")
        body, given = _attribute(node, "body"), {a.name: helper.get_attribute_value(a) for a in node.attribute}
        scanned = int(given["num_scan_inputs"])
        count = len(node.input) - scanned
        outputs = len(body.output) - count
        axes = given.get("scan_input_axes", [0] * scanned)
        directions = given.get("scan_input_directions", [0] * scanned)
        columns: list[list[str]] = []
        for index, (name, axis, backward) in enumerate(zip(node.input[count:], axes, directions, strict=True)):
            shape = self._shapes.get(name)
            size = None if shape is None else shape[axis]
            if shape is None or size is None:
                raise self._refuse(node, "the shape of its input depends on the data; bind it")
            self._check_size(node, body, size)
            parts = self._split(name, size, axis % len(shape), f"{stem}/in_{index}")
            columns.append(parts[::-1] if backward else parts)
        steps = len(columns[0])
        state = list(node.input[:count])
        stacked: list[list[str]] = [[] for _ in range(outputs)]
        output_axes = given.get("scan_output_axes", [0] * outputs)
        shared = self._share(body, stem)
        for step in range(steps):
            results = self._step(body, shared, [*state, *(column[step] for column in columns)], f"{stem}/{step}")
            state = results[:count]
            for index, result in enumerate(results[count:]):
                at = f"{stem}/stacked/{step}/{index}"
                stacked[index].append(self._with_axis("Unsqueeze", result, output_axes[index], at))
        turned = given.get("scan_output_directions", [0] * outputs)
        stacked = [parts[::-1] if backward else parts for parts, backward in zip(stacked, turned, strict=True)]
        self._finish(node, state, stacked, output_axes)

    def _goes_on(self, body: GraphProto) -> bool | None:
        """What the body says after a step about the next one, None if that depends on the data."""
        makers = {output: node for node in body.node for output in node.output}
        name = body.output[0].name
        while name in makers and makers[name].op_type == "Identity":
            name = makers[name].input[0]
        if name == body.input[1].name:
            return True  # as it was before the step, and that was true
        value = (self._constants | _constants_of(body)).get(name)
        return None if value is None else bool(value)

    def _check_size(self, node: NodeProto, body: GraphProto, steps: int) -> None:
        if steps > MOST_STEPS or steps * len(body.node) > MOST_NODES:
            raise self._refuse(
                node,
                f"its {steps} steps of {len(body.node)} nodes would be written out, and at most {MOST_STEPS} steps and "
                f"{MOST_NODES} nodes are; give it fewer, or express it without a loop",
            )

    def _share(self, body: GraphProto, stem: str) -> dict[str, str]:
        """The body's own constants, once for all steps."""
        names = {}
        for tensor in body.initializer:
            names[tensor.name] = f"{stem}/body/{tensor.name}"
            copy = self._model.graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = names[tensor.name]
        return names

    def _step(self, body: GraphProto, shared: Mapping[str, str], inputs: list[str], stem: str) -> list[str]:
        """Append the nodes of one step; returns what the body's outputs are called of it."""
        names = dict(shared) | {value.name: name for value, name in zip(body.input, inputs, strict=True)}
        for index, inside in enumerate(body.node):
            node = NodeProto()
            node.CopyFrom(inside)
            node.name = f"{stem}/node_{index}"
            _rename_inputs(node, names)
            names.update((output, f"{stem}/{output}") for output in inside.output if output)
            node.output[:] = [names[output] if output else "" for output in inside.output]
            self._nodes.append(node)
        return [names.get(value.name, value.name) for value in body.output]

    def _finish(self, node: NodeProto, state: list[str], stacked: list[list[str]], axes: list[int]) -> None:
        for output, name in zip(node.output, state, strict=False):
            if output:
                self._nodes.append(helper.make_node("Identity", [name], [output], name=f"{output}/last"))
        for output, parts, axis in zip(node.output[len(state) :], stacked, axes, strict=True):
            if not output:
                continue
            if not parts:
                raise self._refuse(node, "it never runs, and what it collects is empty; remove it")
            self._nodes.append(helper.make_node("Concat", parts, [output], name=f"{output}/all", axis=axis))

    def _split(self, name: str, steps: int, axis: int, stem: str) -> list[str]:
        """The tensor at each place along an axis, without that axis."""
        parts = [f"{stem}/{step}/kept" for step in range(steps)]
        if steps == 1:
            parts = [name]
        elif self._opset < 13:
            self._nodes.append(helper.make_node("Split", [name], parts, name=stem, axis=axis, split=[1] * steps))
        else:
            sizes = self._constant(np.ones(steps, np.int64), f"{stem}/sizes")
            self._nodes.append(helper.make_node("Split", [name, sizes], parts, name=stem, axis=axis))
        return [self._with_axis("Squeeze", part, axis, f"{stem}/{step}") for step, part in enumerate(parts)]

    def _with_axis(self, op_type: str, name: str, axis: int, output: str) -> str:
        if self._opset < 13:
            self._nodes.append(helper.make_node(op_type, [name], [output], name=output, axes=[axis]))
        else:
            axes = self._constant(np.asarray([axis], np.int64), f"{output}/axes")
            self._nodes.append(helper.make_node(op_type, [name, axes], [output], name=output))
        return output

    def _constant(self, value: NDArray[Any] | np.generic, name: str) -> str:
        self._model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _refuse(self, node: NodeProto, why: str) -> UnsupportedOperator:
        return onnx_model.unsupported(node.op_type, onnx_model.name_of(node), self._opset, f": {why}")


def _attribute(node: NodeProto, name: str) -> GraphProto:
    return next(attribute.g for attribute in node.attribute if attribute.name == name)


def _constants_of(graph: GraphProto) -> dict[str, NDArray[Any]]:
    """Those that are inside the graph: what is large is no number of steps."""
    tensors: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: np.asarray(numpy_helper.to_array(tensor))
        for name, tensor in tensors.items()
        if tensor.data_type != TensorProto.STRING and tensor.data_location != TensorProto.EXTERNAL
    }


def _rename_inputs(node: NodeProto, names: Mapping[str, str]) -> None:
    """What a node and the graphs inside it read from outside, by its new name."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in onnx_model.subgraphs(node):
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own |= {output for inside in graph.node for output in inside.output}
        outer = {old: new for old, new in names.items() if old not in own}
        for inside in graph.node:
            _rename_inputs(inside, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)
