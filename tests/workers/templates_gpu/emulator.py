"""Runs scheduled functions without a GPU: as the CUDA source that TVM makes of them, on a CPU, by `cuda_on_cpu.h`."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import s_tir, tirx

from workers.packaging import gpu_library

Array = NDArray[Any]
HEADER: Final = Path(__file__).with_name("cuda_on_cpu.h")
_KERNEL: Final = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\d+)\) )?(\w+)\(([^)]*)\) \{')
#: Headers that the source asks for by name; all that is used of them is in `cuda_on_cpu.h`.
_EMPTY: Final = ("cuda.h", "cuda_fp16.h", "mma.h", "sm_61_intrinsics.h")


#: Shared memory that is shared out at launch: what every GPU grants.
_DYNAMIC_BYTES: Final = 48 << 10


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a scheduled function."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


def cuda_target(arch: str = "sm_87") -> tvm.target.Target:
    return tvm.target.Target(
        {
            "kind": "cuda", "arch": arch, "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152,
            "registers_per_block": 65536, "thread_warp_size": 32, "host": {"kind": "llvm"},
        }
    )  # fmt: skip


def source_of(module: tvm.ir.IRModule, arch: str = "sm_87") -> str:
    """The CUDA source of a scheduled module, as a library would be compiled from."""
    target = cuda_target(arch)
    with gpu_library.source_only(), target:
        [source] = gpu_library._sources(tvm.compile(module, target=target).mod)
    return source


def kernels_of(function: tirx.PrimFunc) -> list[Kernel]:
    """The launches of a scheduled function in order. AssertionError if a kernel's blocks differ in how many threads
    they have along an axis, or if a nest has no thread."""
    body = function.body.block.body
    kernels = []
    for nest in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        extents: dict[str, int] = {}

        def visit(node: Any, extents: dict[str, int] = extents) -> None:
            if node.thread_binding is not None:
                tag = str(node.thread_binding.thread_tag)
                assert extents.setdefault(tag, int(node.extent)) == int(node.extent), f"{tag} has two extents"

        tvm_ffi.structural_walk(nest, (tirx.For, visit))
        assert extents, "a nest runs on the host"
        grid, block = ([extents.get(f"{kind}.{axis}", 1) for axis in "xyz"] for kind in ("blockIdx", "threadIdx"))
        kernels.append(Kernel((grid[0], grid[1], grid[2]), (block[0], block[1], block[2])))
    return kernels


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """A C++ compiler that knows `_Float16`, or None."""
    return shutil.which("g++-12") or shutil.which("g++")


def run(schedule: s_tir.Schedule, arrays: Sequence[Array], *, descending: bool = False) -> None:
    """Run the schedule's function on the arrays, its outputs among them, which are written in place.

    RuntimeError if a barrier is not reached by every thread, a fragment of tensor cores is not aligned, or something
    is written that is no argument's.
    """
    function = schedule.mod["main"]
    named = {f"argument_{number}": array for number, array in enumerate(arrays)}
    renamed = dict(zip(function.params, named, strict=True))
    for buffer in function.body.block.alloc_buffers:
        if buffer.scope() == "global":
            renamed[buffer] = f"between_{len(named)}"
            # What is not written must not look right by chance.
            fill = np.nan if "float" in str(buffer.dtype) else 77
            named[renamed[buffer]] = np.full([int(size) for size in buffer.shape], fill, str(buffer.dtype))
    source = source_of(tvm.IRModule({"main": _with_names(function, renamed)}))
    execute(source, kernels_of(function), named, descending=descending)


def execute(source: str, kernels: Sequence[Kernel], named: Mapping[str, Array], *, descending: bool = False) -> None:
    """Run the source's kernels in the order of their numbers on arrays that have the names of their parameters.

    RuntimeError as `run`.
    """
    guarded = {name: _Guarded(array) for name, array in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(_compile(source, Path(folder))))
        library.launch.restype = ctypes.c_char_p
        found = _kernels(source)
        assert len(found) == len(kernels)
        for number, ((bound, name, parameters), kernel) in enumerate(zip(found, kernels, strict=True)):
            assert not bound or int(bound) == np.prod(kernel.block), (name, bound, kernel)
            pointers = [guarded[_name_of(parameter)].pointer for parameter in parameters.split(", ")]
            sizes = (ctypes.c_int * 6)(*kernel.grid, *kernel.block)
            fault = library.launch(number, (ctypes.c_void_p * len(pointers))(*pointers), sizes, int(descending))
            if fault:
                raise RuntimeError(f"{name}: {fault.decode()}")
    for name, array in named.items():
        array[...] = guarded[name].taken(array)


class _Guarded:
    """A copy of an array between bytes that nobody may write, and that are no numbers to who reads them."""

    BYTES: Final = 1 << 12

    def __init__(self, array: Array) -> None:
        self._bytes = np.full(2 * self.BYTES + array.nbytes, 255, "uint8")
        self._bytes[self.BYTES : self.BYTES + array.nbytes] = np.frombuffer(array.tobytes(), "uint8")
        self.pointer = int(self._bytes.ctypes.data) + self.BYTES

    def taken(self, array: Array) -> Array:
        """What is in it now. RuntimeError if more was written."""
        if not (self._bytes[: self.BYTES] == 255).all() or not (self._bytes[-self.BYTES :] == 255).all():
            raise RuntimeError("a kernel writes beyond its argument")
        inside = self._bytes[self.BYTES : self.BYTES + array.nbytes]
        return np.frombuffer(inside.tobytes(), array.dtype).reshape(array.shape)


def _kernels(source: str) -> list[tuple[str, str, str]]:
    """Bound of threads, name and parameters of each kernel, in the order of their launches."""
    found: list[tuple[str, str, str]] = _KERNEL.findall(source)
    return sorted(found, key=lambda kernel: int(re.findall(r"kernel_?(\d*)$", kernel[1])[0] or 0))


def _with_names(function: tirx.PrimFunc, names: Mapping[Any, str]) -> tirx.PrimFunc:
    """Buffers by names that tell them apart: a function's own may be the same for several."""
    new = {buffer: tirx.decl_buffer(list(buffer.shape), str(buffer.dtype), name=name) for buffer, name in names.items()}
    return tvm_ffi.structural_map(function, (tvm.ir.Var, lambda variable: new.get(variable, variable)))


