"""Where a worker's device is: this machine's CPU, or boards behind a tracker. What a job does differently there.

Nothing here imports TVM before it is needed: the worker's own process never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from tuning_db.errors import DeviceLost
from tuning_db.keys import ArtifactKey, DeviceIdentity
from workers.devices.boards import probe_board
from workers.devices.tracker import Boards, BoardUnusable, Tracker
from workers.settings import Settings

if TYPE_CHECKING:
    from workers.devices.roof import RoofMeasurement
    from workers.packaging.on_board import OnBoard
    from workers.search.forkserver import ForkServer
    from workers.search.lanes import Runner


class Lane(Protocol):
    """What a job needs of the device that its worker drives."""

    def probe(self) -> tuple[DeviceIdentity, str]:
        """Identity and target, as the device says now. Raises UnusableDevice, NoLinker, BoardUnusable or DeviceLost."""

    def slots(self) -> list[str]:
        """A name for each of the alike that can be worked on side by side; empty while there is none."""

    def runner(self, server: ForkServer, identity: DeviceIdentity, warn: Callable[[str], None]) -> Runner:
        """What measures there."""

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        """Measures what the device can do at most, or raises RoofNotMeasured; None for one that nothing measures."""

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        """Where libraries are checked and timed, if that is not this machine."""


class LocalLane:
    """This machine's CPU."""

    def probe(self) -> tuple[DeviceIdentity, str]:
        from workers.devices import local_cpu

        return local_cpu.probe()

    def slots(self) -> list[str]:
        return [""]

    def runner(self, server: ForkServer, identity: DeviceIdentity, warn: Callable[[str], None]) -> Runner:
        from workers.search.candidates import Measurement
        from workers.search.guards import Guard
        from workers.search.lanes import LocalRunner

        return LocalRunner(server, Measurement(threads=identity.cores), guard=Guard(warn))

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        from workers.devices import roof

        return lambda: roof.measure(key.target, key.device.cache_bytes, key.device.cores)

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        return None


@dataclass(frozen=True, slots=True)
class BoardLane:
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

    def runner(self, server: ForkServer, identity: DeviceIdentity, warn: Callable[[str], None]) -> Runner:
        from workers.search.candidates import Measurement
        from workers.search.rpc_lane import RpcRunner

        return RpcRunner(server, self.boards, identity, Measurement(threads=identity.cores), warn=warn)

    def roof(self, key: ArtifactKey) -> Callable[[], RoofMeasurement] | None:
        return None

    def board(self, key: ArtifactKey, timeout_s: float) -> OnBoard | None:
        from workers.packaging.on_board import OnBoard

        boards = self.boards
        where = f"{boards.tracker.host}:{boards.tracker.port}"
        return OnBoard(where, boards.key, asdict(key.device), key.target, timeout_s, boards.patience_s)


def lane_of(settings: Settings, *, patience_s: float | None = None) -> Lane:
    """What the worker was told to drive. `patience_s`: for boards, instead of the setting."""
    if not settings.tracker:
        return LocalLane()
    patience_s = settings.board_patience_s if patience_s is None else patience_s
    return BoardLane(Boards(Tracker.parse(settings.tracker), settings.board_key, patience_s))
