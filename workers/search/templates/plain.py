"""Reads PrimFuncs that are made of ordinary loop nests, and says which template schedules them.

Everything is taken from the function itself: equal functions give equal answers. What is not understood is not
guessed at: such a nest has no `Stage`, and the generic template leaves it as it is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx

from workers.search.templates.knobs import Geometry

#: Calls and divisions: what costs many times an addition.
_EXPENSIVE: Final = frozenset(
    f"tirx.{name}"
    for name in ("exp", "exp2", "exp10", "log", "log2", "log10", "erf", "tanh", "sigmoid", "sqrt", "rsqrt", "pow",
                 "sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh")
)  # fmt: skip
#: A stage of at most this many operations is computed again wherever it is read, rather than stored.
_CHEAP: Final = 2
#: Rows shorter than this are not worth vectorising along: the generic template does as well.
_SHORTEST_ROW: Final = 8
#: Additions and the like below which starting threads costs more than they save.
SERIAL_WORK: Final = 150_000
#: An iteration's cost in these units: an addition 1, a call or division about this much.
EXPENSIVE_COST: Final = 8


@dataclass(frozen=True, slots=True)
class Access:
    """A buffer and the index expressions at which it is read or written."""

    buffer: Any
    indices: tuple[Any, ...]

    def coefficients(self, variables: Sequence[Any]) -> list[int] | None:
        """By how many elements the address moves as each variable grows by one; None if that is not constant."""
        flat: Any = tirx.const(0, self.indices[0].ty) if self.indices else tirx.const(0, "int64")
        stride = 1
        for index, size in zip(reversed(self.indices), reversed(self.buffer.shape), strict=True):
            if not isinstance(size, tirx.IntImm):
                return None
            flat = flat + index * stride
            stride *= int(size)
        found = sym.detect_linear_equation(flat, list(variables))
        values = [sym.Analyzer().simplify(value) for value in list(found)[: len(variables)]]
        if len(values) < len(variables) or not all(isinstance(value, tirx.IntImm) for value in values):
            return None
        return [int(value) for value in values]


@dataclass(frozen=True, slots=True)
class Stage:
    """One loop nest around one block that stores one number an iteration; every loop is one of the block's axes."""

    name: str
    extents: tuple[int, ...]  #: of the loops, outermost first
    kinds: str  #: S (spatial) or R (reduction) for each loop
    variables: tuple[Any, ...]  #: the block's, in the order of the loops
    written: Access
    read: tuple[Access, ...]  #: the accumulator itself left out
    value: Any  #: what is stored
    expensive: int  #: calls and divisions in `value`
    operations: int  #: nodes of `value`

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(e for e, kind in zip(self.extents, self.kinds, strict=True) if kind == "S")

    @property
    def reduced(self) -> tuple[int, ...]:
        return tuple(e for e, kind in zip(self.extents, self.kinds, strict=True) if kind == "R")

    @property
    def iterations(self) -> int:
        return math.prod(self.extents)

    @property
    def conditional(self) -> bool:
        """Whether what is stored depends on a condition, as padding and concatenation do."""
        return any(
            isinstance(node, tirx.Select)
            or (isinstance(node, tvm.ir.Call) and str(getattr(node.op, "name", "")) == "prim.if_then_else")
            for node in nodes(self.value)
        )

    def step_of_last(self) -> int | None:
        """How far, at most, an address that is read moves as the last spatial axis grows by one; None if it varies."""
        last = self.variables[len(self.spatial) - 1]
        steps = [access.coefficients([last]) for access in self.read]
        return None if any(step is None for step in steps) else max((abs(s[0]) for s in steps if s), default=0)

    def crossing(self) -> int | None:
        """The loop that walks through what is read where the innermost one does not: the other side of a transpose."""
        for access in self.read:
            steps = access.coefficients(self.variables)
            if steps is not None and steps[-1] not in (0, 1) and 1 in steps:
                return steps.index(1)
        return None

    def contiguous(self, kind: str) -> int:
        """How many of the innermost loops of one kind run over adjacent addresses as one loop would.

        Every access must either not depend on them at all or walk through memory in their order without a gap, and the
        value must use them in indices alone (a condition on one would have to divide to get it back).
        """
        positions = [i for i, k in enumerate(self.kinds) if k == kind]
        outside = _used_outside_indices(self.value)
        accesses = (*self.read, self.written) if kind == "S" else self.read
        count = 0
        for taken in range(1, len(positions) + 1):
            chosen = positions[-taken:]
            if any(self.variables[i] in outside for i in chosen):
                break
            if not all(self._walks(access, chosen) for access in accesses):
                break
            count = taken
        return count

    def _walks(self, access: Access, chosen: Sequence[int]) -> bool:
        steps = access.coefficients([self.variables[i] for i in chosen])
        if steps is None:
            return False
        expected = 1
        wanted: list[int] = []
        for i in reversed(chosen):
            # The step along an axis of extent 1 is never taken.
            wanted.insert(0, expected)
            expected *= self.extents[i]
        pairs = [(s, w) for s, w, i in zip(steps, wanted, chosen, strict=True) if self.extents[i] > 1]
        return all(s == 0 for s, _ in pairs) or all(s == w for s, w in pairs)


