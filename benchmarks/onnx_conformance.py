"""Runs the operator tests of the ONNX standard through import, pipeline and untuned build, and says what came of each.

    python benchmarks/onnx_conformance.py                    all cases; writes docs/conformance.md
    python benchmarks/onnx_conformance.py --only test_lstm   those whose name holds the text; writes nothing

Inputs that real exporters write as constants (shapes, axes, pads, weights, scales, …) are made initializers first. Each
case runs in a process of its own, forked from one that has imported TVM, and is ended at its deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

#: Verdicts, the best first. `refused` is an error of ours before anything is built, which names the operator or input.
PASS, REFUSED, WRONG, CRASHED, FAILED, TIMEOUT = "pass", "refused", "wrong", "crashed", "failed at run time", "timeout"
VERDICTS: Final = (PASS, REFUSED, WRONG, CRASHED, FAILED, TIMEOUT)

#: Inputs that exporters write as constants, by their names in the operators' schemas.
_CONSTANT: Final = frozenset(
    """
    shape axes axis pads scales sizes roi split starts ends steps depth k K repeats ratio training_mode
    constant_value max_output_boxes_per_class iou_threshold score_threshold min max start limit delta
    output_shape image_shape block_shape dft_length frame_step frame_length size num_mel_bins sample_rate
    lower_edge_hertz upper_edge_hertz M y_scale y_zero_point x_scale x_zero_point a_scale a_zero_point b_scale
    b_zero_point w_scale w_zero_point W R P B b w mean var input_mean input_var scale bias Scale Bias values
    window slope sequence_lens
    """.split()  # noqa: SIM905 - a list of names reads worse
)
#: Where one of these names means data: `B` of a matrix product, `max` of nothing, `scale` of a mean, ….
_DATA: Final = {
    "MatMul": "B", "Add": "B", "Sub": "B", "Mul": "B", "Div": "B", "And": "B", "Or": "B", "Xor": "B", "Equal": "B",
    "Greater": "B", "Less": "B", "GreaterOrEqual": "B", "LessOrEqual": "B", "Mod": "B", "BitwiseAnd": "B",
    "BitwiseOr": "B", "BitwiseXor": "B", "Gemm": "", "Adagrad": "*", "Adam": "*", "Momentum": "*", "STFT": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One test: a model, and what it must answer."""

    name: str
    model: bytes
    data: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]  #: inputs and outputs in the graph's order
    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    operators: tuple[str, ...]
    verdict: str
    detail: str  #: of a refusal "Class: message"
    refused_operator: str | None
    runtime_passes: bool  #: whether ONNX Runtime does
    seconds: float


def load_cases() -> list[Case]:
    """Every case of the kinds "node" and "simple"."""
    with warnings.catch_warnings(), np.errstate(all="ignore"), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        tests = [*load_model_tests(kind="node"), *load_model_tests(kind="simple")]
    cases = []
    for test in tests:
        if test.model is not None:
            model, sets = test.model, test.data_sets or []
        else:
            folder = Path(test.model_dir)
            model = onnx.load(folder / "model.onnx")
            sets = [
                (_stored(found, "input", model.graph.input), _stored(found, "output", model.graph.output))
                for found in sorted(folder.glob("test_data_set_*"))
            ]
        data = tuple((tuple(map(_plain, inputs)), tuple(map(_plain, outputs))) for inputs, outputs in sets)
        cases.append(Case(test.name, model.SerializeToString(), data, test.rtol, test.atol))
    return cases


def _stored(folder: Path, kind: str, ports: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    values = []
    for index, port in enumerate(ports):
        path = folder / f"{kind}_{index}.pb"
        if not path.exists():
            continue
        raw = path.read_bytes()
        is_tensor = port.type.WhichOneof("value") == "tensor_type"
        values.append(numpy_helper.to_array(TensorProto.FromString(raw)) if is_tensor else None)
    return values


def _plain(value: Any) -> Any:
    """Arrays as they are, whatever else (sequences, maps, absent optionals) as None: such inputs are refused anyway."""
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic) else None


