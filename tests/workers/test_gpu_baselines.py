"""Engines on a GPU that libraries are measured against, where there is no GPU: ONNX Runtime's binding of data is that
of its CPU provider, and TensorRT a stand-in with the functions of its Python package that are used here."""

from __future__ import annotations

import ctypes
import sys
import warnings
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import ModelProto, helper

from tests.workers.models import make_model, normal, port, save
from workers.packaging.baselines import BaselineUnavailable, Engines
from workers.packaging.gpu_baselines import AS_WRITTEN, by_provider, by_tensorrt, installed, on_gpu

INPUTS = {"left": normal(4, 8, seed=1), "shift": np.asarray(3.0, np.float32)}


def model() -> ModelProto:
    """Inputs of two ranks, one without dimensions, and two outputs."""
    return make_model(
        [
            helper.make_node("Add", ["left", "shift"], ["shifted"]),
            helper.make_node("MatMul", ["shifted", "w"], ["product"]),
        ],
        [port("shift"), port("left", 4, 8)],
        [port("product", 4, 3), port("shifted", 4, 8)],
        {"w": normal(8, 3, seed=5)},
    )


def wanted() -> list[NDArray[Any]]:
    shifted = INPUTS["left"] + INPUTS["shift"]
    return [shifted @ normal(8, 3, seed=5), shifted]