@dataclass(frozen=True, slots=True)
class Rows:
    """A function whose reductions all run along rows. `leading[i]` loops of stage i count the rows."""

    stages: tuple[Stage, ...]
    leading: tuple[int, ...]
    extents: tuple[int, ...]  #: of the axes that count the rows, those of extent 1 left out

    @property
    def count(self) -> int:
        return math.prod(self.extents)

    @property
    def length(self) -> int:
        return max(math.prod(stage.reduced) for stage in self.stages)


def nests(function: tirx.PrimFunc) -> list[tuple[str, Stage | None]]:
    """The names of the blocks under the root block in order, each with its stage, None for one that has none.

    A nest of several blocks gives each of them without a stage. Empty if the function has no root block.
    """
    body = function.body
    if not isinstance(body, s_tir.SBlockRealize):
        return []
    found: list[tuple[str, Stage | None]] = []
    statement = body.block.body
    for nest in statement.seq if isinstance(statement, tirx.SeqStmt) else [statement]:
        stage = _stage(nest)
        if stage is not None:
            found.append((stage.name, stage))
        else:
            found.extend((str(node.block.name_hint), None) for node in _outermost_blocks(nest))
    return found


def rows_of(function: tirx.PrimFunc) -> Rows | None:
    """The function's rows, or None if its reductions do not run along common rows."""
    found = [stage for _, stage in nests(function)]
    stages = tuple(stage for stage in found if stage is not None)
    if not stages or len(stages) < len(found):
        return None
    reductions = [stage for stage in stages if stage.reduced]
    parameters = set(function.params)
    outputs = [stage for stage in stages if stage.written.buffer in parameters]
    if not reductions or outputs != [stages[-1]]:
        return None
    extents = tuple(e for e in reductions[0].spatial if e > 1)
    leading = []
    for stage in stages:
        count = _leading(stage, extents)
        if count is None:
            return None
        if stage.reduced and stage.contiguous("R") < len(stage.reduced):
            return None
        leading.append(count)
    rows = Rows(stages, tuple(leading), extents)
    return rows if rows.length >= _SHORTEST_ROW and _stays_in_row(rows) else None


def readers(stages: Sequence[Stage], stage: Stage) -> list[Stage]:
    """The stages that read what `stage` writes."""
    return [r for r in stages if any(access.buffer.same_as(stage.written.buffer) for access in r.read)]


