"""How a database is opened and what its drivers' errors mean: the one place that tells SQLite from PostgreSQL."""

from __future__ import annotations

import json
import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tuning_db.errors import DatabaseUnavailable, InvalidRequest, StorageFull

#: How long a writer waits for the one before it. SQLite has one writer at a time, for the whole database.
BUSY_TIMEOUT_S: Final = 30
CONNECT_TIMEOUT_S: Final = 10

#: SQLSTATE of PostgreSQL, or SQLite's result code.
Code: TypeAlias = str | int

_UNIQUE: Final[frozenset[Code]] = frozenset(
    {"23505", sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY}
)
_COLLISION: Final[frozenset[Code]] = frozenset({"40001", "40P01", sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_FULL: Final[frozenset[Code]] = frozenset({"53100", sqlite3.SQLITE_FULL})
_SILENT: Final[frozenset[Code]] = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
)

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def parse_url(url: str) -> URL:
    """``sqlite:////absolute/file.db`` or ``postgresql://user@host/name``, with the driver that is used filled in."""
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite") and parsed.database not in (None, "", ":memory:"):
        return parsed
    raise InvalidRequest(
        f"database URL {parsed.render_as_string()!r}: give sqlite:////absolute/file.db or postgresql://user@host/name",
        field="database_url",
    )


def sqlite_path(url: URL) -> Path | None:
    """The file of an SQLite database, None for PostgreSQL."""
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def open_engine(url: URL) -> Engine:
    """An engine whose transactions only read; `writer(engine)` is the same pool for those that write."""
    options: dict[str, Any] = {"json_serializer": _to_json, "pool_size": 10, "max_overflow": 20}
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, **options)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    else:
        connect_args = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "tunery"}
        # A server that was restarted while a connection lay in the pool is no error for whoever takes it out.
        engine = create_engine(url, connect_args=connect_args, pool_pre_ping=True, **options)
    _engines.add(engine)
    return engine


def writer(engine: Engine) -> Engine:
    """`engine` for transactions that write. On SQLite they take the write lock at their start: one that first reads
    and only then asks for it would be refused at once, without waiting, if another had written in between."""
    return engine.execution_options(writes=True)


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # The driver would open transactions by itself, late and deferred; `_begin_sqlite` does it instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA foreign_keys = ON")
        if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            cursor.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
        cursor.execute("PRAGMA synchronous = FULL")  # what was committed outlives a power cut
    finally:
        cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _to_json(value: Any) -> str:
    # Pure ASCII, so that neither database meets a NUL or half a surrogate pair; no NaN, which is not JSON.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _forget_connections() -> None:
    for engine in list(_engines):
        engine.dispose(close=False)


# A forked child (a prefork worker's) must not talk over its parent's connections.
os.register_at_fork(after_in_child=_forget_connections)


def _code(error: BaseException | None) -> Code | None:
    if not isinstance(error, DBAPIError):
        return None
    code: Code | None = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorcode", None)
    return code


def _is(error: BaseException | None, codes: frozenset[Code]) -> bool:
    code = _code(error)
    # The low byte of SQLite's code is the kind of error, the rest tells where it came from.
    return code in codes or (isinstance(code, int) and code & 0xFF in codes)


def is_collision(error: BaseException) -> bool:
    """Whether the same transaction may well succeed now: it lost a race against another one, and did nothing."""
    return _is(error, _COLLISION) or _code(error) in _UNIQUE


@contextmanager
def domain_errors(url: URL) -> Iterator[None]:
    """Turn what a full or silent database raises into this project's errors; faults of the program stay as they are."""
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnavailable(f"every connection to {_shown(url)} is taken; try again") from error
    except DBAPIError as error:
        if _is(error, _FULL):
            raise StorageFull(f"no room is left for the database {_shown(url)}: free some, then try again") from error
        code = _code(error)
        # Class 08: connection lost; 28, 3D: refused at the door; 53: out of resources; 57P: shutting down.
        silent = code[:2] in ("08", "28", "3D", "53") or code[:3] == "57P" if isinstance(code, str) else code is None
        if (
            error.connection_invalidated
            or _is(error, _SILENT | _COLLISION)
            or (silent and isinstance(error, OperationalError))
        ):
            raise DatabaseUnavailable(
                f"the database {_shown(url)} does not answer ({str(error.orig).strip()}); check that it runs"
            ) from error
        raise


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)
