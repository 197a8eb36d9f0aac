"""Trials a minute that one, two, … boards of one identity measure together, by the agents and the runner of a real job.

The boards are agents on this machine, whose cores they share. So the kernels sleep: what is measured is that boards
work side by side, and what each trial costs beside its kernel (session, upload, process, reference kernel), not any
board's speed. Results go to standard output and, with --report, to a JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tuning_db.trials import Measured
from workers.devices import local_cpu
from workers.devices.identity import identity_of
from workers.devices.tracker import Boards, BoardUnusable, Tracker
from workers.search.candidates import Built, Measurement
from workers.search.forkserver import ForkServer
from workers.search.rpc_lane import RpcRunner

console = Console()
KEY = "sleepers"
TRACKER = ["tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--silent"]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, nargs="+", default=[1, 2], help="how many, one after the other")
    parser.add_argument("--trials", type=int, default=48, help="of each number of boards")
    parser.add_argument("--sleep-s", type=float, default=0.25, help="seconds that a call of a kernel takes")
    parser.add_argument("--report", type=Path)
    return parser


def sleeping_kernel(folder: Path, seconds: float) -> Built:
    """A candidate without arguments that sleeps."""
    source, library = folder / "sleeps.c", folder / "sleeps.so"
    source.write_text(
        "#include <unistd.h>\n"
        "int __tvm_ffi_main(void *self, void *arguments, int count, void *result) "
        f"{{ usleep({round(seconds * 1e6)}); return 0; }}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return Built(str(library), (), None)


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    environment = {**os.environ, "TMPDIR": str(folder), "TVM_USE_RUNTIME_LIB": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        # The tracker's own child outlives it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(tracker: Tracker, count: int) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with contextlib.suppress(BoardUnusable):
            if len(tracker.boards(KEY)) >= count:
                return
        time.sleep(0.2)
    raise SystemExit(f"{count} boards have not joined within 60 s")


def trials_per_minute(server: ForkServer, boards: Boards, built: Built, trials: int) -> float:
    identity = identity_of(local_cpu.read_facts())
    runner = RpcRunner(server, boards, identity, Measurement(repeat=1, min_repeat_s=0.0, threads=1))
    runner.run_all([(built, None)] * boards.count())  # what is first loaded on each
    measured, start_s = 0, time.monotonic()
    while measured < trials:
        results = runner.run_all([(built, None)] * min(runner.at_once, trials - measured))
        lost = [result for result in results if not isinstance(result, Measured)]
        if lost:
            raise SystemExit(f"a trial failed: {lost[0]}")
        measured += len(results)
    return 60 * trials / (time.monotonic() - start_s)


def main() -> int:
    options = parser().parse_args()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    tracker = Tracker("127.0.0.1", port)
    rates: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        built = sleeping_kernel(folder, options.sleep_s)
        stack.enter_context(running([*TRACKER, "--port", str(port), "--port-end", str(port + 1)], folder))
        server = stack.enter_context(ForkServer(["tvm.rpc", "workers.devices.board_session"]))
        joined = 0
        for count in sorted(set(options.boards)):
            for _ in range(count - joined):
                stack.enter_context(
                    running(
                        [
                            "workers.devices.board",
                            "--tracker",
                            f"127.0.0.1:{port}",
                            "--key",
                            KEY,
                            "--host",
                            "127.0.0.1",
                        ],
                        folder,
                    )
                )
            joined = count
            wait_for(tracker, count)
            rates[count] = trials_per_minute(server, Boards(tracker, KEY), built, options.trials)
    table = Table("boards", "trials a minute", "over the fewest")
    fewest = rates[min(rates)]
    for count, rate in rates.items():
        table.add_row(str(count), f"{rate:.1f}", f"{rate / fewest:.2f}x")
    console.print(table)
    report: dict[str, Any] = {
        "cores": local_cpu.host_cores(),
        "sleep_s": options.sleep_s,
        "trials": options.trials,
        "trials_per_minute": {str(count): round(rate, 1) for count, rate in rates.items()},
    }
    if options.report:
        options.report.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
