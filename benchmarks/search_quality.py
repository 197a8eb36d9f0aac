"""How fast a search finds fast schedules: our tuners and TVM's own MetaSchedule on ten operators, from nothing.

    python benchmarks/search_quality.py                                  # everything: ten operators, three seeds
    python benchmarks/search_quality.py --operators softmax --seeds 0    # a part; it is added to what is stored
    python benchmarks/search_quality.py --draw                           # table and plots again, nothing measured

Each operator is a model of one layer. Ours search the kernel that the graph makes of it, by the scheduler that jobs
use, each run on a store of its own that is empty: no record, no cost model. That kernel reads and writes blocked
channels; between layers of a model nothing is converted, so the two conversions at the ends of a model of one layer are
not measured. Stock is `ms.tune_tir` on TVM's own lowering of the same layer (plain NCHW, weights as the model has
them), with TVM's LocalBuilder and LocalRunner and its defaults, but for two kindnesses: threads are as many as cores
(by itself TVM's runtime takes half), and builders load the tensor intrinsics of this CPU alone. Without that each new
pool of builders parses those of every device, 25 to 40 s against a build timeout of 30 s. Its cost model guesses at
random until it knows a hundred trials, so with fewer stock is the best of so many sketches.

With --seeds 0 alone it takes about twenty minutes on two idle cores, most of it stock's.

Seconds count from the call that searches; imports are not in them. A trial's time is the searcher's own measurement,
and each curve is scaled so that its winner has the time that the final comparison gave it: there the winners of all
methods with one operator and seed are measured in turns, in one process, with weights out of cache.

Writes results.json, results.md and two plots. `pip install '.[bench]'` has matplotlib; stock needs cloudpickle.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("TVM_BIND_THREADS", "0")

import numpy as np
import onnx
import onnx.shape_inference
import tvm
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from rich.console import Console
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tuning_db.catalog import Roof
from tuning_db.jobs import JobSpec, SearchConfig
from tuning_db.keys import ArtifactKey, BuildOptions, DeviceIdentity, Json, QuantizationConfig, TensorSpec
from tuning_db.migrations import upgrade
from tuning_db.store import TuningStore
from workers import toolchain
from workers.devices import local_cpu, roof
from workers.frontend.onnx_import import import_onnx
from workers.graph import pipeline
from workers.graph.operators import Model
from workers.search import forked_steps
from workers.search.candidates import Built, Candidate, Measurement, Operator
from workers.search.forkserver import ForkServer
from workers.search.intrinsics import preload, use_only
from workers.search.lanes import LocalBuilder, LocalRunner
from workers.search.records import Records
from workers.search.scheduler import Scheduler
from workers.search.templates.registry import TEMPLATES

STOCK: Final = "stock"
OURS: Final = ("autotvm", "ansor", "auto")
METHODS: Final = (*OURS, STOCK)
#: One run that takes longer is given up: TVM can hang.
RUN_TIMEOUT_S: Final = 600.0
#: The claim: `auto` is where stock ends after so much of its trials and seconds.
TRIALS_SHARE: Final = 1 / 4
SECONDS_SHARE: Final = 1 / 10

console = Console(highlight=False, soft_wrap=True)


# --- Operators --------------------------------------------------------------------------------------------------------


def layer(nodes: Sequence[NodeProto], inputs: Mapping[str, Sequence[int]], **weights: Sequence[int]) -> ModelProto:
    """A model of these nodes with random weights of these shapes; its output is `y`."""
    generator = np.random.default_rng(0)
    graph = helper.make_graph(
        list(nodes),
        "layer",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(generator.standard_normal(shape, dtype=np.float32), name)
            for name, shape in weights.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def convolution(channels: int, filters: int, size: int, kernel: int, stride: int = 1, groups: int = 1) -> ModelProto:
    """With bias and ReLU, as networks have it."""
    conv = helper.make_node(
        "Conv", ["x", "w", "b"], ["c"],
        kernel_shape=[kernel, kernel], pads=[kernel // 2] * 4, strides=[stride, stride], group=groups,
    )  # fmt: skip
    weight = (filters, channels // groups, kernel, kernel)
    nodes = [conv, helper.make_node("Relu", ["c"], ["y"])]
    return layer(nodes, {"x": (1, channels, size, size)}, w=weight, b=(filters,))


def dense(rows: int, inner: int, columns: int) -> ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    return layer(nodes, {"x": (rows, inner)}, w=(inner, columns), b=(columns,))


def batch_matmul(batch: int, rows: int, inner: int, columns: int) -> ModelProto:
    node = helper.make_node("MatMul", ["x", "z"], ["y"])
    return layer([node], {"x": (batch, rows, inner), "z": (batch, inner, columns)})


def softmax(rows: int, columns: int) -> ModelProto:
    return layer([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], {"x": (rows, columns)})


def layer_norm(rows: int, columns: int) -> ModelProto:
    node = helper.make_node("LayerNormalization", ["x", "w", "b"], ["y"], axis=-1)
    return layer([node], {"x": (rows, columns)}, w=(columns,), b=(columns,))


OPERATORS: Final[Mapping[str, Callable[[], ModelProto]]] = {
    "conv 3x3, 64, 56x56": lambda: convolution(64, 64, 56, 3),
    "conv 3x3, 256, 14x14": lambda: convolution(256, 256, 14, 3),
    "conv 1x1, 256 to 64, 56x56": lambda: convolution(256, 64, 56, 1),
    "conv 1x1, 512 to 2048, 7x7": lambda: convolution(512, 2048, 7, 1),
    "conv 7x7 s2, 3 to 64, 224x224": lambda: convolution(3, 64, 224, 7, stride=2),
    "depthwise 3x3, 96, 40x40": lambda: convolution(96, 96, 40, 3, groups=96),
    "dense 128x768x3072": lambda: dense(128, 768, 3072),
    "batched matmul 12x128x64x128": lambda: batch_matmul(12, 128, 64, 128),
    "softmax 1536x128": lambda: softmax(1536, 128),
    "layer norm 128x768": lambda: layer_norm(128, 768),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One operator as both sides search it."""

    name: str
    key: ArtifactKey
    operator: Operator  #: the kernel of ours, with its variants
    function: tvm.tirx.PrimFunc  #: TVM's own lowering, no layout of it free
    weights: tuple[int, ...]  #: parameters of that which hold weights


