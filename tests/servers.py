"""Real PostgreSQL and Redis servers for tests: started on a free port of 127.0.0.1, stopped by their process id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import redis

START_TIMEOUT_S = 60


class ServerMissing(Exception):
    """A server's program is not installed; the message names the package that has it."""


@contextmanager
def postgres_server() -> Iterator[str]:
    """An empty PostgreSQL without passwords: the URL of its database `postgres`."""
    initdb, postgres = _postgres_program("initdb"), _postgres_program("postgres")
    # PostgreSQL refuses to run as root; Debian's package brings a user for it.
    account: dict[str, Any] = {}
    with _folder("tunery-postgres-") as folder:
        if os.geteuid() == 0:
            account = {"user": "postgres", "group": "postgres", "extra_groups": []}
            shutil.chown(folder, "postgres", "postgres")
        data = folder / "data"
        subprocess.run(
            [initdb, "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=folder,
            **account,
        )

        def start(port: int) -> list[str | Path]:
            settings = {
                "port": port,
                "listen_addresses": "127.0.0.1",
                "unix_socket_directories": "",
                "fsync": "off",
                "max_connections": 200,
                "shared_buffers": "32MB",
            }
            return [postgres, "-D", data, *(f"--{name}={value}" for name, value in settings.items())]

        def url(port: int) -> str:
            return f"postgresql://postgres@127.0.0.1:{port}/postgres"

        def answers(port: int) -> None:
            psycopg.connect(url(port), connect_timeout=5).close()

        # SIGINT is PostgreSQL's "fast shutdown": it does not wait for clients to leave.
        with _running(start, answers, psycopg.OperationalError, folder, signal.SIGINT, account) as port:
            yield url(port)


@contextmanager
def redis_server(*options: str) -> Iterator[str]:
    """An empty Redis that keeps nothing on disk: the URL of its database 0. `options` are redis-server's own."""
    program = shutil.which("redis-server")
    if program is None:
        raise ServerMissing("redis-server is not installed; run: apt-get install redis-server")

    def start(port: int) -> list[str | Path]:
        return [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", *options]

    def answers(port: int) -> None:
        # Asking for a password is an answer too.
        with redis.Redis(port=port, socket_timeout=5) as client, suppress(redis.AuthenticationError):
            client.ping()

    with (
        _folder("tunery-redis-") as folder,
        _running(start, answers, redis.RedisError, folder, signal.SIGTERM, {}) as port,
    ):
        yield f"redis://127.0.0.1:{port}/0"


def _postgres_program(name: str) -> str:
    # Debian keeps them out of PATH, in a folder for each version.
    by_version = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: int(p.parts[-3]))
    found = str(by_version[-1]) if by_version else shutil.which(name)
    if found is None:
        raise ServerMissing(f"PostgreSQL's {name} is not installed; run: apt-get install postgresql")
    return found


@contextmanager
def _folder(prefix: str) -> Iterator[Path]:
    # Not pytest's tmp_path: another user than the one that runs the tests must be able to enter it.
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(
    command: Callable[[int], list[str | Path]],
    answers: Callable[[int], None],
    not_yet: type[Exception],
    folder: Path,
    stop: signal.Signals,
    account: dict[str, Any],
) -> Iterator[int]:
    """The server's port, once it answers. Tried again on another port if somebody else took the free one meanwhile."""
    log_path = folder / "log"
    process: subprocess.Popen[bytes] | None = None
    try:
        for _ in range(3):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    command(port), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **account
                )
            deadline = time.monotonic() + START_TIMEOUT_S
            while process.poll() is None:
                try:
                    answers(port)
                except not_yet as error:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the server does not answer: {log_path.read_text()[-2000:]}") from error
                    time.sleep(0.05)
                else:
                    yield port
                    return
        raise RuntimeError(f"the server does not start: {log_path.read_text()[-2000:]}")
    finally:
        if process is not None and process.poll() is None:
            process.send_signal(stop)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
