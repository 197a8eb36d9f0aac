"""Where things lie below the data directory, the same for every process of one installation."""

from __future__ import annotations

from pathlib import Path


def default_database_url(data_dir: Path) -> str:
    """The SQLite file that is used where no database is named."""
    return f"sqlite:///{data_dir.absolute() / 'tunery.db'}"


def blob_dir(data_dir: Path) -> Path:
    return data_dir.absolute() / "blobs"


def broker_dir(data_dir: Path) -> Path:
    """The folder of the embedded broker."""
    return data_dir.absolute() / "broker"


def log_dir(data_dir: Path) -> Path:
    return data_dir.absolute() / "logs"
