"""`tunery up`: the API and one worker on this machine as child processes, started, watched and stopped together."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tuning_db.layout import default_database_url

_STOP_S: Final = 15.0  #: what a child may take to stop before it is killed
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S: Final = 60.0  #: a child that lived this long starts with a fresh backoff
_PR_SET_PDEATHSIG: Final = 1

# Loaded now: between fork and exec nothing may be imported.
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class StartFailed(Exception):
    """`tunery up` could not get everything to run. `str(error)` says what to do."""


@dataclass(slots=True)
class Child:
    """One process that is kept running."""

    name: str
    command: list[str]
    log_path: Path
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    deaths: int = field(default=0)

    def start(self, env: Mapping[str, str]) -> None:
        supervisor = os.getpid()

        def die_with_supervisor() -> None:
            # However this process ends, by SIGKILL too, the child is told to stop.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != supervisor:
                os._exit(1)

        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
                pass_fds=self.pass_fds,
                preexec_fn=die_with_supervisor,  # safe: this process has one thread
            )
        self.started_s = time.monotonic()

    def poll(self, env: Mapping[str, str]) -> int | None:
        """Start again, with growing pauses, what has died. The exit code of a death that was found just now."""
        now_s = time.monotonic()
        if self.process is None:
            if now_s >= self.restart_at_s:
                self.start(env)
            return None
        code = self.process.poll()
        if code is None:
            return None
        self._kill_group()
        if now_s - self.started_s > _STEADY_S:
            self.deaths = 0
        self.restart_at_s = now_s + _BACKOFF_S[min(self.deaths, len(_BACKOFF_S) - 1)]
        self.deaths += 1
        self.process = None
        return code

    def ask_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def stop(self, deadline_s: float) -> None:
        """Wait for the child until then, and leave nothing of its group."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        self._kill_group()
        self.process.wait()

    def _kill_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def settings_complaint() -> str | None:
    """What is wrong with the service's environment variables, asked in a process of its own: this one stays light."""
    done = subprocess.run([sys.executable, "-m", "service.settings"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else _last_line(done.stderr, "the settings are wrong")


class Supervisor:
    """Runs until it is told to stop. Only the main thread may use it: it takes SIGINT and SIGTERM."""

    def __init__(self, data_dir: Path, *, host: str, port: int) -> None:
        self.data_dir = data_dir.absolute()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        self._socket = _listen(host, port)
        self._stopping = False
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        database_url = os.environ.get("TUNERY_DATABASE_URL") or default_database_url(self.data_dir)
        self._env = {
            **os.environ,
            "TUNERY_DATA_DIR": str(self.data_dir),
            "TUNERY_DATABASE_URL": database_url,
            "PYTHONUNBUFFERED": "1",
        }
        logs = self.data_dir / "logs"
        logs.mkdir(exist_ok=True)
        fd = self._socket.fileno()
        # The socket stays open here, so that while the API is started again its clients wait instead of failing.
        self.api = Child("api", [sys.executable, "-m", "service.app", "--fd", str(fd)], logs / "api.log", (fd,))
        self.worker = Child("worker", [sys.executable, "-m", "workers"], logs / "worker.log")

    @property
    def children(self) -> tuple[Child, Child]:
        return self.api, self.worker

    def upgrade_database(self) -> None:
        """In a process of its own: this one stays without SQLAlchemy, and single-threaded."""
        url = self._env["TUNERY_DATABASE_URL"]
        done = subprocess.run(
            [sys.executable, "-m", "tuning_db.migrations", "upgrade", url],
            capture_output=True,
            text=True,
            check=False,
            env=self._env,
        )
        if done.returncode != 0:
            said = _last_line(done.stderr, "no reason was given")
            raise StartFailed(f"the database could not be upgraded: {said}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the children and take the signals; at the end of the block everything is stopped."""
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        url_path = self.data_dir / "url"
        try:
            for child in self.children:
                child.start(self._env)
            url_path.write_text(self.url + "\n")
            yield
        finally:
            url_path.unlink(missing_ok=True)
            for child in self.children:
                child.ask_to_stop()
            deadline_s = time.monotonic() + _STOP_S
            for child in self.children:
                child.stop(deadline_s)
            self._socket.close()
            os.close(self._lock)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def watch(self, report: Callable[[str], None], until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Keep the children running until `until()`, asked every half second; False if it was told to stop before.

        With `timeout_s`, raises StartFailed when that passes, or when a child has died three times.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._stopping:
            for child in self.children:
                code = child.poll(self._env)
                if code is None:
                    continue
                report(f"the {child.name} ended with code {code}; see {child.log_path}")
                if deadline_s is not None and child.deaths >= 3:
                    log = child.log_path
                    said = _last_line(log.read_text(errors="replace"), f"{log} is empty")
                    raise StartFailed(f"the {child.name} does not stay up: {said}")
            if until():
                return True
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise StartFailed(f"not ready after {timeout_s:g} s; see {self.data_dir / 'logs'}")
            time.sleep(0.5)
        return False

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True

    def _take_lock(self) -> int:
        fd = os.open(self.data_dir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StartFailed(
                f"another `tunery up` runs on {self.data_dir}; use that one, or give another --data-dir"
            ) from None
        return fd


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (socket.gaierror, UnicodeError) as error:
        raise StartFailed(f"no address is known for --host {host!r} ({error}); give one of this machine's") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise StartFailed(
                f"--host {host!r} is no address of this machine; give one that is, or 0.0.0.0 for all"
            ) from error
        raise StartFailed(f"cannot listen on {host}:{port}: {error.strerror or error}; try --port 0") from error
    return listener


def _last_line(said: str, otherwise: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else otherwise
