"""A model as operators to be tuned, and as the module that is compiled once each has its schedule."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.tune_context import _normalize_mod as normalize_mod

from tuning_db.keys import Json
from tuning_db.trials import Workload
from workers.graph import elementary, pipeline, tasks
from workers.graph.blocked import KERNEL_ATTR, BlockedGraph
from workers.graph.computations import Computation, Convolution, Dense, Pooling, variants
from workers.graph.integer import FOUR, IntegerConvolution, IntegerDense
from workers.graph.nodes import NotBlockable
from workers.graph.work import Work, work_of
from workers.packaging.library import apply_schedules
from workers.search.candidates import Choice, Operator, Variant
from workers.search.forked_steps import commit_record, schedule_of
from workers.search.templates.knobs import GEOMETRY_ATTR, SDOT, TEMPLATE_ATTR
from workers.search.templates.plain import plain_template

#: Finds or stores the workloads of modules, as `Records.adopt` does.
Adopt = Callable[[Sequence[tvm.ir.IRModule]], list[Workload]]

#: One cache line of float32: a block of channels is at least that.
_LINE: Final = 16


@dataclass(slots=True)
class Model:
    """A simplified module, divided into kernels of ours and functions of TVM's lowering.

    `extract` finds the operators; `assemble` makes the module with their schedules. Both write the graph anew, the
    same way but for the kernels, so that names and functions agree.
    """

    module: tvm.ir.IRModule  #: simplified
    target: tvm.target.Target
    lanes: int  #: float32 numbers in a vector register
    winograd: bool  #: whether convolutions may be computed by Winograd's algorithm
    dot: str = ""  #: how bytes are multiplied and summed (`Cpu.dot`)
    half: bool = False  #: whether weights that are numbers of float16 are kept so
    _graph: BlockedGraph | None = None
    _quantized: BlockedGraph | None = None
    _computations: dict[str, Computation] = field(default_factory=dict)  #: by the operator's name
    _functions: dict[str, list[str]] = field(default_factory=dict)  #: TVM's, by the operator's name

    def __post_init__(self) -> None:
        try:
            graph = BlockedGraph(self.module, max(_LINE, self.lanes), signed=self.dot == SDOT, half=self.half)
        except NotBlockable:
            return
        self._quantized = graph if graph.is_quantized else None
        if not graph.is_empty:
            self._graph = graph

    def integer_sums(self) -> dict[str, Json] | None:
        """Of a quantized model, how many convolutions and products are computed in integers, by which dot products
        ("": by what LLVM finds), and each that is not: its operator, the shape of its result, and why. None of others.
        """
        if self._quantized is None:
            return None
        real: list[Json] = [found.told() for found in self._quantized.real_sums]
        return {"in_integers": self._quantized.integer_sums, "dot_products": self.dot, "others": real}

    def weight_types(self) -> dict[str, Json]:
        """Of the kernels that `extract` found, how many read real weights of which type."""
        return dict(
            Counter(
                found.weight_dtype
                for found in self._computations.values()
                if isinstance(found, Convolution | Dense) or (isinstance(found, Pooling) and found.kind == "depthwise")
            )
        )

    def extract(self, adopt: Adopt) -> list[Operator]:
        """Every operator of the model once, in the order of the first call, with the workloads of its variants."""
        functions: dict[Computation, dict[str, Any]] = {}

        def unscheduled(computation: Computation) -> tuple[str, Any]:
            if computation not in functions:
                functions[computation] = variants(computation, rounding=self.winograd)
            return next(iter(functions[computation].items()))

        module, computations = self._write(unscheduled)
        self._computations = computations
        self._functions = {}
        found: list[tuple[str, int, list[tuple[str, tvm.ir.IRModule, bool]], Work]] = []
        for task in tasks.extract(module):
            kernel = _kernel_name(task.module["main"])
            if kernel is not None:
                computation = computations[kernel]
                of_kernel = [
                    # Sketches are made from the plainest of the computations; of a copy there is nothing to sketch.
                    (
                        name,
                        normalize_mod(function),
                        index == 0 and isinstance(computation, Convolution | Dense | Pooling),
                    )
                    for index, (name, function) in enumerate(functions[computation].items())
                ]
                # The first is the plainest: what others transform, and the larger weights that they read, come on top.
                work = replace(work_of(of_kernel[0][1]), flops=_fewest_flops(computation, functions[computation]))
                found.append((kernel, task.calls, of_kernel, work))
            else:
                self._functions[task.name] = task.functions
                found.append(
                    (task.name, task.calls, [("plain", task.module, task.has_reduction)], work_of(task.module))
                )
        workloads = iter(adopt([module for _, _, kinds, _ in found for _, module, _ in kinds]))
        return [
            Operator(
                name,
                calls,
                tuple(Variant(kind, next(workloads), sketchable) for kind, _, sketchable in kinds),
                work.flops,
                work.bytes,
                work.constant_bytes,
            )
            for name, calls, kinds, work in found
        ]

    def assemble(self, choices: Mapping[str, Choice]) -> tvm.ir.IRModule:
        """The module with every operator as chosen. BuildFailed if a function did not take its schedule."""
        by_computation = {self._computations[n]: c for n, c in choices.items() if n in self._computations}

        def scheduled(computation: Computation) -> tuple[str, Any]:
            choice = by_computation[computation]
            if choice.trace is None:
                return choice.variant.name, variants(computation, rounding=self.winograd)[choice.variant.name]
            function = schedule_of(choice.variant.workload, choice.trace).mod["main"]
            return choice.variant.name, function.with_attr("tirx.is_scheduled", True)

        module, _ = self._write(scheduled)
        database = ms.database.MemoryDatabase()
        expected: list[str] = []
        for name, choice in choices.items():
            if name in self._functions and choice.trace is not None:
                commit_record(database, choice.variant.workload, choice.trace, [1.0], self.target)
                expected += self._functions[name]
        return elementary.lower_module(apply_schedules(module, database, self.target, expected))

    def _write(
        self, choose: Callable[[Computation], tuple[str, Any]]
    ) -> tuple[tvm.ir.IRModule, dict[str, Computation]]:
        """The lowered module with kernels as chosen, and which computation each kernel's name stands for."""
        module, computations = (self.module, {}) if self._graph is None else self._graph.emit(choose)
        with self.target, pipeline.pass_context():
            lowered = pipeline.lower_operators()(module)
        for variable, function in lowered.functions.items():
            if isinstance(function, tvm.tirx.PrimFunc) and _kernel_name(function) is None:
                template, geometry = plain_template(function)
                lowered[variable] = function.with_attr(
                    {TEMPLATE_ATTR: template, GEOMETRY_ATTR: json.dumps(geometry, sort_keys=True)}
                )
        return lowered, computations


def _kernel_name(function: tvm.tirx.PrimFunc) -> str | None:
    attributes = function.attrs
    return str(attributes[KERNEL_ATTR]) if attributes and KERNEL_ATTR in attributes else None


def _fewest_flops(computation: Computation, functions: Mapping[str, Any]) -> float:
    """Operations of the variant that needs the fewest, its transforms left out: no schedule can do with less time than
    so many of float32 take."""
    flops = computation.flops
    if isinstance(computation, IntegerConvolution | IntegerDense):
        # In operations of float32, of which a vector holds a fourth.
        flops /= FOUR
    if isinstance(computation, Convolution):
        height, width = computation.result_shape[2:4]
        taps = computation.window.kernel[0]
        for name in functions:
            if name.startswith("winograd"):
                outputs = int(name.removeprefix("winograd"))
                covered = math.prod(-(-size // outputs) * outputs for size in (height, width)) / (height * width)
                ratio = (outputs + taps - 1) ** 2 / (outputs * taps) ** 2
                flops = min(flops, computation.flops * ratio * covered)
    return flops
