"""A worker that is told to drive a GPU, and a job for one, on a machine that has none: by recorded answers of NVML up
to where the GPU itself is needed, which then is missing by name."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from pydantic import ValidationError

from service import loading
from tests.cuda_runtime import LEGACY, Runtime
from tests.deployment.dockerfiles import ROOT
from tests.e2e.conftest import TUNERY
from tests.samples import make_key
from tests.workers.conftest import Compiled
from tests.workers.devices.nvml import Gpu, Recorded
from tests.workers.devices.recordings import H100
from tests.workers.models import conv_bn_relu, save
from tuning_db import streams
from tuning_db.blobs import BlobStore
from tuning_db.catalog import ModelInfo
from tuning_db.errors import BuildFailed, DeviceLost
from tuning_db.jobs import JobSpec, SearchConfig
from tuning_db.keys import QuantizationConfig, TensorSpec, canonical_json, to_json
from tuning_db.messages import queue_for
from tuning_db.store import TuningStore
from tuning_db.trials import Failed, Measured
from workers.devices import local_gpu
from workers.devices.identity import gpu_identity_of
from workers.devices.lane import GpuLane, LocalLane
from workers.frontend import onnx_model
from workers.packaging import device_code
from workers.packaging.baselines import Engines
from workers.packaging.on_gpu import PARTS, OnGpu, run_on_gpu
from workers.packaging.reference import example_inputs
from workers.packaging.running import LibraryRefused, Ran
from workers.search.candidates import Built
from workers.search.guards import Guard
from workers.settings import Settings
from workers.tuning import Attempt

MACHINE = Recorded([Gpu(H100, "GPU-1d0d1b8e-0f4e", 16896, divided=False)])
pytestmark = pytest.mark.skipif(tvm.cuda(0).exist, reason="this machine has a GPU: benchmarks/gpu_check.sh")


class Stopwatch:
    """A runner whose candidates take what their libraries' names come to: each its own time, always the same."""

    at_once = 1

    def __init__(self) -> None:
        self.guard = Guard()
        self.closed = False

    def run_all(self, wanted: Sequence[tuple[Built, float | None]]) -> list[Measured | Failed]:
        return [Measured((1e-3 + zlib.crc32(Path(built.library).name.encode()) * 1e-12,) * 3) for built, _ in wanted]

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        outcomes = self.run_all([(built, None) for built in candidates])
        return [outcome for outcome in outcomes if isinstance(outcome, Measured)]

    def close(self) -> None:
        self.closed = True


