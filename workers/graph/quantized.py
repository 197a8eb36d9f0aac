"""Quantized tensors in a graph: how Relax spells them, and in which form `workers.graph.blocked` reads them.

An importer writes QuantizeLinear and DequantizeLinear round every operator. Real numbers are scale × (integer − zero):
what only moves or chooses numbers does the same to the integers, and what adds, multiplies or sums needs scale and zero
where it is computed. So `FoldConstants` brings every dequantization to the one operator that reads its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.ir.expr import GenericConst

from workers.graph.constants import FoldWithNumpy
from workers.graph.nodes import rewritten
from workers.search.templates.knobs import BELOW

Array = NDArray[Any]

_BYTES: Final = ("uint8", "int8")
#: Operators whose first argument is all data, and whose result is some of its numbers.
_MOVERS: Final = frozenset(
    f"relax.{name}"
    for name in ("reshape", "permute_dims", "squeeze", "expand_dims", "flatten", "strided_slice", "nn.max_pool2d",
                 "nn.batch_flatten")
)  # fmt: skip
#: Operators whose second argument is weights.
_PRODUCTS: Final = frozenset({"relax.nn.conv2d", "relax.matmul"})


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the real numbers of a tensor lie: scale × (integer − zero)."""

    scale: float  #: of float32
    zero: int
    dtype: str  #: of the integers: "uint8", "int8" and others

    @property
    def bounds(self) -> tuple[int, int]:
        limits = np.iinfo(self.dtype)
        return int(limits.min), int(limits.max)

    def of(self, dtype: str) -> Grid:
        """The grid of the same bytes as another type of 8 bits, least for least."""
        return Grid(self.scale, self.zero + _least(dtype) - _least(self.dtype), dtype)


def _least(dtype: str) -> int:
    return int(np.iinfo(dtype).min)


@dataclass(frozen=True, slots=True)
class Weights:
    """int8 weights around zero, [outputs, inputs, height, width], with a scale for each output."""

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]


def grid_of(arguments: Sequence[Any], dtype: str) -> Grid | None:
    """Of a quantization or dequantization by these arguments; None if it is not one grid for the whole tensor."""
    _, scale, zero = arguments
    if not (isinstance(scale, GenericConst) and isinstance(zero, GenericConst)):
        return None
    scales, zeros = scale.value.numpy(), zero.value.numpy()
    if scales.size != 1 or zeros.size != 1 or scales.dtype != np.float32:
        return None
    found = Grid(float(scales.reshape(-1)[0]), int(zeros.reshape(-1)[0]), dtype)
    return found if np.isfinite(found.scale) and found.scale > 0 else None


def weights_of(call: Any, outputs: int, rank: int) -> Weights | None:
    """Of a dequantized constant, [o, i, kh, kw] or of a product [i, o]; `outputs` is the axis that has a scale for each
    place. None if they are not around zero."""
    if not _is_constant_dequantized(call):
        return None
    data, scale, zero = (argument.value.numpy() for argument in call.args)
    if data.dtype != np.int8 or data.ndim != rank or zero.any() or scale.dtype != np.float32:
        return None
    count = data.shape[outputs]
    if scale.size != 1 and (scale.size != count or int(call.attrs.axis) % rank != outputs):
        return None
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    arranged = np.moveaxis(data, outputs, 0)
    arranged = arranged if rank == 4 else arranged[:, :, None, None]
    return Weights(np.ascontiguousarray(arranged), np.ascontiguousarray(np.broadcast_to(scale.reshape(-1), (count,))))


def folded(call: Any) -> Array | None:
    """The float32 numbers of a dequantized constant, as ONNX Runtime computes them."""
    if not _is_constant_dequantized(call):
        return None
    data, scale, zero = (argument.value.numpy() for argument in call.args)
    if str(call.attrs.out_dtype) != "float32" or data.dtype.kind not in "iu" or scale.dtype != np.float32:
        return None
    wide = [1] * data.ndim
    if scale.size > 1 or zero.size > 1:
        wide[int(call.attrs.axis) % data.ndim] = -1
    scale, zero = (x.reshape(wide) if x.size > 1 else x.reshape(()) for x in (scale, zero))
    return np.asarray((data.astype(np.int32) - zero.astype(np.int32)).astype(np.float32) * scale)


def _is_constant_dequantized(call: Any) -> bool:
    return _name(call) == "relax.dequantize" and all(isinstance(argument, GenericConst) for argument in call.args)


