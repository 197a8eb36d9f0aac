"""Fixtures that every room uses: servers once a session, a fresh database with the current schema for each test."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis

from tests.servers import ServerMissing, postgres_server, redis_server
from tuning_db.blobs import BlobStore
from tuning_db.migrations import upgrade
from tuning_db.store import TuningStore

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_admin_url() -> Iterator[str]:
    """A PostgreSQL server of this session's own: the URL of its database `postgres`."""
    try:
        with postgres_server() as url:
            yield url
    except ServerMissing as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest.fixture(scope="session")
def _redis_server_url() -> Iterator[str]:
    try:
        with redis_server() as url:
            yield url
    except ServerMissing as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest.fixture
def redis_url(_redis_server_url: str) -> str:
    """A real Redis, emptied for this test."""
    with redis.Redis.from_url(_redis_server_url) as client:
        client.flushall()
    return _redis_server_url


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "tunery.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def _postgres_template(postgres_admin_url: str) -> str:
    name = "tunery_template"
    with psycopg.connect(postgres_admin_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    upgrade(postgres_admin_url.rpartition("/")[0] + f"/{name}")
    return name


@pytest.fixture
def sqlite_url(_sqlite_template: Path, tmp_path: Path) -> str:
    """A fresh SQLite file with the current schema."""
    path = tmp_path / "tunery.db"
    shutil.copyfile(_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(postgres_admin_url: str, _postgres_template: str) -> Iterator[str]:
    """A fresh PostgreSQL database with the current schema."""
    with _postgres_database(postgres_admin_url, f"TEMPLATE {_postgres_template}") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh database with the current schema; the test runs once on each kind."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without a schema; the test runs once on each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
    else:
        with _postgres_database(request.getfixturevalue("postgres_admin_url")) as url:
            yield url


@pytest.fixture
def store(database_url: str) -> Iterator[TuningStore]:
    """A store over a fresh database; the test runs once on each kind."""
    store = TuningStore(database_url)
    yield store
    store.close()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """An empty blob store."""
    return BlobStore(tmp_path / "blobs")


@contextmanager
def _postgres_database(admin_url: str, options: str = "") -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(admin_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} {options}")
    try:
        yield admin_url.rpartition("/")[0] + f"/{name}"
    finally:
        with psycopg.connect(admin_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # whoever is still connected
