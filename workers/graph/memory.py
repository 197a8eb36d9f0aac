"""Places every intermediate of a lowered `main` in one block of memory, and concatenates by placing.

Runs where `CallTIRRewrite` has made each result an allocation of its own. Tensors whose lives do not overlap share
bytes (offsets are given greedily, largest first). A concatenation of blocked tensors along their blocks lays its inputs
behind each other: where they can be written there in the first place, its kernel is dropped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax

from workers.search.templates.plain import item_bytes

#: Attribute of a function that puts its inputs behind each other, which placing them can do as well.
CONCAT_ATTR: Final = "tunery.concat"
#: Attribute of a kernel of ours that moves data: whether that is for the layout alone, plain ↔ blocked or blocked in
#: another order.
LAYOUT_ATTR: Final = "tunery.layout"
_INTEGER: Final = re.compile(r"int8_")
_QUANTIZING: Final = re.compile(r".*quantize")
_MAKE_ARRAY: Final = tvm.ir.Op.get("tirx.tvm_stack_make_array")
#: Vectors are read and written whole: no tensor begins within a cache line.
_ALIGNMENT: Final = 64


@dataclass(slots=True)
class _Tensor:
    """One allocation. Times are indices of bindings."""

    variable: Any
    shape: tuple[int, ...]
    dtype: str
    made: int
    first: int
    last: int
    escapes: bool = False
    parent: _Tensor | None = None  #: the concatenation that it is written into
    within: int = 0  #: bytes from the parent's begin
    offset: int = 0

    @property
    def size(self) -> int:
        return int(math.prod(self.shape)) * item_bytes(self.dtype)

    @property
    def root(self) -> _Tensor:
        return self if self.parent is None else self.parent.root


@dataclass(slots=True)
class MemoryPlan:
    """What an inference calls, and what its intermediates take."""

    planned_bytes: int = 0
    unplanned_bytes: int = 0  #: each tensor by itself
    concatenations: int = 0  #: kernels dropped, since their inputs are written where they belong
    kernels: Counter[str] = field(default_factory=Counter)  #: calls of each function in one inference
    layout_transforms: int = 0  #: of these, calls that only put numbers elsewhere or into another order

    @property
    def integer_kernels(self) -> int:
        """Calls that sum products of integers."""
        return self._calls(_INTEGER)

    @property
    def quantizing_kernels(self) -> int:
        """Calls that do nothing but quantize or dequantize, or that TVM fused from such and others."""
        return self._calls(_QUANTIZING)

    def _calls(self, kind: re.Pattern[str]) -> int:
        return sum(calls for name, calls in self.kernels.items() if kind.match(name))


def together(plans: Iterable[MemoryPlan]) -> MemoryPlan:
    """Of functions that one inference calls, each of which keeps its intermediates to itself."""
    whole = MemoryPlan()
    for plan in plans:
        whole.planned_bytes += plan.planned_bytes
        whole.unplanned_bytes += plan.unplanned_bytes
        whole.concatenations += plan.concatenations
        whole.kernels += plan.kernels
        whole.layout_transforms += plan.layout_transforms
    return whole


@tvm.transform.module_pass(opt_level=0, name="PlaceIntermediates")
class PlaceIntermediates:
    """The pass, for every model's function of a module. `plans` tells afterwards what it came to, by their names."""

    def __init__(self) -> None:
        self.plans: dict[str, MemoryPlan] = {}

    @property
    def plan(self) -> MemoryPlan:
        """Of `main`."""
        return self.plans["main"]

    def transform_module(self, module: tvm.ir.IRModule, _context: Any) -> tvm.ir.IRModule:
        placed = False
        for variable, main in list(module.functions.items()):
            if isinstance(main, relax.Function):
                plan = self.plans[variable.name_hint] = MemoryPlan()
                if isinstance(main.body, relax.SeqExpr) and len(main.body.blocks) == 1:
                    module[variable] = _Placement(module, main, plan).function()
                    placed = True
        for variable, function in list(module.functions.items()) if placed else ():
            if isinstance(function, tvm.tirx.PrimFunc) and not _hands_on_arrays(function):
                module[variable] = _accept_offsets(function)
        return module


