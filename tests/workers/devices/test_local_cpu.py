"""Who a CPU is and what compiles for it, from what operating systems were seen to report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.target import codegen

from tuning_db.keys import DeviceIdentity, Toolchain, to_json
from workers import toolchain
from workers.devices import local_cpu
from workers.devices.identity import FEATURES, CpuFacts, UnusableDevice, identity_of, mcpu_of
from workers.devices.targets import target_of

_X86_BASE = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat clflush mmx fxsr sse sse2 ht syscall nx "
    "pdpe1gb rdtscp lm constant_tsc rep_good nopl cpuid pni pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes "
    "xsave avx f16c rdrand hypervisor lahf_lm abm fsgsbase bmi1 avx2 smep bmi2 erms invpcid adx"
)
_AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"
_ICE_LAKE = (
    f"{_AVX512} avx512ifma avx512vbmi avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq"
)


def x86(vendor: str, name: str, family: int, model: int, stepping: int, flags: str) -> str:
    """/proc/cpuinfo of two processors of a kind."""
    return "\n".join(
        f"processor\t: {number}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        f"model name\t: {name}\nstepping\t: {stepping}\nmicrocode\t: 0xa0011d{number}\n"
        f"cpu MHz\t\t: {2445.4 + number}\ncache size\t: 512 KB\nflags\t\t: {flags}\nbogomips\t: 4890.86\n"
        "address sizes\t: 48 bits physical, 48 bits virtual\npower management:\n"
        for number in range(2)
    )


def aarch64(implementer: str, variant: str, part: str, revision: int, features: str, board: str = "") -> str:
    """/proc/cpuinfo of two cores of a kind; boards of the Raspberry Pi family add a block of their own."""
    return (
        "\n".join(
            f"processor\t: {number}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: {implementer}\n"
            f"CPU architecture: 8\nCPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: {revision}\n"
            for number in range(2)
        )
        + board
    )


EPYC_GENOA = CpuFacts(
    "x86_64",
    x86("AuthenticAMD", "AMD EPYC 9654 96-Core Processor", 25, 17, 1,
        f"{_X86_BASE} sse4a sha_ni {_ICE_LAKE} avx512_bf16"),
    2, (32768, 1048576, 33554432), None,
)  # fmt: skip
#: The same processor in a machine that hides AVX-512 (jax#2906).
EPYC_GENOA_HIDDEN = replace(
    EPYC_GENOA,
    cpuinfo=x86("AuthenticAMD", "AMD EPYC 9654 96-Core Processor", 25, 17, 1, f"{_X86_BASE} sse4a sha_ni"),
)
#: Another generation under the same name, as clouds report it.
EPYC_CLOUD_MILAN = CpuFacts(
    "x86_64",
    x86("AuthenticAMD", "AMD EPYC", 25, 1, 1, f"{_X86_BASE} sse4a sha_ni vaes vpclmulqdq"),
    2, (32768, 524288, 33554432), None,
)  # fmt: skip
EPYC_CLOUD_GENOA = replace(
    EPYC_CLOUD_MILAN, cpuinfo=x86("AuthenticAMD", "AMD EPYC", 25, 17, 1, f"{_X86_BASE} sse4a sha_ni vaes vpclmulqdq")
)
XEON = CpuFacts(
    "x86_64",
    x86("GenuineIntel", "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", 6, 106, 6, f"{_X86_BASE} {_ICE_LAKE} sha_ni"),
    2, (49152, 1310720, 56623104), None,
)  # fmt: skip
RASPBERRY_PI_4 = CpuFacts(
    "aarch64",
    aarch64("0x41", "0x0", "0xd08", 3, "fp asimd evtstrm crc32 cpuid",
            "\nHardware\t: BCM2835\nRevision\t: c03112\nSerial\t\t: 10000000abcdef01\nModel\t\t: Raspberry Pi 4\n"),
    4, (32768, 1048576), "Raspberry Pi 4 Model B Rev 1.2",
)  # fmt: skip
GRAVITON_3 = CpuFacts(
    "aarch64",
    aarch64("0x41", "0x1", "0xd40", 1,
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop "
            "sha3 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm paca pacg dcpodp svei8mm svebf16 i8mm bf16"),
    2, (65536, 1048576, 33554432), None,
)  # fmt: skip

#: Facts and the model name that LLVM gives such a CPU.
CPUS: dict[str, tuple[CpuFacts, str]] = {
    "epyc-genoa": (EPYC_GENOA, "znver4"),
    "epyc-genoa-hidden": (EPYC_GENOA_HIDDEN, "znver4"),
    "epyc-cloud-milan": (EPYC_CLOUD_MILAN, "znver3"),
    "epyc-cloud-genoa": (EPYC_CLOUD_GENOA, "znver4"),
    "xeon": (XEON, "icelake-server"),
    "raspberry-pi-4": (RASPBERRY_PI_4, "cortex-a72"),
    "graviton-3": (GRAVITON_3, "neoverse-v1"),
}


def features_used(target: str) -> set[str]:
    """What LLVM would use for the target, by its own word."""
    return {str(name) for name in codegen.llvm_get_cpu_features(tvm.target.Target(json.loads(target)))}


def test_different_cpus_are_different_devices() -> None:
    """CPUs that differ in model, generation or features have different identities and names."""
    identities = [identity_of(facts) for facts, _ in CPUS.values()]
    assert len(set(identities)) == len(CPUS)
    assert len({identity.name for identity in identities}) == len(CPUS)


def test_what_tells_devices_apart() -> None:
    """Cores, caches and the board are part of the identity as well."""
    base = identity_of(RASPBERRY_PI_4)
    for change in ({"cores": 2}, {"cache_bytes": (32768, 524288)}, {"board": "Raspberry Pi Compute Module 4"}):
        assert identity_of(replace(RASPBERRY_PI_4, **change)) != base


def test_same_facts_same_identity() -> None:
    """Clock, microcode and how many processors are listed change from hour to hour, and do not count."""
    for facts, _ in CPUS.values():
        noisy = facts.cpuinfo.replace("2445.4", "3100.9").replace("0xa0011d", "0xb0000").replace("108.00", "54.00")
        listed_once = noisy.split("\n\n")[0]
        assert identity_of(replace(facts, cpuinfo=noisy)) == identity_of(facts)
        assert identity_of(replace(facts, cpuinfo=listed_once)) == identity_of(facts)


def test_names() -> None:
    """Names are read off the CPU, without trade marks, clock or the vendor twice."""
    assert identity_of(XEON).vendor == "Intel"
    assert identity_of(XEON).model == "Xeon Platinum 8375C (family 6 model 106 stepping 6)"
    assert identity_of(EPYC_GENOA).model.startswith("EPYC 9654 96-Core Processor")
    assert identity_of(RASPBERRY_PI_4) == DeviceIdentity(
        "cpu", "ARM", "Cortex-A72 r0p3", "aarch64", ("crc", "neon"), 4, (32768, 1048576),
        "Raspberry Pi 4 Model B Rev 1.2",
    )  # fmt: skip
    assert identity_of(replace(GRAVITON_3, cpuinfo=GRAVITON_3.cpuinfo.replace("0x41", "0x99"))).vendor == "0x99"


@pytest.mark.parametrize("name", CPUS)
def test_target_uses_what_is_there(name: str) -> None:
    """LLVM uses no feature for the target that the CPU does not report, by its own word."""
    facts, mcpu = CPUS[name]
    identity = identity_of(facts)
    assert mcpu_of(facts) == mcpu
    target = target_of(identity, mcpu)
    assert features_used(target) & set(FEATURES[facts.arch]) <= set(identity.features)
    data = json.loads(target)
    assert (data["kind"], data["mcpu"], data["num-cores"]) == ("llvm", mcpu, facts.cores)
    assert data["mtriple"].startswith(facts.arch)
    assert target == json.dumps(data, sort_keys=True, separators=(",", ":"))


def test_hidden_features_are_denied() -> None:
    """A feature that LLVM assumes of the model but the machine hides is taken away in the target (jax-ml/jax#2906)."""
    plain, hidden = (
        json.loads(target_of(identity_of(CPUS[n][0]), "znver4")) for n in ("epyc-genoa", "epyc-genoa-hidden")
    )
    assert not any(attribute.startswith("-avx512") for attribute in plain.get("mattr", []))
    assert {"-avx512f", "-avx512bw", "-avx512vnni", "-gfni"} <= set(hidden["mattr"])
    assert "avx512f" in features_used(json.dumps(plain))
    used = features_used(json.dumps(hidden))
    assert not any(name.startswith("avx512") for name in used)
    assert {"avx2", "fma", "f16c"} <= used


def test_code_for_hidden_features(tmp_path: Path) -> None:
    """A kernel compiled for the target with hidden AVX-512 holds no instruction on its registers; else it does."""
    from tvm import te

    a, b = te.placeholder((1024,), name="a"), te.placeholder((1024,), name="b")
    kernel = te.create_prim_func([a, b, te.compute((1024,), lambda i: a[i] * b[i] + a[i], name="c")])
    schedule = tvm.s_tir.Schedule(tvm.ir.IRModule({"main": kernel}))
    [loop] = schedule.get_loops(schedule.get_sblock("c"))
    schedule.vectorize(schedule.split(loop, [None, 16])[1])
    found = {}
    for name in ("epyc-genoa", "epyc-genoa-hidden"):
        facts, mcpu = CPUS[name]
        target = tvm.target.Target(json.loads(target_of(identity_of(facts), mcpu)))
        assembly = tvm.compile(schedule.mod, target=target).mod.inspect_source("asm")
        found[name] = "zmm" in assembly
        assert "ymm" in assembly or "zmm" in assembly
    assert found == {"epyc-genoa": True, "epyc-genoa-hidden": False}


@pytest.mark.parametrize(
    ("facts", "mcpu"), [(EPYC_GENOA, "znver99"), (EPYC_GENOA, "cortex-a72"), (GRAVITON_3, "znver4")]
)
def test_unknown_model(facts: CpuFacts, mcpu: str) -> None:
    """A model name that LLVM does not know for the architecture is refused by name."""
    with pytest.raises(UnusableDevice, match=mcpu):
        target_of(identity_of(facts), mcpu)


@pytest.mark.parametrize("arch", ["armv6l", "ppc64le"])
def test_other_architectures(arch: str) -> None:
    """Architectures that nothing is compiled for are refused by name."""
    with pytest.raises(UnusableDevice, match=arch):
        identity_of(replace(EPYC_GENOA, arch=arch))


def test_programs_of_32_bits() -> None:
    """Under a kernel of 64 bits a program of 32 is one for the architecture of 32."""
    assert local_cpu._arch("aarch64", (1 << 63) - 1) == "aarch64"
    for machine in ("aarch64", "armv8l", "armv7l"):
        assert local_cpu._arch(machine, (1 << 31) - 1) == "armv7l"
    assert local_cpu._arch("x86_64", (1 << 63) - 1) == "x86_64"


def test_cpuinfo_without_the_usual_lines() -> None:
    """A CPU that does not say who it is cannot be told from others, and is refused."""
    with pytest.raises(UnusableDevice, match="vendor_id"):
        identity_of(replace(EPYC_GENOA, cpuinfo="processor\t: 0\nflags\t\t: fpu sse2\n"))
    with pytest.raises(UnusableDevice, match="CPU part"):
        identity_of(replace(GRAVITON_3, cpuinfo="processor\t: 0\nFeatures\t: fp asimd\n"))


def test_identity_survives_json() -> None:
    """An identity is the same after it was stored."""
    for facts, _ in CPUS.values():
        identity = identity_of(facts)
        data: Any = json.loads(json.dumps(to_json(identity)))
        assert DeviceIdentity.from_json(data) == identity


def test_caches(tmp_path: Path) -> None:
    """Cache sizes are read for the data side alone, in the order of their levels, as far as the kernel tells."""
    for index, (kind, level, size) in enumerate(
        [("Data", "1", "32K"), ("Instruction", "1", "64K"), ("Unified", "3", "32768K"), ("Unified", "2", "512K")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size)):
            (folder / name).write_text(text + "\n")
    (tmp_path / "index9").mkdir()
    assert local_cpu._cache_sizes(tmp_path) == (32768, 524288, 33554432)
    assert local_cpu._cache_sizes(tmp_path / "missing") == ()


def test_device_tree(tmp_path: Path) -> None:
    """The device tree's strings end in NUL each; a machine without one has none."""
    (tmp_path / "model").write_bytes(b"Raspberry Pi 4 Model B Rev 1.2\0")
    (tmp_path / "compatible").write_bytes(b"raspberrypi,4-model-b\0brcm,bcm2711\0")
    assert local_cpu._strings(tmp_path / "model") == ("Raspberry Pi 4 Model B Rev 1.2",)
    assert local_cpu._strings(tmp_path / "compatible") == ("raspberrypi,4-model-b", "brcm,bcm2711")
    assert local_cpu._strings(tmp_path / "missing") == ()


def test_clocks(tmp_path: Path) -> None:
    """The highest clock of each processor is read by the processor's number; one without a clock has none."""
    for number, khz in (("10", "2400000\n"), ("2", "1800000\n"), ("3", "")):
        folder = tmp_path / f"cpu{number}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "cpuinfo_max_freq").write_text(khz)
    (tmp_path / "cpufreq").mkdir()
    assert local_cpu._max_khz(tmp_path) == ((2, 1800000), (10, 2400000))
    assert local_cpu._max_khz(tmp_path / "missing") == ()


def test_probe_in_a_process() -> None:
    """The probe of this machine prints one JSON object, the same each time, with a target that LLVM agrees to."""
    answers = [
        subprocess.run(
            [sys.executable, "-m", "workers.devices.probe"], capture_output=True, text=True, timeout=120, check=True
        ).stdout
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    data = json.loads(answers[0])
    identity = DeviceIdentity.from_json(data["identity"])
    assert (identity, data["target"]) == local_cpu.probe()
    assert Toolchain.from_json(data["toolchain"]) == toolchain.current()
    assert features_used(data["target"]) & set(FEATURES[identity.arch]) <= set(identity.features)
