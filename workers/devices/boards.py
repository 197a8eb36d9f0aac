"""Ask a board behind a tracker who it is, within a deadline: TVM's own client waits for ever in each way it can fail.

A process of its own does the asking, `python -m workers.devices.boards PARENT HOST PORT KEY`, and is killed in time. It
tells how far it came, so that what did not answer can be named.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tuning_db.keys import DeviceIdentity
from workers.devices.board_server import PROBE
from workers.devices.identity import CpuFacts, identity_of
from workers.processes import die_with_parent
from workers.said import last_line

_ASKED: Final = "asked"


class BoardUnusable(Exception):
    """No board answered under the key. The message names tracker, key and what was found."""


class TrackerUnreachable(BoardUnusable):
    """Nothing that answers as a tracker is there."""


class NoSuchBoard(BoardUnusable):
    """No board has joined under this key; those that have are named."""


class BoardBusy(BoardUnusable):
    """All boards of this key serve somebody. Not a fault: asking later may do."""


class BoardSilent(BoardUnusable):
    """The tracker gives the board out, but it does not answer: frozen, or not reachable at the address it gave."""


@dataclass(frozen=True, slots=True)
class BoardReport:
    """What a board told: who it is, judged here from the facts it read, and how it is now."""

    facts: CpuFacts
    identity: DeviceIdentity
    governor: str | None
    temperature_c: float | None
    free_memory_bytes: int
    free_disk_bytes: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BoardReport:
        facts = CpuFacts.from_json(data["facts"])
        return cls(
            facts, identity_of(facts), data["governor"], data["temperature_c"], data["free_memory_bytes"],
            data["free_disk_bytes"],
        )  # fmt: skip


def probe_board(tracker: tuple[str, int], key: str, *, deadline_s: float = 20.0) -> BoardReport:
    """Probe any free board of `key`. Takes 2 to 10 s, TVM's import included, and `deadline_s` at most.

    Raises the kinds of BoardUnusable, and `identity.UnusableDevice` for a board of a kind that nothing compiles for.
    """
    where = f"tracker {tracker[0]}:{tracker[1]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.devices.boards", str(os.getpid()), tracker[0], str(tracker[1]), key],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, complaint = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        if not output.startswith(_ASKED):
            raise TrackerUnreachable(f"{where} did not answer within {deadline_s:g} s") from None
        raise BoardSilent(
            f"{where} gives out a board for key {key!r}, but it did not answer within {deadline_s:g} s: it is frozen, "
            f"or cannot be reached at the address it gave ({output.split(maxsplit=1)[1].strip()})"
        ) from None
    last = (output.splitlines() or [""])[-1]
    if process.returncode != 0 or not last.startswith("{"):
        raise BoardSilent(f"{where}, key {key!r}: asking the board failed: {last_line(complaint, 'no answer')}")
    answer = json.loads(last)
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (TrackerUnreachable, NoSuchBoard, BoardBusy)}
        raise kinds[answer["error"]](f"{where}: {answer['message']}")
    return BoardReport.from_json(answer)


def _ask(host: str, port: int, key: str, answer: Any) -> dict[str, Any]:
    """The probe's answer, or `error`, the name of a kind of BoardUnusable, and `message`."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return {"error": "TrackerUnreachable", "message": f"nothing listens there ({error})"}
    from tvm import rpc

    connection = rpc.connect_tracker(host, port)
    summary = connection.summary()
    # The queue remembers keys of boards that left; servers are those that are connected.
    joined: dict[str, list[str]] = {}
    for server in summary["server_info"]:
        address = ":".join(str(part) for part in server["addr"])
        joined.setdefault(server["key"].removeprefix("server:"), []).append(address)
    if key not in joined:
        known = ", ".join(sorted(joined)) or "none"
        return {"error": "NoSuchBoard", "message": f"no board has joined under key {key!r}; keys there are: {known}"}
    if summary["queue_info"][key]["free"] == 0:
        return {"error": "BoardBusy", "message": f"the {len(joined[key])} boards of key {key!r} are all in use"}
    print(_ASKED, ", ".join(joined[key]), file=answer, flush=True)
    session = connection.request(key, session_timeout=60)
    found: dict[str, Any] = json.loads(session.get_function(PROBE)())
    session.get_function("CloseRPCConnection")()
    return found


def main(arguments: Sequence[str]) -> int:
    parent, host, port, key = arguments
    die_with_parent(int(parent))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(_ask(host, int(port), key, answer)), file=answer, flush=True)
    # TVM's clients wait for their sessions when they are collected.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
