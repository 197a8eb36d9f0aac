"""A NonMaxSuppression as loops, and the function of a library that joins it with the parts of the model around it.

The boxes of a class are chosen as ONNX Runtime does it: the one with the highest score, of equal ones the first; then
those that overlap it too much are out; and so on. Classes are independent of each other, so all cores take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
import tvm.script
from tvm import relax, te, tirx

from tuning_db.keys import TensorSpec
from workers.frontend.onnx_import import HEAD, TAIL, WHOLE, Imported, Selected
from workers.frontend.selection import COLUMNS, Selection

#: Where each coordinate of a box begins and ends: of two corners in any order, or of a centre and sizes.
_CORNERS: Final = {
    "y": ("T.min({box}[{b}, {i}, 0], {box}[{b}, {i}, 2])", "T.max({box}[{b}, {i}, 0], {box}[{b}, {i}, 2])"),
    "x": ("T.min({box}[{b}, {i}, 1], {box}[{b}, {i}, 3])", "T.max({box}[{b}, {i}, 1], {box}[{b}, {i}, 3])"),
}
_CENTRED: Final = {
    "y": tuple("{box}[{b}, {i}, 1] " + sign + " {box}[{b}, {i}, 3] / T.float32(2)" for sign in "-+"),
    "x": tuple("{box}[{b}, {i}, 0] " + sign + " {box}[{b}, {i}, 2] / T.float32(2)" for sign in "-+"),
}


def choose(selection: Selection) -> tirx.PrimFunc:
    """`main(boxes, scores, left, chosen, counts)`: the chosen boxes of each class of each batch, int32 [batches *
    classes, most], the best first, and how many there are, int32 [batches * classes]. `left` is for its own use."""
    each = selection.batches * selection.classes
    places = _CENTRED if selection.centred else _CORNERS
    batch = f"each // {selection.classes}"
    lines = []
    for box, index in (("best", "best"), ("other", "candidate")):
        for axis, ends in places.items():
            for end, place in zip(("low", "high"), ends, strict=True):
                lines.append(f"{box}_{axis}_{end}: T.float32 = {place.format(box='boxes', b=batch, i=index)}")
    of_best, of_other = ("\n".join(f"{' ' * indent}{line}" for line in part)
                         for indent, part in ((16, lines[:4]), (20, lines[4:])))  # fmt: skip
    score = f"scores[{batch}, each % {selection.classes}, {{}}]"
    is_candidate = "T.bool(True)"
    if selection.score_threshold is not None:
        is_candidate = f"{score.format('i')} > {_float(selection.score_threshold)}"
    return tvm.script.from_source(
        f"""
@T.prim_func(s_tir=True)
def main(boxes: T.Buffer(({selection.batches}, {selection.candidates}, 4), "float32"),
         scores: T.Buffer(({selection.batches}, {selection.classes}, {selection.candidates}), "float32"),
         left: T.Buffer(({each}, {selection.candidates}), "int32"),
         chosen: T.Buffer(({each}, {selection.most}), "int32"),
         counts: T.Buffer(({each},), "int32")):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    for each in T.parallel({each}):
        size = T.sblock_alloc_buffer((1,), "int32", scope="local")
        place = T.sblock_alloc_buffer((1,), "int32", scope="local")
        size[0] = 0
        for i in range({selection.candidates}):
            if {is_candidate}:
                left[each, size[0]] = i
                size[0] = size[0] + 1
        counts[each] = 0
        for step in range({selection.most}):
            if size[0] > 0:
                place[0] = 0
                for i in range(size[0]):
                    if {score.format("left[each, i]")} > {score.format("left[each, place[0]]")}:
                        place[0] = i
                best: T.int32 = left[each, place[0]]
                chosen[each, step] = best
                counts[each] = step + 1
{of_best}
                best_area: T.float32 = (best_x_high - best_x_low) * (best_y_high - best_y_low)
                before: T.int32 = size[0]
                size[0] = 0
                for i in range(before):
                    candidate: T.int32 = left[each, i]
{of_other}
                    other_area: T.float32 = (other_x_high - other_x_low) * (other_y_high - other_y_low)
                    width: T.float32 = T.min(best_x_high, other_x_high) - T.max(best_x_low, other_x_low)
                    height: T.float32 = T.min(best_y_high, other_y_high) - T.max(best_y_low, other_y_low)
                    common: T.float32 = width * height
                    union: T.float32 = best_area + other_area - common
                    overlap: T.bool = (
                        width > T.float32(0) and height > T.float32(0) and common > T.float32(0)
                        and best_area > T.float32(0) and other_area > T.float32(0) and union > T.float32(0)
                        and common / union > {_float(selection.iou_threshold)}
                    )
                    if candidate != best and not overlap:
                        left[each, size[0]] = candidate
                        size[0] = size[0] + 1
