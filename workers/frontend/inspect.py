"""`python -m workers.frontend.inspect FILE [--bind [--scheme NAME] | --nodes | --calibration]`: parse an untrusted
upload in a process that may die.

Prints one JSON object and exits 0, whether the model is good or not: ``{"ok": true, "digest", "format", "opset",
"inputs", "outputs", "operators"}`` or ``{"ok": false, "error": {"type", "message", "field", …}}``. With ``--bind``
there is ``{"inputs": {name: {"dtype", "shape"}}, "exclude": [name], "device_kind", "ranged"}`` on standard input, as no
argument may be as long; all but the inputs may be left out. It also binds the shapes, infers all others and checks the
operators that are left, that each name to be excluded may be a node's, with ``--scheme`` that weights so large can be
quantized, and that a model which selects boxes can be compiled as it is asked for. With ``--nodes`` the answer is
``{"ok": true, "nodes": [{"node", "operator"}], "more"}``: those that int8 can leave out, and how many are not told.
With ``--calibration`` the file holds samples, and the answer is ``{"ok": true, "digest", "arrays"}``. Of a model that
`workers.frontend.convert` makes into ONNX it says no more than ``{"ok": true, "convert": format}``.
Anything else on stdout, another exit status or none in time means that the file broke the parser.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tuning_db.catalog import ModelInfo
from tuning_db.errors import (
    InvalidCalibration,
    InvalidModel,
    InvalidRequest,
    StorageFull,
    UnsupportedFormat,
    UnsupportedOperator,
)
from tuning_db.keys import Json, to_json

#: Address space for the parser: the file several times over, and room for the libraries. No model is longer than 2 GiB
#: without its data files, and those are read piece by piece.
_BASE_BYTES = 4 << 30
_BYTES_PER_FILE_BYTE = 6
_MOST_FILE_BYTES = 2 << 30
#: Processor time: for the parser, and for hashing so many bytes in a second.
_CPU_S = 60
_BYTES_PER_CPU_S = 100_000_000
#: Tensors in data files are read whole below this size: they may be shapes.
_SMALL_BYTES = 1 << 16
#: Nodes that are told: of longer names a request could not exclude any, of more it could not exclude all.
_MOST_NODES = 4096
_LONGEST_NAME = 1024


def limit_resources(file_bytes: int) -> None:
    """Bound memory, CPU time and core files of this process for good."""
    for name, limit in (
        (resource.RLIMIT_AS, _BASE_BYTES + _BYTES_PER_FILE_BYTE * min(file_bytes, _MOST_FILE_BYTES)),
        (resource.RLIMIT_CPU, _CPU_S + file_bytes // _BYTES_PER_CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (bound, bound))


def inspect(
    path: Path, bind: dict[str, Any] | None, exclude: Sequence[str] = (), scheme: str | None = None,
    device_kind: str = "cpu", ranged: bool = False,
) -> dict[str, Json]:  # fmt: skip
    from workers.frontend import formats, onnx_model
    from workers.quantize import exclusions

    found = formats.format_of(path)
    if found is not formats.ONNX:
        if found.extra is None:
            raise found.refused()
        return {"ok": True, "convert": found.name}
    model = onnx_model.load(path, leave_out_from_bytes=_SMALL_BYTES)
    inputs, outputs = onnx_model.inputs_of(model), onnx_model.outputs_of(model)
    digest = onnx_model.model_digest(model)
    opset = onnx_model.opset_of(model)
    onnx_model.check_operators(model)
    if bind is not None:
        onnx_model.bind(model, ModelInfo(digest, "", "onnx", 0, inputs, outputs).bind(bind))
        exclusions.check(model, exclude)
        if scheme is not None:
            onnx_model.check_one_piece(model, scheme)
        if onnx_model.selects(model):
            onnx_model.refuse_selecting(scheme or "none", device_kind, ranged=ranged)
    return {
        "ok": True,
        "digest": digest,
        "format": "onnx",
        "opset": opset,
        "inputs": to_json(inputs),
        "outputs": to_json(outputs),
        "operators": to_json(onnx_model.operator_counts(model.graph.node)),
    }


def list_nodes(path: Path) -> dict[str, Json]:
    from workers.frontend import onnx_model
    from workers.quantize import exclusions

    found = exclusions.nodes(onnx_model.load(path, leave_out_from_bytes=_SMALL_BYTES))
    told = [{"node": name, "operator": operator} for name, operator in found if len(name) <= _LONGEST_NAME]
    del told[_MOST_NODES:]
    return {"ok": True, "nodes": to_json(told), "more": len(found) - len(told)}


def examine(path: Path) -> dict[str, Json]:
    from workers.quantize import samples

    digest, arrays = samples.examine(path)
    return {"ok": True, "digest": digest, "arrays": to_json(arrays)}


def answer(work: Callable[[], dict[str, Json]], too_large: InvalidRequest) -> None:
    """Print what `work` returns, or its refusal, as JSON; `too_large` if it needs more memory than it may have.

    Libraries print what they like: theirs goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as stdout, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        result: dict[str, Json]
        try:
            result = work()
        except InvalidRequest as error:
            result = _refusal(error)
        except StorageFull as error:
            result = {"ok": False, "error": {"type": "StorageFull", "message": str(error), "field": None}}
        except MemoryError:
            result = _refusal(too_large)
        json.dump(result, stdout)


def _refusal(error: InvalidRequest) -> dict[str, Json]:
    details: dict[str, Json] = {"type": type(error).__name__, "message": str(error), "field": error.field}
    if isinstance(error, UnsupportedOperator):
        details |= {"operator": error.operator, "node": error.node, "opset": error.opset}
    if isinstance(error, UnsupportedFormat):
        details["format"] = error.format
    return {"ok": False, "error": details}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.frontend.inspect", description=__doc__)
    parser.add_argument("file", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--bind", action="store_true")
    kind.add_argument("--nodes", action="store_true")
    kind.add_argument("--calibration", action="store_true")
    parser.add_argument("--scheme")
    options = parser.parse_args(arguments)
    limit_resources(options.file.stat().st_size)
    if options.calibration:
        too_large: InvalidRequest = InvalidCalibration("the calibration data needs too much memory to parse")
        answer(lambda: examine(options.file), too_large)
        return 0
    too_large = InvalidModel("the model needs too much memory to parse")
    if options.nodes:
        answer(lambda: list_nodes(options.file), too_large)
    else:
        asked: dict[str, Any] = json.load(sys.stdin) if options.bind else {"inputs": None}
        bind = asked.pop("inputs")
        answer(lambda: inspect(options.file, bind, scheme=options.scheme, **asked), too_large)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
