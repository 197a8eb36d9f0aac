"""The CPU that this process runs on: what the operating system tells of it, and what schedule templates must know."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection
from pathlib import Path

from tuning_db.keys import DeviceIdentity
from workers.devices.identity import CpuFacts, identity_of, mcpu_of
from workers.devices.targets import target_of
from workers.search.templates.knobs import PMADDWD, SDOT, USDOT, VPDPBUSD, Cpu


def read_facts() -> CpuFacts:
    """Ask the operating system."""
    max_khz = _max_khz(Path("/sys/devices/system/cpu"))
    fastest = min((number for number, khz in max_khz if khz == max(khz for _, khz in max_khz)), default=0)
    return CpuFacts(
        arch=_arch(platform.machine(), sys.maxsize),
        cpuinfo=Path("/proc/cpuinfo").read_text(),
        cores=host_cores(),
        cache_bytes=_cache_sizes(Path(f"/sys/devices/system/cpu/cpu{fastest}/cache")),
        board=next(iter(_strings(Path("/proc/device-tree/model"))), None),
        compatible=_strings(Path("/proc/device-tree/compatible")),
        max_khz=max_khz,
    )


def host_cores() -> int:
    """Cores that this process may use, or as much of their time as its container has."""
    return _usable_cores(Path("/sys/fs/cgroup/cpu.max"))


def vector_registers(arch: str, features: Collection[str]) -> tuple[int, int]:
    """Float32 numbers in a vector register, and how many of these there are."""
    if arch == "aarch64":
        # SVE's vectors have no length that is known here; code for NEON runs on every aarch64.
        return 4, 32
    if arch == "armv7l":
        return 4, 16
    if arch == "riscv64":
        # Vectors of at least 128 bits; without them, four of the 32 numbers at a time.
        return 4, (32 if "v" in features else 8)
    if "avx512f" in features:
        return 16, 32
    return (8 if "avx" in features else 4), 16


def dot_of(arch: str, features: Collection[str]) -> str:
    """How this CPU adds dot products of bytes to whole registers (`workers.search.templates.dot`); "" if in none of
    the ways that templates know."""
    present = set(features)
    if arch == "aarch64":
        return USDOT if "i8mm" in present else SDOT if "dotprod" in present else ""
    if arch != "x86_64":
        return ""
    if "avx512f" in present:
        if "avx512vnni" in present:
            return VPDPBUSD
        return PMADDWD if "avx512bw" in present else ""
    if "avx" in present:
        return VPDPBUSD if "avxvnni" in present else PMADDWD if "avx2" in present else ""
    return PMADDWD


def cpu_of(identity: DeviceIdentity) -> Cpu:
    """What schedule templates must know of this CPU."""
    lanes, registers = vector_registers(identity.arch, identity.features)
    # Where the kernel does not tell, what the smallest core of the last ten years has.
    l1_bytes, l2_bytes = identity.cache_bytes[:2] if len(identity.cache_bytes) >= 2 else (32 << 10, 256 << 10)
    return Cpu(lanes, registers, l1_bytes, l2_bytes, identity.cores, dot_of(identity.arch, identity.features))


def probe() -> tuple[DeviceIdentity, str]:
    """Identity and target of this machine's CPU."""
    facts = read_facts()
    identity = identity_of(facts)
    return identity, target_of(identity, mcpu_of(facts))


def _arch(machine: str, largest: int) -> str:
    """What code for this process is for. `machine`: as `uname -m` says, which is the kernel's; `largest`: that a
    pointer can be. Kernels of 64 bits run programs of 32, as on many a Raspberry Pi."""
    return "armv7l" if machine in ("aarch64", "armv8l") and largest < 1 << 32 else machine


def _usable_cores(cpu_max: Path) -> int:
    """Cores that this process may run on, or the container's quota of their time where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such controller here
        return cores


def _cache_sizes(folder: Path) -> tuple[int, ...]:
    """L1 data, L2, L3 of one core in bytes, as far as the kernel tells."""
    sizes: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = int((index / "level").read_text())
            amount = re.fullmatch(r"(\d+)K", (index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if kind in ("Data", "Unified") and amount:
            sizes[level] = int(amount[1]) * 1024
    return tuple(sizes[level] for level in sorted(sizes))


def _max_khz(folder: Path) -> tuple[tuple[int, int], ...]:
    """Number and highest clock of each processor whose clock the kernel governs."""
    found: dict[int, int] = {}
    for path in folder.glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq"):
        try:
            found[int(path.parts[-3].removeprefix("cpu"))] = int(path.read_text())
        except (OSError, ValueError):  # a processor that is switched off
            continue
    return tuple(sorted(found.items()))


def _strings(path: Path) -> tuple[str, ...]:
    """The strings of a device tree's property, each of which ends in NUL."""
    try:
        return tuple(text for text in (part.strip() for part in path.read_text().split("\0")) if text)
    except OSError:
        return ()
