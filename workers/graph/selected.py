"""A NonMaxSuppression as loops, and the function of a library that joins it with the parts of the model around it.

The boxes of a class are chosen as ONNX Runtime does it: the one with the highest score, of equal ones the first; then
those that overlap it too much are out; and so on. Classes are independent of each other, so all cores take part.
"""

from __future__ import annotations

import textwrap
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
    "y": ("T.min(boxes[{b}, {i}, 0], boxes[{b}, {i}, 2])", "T.max(boxes[{b}, {i}, 0], boxes[{b}, {i}, 2])"),
    "x": ("T.min(boxes[{b}, {i}, 1], boxes[{b}, {i}, 3])", "T.max(boxes[{b}, {i}, 1], boxes[{b}, {i}, 3])"),
}
_CENTRED: Final = {
    "y": tuple("boxes[{b}, {i}, 1] " + sign + " boxes[{b}, {i}, 3] / T.float32(2)" for sign in "-+"),
    "x": tuple("boxes[{b}, {i}, 0] " + sign + " boxes[{b}, {i}, 2] / T.float32(2)" for sign in "-+"),
}


def choose(selection: Selection) -> tirx.PrimFunc:
    """`main(boxes, scores, heap, chosen, counts)`: the chosen boxes of each class of each batch, int32 [batches *
    classes, most], the best first, and how many there are, int32 [batches * classes]. `heap` is for its own use.

    A heap hands out the candidates of a class by their scores; each is compared with those that were chosen before it.
    """
    each = selection.batches * selection.classes
    scores = f"scores[each // {selection.classes}, each % {selection.classes}, {{}}]"
    is_candidate = "T.bool(True)"
    if selection.score_threshold is not None:
        is_candidate = f"{scores.format('i')} > {_float(selection.score_threshold)}"

    def ahead(one: str, other: str) -> str:
        a, b = (scores.format(f"heap[each, {place}]") for place in (one, other))
        return f"{a} > {b} or ({a} == {b} and heap[each, {one}] < heap[each, {other}])"

    def sift(indent: int) -> str:
        """Let what lies at `place` sink to where it belongs."""
        lines = f"""
while place[0] < size[0]:
    child[0] = 2 * place[0] + 1
    if child[0] + 1 < size[0]:
        if {ahead("child[0] + 1", "child[0]")}:
            child[0] = child[0] + 1
    last[0] = size[0]
    if child[0] < size[0]:
        if {ahead("child[0]", "place[0]")}:
            kept[0] = heap[each, child[0]]
            heap[each, child[0]] = heap[each, place[0]]
            heap[each, place[0]] = kept[0]
            last[0] = child[0]
    place[0] = last[0]
"""
        return textwrap.indent(lines, " " * indent)

    return tvm.script.from_source(
        f"""
@T.prim_func(s_tir=True)
def main(boxes: T.Buffer(({selection.batches}, {selection.candidates}, 4), "float32"),
         scores: T.Buffer(({selection.batches}, {selection.classes}, {selection.candidates}), "float32"),
         heap: T.Buffer(({each}, {selection.candidates}), "int32"),
         chosen: T.Buffer(({each}, {selection.most}), "int32"),
         counts: T.Buffer(({each},), "int32")):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    for each in T.parallel({each}):
        size = T.sblock_alloc_buffer((1,), "int32", scope="local")
        place = T.sblock_alloc_buffer((1,), "int32", scope="local")
        child = T.sblock_alloc_buffer((1,), "int32", scope="local")
        last = T.sblock_alloc_buffer((1,), "int32", scope="local")
        kept = T.sblock_alloc_buffer((1,), "int32", scope="local")
        count = T.sblock_alloc_buffer((1,), "int32", scope="local")
        seen = T.sblock_alloc_buffer((1,), "int32", scope="local")
        size[0] = 0
        for i in range({selection.candidates}):
            if {is_candidate}:
                heap[each, size[0]] = i
                size[0] = size[0] + 1
        for i in range(size[0] // 2):
            place[0] = size[0] // 2 - 1 - i
{sift(12)}
        count[0] = 0
        while size[0] > 0 and count[0] < {selection.most}:
            box: T.int32 = heap[each, 0]
            size[0] = size[0] - 1
            heap[each, 0] = heap[each, size[0]]
            place[0] = 0
{sift(12)}
{_corners("box", "box", selection, 12)}
            box_area: T.float32 = (box_x_high - box_x_low) * (box_y_high - box_y_low)
            seen[0] = 0
            while seen[0] < count[0]:
                better: T.int32 = chosen[each, seen[0]]
{_corners("better", "better", selection, 16)}
                better_area: T.float32 = (better_x_high - better_x_low) * (better_y_high - better_y_low)
                width: T.float32 = T.min(box_x_high, better_x_high) - T.max(box_x_low, better_x_low)
                height: T.float32 = T.min(box_y_high, better_y_high) - T.max(box_y_low, better_y_low)
                common: T.float32 = width * height
                union: T.float32 = better_area + box_area - common
                seen[0] = seen[0] + 1
                if width > T.float32(0) and height > T.float32(0) and common > T.float32(0):
                    if better_area > T.float32(0) and box_area > T.float32(0) and union > T.float32(0):
                        if common / union > {_float(selection.iou_threshold)}:
                            seen[0] = {selection.most + 1}
            if seen[0] <= {selection.most}:
                chosen[each, count[0]] = box
                count[0] = count[0] + 1
        counts[each] = count[0]
"""
    )


def _corners(name: str, index: str, selection: Selection, indent: int) -> str:
    """Where the box begins and ends along both axes, as numbers called after it."""
    batch = f"each // {selection.classes}"
    lines = [
        f"{name}_{axis}_{end}: T.float32 = {place.format(b=batch, i=index)}"
        for axis, ends in (_CENTRED if selection.centred else _CORNERS).items()
        for end, place in zip(("low", "high"), ends, strict=True)
    ]
    return textwrap.indent("\n".join(lines), " " * indent)


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
