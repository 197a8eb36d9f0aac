"""From an ONNX model with bound shapes to Relax: normalised by libraries first, then by the few rewrites of our own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnxruntime
import tvm
from onnx import ModelProto, helper

from tuning_db.errors import ImportFailed, InvalidRequest, UnsupportedOperator
from tuning_db.keys import Json, TensorSpec
from tuning_db.pieces import Slab
from workers.frontend import onnx_model, quantized, selection
from workers.frontend.control_flow import has_loops, unroll
from workers.frontend.inlining import inline_functions
from workers.frontend.normalise import normalise
from workers.frontend.operators import IMPORTED
from workers.frontend.recurrent import time_first
from workers.frontend.relax_importer import to_relax
from workers.frontend.selection import Selection
from workers.frontend.weights import LARGE_BYTES, write
from workers.said import last_line

#: Functions of a library: the model's; and the parts of a model that selects boxes, before and behind that.
WHOLE: Final = "main"
HEAD: Final = "head"
TAIL: Final = "tail"


@dataclass(frozen=True, slots=True)
class Imported:
    """A model, or a part of one, ready for the graph pipeline."""

    module: tvm.ir.IRModule  #: `main` takes the inputs in order and returns the outputs in order
    bound: Path  #: the same with its shapes bound, in `scratch` beside its weights: what the reference runs
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True, slots=True)
class Selected:
    """What is between the parts of a model that selects boxes, and behind them."""

    selection: Selection
    inputs: tuple[TensorSpec, ...]  #: of the whole
    outputs: tuple[TensorSpec, ...]  #: of the whole, as large as they may be
    slabs: tuple[Slab | None, ...]  #: where in each output a selected box has its numbers; None for one of fixed shape
    rest: Path  #: the selection and the tail, as ONNX Runtime runs them


@dataclass(frozen=True, slots=True)
class Parts:
    """A model as the functions that its library is made of: `main` alone, or `HEAD` and `TAIL` around a selection, of
    which one that would compute nothing is not there."""

    functions: Mapping[str, Imported]
    bound: Path  #: the whole, as of `Imported`
    outputs: tuple[TensorSpec, ...]
    nodes_before: int
    nodes_after: int
    selected: Selected | None = None

    def told_outputs(self) -> list[dict[str, Json]]:
        """As a manifest tells them: of one whose length the data decide, which axis varies, and the most it may be."""
        slabs = [None] * len(self.outputs) if self.selected is None else self.selected.slabs
        return [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                **({} if slab is None else {"varying_axis": slab.axis}),
            }
            for spec, slab in zip(self.outputs, slabs, strict=True)
        ]


def import_onnx(path: Path, inputs: Sequence[TensorSpec], scratch: Path, *, large_bytes: int = LARGE_BYTES) -> Imported:
    """`import_parts` of a model of one part. UnsupportedOperator names the NonMaxSuppression of one that has more."""
    parts = import_parts(path, inputs, scratch, large_bytes=large_bytes)
    if parts.selected is not None:
        raise UnsupportedOperator(
            f"operator {onnx_model.SELECTING} selects as many boxes as the data decide, and cannot be compiled here",
            operator=onnx_model.SELECTING, node="", opset=0,
        )  # fmt: skip
    return parts.functions[WHOLE]


def import_parts(path: Path, inputs: Sequence[TensorSpec], scratch: Path, *, large_bytes: int = LARGE_BYTES) -> Parts:
    """Read, bind, normalise and convert. Raises InvalidModel, UnsupportedOperator, ShapeMismatch or ImportFailed.

    Weights of `large_bytes` and more come to lie in `scratch` (`weights`).
    """
    model = bound_model(path, inputs, scratch, large_bytes)
    nodes_before, bound = len(model.graph.node), write(model, scratch)
    folded = flat(quantized.standard(model, scratch), scratch, large_bytes)
    found = selection.cut(folded, scratch)
    if found is None:
        whole = _converted(folded, bound, inputs, nodes_before, scratch)
        return Parts({WHOLE: whole}, bound, whole.outputs, nodes_before, whole.nodes_after)
    functions = {}
    for name, part in ((HEAD, found.head), (TAIL, found.tail)):
        if part is not None:
            reference, ports = write(part, scratch), onnx_model.inputs_of(part)
            specs = tuple(
                TensorSpec(port.name, port.dtype, tuple(int(size or 0) for size in port.shape)) for port in ports
            )
            flattened = flat(part, scratch, large_bytes)
            functions[name] = _converted(flattened, reference, specs, len(part.graph.node), scratch)
    places = selection.places(
        found,
        lambda part: _normalised(flat(part, scratch, large_bytes), scratch),
        lambda part: to_relax(part, scratch),
        scratch,
    )
    rows = found.selection.rows
    known = {spec.name: spec for part in functions.values() for spec in (*part.inputs, *part.outputs)}
    known[found.selection.selected] = TensorSpec(found.selection.selected, "int64", (rows, selection.COLUMNS))
    places[found.selection.selected] = Slab(0, 1)
    names = [value.name for value in folded.graph.output]
    outputs = tuple(known[name] for name in names)
    return Parts(
        functions,
        bound,
        outputs,
        nodes_before,
        1 + sum(part.nodes_after for part in functions.values()),
        Selected(
            found.selection, tuple(inputs), outputs, tuple(places.get(name) for name in names),
            write(found.rest, scratch),
        ),
    )  # fmt: skip


def _normalised(folded: ModelProto, scratch: Path) -> ModelProto:
    normalised = sum_to_add(normalise(quantized.real_products(folded, scratch), scratch))
    onnx_model.check_operators(normalised, folded=True, known=IMPORTED)
    return normalised


def _converted(
    folded: ModelProto, bound: Path, inputs: Sequence[TensorSpec], nodes_before: int, scratch: Path
) -> Imported:
    outputs = static_outputs(folded)
    normalised = _normalised(folded, scratch)
    try:
        with warnings.catch_warnings():
            # It tells of every input whose name is no identifier. Libraries take their inputs by position.
            warnings.filterwarnings("ignore", message="Renaming name")
            module = to_relax(normalised, scratch)
    except UnsupportedOperator:
        raise
    except Exception as error:  # the importer raises whatever its converters run into
        raise ImportFailed(f"TVM cannot import the model: {type(error).__name__}: {last_line(error)}") from error
    return Imported(module, bound, tuple(inputs), outputs, nodes_before, len(normalised.graph.node))


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
        why = last_line(error).replace(f"Load model from {whole} failed:", "")  # where it lies nobody can look
        raise ImportFailed(f"ONNX Runtime refuses the model: {why}") from error
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
