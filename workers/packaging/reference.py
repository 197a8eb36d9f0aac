"""`python -m workers.packaging.reference SPEC.json PARENT`: a fresh process that compares and times libraries.

Reads a `Comparison` as JSON, prints one JSON object: the numerical check of each library against ONNX Runtime on the
same inputs, and the time of each and of ONNX Runtime, taken in turns so that a busy machine is busy for all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.keys import Json, TensorSpec, to_json
from workers.packaging import baselines
from workers.processes import die_with_parent
from workers.said import first_line

#: How far an output may be from the reference, relative to the reference's largest magnitude (or 1, if that is less).
TOLERANCE: Final[Mapping[str, float]] = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-8}
_SEEDS: Final = (0, 1, 2)
#: Seconds that are spent on timing one library, once there are this many samples.
_ENOUGH_S: Final = 8.0
_FEWEST: Final = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be compared. `libraries` maps a label to a path; every library has the same inputs and outputs."""

    reference: str  #: path of the ONNX model with bound shapes
    libraries: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    threads: int
    rounds: int = 12
    min_sample_s: float = 0.02

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        data = json.loads(text)
        return cls(**{**data, "inputs": tuple(TensorSpec.from_json(i) for i in data["inputs"])})


#: What integer inputs are drawn from, half open, in the order tried: a model may divide by one or index a short axis.
INTEGER_RANGES: Final = ((1, 3), (1, 2), (0, 1))


def example_inputs(
    inputs: Sequence[TensorSpec], seed: int, integers: tuple[int, int] = INTEGER_RANGES[0]
) -> dict[str, NDArray[Any]]:
    """Standard normal floats and small integers."""
    generator = np.random.default_rng(seed)
    examples: dict[str, NDArray[Any]] = {}
    for spec in inputs:
        if spec.dtype.startswith("float"):
            examples[spec.name] = np.asarray(generator.standard_normal(spec.shape)).astype(spec.dtype)
        elif spec.dtype == "bool":
            examples[spec.name] = np.asarray(generator.integers(0, 2, spec.shape)).astype(bool)
        else:
            examples[spec.name] = np.asarray(generator.integers(*integers, spec.shape)).astype(spec.dtype)
    return examples


def compare(wanted: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]], names: Sequence[str]) -> list[dict[str, Json]]:
    """One entry an output: its largest difference and whether that is allowed.

    Dtypes and shapes must be equal, NaN must stand where NaN stands, infinities must have the same sign, and integers
    and booleans must be equal.
    """
    entries: list[dict[str, Json]] = []
    for name, a, b in zip(names, wanted, got, strict=True):
        entry: dict[str, Json] = {"output": name, "dtype": str(a.dtype), "max_abs_diff": None, "ok": False}
        entries.append(entry)
        if a.dtype != b.dtype or a.shape != b.shape:
            entry["problem"] = f"reference is {a.dtype}{list(a.shape)}, library is {b.dtype}{list(b.shape)}"
            continue
        if a.dtype.kind != "f":
            wrong = int(np.count_nonzero(a != b))
            entry |= {"ok": wrong == 0, "tolerance": 0.0, "max_abs_diff": float(wrong > 0)}
            if wrong:
                entry["problem"] = f"{wrong} of {a.size} elements differ"
            continue
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            entry["problem"] = "NaN does not stand in the same places"
            continue
        if not np.array_equal(np.where(np.isinf(a), a, 0), np.where(np.isinf(b), b, 0)):
            entry["problem"] = "infinities do not stand in the same places"
            continue
        finite = np.isfinite(a)
        entry["finite"] = int(np.count_nonzero(finite))
        x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
        difference = float(np.abs(x - y).max(initial=0.0))
        allowed = TOLERANCE[str(a.dtype)] * max(1.0, float(np.abs(x).max(initial=0.0)))
        entry |= {"ok": difference <= allowed, "tolerance": allowed, "max_abs_diff": difference}
        if difference > allowed:
            entry["problem"] = f"differs by {difference:.3g}, {allowed:.3g} is allowed"
    return entries