def with_constants(case: Case) -> tuple[ModelProto, list[tuple[dict[str, Any], tuple[Any, ...]]]]:
    """The model with constant-like inputs as initializers, and its data without them."""
    model = ModelProto.FromString(case.model)
    names = [value.name for value in model.graph.input]
    constant = set()
    for node in model.graph.node:
        try:
            schema = onnx.defs.get_schema(node.op_type, _opset(model, node.domain), node.domain)
        except onnx.defs.SchemaError:
            continue
        data = _DATA.get(node.op_type)
        for index, name in enumerate(node.input):
            formal = schema.inputs[min(index, len(schema.inputs) - 1)].name
            if name in names and formal in _CONSTANT and index > 0 and data not in ("*", formal):
                constant.add(name)
            if name in names and node.op_type in ("If", "Range", "ConstantOfShape") and name:
                constant.add(name)
            if name in names and node.op_type == "Loop" and index < 2:
                constant.add(name)
    produced = {name for node in model.graph.node for name in node.output}
    first = case.data[0][0]
    values = dict(zip(names, first, strict=False))
    constant = {name for name in constant - produced if values.get(name) is not None}
    if constant >= set(names):
        constant = set()
    kept = [value for value in model.graph.input if value.name not in constant]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name in sorted(constant):
        model.graph.initializer.append(numpy_helper.from_array(values[name], name))
    sets = [
        ({n: v for n, v in zip(names, inputs, strict=False) if n not in constant}, outputs)
        for inputs, outputs in case.data
    ]
    return model, sets


def _opset(model: ModelProto, domain: str) -> int:
    return next((int(e.version) for e in model.opset_import if e.domain in (domain, domain or "ai.onnx")), 1)


# --- In the process of one case ---------------------------------------------------------------------------------------


def differs(wanted: Sequence[Any], got: Sequence[Any], rtol: float, atol: float) -> str | None:
    """What is wrong, or None. Types and shapes must be equal; numbers as near as the case asks, NaN equal to NaN."""
    if len(wanted) != len(got):
        return f"{len(got)} outputs instead of {len(wanted)}"
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {index} is {b.dtype}{list(b.shape)}, wanted {a.dtype}{list(a.shape)}"
        if a.dtype.kind in "OUS":
            close = np.array_equal(a.astype(str), b.astype(str))
        else:
            with np.errstate(all="ignore"):
                close = bool(np.isclose(b.astype(np.float64), a.astype(np.float64), rtol, atol, equal_nan=True).all())
        if not close:
            return f"output {index} ({a.dtype}{list(a.shape)}) differs"
    return None


