"""`python -m workers.packaging.reference SPEC.json PARENT`: a fresh process that compares and times libraries.

Reads lines of JSON, a `Comparison` each, and prints a line for each: the numerical check of each library against ONNX
Runtime on the same inputs, and the time of each and of ONNX Runtime, taken in turns so that a busy machine is busy for
all of them.
Libraries for a board run there (`on_board`): the reference is computed here. Those for a GPU run on that (`on_gpu`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.errors import DeviceLost
from tuning_db.keys import Json, TensorSpec, to_json
from workers.frontend.operators import QUANTIZED
from workers.packaging import baselines, gpu_baselines
from workers.packaging.denormals import denormal_mode
from workers.packaging.on_board import OnBoard, run_on_board
from workers.packaging.on_gpu import OnGpu, run_on_gpu
from workers.packaging.running import (
    LibraryRefused,
    Ran,
    load_library,
    load_ranged,
    outputs_of,
    set_threads,
    time_in_turns,
)
from workers.processes import die_with_parent
from workers.quantize.samples import Samples
from workers.said import first_line

#: How far an output may be from the reference, relative to the reference's largest magnitude (or 1, if that is less).
TOLERANCE: Final[Mapping[str, float]] = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-8}
#: The same by how the library's numbers are represented, where that decides. float16 rounds by 2^-12 of a number in the
#: mean: with layers that adds up, with the numbers of a sum it does not. Of `none` and int8 it is `TOLERANCE`.
TOLERANCES: Final[Mapping[str, Mapping[str, float]]] = {"fp16": {**TOLERANCE, "float32": 1e-2}}
#: Of an output whose magnitudes are below 1 that bound may say nothing: there its difference must be below this part
#: of it, in root mean square, besides. Below the second number float32 itself has no more to tell.
SMALL_OUTPUTS: Final = 0.1
_NOTHING: Final = 1e-6
#: How much more noise over fp32 a quantized library may have than ONNX Runtime's run of the same quantized model, in
#: decibels. Where a sum falls between two quanta, its rounding decides, and the quantum goes through all that follows:
#: no bound on single elements holds.
MORE_NOISE_DB: Final = 1.0
#: Where there is no fp32 model to compare with, how far the difference from ONNX Runtime lies below the output itself.
QUANTIZED_SQNR_DB: Final = 30.0
_SEEDS: Final = (0, 1, 2)
#: Of calibration data, so many samples are enough for this.
_SAMPLES: Final = 8


@dataclass(frozen=True, slots=True)
class Rest:
    """How a model that selects boxes is compared as a whole: its parts are compared by themselves, and of the library's
    own boxes and scores ONNX Runtime must select the same. Of its own it may not: a score that differs in the last bit
    changes places with its neighbour, and with it all that follows."""

    model: str  #: path of the selection and what follows it, as ONNX
    head: Sequence[str] | None  #: names of what the libraries' `head` answers; None where they have none


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be compared. `libraries` maps a label to a path; every library has the same inputs and outputs.

    For a model that a job has quantized, `fp32` is the path of what it was made of, and `calibration` that of the
    user's samples, which are then what is compared on.
    """

    reference: str  #: path of the ONNX model with bound shapes
    libraries: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    threads: int
    rounds: int = 12
    min_sample_s: float = 0.02
    fp32: str | None = None
    calibration: str | None = None
    board: OnBoard | None = None  #: where the libraries run, if that is not this machine
    gpu: OnGpu | None = None  #: or if that is a GPU of it
    scheme: str = "none"  #: how the libraries' numbers are represented
    function: str = "main"  #: of the libraries, the one that is compared
    #: A manifest's `range`: then the libraries are run by it, whatever functions that takes.
    range: Mapping[str, Json] | None = None
    without: str | None = None  #: why no engine but ONNX Runtime is to be timed beside the libraries
    rest: Rest | None = None  #: of a model that selects boxes

    @property
    def head(self) -> str | None:
        """The function of the libraries that computes what a selection needs, if there is one."""
        return "head" if self.rest is not None and self.rest.head is not None else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        data = json.loads(text)
        inputs = tuple(TensorSpec.from_json(i) for i in data["inputs"])
        board = None if data["board"] is None else OnBoard(**data["board"])
        gpu = None if data["gpu"] is None else OnGpu(**data["gpu"])
        rest = None if data["rest"] is None else Rest(**data["rest"])
        return cls(**{**data, "inputs": inputs, "board": board, "gpu": gpu, "rest": rest})


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


