"""The servers that tests start: real, on ports of their own, and gone afterwards."""

from __future__ import annotations

import psycopg
import pytest
import redis

from tests.servers import ServerMissing, postgres_server, redis_server


def test_postgres_is_gone_afterwards() -> None:
    """A PostgreSQL server answers inside the block and no longer after it."""
    with postgres_server() as url, psycopg.connect(url) as connection:
        assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


def test_redis_is_gone_afterwards() -> None:
    """A Redis server answers inside the block, to those with its password, and no longer after it."""
    with redis_server("--requirepass", "secret") as url:
        with redis.Redis.from_url(url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis.from_url(url, password="secret") as client:
            assert client.ping()
    with redis.Redis.from_url(url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_finds_redis_empty(redis_url: str, number: int) -> None:
    """What one test has left in the shared Redis, the next does not see."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys() == []
        client.set("left behind", number)


def test_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not installed is an error that names the package."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerMissing, match="apt-get install redis-server"), redis_server():
        pass
