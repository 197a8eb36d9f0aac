"""What real devices told of themselves, and where it was recorded.

A processor that differs from the one before by its number alone is written once, with how many there are of it. What a
recording does not hold (the device tree of one that is /proc/cpuinfo alone, caches) is filled in from the sources that
are named beside it, or left out.
"""

from __future__ import annotations

from typing import Final

from workers.devices.identity import CpuFacts, GpuFacts


def _cpuinfo(*blocks: tuple[int, str], board: str = "") -> str:
    """`blocks`: how many processors in a row are alike, and the lines of one of them below "processor"."""
    lines: list[str] = []
    for count, block in blocks:
        for _ in range(count):
            lines.append(f"processor\t: {len(lines)}\n{block}\n")
    return "\n".join(lines) + (f"\n{board}" if board else "")


def _aarch64(bogomips: str, features: str, implementer: str, variant: str, part: str, revision: int) -> str:
    return (
        f"BogoMIPS\t: {bogomips}\nFeatures\t: {features}\nCPU implementer\t: {implementer}\nCPU architecture: 8\n"
        f"CPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: {revision}"
    )


# github.com/hrw/arm-socs-table, cpuinfo-data/raspberry-pi3b; device tree: Linux, bcm2837-rpi-3-b.dts.
RASPBERRY_PI_3: Final = CpuFacts(
    "aarch64",
    _cpuinfo(
        (4, "model name\t: ARMv8 Processor rev 4 (v8l)\n"
            + _aarch64("38.40", "fp asimd evtstrm crc32 cpuid", "0x41", "0x0", "0xd03", 4)),
        board="Hardware\t: BCM2835\nRevision\t: a02082\nSerial\t\t: 000000002e2fe545\n"
              "Model\t\t: Raspberry Pi 3 Model B Rev 1.2\n",
    ),
    4, (), "Raspberry Pi 3 Model B Rev 1.2", ("raspberrypi,3-model-b", "brcm,bcm2837"),
)  # fmt: skip


def _armv7(revision: int, bogomips: str, features: str, part: str) -> str:
    return (
        f"model name\t: ARMv7 Processor rev {revision} (v7l)\nBogoMIPS\t: {bogomips}\nFeatures\t: {features} \n"
        "CPU implementer\t: 0x41\nCPU architecture: 7\nCPU variant\t: 0x0\n"
        f"CPU part\t: {part}\nCPU revision\t: {revision}"
    )


_ARMV7_FEATURES = "half thumb fastmult vfp edsp neon vfpv3 tls vfpv4 idiva idivt vfpd32 lpae evtstrm"
# github.com/raspberrypi/documentation issue 906; device tree: Linux, bcm2836-rpi-2-b.dts.
RASPBERRY_PI_2: Final = CpuFacts(
    "armv7l",
    _cpuinfo(
        (4, _armv7(5, "38.40", _ARMV7_FEATURES, "0xc07")),
        board="Hardware\t: BCM2835\nRevision\t: a01041\nSerial\t\t: 0000000088506974\n",
    ),
    4, (), "Raspberry Pi 2 Model B Rev 1.1", ("raspberrypi,2-model-b", "brcm,bcm2836"),
)  # fmt: skip

# The Raspberry Pi 3 with a system of 32 bits: github.com/kidoman/embd pull request 79.
RASPBERRY_PI_3_OF_32_BITS: Final = CpuFacts(
    "armv7l",
    _cpuinfo(
        (4, _armv7(4, "38.40", f"{_ARMV7_FEATURES} crc32", "0xd03")),
        board="Hardware\t: BCM2835\nRevision\t: a02082\n",
    ),
    4, (), "Raspberry Pi 3 Model B Rev 1.2", ("raspberrypi,3-model-b", "brcm,bcm2837"),
)  # fmt: skip