def prepare(name: str, identity: DeviceIdentity, target_json: str, folder: Path) -> Layer:
    """The two computations of an operator."""
    target = tvm.target.Target(json.loads(target_json))
    model = OPERATORS[name]()
    path = folder / "layer.onnx"
    onnx.save_model(model, path)
    inputs = tuple(
        TensorSpec(value.name, "float32", tuple(size.dim_value for size in value.type.tensor_type.shape.dim))
        for value in model.graph.input
    )
    key = ArtifactKey(
        model=hashlib.sha256(name.encode()).hexdigest(), inputs=inputs, device=identity, target=target_json,
        toolchain=toolchain.current(), quantization=QuantizationConfig(), options=BuildOptions(),
    )  # fmt: skip
    imported = import_onnx(path, inputs, folder)
    with target, pipeline.pass_context():
        simplified = pipeline.simplify()(imported.module)
        lowered = pipeline.lower_operators()(simplified)
    [function] = [f for f in lowered.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    # The pipeline says which parameters are constants; of one row they are no weights that would leave a cache.
    weights = tuple(int(index) for index in function.attrs["layout_free_buffers"])
    with empty_records(key, folder) as records:
        operators = Model(simplified, target, local_cpu.cpu_of(identity).lanes, winograd=True).extract(records.adopt)
    # What is left are copies into blocks of channels and back, which a model has at its ends alone.
    [operator] = [o for o in operators if o.variants[0].workload.template != "copy"]
    return Layer(name, key, operator, function.without_attr("layout_free_buffers"), weights)


@contextmanager
def empty_records(key: ArtifactKey, folder: Path) -> Iterator[Records]:
    """The view that a job of this key has of a store without anything in it."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        url = f"sqlite:///{fresh}/tunery.db"
        upgrade(url)
        store = TuningStore(url)
        try:
            job = store.submit(JobSpec(key)).job
            claimed = store.claim(job.id, "benchmark")
            assert claimed is not None
            yield Records(store, claimed[0], key.record_scope())
        finally:
            store.close()


# --- Runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One search of one operator by one method."""

    operator: str
    method: str
    seed: int
    trials: list[tuple[float, float | None]]  #: seconds since the search began, and median seconds or None if failed
    elapsed_s: float
    winner_s: float  #: as the search itself measured it
    final_s: float = math.nan  #: as the final comparison measured it
    winner: str = ""  #: which variant and tuner it came from

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Seconds since the search began and the best after each trial, on the final comparison's scale."""
        scale = self.final_s / self.winner_s
        best_s, curve = math.inf, []
        for at_s, median_s in self.trials:
            best_s = min(best_s, math.inf if median_s is None else median_s)
            curve.append((at_s, best_s * scale))
        return curve

    def reaches(self, wanted_s: float) -> tuple[int, float] | None:
        """Trials and seconds after which its best was as fast as `wanted_s`; None if it never was."""
        for number, (at_s, best_s) in enumerate(self.curve, start=1):
            if best_s <= wanted_s:
                return number, at_s
        return None


@dataclass(slots=True)
class Bench:
    """What every run uses: this machine, and the warm process that builds and measures."""

    identity: DeviceIdentity
    target_json: str
    server: ForkServer
    builder: LocalBuilder
    roof: Roof | None
    folder: Path

    def search(self, layer: Layer, method: str, seed: int, trials: int) -> tuple[Run, Built]:
        """One of ours, from an empty store; and the library of what it chose."""
        cpu = local_cpu.cpu_of(self.identity)
        outcomes: list[tuple[float, float | None]] = []
        with empty_records(layer.key, self.folder) as records:
            modules = [forked_steps.to_tvm_workload(variant.workload).mod for variant in layer.operator.variants]
            records.adopt(modules)

            def report(type: str, data: Mapping[str, Json]) -> None:
                if type == "trial":
                    run_s = data["run_s"]
                    outcomes.append((time.monotonic() - start_s, None if run_s is None else float(str(run_s))))
                if type == "warning":
                    console.print(f"  warning: {data['message']}")

            scheduler = Scheduler(
                server=self.server, target=self.target_json, machine=cpu, templates=TEMPLATES, builder=self.builder,
                runner=LocalRunner(self.server, Measurement(threads=cpu.threads)), records=records, report=report,
                roof=self.roof, operators_at_once=cpu.threads,
            )  # fmt: skip
            start_s = time.monotonic()
            scheduler.run([layer.operator], SearchConfig(method, trials=trials, seconds=RUN_TIMEOUT_S, seed=seed))
            elapsed_s = time.monotonic() - start_s
            choice = scheduler.choice()[layer.operator.name]
        assert choice.trial is not None
        assert choice.trace is not None
        [built] = self.builder.build([Candidate(choice.variant.workload, choice.trace, choice.config)])
        if not isinstance(built, Built):
            raise RuntimeError(f"{layer.name}: what {method} chose was not built again: {built.message}")
        # A later search that builds the same candidate would remove it by its name.
        kept = Path(built.library).rename(self.folder / f"{method}-{seed}-{Path(built.library).name}")
        built = replace(built, library=str(kept))
        winner = f"{choice.variant.name}, {'sketch' if choice.config is None else 'template'}"
        measured_s = choice.trial.outcome.median_s  # type: ignore[union-attr]  # a failure is never chosen
        return Run(layer.name, method, seed, outcomes, elapsed_s, measured_s, winner=winner), built

    def stock(self, layer: Layer, seed: int, trials: int) -> tuple[Run, Built]:
        """TVM's own search, in a process of its own that may hang."""
        name = f"stock-{len(list(self.folder.glob('stock-*')))}"
        folder = self.folder / name
        folder.mkdir()
        spec = folder / "spec.json"
        arguments = {
            "function": tvm.ir.save_json(layer.function), "target": self.target_json, "trials": trials, "seed": seed,
            "cores": self.identity.cores, "intrinsics": intrinsics_of(self.identity),
        }  # fmt: skip
        spec.write_text(json.dumps(arguments))
        environment = {**os.environ, "TVM_NUM_THREADS": str(self.identity.cores), "TVM_BIND_THREADS": "0"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--stock", str(spec)],
            stdout=subprocess.DEVNULL, stderr=(folder / "log").open("wb"), env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"{layer.name}: stock had not ended after {RUN_TIMEOUT_S:.0f} s") from None
        if status != 0:
            raise RuntimeError(f"{layer.name}: stock ended with {status}: {(folder / 'log').read_text()[-2000:]}")
        found = json.loads((folder / "found.json").read_text())
        outcomes = [(float(at_s), median_s) for at_s, median_s in found["trials"]]
        arguments_of = tuple((dtype, tuple(shape)) for dtype, shape in found["arguments"])
        built = Built(found["library"], arguments_of, None, layer.weights)
        winner_s = min(median_s for _, median_s in outcomes if median_s is not None)
        return Run(layer.name, STOCK, seed, outcomes, found["elapsed_s"], winner_s, winner="plain, sketch"), built

    def compare(self, found: Sequence[tuple[Run, Built]]) -> list[Run]:
        """The runs of one operator with what their winners take when measured in turns."""
        measurement = Measurement(repeat=7, min_repeat_s=0.02, threads=self.identity.cores)
        outcomes = LocalRunner(self.server, measurement, timeout_s=30).compare([built for _, built in found])
        if not isinstance(outcomes, list):
            raise RuntimeError(f"the final comparison failed: {outcomes.message}")
        return [replace(run, final_s=outcome.median_s) for (run, _), outcome in zip(found, outcomes, strict=True)]


def intrinsics_of(identity: DeviceIdentity) -> str:
    return "x86" if identity.arch == "x86_64" else "arm_cpu"


def tune_stock(spec_path: Path) -> None:
    """What a process for stock does: search, write each trial's time, build the winner as TVM does."""
    spec = json.loads(spec_path.read_text())
    folder = spec_path.parent
    use_only(spec["intrinsics"])
    target = tvm.target.Target(json.loads(spec["target"]))
    function = tvm.ir.load_json(spec["function"])
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    watch = _Watch()
    builder = ms.builder.LocalBuilder(max_workers=spec["cores"], initializer=_Loader(spec["intrinsics"]))
    watch.start_s = time.monotonic()
    database = ms.tune_tir(
        module, target, str(folder / "work"), spec["trials"], builder=_WatchedBuilder(builder, watch),
        runner=_WatchedRunner(ms.runner.LocalRunner(), watch), num_tuning_cores=spec["cores"], seed=spec["seed"],
    )  # fmt: skip
    elapsed_s = time.monotonic() - watch.start_s
    schedule = database.query_schedule(module, target, workload_name="main")
    if schedule is None:
        raise RuntimeError("stock found no schedule that runs")
    with tvm.transform.PassContext(opt_level=3):
        executable = tvm.compile(schedule.mod, target=target)
    library = forked_steps.link(executable.mod, folder / "winner")
    arguments = [
        (str(argument.dtype), [int(size) for size in argument.shape])
        for argument in ms.arg_info.ArgInfo.from_entry_func(schedule.mod)
    ]
    found = {"trials": watch.trials, "elapsed_s": elapsed_s, "library": str(library), "arguments": arguments}
    (folder / "found.json").write_text(json.dumps(found))


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the intrinsics of one device in a builder's process."""

    intrinsics: str

    def __call__(self) -> None:
        use_only(self.intrinsics)


class _Watch:
    """When each trial of stock ended, and how: its callbacks tell of whole batches only."""

    def __init__(self) -> None:
        self.start_s = 0.0
        self.trials: list[tuple[float, float | None]] = []
        self.waiting: list[bool] = []  #: of the batch that was built: whether each was

    def ended(self, median_s: float | None) -> None:
        self.trials.append((time.monotonic() - self.start_s, median_s))

    def skip_failed(self) -> None:
        while self.waiting and not self.waiting[0]:
            self.waiting.pop(0)
            self.ended(None)


@derived_object
class _WatchedBuilder(ms.builder.PyBuilder):
    """TVM's builder."""

    def __init__(self, builder: Any, watch: _Watch) -> None:
        super().__init__()
        self.builder = builder
        self.watch = watch

    def build(self, build_inputs: Any) -> Any:
        results = self.builder.build(build_inputs)
        self.watch.waiting = [result.artifact_path is not None for result in results]
        if not any(self.watch.waiting):
            self.watch.skip_failed()  # the runner is not asked
        return results


@derived_object
class _WatchedRunner(ms.runner.PyRunner):
    """TVM's runner, asked for one candidate at a time: it runs them one after the other anyway."""

    def __init__(self, runner: Any, watch: _Watch) -> None:
        super().__init__()
        self.runner = runner
        self.watch = watch

    def run(self, runner_inputs: Any) -> Any:
        futures = []
        for one in runner_inputs:
            self.watch.skip_failed()
            [future] = self.runner.run([one])
            result = future.result()
            run_s = result.run_secs
            self.watch.waiting.pop(0)
            self.watch.ended(None if run_s is None else statistics.median(float(s) for s in run_s))
            futures.append(ms.runner.LocalRunnerFuture([float(s) for s in run_s] if run_s else None, result.error_msg))
        self.watch.skip_failed()
        return futures


# --- What is written --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Results:
    """All runs so far, in a file that parts are added to."""

    path: Path
    machine: dict[str, Json]
    runs: list[Run]

    @classmethod
    def load(cls, path: Path) -> Results:
        if not path.exists():
            return cls(path, {}, [])
        data = json.loads(path.read_text())
        runs = [Run(**{**run, "trials": [(at, s) for at, s in run["trials"]]}) for run in data["runs"]]
        return cls(path, data["machine"], runs)

    def add(self, machine: dict[str, Json], runs: Sequence[Run]) -> None:
        """In place of earlier runs of the same operators and seeds."""
        replaced = {(run.operator, run.seed) for run in runs}
        kept = [run for run in self.runs if (run.operator, run.seed) not in replaced]
        order = list(OPERATORS)
        self.runs = sorted([*kept, *runs], key=lambda r: (order.index(r.operator), METHODS.index(r.method), r.seed))
        self.machine = machine
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rounded = [
            {**asdict(run), "trials": [(round(at_s, 3), median_s) for at_s, median_s in run.trials]}
            for run in self.runs
        ]
        lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in rounded)
        self.path.write_text(f'{{"machine": {json.dumps(self.machine)},\n"runs": [\n{lines}\n]}}\n')

    def of(self, operator: str, method: str) -> list[Run]:
        return [run for run in self.runs if (run.operator, run.method) == (operator, method)]

    def operators(self) -> list[str]:
        """Those that stock was run on, in the order of the table."""
        return [name for name in OPERATORS if self.of(name, STOCK)]

    def final_s(self, operator: str, method: str) -> float:
        """Median over seeds."""
        return statistics.median(run.final_s for run in self.of(operator, method))


