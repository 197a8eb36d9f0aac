"""The one NVIDIA GPU that this process may use: what NVML tells of it, and what compiles for it.

A worker drives one GPU, or one MIG slice of it. `CUDA_VISIBLE_DEVICES` says which, in CUDA's own words; NVML, which
does not read it, is asked about the same one. Whatever is missing is refused by name: a GPU that is not seen has no
default architecture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

from tuning_db.errors import BuildFailed
from tuning_db.keys import DeviceIdentity
from tuning_db.streams import INSTALL, CudaFailed, load_cudart
from workers.devices import local_cpu
from workers.devices.identity import GpuFacts, UnusableDevice, gpu_identity_of
from workers.devices.targets import gpu_target_of
from workers.search.templates.knobs import Gpu

#: CUDA's major version, of TVM's runtime and of the machine code that is made here: a driver of another one takes
#: neither.
CUDA_MAJOR: Final = 13
#: CUDA cores of a multiprocessor by compute capability (CUDA C++ Programming Guide, "Compute Capabilities",
#: Arithmetic Instructions: 32-bit floating-point add): NVML tells cores alone.
_CORES: Final[Mapping[tuple[int, int], int]] = {
    (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128, (10, 3): 128,
    (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU, or a slice of one that is divided."""

    uuid: str
    handle: Any
    whole: Any  #: handle of the whole GPU
    index: int  #: of the whole GPU, in the order of the PCI bus
    is_slice: bool


def read_facts(nvml: Any, environment: Mapping[str, str] = os.environ) -> GpuFacts:
    """What NVML tells of the GPU that the environment names. `nvml`: the module pynvml.

    UnusableDevice if there is none, or not exactly one, or NVML does not tell what its identity needs.
    """
    with _asking(nvml):
        driver = str(nvml.nvmlSystemGetDriverVersion())
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion()) // 1000
        if cuda != CUDA_MAJOR:
            raise UnusableDevice(f"NVIDIA's driver {driver} runs CUDA {cuda}; TVM's runtime needs CUDA {CUDA_MAJOR}")
        return _facts(nvml, _chosen(_devices(nvml), environment), driver)


def uuid_of(nvml: Any, wanted: str) -> str:
    """The UUID of the GPU or MIG slice that a worker was told to drive: by its number, as `nvidia-smi` counts, or by
    its UUID or the begin of that. UnusableDevice if that is none, or several."""
    with _asking(nvml):
        devices = _devices(nvml)
        wholes = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
        uuids = [str(nvml.nvmlDeviceGetUUID(whole)) for whole in wholes]
    known = ", ".join(device.uuid for device in devices) or "none"
    if wanted.isdecimal():
        if int(wanted) >= len(wholes):
            raise UnusableDevice(f"there is no GPU {wanted}: NVML tells of {len(wholes)}, whose UUIDs are {known}")
        index = int(wanted)
    elif re.fullmatch(r"(GPU|MIG)-\S*", wanted):
        fitting = [device for device in devices if device.uuid.startswith(wanted)]
        if len(fitting) == 1:
            return fitting[0].uuid
        divided = [number for number, uuid in enumerate(uuids) if uuid.startswith(wanted)]
        if fitting or len(divided) != 1:
            many = f"{len(fitting)} GPUs have" if fitting else "no GPU has"
            raise UnusableDevice(f"{many} the UUID {wanted}; there are {known}")
        index = divided[0]
    else:
        raise UnusableDevice(f"{wanted!r} is neither the number nor the UUID of a GPU; there are {known}")
    of_gpu = [device.uuid for device in devices if device.index == index]
    if not of_gpu:
        raise UnusableDevice(
            f"GPU {index} is divided by MIG and has no instance: make one with nvidia-smi mig -cgi … -C"
        )
    if len(of_gpu) > 1:
        raise UnusableDevice(f"GPU {index} is divided by MIG: name one of its instances, {', '.join(of_gpu)}")
    return of_gpu[0]


def probe() -> tuple[DeviceIdentity, str]:
    """Identity and target of this process's GPU. UnusableDevice if it cannot be used, or not be compiled for."""
    from workers.packaging import nvrtc

    facts = read_facts(nvml_module())
    identity = gpu_identity_of(facts)
    try:
        nvrtc.check(identity.arch)
    except BuildFailed as error:
        raise UnusableDevice(str(error)) from None
    _, host = local_cpu.probe()
    target = gpu_target_of(identity, host)
    require_runtime(facts)
    return identity, target


def expect(identity: DeviceIdentity) -> None:
    """UnusableDevice unless this process's GPU is of this identity, which names what differs, and TVM's runtime
    reaches it. After `load_runtime`."""
    facts = read_facts(nvml_module())
    found = gpu_identity_of(facts)
    differences = [
        f"{field.name} {getattr(found, field.name)} instead of {getattr(identity, field.name)}"
        for field in fields(identity)
        if getattr(found, field.name) != getattr(identity, field.name)
    ]
    if differences:
        raise UnusableDevice(f"this GPU is a {found.name}, not a {identity.name}: {', '.join(differences)}")
    require_runtime(facts)


def gpu_of(identity: DeviceIdentity) -> Gpu:
    """What schedules must know of it."""
    # Tensor cores of compute capability 7.0 and 7.2 are older than what machine code is made for here (`nvrtc`).
    return Gpu(identity.cores, tensor_types=("float16", "int8"))


