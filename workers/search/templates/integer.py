"""Template `integer`: int8 convolutions in a tile of registers of sums, by dot products of four where the CPU has them.

As in template `conv` a tile of `tile_o` blocks of channels by `tile_w` pixels is summed in registers and written back
once. One step multiplies one vector of weights, four slots of input for each slot of output, by four neighbouring bytes
of data that go to all lanes. With `dot` that is one `vpdpbusd`; without it, the multiplications that LLVM finds.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, ClassVar, Final

from tvm.s_tir import TensorIntrin
from tvm.script import from_source

from workers.search.templates.knobs import Config, Cpu, Geometry, Template, divisors, spread

#: A task shorter than this many operations costs more to hand to a thread than to do.
_SERIAL_OPERATIONS: Final = 200_000

_MIN_SUMS: Final = 4

#: Sums of `lanes` slots, each of a dot product of four: uint8 by int8, exact, wrapping in 32 bits. The desc is what it
#: replaces, the other what it becomes. TVM's own (`dot_16x4_vnni`) passes vectors of int32, which LLVM 22 refuses.
_DOT: Final = """
@T.prim_func(s_tir=True)
def {kind}(
    A: T.Buffer((4,), "uint8", offset_factor=1),
    B: T.Buffer(({lanes}, 4), "int8", offset_factor=1),
    C: T.Buffer(({lanes},), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:{lanes}], A[0:4], B[0:{lanes}, 0:4])
        T.writes(C[0:{lanes}])
"""
_DESC: Final = """
        for i in T.serial(0, {lanes}):
            for k in T.serial(0, 4):
                with T.sblock("update"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")
"""
_IMPL: Final = """
        C[T.ramp(T.int32(0), 1, {lanes})] = T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpdpbusd.{bits}"),
            C.vload([0], dtype="int32x{lanes}"),
            T.reinterpret(
                T.broadcast(T.reinterpret(A.vload([0], "uint8x4"), dtype="int32"), {lanes}), dtype="uint8x{bytes}"
            ),
            B.vload([0, 0], dtype="int8x{bytes}"),
            dtype="int32x{lanes}",
        )