@tvm.transform.module_pass(opt_level=0, name="FoldConstants")
class FoldConstants:
    """TVM's FoldConstant, but for int8 weights, which stay what they are; and dequantizations where they are read.

    A dequantization is made anew for each reader, behind what only moves numbers; where what it reads is quantized to
    the same grid again, both are none. Between quantization and dequantization bytes are of the type `data`, which
    products take: int8 becomes uint8, with a zero point 128 higher, or the other way round.
    """

    def __init__(self, data: str = "uint8") -> None:
        self._data = data

    def transform_module(self, module: tvm.ir.IRModule, _context: Any) -> tvm.ir.IRModule:
        # The module is the same without the first: TVM compiles a kernel for each constant that it folds.
        fold = tvm.transform.Sequential([FoldWithNumpy(), relax.transform.FoldConstant()])
        body = module["main"].body
        if not isinstance(body, relax.SeqExpr) or len(body.blocks) != 1:
            return fold(module)
        bindings = list(body.blocks[0].bindings)
        if not all(isinstance(binding, relax.VarBinding) for binding in bindings):
            return fold(module)
        if not any(_name(binding.value) in ("relax.quantize", "relax.dequantize") for binding in bindings):
            return fold(module)
        rewriting = _Rewriting(module, bindings, self._data)
        module = fold(rewriting.module())
        # What is folded must be constant: weights that must not be are parameters meanwhile.
        return relax.transform.BindParams("main", rewriting.parameters)(module)


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A dequantization that is emitted where it is read."""

    data: Any
    scale: Any
    zero: Any
    axis: int
    grid: Grid

    def emit(self, builder: relax.BlockBuilder) -> Any:
        call = relax.op.dequantize(self.data, self.scale, self.zero, axis=self.axis, out_dtype="float32")
        return builder.emit(call)


class _Rewriting:
    """`main` written anew. `parameters` are the weights that it has got as parameters."""

    def __init__(self, module: tvm.ir.IRModule, bindings: Sequence[Any], data: str) -> None:
        self._module = module
        self._data = data
        self._bindings = bindings
        self._builder = relax.BlockBuilder()
        self._values: dict[Any, Any] = {}  #: variable → expression of the new function
        self._lazy: dict[Any, _Lazy] = {}
        #: Concatenations of tensors on several grids, and these: emitted where they are read.
        self._joined: dict[Any, tuple[Any, list[_Lazy]]] = {}
        self._shifted: set[Any] = set()  #: variables whose values are the other type of bytes
        self._weights: dict[Any, Any] = {}  #: variable → the dequantization, of a parameter, that it is replaced by
        self.parameters: dict[Any, Any] = {}
        self._find_weights()

    def module(self) -> tvm.ir.IRModule:
        main, builder = self._module["main"], self._builder
        parameters = [*main.params, *self.parameters]
        with builder.function("main", parameters, attrs=dict(main.attrs) if main.attrs else {}):
            with builder.dataflow():
                for binding in self._bindings:
                    self._bind(binding.var, binding.value)
                result = builder.emit_output(self._read(main.body.body))
            builder.emit_func_output(result)
        module = builder.get()
        for variable, function in self._module.functions.items():
            if variable.name_hint != "main":
                module[variable] = function
        return module

    def _find_weights(self) -> None:
        """Dequantized constants that products read, transposed or not."""
        defined = {binding.var: binding.value for binding in self._bindings}
        for binding in self._bindings:
            if _name(binding.value) not in _PRODUCTS:
                continue
            variable = binding.value.args[1]
            call: Any = defined.get(variable)
            axes = None
            if _name(call) == "relax.permute_dims" and call.attrs.axes is not None:
                axes = [int(axis) for axis in call.attrs.axes]
                call = defined.get(call.args[0])
            if variable in self._weights or not _is_constant_dequantized(call):
                continue
            data, zero = (call.args[index].value.numpy() for index in (0, 2))
            if data.dtype == np.uint8:
                data, zero = ((x.astype(np.int16) - BELOW).astype(np.int16) for x in (data, zero))
                if np.abs(zero).max(initial=0) > 127:
                    continue
                data, zero = data.astype(np.int8), zero.astype(np.int8)
            if data.dtype != np.int8:
                continue
            axis = int(call.attrs.axis) % data.ndim
            if axes is not None:
                data, axis = data.transpose(axes), axes.index(axis)
            parameter = relax.Var(f"weight_{len(self.parameters)}", relax.TensorType(data.shape, "int8"))
            self.parameters[parameter] = relax.const(np.ascontiguousarray(data))
            self._weights[variable] = relax.op.dequantize(
                parameter, call.args[1], relax.const(zero), axis=axis, out_dtype="float32"
            )

    def _bind(self, variable: Any, value: Any) -> None:
        if variable in self._weights:
            self._values[variable] = self._builder.emit(self._weights[variable])
            return
        name = _name(value)
        if name == "relax.dequantize" and self._dequantize(variable, value):
            return
        if name == "relax.quantize" and self._quantize(variable, value):
            return
        if name in _MOVERS and value.args[0] in self._lazy:
            lazy = self._lazy[value.args[0]]
            moved = relax.Call(value.op, [lazy.data, *map(self._read, value.args[1:])], value.attrs, value.ty_args)
            self._defer(variable, lazy, moved)
            return
        if name in _MOVERS and value.args[0] in self._shifted:
            data = [self._values[value.args[0]], *map(self._read, value.args[1:])]
            self._values[variable] = self._builder.emit(relax.Call(value.op, data, value.attrs, value.ty_args))
            self._shifted.add(variable)
            return
        if name == "relax.concat" and isinstance(value.args[0], relax.Tuple):
            parts = [self._lazy.get(field) for field in value.args[0].fields]
            first = parts[0]
            if first is not None and all(part is not None and part.grid == first.grid for part in parts):
                data = relax.Tuple([part.data for part in parts if part is not None])
                self._defer(variable, first, relax.Call(value.op, [data], value.attrs, value.ty_args))
                return
            if all(part is not None for part in parts):
                self._joined[variable] = (value, [part for part in parts if part is not None])
                return
        self._values[variable] = self._builder.emit(self._read(value))

    def _defer(self, variable: Any, like: _Lazy, data: Any) -> None:
        self._lazy[variable] = _Lazy(self._builder.emit(data), like.scale, like.zero, like.axis, like.grid)

    def _dequantize(self, variable: Any, call: Any) -> bool:
        constant = folded(call)
        if constant is not None:
            self._values[variable] = relax.const(constant)
            return True
        dtype = str(call.args[0].ty.dtype)
        grid = grid_of(call.args, dtype)
        if grid is None or isinstance(call.args[0], GenericConst) or str(call.attrs.out_dtype) != "float32":
            return False
        data, zero = self._values.get(call.args[0], call.args[0]), call.args[2]
        if call.args[0] in self._shifted:
            grid = grid.of(self._data)
            zero = relax.const(np.array(grid.zero, self._data))
        self._lazy[variable] = _Lazy(data, call.args[1], zero, int(call.attrs.axis), grid)
        return True

    def _quantize(self, variable: Any, call: Any) -> bool:
        dtype = str(call.attrs.out_dtype)
        grid = grid_of(call.args, dtype)
        if grid is None or dtype not in _BYTES:
            return False
        as_bytes = grid.of(self._data)
        lazy = self._lazy.get(call.args[0])
        if call.args[0] in self._joined:
            # Each part by itself, where it is made.
            join, parts = self._joined[call.args[0]]
            data = relax.Tuple([self._to_grid(part, call, as_bytes) for part in parts])
            made = self._builder.emit(relax.Call(join.op, [data], join.attrs, join.ty_args))
        else:
            made = self._to_grid(lazy or self._read(call.args[0]), call, as_bytes)
        self._values[variable] = made
        if dtype != self._data:
            self._shifted.add(variable)
        return True

    def _to_grid(self, data: Any, call: Any, grid: Grid) -> Any:
        """Real numbers, or what will be, quantized by `call` to a grid."""
        if isinstance(data, _Lazy):
            if data.grid == grid:
                return data.data
            data = data.emit(self._builder)
        zero = relax.const(np.array(grid.zero, grid.dtype))
        quantized = relax.op.quantize(data, call.args[1], zero, axis=int(call.attrs.axis), out_dtype=grid.dtype)
        return self._builder.emit(quantized)

    def _read(self, expression: Any) -> Any:
        """The expression over the new function's variables."""
        return rewritten(expression, self._value)

    def _value(self, variable: relax.Var) -> Any:
        if variable in self._joined and variable not in self._values:
            join, parts = self._joined[variable]
            data = relax.Tuple([part.emit(self._builder) for part in parts])
            self._values[variable] = self._builder.emit(relax.Call(join.op, [data], join.attrs, join.ty_args))
        if variable in self._lazy:
            return self._lazy[variable].emit(self._builder)
        value = self._values.get(variable, variable)
        if variable not in self._shifted:
            return value
        dtype = str(variable.ty.dtype)
        wide = self._builder.emit(relax.op.astype(value, "int16"))
        by = relax.const(np.array(_least(self._data) - _least(dtype), np.int16))
        return self._builder.emit(relax.op.astype(self._builder.emit(relax.op.subtract(wide, by)), dtype))


def _name(expression: Any) -> str:
    """Of the operator that is called, "" if none is."""
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name)
    return ""