class _Placement:
    def __init__(self, module: tvm.ir.IRModule, main: relax.Function, plan: MemoryPlan) -> None:
        self._module = module
        self._main = main
        self._plan = plan
        self._bindings = list(main.body.blocks[0].bindings)
        self._tensors: dict[Any, _Tensor] = {}
        self._behind: dict[Any, set[int]] = {}  #: variable → positions in `_order` of the tensors that it may show
        self._order: list[_Tensor] = []
        self._dropped: set[int] = set()

    def function(self) -> relax.Function:
        self._read()
        self._concatenate()
        total = self._place()
        for index, binding in enumerate(self._bindings):
            kernel = None if index in self._dropped else self._kernel(binding.value)
            if kernel is not None:
                self._plan.kernels[binding.value.op.name_hint] += 1
                self._plan.layout_transforms += _only_moves(kernel)
        return self._write(total)

    def _read(self) -> None:
        for index, binding in enumerate(self._bindings):
            value = binding.value
            shape = _allocated(value)
            if shape is not None:
                tensor = _Tensor(binding.var, shape, str(binding.var.ty.dtype), index, len(self._bindings), index)
                # Kernels take a scalar at the begin of its storage alone.
                tensor.escapes = not shape
                self._tensors[binding.var] = tensor
                self._behind[binding.var] = {len(self._order)}
                self._order.append(tensor)
                continue
            shown: set[int] = set()
            for variable in _variables(value):
                for position in self._behind.get(variable, ()):
                    shown.add(position)
                    tensor = self._order[position]
                    if not isinstance(value, relax.Var):
                        tensor.first = min(tensor.first, index)
                    tensor.last = index
            kernel = self._kernel(value)
            if (kernel is not None and _hands_on_arrays(kernel)) or (kernel is None and _reads_storage(value)):
                for position in shown:
                    self._order[position].escapes = True
            # A call of a kernel returns nothing. Whatever else is given a tensor may return a view of it.
            self._behind[binding.var] = set() if kernel is not None else shown
        for variable in _variables(self._main.body.body):
            for position in self._behind.get(variable, ()):
                self._order[position].escapes = True

    def _kernel(self, value: Any) -> Any:
        """The PrimFunc that is called, if one is."""
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            function = self._module[value.op]
            return function if isinstance(function, tvm.tirx.PrimFunc) else None
        return None

    def _shown(self, expression: Any) -> _Tensor | None:
        """The one tensor that a variable stands for, whole and in its own shape."""
        positions = self._behind.get(expression, set()) if isinstance(expression, relax.Var) else set()
        if len(positions) != 1:
            return None
        tensor = self._order[next(iter(positions))]
        shape = tuple(int(size) for size in expression.ty.shape)
        return tensor if shape == tensor.shape else None

    def _concatenate(self) -> None:
        for index, binding in enumerate(self._bindings):
            function = self._kernel(binding.value)
            if function is None or not function.attrs or CONCAT_ATTR not in function.attrs:
                continue
            *parts, whole = (self._shown(argument) for argument in binding.value.args)
            # With more than one item a batch the parts of a concatenation do not lie behind each other.
            if whole is None or whole.escapes or whole.shape[0] != 1 or any(part is None for part in parts):
                continue
            found = [part for part in parts if part is not None]
            if any(part.parent is not None or part.escapes for part in found) or len({id(p) for p in found}) < len(
                found
            ):
                continue
            start = 0
            for part in found:
                part.parent, part.within = whole, start
                start += part.size
                whole.first = min(whole.first, part.first)
            self._dropped.add(index)
            self._plan.concatenations += 1

    def _place(self) -> int:
        """Offsets for all that stays inside; returns the bytes that they take together."""
        inside = [tensor for tensor in self._order if not tensor.escapes and tensor.first < len(self._bindings)]
        for tensor in inside:
            root = tensor.root
            root.first, root.last = min(root.first, tensor.first), max(root.last, tensor.last)
        roots = [tensor for tensor in inside if tensor.parent is None]
        placed: list[_Tensor] = []
        total = 0
        for tensor in sorted(roots, key=lambda t: (-t.size, t.made)):
            beside = sorted(
                (other for other in placed if other.first <= tensor.last and tensor.first <= other.last),
                key=lambda other: other.offset,
            )
            offset = 0
            for other in beside:
                if offset + tensor.size <= other.offset:
                    break
                offset = max(offset, -(-(other.offset + other.size) // _ALIGNMENT) * _ALIGNMENT)
            tensor.offset = offset
            placed.append(tensor)
            total = max(total, offset + tensor.size)
        for tensor in inside:
            where, at = tensor, 0
            while where.parent is not None:
                at += where.within
                where = where.parent
            tensor.offset = where.offset + at
        self._plan.planned_bytes = total
        self._plan.unplanned_bytes = sum(tensor.size for tensor in inside)
        return total

    def _write(self, total: int) -> relax.Function:
        """The function with one storage at its head and every tensor inside it."""
        if not total:
            return self._main
        bindings = []
        storage = relax.Var("storage", relax.AnyType())
        make = relax.op.memory.alloc_storage(relax.ShapeExpr([total]), 0, "global", "uint8")
        bindings.append(relax.VarBinding(storage, make))
        for index, binding in enumerate(self._bindings):
            if index in self._dropped:
                continue
            tensor = self._tensors.get(binding.var)
            if tensor is not None and not tensor.escapes and tensor.first < len(self._bindings):
                shape = relax.ShapeExpr(list(tensor.shape))
                value = relax.op.memory.alloc_tensor(storage, tensor.offset, shape, tensor.dtype)
                bindings.append(relax.VarBinding(binding.var, value))
            else:
                bindings.append(binding)
        main = self._main
        body = relax.SeqExpr([relax.BindingBlock(bindings)], main.body.body)
        return relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)


def _only_moves(function: tvm.tirx.PrimFunc) -> bool:
    """Whether it does nothing but put all numbers of one tensor into another. Kernels of ours say so themselves."""
    if function.attrs and LAYOUT_ATTR in function.attrs:
        return bool(int(function.attrs[LAYOUT_ATTR]))
    kinds = [parameter.ty for parameter in function.params if isinstance(parameter.ty, tvm.tirx.BufferType)]
    if len(kinds) != 2 or str(kinds[0].dtype) != str(kinds[1].dtype):
        return False
    sizes = [[size for size in kind.shape if isinstance(size, tvm.tirx.IntImm)] for kind in kinds]
    if any(len(size) != len(kind.shape) for size, kind in zip(sizes, kinds, strict=True)):
        return False
    read, written = (math.prod(int(size) for size in each) for each in sizes)
    stored: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tvm.tirx.BufferStore, lambda store: stored.append(store.value)))
    return read == written and all(isinstance(value, tvm.ir.TensorLoad) for value in stored)


