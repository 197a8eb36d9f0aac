"""Who ten real devices are, and what compiles for them, by what they told of themselves."""

from __future__ import annotations

import json
import random
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm.target import codegen

from tests.workers.devices.recordings import (
    A100,
    APPLE_M1,
    CPUS,
    H100,
    H100_MIG,
    RASPBERRY_PI_2,
    RASPBERRY_PI_4,
    VISIONFIVE_2,
    XEON,
)
from tests.workers.search.samples import matmul_module
from tuning_db.keys import to_json
from workers.devices.identity import (
    FEATURES,
    CpuFacts,
    UnusableDevice,
    gpu_identity_of,
    identity_of,
    mcpu_of,
)
from workers.devices.targets import gpu_target_of, target_of
from workers.elf import machine_of


def after_a_reboot(facts: CpuFacts, seed: int) -> CpuFacts:
    """The same device at another hour: clocks, microcode, serial number, the order of processors and of flags."""
    order = random.Random(seed)
    noisy = re.sub(
        r"(?mi)^(bogomips|cpu mhz)(\s*: )(\S+)", lambda m: f"{m[1]}{m[2]}{order.random():.2f}", facts.cpuinfo
    )
    noisy = re.sub(r"(?m)^(Serial|microcode)(\s*: )(\S+)", lambda m: f"{m[1]}{m[2]}{order.random()}", noisy)
    noisy = re.sub(
        r"(?m)^(flags|Features)(\s*: )(.*)$",
        lambda m: f"{m[1]}{m[2]}{' '.join(order.sample(m[3].split(), len(m[3].split())))} ",
        noisy,
    )
    blocks = noisy.split("\n\n")
    return replace(
        facts,
        cpuinfo="\n\n".join(order.sample(blocks, len(blocks))),
        max_khz=tuple(order.sample(facts.max_khz, len(facts.max_khz))),
    )


def test_ten_devices() -> None:
    """Recordings of different devices, and of one under systems of 64 and of 32 bits, have different identities and
    different names."""
    identities = [identity_of(facts) for facts, _ in CPUS.values()]
    identities += [gpu_identity_of(facts) for facts in (A100, H100, H100_MIG)]
    assert len(identities) >= 10
    assert len(set(identities)) == len({identity.name for identity in identities}) == len(identities)


@pytest.mark.parametrize("name", CPUS)
def test_same_device(name: str) -> None:
    """What changes from hour to hour, and the order of what is listed, change neither identity nor LLVM's name."""
    facts, mcpu = CPUS[name]
    assert mcpu_of(facts) == mcpu
    for seed in range(5):
        later = after_a_reboot(facts, seed)
        assert later.cpuinfo != facts.cpuinfo
        assert (identity_of(later), mcpu_of(later)) == (identity_of(facts), mcpu)


@pytest.mark.parametrize("name", CPUS)
def test_target(name: str) -> None:
    """LLVM knows the model and each feature of the target, and uses all that the device reports and nothing else
    (jax-ml/jax#2906). The number of cores, without which MetaSchedule refuses a target, is there
    (pytorch/pytorch#90213)."""
    facts, mcpu = CPUS[name]
    identity = identity_of(facts)
    data = json.loads(target_of(identity, mcpu))
    assert (data["mcpu"], data["num-cores"]) == (mcpu, identity.cores)
    used = {str(feature) for feature in codegen.llvm_get_cpu_features(tvm.target.Target(data))}
    assert used & set(FEATURES[facts.arch]) == set(identity.features)


def test_facts_survive_json() -> None:
    """Facts that a board sends are the same where they arrive."""
    for facts, _ in CPUS.values():
        assert CpuFacts.from_json(json.loads(json.dumps(to_json(facts)))) == facts


def test_unequal_cores() -> None:
    """Of unequal cores the identity names each kind; the fastest, which TVM's threads run on, are tuned for."""
    identity = identity_of(APPLE_M1)
    assert (identity.vendor, identity.model) == ("Apple", "4x Firestorm-M1 r1p1 + 4x Icestorm-M1 r1p1")
    assert identity.cores == 4
    assert identity_of(replace(APPLE_M1, cores=2)).cores == 2
    # As in a small phone: Cortex-A55 with dotprod, Cortex-A75 with SVE, which a thread on an A55 would die of.
    big_little = replace(
        APPLE_M1,
        cpuinfo=APPLE_M1.cpuinfo.replace("0x61", "0x41").replace("0x022", "0xd05").replace("0x023", "0xd0a"),
    )
    first, second = big_little.cpuinfo.rsplit("asimddp", 1)
    mixed = replace(big_little, cpuinfo=f"{first}asimddp sve{second}")
    assert mcpu_of(mixed) == "cortex-a75"
    assert "sve" not in identity_of(mixed).features
    assert "dotprod" in identity_of(mixed).features
    target = json.loads(target_of(identity_of(mixed), "cortex-a75"))
    assert "+sve" not in target.get("mattr", [])


