"""Only tested combinations of TVM, TVM-FFI and XGBoost are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers import toolchain
from workers.graph.pipeline import PIPELINE
from workers.toolchain import TESTED, UntestedToolchain

GOOD: dict[str, str | None] = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1", "xgboost": "3.2.0"}


def test_installed_is_tested() -> None:
    """What is installed here is a combination that workers accept."""
    toolchain.check(toolchain.installed())
    toolchain.check(GOOD)


@pytest.mark.parametrize(
    "change",
    [
        {"apache-tvm-ffi": "0.1.15.post2"},  # crashes on the first workload
        {"apache-tvm-ffi": "0.1.14"},
        {"apache-tvm": "0.27.0"},
        {"apache-tvm": "0.28.0"},
        {"apache-tvm": None},
        {"xgboost": None},  # tvm#11409, tvm#12009
        {"xgboost": "4.0.0"},
        {"xgboost": "3.20.0"},
        {"xgboost": "3.1.9"},
    ],
)
def test_untested(change: dict[str, str | None]) -> None:
    """Any other version, or none, is refused with what was found and what to install."""
    with pytest.raises(UntestedToolchain) as caught:
        toolchain.check(GOOD | change)
    message = str(caught.value)
    [(name, version)] = change.items()
    assert f"{name} {version or 'missing'}" in message
    assert '"apache-tvm==0.27.0.post1" "apache-tvm-ffi==0.1.14.post1" "xgboost-cpu~=3.2.0"' in message


def test_requirement_is_the_tested_one() -> None:
    """What the message says to install is what the project's own metadata pins."""
    text = (Path(toolchain.__file__).parents[1] / "pyproject.toml").read_text()
    for name in ("apache-tvm", "apache-tvm-ffi"):
        assert f'"{name}=={TESTED[0][name]}"' in text


def test_current() -> None:
    """The toolchain of keys names every part whose version changes code."""
    current = toolchain.current()
    assert (current.tvm, current.tvm_ffi) == (TESTED[0]["apache-tvm"], TESTED[0]["apache-tvm-ffi"])
    assert current.llvm.isdigit()
    assert current.pipeline == PIPELINE


def test_worker_refuses_to_start(tmp_path: Path) -> None:
    """A worker with an untested TVM-FFI exits with status 2 and says what to install, before it loads TVM."""
    fake = tmp_path / "packages" / "apache_tvm_ffi-0.1.15.post2.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15.post2\n")
    done = subprocess.run(
        [sys.executable, "-m", "workers"],
        env={**os.environ, "PYTHONPATH": str(fake.parent), "TUNERY_DATA_DIR": str(tmp_path / "data")},
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(toolchain.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "apache-tvm-ffi 0.1.15.post2" in done.stdout + done.stderr
    assert "apache-tvm-ffi==0.1.14.post1" in done.stdout + done.stderr


def test_worker_takes_no_arguments() -> None:
    """Settings come from the environment; an argument is a usage error."""
    done = subprocess.run(
        [sys.executable, "-m", "workers", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "TUNERY_" in done.stderr
