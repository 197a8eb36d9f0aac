"""A model for a GPU as operators to be tuned, and as the module that is compiled once each has its schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import tirx

from workers.graph import gpu, tasks
from workers.graph.operators import Adopt
from workers.graph.work import work_of
from workers.packaging.gpu_library import schedule_the_rest
from workers.search.candidates import Choice, Operator, Variant
from workers.search.forked_steps import schedule_of
from workers.search.templates.gpu_default import GpuDefaultTemplate
from workers.search.templates.gpu_plain import gpu_template
from workers.search.templates.knobs import GEOMETRY_ATTR, TEMPLATE_ATTR, Geometry


@dataclass(slots=True)
class GpuModel:
    """Kernels without a schedule, as `gpu_library.kernels` makes them."""

    module: tvm.ir.IRModule
    target: tvm.target.Target
    _functions: dict[str, list[str]] = field(default_factory=dict)  #: of the module, by the operator's name

    def extract(self, adopt: Adopt) -> list[Operator]:
        """Every operator of the model once, in the order of the first call, with the workloads of its variants: TVM's
        default schedule, then what each template that fits can do."""
        found = tasks.extract(self.module)
        self._functions = {task.name: task.functions for task in found}
        variants = {task.name: _variants(task.module) for task in found}
        workloads = iter(adopt([module for modules in variants.values() for module in modules.values()]))
        operators = []
        for task in found:
            work = work_of(task.module)
            # Sketches are made from the plainest; of what does not sum there is nothing to sketch.
            kinds = tuple(
                Variant(name, next(workloads), sketchable=index == 0 and task.has_reduction)
                for index, name in enumerate(variants[task.name])
            )
            operators.append(Operator(task.name, task.calls, kinds, work.flops, work.bytes, work.constant_bytes))
        return operators

    def assemble(self, choices: Mapping[str, Choice]) -> tvm.ir.IRModule:
        """The module with every operator as chosen, scheduled."""
        module = self.module.clone()
        for name, choice in choices.items():
            if choice.trace is not None:
                function = function_of(schedule_of(choice.variant.workload, choice.trace))
                for own in self._functions[name]:
                    module[module.get_global_var(own)] = function.with_attr("global_symbol", own)
        return schedule_the_rest(module, self.target)


def function_of(schedule: tvm.s_tir.Schedule) -> tirx.PrimFunc:
    """The scheduled function, marked as such unless nothing was done to it."""
    function = schedule.mod["main"]
    return gpu.scheduled(function) if len(schedule.trace.insts) else function


def _variants(module: tvm.ir.IRModule) -> dict[str, tvm.ir.IRModule]:
    """A task's module for each template, marked for it; by the variant's name."""
    function = module["main"]
    fitting: Sequence[tuple[str, Geometry]] = [(GpuDefaultTemplate.name, {}), *gpu_template(function)]
    return {
        template.removeprefix("gpu-"): tvm.ir.IRModule(
            {"main": function.with_attr({TEMPLATE_ATTR: template, GEOMETRY_ATTR: json.dumps(geometry, sort_keys=True)})}
        )
        for template, geometry in fitting
    }
