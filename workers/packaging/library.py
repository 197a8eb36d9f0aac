"""Compiles a lowered module, with or without schedules, into the shared library that users fetch."""

from __future__ import annotations

from pathlib import Path

import tvm
from tvm import relax

from tuning_db.errors import BuildFailed
from workers.graph import pipeline


def compile_library(module: tvm.ir.IRModule, target: tvm.target.Target, path: Path) -> None:
    """Compile and link. BuildFailed carries the compiler's last line."""
    try:
        with pipeline.pass_context():
            executable = relax.build(module, target, relax_pipeline=pipeline.lower_to_vm())
        executable.export_library(str(path))
    except Exception as error:  # LLVM, the linker and every pass raise their own
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise BuildFailed(
            f"the library did not compile: {lines[-1][:300] if lines else type(error).__name__}"
        ) from error
