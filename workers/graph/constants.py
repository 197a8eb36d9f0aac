"""Constants of constants, computed by NumPy before TVM folds what is left: TVM compiles a kernel for each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

Array = NDArray[Any]

#: Of the constant arguments, the call's attributes and the result's shape. Only what NumPy rounds as TVM does, which
#: is what IEEE 754 rounds correctly: sums, products, quotients and square roots.
_ARITHMETIC: Final[Mapping[str, Callable[..., Array]]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.negative": np.negative,
    "relax.sqrt": np.sqrt,
}
_FLOATS: Final = ("float32", "float64")


@relax.transform.function_pass(opt_level=0, name="FoldWithNumpy")
class FoldWithNumpy:
    """Reshapes, transposes and arithmetic of constants become constants."""

    def transform_function(self, function: Any, _module: tvm.ir.IRModule, _context: Any) -> Any:
        return _Folder().visit_expr(function)


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc]  # TVM publishes no types
    def visit_var_(self, variable: Any) -> Any:
        value = self.lookup_binding(variable)
        return value if isinstance(value, GenericConst) else super().visit_var_(variable)

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        folded = _fold(call)
        return call if folded is None else relax.const(folded, str(folded.dtype))


def _fold(call: Any) -> Array | None:
    """The value of the call, None if it is none of ours or depends on more than constants."""
    name = getattr(call.op, "name", "")
    tensors = [argument for argument in call.args if not isinstance(argument, relax.ShapeExpr)]
    if not tensors or not all(isinstance(argument, GenericConst) for argument in tensors):
        return None
    arrays = [argument.value.numpy() for argument in tensors]
    if name in _ARITHMETIC:
        if any(str(array.dtype) not in _FLOATS for array in arrays):
            return None
        with np.errstate(all="ignore"):
            return np.asarray(_ARITHMETIC[name](*arrays))
    if name == "relax.permute_dims":
        axes = call.attrs.axes
        return np.ascontiguousarray(arrays[0].transpose(None if axes is None else [int(axis) for axis in axes]))
    if name in ("relax.reshape", "relax.expand_dims", "relax.squeeze"):
        shape = call.ty.shape.values if hasattr(call.ty, "shape") and call.ty.shape is not None else None
        if shape is None or not all(isinstance(size, tvm.tirx.IntImm) for size in shape):
            return None
        return np.asarray(arrays[0].reshape([int(size) for size in shape]))
    return None
