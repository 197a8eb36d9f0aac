"""Reads uploads, and converts models of other formats, in processes that may die: the API itself parses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from tuning_db.catalog import PortSpec
from tuning_db.errors import (
    InvalidCalibration,
    InvalidModel,
    InvalidRequest,
    ShapeMismatch,
    StorageFull,
    TuneryError,
    UnsupportedFormat,
    UnsupportedOperator,
    UnsupportedOption,
)
from tuning_db.keys import ArtifactKey, TensorSpec, is_sha256

log = structlog.get_logger()

_MAX_OUTPUT_BYTES: Final = 4 * 2**20
_REMEMBERED: Final = 1024

#: What a converter may know of the API's environment: nothing that opens a door.
_HARMLESS: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "OPENBLAS_CORETYPE")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a model file turned out to be."""

    digest: str
    format: str
    inputs: tuple[PortSpec, ...]
    outputs: tuple[PortSpec, ...]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A model file that has to be made into ONNX first."""

    format: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """What messages call an upload, and the error that one is which cannot be read."""

    what: str
    invalid: type[InvalidModel | InvalidCalibration]


_MODEL: Final = _Kind("model", InvalidModel)
_CALIBRATION: Final = _Kind("calibration data", InvalidCalibration)


class Inspector:
    """Runs `command PATH`, which answers one JSON object on standard output.

    At most `at_once` processes run at a time. Equal questions asked together are asked once, and good answers are
    remembered: the file is named by its content, so an answer never goes stale. Belongs to one event loop.
    """

    def __init__(self, command: Sequence[str], *, timeout_s: float, at_once: int) -> None:
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(at_once)
        self._running: dict[tuple[str, ...], asyncio.Task[dict[str, Any]]] = {}
        self._known: OrderedDict[tuple[str, ...], dict[str, Any]] = OrderedDict()

    async def inspect(self, path: Path, sha256: str) -> Inspection | Foreign:
        """What the file is. InvalidModel if it cannot be read, or kills the process that reads it; UnsupportedFormat
        if it is of a format that nothing takes."""
        report = await self._ask(path, sha256, _MODEL)
        if isinstance(report.get("convert"), str):
            return Foreign(report["convert"])
        try:
            found = Inspection(
                report["digest"],
                report["format"],
                tuple(PortSpec.from_json(port) for port in report["inputs"]),
                tuple(PortSpec.from_json(port) for port in report["outputs"]),
            )
        except (KeyError, TypeError) as error:
            raise InvalidModel("the model's parser gave an answer without its ports; see the service's log") from error
        if not is_sha256(found.digest):
            raise InvalidModel("the model's parser gave an answer without a digest; see the service's log")
        return found

    async def check(self, path: Path, sha256: str, key: ArtifactKey) -> None:
        """Bind the shapes and run shape inference: ShapeMismatch or UnsupportedOperator if they cannot work,
        InvalidRequest for an exclusion that names no node, weights that are too large to be quantized, or what is not
        done of such a model for this key."""
        asked = json.dumps(
            {
                "inputs": {spec.name: {"dtype": spec.dtype, "shape": list(spec.shape)} for spec in key.inputs},
                "exclude": key.quantization.exclude,
                "device_kind": key.device.kind,
                "ranged": key.range is not None,
            },
            sort_keys=True,
        )
        arguments = ["--bind"]
        if key.quantization.scheme != "none":
            arguments += ["--scheme", key.quantization.scheme]
        await self._ask(path, sha256, _MODEL, *arguments, stdin=asked.encode())

    async def nodes(self, path: Path, sha256: str) -> tuple[list[tuple[str, str]], int]:
        """Name and operator of the nodes that int8 can leave out, and how many more there are."""
        report = await self._ask(path, sha256, _MODEL, "--nodes", keep=False)
        try:
            return [(str(node["node"]), str(node["operator"])) for node in report["nodes"]], int(report["more"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidModel("the model's parser gave an answer without its nodes; see the service's log") from error

    async def examine(self, path: Path, sha256: str) -> tuple[str, tuple[TensorSpec, ...]]:
        """The digest and the arrays of calibration data. InvalidCalibration, naming the array, for what is none."""
        report = await self._ask(path, sha256, _CALIBRATION, "--calibration", keep=False)
        try:
            digest, arrays = report["digest"], tuple(TensorSpec.from_json(array) for array in report["arrays"])
        except (KeyError, TypeError) as error:
            raise InvalidCalibration("the parser gave an answer without arrays; see the service's log") from error
        if not is_sha256(digest):
            raise InvalidCalibration("the parser gave an answer without a digest; see the service's log")
        return digest, arrays

    async def close(self) -> None:
        """End what still runs."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _ask(
        self, path: Path, sha256: str, kind: _Kind, *arguments: str, stdin: bytes | None = None, keep: bool = True
    ) -> dict[str, Any]:
        """Without `keep` the answer is not remembered: it may name thousands of things."""
        question = (sha256, *arguments, *(() if stdin is None else (hashlib.sha256(stdin).hexdigest(),)))
        if (known := self._known.get(question)) is not None:
            self._known.move_to_end(question)
            return known
        task = self._running.get(question)
        if task is None:
            # A task of its own: a client that hangs up must not end the answer that others wait for.
            task = asyncio.create_task(self._run(path, kind, arguments, stdin))
            self._running[question] = task
            task.add_done_callback(lambda _: self._running.pop(question, None))
        report = await asyncio.shield(task)
        if report.get("ok") is not True:
            raise _error_of(report.get("error"), kind)
        if not keep:
            return report
        self._known[question] = report
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return report

    async def _run(self, path: Path, kind: _Kind, arguments: Sequence[str], stdin: bytes | None) -> dict[str, Any]:
        async with self._slots:
            command = [*self._command, str(path), *arguments]
            return await _report_of(command, kind.what, "parser", self._timeout_s, stdin=stdin)


