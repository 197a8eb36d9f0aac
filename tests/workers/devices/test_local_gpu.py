"""Which GPU a worker drives, by recorded answers of NVML; and that none is refused by name, with no GPU here at all."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import tvm

from tests.workers.devices.nvml import Gpu, Recorded
from tests.workers.devices.recordings import A100, H100, H100_MIG
from workers.devices import local_gpu
from workers.devices.identity import GpuFacts, UnusableDevice, gpu_identity_of

DRIVER = Recorded(()).driver
WHOLE_H100 = Gpu(H100, "GPU-1d0d1b8e-0f4e", 16896, divided=False)
WHOLE_A100 = Gpu(A100, "GPU-7c3f5a11-92c0", 6912, divided=False)
SLICE = replace(H100_MIG, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
DIVIDED_H100 = replace(WHOLE_H100, divided=True, slices=(Gpu(SLICE, "MIG-0aa2"), Gpu(SLICE, "MIG-1bb3")))
# Not recorded: put together from the data sheet of the Jetson AGX Orin.
ORIN = Gpu(GpuFacts("Orin (nvgpu)", (8, 7), 16, 62841 << 20, DRIVER), "GPU-or1n", 2048)


def read(machine: Recorded, **environment: str) -> GpuFacts:
    try:
        return local_gpu.read_facts(machine, environment)
    finally:
        assert machine.open == 0


def refusal(machine: Recorded, **environment: str) -> str:
    with pytest.raises(UnusableDevice) as caught:
        read(machine, **environment)
    return str(caught.value)


def test_the_only_gpu() -> None:
    """A machine with one GPU needs no telling; its multiprocessors come from its cores."""
    assert read(Recorded([WHOLE_H100])) == replace(H100, driver=DRIVER)
    assert read(Recorded([WHOLE_A100]), CUDA_VISIBLE_DEVICES="0") == replace(A100, driver=DRIVER)
    assert gpu_identity_of(read(Recorded([ORIN]))).arch == "sm_87"


def test_one_of_several() -> None:
    """Of several GPUs one is named, by its UUID or the begin of it, or by a number that counts as NVML does."""
    machine = Recorded([WHOLE_A100, WHOLE_H100])
    assert read(machine, CUDA_VISIBLE_DEVICES="GPU-1d0d").name == H100.name
    assert read(machine, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID").name == H100.name
    assert WHOLE_A100.uuid in refusal(machine)
    assert "may be any GPU: name one by its UUID" in refusal(machine, CUDA_VISIBLE_DEVICES="1")
    assert "names several" in refusal(machine, CUDA_VISIBLE_DEVICES=f"{WHOLE_A100.uuid},{WHOLE_H100.uuid}")
    assert "0 GPUs" in refusal(machine, CUDA_VISIBLE_DEVICES="GPU-ffff")
    assert "0 GPUs" in refusal(machine, CUDA_VISIBLE_DEVICES="2", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert "0 GPUs" in refusal(machine, CUDA_VISIBLE_DEVICES="")


def test_the_gpu_that_a_worker_is_told_to_drive() -> None:
    """It is named by its number, as nvidia-smi counts, or by its UUID; of a divided GPU by a slice's UUID. What cannot
    be driven is refused by name. By recorded answers of NVML."""
    machine = Recorded([WHOLE_A100, DIVIDED_H100, replace(WHOLE_H100, uuid="GPU-99")])
    assert local_gpu.uuid_of(machine, "0") == WHOLE_A100.uuid
    assert local_gpu.uuid_of(machine, "GPU-7c3f") == WHOLE_A100.uuid
    assert local_gpu.uuid_of(machine, "MIG-1bb3") == "MIG-1bb3"
    for wanted, said in {
        "7": "there is no GPU 7: NVML tells of 3",
        "GPU-ffff": "no GPU has the UUID GPU-ffff; there are GPU-7c3f",
        "MIG-": "2 GPUs have the UUID MIG-",
        "1": "GPU 1 is divided by MIG: name one of its instances, MIG-0aa2, MIG-1bb3",
        WHOLE_H100.uuid: "GPU 1 is divided by MIG: name one",
        "H100": "'H100' is neither the number nor the UUID",
    }.items():
        with pytest.raises(UnusableDevice, match=re.escape(said)):
            local_gpu.uuid_of(machine, wanted)
    assert machine.open == 0
    with pytest.raises(UnusableDevice, match="GPU 0 is divided by MIG and has no instance"):
        local_gpu.uuid_of(Recorded([replace(DIVIDED_H100, slices=())]), "0")


def test_slices() -> None:
    """Of a divided GPU a slice is driven, with its own multiprocessors and memory; the whole is not to be had."""
    machine = Recorded([DIVIDED_H100])
    facts = read(machine, CUDA_VISIBLE_DEVICES="MIG-1bb3")
    assert (facts.mig, facts.multiprocessors, facts.memory_bytes) == ("1g.10gb", 16, 10240 << 20)
    assert facts.compute_capability == (9, 0)
    assert "2 GPUs" in refusal(machine)
    assert "may be any GPU" in refusal(machine, CUDA_VISIBLE_DEVICES="0")
    assert "0 GPUs" in refusal(machine, CUDA_VISIBLE_DEVICES=DIVIDED_H100.uuid)
    alone = Recorded([replace(DIVIDED_H100, slices=DIVIDED_H100.slices[:1])])
    assert read(alone).mig == "1g.10gb"


def test_gpus_that_cannot_be_used() -> None:
    """No GPU, an older driver, an architecture that is in no table, an answer that is lacking: refused by name."""
    assert "0 GPUs" in refusal(Recorded([]))
    assert "550.54.15 runs CUDA 12" in refusal(Recorded([WHOLE_H100], driver="550.54.15", cuda=12040))
    unknown = replace(WHOLE_H100, facts=replace(H100, compute_capability=(19, 9)))
    assert "compute capability 19.9" in refusal(Recorded([unknown]))
    assert "Not Supported" in refusal(Recorded([ORIN], lacking=("nvmlDeviceGetNumGpuCores",)))
    nameless = replace(DIVIDED_H100, slices=(Gpu(H100_MIG, "MIG-0aa2"),))
    assert "without its profile" in refusal(Recorded([nameless]))


def test_no_gpu_here() -> None:
    """On a machine without a GPU nothing is probed, and no default architecture is taken."""
    if tvm.cuda(0).exist:
        pytest.skip("this machine has a GPU")
    probe = "from workers.devices import local_gpu; local_gpu.probe()"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "UnusableDevice" in done.stderr.splitlines()[-1]
    assert "no NVIDIA GPU is seen" in done.stderr or 'pip install "tunery[cuda]"' in done.stderr
    with pytest.raises(UnusableDevice, match=r"TVM's runtime reaches no GPU"):
        local_gpu.require_runtime(H100)
