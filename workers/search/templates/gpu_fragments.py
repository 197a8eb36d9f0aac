"""What tensor cores do with matrices of 16 by 16, as tensor intrinsics: load, multiply and add, store (CUDA's WMMA).

TVM has them too (`tvm.s_tir.tensor_intrin.cuda`), but for a left matrix of which columns lie side by side in memory,
among hundreds whose import takes a process a quarter of a minute. These are made where they are used first.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from tvm.s_tir import TensorIntrin
from tvm.script import from_source

#: Where fragments come from and go to. Memory that is shared out at launch: of such, TVM lets buffers of any types have
#: the same place one after the other. Of the other kind it does so for types that differ too, and then refuses it.
SCOPE: Final = "shared.dyn"
SIDE: Final = 16  #: of a fragment: rows, columns and steps of the sum
#: What sums are of, by what is multiplied.
SUMS: Final = {"float16": "float32", "int8": "int32"}
#: How a matrix lies in memory: what is adjacent are numbers of a row, or of a column.
ROW: Final = "row"
COLUMN: Final = "col"

_BUFFER: Final = (
    '{name} = T.match_buffer({handle}, (16, 16), "{dtype}", align=64, offset_factor=16, scope="{scope}"{strides})'
)
#: Which fragment of its buffer one is: the loops over them are not of one length.
_INDEX: Final = "{name}.elem_offset // {name}_1 // 16 * ({name}_1 // 16) + {name}.elem_offset % {name}_1 // 16"
_FUNCTION: Final = """
@T.prim_func(s_tir=True)
def intrinsic({handles}) -> None:
{body}
"""


def _function(buffers: dict[str, tuple[str, str]], access: str, inner: str, *, strides: bool) -> str:
    """Source of one side of an intrinsic: the buffers' types and scopes, what it reads and writes, what it does."""
    lines = []
    for name, (dtype, scope) in buffers.items():
        if strides:
            lines += [f"{name}_1 = T.int32()", f"{name}_0 = T.int32()"]
        lines.append(
            _BUFFER.format(
                name=name, handle=name.lower(), dtype=dtype, scope=scope,
                strides=f", strides=[{name}_1, {name}_0]" if strides else "",
            )
        )  # fmt: skip
    lines += ['with T.sblock("root"):', *(f"    {line}" for line in [*access.splitlines(), *inner.splitlines()])]
    handles = ", ".join(f"{name.lower()}: T.handle" for name in buffers)
    return _FUNCTION.format(handles=handles, body="\n".join(f"    {line}" for line in lines))


def _register(name: str, buffers: dict[str, tuple[str, str]], access: str, desc: str, impl: str) -> str:
    TensorIntrin.register(
        name,
        from_source(_function(buffers, access, desc, strides=False)),
        from_source(_function(buffers, access, impl, strides=True)),
        override=True,
    )
    return name


def _copy(source: str, destination: str) -> str:
    return f"""for i, j in T.grid(16, 16):
    with T.sblock("copy"):
        vi, vj = T.axis.remap("SS", [i, j])
        {destination}[vi, vj] = {source}[vi, vj]"""


_COPIES: Final = "T.reads(A[0:16, 0:16])\nT.writes(C[0:16, 0:16])"


@functools.cache
def load(use: str, dtype: str, order: str) -> str:
    """The name of the intrinsic that loads a fragment of the left ("a") or the right ("b") matrix."""
    impl = (
        f"T.evaluate(T.tvm_load_matrix_sync(C.data, 16, 16, 16, {_INDEX.format(name='C')}, "
        f'A.access_ptr("r", ptr_type="{dtype}"), A_1, "{order}_major", dtype="void"))'
    )
    buffers = {"A": (dtype, SCOPE), "C": (dtype, f"wmma.matrix_{use}")}
    return _register(f"tunery_wmma_load_{use}_{dtype}_{order}", buffers, _COPIES, _copy("A", "C"), impl)


@functools.cache
def store(dtype: str) -> str:
    """The name of the intrinsic that stores sums to shared memory."""
    impl = (
        f"T.evaluate(T.tvm_store_matrix_sync(A.data, 16, 16, 16, {_INDEX.format(name='A')}, "
        f'C.access_ptr("w", ptr_type="{dtype}"), C_1, "row_major", dtype="void"))'
    )
    buffers = {"A": (dtype, "wmma.accumulator"), "C": (dtype, SCOPE)}
    return _register(f"tunery_wmma_store_{dtype}", buffers, _COPIES, _copy("A", "C"), impl)


@functools.cache
def fill(dtype: str) -> str:
    """The name of the intrinsic that sets sums to 0."""
    desc = f"""for i, j in T.grid(16, 16):
    with T.sblock("fill"):
        vi, vj = T.axis.remap("SS", [i, j])
        C[vi, vj] = T.{dtype}(0)"""
    impl = f'T.evaluate(T.tvm_fill_fragment(C.data, 16, 16, 16, {_INDEX.format(name="C")}, T.float32(0), dtype="void"))'
    access = "T.reads()\nT.writes(C[0:16, 0:16])"
    return _register(f"tunery_wmma_fill_{dtype}", {"C": (dtype, "wmma.accumulator")}, access, desc, impl)


@functools.cache
def multiply(dtype: str, left: str, right: str, first: str) -> str:
    """The name of the intrinsic that adds the product of two fragments, which lie in these orders, to sums.

    `first`: which of them, "a" (left) or "b" (right), the product names first; TVM does not know that it is the same.
    """
    sums = SUMS[dtype]
    factors = {"a": "vi, vk" if left == ROW else "vk, vi", "b": "vk, vj" if right == ROW else "vj, vk"}
    names = [name.upper() for name in sorted(factors, reverse=first == "b")]
    product = " * ".join(f'T.cast({name}[{factors[name.lower()]}], "{sums}")' for name in names)
    desc = f"""for i, j, k in T.grid(16, 16, 16):
    with T.sblock("multiply"):
        vi, vj, vk = T.axis.remap("SSR", [i, j, k])
        C[vi, vj] = C[vi, vj] + {product}"""
    fragments = ", ".join(f"{name}.data, {_INDEX.format(name=name)}" for name in ("C", "A", "B", "C"))
    impl = f'T.evaluate(T.tvm_mma_sync({fragments}, dtype="void"))'
    access = f"T.reads({', '.join(f'{name}[0:16, 0:16]' for name in ('C', *names))})\nT.writes(C[0:16, 0:16])"
    buffers = {"A": (dtype, "wmma.matrix_a"), "B": (dtype, "wmma.matrix_b"), "C": (sums, "wmma.accumulator")}
    return _register(f"tunery_wmma_multiply_{dtype}_{left}_{right}_{first}", buffers, access, desc, impl)


_NAMED: Final = re.compile(r"tunery_wmma_(load|store|fill|multiply)_(\w+)")
_MADE_BY: Final = {"load": load, "store": store, "fill": fill, "multiply": multiply}


def register_fragments(trace: str) -> None:
    """Make known to this process what a stored trace replaces loops by: it is made where it is used first."""
    for kind, arguments in set(_NAMED.findall(trace)):
        _MADE_BY[kind](*arguments.split("_"))