@dataclass(frozen=True, slots=True)
class Reached:
    """When a method was as fast as stock ends, median over seeds."""

    trials: float  #: infinite where it is never reached by half of the seeds
    seconds: float


def reached(results: Results, operator: str, method: str) -> Reached:
    wanted_s = {run.seed: run.final_s for run in results.of(operator, STOCK)}
    never = (math.inf, math.inf)
    # Of one seed all were compared with each other.
    found = [run.reaches(wanted_s[run.seed]) or never for run in results.of(operator, method)]
    return Reached(*(statistics.median(column) for column in zip(*found, strict=True)))


def claim_holds(results: Results, operator: str) -> tuple[bool, bool]:
    """Whether `auto` is where stock ends within a quarter of its trials, and within a tenth of its seconds."""
    auto, stock = reached(results, operator, "auto"), results.of(operator, STOCK)
    trials = statistics.median(len(run.trials) for run in stock)
    seconds = statistics.median(run.elapsed_s for run in stock)
    return auto.trials <= TRIALS_SHARE * trials, auto.seconds <= SECONDS_SHARE * seconds


def table(results: Results) -> str:
    """Markdown: the times that were found, then how soon each method was where stock ends."""
    machine = results.machine
    operators = results.operators()
    lines = [
        "# How soon a search finds fast schedules",
        "",
        "Written by `benchmarks/search_quality.py`, whose head says what is measured and how.",
        "",
        f"{machine['device']}, {machine['cores']} cores; {machine['toolchain']}; {machine['date']}; one-minute load "
        f"{machine['load_before']} before and {machine['load_after']} after; {machine['trials']} trials of ours, "
        f"{machine['stock_trials']} of stock. Medians over seeds, the range in brackets.",
        "",
        "## The fastest schedule found, µs",
        "",
        "| operator | seeds | " + " | ".join(f"`{m}`" if m != STOCK else m for m in METHODS) + " | stock / `auto` |",
        "|---|" + "--:|" * (len(METHODS) + 2),
    ]
    for operator in operators:
        cells = []
        for method in METHODS:
            finals = [run.final_s * 1e6 for run in results.of(operator, method)]
            spread = f" ({_short(min(finals))} to {_short(max(finals))})" if len(finals) > 1 else ""
            cells.append(_short(statistics.median(finals)) + spread)
        auto_s = {run.seed: run.final_s for run in results.of(operator, "auto")}
        ratio = statistics.median(run.final_s / auto_s[run.seed] for run in results.of(operator, STOCK))
        lines.append(f"| {operator} | {len(auto_s)} | {' | '.join(cells)} | {ratio:.2f} |")
    lines += [
        "",
        "## Trials and seconds until as fast as stock ends",
        "",
        "Stock: all of its search, and in brackets when it first had what it ended with.",
        "",
        "| operator | "
        + " | ".join(f"`{m}`" for m in OURS)
        + " | stock | quarter of the trials | tenth of the seconds |",
        "|---|" + "--:|" * len(METHODS) + "---|---|",
    ]
    counts = [0, 0]
    for operator in operators:
        cells = []
        for method in OURS:
            when = reached(results, operator, method)
            cells.append("never" if math.isinf(when.trials) else f"{when.trials:.0f}, {_short(when.seconds)} s")
        stock = results.of(operator, STOCK)
        own = [run.reaches(run.final_s * (1 + 1e-9)) or (math.inf, math.inf) for run in stock]
        all_s = statistics.median(run.elapsed_s for run in stock)
        cells.append(
            f"{statistics.median(len(run.trials) for run in stock):.0f}, {_short(all_s)} s "
            f"({statistics.median(t for t, _ in own):.0f}, {_short(statistics.median(s for _, s in own))} s)"
        )
        holds = claim_holds(results, operator)
        counts = [count + held for count, held in zip(counts, holds, strict=True)]
        lines.append(f"| {operator} | {' | '.join(cells)} | {' | '.join('yes' if h else '**no**' for h in holds)} |")
    lines += [
        "",
        f"`auto` is where stock ends within a quarter of its trials on {counts[0]} of {len(operators)} operators, and "
        f"within a tenth of its seconds on {counts[1]}.",
        "",
        "![latency against trials](latency_by_trials.png)",
        "![latency against seconds](latency_by_seconds.png)",
        "",
    ]
    return "\n".join(lines)