def compare(
    wanted: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]], names: Sequence[str], scheme: str = "none"
) -> list[dict[str, Json]]:
    """One entry an output: its largest difference and whether that is allowed by the scheme.

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
        difference, largest = float(np.abs(x - y).max(initial=0.0)), float(np.abs(x).max(initial=0.0))
        allowed = TOLERANCES.get(scheme, TOLERANCE)[str(a.dtype)] * max(1.0, largest)
        entry |= {"ok": difference <= allowed, "tolerance": allowed, "max_abs_diff": difference}
        if difference > allowed:
            entry["problem"] = f"differs by {difference:.3g}, {allowed:.3g} is allowed"
        elif _NOTHING < largest < 1 and (part := np.linalg.norm(x - y) / np.linalg.norm(x)) > SMALL_OUTPUTS:
            entry["ok"] = False
            entry["problem"] = (
                f"its values, of {largest:.3g} at most, differ by {part:.0%}, {SMALL_OUTPUTS:.0%} is allowed"
            )
    return entries


def forgive_rounding(
    entries: Sequence[Sequence[dict[str, Json]]],
    wanted: Sequence[Sequence[NDArray[Any]]],
    got: Sequence[Sequence[NDArray[Any]]],
    fp32: Sequence[Sequence[NDArray[Any]]] | None,
) -> list[dict[str, Json]]:
    """Let a quantized library differ where rounding decides: its entries become ok if the noise of an output, over all
    samples, is no more than that of ONNX Runtime's run and `MORE_NOISE_DB`, against `fp32`; or if it is
    `QUANTIZED_SQNR_DB` below the output where `fp32` is None.

    One entry a sample of one an output in `entries`, as `compare` makes them; one array an output in the others. Gives
    ``{"output", "sqnr_db", "reference_sqnr_db"}`` for each output of floats or bytes; None is a ratio without noise.
    """
    told: list[dict[str, Json]] = []
    for index, entry in enumerate(entries[0]):
        of_output = [sample[index] for sample in entries]
        kind = wanted[0][index].dtype
        if any(e["max_abs_diff"] is None for e in of_output) or not (kind.kind == "f" or kind in ("int8", "uint8")):
            continue  # it differs in more than rounding, or in numbers that are no measurements
        exact = [sample[index] for sample in (wanted if fp32 is None else fp32)]
        signal, noise = _energies(exact, [sample[index] for sample in got])
        _, reference_noise = _energies(exact, [sample[index] for sample in wanted])
        if fp32 is None:
            allowed = signal / 10 ** (QUANTIZED_SQNR_DB / 10)
        else:
            allowed = reference_noise * 10 ** (MORE_NOISE_DB / 10)
            told.append(
                {
                    "output": entry["output"],
                    "sqnr_db": _decibels(signal, noise),
                    "reference_sqnr_db": _decibels(signal, reference_noise),
                }
            )
        for e in of_output:
            if not e["ok"] and noise <= allowed:
                e["ok"] = True
                del e["problem"]
            elif not e["ok"] and allowed:
                above_db = 10 * math.log10(noise / allowed)
                e["problem"] = f"{e['problem']}; its noise is {above_db:.1f} dB above what quantization allows"
    return told


def _energies(x: Sequence[NDArray[Any]], y: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Σ x² and Σ (x − y)², where both are finite."""
    signal = noise = 0.0
    for one, other in zip(x, y, strict=True):
        a, b = one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        signal += float(np.square(a[finite]).sum())
        noise += float(np.square(a[finite] - b[finite]).sum())
    return signal, noise


def _decibels(signal: float, noise: float) -> float | None:
    return 10 * math.log10(max(signal, noise * 1e-10) / noise) if noise else None


