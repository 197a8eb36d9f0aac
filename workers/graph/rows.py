"""Proves of a lowered module that it computes each item of a batch from that item alone, and each in the same way.

A library for `p` items then serves any number of them, cut into pieces. The proof reads the loops that TVM makes of a
module imported for `p` items, and takes no operator's word for anything. A tensor of which it holds is seen as flat
memory of the shape (outer, p, inner): reshapes keep that, and a batch that stands behind other axes, as in recurrent
networks, has it too. Of a loop nest it holds if, once the loop variable along the batch of what is written is replaced
by r * length + t, r is found nowhere but in the same place along the batch of what is read: then nothing that is done,
read or written depends on which item it is. Constants may be read at r only where they are equal for all items.

What it cannot show is that `p` itself is no number of the computation, as in `x * shape(x)[0]`: libraries for a range
are compared with the reference at sizes that lie between the points too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax, sym, tirx
from tvm.ir.expr import GenericConst, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize

from tuning_db.pieces import Slab

#: Calls with a higher kind read or write something that is not among their arguments.
_PURE: Final = int(tirx.CallEffectKind.Pure.value)


class RowsMixed(Exception):
    """It could not be shown. `operator` is the function, as TVM names it, where the proof ends."""

    def __init__(self, operator: str, why: str) -> None:
        super().__init__(f"{operator}: {why}")
        self.operator = operator
        self.why = why


@dataclass(slots=True)
class _Facts:
    """What holds of a tensor; several may. `uniform`: it does not depend on the inputs' items. `inners`: seen as flat
    memory of (outer, p, inner), each item is computed from the same item of the inputs, all in the same way."""

    uniform: bool = False
    inners: set[int] = field(default_factory=set)
    constant: NDArray[Any] | None = None

    def slabs(self, shape: Sequence[int], items: int) -> list[Slab]:
        """Where items lie, in a buffer of that shape."""
        found = [slab for inner in self.inners if (slab := _slab_of(inner, shape, items)) is not None]
        if self.constant is not None:
            for slab in _candidates(shape, items):
                parts = self.constant.reshape(-1, items, _inner_of(slab, shape))
                if np.array_equal(parts, np.broadcast_to(parts[:, :1], parts.shape), equal_nan=parts.dtype.kind == "f"):
                    found.append(slab)
        return found


def prove(module: tvm.ir.IRModule, axes: Sequence[int | None], items: int) -> tuple[Slab | None, ...]:
    """Where in each output of `main` an item lies, or None for an output that is the same whatever the items are.

    `axes` is each input's axis of `items` items, None for an input that is the same for all of them. RowsMixed names
    the first function for which it cannot be shown. ValueError for fewer than two items: of one nothing can be learnt.
    """
    if items < 2:
        raise ValueError("with one item everything depends on that item alone: prove it for two or more")
    main = module["main"]
    known: dict[Any, _Facts] = {}
    inputs = main.params[: len(axes)]
    if len(inputs) != len(axes) or len(main.params) != len(axes):
        raise ValueError(f"main has {len(main.params)} parameters, not {len(axes)}")
    for parameter, axis in zip(inputs, axes, strict=True):
        shape = _shape_of(parameter)
        if axis is None:
            known[parameter] = _Facts(uniform=True)
        elif shape[axis] != items:
            raise ValueError(f"axis {axis} of {parameter.name_hint} is {shape[axis]}, not {items}")
        else:
            known[parameter] = _Facts(inners={_inner_of(Slab(axis, 1), shape)})
    parts: dict[Any, list[_Facts]] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            _bind(module, binding.var, binding.value, known, parts, items)
    results = list(main.body.body.fields) if isinstance(main.body.body, relax.Tuple) else [main.body.body]
    if len(results) == 1 and results[0] in parts:
        every, shapes = parts[results[0]], [_shape(each) for each in results[0].ty.fields]
    else:
        every = [_facts_of(result, known, "the result") for result in results]
        shapes = [_shape_of(result) for result in results]
    return tuple(_place(facts, shape, items) for facts, shape in zip(every, shapes, strict=True))


def _place(facts: _Facts, shape: Sequence[int], items: int) -> Slab | None:
    if facts.uniform:
        if _candidates(shape, items):
            # Zeros for each item and a vector of so many zeros look alike.
            raise RowsMixed("the result", f"it is the same for all items, and {list(shape)} may have an axis of them")
        return None
    slabs = facts.slabs(shape, items)
    if not slabs:
        raise RowsMixed("the result", f"its items lie across several axes of {list(shape)}")
    return slabs[0]


def _bind(
    module: tvm.ir.IRModule,
    variable: Any,
    value: Any,
    known: dict[Any, _Facts],
    parts: dict[Any, list[_Facts]],
    items: int,
) -> None:
    name = str(getattr(getattr(value, "op", None), "name", type(value).__name__))
    if name == "relax.call_tir":
        function = module[value.args[0]]
        arguments = value.args[1].fields if isinstance(value.args[1], relax.Tuple) else [value.args[1]]
        operator = _readable(value.args[0].name_hint)
        given = [_facts_of(argument, known, operator) for argument in arguments]
        results = _Function(function, operator, items).results(given)
        if isinstance(variable.ty, tvm.ir.TupleType):
            parts[variable] = results
        else:
            (known[variable],) = results
    elif name == "relax.reshape":
        known[variable] = _facts_of(value.args[0], known, "reshape")  # the same memory
    elif isinstance(value, relax.TupleGetItem) and value.tuple_value in parts:
        known[variable] = parts[value.tuple_value][value.index]
    elif isinstance(value, relax.Tuple):
        parts[variable] = [_facts_of(part, known, "tuple") for part in value.fields]
    else:
        known[variable] = _facts_of(value, known, _readable(name))


def _facts_of(expression: Any, known: Mapping[Any, _Facts], operator: str) -> _Facts:
    if isinstance(expression, GenericConst):
        return _Facts(uniform=True, constant=expression.value.numpy())
    if isinstance(expression, relax.Var) and expression in known:
        return known[expression]
    raise RowsMixed(operator, "it is not computed by loops that can be read")


@dataclass(slots=True)
class _Store:
    """One store, with what guards it and the extents of the loop and block variables around it."""

    store: Any
    guards: tuple[Any, ...]
    extents: Mapping[Any, int]
    bound: Mapping[Any, Any]  #: variables that stand for an expression


class _Function:
    """One function of loops."""

    def __init__(self, function: tirx.PrimFunc, operator: str, items: int) -> None:
        self._function = function
        self._operator = operator
        self._items = items
        self._stores: dict[Any, list[_Store]] = {}
        self._facts: dict[Any, _Facts] = {}
        self._row = tirx.Var("row", "int64")
        self._within = tirx.Var("within", "int64")

    def results(self, arguments: Sequence[_Facts]) -> list[_Facts]:
        """What holds of the parameters that are written, which stand behind the arguments."""
        parameters = list(self._function.params)
        self._facts = dict(zip(parameters, arguments, strict=False))
        self._read(self._function.body, (), {}, {})
        for buffer, stores in self._stores.items():
            if buffer in self._facts:
                raise RowsMixed(self._operator, "it writes into what it reads")
            self._facts[buffer] = self._of_buffer(buffer, stores)
        written = parameters[len(arguments) :]
        if any(parameter not in self._facts for parameter in written):
            raise RowsMixed(self._operator, "it leaves an output unwritten")
        return [self._facts[parameter] for parameter in written]

    def _read(self, statement: Any, guards: tuple[Any, ...], extents: Mapping[Any, int], bound: dict[Any, Any]) -> None:
        """Collect the stores in the order of the program."""
        if isinstance(statement, tirx.SeqStmt):
            for each in statement.seq:
                self._read(each, guards, extents, bound)
        elif isinstance(statement, tirx.For):
            size = self._extent(statement.min, statement.extent)
            self._read(statement.body, guards, {**extents, statement.loop_var: size}, bound)
        elif isinstance(statement, SBlockRealize):
            block: SBlock = statement.block
            inner = dict(extents)
            for variable, value in zip(block.iter_vars, statement.iter_values, strict=True):
                size = self._extent(variable.dom.min, variable.dom.extent)
                loop = extents.get(value) if isinstance(value, tvm.ir.Var) else None
                if loop != size and size != 1:
                    raise RowsMixed(self._operator, "its blocks do not go along whole loops")
                inner[variable.var] = size
            if block.match_buffers:
                raise RowsMixed(self._operator, "it renames buffers")
            guards = (*guards, statement.predicate)
            if block.init is not None:
                self._read(block.init, guards, inner, bound)
            self._read(block.body, guards, inner, bound)
        elif isinstance(statement, tirx.IfThenElse):
            for branch in (statement.then_case, statement.else_case):
                if branch is not None:
                    self._read(branch, (*guards, statement.condition), extents, bound)
        elif isinstance(statement, tirx.Bind):
            bound[statement.var] = _replaced(statement.value, bound)
        elif isinstance(statement, tirx.BufferStore):
            self._stores.setdefault(statement.buffer, []).append(_Store(statement, guards, extents, dict(bound)))
        elif not isinstance(statement, tirx.AllocBuffer):
            raise RowsMixed(self._operator, f"it holds a {type(statement).__name__}, which is not read here")

    def _extent(self, begin: Any, extent: Any) -> int:
        if not isinstance(extent, tirx.IntImm) or not isinstance(begin, tirx.IntImm) or int(begin) != 0:
            raise RowsMixed(self._operator, "it loops over what is not known beforehand")
        return int(extent)

    def _of_buffer(self, buffer: Any, stores: Sequence[_Store]) -> _Facts:
        shape = _shape(buffer)
        facts = _Facts()
        complaint: RowsMixed | None = None
        for slab in (None, *_candidates(shape, self._items)):
            try:
                for store in stores:
                    self._check(buffer, slab, store)
            except RowsMixed as error:
                complaint = error if slab is not None or complaint is None else complaint
                continue
            if slab is None:
                facts.uniform = True
            else:
                facts.inners.add(_inner_of(slab, shape))
        if not facts.uniform and not facts.inners:
            assert complaint is not None
            raise complaint
        return facts

    def _check(self, buffer: Any, slab: Slab | None, found: _Store) -> None:
        """RowsMixed unless the store agrees with `buffer` having its items at `slab`, or with its being uniform."""
        store = found.store
        analyzer = sym.Analyzer()
        for variable, extent in (*found.extents.items(), (self._row, self._items)):
            analyzer.bind(variable, _from_zero(variable, extent))
        rows: dict[Any, Any] = {}
        if slab is not None:
            index = store.indices[slab.axis]
            if not isinstance(index, tvm.ir.Var) or found.extents.get(index) != self._items * slab.length:
                raise RowsMixed(self._operator, "it does not write item after item")
            analyzer.bind(self._within, _from_zero(self._within, slab.length))
            row = self._row * slab.length + self._within if slab.length > 1 else self._row
            rows[index] = tirx.Cast(str(index.ty.dtype), row) if str(index.ty.dtype) != "int64" else row

        # TVM makes errors of its own of what its callbacks raise: they are collected instead.
        complaints: list[str | None] = []

        def whole(expression: Any) -> Any:
            """With loads that agree replaced by unknown numbers, and the item spelled as such."""
            stripped = tvm_ffi.structural_map(
                _replaced(_replaced(expression, found.bound), rows), (TensorLoad, load), order="post"
            )
            tvm_ffi.structural_walk(stripped, (tvm.ir.Call, lambda call: complaints.append(_effects(call))))
            for complaint in filter(None, complaints):
                raise RowsMixed(self._operator, complaint)
            return analyzer.simplify(stripped)

        def load(read: Any) -> Any:
            complaints.append(self._wrong_load(read, buffer, slab, analyzer))
            return tirx.Var("number", str(read.ty.dtype))

        for expression in (*store.indices, *found.guards, store.value):
            simple = whole(expression)
            of_slab = slab is not None and expression.same_as(store.indices[slab.axis])
            if slab is not None and not of_slab and self._depends_on_row(simple):
                raise RowsMixed(self._operator, "what it does depends on which item of the batch it is")

    def _wrong_load(self, read: Any, written: Any, slab: Slab | None, analyzer: Any) -> str | None:
        """Why a load does not agree with what is written having its items at `slab`, or being uniform; None if it does.
        Its indices are in terms of the item already."""
        source = read.source
        indices = [analyzer.simplify(index) for index in read.indices]
        if source.same_as(written):
            facts, slabs = _Facts(uniform=slab is None), [] if slab is None else [slab]
        elif source in self._facts:
            facts = self._facts[source]
            slabs = []
        else:
            return "it reads what it has not written yet"
        if slab is None:
            return None if facts.uniform else "it is computed from items"
        if facts.uniform and not any(map(self._depends_on_row, indices)):
            return None
        for place in slabs or facts.slabs(_shape(source), self._items):
            rest = analyzer.simplify(indices[place.axis] - self._row * place.length)
            others = [index for axis, index in enumerate(indices) if axis != place.axis]
            if self._depends_on_row(rest) or any(map(self._depends_on_row, others)):
                continue
            bounds = analyzer.const_int_bound(rest)
            if bounds.min_value >= 0 and bounds.max_value < place.length:
                return None
        return "an item of what it writes is computed from other items of the batch"

    def _depends_on_row(self, expression: Any) -> bool:
        return _holds(expression, lambda variable: variable.same_as(self._row))


def _effects(call: Any) -> str | None:
    """What is wrong with calling it, if something is."""
    kind = call.op.get_attr("TCallEffectKind") if isinstance(call.op, tvm.ir.Op) else None
    if kind is None or int(kind) > _PURE:
        return f"it calls {getattr(call.op, 'name', call.op)}, which is not read here"
    return None


def _from_zero(variable: Any, extent: int) -> Any:
    dtype = str(variable.ty.dtype)
    return tvm.ir.Range.from_min_extent(tirx.const(0, dtype), tirx.const(extent, dtype))


def _replaced(expression: Any, values: Mapping[Any, Any]) -> Any:
    if not values:
        return expression
    return tvm_ffi.structural_map(expression, (tvm.ir.Var, lambda variable: values.get(variable, variable)))


def _holds(expression: Any, wanted: Callable[[Any], bool]) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(expression, (tvm.ir.Var, lambda variable: found.append(wanted(variable))))
    return any(found)


def _candidates(shape: Sequence[int], items: int) -> list[Slab]:
    return [Slab(axis, size // items) for axis, size in enumerate(shape) if size % items == 0]


def _inner_of(slab: Slab, shape: Sequence[int]) -> int:
    return math.prod(shape[slab.axis + 1 :]) * slab.length


def _slab_of(inner: int, shape: Sequence[int], items: int) -> Slab | None:
    for slab in _candidates(shape, items):
        if _inner_of(slab, shape) == inner:
            return slab
    return None


def _shape(typed: Any) -> tuple[int, ...]:
    if not all(isinstance(size, tirx.IntImm) for size in typed.shape):
        raise RowsMixed("the module", "a shape is not known beforehand")
    return tuple(int(size) for size in typed.shape)


def _shape_of(expression: Any) -> tuple[int, ...]:
    return _shape(expression.ty)


def _readable(name: str) -> str:
    """The operators that TVM fused into a function, from its name."""
    return re.sub(r"\d+$", "", name.removeprefix("relax.").removeprefix("fused_")).replace("_intermediate", "")
