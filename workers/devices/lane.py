"""Where a worker's device is: this machine's CPU or a GPU of it, or boards behind a tracker. What a job does
differently there.

Nothing here imports TVM before it is needed: the worker's own process never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tuning_db.errors import DeviceLost
from tuning_db.keys import ArtifactKey, DeviceIdentity, Toolchain
from workers.devices.boards import probe_board
from workers.devices.tracker import Boards, BoardUnusable, Tracker
from workers.settings import Settings

if TYPE_CHECKING:
    from workers.devices.roof import RoofMeasurement
    from workers.packaging.on_board import OnBoard
    from workers.search.forkserver import ForkServer
    from workers.search.lanes import Runner

#: Within this the reference kernel of a GPU is compiled.
_BUILD_S: Final = 60.0


class Lane(Protocol):
    """What a job needs of the device that its worker drives."""

    def environment(self) -> Mapping[str, str]:
        """What every process of the worker must find in its environment. Raises UnusableDevice."""

    def probe(self) -> tuple[DeviceIdentity, str]:
        """Identity and target, as the device says now. Raises UnusableDevice, NoLinker, BoardUnusable or DeviceLost."""

    def toolchain(self) -> Toolchain:
        """What compiles for it here, for keys. After `probe`."""

    def slots(self) -> list[str]:
        """A name for each of the alike that can be worked on side by side; empty while there is none."""

    def runner(self, server: ForkServer, key: ArtifactKey, folder: Path, warn: Callable[[str], None]) -> Runner:
        """What measures there. `folder`: for its files, until it is closed."""

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        """Measures what the device can do at most, or raises RoofNotMeasured; None for one that nothing measures."""

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        """Where libraries are checked and timed, if that is not this machine."""


class _CpuLane:
    """What is the same for all CPUs."""

    def environment(self) -> Mapping[str, str]:
        return {}

    def toolchain(self) -> Toolchain:
        from workers import toolchain

        return toolchain.current()


class LocalLane(_CpuLane):
    """This machine's CPU."""

    def probe(self) -> tuple[DeviceIdentity, str]:
        from workers.devices import local_cpu

        return local_cpu.probe()

    def slots(self) -> list[str]:
        return [""]

    def runner(self, server: ForkServer, key: ArtifactKey, folder: Path, warn: Callable[[str], None]) -> Runner:
        from workers.search.candidates import Measurement
        from workers.search.guards import Guard
        from workers.search.lanes import LocalRunner

        return LocalRunner(server, Measurement(threads=key.device.cores), guard=Guard(warn))

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        from workers.devices import roof

        return lambda: roof.measure(key.target, key.device.cache_bytes, key.device.cores)

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        return None


@dataclass(frozen=True, slots=True)
class BoardLane(_CpuLane):
    """All boards of one key, which are of one device."""

    boards: Boards

    def probe(self) -> tuple[DeviceIdentity, str]:
        from workers.devices.identity import mcpu_of
        from workers.devices.targets import target_of
        from workers.linker import linker_for

        end_s = time.monotonic() + self.boards.patience_s
        while True:
            try:
                report = probe_board(self.boards.tracker, self.boards.key)
            except BoardUnusable as error:
                if self.boards.patience_s == 0:
                    raise
                if time.monotonic() >= end_s:
                    raise DeviceLost(f"{error}; tried for {self.boards.patience_s:g} s") from None
                time.sleep(0.5)
            else:
                break
        linker_for(report.identity.arch)
        return report.identity, target_of(report.identity, mcpu_of(report.facts))

    def slots(self) -> list[str]:
        try:
            return [f"@{address}" for address in self.boards.tracker.boards(self.boards.key)]
        except BoardUnusable:
            return []

    def runner(self, server: ForkServer, key: ArtifactKey, folder: Path, warn: Callable[[str], None]) -> Runner:
        from workers.search.candidates import Measurement
        from workers.search.rpc_lane import RpcRunner

        return RpcRunner(server, self.boards, key.device, Measurement(threads=key.device.cores), warn=warn)

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        from workers.devices import board_roof

        return lambda: board_roof.measure(self.boards, key.device, key.target)

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        from workers.packaging.on_board import OnBoard

        boards = self.boards
        where = f"{boards.tracker.host}:{boards.tracker.port}"
        return OnBoard(where, boards.key, asdict(key.device), key.target, timeout_s, boards.patience_s)


@dataclass(frozen=True, slots=True)
class GpuLane:
    """One NVIDIA GPU of this machine, or a MIG slice of one. Whoever uses it, a process each, is started anew: CUDA
    does not survive a fork."""

    wanted: str  #: its number, as `nvidia-smi` counts, or its UUID

    def environment(self) -> Mapping[str, str]:
        from workers.devices import local_gpu

        return {"CUDA_VISIBLE_DEVICES": local_gpu.uuid_of(local_gpu.nvml_module(), self.wanted)}

    def probe(self) -> tuple[DeviceIdentity, str]:
        from workers.devices import local_gpu

        local_gpu.load_runtime()
        return local_gpu.probe()

    def toolchain(self) -> Toolchain:
        from workers import toolchain

        return toolchain.current_gpu()

    def slots(self) -> list[str]:
        return [""]

    def runner(self, server: ForkServer, key: ArtifactKey, folder: Path, warn: Callable[[str], None]) -> Runner:
        from workers.search import gpu_steps
        from workers.search.candidates import Measurement
        from workers.search.guards import Guard
        from workers.search.lanes import GpuRunner

        make = partial(server.call_retrying, gpu_steps.build_reference, key.target, str(folder), deadline_s=_BUILD_S)
        return GpuRunner(key.device, make, Measurement(), guard=Guard(warn))

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        return None

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        return None


def lane_of(settings: Settings, *, patience_s: float | None = None) -> Lane:
    """What the worker was told to drive. `patience_s`: for boards, instead of the setting."""
    if settings.gpu:
        return GpuLane(settings.gpu)
    if not settings.tracker:
        return LocalLane()
    patience_s = settings.board_patience_s if patience_s is None else patience_s
    return BoardLane(Boards(Tracker.parse(settings.tracker), settings.board_key, patience_s))