def _riscv64(isa: str, uarch: str, vendor: str, architecture: str, version: str) -> str:
    return (
        f"hart\t\t: 0\nisa\t\t: {isa}\nmmu\t\t: sv39\nuarch\t\t: {uarch}\nmvendorid\t: {vendor}\n"
        f"marchid\t\t: {architecture}\nmimpid\t\t: {version}\nhart isa\t: {isa}"
    )


# github.com/hrw/arm-socs-table, cpuinfo-data/rv-jh7110-starfive-visionfive2, all harts written as number 0; device
# tree: Linux, jh7110-starfive-visionfive-2-v1.3b.dts and jh7110.dtsi.
VISIONFIVE_2: Final = CpuFacts(
    "riscv64",
    _cpuinfo((4, _riscv64(
        "rv64imafdc_zicntr_zicsr_zifencei_zihpm_zaamo_zalrsc_zca_zcd_zba_zbb", "sifive,u74-mc", "0x489",
        "0x8000000000000007", "0x4210427",
    ))),
    4, (32768, 2097152), "StarFive VisionFive 2 v1.3B", ("starfive,visionfive-2-v1.3b", "starfive,jh7110"),
)  # fmt: skip

# github.com/hrw/arm-socs-table, cpuinfo-data/rv-spacemit-x60-milk-v-jupiter, likewise.
MILKV_JUPITER: Final = CpuFacts(
    "riscv64",
    _cpuinfo((8, "model name\t: Spacemit(R) X60\n" + _riscv64(
        "rv64imafdcv_zicbom_zicboz_zicntr_zicond_zicsr_zifencei_zihintpause_zihpm_zaamo_zalrsc_zfh_zfhmin_zca_zcd_zba_"
        "zbb_zbc_zbs_zkt_zve32f_zve32x_zve64d_zve64f_zve64x_zvfh_zvfhmin_zvkt_sscofpmf_sstc_svinval_svnapot_svpbmt",
        "spacemit,x60", "0x710", "0x8000000058000001", "0x1000000049772200",
    ))),
    8, (), None, ("spacemit,k1",),
)  # fmt: skip

# github.com/hrw/arm-socs-table, cpuinfo-data/raspberry-pi4; the last block: fastfetch-cli/fastfetch issue 1529.
RASPBERRY_PI_4: Final = CpuFacts(
    "aarch64",
    _cpuinfo(
        (4, _aarch64("108.00", "fp asimd evtstrm crc32 cpuid", "0x41", "0x0", "0xd08", 3)),
        board="Revision\t: d03115\nSerial\t\t: 100000000fe69593\nModel\t\t: Raspberry Pi 4 Model B Rev 1.5\n",
    ),
    4, (32768, 1048576), "Raspberry Pi 4 Model B Rev 1.5", ("raspberrypi,4-model-b", "brcm,bcm2711"),
)  # fmt: skip

# github.com/hrw/arm-socs-table, cpuinfo-data/raspberry-pi5.
RASPBERRY_PI_5: Final = CpuFacts(
    "aarch64",
    _cpuinfo(
        (4, _aarch64(
            "108.00",
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
            "0x41", "0x4", "0xd0b", 1,
        )),
        board="Hardware\t: BCM2835\nRevision\t: d04170\nSerial\t\t: 48343bbbe3ae743b\n"
              "Model\t\t: Raspberry Pi 5 Model B Rev 1.0\n",
    ),
    4, (65536, 524288, 2097152), "Raspberry Pi 5 Model B Rev 1.0", ("raspberrypi,5-model-b", "brcm,bcm2712"),
)  # fmt: skip

# github.com/hrw/arm-socs-table, cpuinfo-data/nvidia-jetson-nano; device tree: Linux, tegra210-p3450-0000.dts.
JETSON_NANO: Final = CpuFacts(
    "aarch64",
    _cpuinfo((4, _aarch64(
        "38.40", "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", "0x41", "0x1", "0xd07", 1
    ))),
    4, (32768, 2097152), "NVIDIA Jetson Nano Developer Kit", ("nvidia,p3450-0000", "nvidia,tegra210"),
)  # fmt: skip

