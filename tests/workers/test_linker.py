"""Linking for this machine and for others."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import tvm

from tests.workers.conftest import Host
from tests.workers.search.samples import matmul_module
from workers.linker import LinkFailed, NoLinker, WrongMachine, arch_of, check_machine, linker_for, triple_of

_OTHERS = sorted({"aarch64", "armv7l", "riscv64", "x86_64"} - {platform.machine()})


def object_for(arch: str, folder: Path) -> Path:
    """A kernel as LLVM compiles it for `arch`."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple_of(arch), "num-cores": 1})
    path = folder / f"{arch}.o"
    tvm.compile(matmul_module(4, 4, 4), target=target).mod.write_to_file(str(path), "o")
    return path


def test_this_machine(host: Host, tmp_path: Path) -> None:
    """This machine's linker makes a library that loads, whatever its name ends in (tvm#5747); what the linker says of a
    wrong object is the error."""
    arch = arch_of(host.target_json)
    assert arch == platform.machine()
    compiled = object_for(arch, tmp_path)
    linker_for(arch).link(tmp_path / "kernel.so", [compiled])
    assert tvm.runtime.load_module(str(tmp_path / "kernel.so"))["main"] is not None
    linker_for(arch).link(tmp_path / "kernel.odd", [compiled])
    assert (tmp_path / "kernel.odd").read_bytes() == (tmp_path / "kernel.so").read_bytes()
    (tmp_path / "wrong.o").write_text("no object")
    with pytest.raises(LinkFailed, match=r"^ld: .*wrong\.o"):
        linker_for(arch).link(tmp_path / "wrong.so", [tmp_path / "wrong.o"])


@pytest.mark.parametrize("arch", _OTHERS)
def test_other_machines(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM compiles for each architecture that there may be a linker for; where there is none, the message says what to
    install (tvm#376). A library of the wrong machine is found by its header, and removed."""
    path = object_for(arch, tmp_path)
    check_machine(path, arch)
    with pytest.raises(WrongMachine, match=f"is for {arch}, not for {platform.machine()}"):
        check_machine(path, platform.machine())
    assert not path.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoLinker, match=f"no linker for {arch} is installed.*apt-get install gcc-.* \\(or lld\\)"):
        linker_for(arch)
    (tmp_path / "ld.lld").touch(0o755)
    assert linker_for(arch).command == ("ld.lld", "-shared")


def test_what_nothing_links_for(tmp_path: Path) -> None:
    """An architecture that nothing here compiles for is named with those that are known."""
    with pytest.raises(NoLinker, match="nothing is linked for mips; known are x86_64, aarch64"):
        linker_for("mips")
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(WrongMachine, match=r"text\.so is no ELF file"):
        check_machine(tmp_path / "text.so", "aarch64")
    assert arch_of('{"mtriple": "aarch64-linux-gnu"}') == "aarch64"
