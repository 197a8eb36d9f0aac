"""Who a device is, from what Linux tells of a CPU and NVML of a GPU; and LLVM's name of the CPU.

Functions of recorded text alone, without TVM and for any machine: what a board read of itself is judged where the
worker runs. What changes from hour to hour (clock, temperature, BogoMIPS) and the order of what is listed do not
count; what makes code run, or run differently, does.

A virtual machine often hides features of the CPU model that it names, and code for a hidden one dies of SIGILL. So the
identity holds the features that are really there, on every core.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from tuning_db.keys import DeviceIdentity

_X86_FEATURES: Final[Mapping[str, str]] = {
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

_AARCH64_FEATURES: Final[Mapping[str, str]] = {
    "neon": "asimd", "aes": "aes", "sha2": "sha2", "crc": "crc32", "lse": "atomics", "rdm": "asimdrdm",
    "fullfp16": "fphp", "dotprod": "asimddp", "fp16fml": "asimdfhm", "sve": "sve", "sve2": "sve2", "i8mm": "i8mm",
    "bf16": "bf16",
}  # fmt: skip

_ARMV7_FEATURES: Final[Mapping[str, str]] = {
    "neon": "neon", "vfp4": "vfpv4", "hwdiv": "idivt", "hwdiv-arm": "idiva", "aes": "aes", "sha2": "sha2",
    "crc": "crc32", "fullfp16": "fphp", "dotprod": "asimddp",
}  # fmt: skip

#: Here both call an extension what the standard does. None that another one brings along is listed.
_RISCV_FEATURES: Final[Mapping[str, str]] = {
    name: name for name in ("m", "a", "f", "d", "c", "v", "zba", "zbb", "zbc", "zbs", "zfh", "zicond", "zvfh")
}

#: By what `uname -m` says: LLVM's name of each feature that changes generated code → the kernel's in /proc/cpuinfo.
FEATURES: Final[Mapping[str, Mapping[str, str]]] = {
    "x86_64": _X86_FEATURES, "aarch64": _AARCH64_FEATURES, "armv7l": _ARMV7_FEATURES, "riscv64": _RISCV_FEATURES,
}  # fmt: skip
#: What Linux distributions are compiled for, and code for the architecture is here.
_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {"armv7l": ("neon",), "riscv64": ("m", "a", "f", "d", "c")}


class UnusableDevice(Exception):
    """This device cannot be compiled for as it reports itself. The message says what was found."""


# --- CPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """What the operating system says, unjudged."""

    arch: str  #: as `uname -m` says
    cpuinfo: str  #: /proc/cpuinfo
    cores: int  #: cores that the process may use
    cache_bytes: tuple[int, ...]  #: L1 data, L2, L3 of a core of the fastest kind
    board: str | None  #: /proc/device-tree/model
    compatible: tuple[str, ...] = ()  #: /proc/device-tree/compatible, the board's own name first
    max_khz: tuple[tuple[int, int], ...] = ()  #: processor number, cpufreq's cpuinfo_max_freq of it

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `tuning_db.keys.to_json`."""
        return cls(
            **{
                **data,
                "cache_bytes": tuple(data["cache_bytes"]),
                "compatible": tuple(data["compatible"]),
                "max_khz": tuple((number, khz) for number, khz in data["max_khz"]),
            }
        )


@dataclass(frozen=True, slots=True)
class _Core:
    """A kind of core of an Arm machine, by the fields of its MIDR register."""

    implementer: int
    part: int
    variant: int
    revision: int

    @property
    def mcpu(self) -> str:
        """LLVM's name; "generic", which runs on all of the architecture, for one that is not in the table."""
        return _ARM_CORES.get((self.implementer, self.part), ("", "generic"))[1]

    def __str__(self) -> str:
        name = _ARM_CORES.get((self.implementer, self.part), (f"part {self.part:#05x}", ""))[0]
        return f"{name} r{self.variant}p{self.revision}"


