"""How much a CPU can do at most: multiply-adds a second, and bytes a second from memory and from L2. Here that of this
machine; `board_roof` has that of a board.

Measured by kernels that TVM's LLVM compiles for the device's target, so that it is the roof of what this toolchain can
reach (the roofline model: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009). The process is one of its own,
`python -m workers.devices.roof SPEC PARENT`, with a deadline; figures are the best of many short samples, because other
programs on the machine only ever take away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any, Final

from workers.devices.local_cpu import vector_registers
from workers.processes import die_with_parent
from workers.said import last_line

#: A figure is the best of the samples that fit into this time; four are taken.
_SECONDS_EACH: Final = 0.3
_SAMPLE_S: Final = 0.001
#: Where the machine hides its caches: small enough to be a cache's, large enough to be past any.
_USUAL_CACHES: Final = (32 << 10, 512 << 10, 32 << 20)
#: No more of the machine's memory than this share is taken for the measurement.
_MEMORY_SHARE: Final = 0.25


class RoofNotMeasured(Exception):
    """The measuring process died or took too long. The message says which, and what it said."""


@dataclass(frozen=True, slots=True)
class RoofMeasurement:
    """What the device can do in one second, in float32. A multiply-add is two operations.

    Bytes are those that the program reads and writes, as STREAM counts them: what the cache fetches for itself before
    a write is not among them.
    """

    flops_per_s: float  #: all threads together
    flops_per_s_one_thread: float
    bytes_per_s: float  #: main memory, all threads: c = a + s * b
    l2_bytes_per_s: float  #: all threads, each on data that stays in its L2: b = a + s * b

    def best(self, other: RoofMeasurement) -> RoofMeasurement:
        """Of two measurements of one device the higher figures: each was reached, and a busy machine only hides."""
        return RoofMeasurement(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class _Spec:
    target: str
    cache_bytes: tuple[int, ...]
    threads: int


def measure(target: str, cache_bytes: Sequence[int], threads: int, *, deadline_s: float = 120.0) -> RoofMeasurement:
    """The roof of this machine for `threads` threads. `target` is TVM's as canonical JSON, `cache_bytes` are L1 data,
    L2 and L3 of one core as far as known: both as `local_cpu` reports them.

    Takes 3 to 5 s, TVM's import included, and longer on a busy machine. Raises RoofNotMeasured.
    """
    spec = _Spec(target, tuple(cache_bytes), threads)
    environment = {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
    return measured_apart("workers.devices.roof", asdict(spec), environment, deadline_s)


def measured_apart(
    module: str, spec: Mapping[str, Any], environment: Mapping[str, str], deadline_s: float
) -> RoofMeasurement:
    """What `python -m module SPEC PARENT` prints. Raises RoofNotMeasured."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(spec), str(os.getpid())],
            capture_output=True, text=True, env={**os.environ, **environment}, timeout=deadline_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RoofNotMeasured(f"the roof was not measured within {deadline_s:.0f} s") from None
    if done.returncode != 0:
        raise RoofNotMeasured(
            f"the process that measures the roof ended with status {done.returncode}: {last_line(done.stderr)}"
        )
    return RoofMeasurement(**json.loads(done.stdout))


# --- Kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registers:
    """The vector registers that a target's code may use."""

    lanes: int  #: float32 in one
    count: int

    @classmethod
    def of(cls, target: Any) -> Registers:
        from tvm.target import codegen

        # llvm_get_vector_width says 512 bits of every x86-64.
        features = {str(name) for name in codegen.llvm_get_cpu_features(target)}
        return cls(*vector_registers(str(target.attrs["mtriple"]).partition("-")[0], features))

    @property
    def accumulators(self) -> int:
        """As many as leave room for the two operands and a spare: more than latency times throughput on any core."""
        return self.count - 4


