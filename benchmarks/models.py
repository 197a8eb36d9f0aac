"""Our libraries against ONNX Runtime, OpenVINO and untuned TVM on the models of the zoo, all in turns, in one run.

    python benchmarks/models.py squeezenet resnet50 --trials 2000 --seconds 900 --out results.json

Ready libraries are compared without a service and without tuning, one `--library NAME=PATH` each; of several for one
model the first is "ours" and the others go by the names of their files:

    python benchmarks/model_zoo.py /tmp/zoo squeezenet
    python benchmarks/models.py --zoo /tmp/zoo --library squeezenet=a.so --library squeezenet=b.so --profile

A library takes the inputs of NAME.onnx in their order and was built for this machine; `executable.export_library` of
`relax.build` writes one. Each model is measured in a process of its own: every engine is loaded there, on the same
inputs and threads, and each has its turn in each round, with a rest between turns so that no one's idle threads spin on
the cores of the next. Reported are medians and, of the ratios, the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import model_zoo
import numpy as np
import onnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tuning_db.keys import TensorSpec
from workers.devices import local_cpu
from workers.packaging import baselines
from workers.packaging.reference import time_in_turns

OURS: Final = "ours"
REST_S: Final = 0.1

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Work:
    """What one measuring process does."""

    model: str
    libraries: Mapping[str, str]  #: label → path
    engines: tuple[str, ...]
    threads: int
    rounds: int
    min_sample_s: float
    profiled: str | None = None  #: label of the library whose kernels are timed one by one


# --- In the measuring process -----------------------------------------------------------------------------------------


def measure(work: Work, on_round: Callable[[int], None]) -> dict[str, Any]:
    """Seconds of each engine and library in each round, and how far each is from ONNX Runtime."""
    os.environ["TVM_NUM_THREADS"] = str(work.threads)  # read when TVM starts its threads
    os.environ["TVM_BIND_THREADS"] = "0"  # a pinned thread waits for whoever else is on its core
    import tvm
    from tvm import relax

    feeds = model_zoo.inputs_for(Path(work.model))
    callers: dict[str, Callable[[], object]] = {}
    outputs: dict[str, list[Any]] = {}
    for engine in work.engines:
        call = baselines.baseline(engine, Path(work.model), feeds, work.threads)
        callers[engine], outputs[engine] = call, call()
    for label, path in work.libraries.items():
        machine = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
        arguments = [tvm.runtime.tensor(array) for array in feeds.values()]
        result = machine["main"](*arguments)
        outputs[label] = [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]
        callers[label] = partial(machine["main"], *arguments)
    rested = 0

    def rest() -> None:
        nonlocal rested
        rested += 1
        on_round(rested // len(callers) - 2)  # each was called twice before the first round
        time.sleep(REST_S)

    turns = {}
    for label, call in callers.items():
        turns |= {label: call, f"rest after {label}": rest}
    taken = time_in_turns(turns, work.rounds, work.min_sample_s)
    answer: dict[str, Any] = {
        "samples_s": {label: taken[label] for label in callers},
        "difference": {label: difference(outputs["onnxruntime"], outputs[label]) for label in callers},
    }
    if work.profiled is not None:
        answer["kernels"] = kernels(work.libraries[work.profiled], feeds, work.threads)
    return answer


def difference(wanted: Sequence[Any], got: Sequence[Any]) -> float:
    """The largest difference of any output, relative to that output's largest magnitude. Infinite if shapes differ."""
    worst = 0.0
    for a, b in zip(wanted, got, strict=True):
        if a.shape != b.shape or not np.isfinite(b).all():
            return math.inf
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


def kernels(library: str, feeds: Mapping[str, Any], threads: int) -> list[dict[str, Any]]:
    """Each kernel's median seconds a call and calls an inference, the one with the most time in all first."""
    import tvm
    from tvm import relax

    from workers.packaging.profile import profile

    specs = [TensorSpec(name, str(array.dtype), array.shape) for name, array in feeds.items()]
    seconds = profile(library, specs, threads)
    machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
    calls: dict[str, int] = {}

    def count(_function: Any, name: str, before_run: bool, _result: Any, *_arguments: Any) -> None:
        if before_run:
            calls[name] = calls.get(name, 0) + 1

    machine.set_instrument(count)
    machine["main"](*(tvm.runtime.tensor(array) for array in feeds.values()))
    found = [{"kernel": name, "calls": calls[name], "seconds": seconds[name]} for name in seconds]
    return sorted(found, key=lambda kernel: -kernel["calls"] * kernel["seconds"])