class Converter:
    """Runs `command FORMAT PATH TARGET`, which writes ONNX to TARGET and answers one JSON object, one at a time.

    The process works in a folder of its own and is told nothing of the API's settings. Which model came of a file is
    remembered: converting takes seconds, and a pipeline that asks for a library sends the file each time.
    """

    def __init__(self, command: Sequence[str], *, timeout_s: float) -> None:
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._slot = asyncio.Semaphore(1)
        self._models: OrderedDict[str, str] = OrderedDict()

    def remember(self, sha256: str, digest: str) -> None:
        """The file of that SHA-256 was made into the model of that digest."""
        self._models[sha256] = digest
        if len(self._models) > _REMEMBERED:
            self._models.popitem(last=False)

    def remembered(self, sha256: str) -> str | None:
        """The digest of the model that the file was made into."""
        return self._models.get(sha256)

    async def convert(self, path: Path, format: str, target: Path) -> None:
        """Errors as `Inspector.inspect`, UnsupportedFormat if the libraries for the format are not installed."""
        folder = target.parent
        own = {"HOME": str(folder), "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        environment = {name: os.environ[name] for name in _HARMLESS if name in os.environ} | own
        async with self._slot:
            report = await _report_of(
                [*self._command, format, str(path), str(target)],
                _MODEL.what, "converter", self._timeout_s, folder=folder, environment=environment,
            )  # fmt: skip
        if report.get("ok") is not True:
            raise _error_of(report.get("error"), _MODEL)
        if not target.is_file():
            raise InvalidModel("the model's converter wrote nothing; see the service's log")


async def _report_of(
    command: Sequence[str],
    what: str,
    who: str,
    timeout_s: float,
    *,
    stdin: bytes | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the command answers; a refusal if it dies, says something else or takes too long."""
    # A file: no process that does not read it can block this one, and no argument may be as long.
    with tempfile.TemporaryFile() as given:
        given.write(stdin or b"")
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            cwd=folder,
            env=environment,
        )
    try:
        async with asyncio.timeout(timeout_s):
            assert process.stdout is not None
            output = await _read_all(process.stdout)
            if output is None:
                return _refusal(f"the {what}'s description is longer than {_MAX_OUTPUT_BYTES} bytes")
            code = await process.wait()
    except TimeoutError:
        return _refusal(f"the {what} could not be read within {timeout_s:g} s; simplify it, or split it in parts")
    finally:
        # The whole group, whatever became of its leader: nothing that an upload started outlives the question.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code < 0:
        return _refusal(f"the {what} crashed the {who} (signal {-code}, {_signal_name(-code)}); check the file")
    try:
        report = json.loads(output)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        log.warning("inspector_gave_no_answer", command=command, code=code, output=output[:200])
        return _refusal(f"the {what}'s {who} ended with code {code} and no answer; check the file")
    return report


async def _read_all(stream: asyncio.StreamReader) -> bytes | None:
    """Everything up to the end, or None as soon as it is too much."""
    chunks, size = [], 0
    while chunk := await stream.read(65536):
        size += len(chunk)
        if size > _MAX_OUTPUT_BYTES:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _refusal(message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"message": message}}


def _error_of(error: Any, kind: _Kind) -> TuneryError:
    """The error that the process reports; one that it reports wrongly says that the upload cannot be read."""
    match error:
        case {"type": "UnsupportedOperator", "message": str(message), "operator": str(operator)}:
            opset = error.get("opset")
            return UnsupportedOperator(
                message,
                operator=operator,
                node=str(error.get("node") or ""),
                opset=opset if isinstance(opset, int) else 0,
                field=str(error.get("field") or "model"),
            )
        case {"type": "UnsupportedFormat", "message": str(message), "format": str(format)}:
            return UnsupportedFormat(message, format=format)
        case {"type": "ShapeMismatch", "message": str(message)}:
            return ShapeMismatch(message, field=str(error.get("field") or "inputs"))
        case {"type": "StorageFull", "message": str(message)}:
            return StorageFull(message)
        case {"type": "InvalidRequest", "message": str(message), "field": str(field)}:
            return InvalidRequest(message, field=field)
        case {"type": "UnsupportedOption", "message": str(message)}:
            return UnsupportedOption(message, field=str(error.get("field") or "model"))
        case {"message": str(message)}:
            return kind.invalid(message, **({"field": str(error["field"])} if error.get("field") else {}))
    return kind.invalid(f"the {kind.what}'s parser gave an answer that makes no sense; check the file")
