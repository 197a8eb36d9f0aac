"""How a database is opened: who waits for whom, and what is durable."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from tuning_db.engine import open_engine, parse_url, writer


def test_sqlite_writers_wait_at_their_start(sqlite_url: str) -> None:
    """A transaction that will write starts only when the one before has ended, so what it reads first is not stale."""
    engine = open_engine(parse_url(sqlite_url))
    count = sa.text("SELECT count(*) FROM record_scopes")
    asking = threading.Event()

    def second() -> int | None:
        asking.set()
        with writer(engine).begin() as connection:
            found: int | None = connection.scalar(count)
            connection.execute(sa.text("DELETE FROM record_scopes"))
            return found

    with ThreadPoolExecutor(1) as pool:
        with writer(engine).begin() as connection:
            seen = pool.submit(second)
            asking.wait(timeout=60)
            connection.execute(sa.text("INSERT INTO record_scopes VALUES ('a', '{}', '2026-01-01 00:00:00')"))
        assert seen.result(timeout=60) == 1
    engine.dispose()


def test_sqlite_readers_do_not_wait(sqlite_url: str) -> None:
    """A transaction that only reads neither waits for a writer nor sees what that has not committed."""
    engine = open_engine(parse_url(sqlite_url))
    with writer(engine).begin() as connection:
        connection.execute(sa.text("INSERT INTO record_scopes VALUES ('a', '{}', '2026-01-01 00:00:00')"))
        with engine.connect() as reader:
            assert reader.scalar(sa.text("SELECT count(*) FROM record_scopes")) == 0
    engine.dispose()


def test_sqlite_settings(sqlite_url: str) -> None:
    """Every connection logs ahead, checks foreign keys, waits for its turn, and flushes what it commits."""
    engine = open_engine(parse_url(sqlite_url))
    with engine.connect() as connection:
        names = ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        assert [connection.scalar(sa.text(f"PRAGMA {name}")) for name in names] == ["wal", 1, 30_000, 2]
    engine.dispose()
