"""Runs and times the libraries of a finished job on a board, from a process that may be killed."""

from __future__ import annotations

import io
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuning_db.keys import DeviceIdentity, Json
from workers.devices.board_session import CONNECT_S, Session, import_client
from workers.devices.targets import beyond
from workers.devices.tracker import Boards, Tracker
from workers.elf import Elf
from workers.packaging.running import LibraryRefused, Ran
from workers.search.forkserver import ChildFailed


@dataclass(frozen=True, slots=True)
class OnBoard:
    """The boards of a device, any of which will do, and what was compiled for them."""

    tracker: str  #: HOST:PORT
    key: str
    device: Mapping[str, Json]  #: their identity, as JSON
    target: str  #: of the libraries, as JSON
    timeout_s: float  #: seconds that everything together may take there
    patience_s: float  #: for a board to be free
    #: Run what the target says that the board cannot run, which ends the step on the board and nothing else.
    force: bool = False


def run_on_board(
    board: OnBoard, libraries: Mapping[str, str], examples: Sequence[Sequence[NDArray[Any]]], threads: int, rounds: int,
    min_sample_s: float, function: str = "main", head: str | None = None,
) -> Ran:  # fmt: skip
    """Each library, by label a path, on each of `examples`, arrays in the order that its `function` takes them; then
    all timed in turns. `head`, if given, is a function that answers too, of the same arrays.

    Raises LibraryRefused, DeviceLost when no board serves in time, and whatever TVM raises of a board that is lost.
    The process ends of SIGALRM if the board does not answer.
    """
    import_client()
    lease = Boards(Tracker.parse(board.tracker), board.key, board.patience_s).request()
    # A board that is frozen never answers, and TVM's client waits for ever.
    signal.setitimer(signal.ITIMER_REAL, CONNECT_S)
    session = Session(lease, timeout_s=board.timeout_s)
    identity = DeviceIdentity.from_json(board.device)
    told = session.expect(identity)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for label, path in libraries.items():
        require_glibc(label, Path(path).read_bytes(), told["glibc"], identity.name)
    lacking = ", ".join(beyond(board.target, identity))
    if lacking and not board.force:
        raise LibraryRefused(f"refused before it ran: its target may use {lacking}, which {identity.name} has not")
    inputs = [f"in{number}.npz" for number in range(len(examples))]
    with tempfile.TemporaryDirectory() as folder:
        for name, arrays in zip(inputs, examples, strict=True):
            np.savez(Path(folder) / name, *arrays)
            session.upload(Path(folder) / name, name)
    on_board = {label: f"{label}.so" for label in libraries}
    deadline_s = board.timeout_s / (len(on_board) + 1)
    outputs: dict[str, list[list[NDArray[Any]]]] = {}
    heads: dict[str, list[list[NDArray[Any]]]] = {}
    for label, path in libraries.items():
        session.upload(path, on_board[label])
        results = [f"{label}-out{number}.npz" for number in range(len(examples))]
        for name, answers in ((function, outputs), *([(head, heads)] if head is not None else [])):
            try:
                session.run("infer", [on_board[label], inputs, results, threads, name], deadline_s=deadline_s)
            except ChildFailed as failure:
                why = f"; its target may use {lacking}, which the board has not" if lacking else ""
                raise LibraryRefused(f"the {label} library on {identity.name}: {failure}{why}") from None
            answers[label] = [_arrays(session.download(result)) for result in results]
    try:
        arguments = [on_board, inputs[0], threads, rounds, min_sample_s, function]
        samples = session.run("time_libraries", arguments, deadline_s=deadline_s)
    except ChildFailed as failure:
        raise LibraryRefused(f"timing the libraries on {identity.name}: {failure}") from None
    session.close()
    return Ran(outputs, samples, heads=heads)


def require_glibc(label: str, library: bytes, there: str | None, board: str) -> None:
    """LibraryRefused if the library asks for a version of the C library that the board, which has `there`, has not:
    it was linked against this machine's, and does not load on an older system."""
    needed = max((_glibc_version(version) for _, version in Elf(library).versions_needed()), default=())
    if needed and needed > (_glibc_version(f"GLIBC_{there}") or ()):
        version = ".".join(map(str, needed))
        has = f"glibc {there}" if there else "a C library that is not glibc"
        raise LibraryRefused(
            f"refused before it ran: the {label} library needs GLIBC_{version}, and {board} has {has}: run the worker "
            "on a system that is as old as the board's"
        )


def _glibc_version(name: str) -> tuple[int, ...]:
    """Of a version's name as in ELF files; empty for other names, GLIBC_PRIVATE among them."""
    found = re.fullmatch(r"GLIBC_(\d+(?:\.\d+)+)", name)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _arrays(npz: bytes) -> list[NDArray[Any]]:
    """What `np.savez` was given."""
    with np.load(io.BytesIO(npz)) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