"""


#: What the intrinsic is called, before its number of sums.
_NAME: Final = "tunery_vpdpbusd_"
_NAMED: Final = re.compile(rf"{_NAME}(\d+)")


@functools.cache
def dot_intrinsic(lanes: int) -> str:
    """The name under which TVM knows `vpdpbusd` of so many sums, a whole register of them."""
    sizes = {"lanes": lanes, "bits": 32 * lanes, "bytes": 4 * lanes}
    desc, impl = (
        from_source((_DOT + body).format(kind=kind, **sizes)) for kind, body in (("desc", _DESC), ("impl", _IMPL))
    )
    name = f"{_NAME}{lanes}"
    TensorIntrin.register(name, desc, impl, override=True)
    return name


def register_intrinsics(trace: str) -> None:
    """Make known to this process what a stored trace replaces loops by: it is made where it is used first."""
    for lanes in set(_NAMED.findall(trace)):
        dot_intrinsic(int(lanes))


class IntegerTemplate(Template):
    name: ClassVar[str] = "integer"
    knobs: ClassVar[tuple[str, ...]] = ("tile_o", "tile_w", "dot", "by_rows", "parallel")

    def configs(self, geometry: Geometry, cpu: Cpu) -> list[Config]:
        g = geometry
        vectors = max(1, g["v"] // cpu.lanes)
        operations = 2 * g["n"] * g["o"] * g["h"] * g["w"] * g["v"] * g["ic"] * g["kh"] * g["kw"] * g["ii"]
        found: list[Config] = [
            {"tile_o": tile_o, "tile_w": tile_w, "dot": dot, "by_rows": by_rows, "parallel": parallel}
            for tile_o in divisors(g["o"], 6)
            for tile_w in self._widths(g["w"], cpu.registers)
            # The sums, the weights of a step, and the data that goes to all lanes.
            if tile_o * tile_w * vectors + tile_o * vectors + 1 <= cpu.registers
            # Fewer sums leave a product waiting for the one before it.
            and tile_o * tile_w * vectors >= min(_MIN_SUMS, g["w"])
            for dot in ((1,) if cpu.dot and g["v"] == cpu.lanes else (0,))
            for by_rows in (0, 1)
            for parallel in ((1,) if operations > _SERIAL_OPERATIONS else (0, 1))
        ]
        found.sort(key=lambda config: self._badness(g, config, vectors))
        return found

    @staticmethod
    def _widths(width: int, most: int) -> list[int]:
        """Widths that divide the row, and the most that fit where no good one does: their tail is cut off."""
        exact = divisors(width, most)
        return exact if exact[-1] >= min(width, 6) else [*exact, *spread(range(6, min(width, most) + 1), 6)]

    @staticmethod
    def _badness(g: Geometry, c: Config, vectors: int) -> float:
        sums = c["tile_o"] * c["tile_w"] * vectors
        loads = (c["tile_w"] + c["tile_o"] * vectors) / sums
        rounded = -(-g["w"] // c["tile_w"]) * c["tile_w"] / g["w"]
        return rounded * (1 + loads + 0.3 * max(0, 8 - sums) / 8) + 0.01 * c["by_rows"]

    def apply(self, schedule: Any, geometry: Geometry, config: Config, cpu: Cpu) -> None:
        c = config
        total, result = schedule.get_sblock("sum"), schedule.get_sblock("result")
        n, o, h, w, v, ic, kh, kw, fours, four = schedule.get_loops(total)
        oo, oi = schedule.split(o, [None, c["tile_o"]])
        wo, wi = schedule.split(w, [None, c["tile_w"]])
        outer = [n, h, oo] if c["by_rows"] else [n, oo, h]
        schedule.reorder(*outer, wo, ic, kh, kw, fours, oi, wi, v, four)
        schedule.reverse_compute_at(result, wo)
        schedule.set_scope(total, 0, "local")
        task = schedule.fuse(*outer)
        if c["parallel"]:
            schedule.parallel(task)
        for loop in (oi, wi):
            schedule.unroll(loop)
        self._write_back(schedule, result)
        for name, there in (("quantized", geometry["quantized"]), ("stage", geometry["staged"])):
            if there:
                self._place_rows(schedule, schedule.get_sblock(name), geometry, c, cpu)
        if not c["dot"]:
            schedule.reorder(four, v)
            schedule.unroll(four)
            schedule.vectorize(v)
        self._write_back(schedule, schedule.decompose_reduction(total, ic))
        if c["dot"]:
            schedule.tensorize(v, dot_intrinsic(geometry["v"]))

    @staticmethod
    def _place_rows(schedule: Any, block: Any, g: Geometry, c: Config, cpu: Cpu) -> None:
        """What is made of all the data before anything is summed."""
        loops = schedule.get_loops(block)
        # Few channels side by side are gathered from as many planes: there is no vector to load.
        if not g["plain"]:
            schedule.vectorize(loops[-1])
        elif len(loops) == 4 and int(schedule.get(loops[-1]).extent) % cpu.lanes == 0:
            _, vector = schedule.split(loops[-1], [None, cpu.lanes])
            schedule.vectorize(vector)
        rows = schedule.fuse(*loops[:3])
        if c["parallel"]:
            schedule.parallel(rows)

    @staticmethod
    def _write_back(schedule: Any, block: Any) -> None:
        *_, across, along, lanes = schedule.get_loops(block)
        schedule.vectorize(lanes)
        for loop in (across, along):
            schedule.unroll(loop)

    def features(self, geometry: Geometry, config: Config, cpu: Cpu) -> list[float]:
        g, c = geometry, config
        vectors = max(1, g["v"] // cpu.lanes)
        sums = c["tile_o"] * c["tile_w"] * vectors
        reduction = g["ic"] * g["kh"] * g["kw"] * g["ii"]
        along = -(-g["w"] // c["tile_w"])
        return [
            sums,
            (c["tile_w"] + c["tile_o"] * vectors) / sums,
            c["tile_o"], c["tile_w"], c["dot"], c["by_rows"], c["parallel"],
            along * c["tile_w"] / g["w"],
            math.log2(g["n"] * g["h"] * (g["o"] // c["tile_o"])),
            math.log2(c["tile_o"] * g["v"] * reduction / cpu.l1_bytes),
            math.log2(reduction), math.log2(g["ic"]), g["kh"], g["kw"], g["stride"], math.log2(g["h"] * g["w"]),
            math.log2(g["o"]), g["staged"], g["quantized"], g["plain"], g["others"], g["bytes"],
        ]  # fmt: skip
