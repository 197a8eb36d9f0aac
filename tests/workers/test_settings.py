"""What a worker is told from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from tuning_db.layout import default_database_url
from workers.settings import Settings


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any setting everything lies below one folder, and the worker is named for its host and process."""
    for name in [name for name in os.environ if name.startswith("TUNERY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    settings = Settings()
    assert settings.data_dir == tmp_path / ".tunery"
    assert settings.database_url == default_database_url(settings.data_dir)
    assert settings.worker_name.endswith(f"-{os.getpid()}")


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting can be given as a TUNERY_ variable; the service's own are ignored."""
    for name, value in {
        "DATA_DIR": str(tmp_path),
        "DATABASE_URL": "postgresql://tunery@db/tunery",
        "WORKER_NAME": "bench-1",
        "MAX_ATTEMPTS": "7",
        "INSPECTOR_TIMEOUT_S": "3",
    }.items():
        monkeypatch.setenv(f"TUNERY_{name}", value)
    settings = Settings()
    assert (settings.data_dir, settings.worker_name, settings.max_attempts) == (tmp_path, "bench-1", 7)
    assert settings.database_url == "postgresql://tunery@db/tunery"


@pytest.mark.parametrize("name", ["HEARTBEAT_INTERVAL_S", "REPORT_INTERVAL_S", "MAX_ATTEMPTS", "JOB_TIMEOUT_S"])
def test_nonsense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that makes no sense is refused by its name."""
    monkeypatch.setenv(f"TUNERY_{name}", "0")
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()
