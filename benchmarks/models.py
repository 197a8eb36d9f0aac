"""Our libraries against ONNX Runtime, OpenVINO and untuned TVM on the models of the zoo, all in turns, in one run.

    python benchmarks/models.py squeezenet resnet50 --trials 2000 --seconds 900 --data-dir /tmp/bench --out results.json

Ours come from the product itself: a service is started on the data folder, each model is submitted and its library is
fetched. A job that this folder has done already is not done again. Untuned is TVM's own pipeline on the same imported
model. Without a name it takes the seven models of `model_zoo.COMPARED`.

Ready libraries are compared without a service and without tuning, one `--library NAME=PATH` each; of several for one
model the first is "ours" and the others go by the names of their files:

    python benchmarks/model_zoo.py /tmp/zoo squeezenet
    python benchmarks/models.py --zoo /tmp/zoo --library squeezenet=a.so --library squeezenet=b.so --profile

A library takes the inputs of NAME.onnx in their order and was built for this machine; `executable.export_library` of
`relax.build` writes one. Each model is measured in a process of its own: every engine is loaded there, on the same
inputs and threads, and each has its turn in each round, with a rest between turns until no one's idle threads spin on
the cores of the next. Reported are medians and, of the ratios, the median over the rounds. The roof is measured before
and after; the operations that it is compared with are those of convolutions and matrix products as the graph spells
them, so that Winograd's algorithm may pass it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import model_zoo
import numpy as np
import onnx
from demo import Bar, running_service
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from service.client import JobFailed, RequestRefused, Tunery
from tuning_db.keys import DeviceIdentity, TensorSpec
from workers import toolchain
from workers.devices import local_cpu
from workers.devices.roof import RoofMeasurement
from workers.devices.roof import measure as measure_roof
from workers.packaging import baselines
from workers.packaging.running import time_in_turns, wait_until_idle

OURS: Final = "ours"
UNTUNED: Final = "untuned"
TITLES: Final = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", UNTUNED: "untuned TVM"}

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
        time.sleep(work.min_sample_s)  # as long as a sample: then it is called once in each round
        wait_until_idle()

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


def compile_untuned(model: Path, path: Path) -> None:
    """Write the library that TVM makes by itself: its own default pipeline and kernels, no schedule of anyone's."""
    import tvm
    from tvm import relax

    from workers.frontend import onnx_model
    from workers.frontend.onnx_import import import_onnx

    ports = onnx_model.inputs_of(onnx_model.load(model))
    inputs = [TensorSpec(port.name, port.dtype, tuple(int(size or 0) for size in port.shape)) for port in ports]
    imported = import_onnx(model, inputs, path.parent)
    target = tvm.target.Target(json.loads(local_cpu.probe()[1]))
    relax.build(imported.module, target).export_library(str(path))


def measuring_process(spec: Path) -> int:
    """Print `{"round": n}` as it goes and the answer at the end, one JSON document a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines write to standard output as they like
    work = Work(**json.loads(spec.read_text()))
    result = measure(work, lambda number: print(json.dumps({"round": number}), file=answers))
    print(json.dumps(result), file=answers)
    return 0


# --- In the process that the user started -----------------------------------------------------------------------------


class ProcessDied(Exception):
    """A process of the benchmark ended before its work was done. The message holds what it said last."""


def start(arguments: Sequence[str], on_line: Callable[[str], None], *, timeout_s: float) -> None:
    """Run this file with `arguments` in a process of its own, and hand over its lines. Raises ProcessDied."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=said, text=True
        )  # fmt: skip
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line)
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if status != 0:
            said.seek(0)
            raise ProcessDied(f"{' '.join(arguments)} ended with status {status}: {said.read()[-2000:].strip()}")


def start_measuring(work: Work, progress: Progress) -> dict[str, Any]:
    """Run `measure` in a fresh process, with a bar."""
    task = progress.add_task(f"{Path(work.model).stem}: measuring", total=work.rounds)
    answer: dict[str, Any] = {}

    def take(line: str) -> None:
        told = json.loads(line)
        if "round" in told:
            progress.update(task, completed=max(0, told["round"]))
        else:
            answer.update(told)

    with tempfile.TemporaryDirectory(prefix="tunery-models-") as folder:
        spec = Path(folder) / "work.json"
        spec.write_text(json.dumps(asdict(work)))
        start(["--measure", str(spec)], take, timeout_s=3600)
    return answer


