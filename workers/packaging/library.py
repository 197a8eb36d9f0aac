"""Compiles a lowered module, with or without schedules, into the shared library that users fetch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import tvm
from tvm import relax
from tvm.s_tir import meta_schedule as ms

from tuning_db.errors import BuildFailed
from workers.graph import pipeline
from workers.graph.memory import MemoryPlan, PlaceIntermediates
from workers.linker import export_for
from workers.said import last_line


def apply_schedules(
    module: tvm.ir.IRModule, database: ms.database.Database, target: tvm.target.Target, expected: Collection[str]
) -> tvm.ir.IRModule:
    """`module` with the database's schedules applied and weights packed for them.

    `expected` are the kernels that have a record. BuildFailed if one of them was not scheduled: its record was cut by
    other passes than this module, and a library built in silence would be an untuned one.
    """
    with target, database, pipeline.pass_context():
        applied = relax.transform.MetaScheduleApplyDatabase()(module)
        scheduled = {
            variable.name_hint
            for variable, function in applied.functions.items()
            if isinstance(function, tvm.tirx.PrimFunc) and function.attrs and function.attrs.get("tirx.is_scheduled")
        }
        missing = sorted(set(expected) - scheduled)
        if missing:
            raise BuildFailed(
                f"{len(missing)} of {len(expected)} kernels did not take their record ({', '.join(missing[:3])}); "
                "the module and its records come from different pipelines"
            )
        return pipeline.pack_weights()(applied)


def compile_library(module: tvm.ir.IRModule, target: tvm.target.Target, path: Path) -> MemoryPlan:
    """Compile and link; returns what an inference will call. BuildFailed carries the compiler's last line."""
    place = PlaceIntermediates()
    arch = str(target.attrs["mtriple"]).partition("-")[0]
    try:
        with pipeline.pass_context():
            executable = relax.build(module, target, relax_pipeline=pipeline.lower_to_vm(place))
        executable.export_library(str(path), fcompile=export_for(arch))
    except Exception as error:  # LLVM, the linker and every pass raise their own
        raise BuildFailed(f"the library did not compile: {last_line(error)}") from error
    return place.plan