def runtime_passes(case: Case) -> bool:
    """Whether ONNX Runtime runs the case as it came and answers right."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(case.model, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        for inputs, outputs in case.data:
            if any(value is None for value in (*inputs, *outputs)):
                return False
            got = session.run(None, dict(zip(names, inputs, strict=False)))
            if differs(outputs, got, case.rtol, case.atol) is not None:
                return False
    except Exception:  # classes of its own, which it does not export
        return False
    return True


def attempt(case: Case, target_json: str) -> dict[str, Any]:
    """Import, build and run one case as a job does, untuned."""
    import tvm
    from tvm import relax

    from tuning_db.errors import InvalidRequest, TuneryError, TuningFailed, UnsupportedOperator
    from tuning_db.keys import TensorSpec
    from workers.frontend import onnx_model
    from workers.frontend.onnx_import import import_parts
    from workers.graph import pipeline
    from workers.graph.memory import PlaceIntermediates
    from workers.graph.selected import joined
    from workers.packaging.library import merge
    from workers.said import last_line

    def answer(verdict: str, detail: str = "", operator: str | None = None) -> dict[str, Any]:
        return {"verdict": verdict, "detail": detail[:300], "refused_operator": operator}

    model, sets = with_constants(case)
    target = tvm.target.Target(json.loads(target_json))
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        try:
            ports = onnx_model.inputs_of(onnx_model.load(path))
            feeds = sets[0][0]
            specs = [TensorSpec(port.name, port.dtype, tuple(feeds[port.name].shape)) for port in ports]
            parts = import_parts(path, specs, Path(folder))
        except UnsupportedOperator as error:
            return answer(REFUSED, f"UnsupportedOperator: {error}", error.operator)
        except (InvalidRequest, TuningFailed, TuneryError) as error:
            return answer(REFUSED, f"{type(error).__name__}: {error}")
        except Exception as error:
            return answer(FAILED, f"import: {type(error).__name__}: {last_line(error)[:250]}")
    try:
        with target, pipeline.pass_context():
            functions = parts.functions.items()
            lowered = merge(
                {name: pipeline.lower_operators()(pipeline.simplify()(part.module)) for name, part in functions}
            )
            if parts.selected is not None:
                lowered = joined(lowered, parts.functions, parts.selected)
            executable = relax.build(lowered, target, relax_pipeline=pipeline.lower_to_vm(PlaceIntermediates()))
        machine = relax.VirtualMachine(executable, tvm.cpu())
    except Exception as error:
        return answer(FAILED, f"build: {type(error).__name__}: {last_line(error)[:250]}")
    for inputs, outputs in sets:
        try:
            result = machine["main"](*(tvm.runtime.tensor(inputs[port.name]) for port in ports))
            got = [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]
        except Exception as error:
            return answer(FAILED, f"run: {type(error).__name__}: {last_line(error)[:250]}")
        wrong = differs(outputs, got, case.rtol, case.atol)
        if wrong is not None:
            return answer(WRONG, wrong)
    return answer(PASS)


def _run_one(case: Case, target_json: str, with_runtime: bool, answers: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ["TVM_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    if with_runtime:
        answers.send(runtime_passes(case))
    answers.send(attempt(case, target_json))


# --- In the process that the user started -----------------------------------------------------------------------------


def run_cases(
    cases: Sequence[Case], *, deadline_s: float = 120.0, parallel: int = 2, with_runtime: bool = True,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:  # fmt: skip
    """The result of each case, in the order given, `parallel` processes at a time."""
    from workers.devices import local_cpu

    target_json = local_cpu.probe()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.frontend.onnx_import", "workers.graph.pipeline", __name__])
    waiting = list(enumerate(cases))[::-1]
    running: dict[Any, tuple[int, Case, Any, float]] = {}
    results: dict[int, Result] = {}
    said: dict[int, list[Any]] = {}
    while waiting or running:
        while waiting and len(running) < parallel:
            index, case = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_run_one, args=(case, target_json, with_runtime, send))
            process.start()
            send.close()
            running[receive] = (index, case, process, time.monotonic())
            said[index] = []
        ready = wait(list(running), timeout=1.0)
        for receive in list(running):
            index, case, process, started_s = running[receive]
            late = time.monotonic() - started_s > deadline_s
            ended = False
            if receive in ready:
                try:
                    said[index].append(receive.recv())
                except EOFError:
                    ended = True
            if not ended and not late:
                continue
            if late:
                process.kill()
            process.join()
            receive.close()
            del running[receive]
            results[index] = _result(case, said[index], late and not ended, process.exitcode, with_runtime,
                                     time.monotonic() - started_s)  # fmt: skip
            on_result(results[index])
    return [results[index] for index in range(len(cases))]


def _result(case: Case, said: list[Any], late: bool, status: int | None, with_runtime: bool, seconds: float) -> Result:
    model = ModelProto.FromString(case.model)
    operators = tuple(dict.fromkeys(node.op_type for node in model.graph.node))
    passes = bool(with_runtime and said and said[0] is True)
    answer = said[-1] if said and isinstance(said[-1], dict) else None
    if answer is None:
        answer = {
            "verdict": TIMEOUT if late else CRASHED,
            "detail": "" if late else f"the process ended with {status}",
            "refused_operator": None,
        }
    return Result(case.name, operators, runtime_passes=passes, seconds=seconds, **answer)


def table(results: Sequence[Result]) -> str:
    """docs/conformance.md."""
    verdicts = Counter(result.verdict for result in results)
    theirs = [result for result in results if result.runtime_passes]
    both = sum(result.verdict == PASS for result in theirs)
    lines = [
        "# ONNX conformance",
        "",
        f"The operator tests of the ONNX standard (onnx {onnx.__version__}, `onnx.backend.test`, node and simple)",
        "through import, graph pipeline and an untuned build, compared with the stored outputs at each case's own",
        "tolerance. Inputs that exporters write as constants are initializers. Written by",
        "`python benchmarks/onnx_conformance.py`.",
        "",
        "| verdict | cases |",
        "|---|---:|",
        *(f"| {verdict} | {verdicts[verdict]} |" for verdict in VERDICTS),
        f"| all | {len(results)} |",
        "",
        f"ONNX Runtime passes {len(theirs)} of them as they come; of these {both} pass here "
        f"({100 * both / max(1, len(theirs)):.1f} %).",
        "",
        "Refused means by an error before anything is built, which names the operator, or the input that is no tensor.",
        "",
    ]
    for verdict in (WRONG, CRASHED, FAILED, TIMEOUT):
        names = [f"`{result.name}` ({result.detail})" for result in results if result.verdict == verdict]
        if names:
            lines += [f"## {verdict.capitalize()}", "", *(f"- {name}" for name in names), ""]
    lines += ["## By operator", "", "| operator | cases | pass | refused | why |", "|---|---:|---:|---:|---|"]
    grouped: dict[str, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.operators[-1] if "sequence" in result.name else result.operators[0], []).append(
            result
        )
    for name in sorted(grouped):
        of_operator = grouped[name]
        refused = [result for result in of_operator if result.verdict == REFUSED]
        reasons = Counter(_reason(result) for result in refused)
        passed = sum(result.verdict == PASS for result in of_operator)
        why = "; ".join(reason for reason, _ in reasons.most_common(2))
        lines.append(f"| {name} | {len(of_operator)} | {passed} | {len(refused)} | {why} |")
    return "\n".join(lines) + "\n"


def _subject(result: Result) -> str:
    """The operator that a case is about: of a model in which it is written as others, the one in its name."""
    plain = result.name.replace("_", "").lower()
    return max((o for o in result.operators if o.lower() in plain), key=len, default=result.operators[0])


def _reason(result: Result) -> str:
    """The refusal in a few words, the same for cases refused for the same reason."""
    text = result.detail.split(": ", 1)[-1].split(";")[0]
    for quoted in ("'", '"'):
        parts = text.split(quoted)
        text = quoted.join(part if index % 2 == 0 else "…" for index, part in enumerate(parts))
    return text.replace("|", "\\|").replace("\n", " ")[:110]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose names hold this text, and write no table")
    parser.add_argument("--json", type=Path, help="write every result there too, one JSON object a line")
    parser.add_argument("--deadline-s", type=float, default=120.0)
    options = parser.parse_args(arguments)
    cases = [case for case in load_cases() if options.only in case.name]
    done = Counter[str]()

    def tell(result: Result) -> None:
        done[result.verdict] += 1
        if result.verdict not in (PASS, REFUSED) or options.only:
            print(f"{result.verdict:>20}  {result.name}: {result.detail}", flush=True)
        if done.total() % 100 == 0:
            print(f"{done.total()} of {len(cases)}: {dict(done)}", flush=True)

    results = run_cases(cases, deadline_s=options.deadline_s, on_result=tell)
    if options.json:
        options.json.write_text("".join(json.dumps(_as_json(result)) + "\n" for result in results))
    if not options.only:
        Path(__file__).parents[1].joinpath("docs/conformance.md").write_text(table(results))
    print(dict(done))
    return 0


def _as_json(result: Result) -> Mapping[str, Any]:
    return {field: getattr(result, field) for field in result.__dataclass_fields__}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
