"""What a rewrite of an ONNX graph needs: types, shapes and constants by name, and new nodes in the place of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tuning_db.errors import UnsupportedOperator
from workers.frontend import onnx_model
from workers.frontend.weights import array

#: Returns whether it wrote the node anew, with `Graph.op` and the node's own output names; if not, the node stays.
Rewrite = Callable[["Graph", NodeProto], bool]


class Graph:
    """A model whose nodes are written anew, one after the other."""

    def __init__(self, model: ModelProto, weights: Path | None = None) -> None:
        """`weights` is the folder of those that are not inside the model."""
        self._weights = weights
        self.opset = onnx_model.opset_of(model)
        self.outputs = {value.name for value in model.graph.output}
        self._model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        self._nodes: list[NodeProto] = []
        self._fresh = 0
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._types: dict[str, tuple[int, tuple[int, ...] | None]] = {}
        graph = self._model.graph
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers = Counter(name for node in graph.node for name in node.input)
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            known = tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim)
            shape = tuple(d.dim_value for d in tensor.shape.dim) if known else None
            self._types[value.name] = (tensor.elem_type, shape)
        for name, stored in self._constants.items():
            self._types[name] = (stored.data_type, tuple(stored.dims))

    def rewrite(self, rewrites: Mapping[str, Rewrite]) -> ModelProto:
        """The model with every node that has a rewrite written anew where that wishes to."""
        used = {name for node in self._model.graph.node for name in node.input} | self.outputs
        for node in self._model.graph.node:
            for index, name in enumerate(node.output):
                if name not in used:
                    node.output[index] = ""
            while node.output and not node.output[-1]:
                node.output.pop()
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t
                self._types[node.output[0]] = (node.attribute[0].t.data_type, tuple(node.attribute[0].t.dims))
            standard = node.domain in ("", "ai.onnx")
            change = rewrites.get(node.op_type if standard else f"{node.domain}.{node.op_type}")
            if not node.output:
                continue
            if change is None or not change(self, node):
                self._nodes.append(node)
        model = self._model
        del model.graph.node[:]
        model.graph.node.extend(self._nodes)
        return model

    def value(self, node: NodeProto, index: int) -> NDArray[Any] | None:
        """The constant that an input is, None if it is absent or computed."""
        tensor = self._constants.get(self.input(node, index))
        return None if tensor is None else array(tensor, self._weights)

    def nodes(self, op_type: str) -> Iterator[NodeProto]:
        """Those of the standard's operator in the model as it was."""
        return (node for node in self._model.graph.node if node.op_type == op_type and node.domain in ("", "ai.onnx"))

    def made_by(self, node: NodeProto, index: int, *op_types: str) -> NodeProto | None:
        """The node that an input came from in the model as it was, if it is one of these operators."""
        maker = self._makers.get(self.input(node, index))
        return maker if maker is not None and maker.op_type in op_types else None

    def only_reader(self, node: NodeProto, index: int, *op_types: str) -> NodeProto | None:
        """The same, if nothing else reads what came from it."""
        name = self.input(node, index)
        maker = self.made_by(node, index, *op_types)
        return maker if self._readers[name] == 1 and name not in self.outputs else None

    @staticmethod
    def input(node: NodeProto, index: int) -> str:
        """The name of an input, empty if it is absent."""
        return str(node.input[index]) if index < len(node.input) else ""

    @staticmethod
    def used(node: NodeProto, index: int) -> str:
        """The name of an output, empty if nobody reads it."""
        return str(node.output[index]) if index < len(node.output) else ""

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._types.get(name, (0, None))[1]

    def dtype(self, name: str) -> int:
        """A number of TensorProto.DataType, 0 if it is not known."""
        return self._types.get(name, (0, None))[0]

    def numpy_dtype(self, name: str) -> Any:
        return helper.tensor_dtype_to_np_dtype(self.dtype(name))

    def attributes(self, node: NodeProto) -> dict[str, Any]:
        return {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def constant(self, array: NDArray[Any] | np.generic, name: str = "") -> str:
        """A new initializer, of a name that nothing else has."""
        name = name or self._name()
        tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name)
        self._model.graph.initializer.append(tensor)
        self._constants[name] = tensor
        self._types[name] = (tensor.data_type, tuple(tensor.dims))
        return name

    def answer(self, array: NDArray[Any] | np.generic, output: str) -> None:
        """Make `output`, what a node has computed, a constant. One of the model's own outputs stays that of a node."""
        if output in self.outputs:
            self.op("Identity", [self.constant(array)], output)
        else:
            self.constant(array, output)

    def scalar(self, number: float, like: str) -> str:
        """A constant of rank 0 with the element type of the tensor `like`."""
        return self.constant(np.asarray(number, self.numpy_dtype(like)))

    def op(self, op_type: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Append a node with one output. Its shape is not known to later rewrites; its type is the first input's."""
        output = output or self._name()
        self._nodes.append(helper.make_node(op_type, list(inputs), [output], name=f"{output}/{op_type}", **attributes))
        if output not in self._types and inputs:
            self._types[output] = (self.dtype(inputs[0]), None)
        return output

    def split(self, name: str, sizes: Sequence[int], axis: int) -> list[str]:
        """The parts of a tensor, of `sizes` along `axis`; of one size the tensor itself."""
        if len(sizes) == 1:
            return [name]
        of = (self.dtype(name), None)
        if self.opset < 13:
            return self._several("Split", [name], [of] * len(sizes), axis=axis, split=list(sizes))
        given = self.constant(np.asarray(sizes, np.int64))
        return self._several("Split", [name, given], [of] * len(sizes), axis=axis)

    def reshape(self, name: str, shape: Sequence[int], output: str = "") -> str:
        return self.op("Reshape", [name, self.constant(np.asarray(shape, np.int64))], output)

    def cast(self, name: str, to: int, output: str = "") -> str:
        if self.dtype(name) == to and not output:
            return name
        result = self.op("Cast", [name], output, to=to)
        if not output:  # of a node's own output the type is known
            self._types[result] = (to, self.shape(name))
        return result

    def reduce_mean(self, name: str, axes: Sequence[int], output: str = "") -> str:
        """Over `axes`, which stay with size 1."""
        return self.reduce("ReduceMean", name, axes, output)

    def reduce(self, op_type: str, name: str, axes: Sequence[int], output: str = "", *, keep: bool = True) -> str:
        """One of the reductions whose axes became an input with operator set 18."""
        if self.opset < 18:
            return self.op(op_type, [name], output, axes=list(axes), keepdims=int(keep))
        return self.op(op_type, [name, self.constant(np.asarray(axes, np.int64))], output, keepdims=int(keep))

    def refuse(self, node: NodeProto, why: str) -> UnsupportedOperator:
        """The error to raise for a node; `why` says what of it is not done and what to do."""
        return onnx_model.unsupported(node.op_type, onnx_model.name_of(node), self.opset, f": {why}")

    def dynamically_quantized(self, name: str) -> tuple[str, str, str]:
        """A float tensor in uint8, with the scale and the zero point that its own range gives."""
        types = [(TensorProto.UINT8, None), (TensorProto.FLOAT, ()), (TensorProto.UINT8, ())]
        quantized, scale, zero = self._several("DynamicQuantizeLinear", [name], types)
        return quantized, scale, zero

    def _several(
        self,
        op_type: str,
        inputs: Sequence[str],
        types: Sequence[tuple[int, tuple[int, ...] | None]],
        **attributes: Any,
    ) -> list[str]:
        """Append a node with an output for each of `types`."""
        outputs = [self._name() for _ in types]
        self._nodes.append(
            helper.make_node(op_type, list(inputs), outputs, name=f"{outputs[0]}/{op_type}", **attributes)
        )
        self._types.update(zip(outputs, types, strict=True))
        return outputs

    def _name(self) -> str:
        # An earlier rewriting of the same model has left names of this kind.
        while True:
            self._fresh += 1
            name = f"tunery/{self._fresh}"
            if name not in self._makers and name not in self._types:
                return name


FLOATS = (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
