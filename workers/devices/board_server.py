"""TVM's RPC server on a board, with the board's own probe: `python -m workers.devices.board_server`, by the agent.

Ends when its listener has ended, so that the agent sees it. Sessions see nothing outside their own folder by TVM's file
functions; code that they run sees what this user may see.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tuning_db.keys import to_json
from workers.devices.local_cpu import read_facts
from workers.processes import die_with_parent

#: The packed function that tells who and how the board is, as JSON: `probe` says what.
PROBE: Final = "tunery.board.probe"


def probe(root: Path = Path("/")) -> dict[str, Any]:
    """Who this board is and how it is now: `facts`, which the worker judges (`identity.CpuFacts` as JSON), `governor`
    of its clocks, `temperature_c` of its hottest zone, `free_memory_bytes`, `free_disk_bytes` where sessions work. None
    is what the kernel does not tell.
    """
    disk = os.statvfs(Path.cwd())
    return {
        "facts": to_json(read_facts()),
        "governor": governor(root / "sys/devices/system/cpu"),
        "temperature_c": temperature_c(root / "sys/class/thermal"),
        "free_memory_bytes": _free_memory_bytes(root / "proc/meminfo"),
        "free_disk_bytes": disk.f_bavail * disk.f_frsize,
    }


def governor(folder: Path) -> str | None:
    """What governs the clocks of all processors: one word, or several with commas where they differ."""
    found = {path.read_text().strip() for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    return ",".join(sorted(found)) or None


def temperature_c(folder: Path) -> float | None:
    """Degrees Celsius of the hottest thermal zone."""
    found = []
    for path in folder.glob("thermal_zone*/temp"):
        try:
            found.append(int(path.read_text()) / 1000)
        except (OSError, ValueError):  # a sensor that is switched off
            continue
    return max(found, default=None)


def _free_memory_bytes(path: Path) -> int:
    """What programs can have without swapping."""
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no MemAvailable")


def confine(folder: Any) -> None:
    """Have TVM's temporary `folder` refuse names that lead out of it: its server would follow them."""
    root = Path(folder.temp_dir).resolve()

    def relpath(name: str) -> str:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ValueError(f"{name!r} leaves the folder of this session")
        return str(path)

    folder.relpath = relpath


def main(arguments: Sequence[str]) -> int:
    parent, tracker_host, tracker_port, key, host, port, address = arguments
    die_with_parent(int(parent))
    import tvm_ffi
    from tvm.rpc import server

    tvm_ffi.register_global_func(PROBE, lambda: json.dumps(probe()))
    # TVM forks each session, from a thread that waits for it: it must not outlive this process either.
    own_pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(own_pid))
    make_environment = server._server_env

    def make_confined(load_library: str | None, work_path: Any) -> Any:
        confine(work_path)
        return make_environment(load_library, work_path)

    server._server_env = make_confined
    state = server.PopenRPCServerState(
        host, int(port), int(port) + 100, False, (tracker_host, int(tracker_port)), key, None, address or None
    )
    state.thread.join()
    # Exit handlers would wait for a session that hangs.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
