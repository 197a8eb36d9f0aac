"""Cuts a model at its NonMaxSuppression: what is computed before it, and what is done with each box that it selects.

How many boxes are selected the numbers decide; all else has shapes that are known. So what follows is compiled for as
many boxes as there may be, and the library cuts what it answers to as many as there were (`workers.graph.selected`).
That is right if each row of it is made of one selected box, and in the same way: `places` proves it, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import tvm
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from tuning_db.errors import UnsupportedOperator
from tuning_db.pieces import Slab
from workers.frontend import onnx_model
from workers.frontend.weights import array
from workers.graph import pipeline
from workers.graph.rows import RowsMixed, prove

#: Whatever is selected tells its batch, its class and its box.
COLUMNS: Final = 3
#: Of what is compiled behind a selection: more boxes would take more memory than any model means to.
_MOST_ROWS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Selection:
    """What a NonMaxSuppression does. Its tensors go by their names in the model."""

    boxes: str  #: float32 [batches, candidates, 4]
    scores: str  #: float32 [batches, classes, candidates]
    selected: str  #: int64 [rows, 3]
    batches: int
    classes: int
    candidates: int
    most: int  #: of a class that may be selected
    iou_threshold: float
    score_threshold: float | None
    centred: bool  #: boxes are (x centre, y centre, width, height), not two corners (y, x, y, x)

    @property
    def rows(self) -> int:
        """How many boxes may be selected."""
        return self.batches * self.classes * self.most


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in parts; one that would compute nothing is None. All share the names of the model's tensors."""

    head: ModelProto | None  #: answers what the selection, the tail and the model's outputs need
    selection: Selection
    tail: ModelProto | None  #: takes the selected boxes and answers the model's outputs that are made of them
    rest: ModelProto  #: the selection and the tail as they were, for the reference
    node: NodeProto
    opset: int


def cut(model: ModelProto, weights: Path) -> Cut | None:
    """The parts of a bound, flat model; None for one that selects nothing. UnsupportedOperator for what is not done."""
    opset = onnx_model.opset_of(model)
    node = onnx_model.selecting(model.graph, opset)
    if node is None:
        return None
    known = onnx.shape_inference.infer_shapes(model, data_prop=True)
    ports = {value.name: value for value in (*known.graph.value_info, *known.graph.input, *known.graph.output)}
    selection = _selection(model, node, ports, opset, weights)
    stored = {tensor.name for tensor in model.graph.initializer}
    behind, after = {selection.selected}, []
    for each in model.graph.node:
        if each is not node and behind & onnx_model.reads(each):
            behind.update(each.output)
            after.append(each)
    names = [value.name for value in model.graph.output]
    read = {name for each in after for name in onnx_model.reads(each)}
    wanted = dict.fromkeys(
        name
        for name in (*names, selection.boxes, selection.scores, *sorted(read))
        if name and name not in behind and (name in names or name not in stored)
    )
    inputs = [value.name for value in model.graph.input]
    before = _needed(model.graph.node, wanted)

    def port(name: str) -> ValueInfoProto:
        if name not in ports or not _static(ports[name]):
            raise onnx_model.unsupported(
                onnx_model.SELECTING, onnx_model.name_of(node), opset,
                f": the shape of {name!r}, which is used beside the selected boxes, depends on the data",
            )  # fmt: skip
        return ports[name]

    head = tail = None
    if before or stored & wanted.keys():
        head = _part(model, before, [], [port(name) for name in wanted if name not in inputs])
        head.graph.input.extend(ports[name] for name in inputs)  # all, as of the whole: what is fed to both is the same
    beside = [port(name) for name in wanted if name in read]
    answers = [ports[name] for name in names if name in behind]
    if after:
        selected = helper.make_tensor_value_info(selection.selected, TensorProto.INT64, (selection.rows, COLUMNS))
        made = [value for value in answers if value.name != selection.selected]
        tail = onnx.shape_inference.infer_shapes(_part(model, after, [selected, *beside], made), data_prop=True)
    chosen_from = [port(name) for name in (selection.boxes, selection.scores) if name not in read]
    rest = _part(model, [node, *after], [*chosen_from, *beside], answers)
    return Cut(head, selection, tail, rest, node, opset)


def _selection(
    model: ModelProto, node: NodeProto, ports: Mapping[str, ValueInfoProto], opset: int, weights: Path
) -> Selection:
    stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def refuse(why: str) -> UnsupportedOperator:
        return onnx_model.unsupported(onnx_model.SELECTING, onnx_model.name_of(node), opset, f": {why}")

    def constant(place: int, what: str) -> float | None:
        name = node.input[place] if place < len(node.input) else ""
        if not name:
            return None
        if name not in stored:
            raise refuse(f"its {what}, {name!r}, is computed; make it a constant of the model")
        return float(array(stored[name], weights).reshape(-1)[0])

    shapes = []
    for name in node.input[:2]:
        if name in stored:
            raise refuse(f"{name!r} is a constant; select its boxes before the model is exported")
        if name not in ports or not _static(ports[name]):
            raise refuse(f"the shape of {name!r} depends on the data")
        shapes.append(tuple(dim.dim_value for dim in ports[name].type.tensor_type.shape.dim))
    (batches, candidates, _), (_, classes, _) = shapes
    most = min(int(constant(2, "max_output_boxes_per_class") or 0), candidates)
    iou_threshold = constant(3, "iou_threshold") or 0.0
    if most < 1:
        raise refuse("its max_output_boxes_per_class is 0, so that it selects nothing")
    if not 0 <= iou_threshold <= 1:
        raise refuse(f"its iou_threshold is {iou_threshold:g}, and lies in [0, 1] by the standard")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    selection = Selection(
        node.input[0], node.input[1], node.output[0], batches, classes, candidates, most, iou_threshold,
        constant(4, "score_threshold"), bool(attributes.get("center_point_box", 0)),
    )  # fmt: skip
    if selection.rows > _MOST_ROWS:
        raise refuse(
            f"it may select {selection.rows} boxes, and {_MOST_ROWS} are done at most; lower its "
            "max_output_boxes_per_class"
        )
    return selection


