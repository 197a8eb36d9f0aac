"""TVM's RPC server on a board, with the board's own probe and steps: `python -m workers.devices.board_server`, by the
agent.

Ends when its listener has ended, so that the agent sees it. Sessions see nothing outside their own folder by TVM's file
functions; code that they run sees what this user may see. A session ends with its client, whatever runs in it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tuning_db.keys import to_json
from workers.devices.health import governor, temperature_c
from workers.devices.local_cpu import read_facts
from workers.processes import die_with_parent

#: The packed function that tells who and how the board is, as JSON: `probe` says what.
PROBE: Final = "tunery.board.probe"
#: What a worker and a board must agree on: it grows when the probe, a step (`board_steps`) or its arguments change.
PROTOCOL: Final = 3

#: Within this a session ends when it is told to, unless it is inside of a kernel.
_HEARS_S: Final = 1.0


def probe(root: Path = Path("/")) -> dict[str, Any]:
    """Who this board is and how it is now: `facts`, which the worker judges (`identity.CpuFacts` as JSON), `governor`
    of its clocks, `temperature_c` of its hottest zone, `free_memory_bytes`, `free_disk_bytes` where sessions work,
    `glibc`, the version of the C library. None is what is not told, or not there. And `protocol`, which is `PROTOCOL`.
    """
    disk = os.statvfs(Path.cwd())
    return {
        "protocol": PROTOCOL,
        "facts": to_json(read_facts()),
        "governor": governor(root / "sys/devices/system/cpu"),
        "temperature_c": temperature_c(root / "sys/class/thermal"),
        "free_memory_bytes": _free_memory_bytes(root / "proc/meminfo"),
        "free_disk_bytes": disk.f_bavail * disk.f_frsize,
        "glibc": _glibc(),
    }


def _free_memory_bytes(path: Path) -> int:
    """What programs can have without swapping."""
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no MemAvailable")


def _glibc() -> str | None:
    """Such as "2.36". None where the C library is another one."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    except (OSError, ValueError):
        return None


def confine(folder: Any) -> None:
    """Have TVM's temporary `folder` refuse names that lead out of it: its server would follow them."""
    root = Path(folder.temp_dir).resolve()

    def relpath(name: str) -> str:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ValueError(f"{name!r} leaves the folder of this session")
        return str(path)

    folder.relpath = relpath


def end_with_client(connection: Any) -> None:
    """Have this process end, from now on, when the other side of the socket hangs up: a kernel that never ends would
    keep the board from everybody else.

    A process watches, no thread: kernels run in forks of this process, and what a fork inherits of threads is unsound
    (qemu's user mode ends such a fork at its first thread); nor can a thread act while a C function holds the
    interpreter's lock.
    """
    session = os.getpid()
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    if os.fork():
        return
    # It dies with the session (`main`), so that it keeps neither the connection nor itself.
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.poll()
    os.kill(session, signal.SIGUSR1)
    # A session that does not hear of it is killed, which ends TVM's listener too: the agent starts another.
    time.sleep(_HEARS_S)
    os.kill(session, signal.SIGKILL)
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    parent, tracker_host, tracker_port, key, host, port, address = arguments
    die_with_parent(int(parent))
    import tvm_ffi
    from tvm.rpc import server

    from workers.devices import board_steps
    from workers.search import sampling

    tvm_ffi.register_global_func(PROBE, lambda: json.dumps(probe()))
    tvm_ffi.register_global_func(board_steps.RUN_STEP, board_steps.run_step)
    sampling.fill_pool(str(board_steps.POOL_BYTES))
    # TVM forks each session, from a thread that waits for it: no child may outlive who forked it.
    forking = [os.getpid()]

    def remember() -> None:
        forking[0] = os.getpid()

    os.register_at_fork(before=remember, after_in_child=lambda: die_with_parent(forking[0]))
    make_environment, serve = server._server_env, server._serve_loop

    def make_confined(load_library: str | None, work_path: Any) -> Any:
        confine(work_path)
        return make_environment(load_library, work_path)

    def serve_watched(connection: Any, load_library: str | None, work_path: Any) -> None:
        end_with_client(connection)
        serve(connection, load_library, work_path)

    server._server_env = make_confined
    server._serve_loop = serve_watched
    state = server.PopenRPCServerState(
        host, int(port), int(port) + 100, False, (tracker_host, int(tracker_port)), key, None, address or None
    )
    state.thread.join()
    # Exit handlers would wait for a session that hangs.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
