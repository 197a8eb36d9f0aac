"""Compiles a lowered module, with or without schedules, into the shared library that users fetch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import vm_build
from tvm.s_tir import meta_schedule as ms

from tuning_db.errors import BuildFailed
from workers.graph import pipeline
from workers.graph.memory import MemoryPlan, PlaceIntermediates
from workers.linker import assembles_for, export_for
from workers.packaging.device_code import SYMBOL
from workers.said import last_line

#: Parts of a model's kernels that are compiled side by side, where there are so many cores; their number must not
#: depend on the machine that compiles, or so would the library's bytes.
_SHARES: Final = 16


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


def merge(modules: Mapping[str, tvm.ir.IRModule]) -> tvm.ir.IRModule:
    """One module with the `main` of each as a function of that name, and kernels named after it: a library of several
    functions. Constants that are equal are stored once, as TVM's virtual machine does it. A module alone that is called
    `main` stays as it is."""
    if set(modules) == {"main"}:
        return modules["main"]
    functions: dict[tvm.ir.GlobalVar, Any] = {}
    for name, module in modules.items():
        renamed = {
            variable: tvm.ir.GlobalVar(name if variable.name_hint == "main" else f"{name}_{variable.name_hint}")
            for variable in module.functions
        }
        for old, new in renamed.items():
            relax.expr._update_type(new, old.ty)
        for variable, function in module.functions.items():
            moved = tvm_ffi.structural_map(function, (tvm.ir.GlobalVar, partial(_looked_up, renamed)))
            if variable.name_hint == "main":
                moved = moved.with_attr("global_symbol", name)
            functions[renamed[variable]] = moved
    return tvm.IRModule(functions)


def _looked_up(renamed: Mapping[Any, Any], variable: Any) -> Any:
    return renamed[variable]


def compile_library(module: tvm.ir.IRModule, target: tvm.target.Target, path: Path) -> MemoryPlan:
    """Compile and link; returns what an inference will call. BuildFailed carries the compiler's last line."""
    return compile_functions(module, target, path)["main"]


def compile_functions(module: tvm.ir.IRModule, target: tvm.target.Target, path: Path) -> dict[str, MemoryPlan]:
    """As `compile_library`, of what `merge` made: what an inference by each function will call."""
    place = PlaceIntermediates()
    arch = str(target.attrs["mtriple"]).partition("-")[0]
    try:
        with pipeline.pass_context(), target, tempfile.TemporaryDirectory(prefix="tunery-objects-") as folder:
            lowered = pipeline.lower_to_vm(place)(module)
            builder = relax.ExecBuilder()
            first, *others = _shares(vm_build._vmcodegen(builder, lowered))
            objects = _compile_side_by_side(others, target, Path(folder))
            constants = dict((lowered.attrs or {}).get("const_name_to_constant", {}))
            executable = vm_build._vmlink(builder, target, first, params=constants)
            executable.export_library(
                str(path),
                addons=[str(file) for file in objects],
                fcompile=export_for(arch),
                fpack_imports=_assembly_of_imports(arch) if assembles_for(arch) else None,
            )
    except Exception as error:  # LLVM, the linker and every pass raise their own
        raise BuildFailed(f"the library did not compile: {last_line(error)}") from error
    return place.plans


def _assembly_of_imports(arch: str) -> Callable[[Any, bool, str, str], str]:
    """What TVM's `export_library` is to make of the weights: an assembler's file that takes them in as they are.

    LLVM, which it would ask, puts them between code and what code refers to within 2 GiB, so that more do not link. On
    x86-64 they have a section of the large code model, which comes after all others.
    """
    section = '.lrodata,"al",%progbits' if arch == "x86_64" else '.rodata,"a",%progbits'

    def pack(executable: Any, _is_system_lib: bool, _prefix: str, folder: str) -> str:
        imports, source = Path(folder) / "imports.bin", Path(folder) / "imports.s"
        packed = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(executable)
        with imports.open("wb") as file:
            file.write(packed.numpy().data)
        source.write_text(
            f".section {section}\n.globl {SYMBOL}\n.type {SYMBOL}, %object\n.balign 16\n{SYMBOL}:\n"
            f'.incbin "{imports}"\n.size {SYMBOL}, .-{SYMBOL}\n.section .note.GNU-stack,"",%progbits\n'
        )
        return str(source)

    return pack


def _shares(module: tvm.ir.IRModule) -> list[tvm.ir.IRModule]:
    """The kernels of `module` in parts of about equal number; the first has one at most, as the executable needs one
    module of its own to be linked into."""
    kernels = [(v, f) for v, f in module.functions.items() if isinstance(f, tvm.tirx.PrimFunc)]
    parts = [kernels[:1], *(part for start in range(_SHARES) if (part := kernels[1 + start :: _SHARES]))]
    return [tvm.ir.IRModule(dict(part), attrs=module.attrs) for part in parts]


def _compile_side_by_side(modules: Sequence[tvm.ir.IRModule], target: tvm.target.Target, folder: Path) -> list[Path]:
    """An object file of each. LLVM works outside of Python's lock, so threads do."""

    def compile_one(number: int, module: tvm.ir.IRModule) -> Path:
        path = folder / f"kernels{number}.o"
        with pipeline.pass_context():  # of this thread
            tvm.tirx.build(module, target=target).write_to_file(str(path))
        return path

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, range(len(modules)), modules))
