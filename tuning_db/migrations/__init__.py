"""The schema, by Alembic alone: `upgrade` brings a database to this code's, `check_schema` refuses any other."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL

from tuning_db.engine import domain_errors, open_engine, parse_url, sqlite_path, writer
from tuning_db.errors import SchemaMismatch
from tuning_db.models import Base

#: PostgreSQL's name for "somebody is upgrading Tunery's schema": the first eight bytes of SHA-256("tunery schema").
_ADVISORY_LOCK: Final = 0x361BF32E7058ED10


def upgrade(url: str) -> None:
    """Make the database if it is a file that does not exist, and bring its schema to this code's, or do nothing.

    Any number of processes may call this at once: one does the work, the others wait and find it done. Raises
    SchemaMismatch for a database that a newer Tunery has upgraded.
    """
    parsed = parse_url(url)
    with domain_errors(parsed), _upgrade_lock(parsed):
        engine = open_engine(parsed)
        try:
            with writer(engine).begin() as connection:
                if engine.dialect.name == "postgresql":
                    connection.execute(text("SELECT pg_advisory_xact_lock(:name)"), {"name": _ADVISORY_LOCK})
                revision = _revision(connection)
                if revision != _head():
                    _refuse_newer(revision)
                    command.upgrade(_config(connection), "head")
        finally:
            engine.dispose()


def check_schema(url: str) -> None:
    """Raises SchemaMismatch unless the database's schema is exactly this code's. Writes nothing."""
    parsed = parse_url(url)
    path = sqlite_path(parsed)
    if path is not None and not path.exists():
        raise _older(None)  # opening it would make an empty file
    engine = open_engine(parsed)
    try:
        with domain_errors(parsed), engine.connect() as connection:
            check_connection(connection)
    finally:
        engine.dispose()


def check_connection(connection: Connection) -> None:
    """As `check_schema`, over a connection that is open already."""
    revision = _revision(connection)
    if revision != _head():
        _refuse_newer(revision)
        raise _older(revision)


def drift(url: str) -> list[Any]:
    """What `models.py` holds and the database's schema does not, or the reverse, as Alembic describes it."""
    engine = open_engine(parse_url(url))
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return list(compare_metadata(context, Base.metadata))
    finally:
        engine.dispose()


@contextmanager
def _upgrade_lock(url: URL) -> Iterator[None]:
    path = sqlite_path(url)
    if path is None:  # PostgreSQL locks inside the transaction
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file of its own: to make a new database write-ahead logged, SQLite needs it alone, and does not wait for that.
    with Path(f"{path}.upgrade-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", "tuning_db:migrations")
    config.attributes["connection"] = connection
    return config


@cache
def _scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "tuning_db:migrations")
    return ScriptDirectory.from_config(config)


@cache
def _head() -> str | None:
    return _scripts().get_current_head()


@cache
def _known() -> frozenset[str]:
    return frozenset(script.revision for script in _scripts().walk_revisions())


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _refuse_newer(revision: str | None) -> None:
    if revision is not None and revision not in _known():
        raise SchemaMismatch(
            f"this Tunery is older than the database: it does not know schema {revision}; install the Tunery that "
            "upgraded the database, or a later one"
        )


def _older(revision: str | None) -> SchemaMismatch:
    return SchemaMismatch(
        f"the database's schema is {revision or 'missing'}, this Tunery needs {_head()}; run: tunery db upgrade"
    )
