"""What the quantizer's process is asked for, and how a job starts it and takes what it says. Imports no quantizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from tuning_db.errors import InvalidRequest, QuantizationFailed
from tuning_db.keys import CALIBRATION_METHODS, PERCENTILE, Json, QuantizationConfig, TensorSpec
from workers.said import last_line

#: The model that the quantizer has read, normalised and in fp32, beside the one that it writes.
SOURCE: Final = "source.onnx"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides a quantized model, apart from the model and the samples.

    `method` is None for dynamic quantization, which measures ranges while the model runs. For the scheme "fp16", of the
    others `exclude` alone counts.
    """

    method: str | None = "minmax"
    per_channel: bool = True
    exclude: tuple[str, ...] = ()  #: names of nodes that stay fp32
    percentile: float = PERCENTILE  #: of a tensor's values that the method `percentile` keeps in range
    scheme: str = "int8"  #: or "fp16"

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in CALIBRATION_METHODS:
            raise InvalidRequest(
                f"quantization.method {self.method!r} is not one of {', '.join(map(repr, CALIBRATION_METHODS))}",
                field="quantization.method",
            )

    @classmethod
    def of(cls, config: QuantizationConfig) -> Self:
        """The recipe that a key's config, `resolved`, asks for."""
        return cls(
            config.method,
            bool(config.per_channel),
            config.exclude,
            PERCENTILE if config.percentile is None else config.percentile,
            config.scheme,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One quantization: paths, the model's bound inputs, and the recipe."""

    model: str
    inputs: tuple[TensorSpec, ...]
    recipe: Recipe
    target: str
    calibration: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        recipe = Recipe(**{**data["recipe"], "exclude": tuple(data["recipe"]["exclude"])})
        return cls(**{**data, "inputs": tuple(TensorSpec.from_json(i) for i in data["inputs"]), "recipe": recipe})


def quantize_apart(request: Request, scratch: Path, on_progress: Callable[[str], None]) -> dict[str, Json] | None:
    """The report of `workers.quantize` about the model that it has written to ``request.target``; None without samples.

    It ends with this process. Raises QuantizationFailed with the kind of the error that it tells, or for its death.
    """
    spec, log = scratch / "quantization.json", scratch / "quantization.log"
    spec.write_text(request.to_json())
    said: dict[str, Any] = {}
    with log.open("wb") as stderr:
        command = [sys.executable, "-m", "workers.quantize", str(spec), str(os.getpid())]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    said = _document(line)
                    if "progress" in said:
                        on_progress(said["progress"])
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0 or "ok" not in said:
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise QuantizationFailed(
            f"quantizing the model ended with {how}: {last_line(log.read_text(errors='replace'), 'it said nothing')}"
        )
    if not said["ok"]:
        raise QuantizationFailed(said["error"]["message"], kind=said["error"]["kind"])
    report: dict[str, Json] | None = said["report"]
    return report


def _document(line: str) -> dict[str, Any]:
    """What the process says in a line; nothing, if it died while it wrote."""
    try:
        document: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return document
