"""Queries, keys and values as one matrix product: products of one tensor with several constant matrices become the
product with all of them beside each other.

What follows is split into columns again, which costs nothing where attention reads its heads from the rows themselves
(`workers.graph.blocked`); other products are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.ir.expr import GenericConst

from workers.graph.algebra import Rewriting, array_of, is_plain, name_of, number_of, shape_of
from workers.graph.folding import leading_affine
from workers.graph.pointwise import VALUE, Ref, Step

#: Rows so many bytes apart fall into the same sets of a cache: none are made that were not before.
_PAGE_BYTES: Final = 4096
_CUTS: Final = ([0, 2, 1, 3], [0, 2, 3, 1])


@dataclass(frozen=True, slots=True)
class _Branch:
    """A product with constants, scaled and shifted, whose columns are cut into heads of `size`."""

    product: Any
    cut: Any  #: the variable of a row's columns as heads
    weight: NDArray[np.float32]
    scale: NDArray[np.float64]
    shift: NDArray[np.float64]
    size: int


@tvm.transform.module_pass(opt_level=0, name="MergeProjections")
class MergeProjections:
    """The pass. A `main` that is not one dataflow block stays as it is."""

    def transform_module(self, module: tvm.ir.IRModule, _context: Any) -> tvm.ir.IRModule:
        if not is_plain(module):
            return module
        groups = _groups(module["main"])
        if not groups:
            return module
        begins = {branches[0].product: branches for branches in groups}
        parts: dict[Any, Any] = {}

        def change(rewriting: Rewriting, variable: Any, result: Any, call: relax.Call) -> Any:
            if variable in begins:
                branches = begins[variable]
                whole = _merged(rewriting, call.args[0], branches)
                ends = np.cumsum([branch.weight.shape[1] for branch in branches])[:-1]
                split = rewriting.emit(relax.op.split(whole, [int(end) for end in ends], axis=-1))
                for index, branch in enumerate(branches):
                    part = rewriting.emit(relax.TupleGetItem(split, index))
                    parts[branch.cut] = rewriting.emit(relax.op.reshape(part, shape_of(branch.cut)))
            return parts.get(variable, result)

        return Rewriting(module).rewritten(change)


def _merged(rewriting: Rewriting, data: Any, branches: list[_Branch]) -> Any:
    whole = rewriting.emit(relax.op.matmul(data, relax.const(np.hstack([b.weight for b in branches]))))
    scale, shift = (np.concatenate(rows) for rows in zip(*((b.scale, b.shift) for b in branches), strict=True))
    if np.any(scale != 1):
        whole = rewriting.emit(relax.op.multiply(whole, relax.const(scale.astype("float32"))))
    if np.any(shift):
        whole = rewriting.emit(relax.op.add(whole, relax.const(shift.astype("float32"))))
    return whole


def _groups(main: relax.Function) -> list[list[_Branch]]:
    """Branches of the same tensor and size of a head, at least two."""
    bindings = list(main.body.blocks[0].bindings)
    uses: dict[Any, list[Any]] = {binding.var: [] for binding in bindings}
    for binding in bindings:
        for variable in _read(binding.value):
            uses.setdefault(variable, []).append(binding)
    for variable in _read(main.body.body):
        uses.setdefault(variable, []).append(None)  # what is given out must stay
    found: dict[tuple[Any, int], list[_Branch]] = {}
    for binding in bindings:
        branch = _branch(binding, uses)
        if branch is not None:
            found.setdefault((binding.value.args[0], branch.size), []).append(branch)
    return [branches for branches in found.values() if len(branches) > 1 and _pays(branches)]


def _pays(branches: list[_Branch]) -> bool:
    widths = [branch.weight.shape[1] for branch in branches]
    return 4 * sum(widths) % _PAGE_BYTES != 0 or all(4 * width % _PAGE_BYTES == 0 for width in widths)


def _branch(binding: Any, uses: dict[Any, list[Any]]) -> _Branch | None:
    """The branch that begins with this product, if it is one whose parts nothing else reads."""
    if name_of(binding.value) != "matmul":
        return None
    data, weight = binding.value.args[0], array_of(binding.value.args[1])
    shape = shape_of(binding.var)
    if not isinstance(data, relax.Var) or weight is None or weight.ndim != 2 or weight.dtype != np.float32 or not shape:
        return None
    columns = shape[-1]
    steps: list[Step] = []
    operands: list[Any] = []
    last, reader = binding.var, _only(uses[binding.var])
    while reader is not None:
        given = shape_of(reader.var)
        if name_of(reader.value) == "reshape" and given is not None and given[-1:] == shape[-1:]:
            last, reader, shape = reader.var, _only(uses[reader.var]), given
            continue
        if name_of(reader.value) not in ("add", "subtract", "multiply", "divide") or given != shape:
            break
        previous: Ref = ("step", len(steps) - 1) if steps else VALUE
        references: list[Ref] = []
        for argument in reader.value.args:
            number = number_of(argument)
            if argument.same_as(last):
                references.append(previous)
            elif number is not None:
                references.append(("number", number))
            elif _is_row(argument, columns):
                references.append(("input", len(operands)))
                operands.append(argument)
            else:
                return None
        steps.append(Step(name_of(reader.value), tuple(references)))
        last, reader = reader.var, _only(uses[reader.var])
    heads = None if reader is None or name_of(reader.value) != "reshape" else shape_of(reader.var)
    if reader is None or heads is None or len(heads) != 4 or heads[2] * heads[3] != columns:
        return None
    if not uses[reader.var] or not all(_is_cut(use, uses) for use in uses[reader.var]):
        return None
    count, scale, shift = leading_affine(steps, operands, columns)
    return _Branch(binding.var, reader.var, weight, scale, shift, heads[3]) if count == len(steps) else None


def _only(readers: list[Any]) -> Any:
    return readers[0] if len(readers) == 1 else None


def _is_row(expression: Any, columns: int) -> bool:
    array = array_of(expression)
    return array is not None and array.dtype == np.float32 and array.size == columns == array.shape[-1]


def _is_cut(binding: Any, uses: dict[Any, list[Any]]) -> bool:
    """Whether this makes of rows a matrix for each head, which nothing but products of two such reads."""
    if binding is None or name_of(binding.value) != "permute_dims" or binding.value.attrs.axes is None:
        return False
    if [int(axis) for axis in binding.value.attrs.axes] not in _CUTS:
        return False
    return all(
        reader is not None
        and name_of(reader.value) == "matmul"
        and not any(isinstance(argument, GenericConst) for argument in reader.value.args)
        for reader in uses[binding.var]
    )


def _read(expression: Any) -> list[Any]:
    """The variables that it reads."""
    if isinstance(expression, relax.Var):
        return [expression]
    if isinstance(expression, relax.Tuple):
        return [variable for item in expression.fields for variable in _read(item)]
    if isinstance(expression, relax.TupleGetItem):
        return _read(expression.tuple_value)
    if isinstance(expression, relax.Call):
        return [variable for argument in expression.args for variable in _read(argument)]
    return []
