"""Cuts a lowered Relax module into tuning tasks: its distinct computations, and how often an inference calls each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.tune_context import _normalize_mod as normalize_mod


@dataclass(slots=True)
class Task:
    """One computation. `functions` are its kernels in the module: equal but for their names."""

    module: tvm.ir.IRModule  #: normalised as MetaSchedule looks it up
    structural_hash: str
    functions: list[str] = field(default_factory=list)
    calls: int = 0
    has_reduction: bool = False

    @property
    def name(self) -> str:
        return self.functions[0]


def extract(module: tvm.ir.IRModule) -> list[Task]:
    """The tasks of `module` in the order of their first call."""
    calls = _count_calls(module["main"])
    tasks: dict[str, list[Task]] = {}
    for variable, function in module.functions.items():
        name = variable.name_hint
        if not isinstance(function, tvm.tirx.PrimFunc) or name not in calls:
            continue
        normalised = normalize_mod(function)
        structural_hash = str(ms.database.Workload(normalised).as_json()[0])
        same_hash = tasks.setdefault(structural_hash, [])
        for task in same_hash:
            if tvm_ffi.structural_equal(task.module, normalised):
                break
        else:
            task = Task(normalised, structural_hash, has_reduction=_has_reduction(normalised))
            same_hash.append(task)
        task.functions.append(name)
        task.calls += calls[name]
    order = {name: position for position, name in enumerate(calls)}
    found = [task for same_hash in tasks.values() for task in same_hash]
    for task in found:
        task.functions.sort(key=order.__getitem__)
    return sorted(found, key=lambda task: order[task.name])


def _count_calls(main: relax.Function) -> Counter[str]:
    calls: Counter[str] = Counter()
    call_tir = tvm.ir.Op.get("relax.call_tir")

    def visit(expression: relax.Expr) -> None:
        if isinstance(expression, relax.Call) and expression.op == call_tir:
            calls[expression.args[0].name_hint] += 1

    relax.analysis.post_order_visit(main.body, visit)
    return calls


def _has_reduction(module: tvm.ir.IRModule) -> bool:
    schedule = tvm.s_tir.Schedule(module)
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    return any(variable.iter_type == tvm.tirx.IterVar.CommReduce for block in blocks for variable in block.iter_vars)