def fma_kernel(registers: Registers, threads: int) -> Any:
    """`main(a, b, out, steps)`: in each thread, a * b is added to each accumulator, a vector, 8 * `steps` times. `a`,
    `b`: one vector; `out`: [threads, accumulators, lanes]."""
    lanes, accumulators = registers.lanes, registers.accumulators
    # Unrolled, so that each accumulator stays in a register of its own. Fused by name: a product of two that do not
    # change would be taken out of the loop.
    return _parse(
        f"""
@T.prim_func(s_tir=True)
def main(a: T.Buffer(({lanes},), "float32"), b: T.Buffer(({lanes},), "float32"),
         out: T.Buffer(({threads}, {accumulators}, {lanes}), "float32"), steps: T.int64):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    for thread in T.parallel({threads}):
        sums = T.sblock_alloc_buffer(({accumulators}, {lanes}), "float32", scope="local")
        for i in T.unroll({accumulators}):
            for lane in T.vectorized({lanes}):
                sums[i, lane] = T.float32(0)
        for step in range(steps):
            for repeat in T.unroll(8):
                for i in T.unroll({accumulators}):
                    for lane in T.vectorized({lanes}):
                        sums[i, lane] = T.fma(a[lane], b[lane], sums[i, lane])
        for i in T.unroll({accumulators}):
            for lane in T.vectorized({lanes}):
                out[thread, i, lane] = sums[i, lane]
"""
    )


def triad_kernel(registers: Registers, threads: int, vectors: int) -> Any:
    """`main(a, b, c)`: c = a + 0.5 * b. All are [threads, vectors, lanes]."""
    shape = f"({threads}, {vectors}, {registers.lanes})"
    return _parse(
        f"""
@T.prim_func(s_tir=True)
def main(a: T.Buffer({shape}, "float32"), b: T.Buffer({shape}, "float32"), c: T.Buffer({shape}, "float32")):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    for thread in T.parallel({threads}):
        for i in range({vectors}):
            for lane in T.vectorized({registers.lanes}):
                c[thread, i, lane] = a[thread, i, lane] + b[thread, i, lane] * T.float32(0.5)
"""
    )


def resident_kernel(registers: Registers, threads: int, vectors: int) -> Any:
    """`main(a, b, steps)`: b = a + 0.5 * b, `steps` times over the same data. Both are [threads, vectors, lanes]."""
    shape = f"({threads}, {vectors}, {registers.lanes})"
    return _parse(
        f"""
@T.prim_func(s_tir=True)
def main(a: T.Buffer({shape}, "float32"), b: T.Buffer({shape}, "float32"), steps: T.int64):
    T.func_attr({{"tirx.noalias": True, "global_symbol": "main"}})
    for thread in T.parallel({threads}):
        for step in range(steps):
            for i in range({vectors}):
                for lane in T.vectorized({registers.lanes}):
                    b[thread, i, lane] = a[thread, i, lane] + b[thread, i, lane] * T.float32(0.5)
"""
    )


def _parse(source: str) -> Any:
    import tvm.script

    return tvm.script.from_source(source)


