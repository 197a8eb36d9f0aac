"""Choices of the templates for GPUs compute what the function does unscheduled: their CUDA source runs on a CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import s_tir

from tests.workers.templates_gpu import cases, emulator
from tests.workers.templates_gpu.cases import Array, Case
from workers.search.candidates import canonical_trace
from workers.search.templates.gpu_default import GpuDefaultTemplate
from workers.search.templates.gpu_fragments import register_fragments
from workers.search.templates.gpu_plain import gpu_template
from workers.search.templates.gpu_registry import GPU_TEMPLATES
from workers.search.templates.knobs import Config, Geometry, Gpu, config_of

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="running CUDA on a CPU needs g++ 12 or later")

ORIN = Gpu(multiprocessors=16, tensor_types=("float16", "int8"))
H100 = Gpu(multiprocessors=132, tensor_types=("float16", "int8"))
PROPERTY = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
#: What verify_gpu_code asks.
LIMITS = {"max_shared_memory_per_block": 48 << 10, "max_threads_per_block": 1024}


def geometries(case: Case) -> dict[str, Geometry]:
    return dict(gpu_template(case.function))


def scheduled(case: Case, name: str, geometry: Geometry, config: Config, gpu: Gpu) -> s_tir.Schedule:
    """The function with a choice applied; its trace, read back from JSON, gives the same function."""
    template = GPU_TEMPLATES[name]
    schedule = s_tir.Schedule(case.function)
    template.schedule(schedule, geometry, config, gpu)
    trace = canonical_trace(schedule.trace.as_json())
    assert config_of(template, trace) == config
    again = s_tir.Schedule(case.function)
    register_fragments(trace)
    s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), again)
    tvm.ir.assert_structural_equal(again.mod, schedule.mod)
    return schedule


def check(case: Case, name: str, geometry: Geometry, config: Config, gpu: Gpu, *, descending: bool = False) -> None:
    """One choice computes what the function does unscheduled, in blocks that a GPU can hold."""
    schedule = scheduled(case, name, geometry, config, gpu)
    for kernel in emulator.kernels_of(schedule.mod["main"]):
        assert math.prod(kernel.block) <= gpu.threads
    assert s_tir.analysis.verify_gpu_code(lowered(schedule)["main"], LIMITS)
    arrays = case.arguments()
    emulator.run(schedule, arrays, descending=descending)
    for got, wanted in zip(arrays[len(arrays) - case.outputs :], case.wanted(), strict=True):
        compare(got, wanted, f"{case.name} {name} {config}")


def compare(got: Array, wanted: Array, said: str) -> None:
    if got.dtype == np.int32 or got.dtype == np.int8:
        np.testing.assert_array_equal(got, wanted, err_msg=said)
    else:
        loose, close = (2e-2, 2e-3) if got.dtype == np.float16 else (1e-4, 1e-5)
        np.testing.assert_allclose(
            got.astype("float64"), wanted.astype("float64"), rtol=loose, atol=close, err_msg=said
        )


def lowered(schedule: s_tir.Schedule) -> tvm.ir.IRModule:
    """As MetaSchedule's VerifyGPUCode lowers a candidate before it asks."""
    transform = s_tir.transform
    with emulator.cuda_target():
        return tvm.transform.Sequential(
            [
                transform.LowerCrossThreadReduction(),
                transform.LowerInitBlock(),
                transform.PlanAndUpdateBufferAllocationLocation(),
                transform.ConvertBlocksToOpaque(),
                transform.UnifyThreadBinding(),
                transform.CompactBufferAllocation(),
                transform.LowerMatchBuffer(),
                transform.LowerOpaqueBlock(),
                tvm.tirx.transform.FlattenBuffer(),
                tvm.tirx.transform.StmtSimplify(),
            ]
        )(schedule.mod)


SIZES = st.sampled_from((1, 3, 7, 8, 16, 17, 31, 49, 64, 100))
IMAGES = st.tuples(st.sampled_from((5, 7, 8, 14)), st.sampled_from((5, 8, 14, 17)))
GPUS = st.sampled_from((ORIN, H100))
AFTER = st.sampled_from(("", "cast", "bias", "residual"))


def any_choice(data: st.DataObject, case: Case, gpu: Gpu) -> None:
    """Check one choice, whichever is drawn, of each template that the function has."""
    for name, geometry in geometries(case).items():
        configs = GPU_TEMPLATES[name].configs(geometry, gpu)
        config = configs[data.draw(st.integers(0, len(configs) - 1), label=name)]
        check(case, name, geometry, config, gpu, descending=data.draw(st.booleans(), label="descending"))


