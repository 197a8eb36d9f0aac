"""What the templates for GPUs schedule becomes machine code, for every kernel of real models among others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tvm
from tvm import s_tir, tirx

from benchmarks import model_zoo
from tests.workers.templates_gpu import cases, emulator
from tuning_db.keys import TensorSpec
from workers.devices.identity import GpuFacts, gpu_identity_of
from workers.devices.targets import gpu_target_of
from workers.frontend.onnx_import import import_onnx
from workers.packaging import gpu_library, nvrtc
from workers.search.templates.gpu_default import GpuDefaultTemplate
from workers.search.templates.gpu_plain import gpu_template
from workers.search.templates.gpu_registry import GPU_TEMPLATES
from workers.search.templates.knobs import Config, Gpu

BERT = Path(__file__).parents[1] / "graph" / "bert_layer.onnx"
ORIN = gpu_identity_of(GpuFacts("Orin (nvgpu)", (8, 7), 16, 62841 << 20, "580.65.06"))
MACHINE = Gpu(multiprocessors=16, tensor_types=("float16", "int8"))


def compile_all(functions: Mapping[str, tirx.PrimFunc], arch: str) -> int:
    """Bytes of machine code of scheduled functions, compiled together: most of NVRTC's time goes into headers."""
    pytest.importorskip("cuda.bindings.nvrtc", reason='NVRTC is not installed: pip install "tunery[cuda]"')
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    return len(nvrtc.compile_source(emulator.source_of(module, arch), arch, fast_math=False))


def scheduled(function: tirx.PrimFunc, name: str, config: Config, geometry: Mapping[str, int]) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
    GPU_TEMPLATES[name].schedule(schedule, geometry, config, MACHINE)
    return schedule.mod["main"]


CASES = (
    cases.product(17, 49, 31, dtype="float16", right="jk", after="residual"),
    cases.product(64, 128, 64, dtype="float16", after="bias"),
    cases.product(64, 64, 48, batch=2, dtype="int8", after="bias"),
    cases.convolution(1, 16, 32, (14, 14), dtype="float16", after="cast"),
    cases.convolution(1, 3, 7, (17, 17), stride=2, after="bias"),
    # Weights of which eight halves that are fetched at once would cross from one channel's window to the next.
    cases.convolution(1, 16, 16, (5, 14), window=(5, 2), padding=0, dtype="float16"),
    cases.rows("softmax", [7, 12], 197, "float16"),
    cases.rows("layer_norm", [49], 768),
    cases.rows("two", [3], 100),
    cases.rows("all", [3], 1000),
    cases.pool("max", 16, (14, 14)),
    cases.depthwise(16, (14, 14)),
    cases.elements("chain", [8, 64], "float16"),
    cases.elements("transpose", [3, 17, 8]),
    cases.elements("gather", [3, 17, 8], "float16"),
)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_choices_of_every_template_compile(arch: str) -> None:
    """The first guess, the last, and some in between, for an old GPU and a new one."""
    functions: dict[str, tirx.PrimFunc] = {}
    used: set[str] = set()
    for case in CASES:
        for name, geometry in gpu_template(case.function):
            used.add(name)
            configs = GPU_TEMPLATES[name].configs(geometry, MACHINE)
            for number in {0, len(configs) // 3, 2 * len(configs) // 3, len(configs) - 1}:
                functions[f"f{len(functions)}"] = scheduled(case.function, name, configs[number], geometry)
    assert used == GPU_TEMPLATES.keys() - {GpuDefaultTemplate.name}
    assert compile_all(functions, arch) > 0


def kernels_of(model: Path, inputs: Mapping[str, tuple[int, ...]], scratch: Path, *, half: bool) -> tvm.ir.IRModule:
    """The kernels of a model, as `gpu_library` lowers it, before they are scheduled."""
    imported = import_onnx(model, [TensorSpec(name, "float32", shape) for name, shape in inputs.items()], scratch)
    target = tvm.target.Target(json.loads(gpu_target_of(ORIN, json.dumps({"kind": "llvm"}))))
    return gpu_library.kernels(imported.module, target, half=half).module


@pytest.mark.parametrize(("name", "half", "count"), [("bert_layer", False, 15), ("resnet50", True, 30)])
def test_every_kernel_of_real_models_has_a_template(name: str, half: bool, count: int, tmp_path: Path) -> None:
    """The first guess of a kernel's likeliest template applies, and compiles: none is left to TVM's default."""
    if name == "bert_layer":
        module = kernels_of(BERT, {"states": (1, 8, 32)}, tmp_path, half=half)
    else:
        path = model_zoo.write(name, tmp_path)
        module = kernels_of(path, model_zoo.ZOO[name].inputs, tmp_path, half=half)
    functions: dict[str, tirx.PrimFunc] = {}
    kernels = {v.name_hint: f for v, f in module.functions.items() if isinstance(f, tirx.PrimFunc)}
    for kernel, function in kernels.items():
        found = gpu_template(function)
        assert found, kernel
        template, geometry = found[0]
        config = GPU_TEMPLATES[template].configs(geometry, MACHINE)[0]
        functions[f"f{len(functions)}"] = scheduled(function, template, config, geometry)
    assert len(kernels) == count
    assert compile_all(functions, "sm_87") > 0
