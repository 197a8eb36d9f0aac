"""`python -m workers.frontend.convert FORMAT FILE TARGET`: an upload of another format as ONNX, by its own libraries.

Writes the ONNX model to TARGET and prints ``{"ok": true}``, or refuses as `workers.frontend.inspect` does. TARGET is
then an upload like any other: nothing is taken on trust because it comes from here.

A model of these formats is a program of its author's, and its libraries were not made to read hostile ones. So this is
a process that has no secrets in its environment, bounded memory, time and files, and a folder of its own to work in; it
is not kept from reading what the API's user may read. docs/decisions/0011-formats.md says what follows from that.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tuning_db.errors import InvalidModel, TuneryError
from tuning_db.keys import Json
from workers.frontend import formats
from workers.frontend.formats import Format
from workers.frontend.inspect import answer
from workers.said import last_line

#: What a process may map and write, for the libraries and so many times the file.
_BASE_BYTES: Final = 8 << 30
_BYTES_PER_FILE_BYTE: Final = 8
_MOST_WRITTEN_BYTES: Final = 2 << 30
_CPU_S: Final = 900

#: The package by which each extra shows that it is installed.
_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": ("torch", "onnxscript", "onnxruntime"),
    "tensorflow": ("tensorflow", "tf2onnx", "ai_edge_litert", "onnxruntime"),
}


def limit_resources(file_bytes: int) -> None:
    """Bound this process and all that it starts for good."""
    for name, limit in (
        (resource.RLIMIT_DATA, _BASE_BYTES + _BYTES_PER_FILE_BYTE * file_bytes),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_FSIZE, _MOST_WRITTEN_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (bound, bound))


def convert(wanted: Format, path: Path, target: Path) -> dict[str, Json]:
    """UnsupportedFormat if the libraries are not installed; InvalidModel or UnsupportedOperator says what is wrong."""
    assert wanted.extra is not None
    if any(importlib.util.find_spec(package) is None for package in _PACKAGES[wanted.extra]):
        raise wanted.not_installed()
    try:
        _CONVERTERS[wanted.name](path, target)
    except (TuneryError, MemoryError):
        raise
    except Exception as error:  # the libraries raise whatever they run into
        why = last_line(error, type(error).__name__)
        raise InvalidModel(
            f"the file is {wanted.title}, and its libraries cannot make ONNX of it: {why}; {wanted.advice}"
        ) from error
    return {"ok": True}


def _from_torch(path: Path, target: Path) -> None:
    from workers.frontend import from_torch

    from_torch.convert(path, target)


def _from_tflite(path: Path, target: Path) -> None:
    from workers.frontend import from_tensorflow

    from_tensorflow.convert_tflite(path, target)


def _from_saved_model(path: Path, target: Path) -> None:
    from workers.frontend import from_tensorflow

    from_tensorflow.convert_saved_model(path, target)


def _from_frozen_graph(path: Path, target: Path) -> None:
    from workers.frontend import from_tensorflow

    from_tensorflow.convert_frozen_graph(path, target)


def _from_keras(path: Path, target: Path) -> None:
    from workers.frontend import from_tensorflow

    from_tensorflow.convert_keras(path, target)


#: By format. Each imports its libraries when it is called: they take seconds, and may be missing.
_CONVERTERS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "pt2": _from_torch,
    "tflite": _from_tflite,
    "saved-model": _from_saved_model,
    "frozen-graph": _from_frozen_graph,
    "keras": _from_keras,
    "hdf5": _from_keras,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.frontend.convert", description=__doc__)
    parser.add_argument("format", choices=sorted(_CONVERTERS))
    parser.add_argument("file", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    limit_resources(options.file.stat().st_size)
    wanted = next(known for known in formats.CONVERTED if known.name == options.format)
    too_large = InvalidModel("the model needs too much memory to convert")
    answer(lambda: convert(wanted, options.file, options.target), too_large)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
