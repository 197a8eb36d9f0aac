"""`python -m tests.boards.emulated`: makes the userland of emulated aarch64 boards; and how tests start such a board.

The boards' programs are Debian's Python for arm64 and the aarch64 wheels of what a board needs, run by qemu's user mode
emulation: `-cpu` decides which instructions there are. Nothing but these is emulated: kernel, network and clocks are
this machine's, and times say nothing of a board. qemu shows this machine's /proc/cpuinfo, so each board has one of its
own, recorded from a real board with that CPU.

Needs Debian's packages of `PACKAGES` and network access to Debian's and Python's package indexes; everything is kept in
`.cache/boards`.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from tests.workers.devices.recordings import RASPBERRY_PI_4, RASPBERRY_PI_5

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".cache" / "boards"
#: To be installed on this machine: 17 MB. What links for boards is enough, no compiler is needed.
PACKAGES = ("qemu-user", "binutils-aarch64-linux-gnu")
QEMU = "qemu-aarch64"
ASSEMBLER = "aarch64-linux-gnu-as"
#: qemu's name of a CPU → what the kernel of a real board with it tells.
CPUINFO = {"cortex-a72": RASPBERRY_PI_4.cpuinfo, "cortex-a76": RASPBERRY_PI_5.cpuinfo}

_DEBIAN = (
    "libc6", "libgcc-s1", "libstdc++6", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal",
    "libexpat1", "zlib1g", "libssl3", "libffi8", "liblzma5", "libbz2-1.0", "libuuid1", "libcrypt1",
)  # fmt: skip
#: What `tunery[board]` needs on a board; its tracker runs here.
_WHEELS = ("apache-tvm", "apache-tvm-ffi", "cloudpickle", "numpy", "psutil", "typing_extensions")
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_24_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")


def missing() -> str | None:
    """What keeps this machine from running emulated boards, and what to do; None if nothing does."""
    if _qemu() is None or shutil.which(ASSEMBLER) is None:
        return f"{' and '.join(PACKAGES)} are not installed; run: make test-boards"
    if not _stamp().is_file():
        return f"{CACHE} is not there, or of other versions; run: make test-boards"
    return None


def _qemu() -> str | None:
    """qemu as either of Debian's packages has it."""
    return shutil.which(QEMU) or shutil.which(f"{QEMU}-static")


def python_of(cpu: str) -> Path:
    """A program that is Python on a board with this CPU. It is its own `sys.executable`: children are emulated too."""
    return CACHE / cpu / "python"


def make() -> None:
    """Download and unpack everything, about 130 MB, once for each set of versions."""
    if _stamp().is_file():
        return
    shutil.rmtree(CACHE, ignore_errors=True)
    root, site = CACHE / "root", CACHE / "site"
    root.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        packages, wheels = pool.submit(_download_debian), pool.submit(_download_wheels)
    for package in packages.result():
        subprocess.run(["dpkg", "-x", package, root], check=True)
    for wheel in wheels.result():
        with zipfile.ZipFile(wheel) as archive:
            # The compiler is most of TVM, and no board needs it.
            wanted = [n for n in archive.namelist() if not n.endswith(("libtvm_compiler.so", "libtvm_runtime_cuda.so"))]
            archive.extractall(site, [n for n in wanted if "/include/" not in n])
    if sys.version_info[:2] == (3, 11):
        # Emulated, this takes minutes.
        for folder in (site, root / "usr/lib/python3.11"):
            compileall.compile_dir(folder, quiet=2, workers=0)
    for cpu, cpuinfo in CPUINFO.items():
        _make_board(cpu, cpuinfo)
    _stamp().touch()


def _make_board(cpu: str, cpuinfo: str) -> None:
    board = CACHE / cpu
    (board / "root" / "proc").mkdir(parents=True)
    # qemu looks here for every absolute path, and takes this machine's where there is none.
    for name in ("usr", "lib"):
        (board / "root" / name).symlink_to(CACHE / "root" / name)
    (board / "root" / "proc" / "cpuinfo").write_text(cpuinfo)
    python_of(cpu).write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME='{CACHE}/root/usr' PYTHONPATH='{CACHE}/site:{REPOSITORY}' PYTHONNOUSERSITE=1\n"
        "export TVM_USE_RUNTIME_LIB=1\n"
        f"exec {_qemu()} -cpu {cpu} -L '{board}/root' -0 '{python_of(cpu)}' '{CACHE}/root/usr/bin/python3.11' \"$@\"\n"
    )
    python_of(cpu).chmod(0o755)


def _stamp() -> Path:
    return CACHE / ("made-" + "-".join(f"{name}{metadata.version(name)}" for name in _WHEELS))


def _download_debian() -> list[Path]:
    """Debian's packages for arm64, by an apt of our own: this machine's does not hear of another architecture."""
    folder = CACHE / "debian"
    apt = folder / "apt"
    (apt / "state/lists/partial").mkdir(parents=True)
    (apt / "cache/archives/partial").mkdir(parents=True)
    (apt / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::State": apt / "state",
        "Dir::State::status": apt / "status", "Dir::State::lists": apt / "state/lists", "Dir::Cache": apt / "cache",
        "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": "", "APT::Sandbox::User": "root",
    }  # fmt: skip
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*command, "update"], check=True)
    subprocess.run([*command, "download", *_DEBIAN], check=True, cwd=folder)
    return sorted(folder.glob("*.deb"))


def _download_wheels() -> list[Path]:
    """The versions that are installed here, for the boards' Python."""
    folder = CACHE / "wheels"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder,
            "--disable-pip-version-check", "--python-version=3.11", "--platform=any",
            *(f"--platform={platform}" for platform in _PLATFORMS),
            *(f"{name}=={metadata.version(name)}" for name in _WHEELS),
        ],
        check=True, env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    return sorted(folder.glob("*.whl"))


if __name__ == "__main__":
    make()
