"""Links object files into shared libraries for this machine's CPU or another's, and says what is missing for that.

LLVM compiles for every CPU; a linker is for one. Libraries for another machine are linked against nothing of its C
library, so they ask for no version of it: what they call is there when TVM's runtime has loaded it.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.elf import HEAD_BYTES, machine_of
from workers.said import last_line


@dataclass(frozen=True, slots=True)
class _Architecture:
    triple: str  #: LLVM's
    machine: tuple[int, int]  #: ELF's e_machine and class (1: 32 bits, 2: 64 bits)
    prefix: str  #: of GNU's programs
    debian: str  #: in the names of Debian's packages


#: By what `uname -m` says.
_ARCHITECTURES: Final = {
    "x86_64": _Architecture("x86_64-linux-gnu", (62, 2), "x86_64-linux-gnu", "x86-64-linux-gnu"),
    "aarch64": _Architecture("aarch64-linux-gnu", (183, 2), "aarch64-linux-gnu", "aarch64-linux-gnu"),
    "armv7l": _Architecture("armv7l-linux-gnueabihf", (40, 1), "arm-linux-gnueabihf", "arm-linux-gnueabihf"),
    "riscv64": _Architecture("riscv64-linux-gnu", (243, 2), "riscv64-linux-gnu", "riscv64-linux-gnu"),
}


class NoLinker(Exception):
    """Nothing here links for this architecture. The message says what to install."""


class LinkFailed(Exception):
    """The linker refused. The message is its last line."""


class WrongMachine(Exception):
    """The linker's output is not a library for the machine that it was asked for."""


@dataclass(frozen=True, slots=True)
class Linker:
    """The command that links for one architecture."""

    arch: str  #: as `uname -m` says
    command: tuple[str, ...]  #: output and objects follow
    after: tuple[str, ...] = ()  #: what follows the objects

    def link(self, library: str | Path, objects: Sequence[str | Path]) -> None:
        """Raises LinkFailed with what the linker said, or WrongMachine."""
        command = [*self.command, "-o", str(library), *map(str, objects), *self.after]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise LinkFailed(f"{self.command[0]}: {last_line(done.stderr, f'status {done.returncode}')}")
        check_machine(Path(library), self.arch)

    def export(self, library: str, objects: Sequence[str], **_: Any) -> None:
        """`link`, as TVM's `export_library` calls its `fcompile`."""
        self.link(library, objects)


def triple_of(arch: str) -> str:
    """LLVM's triple of Linux on this architecture. KeyError for one that nothing here compiles for."""
    return _ARCHITECTURES[arch].triple


def arch_of(target_json: str) -> str:
    """The architecture that a target, as JSON, compiles for, as `uname -m` says it there."""
    return str(json.loads(target_json)["mtriple"]).partition("-")[0]


def linker_for(arch: str) -> Linker:
    """What is installed for `arch`: this machine's linker for its own, a cross gcc, or LLVM's lld."""
    if arch not in _ARCHITECTURES:
        raise NoLinker(f"nothing is linked for {arch}; known are {', '.join(_ARCHITECTURES)}")
    if arch == platform.machine() and shutil.which("ld"):
        return Linker(arch, ("ld", "-shared"))
    prefix, debian = _ARCHITECTURES[arch].prefix, _ARCHITECTURES[arch].debian
    gcc = f"{prefix}-gcc"
    if shutil.which(gcc):
        # What the CPU has no instruction for is called from libgcc, which is put into the library.
        return Linker(arch, (gcc, "-shared", "-nostdlib"), ("-lgcc",))
    for program in (f"{prefix}-ld", "ld.lld"):
        if shutil.which(program):
            return Linker(arch, (program, "-shared"))
    raise NoLinker(
        f"no linker for {arch} is installed: there is neither {gcc} nor ld.lld; run: apt-get install gcc-{debian} "
        "(or lld)"
    )


def export_for(arch: str) -> Callable[..., object]:
    """What TVM's `export_library` is to link a whole model with. The compiler driver of this machine links what is for
    it, and knows what else there is to link. Raises NoLinker."""
    if arch != platform.machine():
        return linker_for(arch).export
    from tvm.support import cc

    create_shared: Callable[..., object] = cc.create_shared
    return create_shared


def assembles_for(arch: str) -> bool:
    """Whether what `export_for` links with takes an assembler's files too, as a compiler driver does."""
    return arch == platform.machine() or linker_for(arch).command[0].endswith("gcc")


def check_machine(library: Path, arch: str) -> None:
    """Removes `library` and raises WrongMachine unless it is for `arch`: linkers have been seen to take a stranger's
    objects without a word."""
    with library.open("rb") as file:
        head = file.read(HEAD_BYTES)
    try:
        machine = machine_of(head)
    except ValueError:
        found = "is no ELF file"
    else:
        if machine == _ARCHITECTURES[arch].machine:
            return
        names = [name for name, known in _ARCHITECTURES.items() if known.machine == machine]
        found = f"is for {names[0] if names else f'ELF machine {machine[0]}'}"
    library.unlink()
    raise WrongMachine(f"{library.name} {found}, not for {arch}")