def tune(
    names: Sequence[str],
    paths: Mapping[str, Path],
    search: Mapping[str, Any],
    build: Mapping[str, Any],
    data_dir: Path,
    progress: Progress,
    rows: dict[str, dict[str, Any]],
) -> None:
    """Ask a service on `data_dir` for the library of each model. Into each row goes the library's path and how it was
    found, or, under "failed", why there is none."""
    with running_service(data_dir / "service") as url, Tunery(url) as client:
        for name in names:
            inputs = {port: list(shape) for port, shape in model_zoo.ZOO[name].inputs.items()}
            start_s = time.monotonic()
            try:
                job = client.submit(paths[name], inputs=inputs, search=search, options=build)
                job.wait(on_event=Bar(progress, search["trials"], search["seconds"]))
                fetched = client.fetch(job.key, data_dir / "libraries" / name)
            except (JobFailed, RequestRefused) as error:
                rows[name] = {"model": name, "failed": str(error)}
                continue
            rows[name] = {
                "model": name,
                "library": str(fetched.library),
                "key": job.key,
                "search": fetched.manifest["search"],
                "waited_s": time.monotonic() - start_s,
            }


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


def summary(path: Path, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of one model's measurements. A ratio is the median over the rounds of the two times that were taken
    in one round; the best engine is the one with the lower median."""
    samples: dict[str, list[float]] = answer["samples_s"]
    spread = {}
    for label, taken in samples.items():
        low, median, high = statistics.quantiles(taken, n=4)
        spread[label] = {"median_s": median, "p25_s": low, "p75_s": high}
    row: dict[str, Any] = {
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
    if UNTUNED in samples:
        row["ratios"][OURS][UNTUNED] = _paired(samples[UNTUNED], samples[OURS])
    if "kernels" in answer:
        row["kernels"] = answer["kernels"]
    return row


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float:
    # One that takes seconds sits out later rounds: the rounds that both were in are paired.
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=False))


def geometric_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of our ratios to ONNX Runtime and to the best engine, over all models."""
    return {
        against: statistics.geometric_mean(row["ratios"][OURS][against] for row in rows)
        for against in ("onnxruntime", "best")
    }


def markdown(rows: Sequence[Mapping[str, Any]], roof: RoofMeasurement) -> str:
    """One line a model: medians with quartiles in ms, then the ratios of ours, its share of the roof, and the largest
    difference of its outputs from ONNX Runtime's, relative to the output's maximum."""
    labels = list(dict.fromkeys(label for row in rows for label in row["latency"]))
    head = ["model", "GFLOP", *(f"{TITLES.get(label, label)}, ms" for label in labels)]
    head += ["ONNX Runtime / ours", "best engine / ours", "share of roof", "difference"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["model"], f"{row['flops'] / 1e9:.2f}"]
        for label in labels:
            entry = row["latency"].get(label)
            cells.append("{:.2f} ({:.2f}-{:.2f})".format(*(1e3 * value for value in entry.values())) if entry else "")
        ratios, median_s = row["ratios"][OURS], row["latency"][OURS]["median_s"]
        cells += [f"{ratios['onnxruntime']:.2f}", f"{ratios['best']:.2f}"]
        cells += [f"{row['flops'] / median_s / roof.flops_per_s:.0%}", f"{row['difference'][OURS]:.1e}"]
        lines.append(_line(cells))
    means = geometric_means(rows)
    ends = [f"**{means['onnxruntime']:.2f}**", f"**{means['best']:.2f}**", "", ""]
    lines.append(_line(["**geometric mean**", *[""] * (len(head) - len(ends) - 1), *ends]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine(identity: DeviceIdentity, roof: RoofMeasurement, threads: int) -> dict[str, Any]:
    """What the figures were taken on and with."""
    return {
        "device": identity.name,
        "cpu": f"{identity.vendor} {identity.model}",
        "cores": identity.cores,
        "cache_bytes": list(identity.cache_bytes),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": threads,
        "load_average_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {**baselines.available(), "apache-tvm": toolchain.installed()["apache-tvm"]},
        "roof": asdict(roof),
    }


def description(about: Mapping[str, Any]) -> str:
    """The machine in one paragraph."""
    caches = " + ".join(f"{size / 2**20:g} MiB" for size in about["cache_bytes"])
    roof = about["roof"]
    versions = ", ".join(f"{engine} {version or 'absent'}" for engine, version in about["versions"].items())
    return (
        f"{about['cpu']}, {about['threads']} of {about['cores']} cores, caches {caches}, "
        f"{about['memory_bytes'] / 2**30:.0f} GiB of memory, load {about['load_average_at_start']:.1f} at the start; "
        f"roof {roof['flops_per_s'] / 1e9:.0f} GFLOP/s ({roof['flops_per_s_one_thread'] / 1e9:.0f} on one thread), "
        f"{roof['bytes_per_s'] / 1e9:.0f} GB/s from memory, {roof['l2_bytes_per_s'] / 1e9:.0f} GB/s from L2; {versions}"
    )


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
    parser.add_argument("--trials", type=int, default=2000, help="of each job")
    parser.add_argument("--seconds", type=float, default=900, help="of each job's search")
    parser.add_argument("--tuner", default="auto")
    parser.add_argument("--no-winograd", dest="winograd", action="store_false", help="forbid it to our libraries")
    parser.add_argument("--data-dir", type=Path, help="the service's data, models and libraries; else a temporary one")
    parser.add_argument("--zoo", type=Path, help="where the models are kept, if not in the data folder")
    parser.add_argument("--repeats", type=int, default=30, help="rounds, at least 30 for figures to publish")
    parser.add_argument(
        "--min-sample", type=float, default=0.05, metavar="SECONDS", help="each turn takes this or more"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--untuned", action=argparse.BooleanOptionalAction, help="by itself only where ours is tuned")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels of our library")
    parser.add_argument("--out", type=Path, help="write all figures to this file as JSON")
    options = parser.parse_args()
    ready = libraries_by_model(options.library)
    names = options.names or list(ready) or list(model_zoo.COMPARED)
    unknown = [name for name in names if name not in model_zoo.ZOO]
    if unknown or len(set(names)) < len(names):
        parser.error(f"names must be different models of {', '.join(model_zoo.ZOO)}; there is {' '.join(names)}")
    if ready and set(names) != set(ready):
        parser.error("with --library, give one for each model that is named")
    if options.repeats < 2:
        parser.error("--repeats must be 2 or more: quartiles are told")
    identity, target = local_cpu.probe()
    if not ready and options.threads != identity.cores:
        parser.error(f"libraries are tuned for all {identity.cores} cores; for fewer, start this under taskset")
    with contextlib.ExitStack() as stack:
        data_dir = options.data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tunery-models-")))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=console))
        paths = {name: model_zoo.write(name, options.zoo or data_dir / "zoo") for name in names}
        rows = {name: {"model": name} for name in names}
        libraries = dict(ready)
        if not ready:
            search = {"trials": options.trials, "seconds": options.seconds, "tuner": options.tuner}
            build = {"winograd": options.winograd}
            tune(names, paths, search, build, data_dir.resolve(), progress, rows)
            libraries = {name: {OURS: row["library"]} for name, row in rows.items() if "library" in row}
        roof = measure_roof(target, identity.cache_bytes, options.threads)
        about = machine(identity, roof, options.threads)
        engines = tuple(engine for engine, version in baselines.available().items() if version is not None)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tunery-untuned-")))
        for name, of_model in libraries.items():
            try:
                if options.untuned or (options.untuned is None and not ready):
                    waiting = progress.add_task(f"{name}: compiling untuned", total=1)
                    untuned = scratch / f"{name}.so"
                    start(["--untuned", str(paths[name]), str(untuned)], print, timeout_s=900)
                    progress.update(waiting, completed=1)
                    of_model = {UNTUNED: str(untuned), **of_model}
                work = Work(
                    model=str(paths[name]),
                    libraries=of_model,
                    engines=engines,
                    threads=options.threads,
                    rounds=options.repeats,
                    min_sample_s=options.min_sample,
                    profiled=OURS if options.profile else None,
                )
                rows[name] |= summary(paths[name], start_measuring(work, progress))
            except ProcessDied as error:
                rows[name]["failed"] = str(error)
        roof = roof.best(measure_roof(target, identity.cache_bytes, options.threads))
    about["roof"] = asdict(roof)
    measured = [row for row in rows.values() if "latency" in row]
    failed = [row for row in rows.values() if "failed" in row]
    if measured:
        print(f"\n{markdown(measured, roof)}\n\n{description(about)}")
    for row in measured:
        if "kernels" in row:
            show_kernels(row, top=15)
    for row in failed:
        console.print(f"[red]{row['model']}: {escape(row['failed'])}")
    if options.out:
        means = geometric_means(measured) if measured else None
        result = {"machine": about, "geometric_mean": means, "models": list(rows.values())}
        options.out.write_text(json.dumps(result, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        sys.exit(measuring_process(Path(sys.argv[2])))
    if sys.argv[1:2] == ["--untuned"] and len(sys.argv) == 4:
        sys.exit(compile_untuned(Path(sys.argv[2]), Path(sys.argv[3])))
    sys.exit(main())