def inline_elementwise(schedule: Any, *, padding: bool) -> None:
    """Compute elementwise stages where they are read, unless that computes something costly many times.

    `padding`: also those that pad what a reduction reads, which puts a condition into its innermost loop.
    """
    for name, _ in nests(schedule.mod["main"]):
        stages = [stage for _, stage in nests(schedule.mod["main"]) if stage is not None]
        stage = next((stage for stage in stages if stage.name == name), None)
        if stage is None or stage.reduced:
            continue
        reading = readers(stages, stage)
        if stage.conditional and any(reader.reduced for reader in reading):
            wanted = padding
        else:
            uses = sum(access.buffer.same_as(stage.written.buffer) for r in reading for access in r.read)
            once = uses == 1 and all(reader.iterations <= stage.iterations for reader in reading)
            wanted = once or (stage.expensive == 0 and stage.operations <= _CHEAP)
        if wanted:
            with contextlib.suppress(s_tir.ScheduleError):  # an output, or read by a nest that is not understood
                schedule.compute_inline(schedule.get_sblock(name))


def plain_template(function: tirx.PrimFunc) -> tuple[str, Geometry]:
    """The template for a function that has no other: `rowwise` or `generic`, and its geometry.

    Both templates inline first, so what is told here is told of the function with cheap stages inlined.
    """
    schedule = s_tir.Schedule(function)
    inline_elementwise(schedule, padding=False)
    [inlined] = schedule.mod.functions.values()
    rows = rows_of(inlined)
    found = nests(inlined)
    stages = [stage for _, stage in found if stage is not None]
    geometry = {
        "blocks": len(found),
        "stages": len(stages),
        "iterations": sum(stage.iterations for stage in stages),
        "expensive": sum(stage.expensive * stage.iterations for stage in stages),
        "operations": sum(stage.operations * stage.iterations for stage in stages),
        "bytes": parameter_bytes(function),
    }
    if rows is not None:
        return "rowwise", {
            **geometry,
            "rows": rows.count,
            "row": rows.length,
            "last": rows.extents[-1] if rows.extents else 1,
            "reductions": sum(1 for stage in rows.stages if stage.reduced),
        }
    heaviest = max(stages, key=lambda stage: stage.iterations * (1 + stage.operations), default=None)
    return "generic", {
        **geometry,
        "outer": math.prod(heaviest.spatial[:-1]) if heaviest else 1,
        "inner": heaviest.spatial[-1] if heaviest and heaviest.spatial else 1,
        "contiguous": _contiguous_length(heaviest) if heaviest else 1,
        "reduced": math.prod(heaviest.reduced) if heaviest else 1,
        "padded": int(any(stage.conditional for stage in stages) and any(stage.reduced for stage in stages)),
        "transposed": int(any(not stage.reduced and stage.crossing() is not None for stage in stages)),
    }


def _contiguous_length(stage: Stage) -> int:
    count = stage.contiguous("S")
    return math.prod(stage.spatial[len(stage.spatial) - count :])


def parameter_bytes(function: tirx.PrimFunc) -> int:
    total = 0
    for parameter in function.params:
        shape = getattr(parameter, "shape", None)
        if shape is not None and all(isinstance(size, tirx.IntImm) for size in shape):
            total += math.prod(int(size) for size in shape) * item_bytes(str(parameter.dtype))
    return total