# github.com/KavrakiLab/vamp issue 20, lscpu's view of an AGX Orin: features, caches and clock; the part is Arm's number
# of the Cortex-A78AE that it names. Device tree: Linux, tegra234-p3737-0000+p3701-0000.dts.
JETSON_ORIN: Final = CpuFacts(
    "aarch64",
    _cpuinfo((12, _aarch64(
        "62.50",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp uscat "
        "ilrcpc flagm paca pacg",
        "0x41", "0x0", "0xd42", 1,
    ))),
    12, (65536, 262144, 2097152), "NVIDIA Jetson AGX Orin Developer Kit",
    ("nvidia,p3737-0000+p3701-0000", "nvidia,p3701-0000", "nvidia,tegra234"),
    tuple((number, 2201600) for number in range(12)),
)  # fmt: skip

# github.com/hrw/arm-socs-table, cpuinfo-data/graviton3, which holds one of a c7g.xlarge's four.
GRAVITON_3: Final = CpuFacts(
    "aarch64",
    _cpuinfo((4, _aarch64(
        "2100.00",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 "
        "sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 "
        "dgh rng",
        "0x41", "0x1", "0xd40", 1,
    ))),
    4, (65536, 1048576, 33554432), None,
)  # fmt: skip

_M1_FEATURES = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 "
    "asimddp sha512 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint"
)
# github.com/hrw/arm-socs-table, cpuinfo-data/apple-m1; clocks: Dr-Noob/cpufetch issue 321; device tree: Linux,
# t8103-j274.dts. Four efficiency cores come first.
APPLE_M1: Final = CpuFacts(
    "aarch64",
    _cpuinfo(
        (4, _aarch64("48.00", _M1_FEATURES, "0x61", "0x1", "0x022", 1)),
        (4, _aarch64("48.00", _M1_FEATURES, "0x61", "0x1", "0x023", 1)),
    ),
    8, (131072, 12582912), "Apple Mac mini (M1, 2020)", ("apple,j274", "apple,t8103", "apple,arm-platform"),
    tuple((number, 2064000 if number < 4 else 3204000) for number in range(8)),
)  # fmt: skip

# github.com/antimetal/system-agent, pkg/performance/collectors/cpu_info_test.go: a virtual machine at AWS.
EPYC: Final = CpuFacts(
    "x86_64",
    _cpuinfo((2, (
        "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7R13 Processor\n"
        "stepping\t: 1\nmicrocode\t: 0xa0011d3\ncpu MHz\t\t: 3602.592\ncache size\t: 512 KB\nphysical id\t: 0\n"
        "siblings\t: 2\ncore id\t\t: 0\ncpu cores\t: 1\nfpu\t\t: yes\nfpu_exception\t: yes\ncpuid level\t: 16\n"
        "wp\t\t: yes\nflags\t\t: fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx "
        "fxsr sse sse2 ht syscall nx mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl nonstop_tsc cpuid "
        "extd_apicid aperfmperf tsc_known_freq pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt "
        "aes xsave avx f16c rdrand hypervisor lahf_lm cmp_legacy cr8_legacy abm sse4a misalignsse 3dnowprefetch "
        "topoext invpcid_single ssbd ibrs ibpb stibp vmmcall fsgsbase bmi1 avx2 smep bmi2 erms invpcid rdseed adx "
        "smap clflushopt clwb sha_ni xsaveopt xsavec xgetbv1 xsaves clzero xsaveerptr rdpru wbnoinvd arat npt "
        "nrip_save rdpid\nbugs\t\t: sysret_ss_attrs null_seg spectre_v1 spectre_v2 spec_store_bypass\n"
        "bogomips\t: 5199.98\naddress sizes\t: 48 bits physical, 48 bits virtual\npower management:"
    ))),
    2, (32768, 524288, 33554432), None,
)  # fmt: skip

