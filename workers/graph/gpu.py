"""The graph pipeline for GPUs: numbers in half precision where that is asked for, and a schedule for every kernel.

Follows `workers.graph.pipeline.simplify` and `workers.graph.gpu_integer`. No layout is changed. A kernel that a search
has found no schedule for gets the one that TVM's own rules give it. `PIPELINE` names these passes in every key: change
one, its order or its options, and count the version up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import dlight

from tuning_db.errors import BuildFailed
from workers.graph.half import is_half
from workers.graph.pipeline import to_loops
from workers.search import intrinsics

PIPELINE: Final = "gpu-search-2"

#: Operators that would follow their inputs into half precision, and do not: their results leave its range (beyond
#: 65504, or below 6e-5), or they sum so many numbers that the sum does. Softmax, sums and means never follow.
FLOAT32: Final = (
    "exp", "log", "power", "square", "sqrt", "rsqrt", "cosh", "sinh",
    "nn.layer_norm", "nn.group_norm", "nn.instance_norm", "nn.rms_norm",
    "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d",
    "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d",
)  # fmt: skip
#: Operators that have weights.
_WEIGHTED: Final = frozenset(
    f"relax.{name}"
    for name in (
        "matmul", "nn.conv1d", "nn.conv2d", "nn.conv3d",
        "nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose",
    )
)  # fmt: skip
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
#: Attribute of a function, TVM's own name.
_SCHEDULED: Final = "tirx.is_scheduled"
_NEVER: Final = 2  #: TVM's MixedPrecisionPolicyKind::kNever


def pass_context(opt_level: int = 3) -> Any:
    """The options that every build of this pipeline uses."""
    return tvm.transform.PassContext(opt_level=opt_level)


def half_precision(*, keep_float32: bool = False) -> tvm.transform.Pass:
    """Convolutions and matrix products on float16, summed in float32; what follows them in float16, but `FLOAT32`.

    Weights become float16. Inputs and outputs of the model keep their types. With `keep_float32`, what has weights that
    are no numbers of float16 stays as it is.
    """
    _keep_in_float32()
    return tvm.transform.Sequential(
        [
            relax.transform.ConvertToDataflow(),
            relax.transform.ToMixedPrecision(out_dtype="float32"),
            *([KeepFloat32()] if keep_float32 else []),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.FoldConstant(),
            relax.transform.DeadCodeElimination(),
        ],
        name="half-precision",
    )


@relax.transform.function_pass(opt_level=0, name="KeepFloat32")
class KeepFloat32:
    """After `ToMixedPrecision`: convolutions and products whose weights are no numbers of float16 are of float32 again.
    It knows operators, not calls of them."""

    def transform_function(self, function: Any, _module: tvm.ir.IRModule, _context: Any) -> Any:
        return _Keeper().visit_expr(function)


@mutator
class _Keeper(PyExprMutator):  # type: ignore[misc]  # TVM publishes no types
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") not in _WEIGHTED:
            return call
        wide = [self._before_rounding(argument) for argument in call.args]
        weights = [found.value.numpy() for found in wide if isinstance(found, GenericConst)]
        if all(map(is_half, weights)):
            return call
        arguments = [
            self.builder_.emit(relax.op.astype(argument, "float32")) if found is None else found
            for argument, found in zip(call.args, wide, strict=True)
        ]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    def _before_rounding(self, argument: Any) -> Any:
        """The float32 tensor that this is, or was made float16 of; None for one that is nothing but float16."""
        if str(argument.ty.dtype) == "float32":
            return argument
        value = self.lookup_binding(argument) if isinstance(argument, relax.Var) else argument
        if getattr(getattr(value, "op", None), "name", "") == "relax.astype":
            source = value.args[0]
            if str(source.ty.dtype) == "float32":
                return source
        return None


def to_kernels() -> tvm.transform.Pass:
    """Operators to loops, fused: each kernel without a schedule yet. Runs within the GPU's target."""
    return tvm.transform.Sequential([*to_loops(), NamesOfC()], name=PIPELINE)


def schedule_the_rest() -> tvm.transform.Pass:
    """TVM's default schedule for a GPU for each kernel that has none. Runs within the GPU's target.

    BuildFailed, while it runs, if a kernel is one that no rule schedules.
    """
    # Rules for tensor cores would else import the intrinsics of every device.
    intrinsics.use_only()
    gpu = dlight.gpu
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    return tvm.transform.Sequential([dlight.ApplyDefaultSchedule(*rules), AllScheduled()], name="schedule-the-rest")


def scheduled(function: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """The function, marked as one that `schedule_the_rest` leaves alone."""
    return function.with_attr(_SCHEDULED, True)


@tvm.transform.module_pass(opt_level=0, name="NamesOfC")
class NamesOfC:
    """Kernels call their parameters by names that CUDA can spell: they have those of the model's inputs, "data:0"."""

    def transform_module(self, module: tvm.ir.IRModule, _context: Any) -> tvm.ir.IRModule:
        for variable, function in module.functions.items():
            if isinstance(function, tvm.tirx.PrimFunc):
                renamed = {
                    parameter: tvm.tirx.decl_buffer(
                        list(parameter.ty.shape), str(parameter.ty.dtype), name=f"input_{index}"
                    )
                    for index, parameter in enumerate(function.params)
                    if isinstance(parameter.ty, tvm.tirx.BufferType) and not _IDENTIFIER.fullmatch(parameter.name)
                }
                if renamed:
                    module[variable] = _with_variables(function, renamed)
        return module


def _with_variables(function: tvm.tirx.PrimFunc, renamed: Mapping[Any, Any]) -> tvm.tirx.PrimFunc:
    return tvm_ffi.structural_map(function, (tvm.ir.Var, lambda variable: renamed.get(variable, variable)))


@tvm.transform.module_pass(opt_level=0, name="AllScheduled")
class AllScheduled:
    """Changes nothing. A kernel without a schedule would run on the host, with the device's addresses."""

    def transform_module(self, module: tvm.ir.IRModule, _context: Any) -> tvm.ir.IRModule:
        left = sorted(
            variable.name_hint
            for variable, function in module.functions.items()
            if isinstance(function, tvm.tirx.PrimFunc) and not (function.attrs and function.attrs.get(_SCHEDULED))
        )
        if left:
            raise BuildFailed(f"TVM's rules schedule no such kernel for a GPU: {', '.join(left[:3])}")
        return module


@lru_cache(maxsize=1)
def _keep_in_float32() -> None:
    """TVM asks an operator itself; level 11 is above what TVM set."""
    for name in FLOAT32:
        tvm.ir.Op.get(f"relax.{name}").set_attr("TMixedPrecisionPolicy", _NEVER, 11)
