"""TVM's ONNX importer with converters of our own before its own, made to say which node it could not convert."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import tvm
from onnx import ModelProto, TensorProto
from tvm import relax, te
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from workers.frontend import onnx_model
from workers.frontend.weights import array
from workers.graph.dynamic import quantize_dynamically
from workers.said import last_line


def _extremum(largest: bool) -> Any:
    """ReduceMax or ReduceMin of floats. TVM's own begin at the largest finite number, and so lose a row of infinities
    alone, as masks of attention have them."""
    combine = tvm.tirx.max if largest else tvm.tirx.min
    identity = -math.inf if largest else math.inf
    reducer = te.comm_reducer(
        lambda x, y: combine(x, y), lambda dtype: tvm.tirx.const(identity, dtype), name="extremum"
    )

    def convert(builder: relax.BlockBuilder, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        data = inputs[0]
        given = inputs[1] if len(inputs) > 1 else None
        if "float" not in str(data.ty.dtype) or (given is not None and not isinstance(given, tvm.ir.GenericConst)):
            return None
        rank = len(data.ty.shape.values)
        axes = attrs.get("axes", ()) if given is None else given.value.numpy().tolist()
        if not axes and attrs.get("noop_with_empty_axes", 0):
            return data
        reduced = sorted({axis % rank for axis in axes} or range(rank))
        keep = bool(attrs.get("keepdims", 1))

        def compute(x: Any) -> Any:
            over = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in reduced}
            shape = [1 if i in over else x.shape[i] for i in range(rank) if keep or i not in over]

            def element(*index: Any) -> Any:
                place = iter(index)
                kept = [next(place) if keep or i not in over else 0 for i in range(rank)]
                position = [over[i].var if i in over else kept[i] for i in range(rank)]
                return reducer(x(*position), axis=list(over.values()))

            return te.compute(shape, element, name="reduce_extremum")

        return builder.emit_te(compute, data)

    return convert


def _dynamic_quantize(builder: relax.BlockBuilder, inputs: list[Any], _attrs: dict[str, Any]) -> Any:
    """TVM's own has a scale of 0 for zeros alone, where ONNX Runtime has 1, and takes a kernel for each step."""
    [data] = inputs
    if str(data.ty.dtype) != "float32" or not data.ty.shape.values:
        return None
    return quantize_dynamically(builder, data)


def _of_floats(operator: Callable[[Any, Any], Any]) -> Any:
    """Max or Min of floats in turns. TVM's own stacks them, and takes the largest of all."""

    def convert(builder: relax.BlockBuilder, inputs: list[Any], _attrs: dict[str, Any]) -> Any:
        if "float" not in str(inputs[0].ty.dtype) or all(isinstance(x, tvm.ir.GenericConst) for x in inputs):
            return None
        result = inputs[0]
        for other in inputs[1:]:
            result = builder.normalize(operator(result, other))
        return result

    return convert


def _clip(builder: relax.BlockBuilder, inputs: list[Any], attrs: dict[str, Any]) -> Any:
    """Clip of floats by bounds that are constants. TVM's own writes functions, which lose NaN."""
    data, dtype = inputs[0], str(inputs[0].ty.dtype)
    bounds = [inputs[place] if place < len(inputs) else None for place in (1, 2)]
    if len(inputs) < 2:  # before operator set 11
        bounds = [relax.const(attrs[name], dtype) if name in attrs else None for name in ("min", "max")]
    if "float" not in dtype or not all(x is None or isinstance(x, tvm.ir.GenericConst) for x in bounds):
        return None
    for bound, operator in zip(bounds, (relax.op.maximum, relax.op.minimum), strict=True):
        data = data if bound is None else builder.normalize(operator(data, bound))
    return data


#: Converters in the place of TVM's; None from one leaves the node to TVM's.
_CONVERTERS: Final[Mapping[str, Callable[[Any, list[Any], dict[str, Any]], Any]]] = {
    "Clip": _clip,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "Max": _of_floats(relax.op.maximum),
    "Min": _of_floats(relax.op.minimum),
    "ReduceMax": _extremum(True),
    "ReduceMin": _extremum(False),
}


class _Importer(ONNXGraphImporter):  # type: ignore[misc]  # TVM publishes no types
    def __init__(self, weights: Path | None) -> None:
        super().__init__({}, "float32")
        self._weights = weights

    def _parse_array(self, tensor_proto: TensorProto) -> Any:
        return tvm.runtime.tensor(array(tensor_proto, self._weights))

    def _convert_operator(self, op_name: str, inputs: list[Any], attrs: dict[str, Any], opset: int) -> Any:
        # An absent name is empty; a converter may take the attributes apart.
        node = str(attrs["tvm_custom"]["name"]) or op_name
        try:
            if op_name in _CONVERTERS:
                converted = _CONVERTERS[op_name](self.bb, inputs, attrs)
                if converted is not None:
                    return self.bb.normalize(converted)
            return super()._convert_operator(op_name, inputs, attrs, opset)
        except Exception as error:  # every converter raises its own
            why = f" as it is used here: {type(error).__name__}: {last_line(error, 'no reason given')[:200]}"
            raise onnx_model.unsupported(op_name, node, opset, why) from error


def to_relax(model: ModelProto, weights: Path | None = None) -> tvm.ir.IRModule:
    """The module, constants in it. UnsupportedOperator names the node that TVM could not convert."""
    opset = onnx_model.opset_of(model)
    importer = _Importer(weights)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the inputs of a node that it cannot convert
        return importer.from_onnx(model.graph, opset)
