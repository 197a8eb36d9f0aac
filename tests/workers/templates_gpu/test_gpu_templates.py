"""Templates for GPUs on small kernels of every kind: each choice computes what the unscheduled function does.

Numbers are shown without a GPU: the CUDA source runs on this machine's CPU (`emulator`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import s_tir

from tests.workers.templates_gpu import emulator
from tests.workers.templates_gpu.cases import Case, convolution, product
from workers.packaging import nvrtc
from workers.search.templates.gpu_fragments import register_fragments
from workers.search.templates.gpu_plain import gpu_template
from workers.search.templates.gpu_registry import GPU_TEMPLATES
from workers.search.templates.knobs import Config, Gpu, config_of

GPU = Gpu(multiprocessors=16, tensor_types=("float16", "int8"))

CASES: dict[str, Callable[[], Case]] = {
    "square": lambda: product(32, 32, 32),
    "odd": lambda: product(17, 49, 33, after="bias"),
    "turned": lambda: product(33, 24, 40, left="ki", right="jk"),
    "batch": lambda: product(12, 20, 16, batch=3),
    "half": lambda: product(40, 24, 48, dtype="float16", after="bias"),
    "bytes": lambda: product(32, 16, 64, dtype="int8"),
    "convolution": lambda: convolution(1, 8, 24, (9, 7)),
    "half convolution": lambda: convolution(1, 16, 32, (10, 10), dtype="float16"),
}


def some_configs(name: str, geometry: dict[str, int], count: int) -> list[Config]:
    """The first guess, and others at random."""
    configs = GPU_TEMPLATES[name].configs(geometry, GPU)
    assert configs, name
    return [configs[0], *random.Random(1).sample(configs[1:], min(count, len(configs) - 1))]


@pytest.mark.skipif(emulator.compiler() is None, reason="no g++")
@pytest.mark.parametrize("name", CASES)
def test_any_choice_computes_the_same(name: str) -> None:
    """Every template that fits, by its first guess and others: the numbers are those of the function without a
    schedule, whatever the threads' order; the trace is replayed to the same kernel, and begins with its knobs."""
    case = CASES[name]()
    wanted = case.wanted()
    fitting = gpu_template(case.function)
    assert fitting
    for template, geometry in fitting:
        for config in some_configs(template, geometry, 2):
            schedule = s_tir.Schedule(tvm.IRModule({"main": case.function}), error_render_level="fast")
            GPU_TEMPLATES[template].schedule(schedule, geometry, config, GPU)
            trace = json.dumps(schedule.trace.as_json(), default=lambda value: value.value)
            assert dict(config_of(GPU_TEMPLATES[template], trace)) == dict(config)
            register_fragments(trace)
            again = s_tir.Schedule(tvm.IRModule({"main": case.function}))
            tvm.s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), again)
            tvm.ir.assert_structural_equal(again.mod, schedule.mod)
            for descending in (False, True):
                arrays = case.arguments()
                emulator.run(schedule, arrays, descending=descending)
                for got, expected in zip(arrays[len(arrays) - len(wanted) :], wanted, strict=True):
                    assert np.array_equal(got, expected), (template, config)


@pytest.mark.parametrize("arch", ["sm_75", "sm_87", "sm_90"])
@pytest.mark.parametrize("name", ["odd", "half", "bytes", "convolution"])
def test_first_guesses_are_compiled(name: str, arch: str) -> None:
    """NVRTC makes machine code of each template's first guess, for old GPUs and new ones, within their limits."""
    pytest.importorskip("cuda.bindings.nvrtc", reason='NVRTC is not installed: pip install "tunery[cuda]"')
    case = CASES[name]()
    for template, geometry in gpu_template(case.function):
        schedule = s_tir.Schedule(tvm.IRModule({"main": case.function}), error_render_level="fast")
        GPU_TEMPLATES[template].schedule(schedule, geometry, some_configs(template, geometry, 0)[0], GPU)
        for kernel in emulator.kernels_of(schedule.mod["main"]):
            assert np.prod(kernel.block) <= GPU.threads
        assert nvrtc.compile_source(emulator.source_of(schedule.mod, arch), arch, fast_math=False)
