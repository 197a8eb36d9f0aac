"""What ELF files tell, read from such as this machine's programs make."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from workers.elf import Elf
from workers.packaging.on_board import require_glibc
from workers.packaging.running import LibraryRefused


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the assembler of x86-64 makes code of 32 bits too")
@pytest.mark.parametrize("bits", [32, 64])
def test_versions_needed(bits: int, tmp_path: Path) -> None:
    """The versions of other libraries that a library needs are read from files of 64 and of 32 bits."""
    emulation, word = {32: ("elf_i386", ".long"), 64: ("elf_x86_64", ".quad")}[bits]
    link = ["ld", "-shared", "-m", emulation]
    for name, source in (("old", ".globl f, g\nf:\ng:\n"), ("user", f".data\n{word} f, g\n")):
        subprocess.run(["as", f"--{bits}", "-o", tmp_path / f"{name}.o"], input=source, text=True, check=True)
    (tmp_path / "versions").write_text("V_1.0 { f; };\nV_1.2 { g; } V_1.0;\n")
    subprocess.run(
        [*link, f"--version-script={tmp_path}/versions", "-soname=libold.so.1", "-o", tmp_path / "libold.so",
         tmp_path / "old.o"],
        check=True,
    )  # fmt: skip
    library = tmp_path / "user.so"
    subprocess.run([*link, "-z", "notext", "-o", library, tmp_path / "user.o", tmp_path / "libold.so"], check=True)
    assert set(Elf(library.read_bytes()).versions_needed()) == {("libold.so.1", "V_1.0"), ("libold.so.1", "V_1.2")}
    assert not list(Elf((tmp_path / "user.o").read_bytes()).versions_needed())


def test_a_board_with_an_older_c_library(tmp_path: Path) -> None:
    """A library that asks for a version of the C library that a board has not is refused before it is sent, with both
    versions (yangao07/longcallD#30); where the board's is as new as this machine's it is not."""
    source, path = tmp_path / "uses.c", tmp_path / "uses.so"
    source.write_text(
        '#include <math.h>\n#include <string.h>\nfloat f(float x) { return expf(x) + strlen("" + (int)x); }'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-fno-builtin", "-o", path, source, "-lm"], check=True)
    library = path.read_bytes()
    assert "libm.so.6" in {name for name, _ in Elf(library).versions_needed()}
    here = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    require_glibc("tuned", library, here, "pi4")
    for there, has in (("2.1", "glibc 2.1"), (None, "a C library that is not glibc")):
        with pytest.raises(LibraryRefused, match=rf"the tuned library needs GLIBC_2\.\d+(\.\d+)?, and pi4 has {has}:"):
            require_glibc("tuned", library, there, "pi4")