def run(comparison: Comparison) -> dict[str, Json]:
    """The verdict: `checks`, `samples_s` and `parts_s` by label, and what is told of `engines`; or `refused`, what ONNX
    Runtime says of the model; or `failed`, what became of a library on a board or GPU; or `lost`, why none could be
    asked."""
    set_threads(comparison.threads)
    # How often TVM's idle threads look for work before they sleep. By itself it is ten times as often: a fifth of a
    # second, waited for before each sample of an engine. What is left spans the pauses within and between inferences.
    os.environ["TVM_THREAD_POOL_SPIN_COUNT"] = "30000"
    import onnxruntime

    options, operators = onnxruntime.SessionOptions(), _operators(comparison.reference)
    options.intra_op_num_threads = comparison.threads if comparison.board is None else 0
    if "DynamicQuantizeLSTM" in operators:
        # Its threads share out the batch, and each quantizes its part by a scale of its own.
        options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # The graph as it is written: the optimiser changes numbers, of dequantised weights by as much as a quantum.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Its idle threads would otherwise spin on the cores that the next one in turn is measured on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(comparison.reference, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for integers in INTEGER_RANGES:
        examples = _examples(comparison, integers)
        try:
            references = [session.run(None, example) for example in examples]
        except Exception as error:  # ONNX Runtime raises classes of its own, which it does not export
            refused = first_line(error)
        else:
            break
    else:
        return {"refused": refused}
    exact = None
    if comparison.fp32 is not None:
        fp32 = onnxruntime.InferenceSession(comparison.fp32, options, providers=["CPUExecutionProvider"])
        exact = [fp32.run(names, example) for example in examples]
    quantized = exact is not None or bool(operators & QUANTIZED)
    try:
        ran = _run(comparison, examples)
    except LibraryRefused as error:
        return {"failed": str(error)}
    except DeviceLost as error:
        return {"lost": str(error)}
    checks: dict[str, dict[str, Json]] = {}
    rest = None if comparison.rest is None else _Rest(comparison.rest, names, options)
    for label, answers in ran.outputs.items():
        if rest is not None:
            heads = ran.heads.get(label) or [[]] * len(examples)
            references = list(map(rest.answers, examples, heads))
        entries = [compare(*pair, names, comparison.scheme) for pair in zip(references, answers, strict=True)]
        told = forgive_rounding(entries, references, answers, exact) if quantized else None
        checks[label] = _worst([entry for sample in entries for entry in sample], len(examples), comparison.scheme)
        if told:
            checks[label]["quantized"] = to_json(told)
    return {
        "checks": to_json(checks),
        "samples_s": to_json(ran.samples_s),
        "parts_s": to_json(ran.parts_s),
        "engines": to_json(ran.engines),
    }