def test_onnxruntime_binds_its_data(tmp_path: Path) -> None:
    """Inputs by name, without dimensions too, and outputs in the model's order are bound to the device once; each call
    computes them there. Here that is the CPU."""
    call = by_provider(["CPUExecutionProvider"], {}, Path(save(model(), tmp_path)), INPUTS, device="cpu")
    for _ in range(2):
        binding: Any = call()
        for got, right in zip(binding.copy_outputs_to_cpu(), wanted(), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(len(installed()) > 0, reason="this machine has them")
def test_what_is_not_installed_is_not_told(tmp_path: Path) -> None:
    """With neither engine there is ONNX Runtime on the CPU alone, and nothing is said of others."""
    engines = on_gpu(Path(save(model(), tmp_path)), INPUTS, 1, half=False)
    assert list(engines.calls) == ["onnxruntime"]
    assert engines.told == {"onnxruntime": {"version": onnxruntime.__version__}}


@dataclass
class Session:
    """An InferenceSession of a build of ONNX Runtime with CUDA, by the CPU: data "on cuda" are in this memory."""

    loads: tuple[str, ...]
    asked: list[Any] = field(default_factory=list)

    def __call__(self, path: str, options: Any = None, providers: Any = ()) -> Any:
        real = Real(path, options, providers=["CPUExecutionProvider"])
        names = [each if isinstance(each, str) else each[0] for each in providers]
        self.asked.append(providers)

        def io_binding() -> Any:
            binding = real.io_binding()
            return SimpleNamespace(
                bind_ortvalue_input=binding.bind_ortvalue_input,
                bind_output=lambda name, device, number: binding.bind_output(name, self.cpu(device), number),
                synchronize_outputs=binding.synchronize_outputs,
                real=binding,
            )

        return SimpleNamespace(
            run=real.run,
            get_providers=lambda: [*(name for name in names if name in self.loads), "CPUExecutionProvider"],
            get_outputs=real.get_outputs,
            io_binding=io_binding,
            run_with_iobinding=lambda binding: real.run_with_iobinding(binding.real),
        )

    def cpu(self, device: str) -> str:
        assert device == "cuda"
        return "cpu"


Real = onnxruntime.InferenceSession
CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


def build_of_onnxruntime(monkeypatch: pytest.MonkeyPatch, reports: list[str], *loads: str) -> Session:
    """Faked: a build that reports providers, of which some can be loaded."""
    session = Session(loads)
    real = onnxruntime.OrtValue.ortvalue_from_numpy
    value = SimpleNamespace(ortvalue_from_numpy=lambda array, device, number: real(array, session.cpu(device), number))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*reports, "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(onnxruntime, "OrtValue", value)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    return session


def test_providers_of_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA provider computes as the model is written, TensorRT's in float16 where the job does; both are told with
    their versions, and are callables."""
    session = build_of_onnxruntime(monkeypatch, [TENSORRT, CUDA], TENSORRT, CUDA)
    engines = on_gpu(Path(save(model(), tmp_path)), INPUTS, 1, half=True)
    assert list(engines.calls) == ["onnxruntime", "onnxruntime-cuda", "tensorrt"]
    version = onnxruntime.__version__
    assert engines.told["onnxruntime-cuda"] == {"version": version, "precision": AS_WRITTEN}
    by = f"TensorrtExecutionProvider of onnxruntime {version}"
    assert engines.told["tensorrt"] == {"by": by, "precision": "float16"}
    assert session.asked == [["CPUExecutionProvider"], [(CUDA, {})], [(TENSORRT, {"trt_fp16_enable": True}), CUDA]]
    for call in engines.calls.values():
        call()
    assert all("unavailable" not in told for told in engines.told.values())


def test_a_provider_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that a build reports and cannot load, so that ONNX Runtime would take the CPU, is unavailable and why
    is told; so is an engine that refuses the model, and one that is left out."""
    build_of_onnxruntime(monkeypatch, [TENSORRT, CUDA], CUDA)
    path = Path(save(model(), tmp_path))
    engines = on_gpu(path, INPUTS, 1, half=False)
    assert list(engines.calls) == ["onnxruntime", "onnxruntime-cuda"]
    reason = f"ONNX Runtime has the {TENSORRT}, and could not load it"
    assert engines.told["tensorrt"] == {"unavailable": reason}
    # One that loads, and is given what the model does not take.
    engines = on_gpu(path, {**INPUTS, "left": normal(3, 7)}, 1, half=False)
    assert "unavailable" in engines.told["onnxruntime-cuda"]
    engines = on_gpu(path, INPUTS, 1, half=False, without="it was late")
    assert list(engines.calls) == ["onnxruntime"]
    assert [told.get("unavailable") for told in engines.told.values()] == [None, "it was late", "it was late"]


def test_a_provider_that_is_not_in_the_build(tmp_path: Path) -> None:
    """ONNX Runtime itself, asked for a provider that it has not, says so or takes the CPU: neither is timed."""
    engines = Engines()
    path = Path(save(model(), tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engines.add("gpu", {}, lambda: (by_provider(["ROCMExecutionProvider"], {}, path, INPUTS, device="cpu"), {}))
    assert engines.calls == {}
    assert "unavailable" in engines.told["gpu"]


# --- TensorRT ---------------------------------------------------------------------------------------------------------


@dataclass
class TensorRT:
    """The module `tensorrt`: an engine computes the model with ONNX Runtime, from and to the addresses it was given."""

    refuses: str = ""  #: what fails
    shape: tuple[int, ...] | None = None  #: that the outputs are told to have
    flags: list[str] = field(default_factory=list)
    addresses: dict[str, int] = field(default_factory=dict)
    BuilderFlag: Any = field(default_factory=lambda: SimpleNamespace(FP16="fp16"))

    __version__ = "10.13.3"
    __spec__ = ModuleSpec("tensorrt", None)
    TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")
    Logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None})

    def Builder(self, _logger: Any) -> Any:  # noqa: N802 and so on: TensorRT's names
        config = SimpleNamespace(set_flag=self.flags.append)
        return SimpleNamespace(
            create_network=lambda flags: SimpleNamespace(flags=flags),
            create_builder_config=lambda: config,
            build_serialized_network=lambda network, _config: None if self.refuses == "build" else network.path,
        )

    def OnnxParser(self, network: Any, _logger: Any) -> Any:  # noqa: N802
        def parse_from_file(path: str) -> bool:
            network.path = path
            return self.refuses != "parse"

        said = SimpleNamespace(desc=lambda: "In node 3: UNSUPPORTED_NODE: NonZero")
        return SimpleNamespace(parse_from_file=parse_from_file, get_error=lambda _number: said)

    def Runtime(self, _logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=self._engine)

    def nptype(self, dtype: Any) -> Any:
        return dtype

    def _engine(self, path: str) -> Any:
        session = Real(path, providers=["CPUExecutionProvider"])
        ports = {each.name: each for each in [*session.get_inputs(), *session.get_outputs()]}
        inputs = [each.name for each in session.get_inputs()]

        def shape(name: str) -> tuple[int, ...]:
            return self.shape if self.shape is not None and name not in inputs else tuple(ports[name].shape)

        def view(name: str) -> NDArray[Any]:
            size = int(np.prod(shape(name), dtype=int))
            memory = (ctypes.c_float * size).from_address(self.addresses[name])
            return np.ctypeslib.as_array(memory).reshape(shape(name))

        def set_tensor_address(name: str, address: int) -> bool:
            self.addresses[name] = address
            return self.refuses != "address"

        def execute(_stream: int) -> bool:
            outputs = session.run(list(ports)[len(inputs) :], {name: view(name) for name in inputs})
            for name, output in zip(list(ports)[len(inputs) :], outputs, strict=True):
                view(name)[...] = output
            return self.refuses != "run"

        context = SimpleNamespace(
            get_tensor_shape=shape, set_tensor_address=set_tensor_address, execute_async_v3=execute
        )
        return SimpleNamespace(
            num_io_tensors=len(ports),
            get_tensor_name=list(ports).__getitem__,
            get_tensor_dtype=lambda name: {"tensor(float)": np.float32, "tensor(int64)": np.int64}[ports[name].type],
            get_tensor_mode=lambda name: "in" if name in inputs else "out",
            create_execution_context=lambda: context,
        )


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """Faked: TensorRT, and that the GPU's memory is this process's."""
    module = TensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(tvm, "cuda", tvm.cpu)
    return module


def test_tensorrt(tensorrt: TensorRT, tmp_path: Path) -> None:
    """TensorRT's engine finds each input, and leaves each output, in memory of its own on the device; it may use
    float16 where the job does."""
    path = Path(save(model(), tmp_path))
    call, facts = by_tensorrt(path, INPUTS, False)
    assert facts == {"version": "10.13.3", "precision": AS_WRITTEN}
    *_, tensors = call()
    by_address = {tensor.data_ptr(): tensor.numpy() for tensor in tensors}
    assert len(by_address) == 4
    for name, right in zip(("product", "shifted"), wanted(), strict=True):
        np.testing.assert_allclose(by_address[tensorrt.addresses[name]], right, rtol=1e-4, atol=1e-6)
    assert tensorrt.flags == []
    engines = on_gpu(path, INPUTS, 1, half=True)
    assert list(engines.calls) == ["onnxruntime", "tensorrt"]
    assert engines.told["tensorrt"] == {"version": "10.13.3", "precision": "float16"}
    assert tensorrt.flags == ["fp16"]
    tensorrt.BuilderFlag = SimpleNamespace()  # later ones have no such flag
    assert by_tensorrt(path, INPUTS, True)[1]["precision"] == AS_WRITTEN


@pytest.mark.parametrize(
    ("refuses", "said"),
    [
        ("parse", "TensorRT's parser: In node 3: UNSUPPORTED_NODE: NonZero"),
        ("build", "TensorRT makes no engine of the model"),
        ("address", "TensorRT does not take the memory for 'shift'"),
        ("run", "TensorRT does not run its engine"),
        ("shape", "TensorRT does not tell the shape of 'product' before it runs"),
        ("input", r"TensorRT takes 'left' as float32\[4, 8\]"),
    ],
)
def test_tensorrt_refuses(refuses: str, said: str, tensorrt: TensorRT, tmp_path: Path) -> None:
    """What TensorRT does not take is unavailable, with its reason, and ONNX Runtime is timed without it."""
    tensorrt.refuses, tensorrt.shape = refuses, (-1, 3) if refuses == "shape" else None
    inputs = {**INPUTS, "left": normal(2, 8)} if refuses == "input" else INPUTS
    path = Path(save(model(), tmp_path))

    def use() -> None:
        by_tensorrt(path, inputs, False)[0]()

    with pytest.raises(BaselineUnavailable, match=said):
        use()
    if refuses != "input":
        engines = on_gpu(path, inputs, 1, half=False)
        assert list(engines.calls) == ["onnxruntime"]
        assert "unavailable" in engines.told["tensorrt"]


def test_tensorrt_by_the_other_way(tensorrt: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that TensorRT does not take as a whole is given to ONNX Runtime's TensorRT provider; if that fails too,
    both reasons are told."""
    tensorrt.refuses = "parse"
    path = Path(save(model(), tmp_path))
    build_of_onnxruntime(monkeypatch, [TENSORRT], TENSORRT)
    told = on_gpu(path, INPUTS, 1, half=False).told["tensorrt"]
    assert str(told["by"]).startswith("TensorrtExecutionProvider of onnxruntime")
    build_of_onnxruntime(monkeypatch, [TENSORRT])
    told = on_gpu(path, INPUTS, 1, half=False).told["tensorrt"]
    assert str(told["unavailable"]).startswith("TensorRT's parser: ")
    assert str(told["unavailable"]).endswith(f"; ONNX Runtime has the {TENSORRT}, and could not load it")