def sensors(nvml: Any, environment: Mapping[str, str] = os.environ) -> tuple[float | None, int | None]:
    """Temperature in degrees Celsius and the clock of the multiprocessors in kHz, of the GPU that the environment
    names; a slice has those of the whole. None is what NVML does not tell."""
    with _asking(nvml):
        whole = _chosen(_devices(nvml), environment).whole

        def ask(question: Callable[..., Any], *arguments: Any) -> int | None:
            try:
                return int(question(whole, *arguments))
            except nvml.NVMLError:  # not supported, as by a GPU within a virtual machine
                return None

        degrees = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        mhz = ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
    return None if degrees is None else float(degrees), None if mhz is None else 1000 * mhz


def nvml_module() -> Any:
    """nvidia-ml-py. UnusableDevice without it."""
    try:
        import pynvml
    except ImportError:
        raise UnusableDevice(f"NVML cannot be asked: nvidia-ml-py is not installed; {INSTALL}") from None
    return pynvml


def load_runtime() -> None:
    """Make CUDA's runtime known to this process, before TVM is imported. UnusableDevice if it is not installed."""
    try:
        load_cudart()
    except CudaFailed as error:
        raise UnusableDevice(str(error)) from None


def require_runtime(facts: GpuFacts) -> None:
    """UnusableDevice unless TVM's runtime reaches a GPU, and it is the one that NVML tells of."""
    import tvm

    device = tvm.cuda(0)
    if not device.exist:
        raise UnusableDevice(f"NVML tells of {facts.name}, but TVM's runtime reaches no GPU: is libcuda.so.1 here?")
    major, minor = facts.compute_capability
    if device.compute_version != f"{major}.{minor}" or device.multi_processor_count != facts.multiprocessors:
        raise UnusableDevice(
            f"CUDA's first GPU has compute capability {device.compute_version} and {device.multi_processor_count} "
            f"multiprocessors, NVML's {major}.{minor} and {facts.multiprocessors}: name it by its UUID in "
            "CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def _asking(nvml: Any) -> Iterator[None]:
    """NVML's answers; its refusals are UnusableDevice."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnusableDevice(f"no NVIDIA GPU is seen, or its driver is not there: {error}") from None
    try:
        yield
    except nvml.NVMLError as error:
        raise UnusableDevice(f"NVML does not tell what is asked of it: {error}") from None
    finally:
        nvml.nvmlShutdown()


def _devices(nvml: Any) -> list[_Device]:
    """All that CUDA could use: each GPU, but of one that is divided its slices alone."""
    found = []
    for index in range(int(nvml.nvmlDeviceGetCount())):
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        divided = _is_divided(nvml, whole)
        for handle in _slices(nvml, whole) if divided else [whole]:
            found.append(_Device(str(nvml.nvmlDeviceGetUUID(handle)), handle, whole, index, divided))
    return found


def _is_divided(nvml: Any, whole: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(whole)[0])
    except nvml.NVMLError_NotSupported:  # a GPU that cannot be divided
        return False


def _slices(nvml: Any, whole: Any) -> list[Any]:
    found = []
    for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(whole))):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number))
        except nvml.NVMLError_NotFound:  # places that no slice takes
            continue
    return found


def _chosen(devices: Sequence[_Device], environment: Mapping[str, str]) -> _Device:
    """The one that CUDA_VISIBLE_DEVICES names, or the only one."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    known = ", ".join(device.uuid for device in devices) or "none"
    if named is None:
        fitting = list(devices)
    elif named.strip().isdecimal():
        # CUDA counts from the fastest unless it is told to count as NVML does; and the slices of a GPU have no number.
        in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(devices) == 1
        if not in_order or any(device.is_slice for device in devices):
            raise UnusableDevice(f"CUDA_VISIBLE_DEVICES={named} may be any GPU: name one by its UUID, of {known}")
        fitting = [device for device in devices if device.index == int(named)]
    elif re.fullmatch(r"\s*(GPU|MIG)-[^,\s]+\s*", named):
        fitting = [device for device in devices if device.uuid.startswith(named.strip())]
    elif "," in named:
        raise UnusableDevice(f"CUDA_VISIBLE_DEVICES={named} names several GPUs; a worker drives one, of {known}")
    else:
        fitting = []
    if len(fitting) != 1:
        asked = "CUDA_VISIBLE_DEVICES is not set" if named is None else f"CUDA_VISIBLE_DEVICES={named}"
        raise UnusableDevice(f"{asked}, which is {len(fitting)} GPUs; a worker drives one, of {known}")
    return fitting[0]


def _facts(nvml: Any, device: _Device, driver: str) -> GpuFacts:
    name = str(nvml.nvmlDeviceGetName(device.handle))
    major, minor = (int(part) for part in nvml.nvmlDeviceGetCudaComputeCapability(device.whole))
    memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(device.handle).total)
    if device.is_slice:
        profile = re.search(r"MIG (\S+)$", name)
        if profile is None:
            raise UnusableDevice(f"NVML calls a slice of a GPU {name!r}, without its profile")
        multiprocessors = int(nvml.nvmlDeviceGetAttributes(device.handle).multiprocessorCount)
        return GpuFacts(name, (major, minor), multiprocessors, memory_bytes, driver, profile[1])
    if (major, minor) not in _CORES:
        raise UnusableDevice(
            f"{name} has compute capability {major}.{minor}; known are "
            f"{', '.join(f'{known}.{more}' for known, more in _CORES)}"
        )
    multiprocessors = int(nvml.nvmlDeviceGetNumGpuCores(device.whole)) // _CORES[major, minor]
    return GpuFacts(name, (major, minor), multiprocessors, memory_bytes, driver)
