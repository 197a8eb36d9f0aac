"""Compiles a module for a GPU into the library that users fetch, machine code for exactly that GPU inside.

Needs no GPU and no driver, and does the same with them: TVM hands over the kernels' CUDA source, NVRTC compiles it, and
what was linked is read back before anyone gets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tuning_db.errors import BuildFailed
from workers.graph import gpu, pipeline
from workers.graph.gpu_integer import QuantizedSums, integer_sums
from workers.linker import NoLinker, export_for
from workers.packaging import device_code, nvrtc
from workers.said import last_line


@dataclass(frozen=True, slots=True)
class Kernels:
    """A model as GPU kernels without a schedule."""

    module: tvm.ir.IRModule
    sums: QuantizedSums | None  #: None of a model that nothing is quantized in


def kernels(
    module: tvm.ir.IRModule, target: tvm.target.Target, *, half: bool, keep_float32: bool = False, opt_level: int = 3
) -> Kernels:
    """An imported module as GPU kernels: what is quantized in integers, the rest in half precision or as it is. With
    `keep_float32`, convolutions and products whose weights are not all numbers of float16 stay in single precision.

    BuildFailed if that would change the types of the model's outputs.
    """
    with target, gpu.pass_context(opt_level):
        module, sums = integer_sums(pipeline.simplify("int8")(module))
        if half:
            outputs = module["main"].ret_ty
            module = gpu.half_precision(keep_float32=keep_float32)(module)
            if not tvm_ffi.structural_equal(module["main"].ret_ty, outputs):
                raise BuildFailed("half precision would change the types of the model's outputs")
        return Kernels(gpu.to_kernels()(module), sums)


def schedule_the_rest(module: tvm.ir.IRModule, target: tvm.target.Target) -> tvm.ir.IRModule:
    """What is left without a schedule gets TVM's default. BuildFailed if a kernel is one that no rule schedules."""
    with target, gpu.pass_context():
        return gpu.schedule_the_rest()(module.clone())  # TVM's pass writes into the module that it is given


def lower(
    module: tvm.ir.IRModule, target: tvm.target.Target, *, half: bool, keep_float32: bool = False, opt_level: int = 3
) -> tvm.ir.IRModule:
    """`kernels`, all with TVM's default schedules: a model that nothing was searched for."""
    made = kernels(module, target, half=half, keep_float32=keep_float32, opt_level=opt_level)
    return schedule_the_rest(made.module, target)


def compile_library(
    module: tvm.ir.IRModule, target: tvm.target.Target, path: Path, *, fast_math: bool = False
) -> tuple[device_code.Cubin, ...]:
    """Compile a model of scheduled kernels, and link; returns the machine code inside, which is for the target's arch
    alone.

    BuildFailed if NVRTC is missing, does not know the arch or refuses a kernel, if the host's linker is missing, or if
    the library would hold anything but machine code for that arch. No file is left at `path` then.
    """

    def build() -> Any:
        plan = relax.transform.StaticPlanBlockMemory()
        return relax.build(module, target, relax_pipeline=pipeline.lower_to_vm(plan))

    return _link(build, target, path, fast_math)


def compile_kernel(
    module: tvm.ir.IRModule, target: tvm.target.Target, path: Path, *, fast_math: bool = False,
    headers: Path | None = None,
) -> tuple[device_code.Cubin, ...]:  # fmt: skip
    """`compile_library` of a scheduled function `main` alone. `headers`: precompiled ones, as `nvrtc` takes them."""
    return _link(lambda: tvm.compile(module, target=target), target, path, fast_math, headers)


def _link(
    build: Callable[[], Any], target: tvm.target.Target, path: Path, fast_math: bool, headers: Path | None = None
) -> tuple[device_code.Cubin, ...]:
    arch = str(target.attrs["arch"])
    host = str(target.host.attrs["mtriple"]).partition("-")[0]
    try:
        export = export_for(host)
    except NoLinker as error:
        raise BuildFailed(str(error)) from None
    nvrtc.check(arch)
    try:
        with source_only(), target, gpu.pass_context():
            executable = build()
        sources = list(_sources(executable.mod))
        if not sources:
            raise BuildFailed("the model has no kernel that runs on a GPU")
        cubins = {
            source: nvrtc.compile_source(source, arch, fast_math=fast_math, headers=headers) for source in sources
        }

        def link(output: str, objects: Sequence[str], **_options: Any) -> None:
            for file in objects:
                _with_machine_code(Path(file), cubins)
            export(output, list(objects))

        executable.export_library(str(path), fcompile=link)
        return device_code.check(path, arch)
    except BuildFailed:
        path.unlink(missing_ok=True)
        raise
    except Exception as error:  # LLVM, the linker and every pass raise their own
        path.unlink(missing_ok=True)
        raise BuildFailed(f"the library did not compile: {last_line(error)}") from error


@contextmanager
def source_only() -> Iterator[None]:
    """Keep TVM from compiling kernels itself, as it does where it finds a driver, by whatever compiler is there."""
    name = "TVM_COMPILE_FORCE_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _sources(module: Any) -> Iterator[str]:
    """CUDA source of every GPU module below `module`."""
    if module.kind == "cuda":
        yield str(module.inspect_source("cuda"))
    for imported in module.imports:
        yield from _sources(imported)


def _with_machine_code(file: Path, cubins: Mapping[str, bytes]) -> None:
    """Mend the object that embeds modules."""
    if file.name == "devc.o":
        file.write_bytes(device_code.replace_source(file.read_bytes(), cubins))
