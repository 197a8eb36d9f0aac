"""What tests of the graph share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose files nobody reads twice: for many small models, one after the other."""
    return tmp_path_factory.mktemp("models")