def compile_kernel(function: Any, target: Any) -> Any:
    """The function as machine code for `target`; `inspect_source("asm")` of the result shows it."""
    import tvm

    return tvm.compile(tvm.IRModule({"main": function}), target=target)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is timed: whoever compiles the kernels makes it, whoever times them follows it."""

    lanes: int  #: as in `Registers`
    count: int
    threads: int
    triad_vectors: int  #: of each thread
    resident_vectors: int

    @classmethod
    def of(cls, target: Any, cache_bytes: Sequence[int], threads: int, memory_bytes: int) -> Plan:
        """For a device of TVM's `target` with these caches of a core and so much memory."""
        registers = Registers.of(target)
        level1, level2, last = caches(cache_bytes)
        vector_bytes = 4 * registers.lanes
        # Each array four times the last cache: STREAM's rule for data of which none is left when it comes again.
        array_bytes = min(4 * last, int(memory_bytes * _MEMORY_SHARE / 3))
        # Well past L1 and, whether the cores share L2 or not, within it.
        resident = max(4 * level1, level2 // (2 * threads)) // (2 * vector_bytes)
        return cls(registers.lanes, registers.count, threads, array_bytes // (threads * vector_bytes), resident)

    @property
    def registers(self) -> Registers:
        return Registers(self.lanes, self.count)

    def kernels(self) -> dict[str, Any]:
        """The kernels that `time_kernels` wants, to be compiled."""
        flops = {f"fma{threads}": fma_kernel(self.registers, threads) for threads in (1, self.threads)}
        return {
            **flops,
            "triad": triad_kernel(self.registers, self.threads, self.triad_vectors),
            "resident": resident_kernel(self.registers, self.threads, self.resident_vectors),
        }


# --- In the measuring process, here or on a board: TVM's runtime is enough --------------------------------------------


def time_kernels(plan: Plan, kernels: Mapping[str, Callable[..., object]]) -> RoofMeasurement:
    """Time the compiled kernels in this process, whose TVM must take `plan.threads` threads."""
    import tvm.runtime

    registers, threads = plan.registers, plan.threads
    flops = {count: _flops_per_s(kernels[f"fma{count}"], registers, count) for count in (1, threads)}

    vector_bytes = 4 * registers.lanes
    triad, vectors = kernels["triad"], plan.triad_vectors
    arrays = [tvm.runtime.empty((threads, vectors, registers.lanes), "float32") for _ in range(3)]
    for turn in range(3):  # memory that was never written is the kernel's one page of zeros: write each of them first
        triad(*arrays[turn:], *arrays[:turn])
    bytes_per_s = 3 * threads * vectors * vector_bytes / _shortest_s(lambda: triad(*arrays))
    del arrays

    resident, vectors = kernels["resident"], plan.resident_vectors
    arrays = [_array((threads, vectors, registers.lanes), value) for value in (1.0, 0.0)]
    step_s = _step_s(lambda steps: resident(*arrays, steps))
    return RoofMeasurement(
        flops_per_s=max(flops.values()),
        flops_per_s_one_thread=flops[1],
        bytes_per_s=bytes_per_s,
        l2_bytes_per_s=3 * threads * vectors * vector_bytes / step_s,
    )


def _flops_per_s(kernel: Callable[..., object], registers: Registers, threads: int) -> float:
    half = [_array((registers.lanes,), 0.5) for _ in range(2)]
    out = _array((threads, registers.accumulators, registers.lanes), 0.0)
    step_s = _step_s(lambda steps: kernel(*half, out, steps))
    return threads * registers.accumulators * registers.lanes * 8 * 2 / step_s


def caches(cache_bytes: Sequence[int]) -> tuple[int, int, int]:
    """L1, L2 and the last level in bytes, the usual sizes where the machine hides its own."""
    level1, level2, last = (*cache_bytes, *_USUAL_CACHES[len(cache_bytes) :])[:3]
    return level1, level2, max(level2, last)


def _array(shape: tuple[int, ...], value: float) -> Any:
    import numpy as np
    import tvm.runtime

    return tvm.runtime.tensor(np.full(shape, value, dtype=np.float32))


def _step_s(call: Callable[[int], object]) -> float:
    """Seconds of one step of a kernel that is told how many to take."""
    steps = 1
    while (taken_s := _shortest_s(partial(call, steps), seconds=0.01)) < _SAMPLE_S:
        steps = max(2 * steps, int(steps * _SAMPLE_S / taken_s))
    return _shortest_s(partial(call, steps)) / steps


def _shortest_s(call: Callable[[], object], seconds: float = _SECONDS_EACH) -> float:
    """The shortest of the calls that fit into `seconds`, of three at least. The first is a warm-up."""
    call()
    samples: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start_s)
    return min(samples)


def run(spec: _Spec) -> RoofMeasurement:
    """Compile and time everything in this process."""
    import tvm

    target = tvm.target.Target(json.loads(spec.target))
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    plan = Plan.of(target, spec.cache_bytes, spec.threads, physical_bytes)
    return time_kernels(plan, {n: compile_kernel(f, target)["main"] for n, f in plan.kernels().items()})


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[1]))
    data: Mapping[str, Any] = json.loads(arguments[0])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = _Spec(str(data["target"]), tuple(data["cache_bytes"]), int(data["threads"]))
    json.dump(asdict(run(spec)), answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
