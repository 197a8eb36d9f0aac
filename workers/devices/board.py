"""`tunery board`, the agent on a board: keeps TVM's RPC server registered, whatever its kernels do to it.

Needs Python and TVM's runtime, no compiler. Whoever reaches the port can run any code: tracker and boards belong on a
network of their own. TVM's server serves one session at a time, each in a forked process, and its listener ends for
good when such a process dies of a signal (a kernel that crashed). So this process holds no TVM; it starts the server
(`board_server`) in a session of its own, and starts another when that has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Beginning of the private folder's name; the pid of its agent follows.
_FOLDER: Final = "tunery-board-"
#: Pause before the server is started again, doubled each time that it did not live for `_LIVED_S`.
_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_LIVED_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Board:
    """Where a board joins, and as what."""

    tracker: tuple[str, int]
    key: str
    host: str  #: the address that the server listens on
    port: int  #: the first that is tried; one of the hundred from there is taken
    address: str | None  #: told to the tracker; None: the one that the tracker sees

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Board:
        """Exits with status 2 and a sentence where the arguments are wrong."""
        parser = argparse.ArgumentParser(
            prog="tunery board", description="Lend this board to the workers of a tracker."
        )
        parser.add_argument("--tracker", required=True, metavar="HOST:PORT", help="the tracker to register with")
        parser.add_argument("--key", required=True, help="the name under which workers ask the tracker for this board")
        parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")  # noqa: S104
        parser.add_argument("--port", type=int, default=9090, help="first port to try (default: 9090)")
        parser.add_argument("--address", help="address to tell the tracker, where it sees another one")
        values = parser.parse_args(arguments)
        host, colon, port = values.tracker.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
            parser.error(f"--tracker {values.tracker!r} is not HOST:PORT")
        # TVM's protocol puts the key between colons and spaces.
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", values.key):
            parser.error(f"--key {values.key!r} may hold letters, digits, '.', '_' and '-' alone")
        if not 0 < values.port < 65436:
            parser.error(f"--port {values.port} is not a port with a hundred others above it")
        return cls((host, int(port)), values.key, values.host, values.port, values.address)


class Agent:
    """Supervises the server until it is told to stop."""

    def __init__(self, board: Board) -> None:
        self._board = board
        # A signal handler may set it, and so it is no Event: a handler could find an Event's lock held by what it
        # interrupted.
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        """Returns when `stop` was called, with the server, its sessions and the private folder gone."""
        remove_abandoned()
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        pause_s = _PAUSE_S
        try:
            while not self._stopping:
                started_s = time.monotonic()
                self._serve_once(folder)
                pause_s = _PAUSE_S if time.monotonic() - started_s > _LIVED_S else min(2 * pause_s, _LONGEST_PAUSE_S)
                if not self._stopping:
                    print(f"the server ended; another starts in {pause_s:g} s", file=sys.stderr, flush=True)
                    self._wait(pause_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, pause_s: float) -> None:
        end_s = time.monotonic() + pause_s
        while time.monotonic() < end_s and not self._stopping:
            time.sleep(0.1)

    def _serve_once(self, folder: Path) -> None:
        board = self._board
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        server = subprocess.Popen(
            [
                sys.executable, "-m", "workers.devices.board_server", str(os.getpid()), board.tracker[0],
                str(board.tracker[1]), board.key, board.host, str(board.port), board.address or "",
            ],
            # Sessions work in temporary folders of their own: these lie in the private one.
            env={**os.environ, "TVM_USE_RUNTIME_LIB": "1", "TMPDIR": str(work)},
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            while server.poll() is None and not self._stopping:
                time.sleep(0.1)
        finally:
            # The server, and the session that may have outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def remove_abandoned() -> None:
    """Remove the folders of this user's agents that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another agent removes it as well
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    agent = Agent(Board.parse(arguments))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