def identity_of(facts: CpuFacts) -> DeviceIdentity:
    """The identity that these facts amount to. The same facts give the same identity, whatever is running."""
    processors = _processors(facts)
    if facts.arch == "x86_64":
        fields = processors[0]
        vendor = _X86_VENDORS.get(fields["vendor_id"], fields["vendor_id"])
        model = " ".join(re.sub(r"\((R|TM|tm)\)|CPU|@.*", " ", fields["model name"]).split())
        # Clouds hide the marketing name behind "AMD EPYC": family, model and stepping tell generations apart.
        model += f" (family {fields['cpu family']} model {fields['model']} stepping {fields['stepping']})"
        model = model.removeprefix(f"{vendor} ")
        cores = facts.cores
    elif facts.arch == "riscv64":
        found = sorted({_riscv_core(fields) for fields in processors})
        vendor, model, cores = found[0][0], " + ".join(name for _, name in found), facts.cores
    else:
        kinds = _kinds(processors)
        # Beside a kind of its own each core is known by how many there are of it; alike, by the cores in use.
        names = sorted(f"{count}x {core}" if len(kinds) > 1 else str(core) for core, count in kinds.items())
        model = " + ".join(names)
        fastest = _fastest(facts, processors)
        implementer = fastest.implementer
        vendor = _ARM_IMPLEMENTERS.get(implementer, f"{implementer:#x}")
        # TVM's threads run on the cores of the highest clock alone where the clocks are known.
        cores = min(facts.cores, kinds[fastest]) if len(kinds) > 1 and facts.max_khz else facts.cores
    board = facts.board or (facts.compatible[0] if facts.compatible else None)
    features = _features(facts, processors)
    return DeviceIdentity("cpu", vendor, model, facts.arch, features, cores, facts.cache_bytes, board)


def mcpu_of(facts: CpuFacts) -> str:
    """LLVM's name of the CPU, of its fastest kind of core where it has several.

    By vendor, family, model and part, as LLVM finds it on the CPU itself (llvm/lib/TargetParser/Host.cpp); a CPU that
    is in no table has the x86-64 psABI's level of its features, or is "generic".
    """
    processors = _processors(facts)
    if facts.arch in ("aarch64", "armv7l"):
        return _fastest(facts, processors).mcpu
    if facts.arch == "riscv64":
        names = {_RISCV_CORES.get(fields["uarch"], "generic-rv64") for fields in processors}
        return names.pop() if len(names) == 1 else "generic-rv64"
    fields = processors[0]
    flags = set(fields["flags"].split())
    family, model = int(fields["cpu family"]), int(fields["model"])
    if fields["vendor_id"] == "AuthenticAMD":
        for name, family_of, ranges in _AMD:
            if family == family_of and any(low <= model <= high for low, high in ranges):
                return name
    if fields["vendor_id"] == "GenuineIntel" and family == 6:
        if model == 85:
            bf16 = "cooperlake" if "avx512_bf16" in flags else "cascadelake"
            return bf16 if "avx512_vnni" in flags else "skylake-avx512"
        for name, models in _INTEL:
            if model in models:
                return name
    features = set(_features(facts, processors))
    level, needed = "x86-64", set[str]()
    for name, more in _PSABI_LEVELS:
        needed |= more
        level = name if needed <= features else level
    return level


#: Lines of /proc/cpuinfo without which two CPU models would look the same.
_IDENTIFYING: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("vendor_id", "model name", "cpu family", "model", "stepping", "flags"),
    "aarch64": ("Features", "CPU implementer", "CPU part", "CPU variant", "CPU revision"),
    "armv7l": ("Features", "CPU implementer", "CPU part", "CPU variant", "CPU revision"),
    "riscv64": ("isa", "uarch"),
}


def _processors(facts: CpuFacts) -> list[dict[str, str]]:
    """The fields of each processor that the kernel lists, by number; all hold what identifies."""
    if facts.arch not in _IDENTIFYING:
        raise UnusableDevice(f"{facts.arch} CPUs are not supported; {', '.join(_IDENTIFYING)} are")
    blocks = (
        dict(re.findall(r"(?m)^([^\t\n:]+?)\s*:[ \t]?(.*?)[ \t]*$", block))
        for block in re.split(r"\n\s*\n", facts.cpuinfo)
    )
    # Boards add a block of their own, with serial number and the like.
    processors = [fields for fields in blocks if "processor" in fields]
    if not processors:
        raise UnusableDevice("/proc/cpuinfo lists no processor: this CPU cannot be told from others")
    for fields in processors:
        missing = [line for line in _IDENTIFYING[facts.arch] if line not in fields]
        if missing:
            raise UnusableDevice(f"/proc/cpuinfo has no {', '.join(missing)}: this CPU cannot be told from others")
    return sorted(processors, key=lambda fields: int(fields["processor"]))


def _core(fields: Mapping[str, str]) -> _Core:
    return _Core(
        int(fields["CPU implementer"], 16),
        int(fields["CPU part"], 16),
        int(fields["CPU variant"], 16),
        int(fields["CPU revision"]),
    )


def _riscv_core(fields: Mapping[str, str]) -> tuple[str, str]:
    """Who made a kind of core, and its name with the version that it tells of itself, which kernels show since 6.3."""
    maker, _, name = fields["uarch"].rpartition(",")
    version = fields.get("mimpid", "")
    return _RISCV_MAKERS.get(maker, maker or "RISC-V"), f"{name} {version}".rstrip()


def _kinds(processors: Sequence[Mapping[str, str]]) -> Counter[_Core]:
    return Counter(_core(fields) for fields in processors)


