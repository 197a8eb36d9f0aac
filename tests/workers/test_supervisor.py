"""How a worker watches the process of an attempt, with another program in the tuning process's place."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests.samples import make_spec
from tuning_db.jobs import JobState
from tuning_db.store import TuningStore
from workers.settings import Settings
from workers.supervisor import Supervisor

#: Takes SQLite's write lock, as a process frozen in the midst of a transaction holds it, and says no more.
FROZEN = """#!{python}
import sqlite3, time
database = sqlite3.connect({path!r}, isolation_level=None)
database.execute("begin immediate")
time.sleep(600)
"""


def test_a_process_that_froze_in_a_transaction_is_ended(
    sqlite_store: TuningStore, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock keeps the worker from every heartbeat; it is ended for its silence all the same, and then the job goes
    on to its next attempts."""
    program = tmp_path / "frozen"
    program.write_text(FROZEN.format(python=sys.executable, path=sqlite_url.removeprefix("sqlite:///")))
    program.chmod(0o755)
    monkeypatch.setattr("workers.supervisor.sys.executable", str(program))
    monkeypatch.setattr("tuning_db.engine.BUSY_TIMEOUT_S", 0.1)
    store = TuningStore(sqlite_url)
    job = store.submit(make_spec("a model")).job
    settings = Settings(data_dir=tmp_path, heartbeat_interval_s=0.2, silence_timeout_s=2, max_attempts=2)
    Supervisor(settings, store, threading.Event()).run(job.id)
    ended = store.job(job.id)
    store.close()
    assert (ended.state, ended.attempt) == (JobState.FAILED, 2)
    assert ended.error is not None
    assert "said nothing for 2 s" in ended.error.message
