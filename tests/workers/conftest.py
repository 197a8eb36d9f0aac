"""What tests of the workers share: this machine's target, one warm fork server, one compiled model."""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import pytest
import tvm
from onnx import ModelProto
from tvm import relax

from tests.samples import make_spec
from tests.workers.models import conv_bn_relu, save
from tuning_db.jobs import Claim, SearchConfig
from tuning_db.keys import DeviceIdentity, TensorSpec
from tuning_db.store import TuningStore
from tuning_db.trials import Workload
from workers.devices import local_cpu
from workers.frontend import onnx_model
from workers.frontend.onnx_import import Imported, import_onnx
from workers.graph import pipeline, tasks
from workers.graph.algebra import name_of
from workers.packaging import library
from workers.packaging.reference import compare, example_inputs
from workers.search import intrinsics
from workers.search.forkserver import ForkServer
from workers.search.templates.knobs import Cpu

# Where a crash is told, whatever a test captures. TVM's handler of SIGSEGV, set when it is imported, tells it to what
# is captured, and so to nobody.
_STANDARD_ERROR = os.dup(2)


def pytest_configure() -> None:
    """Python's handlers of crashes take the place of TVM's."""
    faulthandler.disable()
    faulthandler.enable(_STANDARD_ERROR)


@dataclass(frozen=True)
class Compiled:
    """A model as a job has it between import and search."""

    inputs: tuple[TensorSpec, ...]
    imported: Imported
    module: tvm.ir.IRModule  #: after `pipeline.lower_operators`, every operator lowered by TVM
    reference: Path
    untuned: Path


@dataclass(frozen=True)
class Host:
    """This machine's CPU."""

    identity: DeviceIdentity
    target_json: str

    @property
    def target(self) -> tvm.target.Target:
        return tvm.target.Target(json.loads(self.target_json))

    @property
    def cpu(self) -> Cpu:
        return local_cpu.cpu_of(self.identity)

    @property
    def intrinsics(self) -> str:
        return "x86" if self.identity.arch == "x86_64" else "arm_cpu"


@pytest.fixture(scope="session")
def host() -> Host:
    host = Host(*local_cpu.probe())
    # Before anything in this process makes a TuneContext, which would import the intrinsics of every device.
    intrinsics.use_only(host.intrinsics)
    return host


@pytest.fixture(scope="session")
def server(host: Host) -> Iterator[ForkServer]:
    """A fork server that is ready to build, measure and propose."""
    with ForkServer(intrinsics.preload(host.intrinsics)) as server:
        yield server


def lower(model: ModelProto, host: Host, folder: Path, size: int = 1) -> tuple[tuple[TensorSpec, ...], Imported]:
    """Import a model with every symbol bound to `size`."""
    inputs = tuple(
        TensorSpec(p.name, p.dtype, tuple(d if isinstance(d, int) else size for d in p.shape))
        for p in onnx_model.inputs_of(model)
    )
    return inputs, import_onnx(save(model, folder), inputs, folder)


def run_pipeline(imported: Imported, host: Host) -> tvm.ir.IRModule:
    """The module that an untuned library is compiled from."""
    with host.target, pipeline.pass_context():
        return pipeline.lower_operators()(pipeline.simplify()(imported.module))


def operators(module: tvm.ir.IRModule) -> list[str]:
    """What `main` calls, in order."""
    values = [binding.value for block in module["main"].body.blocks for binding in block.bindings]
    return [name_of(value) for value in values if isinstance(value, relax.Call)]


def compile_model(model: ModelProto, host: Host, folder: Path) -> Compiled:
    """Import, lower and compile without a schedule."""
    inputs, imported = lower(model, host, folder)
    module = run_pipeline(imported, host)
    untuned = folder / "untuned.so"
    library.compile_library(module, host.target, untuned)
    return Compiled(inputs, imported, module, imported.bound, untuned)


def differences(model: ModelProto, host: Host, folder: Path) -> list[tuple[str, str]]:
    """Outputs, with what is wrong of them, in which the untuned library differs from ONNX Runtime on example inputs."""
    compiled = compile_model(model, host, folder)
    examples = example_inputs(compiled.inputs, 0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # of a batch that it quantizes itself the numbers depend on it
    # Otherwise ONNX Runtime rounds the activations too before it multiplies them with quantized weights.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(compiled.reference, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(compiled.untuned)), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(examples[spec.name]) for spec in compiled.inputs))
    outputs = [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]
    compared = compare(session.run(None, examples), outputs, names)
    return [(entry["output"], entry["problem"]) for entry in compared if not entry["ok"]]


@pytest.fixture(scope="session")
def conv(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Convolution, batch normalisation and ReLU, compiled without a schedule."""
    return compile_model(conv_bn_relu(), host, tmp_path_factory.mktemp("conv"))


@pytest.fixture(scope="session")
def conv_workload(conv: Compiled) -> Workload:
    """The one computation of `conv`."""
    [task] = tasks.extract(conv.module)
    return workload_of(task.module)


def workload_of(module: tvm.ir.IRModule) -> Workload:
    from tvm.s_tir import meta_schedule as ms

    return Workload(*map(str, ms.database.Workload(module).as_json()))


@pytest.fixture
def sqlite_store(sqlite_url: str) -> Iterator[TuningStore]:
    """A store over SQLite alone: what these tests ask does not depend on the database."""
    store = TuningStore(sqlite_url)
    yield store
    store.close()


def make_claim(store: TuningStore, model: str = "a model") -> Claim:
    """The right to write about a new job."""
    submission = store.submit(make_spec(model, search=SearchConfig(trials=1000, seconds=600)))
    claimed = store.claim(submission.job.id, "worker")
    assert claimed is not None
    return claimed[0]


@pytest.fixture
def claim(sqlite_store: TuningStore) -> Claim:
    return make_claim(sqlite_store)
