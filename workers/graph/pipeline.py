"""The graph pipeline: what is done to a Relax module before tasks are cut from it, and after schedules are applied.

A record matches a task only if both were cut by exactly these passes, so `PIPELINE` names them in every key. Change a
pass, its order or its options, and count the version up.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import dpl

from workers.graph.algebra import ApplyIdentities
from workers.graph.extrema import LEGALIZE
from workers.graph.projections import MergeProjections
from workers.graph.quantized import FoldConstants

PIPELINE: Final = "cpu-blocked-8"


def pass_context(opt_level: int = 3) -> Any:
    """The options that every build of this pipeline uses, a candidate's and the final library's alike."""
    return tvm.transform.PassContext(
        opt_level=opt_level,
        # Tiles that do not divide an axis leave a tail: split off, the loops before it need no test.
        config={"s_tir.LoopPartition": {"partition_const_loop": True}},
    )


def simplify(data: str = "uint8") -> tvm.transform.Pass:
    """The imported module in fewer and simpler operators: what `workers.graph.blocked` reads. `data` is the type of
    quantized tensors."""
    return tvm.transform.Sequential(
        [
            relax.transform.DecomposeOpsForInference(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.EliminateCommonSubexpr(),
            FoldConstants(data),
            ApplyIdentities(),
            relax.transform.DeadCodeElimination(),
            MergeProjections(),
            relax.transform.DeadCodeElimination(),
        ],
        name="simplify",
    )


@relax.transform.function_pass(opt_level=0, name="MergeReshapes")
class MergeReshapes:
    """A reshape of a reshape is one of what the first one reads, and none if that has the shape already.

    Alone a reshape is a view of its tensor; fused to another one it would become a kernel that copies.
    """

    def transform_function(self, function: Any, _module: tvm.ir.IRModule, _context: Any) -> Any:
        source = dpl.wildcard()
        pattern = dpl.is_op("relax.reshape")(dpl.is_op("relax.reshape")(source, dpl.wildcard()), dpl.wildcard())

        def merge(call: Any, matched: Any) -> Any:
            read = matched[source]
            if tvm_ffi.structural_equal(read.ty.shape, call.ty.shape):
                return read
            return relax.op.reshape(read, call.args[1])

        return dpl.rewrite_call(pattern, merge, function)


def to_loops() -> list[tvm.transform.Pass]:
    """Operators lowered to loops and fused, on any device."""
    return [
        MergeReshapes(),
        relax.transform.DeadCodeElimination(),
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(dict(LEGALIZE)),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]


def lower_operators() -> tvm.transform.Pass:
    """Operators that are not kernels of ours yet: lowered to loops and fused, with the constant weights marked whose
    layout a schedule may choose."""
    return tvm.transform.Sequential(
        [
            *to_loops(),
            relax.transform.AttachAttrLayoutFreeBuffers(),
        ],
        name=PIPELINE,
    )


def pack_weights() -> tvm.transform.Pass:
    """After schedules are applied: put constant weights, at compile time, into the layouts that the schedules chose."""
    return tvm.transform.Sequential(
        [
            relax.transform.SplitLayoutRewritePreproc(),
            relax.transform.FoldConstant(),
            relax.transform.DeadCodeElimination(),
        ],
        name="pack-weights",
    )


def lower_to_vm(place: tvm.transform.Pass) -> tvm.transform.Pass:
    """From call_tir to the virtual machine's instructions, memory planned by the pass `place`."""
    return tvm.transform.Sequential(
        [
            relax.transform.RewriteDataflowReshape(),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.CanonicalizeBindings(),
            place,
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ],
        name="lower-to-vm",
    )
