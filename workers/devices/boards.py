"""Ask a board behind a tracker who it is, within a deadline: TVM's own client waits for ever in each way it can fail.

A process of its own does the asking, `python -m workers.devices.boards PARENT`, and is killed in time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tuning_db.keys import DeviceIdentity
from workers.devices.board_session import CONNECT_S, BoardSilent, NotReady, Session, import_client
from workers.devices.identity import CpuFacts, identity_of
from workers.devices.tracker import Lease, Tracker
from workers.processes import die_with_parent
from workers.said import last_line


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


def probe_board(tracker: Tracker, key: str, *, wait_s: float = 10.0, deadline_s: float = CONNECT_S) -> BoardReport:
    """Probe the next board of `key` that is free within `wait_s`. It has `deadline_s` to answer, once TVM was
    imported here, which takes 2 to 10 s.

    Raises the kinds of BoardUnusable, and `identity.UnusableDevice` for a board of a kind that nothing compiles for.
    """
    tracker.boards(key)
    with subprocess.Popen(
        [sys.executable, "-m", "workers.devices.boards", str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            # A board that was given out offers itself anew when nobody has come for some seconds.
            said = process.stdout.readline()
            lease = tracker.request(key, timeout_s=wait_s)
            where = f"{tracker}, key {key!r}: the board at {lease.address}"
            try:
                said, complaint = process.communicate(json.dumps(asdict(lease)), timeout=deadline_s)
            except subprocess.TimeoutExpired:
                raise BoardSilent(
                    f"{where} did not answer within {deadline_s:g} s: it is frozen, or cannot be reached there"
                ) from None
        finally:
            process.kill()
    if process.returncode != 0:
        raise BoardSilent(f"{where} could not be asked: {last_line(complaint, 'no answer')}")
    answer = json.loads(said)
    if "not_ready" in answer:
        raise NotReady(answer["not_ready"])
    return BoardReport.from_json(answer)


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[0]))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_client()
    print("ready", file=answer, flush=True)
    session = Session(Lease(**json.load(sys.stdin)), timeout_s=60)
    try:
        told = session.probe()
    except NotReady as error:
        told = {"not_ready": str(error)}
    session.close()
    print(json.dumps(told), file=answer, flush=True)
    # TVM's clients wait for their sessions when they are collected.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