def _fastest(facts: CpuFacts, processors: Sequence[Mapping[str, str]]) -> _Core:
    """The kind of core with the highest clock; where clocks are not known or equal, the one with the most cores."""
    clocks = dict(facts.max_khz)
    kinds = _kinds(processors)
    khz: Counter[_Core] = Counter()
    for fields in processors:
        khz[_core(fields)] = max(khz[_core(fields)], clocks.get(int(fields["processor"]), 0))
    return max(kinds, key=lambda core: (khz[core], kinds[core], core.part, core.variant, core.revision))


def _features(facts: CpuFacts, processors: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """LLVM's names of what every core has: a thread may be moved to any."""
    if facts.arch == "riscv64":
        listed = [_extensions(fields["isa"]) for fields in processors]
    else:
        listed = [set(fields["flags" if facts.arch == "x86_64" else "Features"].split()) for fields in processors]
    present = set.intersection(*listed)
    found = tuple(sorted(llvm for llvm, kernel in FEATURES[facts.arch].items() if kernel in present))
    lacking = [name for name in _REQUIRED.get(facts.arch, ()) if name not in found]
    if lacking:
        raise UnusableDevice(f"{facts.arch} CPUs without {', '.join(lacking)} are not supported")
    return found


def _extensions(isa: str) -> set[str]:
    """Of RISC-V, from its `isa` as "rv64imafdcv_zicntr_zba"."""
    letters, *longer = isa.lower().removeprefix("rv64").split("_")
    return {*letters.replace("g", "imafd"), *longer}


_X86_VENDORS: Final[Mapping[str, str]] = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}

#: LLVM's name, family, ranges of models.
_AMD: Final = (
    ("znver1", 23, ((0x00, 0x2F),)),
    ("znver2", 23, ((0x30, 0x3F), (0x47, 0x47), (0x60, 0x7F), (0x84, 0x87), (0x90, 0xAF))),
    ("znver3", 25, ((0x00, 0x0F), (0x20, 0x5F))),
    ("znver4", 25, ((0x10, 0x1F), (0x60, 0x7F), (0xA0, 0xAF))),
    ("znver5", 26, ((0x00, 0x4F), (0x60, 0x77))),
)
#: LLVM's name, models of family 6.
_INTEL: Final = (
    ("sandybridge", (42, 45)),
    ("ivybridge", (58, 62)),
    ("haswell", (60, 63, 69, 70)),
    ("broadwell", (61, 71, 79, 86)),
    ("skylake", (78, 94, 142, 158, 165, 166)),
    ("icelake-client", (125, 126)),
    ("icelake-server", (106, 108)),
    ("tigerlake", (140, 141)),
    ("rocketlake", (167,)),
    ("alderlake", (151, 154)),
    ("raptorlake", (183, 186, 191)),
    ("meteorlake", (170, 172)),
    ("sapphirerapids", (143,)),
    ("emeraldrapids", (207,)),
    ("graniterapids", (173,)),
)