def _needed(nodes: Iterable[NodeProto], wanted: Iterable[str]) -> list[NodeProto]:
    """The nodes that compute what is wanted, in their order."""
    names, found = set(wanted), []
    for node in reversed(list(nodes)):
        if names & set(node.output):
            names |= onnx_model.reads(node)
            found.append(node)
    return found[::-1]


def _part(
    model: ModelProto, nodes: Sequence[NodeProto], inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> ModelProto:
    read = {name for node in nodes for name in onnx_model.reads(node)} | {value.name for value in outputs}
    part = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = model.graph.name
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    part.graph.input.extend(value for value in inputs if value.name in read)
    part.graph.output.extend(outputs)
    for value in part.graph.output:
        if not _static(value):
            value.type.tensor_type.ClearField("shape")
    return part


def of_rows(tail: ModelProto, selected: str, rows: int) -> ModelProto:
    """The tail for another number of selected boxes."""
    other = ModelProto()
    other.CopyFrom(tail)
    del other.graph.value_info[:]
    for value in other.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in other.graph.input:
        if value.name == selected:
            value.type.tensor_type.shape.dim[0].dim_value = rows
    return other


def places(
    found: Cut,
    normalised: Callable[[ModelProto], ModelProto],
    to_relax: Callable[[ModelProto], tvm.ir.IRModule],
    weights: Path,
) -> dict[str, Slab]:
    """Where in each of the tail's outputs a selected box has its numbers; one that has none of any is left out.

    UnsupportedOperator if it could not be shown that the tail computes each row from one selected box alone, whatever
    row it is and however many there are. It is looked at for two numbers of boxes, which are no number of the model:
    the constants of both, but shapes and what is the same for all rows, must be equal.
    """
    if found.tail is None:
        return {}
    rows = found.selection.rows + 1
    first, second = (normalised(of_rows(found.tail, found.selection.selected, r)) for r in (rows, rows + 1))

    def refuse(why: str) -> UnsupportedOperator:
        return onnx_model.unsupported(
            onnx_model.SELECTING, onnx_model.name_of(found.node), found.opset,
            f": of what follows it, it could not be shown that each row is made of one selected box: {why}; end the "
            "model before that, and do it in the program that runs the library",
        )  # fmt: skip

    if (why := _counted(first, second, rows, weights)) is not None:
        raise refuse(why)
    module = to_relax(first)
    target = tvm.target.Target("llvm")
    with target, pipeline.pass_context():
        lowered = pipeline.lower_operators()(pipeline.simplify()(module))
    axes = [0 if value.name == found.selection.selected else None for value in first.graph.input]
    try:
        slabs = prove(lowered, axes, rows)
    except RowsMixed as error:
        raise refuse(str(error)) from None
    return {value.name: slab for value, slab in zip(first.graph.output, slabs, strict=True) if slab is not None}


def _counted(first: ModelProto, second: ModelProto, rows: int, weights: Path) -> str | None:
    """What depends on how many rows there are, of a model for `rows` and one for one more; None if nothing does."""
    if [node.op_type for node in first.graph.node] != [node.op_type for node in second.graph.node]:
        return "it is computed otherwise for another number of boxes"
    one, other = ({tensor.name: tensor for tensor in each.graph.initializer} for each in (first, second))
    for node, twin in zip(first.graph.node, second.graph.node, strict=True):
        if [a.SerializeToString() for a in node.attribute] != [a.SerializeToString() for a in twin.attribute]:
            return f"node {onnx_model.name_of(node)!r} depends on how many boxes are selected"
        for place, (name, named) in enumerate(zip(node.input, twin.input, strict=True)):
            if place in onnx_model.SHAPES_FROM.get(node.op_type, ()) or name not in one or named not in other:
                continue
            if not _alike(array(one[name], weights), array(other[named], weights), rows):
                return f"node {onnx_model.name_of(node)!r} computes with how many boxes are selected"
    for value in first.graph.output:
        if value.name in one:
            return f"output {value.name!r} tells how many boxes are selected"
    return None


def _alike(a: NDArray[Any], b: NDArray[Any], rows: int) -> bool:
    """Whether two constants are equal, or hold the same for each row."""
    if a.dtype != b.dtype or a.ndim != b.ndim:
        return False
    differing = [axis for axis in range(a.ndim) if a.shape[axis] != b.shape[axis]]
    if not differing:
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    [axis, *more] = differing
    if more or (a.shape[axis], b.shape[axis]) != (rows, rows + 1):
        return False
    row = a.take([0], axis)
    return all(np.array_equal(x, np.broadcast_to(row, x.shape), equal_nan=a.dtype.kind == "f") for x in (a, b))


def _static(value: ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and all(d.HasField("dim_value") and d.dim_value > 0 for d in tensor.shape.dim)
