"""The CPU that this process runs on: its identity from the operating system, its target checked against LLVM.

A virtual machine often hides features of the CPU model that it names, and code for a hidden one dies of SIGILL. So the
identity holds the features that are really there, and the target takes away those that LLVM would assume.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tuning_db.keys import DeviceIdentity, canonical_json
from workers.search.templates.knobs import Cpu

#: LLVM's name of each x86 feature that changes generated code → the kernel's name in /proc/cpuinfo.
X86_FEATURES: Final[Mapping[str, str]] = {
    "sse3": "pni", "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "sse4a": "sse4a", "popcnt": "popcnt",
    "cx16": "cx16", "movbe": "movbe", "lzcnt": "abm", "bmi": "bmi1", "bmi2": "bmi2", "adx": "adx", "f16c": "f16c",
    "fma": "fma", "fma4": "fma4", "xop": "xop", "avx": "avx", "avx2": "avx2", "aes": "aes", "pclmul": "pclmulqdq",
    "vaes": "vaes", "vpclmulqdq": "vpclmulqdq", "gfni": "gfni", "sha": "sha_ni", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512cd": "avx512cd", "avx512dq": "avx512dq", "avx512bw": "avx512bw",
    "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni", "avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "avx512vp2intersect": "avx512_vp2intersect",
    "amx-tile": "amx_tile", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16",
}  # fmt: skip

#: The same for aarch64.
AARCH64_FEATURES: Final[Mapping[str, str]] = {
    "neon": "asimd", "aes": "aes", "sha2": "sha2", "crc": "crc32", "lse": "atomics", "rdm": "asimdrdm",
    "fullfp16": "fphp", "dotprod": "asimddp", "fp16fml": "asimdfhm", "sve": "sve", "sve2": "sve2", "i8mm": "i8mm",
    "bf16": "bf16",
}  # fmt: skip


class UnusableDevice(Exception):
    """LLVM cannot compile for this CPU as it reports itself. The message says what was found."""


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """What the operating system says, unjudged."""

    arch: str
    cpuinfo: str  #: /proc/cpuinfo
    cores: int  #: cores that this process may use
    cache_bytes: tuple[int, ...]
    board: str | None


def read_facts() -> CpuFacts:
    """Ask the operating system."""
    return CpuFacts(
        arch=platform.machine(),
        cpuinfo=Path("/proc/cpuinfo").read_text(),
        cores=_usable_cores(Path("/sys/fs/cgroup/cpu.max")),
        cache_bytes=_cache_sizes(Path("/sys/devices/system/cpu/cpu0/cache")),
        board=_board(Path("/proc/device-tree/model")),
    )


#: Lines of /proc/cpuinfo without which two CPU models would look the same.
_IDENTIFYING: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("vendor_id", "model name", "cpu family", "model", "stepping", "flags"),
    "aarch64": ("Features", "CPU implementer", "CPU part", "CPU variant", "CPU revision"),
}


def identity_of(facts: CpuFacts) -> DeviceIdentity:
    """The identity that these facts amount to. The same facts give the same identity, whatever is running."""
    if facts.arch not in ("x86_64", "aarch64"):
        raise UnusableDevice(f"{facts.arch} CPUs are not supported; x86_64 and aarch64 are")
    first = facts.cpuinfo.split("\n\n", 1)[0]
    fields: dict[str, str] = dict(re.findall(r"(?m)^([^\t:]+?)\s*:\s?(.*)$", first))
    missing = [line for line in _IDENTIFYING[facts.arch] if line not in fields]
    if missing:
        raise UnusableDevice(f"/proc/cpuinfo has no {', '.join(missing)}: this CPU cannot be told from others")
    if facts.arch == "x86_64":
        present = set(fields["flags"].split())
        table = X86_FEATURES
        vendor = _X86_VENDORS.get(fields["vendor_id"], fields["vendor_id"])
        model = " ".join(re.sub(r"\((R|TM|tm)\)|CPU|@.*", " ", fields["model name"]).split())
        # Clouds hide the marketing name behind "AMD EPYC": family, model and stepping tell generations apart.
        model += f" (family {fields['cpu family']} model {fields['model']} stepping {fields['stepping']})"
        model = model.removeprefix(f"{vendor} ")
    else:
        present = set(fields["Features"].split())
        table = AARCH64_FEATURES
        implementer = fields["CPU implementer"]
        vendor = _ARM_IMPLEMENTERS.get(implementer, implementer)
        part, variant, revision = (fields[f"CPU {what}"] for what in ("part", "variant", "revision"))
        model = f"part {part} variant {variant} r{revision}"
    features = tuple(sorted(llvm for llvm, kernel in table.items() if kernel in present))
    return DeviceIdentity("cpu", vendor, model, facts.arch, features, facts.cores, facts.cache_bytes, facts.board)


_X86_VENDORS: Final[Mapping[str, str]] = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
_ARM_IMPLEMENTERS: Final[Mapping[str, str]] = {
    "0x41": "ARM",
    "0x61": "Apple",
    "0xc0": "Ampere",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
}


def target_of(identity: DeviceIdentity, mcpu: str) -> str:
    """Canonical JSON of the TVM target for this identity, with LLVM's model `mcpu`, corrected to the real features.

    Raises UnusableDevice when LLVM does not know `mcpu` or a feature. A wrong name would be a warning on stderr and a
    slower library otherwise.
    """
    import tvm
    from tvm.target import codegen

    triple = f"{identity.arch}-linux-gnu"
    base: dict[str, Any] = {"kind": "llvm", "mtriple": triple, "mcpu": mcpu, "num-cores": identity.cores}
    probe = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    if mcpu not in {str(name) for name in codegen.llvm_get_cpu_archlist(probe)}:
        raise UnusableDevice(f"LLVM {codegen.llvm_version_major()} does not know the CPU {mcpu!r} for {triple}")
    assumed = {str(name) for name in codegen.llvm_get_cpu_features(tvm.target.Target(base))}
    table = X86_FEATURES if identity.arch == "x86_64" else AARCH64_FEATURES
    # A feature that LLVM cannot spell is not asked for, and one that it assumes of the model but is hidden is denied.
    present = set(identity.features)
    attributes = [f"+{name}" for name in sorted(present - assumed) if _is_known(base, name)]
    attributes += [f"-{name}" for name in sorted((assumed & set(table)) - present)]
    if attributes:
        base["mattr"] = attributes
    target = tvm.target.Target(base)
    settled = {str(name) for name in codegen.llvm_get_cpu_features(target)}
    hidden = settled & set(table) - present
    if hidden:
        raise UnusableDevice(f"LLVM would use {', '.join(sorted(hidden))}, which this CPU does not report")
    return canonical_json(base).decode()


def vector_registers(arch: str, features: Collection[str]) -> tuple[int, int]:
    """Float32 numbers in a vector register, and how many of these there are."""
    if arch != "x86_64":
        # SVE's vectors have no length that is known here; code for NEON runs on every aarch64.
        return 4, 32
    if "avx512f" in features:
        return 16, 32
    return (8 if "avx" in features else 4), 16


def cpu_of(identity: DeviceIdentity) -> Cpu:
    """What schedule templates must know of this CPU."""
    lanes, registers = vector_registers(identity.arch, identity.features)
    # Where the kernel does not tell, what the smallest core of the last ten years has.
    l1_bytes, l2_bytes = identity.cache_bytes[:2] if len(identity.cache_bytes) >= 2 else (32 << 10, 256 << 10)
    dot = {"avx512f", "avx512vnni"} <= set(identity.features)
    return Cpu(lanes, registers, l1_bytes, l2_bytes, identity.cores, dot)


def _is_known(base: Mapping[str, Any], feature: str) -> bool:
    import tvm
    from tvm.target import codegen

    with_feature = tvm.target.Target({**base, "mattr": [f"+{feature}"]})
    return feature in {str(name) for name in codegen.llvm_get_cpu_features(with_feature)}


def host_mcpu() -> str:
    """LLVM's model name of this CPU; archspec's where LLVM answers with a generic one."""
    import archspec.cpu
    from tvm.target import codegen

    name = str(codegen.llvm_get_system_cpu())
    if name in ("", "generic", "x86-64"):
        name = str(archspec.cpu.host().name).replace("_v", "-v").replace("x86_64", "x86-64")
    return name


def probe() -> tuple[DeviceIdentity, str]:
    """Identity and target of this machine's CPU."""
    identity = identity_of(read_facts())
    return identity, target_of(identity, host_mcpu())


def _usable_cores(cpu_max: Path) -> int:
    """Cores that this process may run on, or the container's quota of their time where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such controller here
        return cores


def _cache_sizes(folder: Path) -> tuple[int, ...]:
    """L1 data, L2, L3 of core 0 in bytes, as far as the kernel tells."""
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


def _board(path: Path) -> str | None:
    try:
        return path.read_text().strip("\0\n ") or None
    except OSError:
        return None