def _short(number: float) -> str:
    """Three figures."""
    if not number or math.isinf(number):
        return str(number)
    return f"{number:.{max(0, 2 - math.floor(math.log10(abs(number))))}f}"


def draw(results: Results, folder: Path) -> None:
    """The two plots: a small multiple for each operator, median and range over seeds."""
    import matplotlib as mpl
    from matplotlib import pyplot, ticker

    mpl.use("agg")
    mpl.rcParams |= {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    colours = dict(zip(METHODS, ("#E69F00", "#56B4E9", "#D55E00", "#444444"), strict=True))
    for kind, label in (("trials", "trials"), ("seconds", "seconds of search")):
        columns = 5
        operators = results.operators()
        rows = -(-len(operators) // columns)
        figure, grid = pyplot.subplots(rows, columns, figsize=(13, 2.7 * rows), squeeze=False, layout="constrained")
        for axis, operator in zip(grid.flat, operators, strict=False):
            for method in METHODS:
                runs = results.of(operator, method)
                xs, bests = _by_trials(runs) if kind == "trials" else _by_seconds(runs)
                median_us = np.median(bests, axis=0) * 1e6
                axis.plot(xs, median_us, color=colours[method], label=method, drawstyle="steps-post")
                axis.plot(xs[-1:], median_us[-1:], color=colours[method], marker="o", markersize=3)
                axis.fill_between(
                    xs, bests.min(axis=0) * 1e6, bests.max(axis=0) * 1e6,
                    color=colours[method], alpha=0.2, linewidth=0, step="post",
                )  # fmt: skip
            axis.axhline(results.final_s(operator, STOCK) * 1e6, color="#444444", linewidth=0.6, linestyle=":")
            axis.set(xscale="log", yscale="log")
            axis.set_title(operator, fontsize=8)
            low, high = axis.get_ylim()
            steps = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8)
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=steps))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(ticker.NullFormatter())
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        for axis in list(grid.flat)[len(operators) :]:
            axis.set_visible(False)
        figure.supxlabel(label)
        figure.supylabel("best so far, µs")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
        figure.savefig(folder / f"latency_by_{kind}.png", dpi=110)
        pyplot.close(figure)