"""
    )


def collect(selection: Selection) -> tirx.PrimFunc:
    """`main(chosen, counts, selected, count)`: (batch, class, box) of each that was chosen, int64 [rows, 3], behind
    them zeros, and how many there are, int64 [1]."""
    each, classes = selection.batches * selection.classes, selection.classes
    return tvm.script.from_source(
        f"""
@T.prim_func(s_tir=True)
def main(chosen: T.Buffer(({each}, {selection.most}), "int32"), counts: T.Buffer(({each},), "int32"),
         selected: T.Buffer(({selection.rows}, {COLUMNS}), "int64"), count: T.Buffer((1,), "int64")):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    size = T.sblock_alloc_buffer((1,), "int32", scope="local")
    size[0] = 0
    for each in range({each}):
        for step in range(counts[each]):
            selected[size[0], 0] = T.Cast("int64", each // {classes})
            selected[size[0], 1] = T.Cast("int64", each % {classes})
            selected[size[0], 2] = T.Cast("int64", chosen[each, step])
            size[0] = size[0] + 1
    count[0] = T.Cast("int64", size[0])
    for row in range({selection.rows}):
        if row >= size[0]:
            for column in range({COLUMNS}):
                selected[row, column] = T.int64(0)
"""
    )


def _float(number: float) -> str:
    return f'T.float32("{float(np.float32(number))!r}")'


def first_of(spec: TensorSpec, axis: int) -> tirx.PrimFunc:
    """`main(all, few)`: the begin of a tensor along an axis, as far as `few` goes."""
    size = tirx.Var("size", "int64")
    every = te.placeholder(tuple(tirx.IntImm("int64", each) for each in spec.shape), spec.dtype, "every")
    shape = [size if place == axis else each for place, each in enumerate(every.shape)]
    return te.create_prim_func([every, te.compute(shape, lambda *index: every(*index), "few")])


def joined(module: tvm.ir.IRModule, parts: Mapping[str, Imported], selected: Selected) -> tvm.ir.IRModule:
    """`module`, which has the function of each part, with the model's own function."""
    selection = selected.selection
    builder = relax.BlockBuilder(module)
    known: dict[str, Any] = {
        spec.name: relax.Var(f"input_{index}", _type(spec)) for index, spec in enumerate(selected.inputs)
    }
    each = selection.batches * selection.classes

    def run(part: str) -> None:
        if part in parts:
            result = builder.emit(
                relax.Call(module.get_global_var(part), [known[spec.name] for spec in parts[part].inputs])
            )
            outputs = parts[part].outputs
            for index, spec in enumerate(outputs):
                known[spec.name] = result if len(outputs) == 1 else builder.emit(relax.TupleGetItem(result, index))

    def kernel(function: tirx.PrimFunc, name: str, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        variable = builder.add_func(function.with_attr("global_symbol", name), name)
        return builder.emit(relax.call_tir(variable, list(arguments), list(results)))

    with builder.function(WHOLE, [known[spec.name] for spec in selected.inputs]):
        run(HEAD)
        chosen = kernel(
            choose(selection), "choose_boxes", [known[selection.boxes], known[selection.scores]],
            [relax.TensorType([each, selection.candidates], "int32"),
             relax.TensorType([each, selection.most], "int32"), relax.TensorType([each], "int32")],
        )  # fmt: skip
        collected = kernel(
            collect(selection), "collect_boxes", [relax.TupleGetItem(chosen, 1), relax.TupleGetItem(chosen, 2)],
            [relax.TensorType([selection.rows, COLUMNS], "int64"), relax.TensorType([1], "int64")],
        )  # fmt: skip
        known[selection.selected] = builder.emit(relax.TupleGetItem(collected, 0))
        count = tirx.Var("count", "int64")
        shape = builder.emit(relax.op.tensor_to_shape(builder.emit(relax.TupleGetItem(collected, 1))))
        builder.match_cast(shape, relax.ShapeType([count]))
        run(TAIL)
        results = []
        for spec, slab in zip(selected.outputs, selected.slabs, strict=True):
            result = known[spec.name]
            if slab is not None:
                few = [count * slab.length if axis == slab.axis else size for axis, size in enumerate(spec.shape)]
                result = kernel(first_of(spec, slab.axis), "first_boxes", [result], [relax.TensorType(few, spec.dtype)])
            results.append(result)
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.get()


def _type(spec: TensorSpec) -> Any:
    return relax.TensorType(list(spec.shape), spec.dtype)
