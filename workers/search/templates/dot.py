"""Dot products of four bytes as tensor intrinsics: what sums of integers are made of on each kind of CPU.

Each adds, for every lane of a register of int32, the products of four bytes of data, which are the same for all lanes,
by four int8 weights of its own. All are exact:

- `vpdpbusd` (AVX512-VNNI, AVX-VNNI): uint8 by int8, one instruction.
- `usdot` (aarch64 with i8mm): the same.
- `sdot` (aarch64 with dotprod): int8 by int8. Data is read less 128, which the constant of the sums makes good.
- `pmaddwd` (SSE2, AVX2, AVX512-BW): int16 by int16, of the even and of the odd bytes. `pmaddubsw`, which takes bytes,
  adds two products in 16 bits and cuts them off: 2 · 255 · 128 is twice too large.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from tvm.s_tir import TensorIntrin
from tvm.script import from_source

from workers.search.templates.knobs import BELOW, PMADDWD, SDOT, USDOT, VPDPBUSD

#: LLVM's names, by kind and lanes.
_LLVM: Final[Mapping[tuple[str, int], str]] = {
    # AVX-VNNI has them too, by another encoding.
    **{(VPDPBUSD, lanes): f"llvm.x86.avx512.vpdpbusd.{32 * lanes}" for lanes in (4, 8, 16)},
    (PMADDWD, 4): "llvm.x86.sse2.pmadd.wd",
    (PMADDWD, 8): "llvm.x86.avx2.pmadd.wd",
    (PMADDWD, 16): "llvm.x86.avx512.pmaddw.d.512",
    (USDOT, 4): "llvm.aarch64.neon.usdot.v4i32.v16i8",
    (SDOT, 4): "llvm.aarch64.neon.sdot.v4i32.v16i8",
}

#: Sums of `lanes` slots, each of a dot product of four. The desc is what it replaces, the other what it becomes. TVM's
#: own (`dot_16x4_vnni`) passes vectors of int32, which LLVM 22 refuses.
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
                    C[vi] = C[vi] + {factor} * T.cast(B[vi, vk], "int32")
"""
_IMPL: Final = """
        C[T.ramp(T.int32(0), 1, {lanes})] = {sums}
"""
_CALL: Final = 'T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id("{llvm}"), {arguments}, dtype="int32x{lanes}")'
_SUMS: Final = 'C.vload([0], dtype="int32x{lanes}")'
_FOUR: Final = 'T.broadcast(T.reinterpret(A.vload([0], "uint8x4"), dtype="int32"), {lanes})'
_DATA: Final = f'T.reinterpret({_FOUR}, dtype="{{to}}")'
_WEIGHTS: Final = 'B.vload([0, 0], dtype="int8x{bytes}")'


def _expression(kind: str, lanes: int) -> str:
    """The sums after one more dot product each."""
    numbers, words = 4 * lanes, 2 * lanes
    sums, weights = _SUMS.format(lanes=lanes), _WEIGHTS.format(bytes=numbers)
    data = _DATA.format(lanes=lanes, to=f"uint8x{numbers}")

    def call(*arguments: str) -> str:
        return _CALL.format(llvm=_LLVM[kind, lanes], arguments=", ".join(arguments), lanes=lanes)

    if kind == SDOT:
        data = f"T.bitwise_xor({data}, T.broadcast(T.uint8({BELOW}), {numbers}))"
        return call(sums, f'T.reinterpret({data}, dtype="int8x{numbers}")', weights)
    if kind in (VPDPBUSD, USDOT):
        return call(sums, data, weights)
    data, weights = (
        _DATA.format(lanes=lanes, to=f"uint16x{words}"), f'T.reinterpret({weights}, dtype="int16x{words}")'
    )  # fmt: skip
    byte = f"T.broadcast(T.int16(8), {words})"
    even = f"T.bitwise_and({data}, T.broadcast(T.uint16(255), {words}))"
    odd = f"T.shift_right({data}, T.broadcast(T.uint16(8), {words}))"
    even, odd = (f'T.reinterpret({part}, dtype="int16x{words}")' for part in (even, odd))
    return " + ".join(
        [
            sums,
            call(even, f"T.shift_right(T.shift_left({weights}, {byte}), {byte})"),
            call(odd, f"T.shift_right({weights}, {byte})"),
        ]
    )


#: What the intrinsics are called.
_NAMED: Final = re.compile(rf"tunery_({VPDPBUSD}|{USDOT}|{SDOT}|{PMADDWD})_(\d+)")


@functools.cache
def dot_intrinsic(kind: str, lanes: int) -> str:
    """The name under which TVM knows the dot products of this kind of so many sums, a whole register of them."""
    name = f"tunery_{kind}_{lanes}"
    data = 'T.cast(A[vk], "int32")'
    factor = f"({data} - {BELOW})" if kind == SDOT else data
    desc = from_source((_DOT + _DESC).format(kind="desc", lanes=lanes, factor=factor))
    impl = from_source((_DOT + _IMPL).format(kind="impl", lanes=lanes, sums=_expression(kind, lanes)))
    TensorIntrin.register(name, desc, impl, override=True)
    return name


def register_intrinsics(trace: str) -> None:
    """Make known to this process what a stored trace replaces loops by: it is made where it is used first."""
    for kind, lanes in set(_NAMED.findall(trace)):
        dot_intrinsic(kind, int(lanes))
