"""GPU code inside an exported library: which architecture it is for, and machine code in the place of source.

Without NVIDIA's driver TVM embeds the CUDA source of the kernels, which a device would compile anew at each load, or
not at all. This reads what a library embeds, as tvm_ffi/src/ffi/extra/library_module.cc lays it out, and replaces
source by cubins. An ELF file's own fields tell the architecture: nothing is taken on trust from who compiled it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tuning_db.errors import BuildFailed
from workers.elf import Elf

#: The symbol under which TVM's runtime finds the modules that a library embeds.
SYMBOL: Final = "__tvm_ffi__library_bin"
_EM_CUDA: Final = 190  #: an ELF file's machine, of cubins
#: EI_ABIVERSION of a cubin from which on e_flags hold the architecture in bits 8 to 15; before, in bits 0 to 7
#: (llvm/include/llvm/BinaryFormat/ELF.h, EF_CUDA_SM).
_ABI_WITH_SHIFT: Final = 8


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one GPU module."""

    arch: str  #: such as "sm_87"
    kernels: tuple[str, ...]
    size_bytes: int

    @classmethod
    def read(cls, code: bytes) -> Self:
        """BuildFailed if `code` is no cubin."""
        try:
            elf = Elf(code)
        except (ValueError, struct.error):
            raise BuildFailed(f"{len(code)} bytes of GPU code are no machine code") from None
        if elf.machine != _EM_CUDA:
            raise BuildFailed(f"GPU code is for ELF machine {elf.machine}, not for a GPU")
        number = elf.flags >> 8 & 0xFF if elf.abi_version >= _ABI_WITH_SHIFT else elf.flags & 0xFF
        kernels = [name.removeprefix(".text.") for name in elf.section_names if name.startswith(".text.")]
        return cls(f"sm_{number}", tuple(sorted(kernels)), len(code))


@dataclass(frozen=True, slots=True)
class Embedded:
    """One module that a library embeds, in the order of its file."""

    kind: str  #: "cuda", "relax.VMExecutable", …; "_lib" for the library's own functions
    data: bytes


def machine_code(library: Path) -> tuple[Cubin, ...]:
    """The machine code of each GPU module in a library. BuildFailed if one of them holds anything else."""
    _, modules = _parse(embedded(library.read_bytes()))
    return tuple(Cubin.read(_binary(module.data)) for module in modules if module.kind == "cuda")


def check(library: Path, arch: str) -> tuple[Cubin, ...]:
    """The library's machine code. BuildFailed unless it has some, and it is for exactly `arch`."""
    found = machine_code(library)
    if not any(cubin.kernels for cubin in found):
        raise BuildFailed(f"{library.name} holds no GPU kernel")
    for cubin in found:
        if cubin.arch != arch:
            raise BuildFailed(f"{library.name} holds machine code for {cubin.arch}; {arch} was asked for")
    return found


def replace_source(file: bytes, cubins: Mapping[str, bytes]) -> bytes:
    """An object file that embeds modules, with each GPU module's source replaced by its cubin. `cubins`: by source.

    BuildFailed if the source of a module has no cubin.
    """
    head, modules = _parse(embedded(file))
    body = bytearray(head)
    for module in modules:
        body += _string(module.kind.encode())
        if module.kind == "cuda":
            body += _string(_with_cubin(module.data, cubins))
        elif module.kind != "_lib":
            body += _string(module.data)
    return Elf(file).with_data(SYMBOL, _string(bytes(body)))


def embedded(file: bytes) -> bytes:
    """The modules that an object or a library embeds, packed. BuildFailed if it embeds none."""
    try:
        elf = Elf(file)
        start = elf.offset_of(SYMBOL)
        (size,) = struct.unpack_from("<Q", file, start)
    except (ValueError, struct.error) as error:
        raise BuildFailed(f"not a library with GPU code: {error}") from None
    return file[start : start + 8 + size]


# --- TVM's layout: 64-bit little-endian lengths before strings, bytes and vectors -------------------------------------


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _parse(data: bytes) -> tuple[bytes, list[Embedded]]:
    """The import tree as it is, and the modules."""
    position = 8

    def take() -> bytes:
        nonlocal position
        (size,) = struct.unpack_from("<Q", data, position)
        if position + 8 + size > len(data):
            raise BuildFailed("what the library embeds is cut short")
        position += 8 + size
        return data[position - size : position]

    def skip_vector() -> int:
        nonlocal position
        (count,) = struct.unpack_from("<Q", data, position)
        position += 8 + 8 * count
        return int(count)

    try:
        count = skip_vector() - 1
        skip_vector()
        head = data[8:position]
        modules = []
        for _ in range(count):
            kind = take().decode()
            modules.append(Embedded(kind, b"" if kind == "_lib" else take()))
    except (struct.error, UnicodeDecodeError):
        raise BuildFailed("what the library embeds is not laid out as this version of TVM does it") from None
    if position != len(data):
        raise BuildFailed("what the library embeds is not laid out as this version of TVM does it")
    return head, modules


def _with_cubin(module: bytes, cubins: Mapping[str, bytes]) -> bytes:
    """A GPU module is its format, the kernels' signatures, and last the code: source here, a cubin in the result."""
    start = _string(b"cuda")
    for source, cubin in cubins.items():
        end = _string(source.encode())
        if module.startswith(start) and module.endswith(end):
            return _string(b"cubin") + module[len(start) : -len(end)] + _string(cubin)
    raise BuildFailed("a GPU module's source was not compiled")


def _binary(module: bytes) -> bytes:
    """The code of a GPU module. BuildFailed if it is source or an intermediate form."""
    (size,) = struct.unpack_from("<Q", module, 0)
    kind = module[8 : 8 + size]
    if kind != b"cubin":
        raise BuildFailed(f"the library holds GPU code as {kind.decode(errors='replace')!r}, not as machine code")
    start = module.find(b"\x7fELF")
    while start >= 8:
        if struct.unpack_from("<Q", module, start - 8) == (len(module) - start,):
            return module[start:]
        start = module.find(b"\x7fELF", start + 1)
    raise BuildFailed("the library's GPU code is no machine code")