#: What each level has more than the one before it (x86-64 psABI, "Micro-Architecture Levels").
_PSABI_LEVELS: Final = (
    ("x86-64-v2", {"cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"}),
    ("x86-64-v3", {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}),
    ("x86-64-v4", {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
)

_ARM_IMPLEMENTERS: Final[Mapping[int, str]] = {
    0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm", 0x61: "Apple", 0xC0: "Ampere",
}  # fmt: skip
#: Implementer and part → the core's name, LLVM's name.
_ARM_CORES: Final[Mapping[tuple[int, int], tuple[str, str]]] = {
    (0x41, 0xC05): ("Cortex-A5", "cortex-a5"), (0x41, 0xC07): ("Cortex-A7", "cortex-a7"),
    (0x41, 0xC08): ("Cortex-A8", "cortex-a8"), (0x41, 0xC09): ("Cortex-A9", "cortex-a9"),
    (0x41, 0xC0E): ("Cortex-A17", "cortex-a17"), (0x41, 0xC0F): ("Cortex-A15", "cortex-a15"),
    (0x41, 0xD03): ("Cortex-A53", "cortex-a53"), (0x41, 0xD04): ("Cortex-A35", "cortex-a35"),
    (0x41, 0xD05): ("Cortex-A55", "cortex-a55"), (0x41, 0xD07): ("Cortex-A57", "cortex-a57"),
    (0x41, 0xD08): ("Cortex-A72", "cortex-a72"), (0x41, 0xD09): ("Cortex-A73", "cortex-a73"),
    (0x41, 0xD0A): ("Cortex-A75", "cortex-a75"), (0x41, 0xD0B): ("Cortex-A76", "cortex-a76"),
    (0x41, 0xD0C): ("Neoverse-N1", "neoverse-n1"), (0x41, 0xD0D): ("Cortex-A77", "cortex-a77"),
    (0x41, 0xD0E): ("Cortex-A76AE", "cortex-a76ae"), (0x41, 0xD40): ("Neoverse-V1", "neoverse-v1"),
    (0x41, 0xD41): ("Cortex-A78", "cortex-a78"), (0x41, 0xD42): ("Cortex-A78AE", "cortex-a78ae"),
    (0x41, 0xD44): ("Cortex-X1", "cortex-x1"), (0x41, 0xD46): ("Cortex-A510", "cortex-a510"),
    (0x41, 0xD47): ("Cortex-A710", "cortex-a710"), (0x41, 0xD48): ("Cortex-X2", "cortex-x2"),
    (0x41, 0xD49): ("Neoverse-N2", "neoverse-n2"), (0x41, 0xD4B): ("Cortex-A78C", "cortex-a78c"),
    (0x41, 0xD4D): ("Cortex-A715", "cortex-a715"), (0x41, 0xD4E): ("Cortex-X3", "cortex-x3"),
    (0x41, 0xD4F): ("Neoverse-V2", "neoverse-v2"), (0x41, 0xD80): ("Cortex-A520", "cortex-a520"),
    (0x41, 0xD81): ("Cortex-A720", "cortex-a720"), (0x41, 0xD82): ("Cortex-X4", "cortex-x4"),
    (0x41, 0xD84): ("Neoverse-V3", "neoverse-v3"), (0x41, 0xD85): ("Cortex-X925", "cortex-x925"),
    (0x41, 0xD87): ("Cortex-A725", "cortex-a725"), (0x41, 0xD8E): ("Neoverse-N3", "neoverse-n3"),
    (0x46, 0x001): ("A64FX", "a64fx"), (0x48, 0xD01): ("Kunpeng-920", "tsv110"), (0x4E, 0x004): ("Carmel", "carmel"),
    (0x61, 0x022): ("Icestorm-M1", "apple-a14"), (0x61, 0x023): ("Firestorm-M1", "apple-a14"),
    (0x61, 0x024): ("Icestorm-M1-Pro", "apple-a14"), (0x61, 0x025): ("Firestorm-M1-Pro", "apple-a14"),
    (0x61, 0x028): ("Icestorm-M1-Max", "apple-a14"), (0x61, 0x029): ("Firestorm-M1-Max", "apple-a14"),
    (0x61, 0x032): ("Blizzard-M2", "apple-a15"), (0x61, 0x033): ("Avalanche-M2", "apple-a15"),
    (0xC0, 0xAC3): ("AmpereOne", "ampere1"), (0xC0, 0xAC4): ("AmpereOne-A", "ampere1a"),
}  # fmt: skip

_RISCV_MAKERS: Final[Mapping[str, str]] = {
    "eswin": "ESWIN", "sifive": "SiFive", "spacemit": "SpacemiT", "thead": "T-Head",
}  # fmt: skip
#: `uarch`, which is the device tree's name of the core → LLVM's name.
_RISCV_CORES: Final[Mapping[str, str]] = {
    "eswin,eic770x": "sifive-p550", "sifive,bullet0": "sifive-u74", "sifive,u74-mc": "sifive-u74",
    "spacemit,x60": "spacemit-x60",
}  # fmt: skip


# --- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What NVML answers for one GPU, or for one MIG slice of it."""

    name: str  #: nvmlDeviceGetName: of the whole GPU, or "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    compute_capability: tuple[int, int]  #: nvmlDeviceGetCudaComputeCapability
    multiprocessors: int  #: of the slice alone (nvmlDeviceGetAttributes), where it is one
    memory_bytes: int  #: nvmlDeviceGetMemoryInfo's total
    driver: str  #: nvmlSystemGetDriverVersion
    mig: str | None = None  #: the slice's profile, such as "1g.10gb"


def gpu_identity_of(facts: GpuFacts) -> DeviceIdentity:
    """The identity of a GPU or of a slice: slices of one profile are alike, and none is like the whole."""
    if facts.multiprocessors <= 0 or facts.memory_bytes <= 0 or not facts.driver:
        raise UnusableDevice(f"NVML does not tell multiprocessors, memory and driver of {facts.name!r}")
    major, minor = facts.compute_capability
    model = facts.name.removeprefix("NVIDIA ")
    if facts.mig is not None and f"MIG {facts.mig}" not in model:
        model += f" MIG {facts.mig}"
    return DeviceIdentity(
        "cuda", "NVIDIA", model, f"sm_{major}{minor}", (), facts.multiprocessors,
        memory_bytes=facts.memory_bytes, driver=facts.driver,
    )  # fmt: skip