def measuring_process(spec: Path) -> int:
    """Print `{"round": n}` as it goes and the answer at the end, one JSON document a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines write to standard output as they like
    work = Work(**json.loads(spec.read_text()))
    result = measure(work, lambda number: print(json.dumps({"round": number}), file=answers))
    print(json.dumps(result), file=answers)
    return 0


# --- In the process that the user started -----------------------------------------------------------------------------


def start_measuring(work: Work, progress: Progress) -> dict[str, Any]:
    """Run `measure` in a fresh process, with a bar. SystemExit with what it said, if it dies."""
    task = progress.add_task(f"{Path(work.model).stem}: measuring", total=work.rounds)
    with tempfile.TemporaryDirectory(prefix="tunery-models-") as folder:
        spec = Path(folder) / "work.json"
        spec.write_text(json.dumps(asdict(work)))
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(
                [sys.executable, __file__, "--measure", str(spec)], stdout=subprocess.PIPE, stderr=said, text=True
            )
            assert process.stdout is not None
            answer: dict[str, Any] = {}
            for line in process.stdout:
                answer = json.loads(line)
                if "round" in answer:
                    progress.update(task, completed=max(0, answer["round"]))
            if process.wait() != 0 or "samples_s" not in answer:
                said.seek(0)
                sys.exit(f"measuring {work.model} ended with status {process.returncode}: {said.read()[-2000:]}")
    return answer


def flops_of(path: Path) -> int:
    """Floating-point operations of one inference: two for each multiplication of convolutions and matrix products, as
    the graph spells them. All else counts nothing."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        shapes[value.name] = model_zoo.shape_of(value)
    total = 0
    for node in model.graph.node:
        if node.op_type == "Conv":  # each output takes one kernel's worth of products
            total += 2 * math.prod(shapes[node.output[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "ConvTranspose":  # each input gives one kernel's worth
            total += 2 * math.prod(shapes[node.input[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "MatMul":
            total += 2 * math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
        elif node.op_type == "Gemm":
            transposed = any(a.name == "transA" and a.i for a in node.attribute)
            total += 2 * math.prod(shapes[node.output[0]]) * shapes[node.input[0]][0 if transposed else 1]
    return total


def summary(name: str, path: Path, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of one model. A ratio is the median over the rounds of the two times that were taken in one round;
    the best engine is the one with the lower median."""
    samples: dict[str, list[float]] = answer["samples_s"]
    spread = {}
    for label, taken in samples.items():
        low, median, high = statistics.quantiles(taken, n=4)
        spread[label] = {"median_s": median, "p25_s": low, "p75_s": high}
    row: dict[str, Any] = {
        "model": name,
        "flops": flops_of(path),
        "latency": spread,
        "difference": answer["difference"],
        "samples_s": samples,
    }
    best = min((label for label in samples if label in baselines.ENGINES), key=lambda e: spread[e]["median_s"])
    row["best_engine"] = best
    for label in samples:
        if label not in baselines.ENGINES:
            row.setdefault("ratios", {})[label] = {
                "onnxruntime": _paired(samples["onnxruntime"], samples[label]),
                "best": _paired(samples[best], samples[label]),
            }
    if "kernels" in answer:
        row["kernels"] = answer["kernels"]
    return row


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def geometric_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of our ratios to ONNX Runtime and to the best engine, over all models."""
    return {
        against: statistics.geometric_mean(row["ratios"][OURS][against] for row in rows)
        for against in ("onnxruntime", "best")
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a model: medians with quartiles in ms, then the ratios of ours."""
    labels = list(dict.fromkeys(label for row in rows for label in row["latency"]))
    head = ["model", "GFLOP", *(f"{label}, ms" for label in labels), "ORT / ours", "best / ours", "difference"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["model"], f"{row['flops'] / 1e9:.2f}"]
        for label in labels:
            entry = row["latency"].get(label)
            cells.append(
                f"{entry['median_s'] * 1e3:.2f} ({entry['p25_s'] * 1e3:.2f}-{entry['p75_s'] * 1e3:.2f})"
                if entry
                else ""
            )
        ratios = row["ratios"][OURS]
        cells += [f"{ratios['onnxruntime']:.2f}", f"{ratios['best']:.2f}", f"{row['difference'][OURS]:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    means = geometric_means(rows)
    gap = " | " * (len(labels) + 1)
    lines.append(f"| **geometric mean** |{gap}| **{means['onnxruntime']:.2f}** | **{means['best']:.2f}** | |")
    return "\n".join(lines)


def machine(threads: int) -> dict[str, Any]:
    """What the figures were taken on and with."""
    identity = local_cpu.identity_of(local_cpu.read_facts())
    return {
        "device": identity.name,
        "cpu": f"{identity.vendor} {identity.model}",
        "cores": identity.cores,
        "cache_bytes": list(identity.cache_bytes),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "engines": baselines.available(),
    }


def show_kernels(row: Mapping[str, Any], top: int) -> None:
    whole_s = sum(kernel["calls"] * kernel["seconds"] for kernel in row["kernels"])
    console.print(f"\n{row['model']}: slowest kernels of {OURS}, {whole_s * 1e3:.2f} ms in all, timed one by one")
    for kernel in row["kernels"][:top]:
        all_s = kernel["calls"] * kernel["seconds"]
        console.print(f"  {all_s / whole_s:6.1%} {all_s * 1e6:9.0f} us {kernel['calls']:3d}x {kernel['kernel']}")


def libraries_by_model(given: Sequence[str]) -> dict[str, dict[str, str]]:
    """`NAME=PATH` → model → label → path. SystemExit for what is misspelled or missing."""
    found: dict[str, dict[str, str]] = {}
    for text in given:
        name, _, path = text.partition("=")
        if name not in model_zoo.ZOO or not Path(path).is_file():
            sys.exit(f"--library {text}: wants NAME=PATH, a model of {', '.join(model_zoo.ZOO)} and an existing file")
        of_model = found.setdefault(name, {})
        label = Path(path).stem if of_model else OURS
        if label in of_model:
            sys.exit(f"--library {text}: another library of {name} is called {label!r}")
        of_model[label] = str(Path(path).resolve())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models, of {', '.join(model_zoo.ZOO)}")
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH", help="a ready library")
    parser.add_argument("--zoo", type=Path, help="where the models are kept; a temporary folder by itself")
    parser.add_argument("--repeats", type=int, default=30, help="rounds, at least 30 for figures to publish")
    parser.add_argument(
        "--min-sample", type=float, default=0.05, metavar="SECONDS", help="each turn takes this or more"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels of our library")
    parser.add_argument("--out", type=Path, help="write all figures to this file as JSON")
    options = parser.parse_args()
    ready = libraries_by_model(options.library)
    names = options.names or list(ready)
    for name in names:
        if name not in ready:
            parser.error(f"{name}: give --library {name}=PATH")
    engines = tuple(engine for engine, version in baselines.available().items() if version is not None)
    if "openvino" not in engines:
        console.print("[yellow]OpenVINO is not installed and is left out; pip install '.[openvino]' adds it")
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="tunery-zoo-") as scratch, Progress(*columns, console=console) as progress:
        for name in names:
            path = model_zoo.write(name, options.zoo or Path(scratch))
            work = Work(
                model=str(path),
                libraries=ready[name],
                engines=engines,
                threads=options.threads,
                rounds=options.repeats,
                min_sample_s=options.min_sample,
                profiled=OURS if options.profile else None,
            )
            rows.append(summary(name, path, start_measuring(work, progress)))
    about = machine(options.threads)
    print(
        f"\n{markdown(rows)}\n\n{about['cpu']}, {options.threads} threads, load {about['load_average']:.1f}; ", end=""
    )
    print(", ".join(f"{engine} {version or 'absent'}" for engine, version in about["engines"].items()))
    for row in rows:
        if "kernels" in row:
            show_kernels(row, top=15)
    if options.out:
        result = {"machine": about, "geometric_mean": geometric_means(rows), "models": rows}
        options.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(measuring_process(Path(sys.argv[2])) if sys.argv[1:2] == ["--measure"] else main())
