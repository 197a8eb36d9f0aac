"""The engines on a GPU that a tuned library is measured against: ONNX Runtime's CUDA provider, and TensorRT.

Neither is an extra: which builds fit depends on the machine's driver. Those that are installed are used. Data lie on
the device, where the library's lie too, and a call ends when its outputs are computed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workers.packaging.baselines import BaselineUnavailable, Engines, Facts, Run, baseline, version_of
from workers.said import first_line

_ON_CUDA: Final = "CUDAExecutionProvider"
_ON_TENSORRT: Final = "TensorrtExecutionProvider"
#: In what an engine computes that was not let use float16.
AS_WRITTEN: Final = "as the model is written"

Inputs = Mapping[str, NDArray[Any]]
#: A way to prepare an engine: model, inputs, and whether it may compute in float16.
Way = Callable[[Path, Inputs, bool], tuple[Run, Facts]]


def installed() -> dict[str, Sequence[Way]]:
    """Engines for GPUs that are there, and the ways to use each, the better one first. Imports ONNX Runtime."""
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    # TensorRT itself first: it takes a model as a whole or refuses it, while ONNX Runtime hands it parts of one.
    tensorrt: list[Way] = [by_tensorrt] if importlib.util.find_spec("tensorrt") else []
    tensorrt += [_tensorrt_by_provider] if _ON_TENSORRT in providers else []
    ways: dict[str, Sequence[Way]] = {
        "onnxruntime-cuda": [_cuda_by_provider] if _ON_CUDA in providers else [],
        "tensorrt": tensorrt,
    }
    return {engine: found for engine, found in ways.items() if found}


def on_gpu(model_path: Path, inputs: Inputs, threads: int, *, half: bool, without: str | None = None) -> Engines:
    """ONNX Runtime on this machine's CPU, and on CUDA's first GPU those that are installed. After TVM reaches that GPU.

    `half` lets TensorRT compute in float16; ONNX Runtime computes as the model is written. Both may use TF32 for
    float32, which they do by themselves. `without`: why those on the GPU are not to be run.
    """
    import onnxruntime

    engines = Engines()
    # Of which distribution it is, several can be installed over one another: it knows itself.
    version = onnxruntime.__version__
    versions = {"onnxruntime-cuda": version, "tensorrt": version_of("tensorrt")}
    engines.add("onnxruntime", {"version": version}, lambda: (baseline("onnxruntime", model_path, inputs, threads), {}))
    for engine, ways in installed().items():
        facts: Facts = {} if versions[engine] is None else {"version": versions[engine]}
        if without is not None:
            engines.told[engine] = {**facts, "unavailable": without}
            continue
        engines.add(engine, facts, partial(_first_that_works, ways, model_path, inputs, half))
    return engines


def _first_that_works(ways: Sequence[Way], model_path: Path, inputs: Inputs, half: bool) -> tuple[Run, Facts]:
    reasons = []
    for way in ways:
        try:
            call, facts = way(model_path, inputs, half)
            call()
        except Exception as error:  # each engine raises its own
            reasons.append(first_line(error))
        else:
            return call, facts
    raise BaselineUnavailable("; ".join(reasons))


def by_provider(
    providers: list[str],
    options: Mapping[str, Any],
    model_path: Path,
    inputs: Inputs,
    device: str = "cuda",
) -> Run:
    """One inference by ONNX Runtime's first provider of these, `options` for it, with all data on the device."""
    import onnxruntime

    if device == "cuda":
        # Where CUDA's and cuDNN's libraries are wheels, it does not find them by itself.
        getattr(onnxruntime, "preload_dlls", lambda: None)()
    session_options = onnxruntime.SessionOptions()
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session_options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        str(model_path), session_options, providers=[(providers[0], dict(options)), *providers[1:]]
    )
    if providers[0] not in session.get_providers():
        raise BaselineUnavailable(f"ONNX Runtime has the {providers[0]}, and could not load it")
    binding = session.io_binding()
    for name, array in inputs.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), device, 0)
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, device, 0)

    def call() -> Any:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding

    return call


def _cuda_by_provider(model_path: Path, inputs: Inputs, _half: bool) -> tuple[Run, Facts]:
    return by_provider([_ON_CUDA], {}, model_path, inputs), {"precision": AS_WRITTEN}


def _tensorrt_by_provider(model_path: Path, inputs: Inputs, half: bool) -> tuple[Run, Facts]:
    import onnxruntime

    call = by_provider([_ON_TENSORRT, _ON_CUDA], {"trt_fp16_enable": half}, model_path, inputs)
    # Nodes that it does not take run by CUDA: how many, ONNX Runtime does not tell.
    by = f"{_ON_TENSORRT} of onnxruntime {onnxruntime.__version__}"
    return call, {"by": by, "precision": "float16" if half else AS_WRITTEN}


def by_tensorrt(model_path: Path, inputs: Inputs, half: bool) -> tuple[Run, Facts]:
    """TensorRT 10 or later: its ONNX parser, an engine for the model's own shapes, tensors of TVM's as its memory."""
    import tensorrt
    import tvm

    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(0)
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model_path)):
        raise BaselineUnavailable(f"TensorRT's parser: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    fp16 = getattr(tensorrt.BuilderFlag, "FP16", None)  # later ones compute in the types that the model is written in
    if half and fp16 is not None:
        config.set_flag(fp16)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BaselineUnavailable("TensorRT makes no engine of the model; the output of the job says why")
    # What an engine is made by must outlive it.
    runtime = tensorrt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    device = tvm.cuda(0)
    tensors = []
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        dtype, shape = np.dtype(tensorrt.nptype(engine.get_tensor_dtype(name))), tuple(context.get_tensor_shape(name))
        if engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT:
            if (inputs[name].dtype, inputs[name].shape) != (dtype, shape):
                raise BaselineUnavailable(f"TensorRT takes {name!r} as {dtype}{list(shape)}")
            tensors.append(tvm.runtime.tensor(inputs[name], device))
        else:
            if min(shape, default=0) < 0:
                raise BaselineUnavailable(f"TensorRT does not tell the shape of {name!r} before it runs")
            tensors.append(tvm.runtime.empty(shape, str(dtype), device))
        if not context.set_tensor_address(name, tensors[-1].data_ptr()):
            raise BaselineUnavailable(f"TensorRT does not take the memory for {name!r}")
    stream = device.create_raw_stream()

    def call() -> Any:
        if not context.execute_async_v3(stream):
            raise BaselineUnavailable("TensorRT does not run its engine")
        device.sync(stream)
        return runtime, engine, tensors

    return call, {"version": tensorrt.__version__, "precision": "float16" if half and fp16 is not None else AS_WRITTEN}
