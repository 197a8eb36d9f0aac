"""The steps of a search for a GPU that build: in forked children of a server that never touches a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import tvm

from workers.graph.gpu import scheduled
from workers.graph.gpu_model import function_of
from workers.packaging import nvrtc
from workers.packaging.gpu_library import compile_kernel, schedule_the_rest
from workers.search.candidates import Built, Candidate
from workers.search.forked_steps import arguments_of, extract_features, file_stem, schedule_of

#: Of the reference kernel: numbers, and square roots of each, about a millisecond of a large GPU.
_NUMBERS: Final = 1 << 20
_ROOTS: Final = 256
_THREADS: Final = 256
_REFERENCE: Final = f"""
@T.prim_func(s_tir=True)
def main(x: T.Buffer(({_NUMBERS},), "float32"), y: T.Buffer(({_NUMBERS},), "float32")):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    for block in T.thread_binding({_NUMBERS // _THREADS}, thread="blockIdx.x"):
        for thread in T.thread_binding({_THREADS}, thread="threadIdx.x"):
            value = T.sblock_alloc_buffer((1,), "float32", scope="local")
            value[0] = x[block * {_THREADS} + thread]
            for step in range({_ROOTS}):
                value[0] = T.sqrt(value[0]) + T.float32(1)
            y[block * {_THREADS} + thread] = value[0]
"""


def build(target_json: str, candidate: Candidate, folder: str, fast_math: bool, headers: str | None) -> Built:
    """Compile one candidate into a shared library under `folder`, machine code inside, and extract the features of a
    sketch. `headers`: of `precompile_headers`. BuildFailed as `gpu_library.compile_kernel`."""
    target = tvm.target.Target(json.loads(target_json))
    schedule = schedule_of(candidate.workload, candidate.trace)
    features = None if candidate.config is not None else extract_features(target, candidate.workload, schedule)
    path = Path(folder) / f"{file_stem(candidate)}.so"
    module = schedule_the_rest(tvm.ir.IRModule({"main": function_of(schedule)}), target)
    compile_kernel(module, target, path, fast_math=fast_math, headers=None if headers is None else Path(headers))
    return Built(str(path), arguments_of(schedule), features)


def precompile_headers(path: str, arch: str, fast_math: bool) -> None:
    """`nvrtc.precompile_headers`, for all candidates of one search."""
    nvrtc.precompile_headers(Path(path), arch, fast_math=fast_math)


def build_reference(target_json: str, folder: str) -> Built:
    """The kernel that tells whether a GPU is as fast as it was (`guards`): square roots in registers, which take the
    multiprocessors' clock and nothing else."""
    path = Path(folder) / "reference.so"
    module = tvm.ir.IRModule({"main": scheduled(tvm.script.from_source(_REFERENCE))})
    compile_kernel(module, tvm.target.Target(json.loads(target_json)), path)
    return Built(str(path), (("float32", (_NUMBERS,)), ("float32", (_NUMBERS,))), None)