def _by_trials(runs: Sequence[Run]) -> tuple[Any, Any]:
    """Trial numbers, and for each run the best after each; a run that ended keeps its last."""
    count = max(len(run.trials) for run in runs)
    bests = np.full((len(runs), count), np.nan)
    for row, run in zip(bests, runs, strict=True):
        values = [best_s if math.isfinite(best_s) else np.nan for _, best_s in run.curve]
        row[: len(values)] = values
        row[len(values) :] = values[-1]
    return _where_known(np.arange(1, count + 1), bests)


def _by_seconds(runs: Sequence[Run]) -> tuple[Any, Any]:
    ends = [at_s for run in runs for at_s, _ in run.curve]
    xs = np.geomspace(max(0.1, min(ends)), max(ends), 200)
    bests = np.full((len(runs), len(xs)), np.nan)
    for row, run in zip(bests, runs, strict=True):
        for at_s, best_s in run.curve:
            row[xs >= at_s] = best_s if math.isfinite(best_s) else np.nan
    return _where_known(xs, bests)


def _where_known(xs: Any, bests: Any) -> tuple[Any, Any]:
    """From where on every run has something."""
    known = ~np.isnan(bests).any(axis=0)
    return xs[known], bests[:, known]


# --- The command ------------------------------------------------------------------------------------------------------


