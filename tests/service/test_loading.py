"""A fetched library is loaded by its manifest: for this machine's CPU, or for a GPU, of which there is none here.

Faked where a test says so: the GPU. The library is one for this machine's CPU, which is what TVM is asked for in the
GPU's place, and CUDA's copies are those of `tests/cuda_runtime.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax

from service import loading
from service.loading import InputRefused, load
from tests.cuda_runtime import Runtime
from tuning_db import streams

INPUTS = [{"name": "x", "dtype": "float32", "shape": [2, 3]}, {"name": "n", "dtype": "int64", "shape": []}]
BATCHES = [{"x": np.full((2, 3), number, np.float32), "n": np.asarray(number)} for number in range(5)]
#: How the manifests of libraries tell what they are for.
CPU: dict[str, Any] = {"kind": "cpu", "model": "EPYC", "arch": "x86_64", "cores": 1}
GPU: dict[str, Any] = {"kind": "cuda", "model": "H100 PCIe", "arch": "sm_90", "cores": 114}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x + n, and n + n, for this machine's CPU."""
    builder = relax.BlockBuilder()
    x, n = relax.Var("x", relax.TensorType((2, 3), "float32")), relax.Var("n", relax.TensorType((), "int64"))
    with builder.function("main", [x, n]):
        y = builder.emit(relax.op.add(x, relax.op.astype(n, "float32")))
        builder.emit_func_output([y, builder.emit(relax.op.add(n, n))])
    path = tmp_path_factory.mktemp("compiled") / "library.so"
    relax.build(builder.get(), "llvm").export_library(str(path))
    return path


def folder_of(library: Path, device: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "library.so").symlink_to(library)
    (tmp_path / "manifest.json").write_text(json.dumps({"key_fields": {"device": device}, "inputs": INPUTS}))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Faked: an sm_90, by this machine's CPU."""
    runtime = Runtime(Random(0), at_once=True)
    monkeypatch.setattr(loading, "load_cudart", lambda: None)
    monkeypatch.setattr(streams, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(tvm, "cuda", tvm.cpu)
    monkeypatch.setattr(tvm.runtime.Device, "compute_version", property(lambda _device: "9.0"))
    monkeypatch.setattr(tvm.runtime.Device, "device_name", property(lambda _device: "NVIDIA H200"))
    return runtime


def is_right(number: int, answer: list[NDArray[Any]]) -> bool:
    y, doubled = answer
    return bool((y == 2 * number).all()) and y.shape == (2, 3) and doubled == 2 * number and doubled.shape == ()


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_called_and_streamed(device: dict[str, Any], compiled: Path, gpu: Runtime, tmp_path: Path) -> None:
    """A library answers a call, and each of many inputs in their order, on a CPU and on a GPU of its architecture; the
    library may be called while it streams, and nothing is left of streams that ended or were dropped."""
    library = load(folder_of(compiled, device, tmp_path))
    assert is_right(3, library(BATCHES[3]))
    for number, answer in enumerate(library.stream(BATCHES)):
        assert is_right(number, answer)
        assert is_right(1, library(BATCHES[1]))
    assert number == 4
    dropped = library.stream(BATCHES)
    assert is_right(0, next(dropped))
    assert gpu.is_empty() == (device is CPU)
    dropped.close()
    assert gpu.is_empty()
    assert gpu.calls.count("uploads") == (0 if device is CPU else 2 * (5 + 3))


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_an_input_is_refused_in_its_place(device: dict[str, Any], compiled: Path, gpu: Runtime, tmp_path: Path) -> None:
    """Of a stream, what an input is refused for comes after the answers before it, as does an error of its source."""
    library = load(folder_of(compiled, device, tmp_path))
    stream = library.stream([*BATCHES[:3], {"x": BATCHES[0]["x"]}, BATCHES[4]])
    assert [is_right(number, next(stream)) for number in range(3)] == [True] * 3
    with pytest.raises(InputRefused, match="input 'n' is missing"):
        next(stream)

    def failing() -> Iterator[dict[str, NDArray[Any]]]:
        yield BATCHES[0]
        raise OSError("the camera is gone")

    stream = library.stream(failing())
    assert is_right(0, next(stream))
    with pytest.raises(OSError, match="the camera is gone"):
        next(stream)
    with pytest.raises(InputRefused, match=r"input 'x' is float64\[3\], not float32\[2, 3\]"):
        library({**BATCHES[0], "x": np.zeros(3)})
    assert gpu.is_empty()


def test_another_gpu(compiled: Path, gpu: Runtime, tmp_path: Path) -> None:
    """A library for another architecture is refused by both, and nothing is loaded; so is one for no known device."""
    folder = folder_of(compiled, {**GPU, "model": "Orin", "arch": "sm_87"}, tmp_path)
    with pytest.raises(InputRefused, match=r"is for Orin, sm_87; this GPU, NVIDIA H200, is sm_90"):
        load(folder)
    (folder / "manifest.json").write_text(json.dumps({"key_fields": {"device": {"kind": "npu", "model": "N1"}}}))
    with pytest.raises(InputRefused, match="is for N1: this loads libraries for CPUs and NVIDIA's GPUs"):
        load(folder)
    assert gpu.calls == []


@pytest.mark.skipif(tvm.cuda(0).exist, reason="this machine has a GPU")
def test_no_gpu(compiled: Path, tmp_path: Path) -> None:
    """Without a GPU, or without CUDA's runtime, that is said."""
    folder = folder_of(compiled, GPU, tmp_path)
    program = "import sys; from service.loading import load; sys.modules.update({}); load(sys.argv[1])"
    hidden = program.replace("{}", "{'cuda': None}")
    for text, said in (
        (program, "is for H100 PCIe, sm_90: TVM reaches no GPU here; its driver is missing"),
        (hidden, "is for H100 PCIe, sm_90: CUDA's runtime is not installed"),
    ):
        done = subprocess.run([sys.executable, "-c", text, str(folder)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert f"CudaFailed: the library {said}" in done.stderr
