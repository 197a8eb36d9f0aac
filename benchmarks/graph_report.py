"""Kernels of one inference and memory of its intermediates, beside ONNX Runtime's optimised graph.

    python benchmarks/graph_report.py [MODEL ...]      # of benchmarks/model_zoo.py; without a name all of them

Nothing is measured and nothing compiled: the graph pipeline alone runs, for this machine's vectors. ONNX Runtime's
figure is the number of nodes in the graph that it runs, at its highest level of optimisation, whose nodes are bound to
this machine too, or at the level before, where that has fewer. Writes docs/graph.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import model_zoo
import onnx
import onnxruntime
import tvm

from tuning_db.keys import TensorSpec
from workers.devices import local_cpu
from workers.frontend.onnx_import import import_onnx
from workers.graph import pipeline
from workers.graph.memory import MemoryPlan, PlaceIntermediates
from workers.graph.operators import Model
from workers.search.candidates import Choice

_HEAD: Final = """# What the graph pipeline makes of models

Written by `benchmarks/graph_report.py`, whose head says what is counted; {machine};
ONNX Runtime {ort}, TVM {tvm}, pipeline {pipeline}.

Nodes are the file's own; kernels are calls in one inference of ours; layout transforms are those
of them that only put numbers elsewhere or into another order, a copy of the result into its own shape among them;
memory is that of all intermediate tensors, without and with planning. A concatenation whose parts are written where
they belong is no kernel.

| model | nodes | ONNX Runtime | kernels | layout transforms | concatenations dropped | memory, MB | planned, MB |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Of one model."""

    nodes: int
    runtime_nodes: int
    plan: MemoryPlan


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help="names in the model zoo; all of them if none is named")
    parser.add_argument("--report", type=Path, default=Path(__file__).parents[1] / "docs" / "graph.md")
    chosen = parser.parse_args()
    text = _HEAD.format(
        machine=f"for {platform.machine()} with {local_cpu.cpu_of(local_cpu.probe()[0]).lanes} float32 to a vector",
        ort=onnxruntime.__version__, tvm=tvm.__version__, pipeline=pipeline.PIPELINE,
    )  # fmt: skip
    for name in chosen.models or list(model_zoo.ZOO):
        with tempfile.TemporaryDirectory() as folder:
            row = report(model_zoo.write(name, Path(folder)), Path(folder))
        plan = row.plan
        text += (
            f"| {name} | {row.nodes} | {row.runtime_nodes} | {plan.kernels.total()} | {plan.layout_transforms} "
            f"| {plan.concatenations} | {plan.unplanned_bytes / 1e6:.1f} | {plan.planned_bytes / 1e6:.1f} |\n"
        )
        print(text.splitlines()[-1], flush=True)
    chosen.report.write_text(text)


def report(path: Path, scratch: Path) -> Row:
    """Of a model whose shapes are all static."""
    graph = onnx.load(path).graph
    nodes = [_runtime_nodes(path, scratch, level) for level in ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")]
    specs = [
        TensorSpec(name, str(array.dtype), tuple(array.shape)) for name, array in model_zoo.inputs_for(path).items()
    ]
    return Row(len(graph.node), min(nodes), plan(path, specs, scratch))


def plan(path: Path, specs: list[TensorSpec], scratch: Path) -> MemoryPlan:
    """What our library of the model would call, by its plainest variants."""
    identity, target_json = local_cpu.probe()
    target = tvm.target.Target(json.loads(target_json))
    imported = import_onnx(path, specs, scratch)
    with target, pipeline.pass_context():
        simplified = pipeline.simplify()(imported.module)
    model = Model(simplified, target, local_cpu.cpu_of(identity).lanes, winograd=False)
    operators = model.extract(_without_store)
    module = model.assemble({o.name: Choice(o.variants[0], None, None, None) for o in operators})
    place = PlaceIntermediates()
    with target, pipeline.pass_context():
        pipeline.lower_to_vm(place)(module)
    return place.plan


def _without_store(modules: list[tvm.ir.IRModule]) -> list[Any]:
    """Workloads are looked up by nobody here: their modules stand for them."""
    return modules


def _runtime_nodes(path: Path, scratch: Path, level: str) -> int:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(scratch / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return len(onnx.load(scratch / "optimised.onnx").graph.node)


if __name__ == "__main__":
    main()