def item_bytes(dtype: str) -> int:
    """Of one element; less than a byte counts as one."""
    return max(1, int(tvm_ffi.dtype(dtype).bits) // 8)


def _stage(nest: Any) -> Stage | None:
    """The stage of a nest of loops from 0 around one block that stores at its own axes and has no condition."""
    loops = []
    node = nest
    while isinstance(node, tirx.For):
        plain = node.kind == tirx.ForKind.SERIAL and isinstance(node.extent, tirx.IntImm) and int(node.min) == 0
        if not plain or node.annotations:
            return None
        loops.append(node)
        node = node.body
    if not isinstance(node, s_tir.SBlockRealize) or not loops:
        return None
    block = node.block
    if not isinstance(block.body, tirx.BufferStore) or block.alloc_buffers or block.match_buffers:
        return None
    if not isinstance(node.predicate, tirx.IntImm) or not int(node.predicate) or len(block.iter_vars) != len(loops):
        return None
    kinds = ""
    for axis, value, loop in zip(block.iter_vars, node.iter_values, loops, strict=True):
        kind = _KINDS.get(int(axis.iter_type))
        if kind is None or not isinstance(value, tirx.Var) or not value.same_as(loop.loop_var):
            return None
        if not isinstance(axis.dom.extent, tirx.IntImm) or int(axis.dom.extent) != int(loop.extent):
            return None
        kinds += kind
    store = block.body
    written = Access(store.buffer, tuple(store.indices))
    parts = list(nodes(store.value))
    loads = [part for part in parts if isinstance(part, tvm.ir.TensorLoad)]
    others = [load for load in loads if not ("R" in kinds and load.source.same_as(store.buffer))]
    if ("R" in kinds) != (block.init is not None) or any(load.source.same_as(store.buffer) for load in others):
        return None
    return Stage(
        name=str(block.name_hint),
        extents=tuple(int(loop.extent) for loop in loops),
        kinds=kinds,
        variables=tuple(axis.var for axis in block.iter_vars),
        written=written,
        read=tuple(Access(load.source, tuple(load.indices)) for load in others),
        value=store.value,
        expensive=sum(1 for part in parts if _is_expensive(part)),
        operations=sum(1 for part in parts if isinstance(part, _ARITHMETIC)),
    )


_KINDS: Final = {int(tirx.IterVar.DataPar): "S", int(tirx.IterVar.CommReduce): "R"}
_ARITHMETIC: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, tirx.Select, tvm.ir.Call)


def _is_expensive(node: Any) -> bool:
    if isinstance(node, tvm.ir.Call):
        return str(getattr(node.op, "name", "")) in _EXPENSIVE
    return isinstance(node, tirx.Div) and str(node.ty).startswith("float")


def nodes(expression: Any) -> Iterator[Any]:
    """Every node of an expression, those of index expressions included."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (tvm.ir.Expr, found.append))
    return iter(found)


def _used_outside_indices(value: Any) -> set[Any]:
    """The variables that an expression uses anywhere but in an index."""
    used: set[Any] = set()

    def visit(node: Any) -> Any:
        if isinstance(node, tvm.ir.TensorLoad):
            return tvm_ffi.WalkResult.SKIP
        if isinstance(node, tirx.Var):
            used.add(node)
        return None

    tvm_ffi.structural_walk(value, (tvm.ir.Expr, visit), order="pre")
    return used


def _outermost_blocks(statement: Any) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> Any:
        found.append(node)
        return tvm_ffi.WalkResult.SKIP

    tvm_ffi.structural_walk(statement, (s_tir.SBlockRealize, visit), order="pre")
    return found


def _leading(stage: Stage, rows: tuple[int, ...]) -> int | None:
    """How many of the stage's first loops count `rows`: all spatial ones of a reduction, which may not be others."""
    if stage.reduced:
        ordered = stage.kinds == "S" * len(stage.spatial) + "R" * len(stage.reduced)
        return len(stage.spatial) if ordered and tuple(e for e in stage.spatial if e > 1) == rows else None
    wanted = list(rows)
    count = 0
    for extent in stage.extents:
        if not wanted:
            break
        if extent == wanted[0]:
            wanted.pop(0)
        elif extent != 1:
            return None
        count += 1
    return None if wanted else count


def _stays_in_row(rows: Rows) -> bool:
    """Whether every stage reads, of what other stages have written, its own row alone."""
    row_dimensions: dict[Any, dict[int, int]] = {}
    for stage, leading in zip(rows.stages, rows.leading, strict=True):
        numbers = [v for v, e in zip(stage.variables[:leading], stage.extents[:leading], strict=True) if e > 1]
        for access in stage.read:
            for dimension, number in row_dimensions.get(access.buffer, {}).items():
                index = access.indices[dimension]
                if not isinstance(index, tirx.Var) or not index.same_as(numbers[number]):
                    return False
        own = {
            dimension: number
            for dimension, index in enumerate(stage.written.indices)
            for number, variable in enumerate(numbers)
            if isinstance(index, tirx.Var) and index.same_as(variable)
        }
        if len(own) != len(numbers):
            return False
        row_dimensions[stage.written.buffer] = own
    return True