def _hands_on_arrays(function: tvm.tirx.PrimFunc) -> bool:
    """Whether it has TVM's runtime do something with its tensors, as sorting: that is told where their storages begin,
    not where they lie within."""
    found: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tvm.ir.Call, lambda call: found.append(call.op)))
    return any(op.same_as(_MAKE_ARRAY) for op in found)


def _reads_storage(value: Any) -> bool:
    """Whether it may look for a tensor where its storage begins: another function of the library, whose kernels are
    any, or what makes a shape of a tensor's numbers."""
    called = value.op if isinstance(value, relax.Call) else None
    return isinstance(called, tvm.ir.GlobalVar) or getattr(called, "name", "") == "relax.tensor_to_shape"


def _accept_offsets(function: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """The function for tensors that begin anywhere in a storage, at a multiple of a cache line."""
    moved = {}
    for parameter in function.params:
        kind = parameter.ty
        if not isinstance(kind, tvm.tirx.BufferType) or not kind.shape:
            continue
        factor = _ALIGNMENT // item_bytes(str(kind.dtype))
        moved[parameter] = tvm.tirx.decl_buffer(
            list(kind.shape), str(kind.dtype), name=parameter.name, offset_factor=factor
        )
    return tvm_ffi.structural_map(function, (tvm.ir.Var, lambda variable: moved.get(variable, variable)))


def _allocated(value: Any) -> tuple[int, ...] | None:
    """The shape that is allocated by `value`, None if it is no allocation of known shape."""
    if not (isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)):
        return None
    if str(value.op.name) != "relax.builtin.alloc_tensor" or not isinstance(value.args[0], relax.ShapeExpr):
        return None
    sizes = list(value.args[0].values)
    if not all(isinstance(size, tvm.tirx.IntImm) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)


def _variables(expression: Any) -> Iterator[Any]:
    if isinstance(expression, relax.Var):
        yield expression
    elif isinstance(expression, relax.Tuple):
        for item in expression.fields:
            yield from _variables(item)
    elif isinstance(expression, relax.TupleGetItem):
        yield from _variables(expression.tuple_value)
    elif isinstance(expression, relax.Call):
        for argument in expression.args:
            yield from _variables(argument)