def test_no_gpu_no_worker(tmp_path: Path) -> None:
    """A worker for a GPU that is not there does not start, and says why; nor for a GPU and boards at once."""
    command = [TUNERY, "worker", "--data-dir", str(tmp_path), "--gpu", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "no NVIDIA GPU is seen, or its driver is not there" in done.stdout + done.stderr
    with pytest.raises(ValidationError, match="a worker drives a GPU or boards, not both"):
        Settings(gpu="0", tracker="127.0.0.1:1", board_key="pi")


@pytest.mark.parametrize(
    ("quantization", "trials"),
    [(QuantizationConfig("fp16"), 8), (QuantizationConfig("int8", mode="dynamic").resolved(), 0)],
)
def test_a_job_for_a_gpu(
    quantization: QuantizationConfig, trials: int, sqlite_store: TuningStore, blobs: BlobStore, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The job's model is rounded to fp16 or quantized, imported, searched if that is asked for, and compiled to machine
    code of its GPU by the schedules that were found and by TVM's default; the check, in a process of its own, then
    misses the GPU: DeviceLost, and nothing is published. A CPU's worker refuses the job, whose queue is another.

    Recorded: what NVML says in this process. Faked: that TVM's runtime reaches the GPU, and what candidates take there.
    """
    pytest.importorskip("cuda.bindings.nvrtc", reason='NVRTC is not installed: pip install "tunery[cuda]"')
    monkeypatch.setitem(sys.modules, "pynvml", MACHINE)
    monkeypatch.setattr(local_gpu, "require_runtime", lambda _facts: None)
    stopwatch = Stopwatch()
    monkeypatch.setattr(GpuLane, "runner", lambda *_: stopwatch)
    lane = GpuLane("0")
    assert lane.environment() == {"CUDA_VISIBLE_DEVICES": "GPU-1d0d1b8e-0f4e"}
    device, target = lane.probe()
    path = save(conv_bn_relu(), tmp_path)
    key = make_key(
        inputs=(TensorSpec("x", "float32", (1, 8, 14, 14)),), device=device, target=target, toolchain=lane.toolchain(),
        quantization=quantization,
    )  # fmt: skip
    digest, size = blobs.put(path)
    sqlite_store.add_model(ModelInfo(key.model, digest, "onnx", size, onnx_model.inputs_of(conv_bn_relu()), ()))
    claimed = sqlite_store.claim(
        sqlite_store.submit(JobSpec(key, SearchConfig(trials=trials, seconds=120, tuner="autotvm"))).job.id, "worker"
    )
    assert claimed is not None
    claim, _ = claimed
    attempt = Attempt(Settings(data_dir=tmp_path, gpu="0"), sqlite_store, blobs, claim, tmp_path)
    with pytest.raises(DeviceLost, match="no NVIDIA GPU is seen"):
        attempt.run()
    assert stopwatch.closed
    events = sqlite_store.events(claim.job_id)
    stages = [event.data["stage"] for event in events if event.type == "stage"]
    assert stages == ["quantize", "import", "graph", "search", "build", "check"]
    assert not [event.data for event in events if event.type == "warning"]
    measured = [event.data for event in events if event.type == "trial"]
    assert {trial["outcome"] for trial in measured} == ({"measured"} if trials else set())
    # TVM's default schedule, and templates.
    assert not trials or len({trial["variant"] for trial in measured}) > 1
    for label in ("untuned", "tuned") if trials else ("untuned",):
        [cubin] = device_code.check(tmp_path / f"{label}.so", "sm_90")
        assert len(cubin.kernels) >= 1
    attempt.lane = LocalLane()
    assert queue_for(device.name) != queue_for(attempt.lane.probe()[0].name)
    with pytest.raises(BuildFailed, match="not what the job was submitted for: device"):
        attempt.run()
    with pytest.raises(local_gpu.UnusableDevice, match=r"arch sm_90 instead of sm_87.*driver"):
        local_gpu.expect(replace(device, arch="sm_87", driver="570.1"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Faked: the GPU. Libraries are for this machine's CPU, which is what TVM is asked for in the GPU's place, and
    CUDA's copies are those of `tests/cuda_runtime.py`."""
    runtime = Runtime(Random(0), at_once=True)
    monkeypatch.setattr(local_gpu, "load_runtime", lambda: None)
    monkeypatch.setattr(local_gpu, "expect", lambda _identity: None)
    monkeypatch.setattr(device_code, "check", lambda _path, _arch: ())
    monkeypatch.setattr(streams, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(tvm, "cuda", tvm.cpu)
    return runtime


def run(conv: Compiled, examples: list[NDArray[Any]], engines: Engines) -> Ran:
    gpu = OnGpu(json.loads(canonical_json(to_json(gpu_identity_of(H100)))))
    return run_on_gpu(gpu, {"untuned": str(conv.untuned)}, [[x] for x in examples], 3, 1e-4, lambda: engines)


def test_times_of_a_gpu(conv: Compiled, no_gpu: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library answers every example; its computation, its copies, both one after the other and both overlapped are
    timed apart, in turns with the engines. An engine that fails meanwhile has no time, and its reason is told."""
    examples = [example_inputs(conv.inputs, seed)["x"] for seed in (0, 1)]
    tired = iter(range(4))
    engines = Engines()
    engines.add("engine", {"version": "1"}, lambda: (lambda: None, {"precision": "any"}))
    engines.add("tired", {"version": "2"}, lambda: (lambda: next(tired), {}))
    ran = run(conv, examples, engines)
    session = onnxruntime.InferenceSession(str(conv.reference), providers=["CPUExecutionProvider"])
    for x, [got] in zip(examples, ran.outputs["untuned"], strict=True):
        assert np.allclose(got, session.run(None, {"x": x})[0], atol=1e-4)
    assert {name: len(samples) for name, samples in ran.samples_s.items()} == {"engine": 3, "untuned": 3}
    assert {part: len(samples) for part, samples in ran.parts_s["untuned"].items()} == dict.fromkeys(PARTS, 3)
    # Of one inference, though a call streams up to 64 of them: here that is no faster than one after the other.
    assert min(ran.parts_s["untuned"]["overlapped"]) < 10 * max(ran.parts_s["untuned"]["with_copies"])
    assert ran.engines == {
        "engine": {"version": "1", "precision": "any"},
        "tired": {"version": "2", "unavailable": "StopIteration"},
    }
    assert no_gpu.is_empty()
    monkeypatch.undo()
    monkeypatch.setattr(local_gpu, "expect", lambda _identity: None)
    with pytest.raises(LibraryRefused, match=r"the untuned library: .* holds no GPU kernel"):
        run(conv, [], Engines())


def test_a_stream_with_other_answers(conv: Compiled, no_gpu: Runtime) -> None:
    """A library that answers otherwise when inferences are streamed, as one would whose copies do not wait for its
    computation, is refused before anything is timed."""
    no_gpu.forgotten = lambda name, stream: (name, stream) == ("cudaStreamWaitEvent", LEGACY)
    no_gpu.random = None
    with pytest.raises(LibraryRefused, match="answers otherwise when inferences are streamed"):
        run(conv, [example_inputs(conv.inputs, seed)["x"] for seed in (0, 1)], Engines())
    assert no_gpu.is_empty()


def test_the_check_of_a_gpu(conv: Compiled, no_gpu: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/gpu_check.py` runs a library as a worker does and as a program does, called and streamed, and tells
    both latencies and the engines; a library that computes something else fails it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(loading, "load_cudart", lambda: None)
    monkeypatch.setattr(tvm.runtime.Device, "compute_version", property(lambda _device: "9.0"))
    import gpu_check

    monkeypatch.setattr(gpu_check, "ROUNDS", 3)
    monkeypatch.setattr(gpu_check, "MIN_SAMPLE_S", 1e-4)
    identity = gpu_identity_of(H100)
    library, other = tmp_path / "library.so", tmp_path / "other.so"
    for path in (library, other):
        path.symlink_to(conv.untuned)
    result = gpu_check.run(Path(save(of_weights(1), tmp_path)), library, identity)
    assert result["ok"] is True
    assert sorted(result["difference"]) == ["called", "streamed", "worker"]
    assert sorted(result["median_s"]) == sorted(["computation", *PARTS])
    assert result["engines"]["onnxruntime"]["median_s"] > 0
    assert gpu_check.run(Path(save(of_weights(2), tmp_path)), other, identity)["ok"] is False
    assert no_gpu.is_empty()


def of_weights(times: float) -> ModelProto:
    """`conv_bn_relu` for one image, its weights times this."""
    model = conv_bn_relu()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    weights = next(each for each in model.graph.initializer if len(each.dims) == 4)
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32(times), weights.name))
    return model
