"""`python -m workers.quantize SPEC.json PARENT`: quantize a model by samples, both untrusted, in a process of its own.

SPEC.json holds ``{"model": path, "inputs": [{"name", "dtype", "shape"}], "calibration": path or null, "recipe":
{"method": "minmax" | "entropy" | "percentile" | null, "per_channel", "exclude", "percentile", "scheme": "int8" |
"fp16"}, "target": path}``. With the method null int8 is dynamic. Writes the quantized model to `target`, whose folder
takes scratch files too, and prints JSON objects, one a line: ``{"progress": sentence}`` now and then, and at last
``{"ok": true, "report": …}``, the report null for int8 without samples, or ``{"ok": false, "error": {"kind",
"message"}}``. Anything else on stdout or another exit status means that the input broke a library.
`workers.quantize.request` starts it and reads what it says.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import onnx
import onnx.version_converter
from onnx import ModelProto

from tuning_db.errors import ImportFailed, InvalidRequest, TuningFailed, kind_of
from tuning_db.keys import Json, TensorSpec
from workers.processes import bound_memory, die_with_parent
from workers.quantize.exclusions import name_nodes
from workers.quantize.halving import halve
from workers.quantize.quantizer import quantize
from workers.quantize.request import Request
from workers.quantize.samples import Samples
from workers.said import last_line

_PER_CHANNEL_OPSET: Final = 13
#: Seconds between two sentences about one step.
_SAID_EVERY_S: Final = 5.0


def _converted(model: ModelProto) -> ModelProto:
    """The model in the first operator set whose DequantizeLinear knows channels. Raises ImportFailed."""
    try:
        return onnx.version_converter.convert_version(model, _PER_CHANNEL_OPSET)
    except Exception as error:  # it raises whatever its converters run into
        raise ImportFailed(
            f"int8 needs operator set {_PER_CHANNEL_OPSET} or a later one, and the model cannot be converted: "
            f"{last_line(error)}; export it with a later one"
        ) from error


class _Steps:
    """Says which step has begun, and while it lasts how far it has come."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._step = ""
        self._samples = 0
        self._said_s = 0.0

    def begin(self, step: str, samples: int) -> None:
        self._step, self._samples = step, samples
        self._say(step)
        self._said_s = time.monotonic()

    def on_sample(self, number: int) -> None:
        if time.monotonic() - self._said_s >= _SAID_EVERY_S:
            self._say(f"{self._step}: sample {number} of {self._samples}")
            self._said_s = time.monotonic()


def normalised(path: Path, inputs: Sequence[TensorSpec], scratch: Path, scheme: str) -> ModelProto:
    """The uploaded model as it is quantized: bound, folded, every node named. Raises InvalidRequest or ImportFailed."""
    from workers.frontend import onnx_import, onnx_model, recurrent, weights

    model = onnx_model.load(path)
    onnx_model.check_operators(model)
    if scheme == "int8" and onnx_model.opset_of(model) < _PER_CHANNEL_OPSET:
        model = _converted(model)
    onnx_model.bind(recurrent.time_first(model), inputs)
    # In one piece, as the quantizer and the report want it.
    model = onnx_import.sum_to_add(weights.take_in(onnx_import.flat(model, scratch), scratch))
    onnx_model.check_operators(model, folded=True)
    name_nodes(model)
    return model


def run(request: Request, say: Callable[[str], None] = lambda _: None) -> Json:
    """The report; for int8 None without samples. Raises InvalidRequest or ImportFailed."""
    from workers.quantize import report

    target = Path(request.target)
    steps = _Steps(say)
    with contextlib.ExitStack() as stack:
        samples, count = None, 0
        if request.calibration is not None:
            # First: what is wrong with the samples' shapes is told before anything is computed.
            samples = stack.enter_context(Samples(Path(request.calibration), request.inputs, steps.on_sample))
            count = len(samples)
        model = normalised(Path(request.model), request.inputs, target.parent, request.recipe.scheme)
        if request.recipe.scheme == "fp16":
            steps.begin("rounding weights to fp16", count)
            halved, weights = halve(model, request.recipe.exclude, target)
            found: dict[str, Json] = {"samples": 0, "outputs": [], "layers": []}
            if samples is not None:
                steps.begin(f"comparing fp16 with fp32 on {count} samples", count)
                found = report.compare(model, halved, samples, target.parent)
            return {**found, "weights": weights}
        by = f", calibrated by {request.recipe.method} on {count} samples" if request.recipe.method else ", dynamic"
        steps.begin(f"int8{by}", count)
        quantized = quantize(model, request.recipe, samples, target)
        if samples is None:
            return None
        steps.begin(f"comparing with fp32 on {count} samples", count)
        return report.compare(model, quantized, samples, target.parent)


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[1]))
    bound_memory()
    # Libraries print what they like; the answer alone goes to stdout.
    with os.fdopen(os.dup(1), "w") as answer, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)

        def tell(document: dict[str, Json]) -> None:
            answer.write(json.dumps(document) + "\n")
            answer.flush()

        try:
            request = Request.from_json(Path(arguments[0]).read_text())
            tell({"ok": True, "report": run(request, lambda sentence: tell({"progress": sentence}))})
        except (InvalidRequest, TuningFailed) as error:
            tell({"ok": False, "error": {"kind": kind_of(error), "message": str(error)}})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
