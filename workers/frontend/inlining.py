"""Puts the bodies of functions in the place of the nodes that call them: the model's own, and the standard's."""

from __future__ import annotations

import onnx
import onnx.inliner
from onnx import FunctionProto, ModelProto, TypeProto, helper

from workers.frontend import onnx_model
from workers.frontend.operators import SUPPORTED
from workers.said import last_line


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace the model's own functions, and the standard operators that TVM lacks, by their bodies."""
    model = _with_types_of_constants(onnx.inliner.inline_local_functions(model))
    opset = onnx_model.opset_of(model)
    missing = {
        node.op_type
        for node in model.graph.node
        if node.domain in ("", "ai.onnx")
        and node.op_type not in SUPPORTED
        and onnx_model.has_function_body(node.op_type, opset)
    }
    for name in sorted(missing):
        model = _inline_standard(model, name)
    return model


def _inline_standard(model: ModelProto, name: str) -> ModelProto:
    """Every node of the standard operator `name` replaced by its body."""
    if all(all(node.input) for node in model.graph.node if node.op_type == name):
        return onnx.inliner.inline_selected_functions(model, [("", name)], exclude=False, inline_schema_functions=True)
    # The inliner fails where a body depends on types and an optional input before the last is absent.
    opset = onnx_model.opset_of(model)
    schema = onnx.defs.get_schema(name, max_inclusive_version=opset)
    types = {
        value.name: value.type.SerializeToString()
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)
    }
    for index, node in enumerate(model.graph.node):
        if node.op_type != name or node.domain not in ("", "ai.onnx"):
            continue
        absent = TypeProto().SerializeToString()
        try:
            body = schema.get_context_dependent_function_with_opset_version(
                max(schema.context_dependent_function_opset_versions),
                node.SerializeToString(),
                [types[used] if used else absent for used in node.input],
            )
        except Exception as error:  # builders raise what they like
            why = f": its body in the standard cannot be made for these inputs: {last_line(error)}"
            raise onnx_model.unsupported(name, onnx_model.name_of(node), opset, why) from error
        function = FunctionProto.FromString(body)
        function.domain, function.name = "tunery.body", f"{name}_{index}"
        if not function.opset_import:
            function.opset_import.add(domain="", version=opset)
        model.functions.append(function)
        node.domain, node.op_type = function.domain, function.name
    model.opset_import.add(domain="tunery.body", version=1)
    return onnx.inliner.inline_local_functions(model)


def _with_types_of_constants(model: ModelProto) -> ModelProto:
    """The inliner builds bodies that depend on types, and does not look for those of initializers."""
    known = {value.name for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    model.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in model.graph.initializer
        if tensor.name not in known
    )
    return model
