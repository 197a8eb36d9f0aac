"""Asks TVM's RPC tracker which boards have joined, and for one of them, each within a time of its own.

TVM's client waits for ever for a key that nobody has. This speaks the same protocol (tvm/rpc/base.py) and imports no
TVM: a worker's main process asks too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from tuning_db.errors import DeviceLost

_MAGIC: Final = 0x2F271
_BOARD_MAGIC: Final = 0xFF271
_SUCCESS: Final = 0
_REQUEST: Final = 4
_SUMMARY: Final = 6
_SIZE: Final = struct.Struct("<i")
#: A tracker that does not answer a question about itself within this is not there.
_ANSWER_S: Final = 5.0
_LONGEST_ANSWER: Final = 1 << 24
_PAUSE_S: Final = 0.5


class BoardUnusable(Exception):
    """No board answered under the key. The message names tracker, key and what was found."""


class TrackerUnreachable(BoardUnusable):
    """Nothing that answers as a tracker is there."""


class NoSuchBoard(BoardUnusable):
    """No board has joined under this key; those that have are named."""


class BoardBusy(BoardUnusable):
    """All boards of this key serve somebody. Not a fault: asking later may do."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A board that the tracker has given out: to be connected to within a few seconds, once, by whoever has this."""

    host: str
    port: int
    match_key: str

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def give_back(self) -> None:
        """Have the board offer itself again at once: it would in some seconds, when it sees that nobody comes."""
        key = f"client:{self.match_key}".encode()
        with (
            contextlib.suppress(OSError, EOFError),
            socket.create_connection((self.host, self.port), timeout=_ANSWER_S) as connection,
        ):
            connection.sendall(_SIZE.pack(_BOARD_MAGIC) + _SIZE.pack(len(key)) + key)
            _read(connection, _SIZE.size)


@dataclass(frozen=True, slots=True)
class Tracker:
    """Where a tracker is. Each call is a connection of its own."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Tracker:
        """From HOST:PORT. ValueError says what is wrong."""
        host, colon, port = text.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"tracker {self.host}:{self.port}"

    def joined(self) -> dict[str, list[str]]:
        """The addresses of the boards that are connected to the tracker now, by their keys."""
        found: dict[str, list[str]] = {}
        # Its queues remember keys of boards that left; servers are those that are connected.
        for server in self._summary()["server_info"]:
            address = ":".join(str(part) for part in server["addr"])
            found.setdefault(server["key"].removeprefix("server:"), []).append(address)
        return {key: sorted(addresses) for key, addresses in sorted(found.items())}

    def boards(self, key: str) -> list[str]:
        """The addresses of the boards of `key`. Raises NoSuchBoard, with the keys that there are, if there is none."""
        joined = self.joined()
        if key not in joined:
            known = ", ".join(joined) or "none"
            raise NoSuchBoard(f"{self}: no board has joined under key {key!r}; keys there are: {known}")
        return joined[key]

    def request(self, key: str, *, timeout_s: float) -> Lease:
        """The next board of `key` that is free. Raises BoardBusy if none was within `timeout_s`, NoSuchBoard at once if
        none has joined."""
        joined = self.boards(key)
        end_s = time.monotonic() + timeout_s
        with self._connected() as connection:
            self._send(connection, [_REQUEST, key, "", 0])
            connection.settimeout(max(end_s - time.monotonic(), 0.1))
            try:
                code, value = self._receive(connection)
            except TimeoutError:
                raise BoardBusy(
                    f"{self}: none of the {len(joined)} boards of key {key!r} was free within {timeout_s:g} s"
                ) from None
        if code != _SUCCESS:
            raise TrackerUnreachable(f"{self} refused a request for key {key!r}: {value}")
        host, port, match_key = value
        return Lease(str(host), int(port), str(match_key))

    def _summary(self) -> dict[str, Any]:
        with self._connected() as connection:
            self._send(connection, [_SUMMARY])
            try:
                _, summary = self._receive(connection)
            except TimeoutError:
                raise TrackerUnreachable(f"{self} did not answer within {_ANSWER_S:g} s") from None
        found: dict[str, Any] = summary
        return found

    def _connected(self) -> socket.socket:
        try:
            connection = socket.create_connection((self.host, self.port), timeout=_ANSWER_S)
        except OSError as error:
            raise TrackerUnreachable(f"{self}: nothing listens there ({error})") from None
        try:
            connection.sendall(_SIZE.pack(_MAGIC))
            magic = _SIZE.unpack(_read(connection, _SIZE.size))[0]
        except (OSError, EOFError) as error:
            connection.close()
            raise TrackerUnreachable(f"{self} does not answer as a tracker ({error})") from None
        if magic != _MAGIC:
            connection.close()
            raise TrackerUnreachable(f"{self} is not a tracker: something else listens there")
        return connection

    def _send(self, connection: socket.socket, message: object) -> None:
        data = json.dumps(message).encode()
        try:
            connection.sendall(_SIZE.pack(len(data)) + data)
        except OSError as error:
            raise TrackerUnreachable(f"{self} hung up ({error})") from None

    def _receive(self, connection: socket.socket) -> Any:
        """Raises TimeoutError, for the caller to say what did not come."""
        try:
            size = _SIZE.unpack(_read(connection, _SIZE.size))[0]
            if not 0 < size <= _LONGEST_ANSWER:
                raise TrackerUnreachable(f"{self} answers with {size} bytes: it is no tracker")
            return json.loads(_read(connection, size))
        except TimeoutError:
            raise
        except (OSError, EOFError, ValueError) as error:
            raise TrackerUnreachable(f"{self} hung up ({error})") from None


@dataclass(frozen=True, slots=True)
class Boards:
    """The boards that have joined a tracker under a key."""

    tracker: Tracker
    key: str
    #: Seconds without any board that serves, after which the device counts as lost: a board restarts in that time.
    patience_s: float = 120.0

    def request(self) -> Lease:
        """The next board that is free; boards and the tracker may be away meanwhile. Raises DeviceLost."""
        end_s = time.monotonic() + self.patience_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                return self.tracker.request(self.key, timeout_s=max(min(left_s, 10.0), 0.1))
            except BoardUnusable as error:
                if left_s <= 0:
                    raise DeviceLost(f"{error}; waited {self.patience_s:g} s for it") from None
                if not isinstance(error, BoardBusy):
                    time.sleep(_PAUSE_S)

    def count(self) -> int:
        """How many have joined; 1 while that cannot be told."""
        try:
            return len(self.tracker.boards(self.key))
        except BoardUnusable:
            return 1


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("connection closed")
        parts += part
    return bytes(parts)
