"""TVM's ONNX importer, made to say which node it could not convert."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import tvm
from onnx import ModelProto
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from tuning_db.errors import UnsupportedOperator
from workers.frontend import onnx_model


class _Importer(ONNXGraphImporter):  # type: ignore[misc]  # TVM publishes no types
    def _convert_operator(self, op_name: str, inputs: list[Any], attrs: dict[str, Any], opset: int) -> Any:
        # An absent name is empty; a converter may take the attributes apart.
        node = str(attrs["tvm_custom"]["name"]) or op_name
        try:
            return super()._convert_operator(op_name, inputs, attrs, opset)
        except Exception as error:  # every converter raises its own
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UnsupportedOperator(
                f"operator {op_name} (node {node!r}, opset {opset}) cannot be compiled as it is used here: "
                f"{type(error).__name__}: {lines[-1][:200] if lines else 'no reason given'}",
                operator=op_name,
                node=node,
                opset=opset,
            ) from error


def to_relax(model: ModelProto) -> tvm.ir.IRModule:
    """The module, constants in it. UnsupportedOperator names the node that TVM could not convert."""
    opset = onnx_model.opset_of(model)
    importer = _Importer({}, "float32")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the inputs of a node that it cannot convert
        return importer.from_onnx(model.graph, opset)
