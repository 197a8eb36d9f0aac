"""A worker's side of one session with a board. For processes that may be killed: TVM's client waits for ever.

`trial` is a step for a fork server's child: from the connection to the answer, with a deadline at every stage, and what
a board said of a candidate is never mixed up with a board that said nothing.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tuning_db.keys import DeviceIdentity
from workers.devices.board_server import PROBE, PROTOCOL
from workers.devices.identity import CpuFacts, UnusableDevice, identity_of
from workers.devices.tracker import BoardUnusable, Lease
from workers.said import first_line
from workers.search.forkserver import ChildCrashed, ChildError, ChildFailed, ChildTimeout

#: A board that is there has connected and told who it is within this, emulated ones too.
CONNECT_S: Final = 20.0
#: Slowest network that counts as one.
_BYTES_PER_S: Final = 1 << 20
#: From the end of a step on the board until its answer is here.
ANSWER_S: Final = 5.0
#: As `board_steps`, which a worker does not import: it is for boards.
_RUN_STEP: Final = "tunery.board.run_step"
_FAILURES: Final = {kind.__name__: kind for kind in (ChildError, ChildTimeout, ChildCrashed)}


class BoardSilent(BoardUnusable):
    """The tracker gives the board out, but it does not answer: frozen, or not reachable at the address it gave."""


class OtherDevice(BoardUnusable):
    """The board is not of the device that the work is for."""


class NotReady(BoardUnusable):
    """The board answers, but nothing could be run: its disk is full, or its program is another version."""


def import_client() -> None:
    """Load TVM's client, which takes seconds: before a board is asked for, which does not wait long."""
    import tvm.rpc  # noqa: F401


def upload_s(paths: Sequence[str | Path]) -> float:
    """Seconds within which these files have arrived, over any network that is worth it."""
    return CONNECT_S / 2 + sum(Path(path).stat().st_size for path in paths) / _BYTES_PER_S


class Session:
    """An open session. `close` it, or end the process: a board notices either at once."""

    def __init__(self, lease: Lease, *, timeout_s: float) -> None:
        """Connects. `timeout_s`: the board ends the session after so many seconds, whatever runs."""
        from tvm import rpc

        self.lease = lease
        self._session = rpc.connect(lease.host, lease.port, lease.match_key, session_timeout=timeout_s)
        self._files: dict[str, str] = {}

    def probe(self) -> dict[str, Any]:
        """Who and how the board is. NotReady if its program does not fit this one."""
        found: dict[str, Any] = json.loads(self._session.get_function(PROBE)())
        if found.get("protocol") != PROTOCOL:
            raise NotReady(
                f"the board at {self.lease.address} runs another version of tunery board (protocol "
                f"{found.get('protocol')}, this worker speaks {PROTOCOL}): install the worker's version there"
            )
        return found

    def expect(self, identity: DeviceIdentity) -> dict[str, Any]:
        """What `probe` answers. OtherDevice unless the board is of this device."""
        told = self.probe()
        found = identity_of(CpuFacts.from_json(told["facts"]))
        if found != identity:
            raise OtherDevice(
                f"the board at {self.lease.address} is a {found.name}, not a {identity.name}: give each kind of board "
                "a key of its own"
            )
        return told

    def upload(self, path: str | Path, name: str) -> None:
        data = Path(path).read_bytes()
        self._session.upload(bytearray(data), name)
        self._files[name] = hashlib.sha256(data).hexdigest()

    def download(self, name: str) -> bytes:
        return bytes(self._session.download(name))

    def run(self, step: str, arguments: Sequence[Any], *, deadline_s: float) -> Any:
        """A step of `board_steps`, in a child of the session there. Raises ChildError, ChildTimeout or ChildCrashed if
        that is what the step came to, NotReady if it was not begun, and whatever TVM raises when the board is gone."""
        asked = {"step": step, "arguments": list(arguments), "files": self._files, "deadline_s": deadline_s}
        answer: Mapping[str, Any] = json.loads(self._session.get_function(_RUN_STEP)(json.dumps(asked)))
        if "unready" in answer:
            raise NotReady(f"the board at {self.lease.address}: {answer['unready']}")
        if "failed" in answer:
            raise _FAILURES[answer["failed"]](answer["message"])
        return answer["value"]

    def close(self) -> None:
        self._session.get_function("CloseRPCConnection")()


@dataclass(frozen=True, slots=True)
class Said:
    """What came of a trial that a board answered for: `value`, or the kind of ChildFailed and its message."""

    value: Any
    failed: str | None = None
    message: str = ""

    def result(self) -> Any:
        if self.failed is not None:
            raise _FAILURES[self.failed](self.message)
        return self.value


@dataclass(frozen=True, slots=True)
class Lost:
    """The board was lost, or of no use; `running`: while the trial ran on it."""

    message: str
    running: bool = False


def trial(
    lease: Lease, identity: DeviceIdentity, libraries: Sequence[tuple[str, str]], step: str, arguments: Sequence[Any],
    deadline_s: float, connect_s: float,
) -> Said | Lost:  # fmt: skip
    """Send `libraries`, each a path and the name it has there, and run a step. Ends by SIGALRM where the board does not
    answer in time before the step has begun."""
    paths = [path for path, _ in libraries]
    before_s = connect_s + upload_s(paths)
    running = False
    signal.setitimer(signal.ITIMER_REAL, connect_s)
    try:
        session = Session(lease, timeout_s=before_s + deadline_s + ANSWER_S)
        session.expect(identity)
        signal.setitimer(signal.ITIMER_REAL, upload_s(paths))
        for path, name in libraries:
            session.upload(path, name)
        signal.setitimer(signal.ITIMER_REAL, 0)
        running = True
        try:
            said = Said(session.run(step, arguments, deadline_s=deadline_s))
        except ChildFailed as failure:
            said = Said(None, type(failure).__name__, str(failure))
        session.close()
    except (BoardUnusable, UnusableDevice) as error:
        return Lost(str(error))
    except Exception as error:  # TVM's client raises whatever the connection dies of
        return Lost(f"the board at {lease.address}: {first_line(error)}", running)
    return said