def test_unknown_clocks_of_unequal_cores() -> None:
    """Without clocks all cores count, and the choice of a model does not hang on the order they are listed in."""
    facts = replace(APPLE_M1, max_khz=())
    assert identity_of(facts).cores == 8
    assert {identity_of(after_a_reboot(facts, seed)) for seed in range(5)} == {identity_of(facts)}


def test_cpus_in_no_table() -> None:
    """A CPU younger than the tables gets what its features allow, never another CPU's name."""
    assert mcpu_of(replace(RASPBERRY_PI_4, cpuinfo=RASPBERRY_PI_4.cpuinfo.replace("0xd08", "0xdff"))) == "generic"
    young = replace(XEON, cpuinfo=XEON.cpuinfo.replace(": 173", ": 250"))
    assert mcpu_of(young) == "x86-64-v4"
    assert mcpu_of(replace(young, cpuinfo=young.cpuinfo.replace("avx512f ", ""))) == "x86-64-v3"
    assert "+avx512fp16" in json.loads(target_of(identity_of(young), "x86-64-v4"))["mattr"]


@pytest.mark.parametrize(("facts", "code"), [(RASPBERRY_PI_2, 40), (VISIONFIVE_2, 243)])
def test_code_for_boards_of_other_architectures(facts: CpuFacts, code: int, tmp_path: Path) -> None:
    """What is compiled for them is their machine code, which on RISC-V hands numbers over in the registers of numbers,
    as Linux's libraries there take them (EF_RISCV_FLOAT_ABI_DOUBLE)."""
    target = tvm.target.Target(json.loads(target_of(identity_of(facts), mcpu_of(facts))))
    path = tmp_path / "kernel.o"
    tvm.compile(matmul_module(8, 8, 8), target=target).mod.write_to_file(str(path), "o")
    file = path.read_bytes()
    assert machine_of(file)[0] == code
    if facts is VISIONFIVE_2:
        assert struct.unpack_from("<I", file, 48)[0] & 0x6 == 0x4


def test_what_distributions_do_not_run_on() -> None:
    """A CPU without what Linux's programs for its architecture are compiled with is refused by name; so is one that
    does not tell which it is, and an architecture that nothing compiles for."""
    for facts, old, new, said in (
        (RASPBERRY_PI_2, " neon", "", "armv7l CPUs without neon"),
        (VISIONFIVE_2, "rv64imafdc", "rv64imac", "riscv64 CPUs without f, d"),
        (VISIONFIVE_2, "uarch", "march", "has no uarch"),
    ):
        with pytest.raises(UnusableDevice, match=said):
            identity_of(replace(facts, cpuinfo=facts.cpuinfo.replace(old, new)))
    assert "zbb" not in identity_of(replace(VISIONFIVE_2, cpuinfo=VISIONFIVE_2.cpuinfo.replace("_zbb", ""))).features
    unknown = replace(VISIONFIVE_2, cpuinfo=VISIONFIVE_2.cpuinfo.replace("sifive,u74-mc", "sophgo,c920"))
    assert (identity_of(unknown).vendor, mcpu_of(unknown)) == ("sophgo", "generic-rv64")
    target_of(identity_of(unknown), "generic-rv64")


def test_board_without_a_model() -> None:
    """A board whose device tree has no model is known by its most specific compatible."""
    assert identity_of(replace(RASPBERRY_PI_4, board=None)).board == "raspberrypi,4-model-b"


def test_gpus() -> None:
    """A slice of a GPU is another device than the whole, another driver another one, and targets are TVM's."""
    host = target_of(identity_of(XEON), "graniterapids")
    sliced = gpu_identity_of(H100_MIG)
    assert (sliced.model, sliced.arch, sliced.cores) == ("H100 80GB HBM3 MIG 1g.10gb", "sm_90", 16)
    assert gpu_identity_of(replace(H100_MIG, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")) == sliced
    assert gpu_identity_of(replace(A100, driver="560.35.03")) != gpu_identity_of(A100)
    for facts, arch in ((A100, "sm_80"), (H100, "sm_90"), (H100_MIG, "sm_90")):
        target = tvm.target.Target(json.loads(gpu_target_of(gpu_identity_of(facts), host)))
        assert (str(target.kind), target.attrs["arch"]) == ("cuda", arch)
        assert target.host.attrs["mcpu"] == "graniterapids"
    with pytest.raises(UnusableDevice, match="sm_199"):
        gpu_target_of(gpu_identity_of(replace(A100, compute_capability=(19, 9))), host)
    with pytest.raises(UnusableDevice, match="driver"):
        gpu_identity_of(replace(A100, driver=""))
