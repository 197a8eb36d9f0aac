"""Processes that import PyTorch or TensorFlow, so that the tests' own does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(*arguments: str) -> str:
    """What Python prints when it is run with `arguments`."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def write(program: str, folder: Path) -> Path:
    """`folder`, in which `program` has saved its models."""
    run("-c", program, str(folder))
    return folder


def inspect(path: Path) -> dict[str, Any]:
    """What the API learns of a file."""
    answer: dict[str, Any] = json.loads(run("-m", "workers.frontend.inspect", str(path)))
    return answer


def convert(path: Path, target: Path) -> dict[str, Any]:
    """What comes of making ONNX of a file, by the converter that its inspection names."""
    answer: dict[str, Any] = json.loads(
        run("-m", "workers.frontend.convert", inspect(path)["convert"], str(path), str(target))
    )
    return answer
