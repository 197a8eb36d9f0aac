"""`python -m workers.quantize SPEC.json PARENT`: quantize a model by samples, both untrusted, in a process of its own.

SPEC.json holds ``{"model": path, "inputs": [{"name", "dtype", "shape"}], "calibration": path or null, "recipe":
{"method": "minmax" | "entropy" | "percentile" | null, "per_channel", "exclude"}, "target": path}``. With
the method null quantization is dynamic. Writes the quantized model to `target`, whose folder takes scratch files too,
and prints one JSON object: ``{"ok": true, "report": …}``, the report null without samples, or ``{"ok": false, "error":
{"type", "message", "field"}}``. Anything else on stdout or another exit status means that the input broke a library.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from tuning_db.errors import InvalidRequest, TuningFailed
from tuning_db.keys import Json, TensorSpec
from workers.processes import bound_memory, die_with_parent
from workers.quantize.quantizer import Recipe, name_nodes, quantize
from workers.quantize.samples import Samples


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


def run(request: Request) -> Json:
    """The report, or None without samples. Raises InvalidRequest or ImportFailed."""
    from workers.frontend import onnx_import, onnx_model
    from workers.quantize import report

    target = Path(request.target)
    with contextlib.ExitStack() as stack:
        samples = None
        if request.calibration is not None:
            # First: what is wrong with the samples' shapes is told before anything is computed.
            samples = stack.enter_context(Samples(Path(request.calibration), request.inputs))
        model = onnx_model.load(Path(request.model))
        onnx_model.check_operators(model)
        onnx_model.bind(model, request.inputs)
        model = onnx_import.sum_to_add(onnx_import.fold(onnx_import.inline_functions(model), target.parent))
        onnx_model.check_operators(model, folded=True)
        name_nodes(model)
        quantized = quantize(model, request.recipe, samples, target)
        return None if samples is None else report.compare(model, quantized, samples, target.parent)


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[1]))
    bound_memory()
    # Libraries print what they like; the answer alone goes to stdout.
    with os.fdopen(os.dup(1), "w") as answer, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        result: dict[str, Json]
        try:
            result = {"ok": True, "report": run(Request.from_json(Path(arguments[0]).read_text()))}
        except (InvalidRequest, TuningFailed) as error:
            result = {
                "ok": False,
                "error": {
                    "type": type(error).__name__,
                    "message": str(error),
                    "field": error.field if isinstance(error, InvalidRequest) else None,
                },
            }
        json.dump(result, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