def run(comparison: Comparison) -> dict[str, Json]:
    # Read when TVM starts its threads. Without it TVM takes OpenMP's number, or half of the cores, and would be timed
    # on fewer cores than ONNX Runtime.
    os.environ["TVM_NUM_THREADS"] = str(comparison.threads)
    # Bound to cores, TVM's threads would wait for whatever else runs there; ONNX Runtime's are not bound either.
    os.environ["TVM_BIND_THREADS"] = "0"
    import onnxruntime
    import tvm
    from tvm import relax

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = comparison.threads
    options.log_severity_level = 4
    # The graph as it is written: the optimiser changes numbers, of dequantised weights by as much as a quantum.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Its idle threads would otherwise spin on the cores that the next one in turn is measured on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(comparison.reference, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for integers in INTEGER_RANGES:
        examples = [example_inputs(comparison.inputs, seed, integers) for seed in _SEEDS]
        try:
            references = [session.run(None, example) for example in examples]
        except Exception as error:  # ONNX Runtime raises classes of its own, which it does not export
            refused = first_line(error)
        else:
            break
    else:
        return {"refused": refused}
    checks: dict[str, Json] = {}
    timed = baselines.baseline("onnxruntime", Path(comparison.reference), examples[0], comparison.threads)
    callers: dict[str, Callable[[], object]] = {"onnxruntime": timed}
    for label, path in comparison.libraries.items():
        machine = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
        entries: list[dict[str, Json]] = []
        for example, reference in zip(examples, references, strict=True):
            arguments = [tvm.runtime.tensor(example[spec.name]) for spec in comparison.inputs]
            result = machine["main"](*arguments)
            outputs = [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]
            entries += compare(reference, outputs, names)
        checks[label] = _worst(entries)
        fixed = [tvm.runtime.tensor(examples[0][spec.name]) for spec in comparison.inputs]
        callers[label] = partial(machine["main"], *fixed)
    if baselines.available()["openvino"] is not None:
        try:
            callers["openvino"] = baselines.baseline(
                "openvino", Path(comparison.reference), examples[0], comparison.threads
            )
        except Exception as error:  # it refuses models that ONNX Runtime takes: then there is nothing to tell
            print(f"OpenVINO cannot run the model: {error}", file=sys.stderr)
    samples = time_in_turns(callers, comparison.rounds, comparison.min_sample_s, rested=baselines.ENGINES)
    return {"checks": checks, "samples_s": {label: list(taken) for label, taken in samples.items()}}


def time_in_turns(
    callers: Mapping[str, Callable[[], object]],
    rounds: int,
    min_sample_s: float,
    *,
    rested: Collection[str] = (),
) -> dict[str, list[float]]:
    """Seconds of one call of each, `rounds` samples, each sample long enough to be measured, all taking turns.

    Those `rested` begin when the threads of whoever was before them have gone to sleep. Who has taken `_ENOUGH_S` sits
    out the later rounds: a model that takes seconds before it is tuned would keep the others waiting.
    """
    counts = {}
    for label, call in callers.items():
        call()
        start_s = time.perf_counter()
        call()
        counts[label] = max(1, int(min_sample_s / max(time.perf_counter() - start_s, 1e-7)))
    samples: dict[str, list[float]] = {label: [] for label in callers}
    for _ in range(rounds):
        for label, call in callers.items():
            if len(samples[label]) >= _FEWEST and sum(samples[label]) * counts[label] > _ENOUGH_S:
                continue
            if label in rested:
                wait_until_idle()
            start_s = time.perf_counter()
            for _ in range(counts[label]):
                call()
            samples[label].append((time.perf_counter() - start_s) / counts[label])
    return samples


def wait_until_idle(timeout_s: float = 1.0) -> None:
    """Sleep until the threads of this process are asleep too: TVM's look for work for a fifth of a second after each
    inference, and would take a core from whoever is measured next."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        before_s = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before_s < 0.002:
            return


def _worst(entries: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """The entries of all seeds as one verdict."""
    bad = [entry for entry in entries if not entry["ok"]]
    differences = [float(str(entry["max_abs_diff"])) for entry in entries if entry["max_abs_diff"] is not None]
    return {
        "ok": not bad,
        "samples": len(_SEEDS),
        "max_abs_diff": max(differences) if differences else None,
        "problem": f"output {bad[0]['output']!r}: {bad[0]['problem']}" if bad else None,
        # Of these only the places of NaN and infinities were compared: there was nothing else in them.
        "outputs_without_finite_values": to_json(
            sorted({str(e["output"]) for e in entries} - {str(e["output"]) for e in entries if e.get("finite") != 0})
        ),
        "tolerance": dict(TOLERANCE),
    }


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[1]))
    comparison = Comparison.from_json(Path(arguments[0]).read_text())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(run(comparison), answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