def _name_of(parameter: str) -> str:
    return parameter.split()[-1].removesuffix("_ptr")


def _compile(source: str, folder: Path) -> Path:
    for name in _EMPTY:
        (folder / name).write_text("")
    launches = []
    for number, (_, name, parameters) in enumerate(_kernels(source)):
        types = [parameter.rsplit(" ", 1)[0].replace("__restrict__", "") for parameter in parameters.split(", ")]
        arguments = ", ".join(f"({kind})fibers_arguments[{i}]" for i, kind in enumerate(types))
        launches.append(f"case {number}: body = [] {{ {name}({arguments}); }}; break;")
    text = re.sub(r"extern __shared__ .*? (\w+)\[\];", rf"alignas(1024) static uchar \1[{_DYNAMIC_BYTES}];", source)
    text = text.replace("__shared__ alignas(64)", "alignas(64) static").replace("__shared__", "static")
    text += f"""
static void** fibers_arguments;
extern "C" const char* launch(int kernel, void** arguments, const int* sizes, int descending) {{
  void (*body)() = nullptr;
  fibers_arguments = arguments;
  switch (kernel) {{ {" ".join(launches)} }}
  return fibers::launch(body, {{sizes[0], sizes[1], sizes[2]}}, {{sizes[3], sizes[4], sizes[5]}}, descending);
}}
"""
    path = folder / "kernels.cpp"
    path.write_text(text)
    library = folder / "kernels.so"
    command = [compiler() or "g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, "-include", str(HEADER), f"-I{folder}", str(path), "-o", str(library)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "error" in line)[:2000]
    return library