@PROPERTY
@given(rows=SIZES, columns=SIZES, summed=SIZES, batch=st.sampled_from((1, 3)), left=st.sampled_from(("ik", "ki")),
       right=st.sampled_from(("kj", "jk")), dtype=st.sampled_from(("float32", "float16", "int8")), after=AFTER,
       gpu=GPUS, data=st.data())  # fmt: skip
def test_products_compute_what_they_do_unscheduled(
    rows: int, columns: int, summed: int, batch: int, left: str, right: str, dtype: str, after: str, gpu: Gpu,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Matrices of any size in any order of axes, on ordinary cores and on tensor cores."""
    case = cases.product(
        rows, columns, summed, batch=batch, left=left, right=right, dtype=dtype, after=after
    )  # fmt: skip
    any_choice(data, case, gpu)


@PROPERTY
@given(channels=st.sampled_from((1, 3, 16, 17)), filters=st.sampled_from((2, 7, 16, 33)), image=IMAGES,
       window=st.sampled_from(((1, 1), (3, 3), (5, 2))), stride=st.sampled_from((1, 2)),
       dtype=st.sampled_from(("float32", "float16", "int8")), after=AFTER, gpu=GPUS, data=st.data())  # fmt: skip
def test_convolutions_compute_what_they_do_unscheduled(
    channels: int, filters: int, image: tuple[int, int], window: tuple[int, int], stride: int, dtype: str, after: str,
    gpu: Gpu, data: st.DataObject,
) -> None:  # fmt: skip
    """Windows of any shape over padded images, with what follows a convolution in a graph."""
    padding = 1 if window == (3, 3) else 0
    case = cases.convolution(
        1, channels, filters, image, window=window, stride=stride, padding=padding, dtype=dtype, after=after
    )
    any_choice(data, case, gpu)


ROWS = st.sampled_from((1, 2, 3, 7, 8, 17, 32, 49, 64, 100, 197, 1000))
FEW = st.sampled_from((1, 2, 3, 7, 16, 31))


@PROPERTY
@given(kind=st.sampled_from(cases.ROW_KINDS), leading=st.lists(FEW, min_size=1, max_size=3), row=ROWS,
       dtype=st.sampled_from(("float32", "float16")), gpu=GPUS, data=st.data())  # fmt: skip
def test_functions_of_rows_compute_what_they_do_unscheduled(
    kind: str, leading: list[int], row: int, dtype: str, gpu: Gpu, data: st.DataObject
) -> None:
    """Softmax, norms, sums and means along rows and across them, of any length."""
    any_choice(data, cases.rows(kind, leading, row, dtype), gpu)


@PROPERTY
@given(kind=st.sampled_from(("max", "avg", "global", "depthwise", "vector")), channels=st.sampled_from((1, 3, 16)),
       image=IMAGES, stride=st.sampled_from((1, 2)), right=st.sampled_from(("jk", "kj")), gpu=GPUS,
       data=st.data())  # fmt: skip
def test_short_sums_compute_what_they_do_unscheduled(
    kind: str, channels: int, image: tuple[int, int], stride: int, right: str, gpu: Gpu, data: st.DataObject
) -> None:
    """Pooling, depthwise convolutions, products with a vector."""
    if kind == "vector":
        case = cases.vector(channels * 11, image[0] * image[1], right=right)
    elif kind == "depthwise":
        case = cases.depthwise(channels + 1, image, stride=stride)
    else:
        case = cases.pool(kind, channels, image, stride=stride)
    any_choice(data, case, gpu)


@PROPERTY
@given(kind=st.sampled_from(cases.ELEMENT_KINDS), shape=st.lists(st.sampled_from((2, 3, 7, 8, 17, 31)), min_size=2,
       max_size=4), dtype=st.sampled_from(("float32", "float16")), gpu=GPUS, data=st.data())  # fmt: skip
def test_elementwise_functions_compute_what_they_do_unscheduled(
    kind: str, shape: list[int], dtype: str, gpu: Gpu, data: st.DataObject
) -> None:
    """Chains, transposes, padding, gathers, and functions with several outputs."""
    any_choice(data, cases.elements(kind, shape, dtype), gpu)


WIDE = '\nextern "C" __global__ void __launch_bounds__(4) main_kernel(int* __restrict__ a_ptr) {'


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("if (threadIdx.x < 2) __syncthreads();", "some threads do not reach a barrier"),
        ("if (threadIdx.x < 2) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "different barriers"),
        (
            "__shared__ alignas(64) half x[512]; nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half> f;"
            " nvcuda::wmma::load_matrix_sync(f, x + 8, 16);",
            "a fragment is not aligned",
        ),
    ],
)
def test_what_a_gpu_would_refuse_ends_the_run(body: str, fault: str) -> None:
    """Barriers that threads miss, and fragments at addresses that tensor cores do not take."""
    kernel = emulator.Kernel((1, 1, 1), (4, 1, 1))
    with pytest.raises(RuntimeError, match=fault):
        emulator.execute(f"{WIDE}\n{body}\n}}\n", [kernel], {"a": np.zeros(4, "int32")})


def test_a_barrier_that_lacks_shows_in_one_of_the_orders() -> None:
    """A thread that reads what its neighbour writes gets it in one order of threads alone, with a barrier in both."""
    body = (
        "__shared__ alignas(64) int x[5]; x[threadIdx.x] = threadIdx.x + 1; {} a_ptr[threadIdx.x] = x[threadIdx.x ^ 1];"
    )

    def seen(barrier: str) -> list[list[int]]:
        results = []
        for descending in (False, True):
            found = np.zeros(4, "int32")
            source = f"{WIDE}\n{body.format(barrier)}\n}}\n"
            emulator.execute(source, [emulator.Kernel((1, 1, 1), (4, 1, 1))], {"a": found}, descending=descending)
            results.append(found.tolist())
        return results

    assert seen("__syncthreads();") == [[2, 1, 4, 3]] * 2
    assert seen("") != [[2, 1, 4, 3]] * 2


def test_features_are_as_many_for_every_choice_and_function() -> None:
    """A cost model is trained on all functions of a template: vectors of one length, with finite numbers."""
    lengths: dict[str, set[int]] = {}
    some: Mapping[str, Case] = {
        case.name: case
        for case in (
            cases.product(100, 64, 70, dtype="float16"),
            cases.product(3, 17, 1, batch=2, dtype="int8", after="bias"),
            cases.convolution(1, 3, 16, (14, 14)),
            cases.rows("softmax", [7, 5], 100),
            cases.rows("two", [7], 33),
            cases.pool("max", 3, (8, 8)),
            cases.elements("concat", [2, 3, 4]),
            cases.elements("chain", [64, 256], "float16"),
        )
    }
    for case in some.values():
        for name, geometry in geometries(case).items():
            assert all(type(size) is int for size in geometry.values())
            for gpu in (ORIN, H100):
                configs = GPU_TEMPLATES[name].configs(geometry, gpu)
                assert 1 <= len(configs) == len({tuple(c[knob] for knob in GPU_TEMPLATES[name].knobs) for c in configs})
                assert len(configs) <= 400
                for config in configs:
                    features = GPU_TEMPLATES[name].features(geometry, config, gpu)
                    lengths.setdefault(name, set()).add(len(features))
                    assert np.isfinite(features).all()
    # TVM's own schedule is a template as well, of one choice.
    templates = GPU_TEMPLATES.keys() - {GpuDefaultTemplate.name}
    assert {name: len(found) for name, found in lengths.items()} == dict.fromkeys(templates, 1)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (cases.product(64, 64, 64, dtype="float16"), ["gpu-tensor", "gpu-product"]),
        (cases.product(64, 64, 64), ["gpu-product"]),
        (cases.product(64, 4, 64, dtype="int8"), ["gpu-product", "gpu-tensor", "gpu-reduce"]),
        (cases.vector(64, 64), ["gpu-reduce"]),
        (cases.rows("softmax", [4], 64), ["gpu-reduce"]),
        (cases.elements("pad", [4, 64]), ["gpu-map"]),
        # TVM would write the padding of a product whose axes its reader fuses.
        (cases.product(2, 49, 7, batch=2, after="reshape"), ["gpu-reduce"]),
    ],
)
def test_which_templates_a_function_has(case: Case, names: list[str]) -> None:
    """Those of its kind, the likeliest first."""
    assert list(geometries(case)) == names


def test_without_tensor_cores_there_is_no_choice_of_them() -> None:
    """A GPU that names no types for tensor cores is never given a kernel for them."""
    geometry = geometries(cases.product(64, 64, 64, dtype="float16"))["gpu-tensor"]
    assert GPU_TEMPLATES["gpu-tensor"].configs(geometry, Gpu(multiprocessors=16)) == []