def machine_of(identity: DeviceIdentity, options: argparse.Namespace, load_before: float) -> dict[str, Json]:
    return {
        "device": identity.name,
        "cores": identity.cores,
        "toolchain": f"TVM {toolchain.current().tvm}, LLVM {toolchain.current().llvm}, {toolchain.current().pipeline}",
        "kernel": platform.release(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "load_before": round(load_before, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "scheduling": {os.SCHED_FIFO: "real time", os.SCHED_OTHER: "normal"}.get(os.sched_getscheduler(0), "other"),
        "trials": options.trials,
        "stock_trials": options.stock_trials,
    }


def measure_roof(identity: DeviceIdentity, target_json: str) -> Roof | None:
    """The highest of three: what else runs makes it too low. It is stored for each device, so it is no part of a
    search."""
    try:
        found = [roof.measure(target_json, identity.cache_bytes, identity.cores) for _ in range(3)]
    except roof.RoofNotMeasured as error:
        console.print(f"without a roof: {error}")
        return None
    highest = Roof(
        max(one.flops_per_s for one in found), max(one.bytes_per_s for one in found),
        max(one.flops_per_s_one_thread for one in found), dt.datetime.now(dt.UTC), toolchain.current(),
    )  # fmt: skip
    console.print(f"roof {highest.flops_per_s / 1e9:.0f} GFLOP/s, {highest.bytes_per_s / 1e9:.1f} GB/s")
    return highest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="*", help="those whose name holds one of these; all unless given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=32, help="of each of our searches")
    parser.add_argument("--stock-trials", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "search_quality")
    parser.add_argument("--draw", action="store_true", help="write table and plots from what is stored")
    parser.add_argument("--stock", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stock is not None:
        tune_stock(options.stock)
        return 0
    results = Results.load(options.folder / "results.json")
    if not options.draw:
        run_all(options, results)
    if not results.runs:
        parser.error("nothing is stored to draw")
    text = table(results)
    (options.folder / "results.md").write_text(text)
    draw(results, options.folder)
    print(text)
    return 0


def run_all(options: argparse.Namespace, results: Results) -> None:
    chosen = [n for n in OPERATORS if not options.operators or any(part in n for part in options.operators)]
    identity, target_json = local_cpu.probe()
    use_only(intrinsics_of(identity))
    load_before = os.getloadavg()[0]
    start_s = time.monotonic()
    known_roof = measure_roof(identity, target_json)
    with (
        tempfile.TemporaryDirectory(prefix="tunery-quality-") as scratch,
        ForkServer(preload(intrinsics_of(identity))) as server,
        LocalBuilder(server, target_json, workers=identity.cores) as builder,
    ):
        folder = Path(scratch)
        bench = Bench(identity, target_json, server, builder, known_roof, folder)
        layers = {name: prepare(name, identity, target_json, folder) for name in chosen}
        # All operators with one seed before the next: an interrupted run has whole seeds.
        for seed, (name, layer) in itertools.product(options.seeds, layers.items()):
            found = []
            for method in METHODS:
                if method == STOCK:
                    run, built = bench.stock(layer, seed, options.stock_trials)
                else:
                    run, built = bench.search(layer, method, seed, options.trials)
                failed = sum(median_s is None for _, median_s in run.trials)
                console.print(
                    f"{name}, {method}, seed {seed}: {run.winner_s * 1e6:.1f} µs ({run.winner}) after "
                    f"{len(run.trials)} trials, {failed} failed, {run.elapsed_s:.1f} s "
                    f"[{time.monotonic() - start_s:.0f} s]"
                )
                found.append((run, built))
            runs = bench.compare(found)
            results.add(machine_of(identity, options, load_before), runs)
            wanted_s = next(run.final_s for run in runs if run.method == STOCK)
            for run in runs:
                when = run.reaches(wanted_s)
                soon = "never" if when is None else f"after {when[0]} trials, {when[1]:.1f} s"
                console.print(f"  {run.method}: {run.final_s * 1e6:.1f} µs; as fast as stock's winner {soon}")


if __name__ == "__main__":
    sys.exit(main())
