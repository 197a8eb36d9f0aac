"""Answers of NVIDIA's management library, played back through the functions of nvidia-ml-py that are asked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from workers.devices.identity import GpuFacts


class NVMLError(Exception):
    """As nvidia-ml-py raises it: one class for each of NVML's answers."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801 its name there
    pass


class NVMLError_NotFound(NVMLError):  # noqa: N801
    pass


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one, by what was recorded of it."""

    facts: GpuFacts
    uuid: str
    cores: int = 0  #: nvmlDeviceGetNumGpuCores
    divided: bool | None = None  #: None: cannot be
    slices: tuple[Gpu, ...] = ()


@dataclass
class Recorded:
    """The module `pynvml` of a machine with these GPUs."""

    gpus: Sequence[Gpu]
    driver: str = "580.65.06"
    cuda: int = 13000  #: nvmlSystemGetCudaDriverVersion
    lacking: tuple[str, ...] = ()  #: functions that this driver answers with "not supported"
    open: int = field(default=0, init=False)  #: nvmlInit without nvmlShutdown

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NotFound = NVMLError_NotFound

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.lacking:
            raise NVMLError_NotSupported("Not Supported")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:  # noqa: N802 and so on: names of NVML
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.facts.name

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> tuple[int, int]:  # noqa: N802
        return gpu.facts.compute_capability

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=gpu.facts.memory_bytes)

    def nvmlDeviceGetNumGpuCores(self, gpu: Gpu) -> int:  # noqa: N802
        return gpu.cores

    def nvmlDeviceGetAttributes(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(multiprocessorCount=gpu.facts.multiprocessors)

    def nvmlDeviceGetTemperature(self, _gpu: Gpu, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 41

    def nvmlDeviceGetClockInfo(self, _gpu: Gpu, clock: int) -> int:  # noqa: N802
        """In MHz."""
        assert clock == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> tuple[int, int]:  # noqa: N802
        if gpu.divided is None:
            raise NVMLError_NotSupported("Not Supported")
        return int(gpu.divided), int(gpu.divided)

    def nvmlDeviceGetMaxMigDeviceCount(self, _gpu: Gpu) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:  # noqa: N802
        if index >= len(gpu.slices):
            raise NVMLError_NotFound("Not Found")
        return gpu.slices[index]