class _Rest:
    """What ONNX Runtime makes of what a library computed before its selection."""

    def __init__(self, rest: Rest, names: Sequence[str], options: Any) -> None:
        import onnxruntime

        self._head = rest.head or ()
        self._names = names
        self._session = onnxruntime.InferenceSession(rest.model, options, providers=["CPUExecutionProvider"])

    def answers(self, example: Mapping[str, NDArray[Any]], head: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """The model's outputs, where `head` is what the first part answered."""
        known = {**example, **dict(zip(self._head, head, strict=True))}
        taken = {port.name: known[port.name] for port in self._session.get_inputs()}
        results = self._session.run(None, taken)
        known |= zip([port.name for port in self._session.get_outputs()], results, strict=True)
        return [known[name] for name in self._names]


def _run(comparison: Comparison, examples: Sequence[Mapping[str, NDArray[Any]]]) -> Ran:
    """Where the libraries are for."""
    if comparison.gpu is not None:
        return _run_on_gpu(comparison, comparison.gpu, examples)
    return _run_here(comparison, examples) if comparison.board is None else _run_on_board(comparison, examples)


def _run_here(comparison: Comparison, examples: Sequence[Mapping[str, NDArray[Any]]]) -> Ran:
    """In this process, with the engines that the libraries are measured against."""
    import tvm

    outputs: dict[str, list[list[NDArray[Any]]]] = {}
    heads: dict[str, list[list[NDArray[Any]]]] = {}
    callers: dict[str, Callable[[], object]] = {}
    mode = denormal_mode()
    for label, path in comparison.libraries.items():
        arrays = [[example[spec.name] for spec in comparison.inputs] for example in examples]
        if comparison.range is not None:
            ranged = load_ranged(path, comparison.range, [spec.name for spec in comparison.inputs])
            outputs[label] = [ranged(each) for each in arrays]
            callers[label] = partial(ranged, arrays[0])
        else:
            function = load_library(path, function=comparison.function)
            arguments = [list(map(tvm.runtime.tensor, each)) for each in arrays]
            outputs[label] = [outputs_of(function(*each)) for each in arguments]
            if comparison.head is not None:
                head = load_library(path, function=comparison.head)
                heads[label] = [outputs_of(head(*each)) for each in arguments]
            callers[label] = partial(function, *arguments[0])
        if denormal_mode() != mode:
            raise LibraryRefused(f"the {label} library changes how the process that loads it treats denormal numbers")
    model = Path(comparison.reference)
    engines = baselines.on_cpu(model, examples[0], comparison.threads, comparison.without)
    samples = time_in_turns(
        {**engines.calls, **callers}, comparison.rounds, comparison.min_sample_s, rested=list(engines.calls)
    )
    return Ran(outputs, engines.timed(samples), engines=engines.told, heads=heads)


def _run_on_gpu(comparison: Comparison, gpu: OnGpu, examples: Sequence[Mapping[str, NDArray[Any]]]) -> Ran:
    arrays = [[example[spec.name] for spec in comparison.inputs] for example in examples]

    def engines() -> baselines.Engines:
        model, half = Path(comparison.reference), comparison.scheme == "fp16"
        return gpu_baselines.on_gpu(model, examples[0], comparison.threads, half=half, without=comparison.without)

    return run_on_gpu(gpu, comparison.libraries, arrays, comparison.rounds, comparison.min_sample_s, engines)


def _run_on_board(comparison: Comparison, examples: Sequence[Mapping[str, NDArray[Any]]]) -> Ran:
    assert comparison.board is not None
    arrays = [[example[spec.name] for spec in comparison.inputs] for example in examples]
    return run_on_board(
        comparison.board, comparison.libraries, arrays, comparison.threads, comparison.rounds, comparison.min_sample_s,
        comparison.function, comparison.head,
    )  # fmt: skip


def _examples(comparison: Comparison, integers: tuple[int, int]) -> list[dict[str, NDArray[Any]]]:
    if comparison.calibration is None:
        return [example_inputs(comparison.inputs, seed, integers) for seed in _SEEDS]
    with Samples(Path(comparison.calibration), comparison.inputs) as samples:
        return list(itertools.islice(samples, _SAMPLES))


def _operators(model: str) -> set[str]:
    import onnx

    return {node.op_type for node in onnx.load(model, load_external_data=False).graph.node}


def _worst(entries: Sequence[dict[str, Json]], samples: int, scheme: str) -> dict[str, Json]:
    """The entries of all samples as one verdict."""
    bad = [entry for entry in entries if not entry["ok"]]
    differences = [float(str(entry["max_abs_diff"])) for entry in entries if entry["max_abs_diff"] is not None]
    return {
        "ok": not bad,
        "samples": samples,
        "max_abs_diff": max(differences) if differences else None,
        "problem": f"output {bad[0]['output']!r}: {bad[0]['problem']}" if bad else None,
        # Of these only the places of NaN and infinities were compared: there was nothing else in them.
        "outputs_without_finite_values": to_json(
            sorted({str(e["output"]) for e in entries} - {str(e["output"]) for e in entries if e.get("finite") != 0})
        ),
        "tolerance": dict(TOLERANCES.get(scheme, TOLERANCE)),
    }


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[1]))
    comparisons = [Comparison.from_json(line) for line in Path(arguments[0]).read_text().splitlines()]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for comparison in comparisons:
        print(json.dumps(run(comparison)), file=answer)
    answer.close()
    if any(comparison.board is not None for comparison in comparisons):
        # TVM's clients wait for their sessions when they are collected.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
