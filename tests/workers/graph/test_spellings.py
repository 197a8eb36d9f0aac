"""A transformer's layer comes down to the same kernels however an exporter spelled its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tvm
from tvm import relax

from tests.samples import make_key
from tests.workers.conftest import Host, lower
from tests.workers.graph.spellings import ATTENTIONS, GELUS, NORMS, layer
from tuning_db.jobs import Claim
from tuning_db.store import TuningStore
from workers.graph import pipeline
from workers.graph.memory import MemoryPlan
from workers.graph.operators import Model
from workers.packaging import library
from workers.packaging.reference import compare, example_inputs
from workers.search.candidates import Choice
from workers.search.records import Records

#: Queries, keys and values by one product; scores, masked, their softmax, what they weigh, projected and added to what
#: was read; normalised; two dense layers, the first with GELU, the second with what it read; normalised.
KERNELS = {
    "dense": 4, "matmul": 2, "fused_reshape_add": 1, "softmax": 1, "layer_norm": 2,
}  # fmt: skip

#: So that every spelling is in one of as few layers as possible.
LAYERS = [
    (attention, list(NORMS)[index % len(NORMS)], list(GELUS)[index % len(GELUS)])
    for index, attention in enumerate(ATTENTIONS)
]


def test_every_spelling_is_tried() -> None:
    """The layers hold each spelling of each part."""
    assert [set(names) for names in zip(*LAYERS, strict=True)] == [set(ATTENTIONS), set(NORMS), set(GELUS)]


@pytest.mark.parametrize(("attention", "norm", "gelu"), LAYERS)
def test_same_kernels(
    attention: str, norm: str, gelu: str, host: Host, sqlite_store: TuningStore, claim: Claim, tmp_path: Path
) -> None:
    """Attention, normalisation of rows and GELU are recognised, and the library agrees with ONNX Runtime."""
    model = layer(ATTENTIONS[attention], NORMS[norm], GELUS[gelu])
    inputs, imported = lower(model, host, tmp_path)
    with host.target, pipeline.pass_context():
        divided = Model(pipeline.simplify()(imported.module), host.target, host.cpu.lanes, winograd=False)
    operators = divided.extract(Records(sqlite_store, claim, make_key().record_scope()).adopt)
    module = divided.assemble({o.name: Choice(o.variants[0], None, None, None) for o in operators})
    plan = library.compile_library(module, host.target, tmp_path / "layer.so")
    assert kinds(plan) == KERNELS
    assert plan.layout_transforms == 0
    assert plan.planned_bytes <= plan.unplanned_bytes / 2
    examples = example_inputs(inputs, 0)
    wanted = onnxruntime.InferenceSession(imported.bound, providers=["CPUExecutionProvider"]).run(None, examples)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "layer.so")), tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(examples[spec.name]) for spec in inputs)).numpy()
    [entry] = compare(wanted, [np.asarray(got)], ["y"])
    assert entry["ok"], entry


def kinds(plan: MemoryPlan) -> dict[str, int]:
    """Calls by kind: names without numbers."""
    found: dict[str, int] = {}
    for name, calls in plan.kernels.items():
        kind = "_".join(part.rstrip("0123456789") for part in name.split("_")).rstrip("_")
        found[kind] = found.get(kind, 0) + calls
    return found