# github.com/archspec/archspec-json, tests/targets/linux-rhel9-graniterapids, which holds one processor of 96.
XEON: Final = CpuFacts(
    "x86_64",
    _cpuinfo((2, (
        "vendor_id       : GenuineIntel\ncpu family      : 6\nmodel           : 173\n"
        "model name      : Intel(R) Xeon(R) 6972P\nstepping        : 1\nmicrocode       : 0x1000380\n"
        "cpu MHz         : 2400.000\ncache size      : 491520 KB\n"
        "flags           : fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi "
        "mmx fxsr sse sse2 ss ht tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc art arch_perfmon pebs bts rep_good "
        "nopl xtopology nonstop_tsc cpuid aperfmperf tsc_known_freq pni pclmulqdq dtes64 monitor ds_cpl vmx smx est "
        "tm2 ssse3 sdbg fma cx16 xtpr pdcm pcid dca sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave "
        "avx f16c rdrand lahf_lm abm 3dnowprefetch cpuid_fault epb cat_l3 cat_l2 cdp_l3 intel_ppin cdp_l2 ssbd mba "
        "ibrs ibpb stibp ibrs_enhanced tpr_shadow flexpriority ept vpid ept_ad fsgsbase tsc_adjust bmi1 avx2 smep "
        "bmi2 erms invpcid cqm rdt_a avx512f avx512dq rdseed adx smap avx512ifma clflushopt clwb intel_pt avx512cd "
        "sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local "
        "split_lock_detect avx_vnni avx512_bf16 wbnoinvd dtherm ida arat pln pts hwp hwp_act_window hwp_epp "
        "hwp_pkg_req hfi vnmi avx512vbmi umip pku ospke waitpkg avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni "
        "avx512_bitalg tme avx512_vpopcntdq la57 rdpid bus_lock_detect cldemote movdiri movdir64b enqcmd fsrm "
        "md_clear serialize tsxldtrk pconfig arch_lbr ibt amx_bf16 avx512_fp16 amx_tile amx_int8 flush_l1d "
        "arch_capabilities\nbogomips        : 4800.00\n"
        "address sizes   : 52 bits physical, 57 bits virtual\npower management:"
    ))),
    2, (49152, 2097152, 503316480), None,
)  # fmt: skip

#: Each with LLVM's name of its CPU.
CPUS: Final[dict[str, tuple[CpuFacts, str]]] = {
    "raspberry-pi-2": (RASPBERRY_PI_2, "cortex-a7"),
    "raspberry-pi-3": (RASPBERRY_PI_3, "cortex-a53"),
    "raspberry-pi-3-of-32-bits": (RASPBERRY_PI_3_OF_32_BITS, "cortex-a53"),
    "raspberry-pi-4": (RASPBERRY_PI_4, "cortex-a72"),
    "raspberry-pi-5": (RASPBERRY_PI_5, "cortex-a76"),
    "jetson-nano": (JETSON_NANO, "cortex-a57"),
    "jetson-orin": (JETSON_ORIN, "cortex-a78ae"),
    "graviton-3": (GRAVITON_3, "neoverse-v1"),
    "apple-m1": (APPLE_M1, "apple-a14"),
    "visionfive-2": (VISIONFIVE_2, "sifive-u74"),
    "milkv-jupiter": (MILKV_JUPITER, "spacemit-x60"),
    "epyc": (EPYC, "znver3"),
    "xeon": (XEON, "graniterapids"),
}

# github.com/NVIDIA/go-nvml, pkg/nvml/mock/shared/gpus/a100.go and h100.go, dgxh100/dgxh100.go: what NVIDIA's own
# stand-in for NVML answers on such machines. The whole A100's multiprocessors: NVIDIA A100 architecture whitepaper.
A100: Final = GpuFacts("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81920 << 20, "550.54.15")
H100: Final = GpuFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, 81920 << 20, "550.54.15")
H100_MIG: Final = GpuFacts("NVIDIA H100 80GB HBM3", (9, 0), 16, 10240 << 20, "550.54.15", "1g.10gb")
