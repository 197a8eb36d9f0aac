"""From an ONNX model with bound shapes to Relax: normalised by libraries first, then by the few rewrites of our own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
import tvm
from onnx import ModelProto, helper

from tuning_db.errors import ImportFailed, InvalidRequest, UnsupportedOperator
from tuning_db.keys import TensorSpec
from workers.frontend import onnx_model, quantized
from workers.frontend.control_flow import has_loops, unroll
from workers.frontend.inlining import inline_functions
from workers.frontend.normalise import normalise
from workers.frontend.operators import IMPORTED
from workers.frontend.recurrent import time_first
from workers.frontend.relax_importer import to_relax
from workers.frontend.weights import LARGE_BYTES, write
from workers.said import last_line


@dataclass(frozen=True, slots=True)
class Imported:
    """A model ready for the graph pipeline."""

    module: tvm.ir.IRModule  #: `main` takes the inputs in order and returns the outputs in order
    bound: Path  #: the user's model with its shapes bound, in `scratch` beside its weights: what the reference runs
    outputs: tuple[TensorSpec, ...]
    nodes_before: int
    nodes_after: int


def import_onnx(path: Path, inputs: Sequence[TensorSpec], scratch: Path, *, large_bytes: int = LARGE_BYTES) -> Imported:
    """Read, bind, normalise and convert. Raises InvalidModel, UnsupportedOperator, ShapeMismatch or ImportFailed.

    Weights of `large_bytes` and more come to lie in `scratch` (`weights`).
    """
    model = bound_model(path, inputs, scratch, large_bytes)
    nodes_before, bound = len(model.graph.node), write(model, scratch)
    folded = flat(quantized.standard(model, scratch), scratch, large_bytes)
    outputs = static_outputs(folded)
    normalised = sum_to_add(normalise(quantized.real_products(folded, scratch), scratch))
    onnx_model.check_operators(normalised, folded=True, known=IMPORTED)
    try:
        with warnings.catch_warnings():
            # It tells of every input whose name is no identifier. Libraries take their inputs by position.
            warnings.filterwarnings("ignore", message="Renaming name")
            module = to_relax(normalised, scratch)
    except UnsupportedOperator:
        raise
    except Exception as error:  # the importer raises whatever its converters run into
        raise ImportFailed(f"TVM cannot import the model: {type(error).__name__}: {last_line(error)}") from error
    return Imported(module, bound, outputs, nodes_before, len(normalised.graph.node))


def bound_model(path: Path, inputs: Sequence[TensorSpec], scratch: Path, large_bytes: int = LARGE_BYTES) -> ModelProto:
    """The model as the reference runs it. Raises InvalidModel, UnsupportedOperator or ShapeMismatch."""
    model = onnx_model.load_apart(path, scratch, large_bytes)
    onnx_model.check_operators(model)
    onnx_model.bind(time_first(model), inputs)
    return model


def flat(model: ModelProto, scratch: Path, large_bytes: int = LARGE_BYTES) -> ModelProto:
    """A bound model with functions inlined, constants folded and loops written out, its large weights in `scratch`.

    Raises ImportFailed or UnsupportedOperator.
    """
    folded = fold(inline_functions(model), scratch, large_bytes)
    while has_loops(folded):
        folded = fold(inline_functions(unroll(folded)), scratch, large_bytes)
    return folded


def fold(model: ModelProto, scratch: Path, large_bytes: int = LARGE_BYTES) -> ModelProto:
    """ONNX Runtime's basic optimisation: constants, shapes and BatchNorm folded, no operator of its own added.

    `scratch` is where the model's large weights lie, and where those of the result come to lie.
    """
    whole = write(model, scratch)
    folded = whole.with_suffix(".folded.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    options.log_severity_level = 4
    for name, value in (
        ("optimized_model_external_initializers_file_name", folded.with_suffix(".bin").name),
        ("optimized_model_external_initializers_min_size_in_bytes", str(large_bytes)),
        ("disable_prepacking", "1"),  # nothing is run: a second copy of the weights would be for nothing
    ):
        options.add_session_config_entry(f"session.{name}", value)
    try:
        onnxruntime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ImportFailed(f"ONNX Runtime refuses the model: {last_line(error)}") from error
    return onnx.load(folded, load_external_data=False)


def sum_to_add(model: ModelProto) -> ModelProto:
    """`Sum` of two or more as a chain of `Add`: the importer stacks and reduces, which costs two kernels and three
    copies where one addition does."""
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Sum" or len(node.input) < 2:
            nodes.append(node)
            continue
        total = node.input[0]
        for index, term in enumerate(node.input[1:], start=1):
            last = index == len(node.input) - 1
            result = node.output[0] if last else f"{node.output[0]}/partial_{index}"
            nodes.append(helper.make_node("Add", [total, term], [result], name=f"{node.name}/add_{index}"))
            total = result
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def static_outputs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """The outputs with every dimension known; ImportFailed names one that depends on the data."""
    specs = []
    for port, value in zip(onnx_model.outputs_of(model), model.graph.output, strict=True):
        if not value.type.tensor_type.HasField("shape"):
            raise ImportFailed(f"the shape of output {port.name!r} cannot be inferred")
        if not all(isinstance(size, int) for size in port.shape):
            raise ImportFailed(f"output {port.name!r} has the shape {list(port.shape)}, which depends on the data")
        try:
            specs.append(TensorSpec(port.name, port.dtype, tuple(int(size) for size in port.shape if size is not None)))
        except InvalidRequest:  # which speaks of an input
            raise ImportFailed(
                f"output {port.name!r} has the shape {list(port.shape)}; sizes up to 2147483647 can be compiled"
            ) from None
    return tuple(specs)
