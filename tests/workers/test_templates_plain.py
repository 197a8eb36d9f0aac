"""The templates for functions of plain loop nests: which applies to what, and that every choice computes the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tvm import s_tir, te, tirx, topi

from tests.workers.conftest import Host
from workers.graph import elementary
from workers.graph.pipeline import pass_context
from workers.search.templates import plain
from workers.search.templates.generic import GenericTemplate
from workers.search.templates.knobs import Config, Cpu, Template, config_of
from workers.search.templates.rowwise import RowwiseTemplate, partial_width

Array = NDArray[Any]

TEMPLATES: dict[str, Template] = {t.name: t for t in (RowwiseTemplate(), GenericTemplate())}
CPUS = (
    Cpu(lanes=16, registers=32, l1_bytes=32 << 10, l2_bytes=1 << 20, threads=2),
    Cpu(lanes=8, registers=16, l1_bytes=32 << 10, l2_bytes=1 << 19, threads=2),
    Cpu(lanes=4, registers=32, l1_bytes=64 << 10, l2_bytes=1 << 20, threads=1),
)
PROPERTY = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass
class Case:
    """A function to be scheduled, and what it computes, said with numpy."""

    inputs: list[Any]
    output: Any
    reference: Callable[..., Array]

    @property
    def function(self) -> tirx.PrimFunc:
        return te.create_prim_func([*self.inputs, self.output])


def placeholder(shape: Sequence[int], name: str, dtype: str = "float32") -> Any:
    return te.placeholder(tuple(shape), dtype, name)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normalised(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def row_case(kind: str, leading: tuple[int, ...], row: int) -> Case:
    """A function over rows of `row` numbers; `leading` are the axes that count them."""
    shape = (*leading, row)
    last = len(shape) - 1
    x = placeholder(shape, "x")
    if kind == "softmax":
        return Case([x], topi.nn.softmax(x, axis=-1), softmax)
    if kind == "masked softmax":
        mask = placeholder(shape, "mask")
        return Case([x, mask], topi.nn.softmax(x * 0.125 + mask, axis=-1), lambda a, m: softmax(a * 0.125 + m))
    if kind == "log_softmax":
        two = placeholder((math.prod(leading), row), "x")
        return Case([two], topi.nn.log_softmax(two), lambda a: np.log(softmax(a)))
    if kind == "layer_norm":
        gamma, beta = placeholder((row,), "gamma"), placeholder((row,), "beta")
        normal = topi.nn.layer_norm(x, gamma, beta, [last], 1e-5)
        return Case([x, gamma, beta], topi.nn.relu(normal), lambda a, g, b: np.maximum(normalised(a) * g + b, 0))
    if kind == "rms_norm":
        gamma = placeholder((row,), "gamma")
        rms = lambda a, g: a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * g  # noqa: E731
        return Case([x, gamma], topi.nn.rms_norm(x, gamma, [last], 1e-5), rms)
    if kind == "sum":
        return Case([x], topi.sum(x, axis=last), lambda a: a.sum(-1))
    if kind == "max":
        return Case([x], topi.max(x, axis=last, keepdims=True), lambda a: a.max(-1, keepdims=True))
    if kind == "mean":
        mean = lambda a: np.tanh(a.mean(-1, keepdims=True))  # noqa: E731
        return Case([x], topi.tanh(topi.sum(x, axis=last, keepdims=True) / float(row)), mean)
    raise AssertionError(kind)


ROW_KINDS = ("softmax", "masked softmax", "log_softmax", "layer_norm", "rms_norm", "sum", "max", "mean")


def plain_case(kind: str, shape: tuple[int, int, int]) -> Case:
    """A function whose reductions, if it has any, do not run along rows."""
    a, b, c = shape
    x = placeholder(shape, "x")
    if kind == "chain":
        y = placeholder((b, c), "y")
        gelu = topi.multiply(topi.erf(x + y) + 1.0, x)
        erf = np.vectorize(math.erf, otypes=[np.float64])
        return Case([x, y], topi.multiply(gelu, 0.5), lambda p, q: (erf(p + q) + 1) * p * 0.5)
    if kind == "transpose":
        return Case([x], topi.exp(topi.transpose(x, (0, 2, 1))), lambda p: np.exp(p.transpose(0, 2, 1)))
    if kind == "reverse":
        return Case([x], topi.transpose(x, (2, 1, 0)) * 2.0, lambda p: p.transpose(2, 1, 0) * 2)
    if kind == "concat":
        y = placeholder((a, b + 1, c), "y")
        return Case([x, y], topi.concatenate((x, y), 1), lambda p, q: np.concatenate((p, q), 1))
    if kind == "columns":
        return Case([x], topi.sum(x, axis=1) / float(b), lambda p: p.mean(1))
    if kind == "softmax over columns":
        return Case([x], topi.nn.softmax(x, axis=1), lambda p: np.swapaxes(softmax(np.swapaxes(p, 1, 2)), 1, 2))
    if kind == "max_pool":
        image = placeholder((1, a, b + 2, c + 2), "x")
        pooled = topi.nn.pool2d(image, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max")
        return Case([image], topi.nn.relu(pooled), lambda p: np.maximum(windows(p, -np.inf).max((-1, -2)), 0))
    if kind == "sum_pool":
        image = placeholder((1, a, b + 2, c + 2), "x")
        pooled = topi.nn.pool2d(image, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "avg", count_include_pad=True)
        return Case([image], pooled, lambda p: windows(p, 0).mean((-1, -2)))
    if kind == "gather":
        where = placeholder((4,), "where", "int32")
        return Case([x, where], topi.take(x, where, axis=1, mode="clip"), lambda p, w: p[:, np.clip(w, 0, b - 1)])
    if kind == "resize":
        image = placeholder((1, a, b, c), "x")
        nearest = topi.image.resize2d(image, [0.0] * 4, (2 * b, 2 * c), method="nearest_neighbor",
                                      coordinate_transformation_mode="asymmetric", rounding_method="floor")  # fmt: skip
        return Case([image], nearest, lambda p: p.repeat(2, 2).repeat(2, 3))
    if kind == "cumsum":
        return Case([x], topi.cumsum(x, axis=1), lambda p: p.cumsum(1))
    raise AssertionError(kind)


PLAIN_KINDS = ("chain", "transpose", "reverse", "concat", "columns", "softmax over columns", "max_pool", "sum_pool",
               "gather", "resize", "cumsum")  # fmt: skip


def windows(image: Array, fill: float) -> Array:
    """3 × 3 windows, two apart, of an image padded by one."""
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]


def scheduled(function: tirx.PrimFunc, template: Template, config: Config, cpu: Cpu) -> s_tir.Schedule:
    schedule = s_tir.Schedule(function)
    template.schedule(schedule, plain.plain_template(function)[1], config, cpu)
    return schedule


def check(case: Case, name: str, config: Config, cpu: Cpu, host: Host) -> None:
    """One choice computes what numpy does, and its trace, read back from JSON, gives the same function."""
    function = case.function
    assert plain.plain_template(function)[0] == name
    schedule = scheduled(function, TEMPLATES[name], config, cpu)
    trace = json.dumps(schedule.trace.as_json(), default=lambda boxed: boxed.value)
    assert config_of(TEMPLATES[name], trace) == config
    again = s_tir.Schedule(function)
    s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), again)
    tvm.ir.assert_structural_equal(again.mod, schedule.mod)
    with pass_context():
        compiled = tvm.compile(elementary.lower_module(schedule.mod), target=host.target)
    generator = np.random.default_rng(7)
    shapes = [[int(size) for size in tensor.shape] for tensor in case.inputs]
    arrays = [
        generator.integers(0, 3, shape).astype("int32")
        if tensor.dtype == "int32"
        else generator.standard_normal(shape).astype("float32")
        for tensor, shape in zip(case.inputs, shapes, strict=True)
    ]
    # What is not written must not look right by chance.
    out = tvm.runtime.tensor(np.full([int(size) for size in case.output.shape], np.nan, "float32"))
    compiled["main"](*map(tvm.runtime.tensor, arrays), out)
    wide = [array.astype("float64") if array.dtype == np.float32 else array for array in arrays]
    np.testing.assert_allclose(out.numpy(), case.reference(*wide), rtol=2e-5, atol=2e-5, err_msg=str(config))


def choices(case: Case, cpu: Cpu, data: st.DataObject) -> list[tuple[str, Config]]:
    """The template's first guess and two others."""
    name, geometry = plain.plain_template(case.function)
    configs = TEMPLATES[name].configs(geometry, cpu)
    picked = data.draw(st.sets(st.integers(0, len(configs) - 1), max_size=2), label="configs")
    return [(name, configs[index]) for index in sorted(picked | {0})]


EXTENTS = st.sampled_from((1, 2, 3, 4, 7, 8, 13, 16, 24, 31))
ROWS = st.sampled_from((1, 2, 5, 8, 11, 16, 17, 31, 32, 37, 48, 49, 64, 77, 97, 128, 131, 169, 197, 768, 1000, 1009))


@PROPERTY
@given(kind=st.sampled_from(ROW_KINDS), leading=st.lists(EXTENTS, min_size=1, max_size=3), row=ROWS,
       cpu=st.sampled_from(CPUS), data=st.data())  # fmt: skip
def test_functions_of_rows_compute_what_numpy_does(
    kind: str, leading: list[int], row: int, cpu: Cpu, data: st.DataObject, host: Host
) -> None:
    """Softmax, norms and sums along rows of any length, primes and 1 among them, under three choices each."""
    case = row_case(kind, tuple(leading), row)
    for name, config in choices(case, cpu, data):
        check(case, name, config, cpu, host)


@PROPERTY
@given(kind=st.sampled_from(PLAIN_KINDS), shape=st.tuples(EXTENTS, EXTENTS, EXTENTS),
       cpu=st.sampled_from(CPUS), data=st.data())  # fmt: skip
def test_other_functions_compute_what_numpy_does(
    kind: str, shape: tuple[int, int, int], cpu: Cpu, data: st.DataObject, host: Host
) -> None:
    """Elementwise chains, transposes, pooling, gathers and functions that nothing is known of, three choices each."""
    case = plain_case(kind, shape)
    for name, config in choices(case, cpu, data):
        check(case, name, config, cpu, host)


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("row", [128, 49, 131])
def test_every_choice_for_a_row_is_right(kind: str, row: int, host: Host) -> None:
    """All through the space, for whole vectors, for a length that vectors do not divide, and for a prime."""
    case = row_case(kind, (2, 8), row)
    name, geometry = plain.plain_template(case.function)
    assert name == "rowwise"
    for config in TEMPLATES[name].configs(geometry, CPUS[0])[::13]:
        check(case, name, config, CPUS[0], host)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_every_choice_for_other_functions_is_right(kind: str, host: Host) -> None:
    """The whole space of the generic template on each kind of function."""
    case = plain_case(kind, (4, 16, 32))
    name, geometry = plain.plain_template(case.function)
    for config in TEMPLATES[name].configs(geometry, CPUS[0]):
        check(case, name, config, CPUS[0], host)


@pytest.mark.parametrize(
    ("case", "name", "sizes"),
    [
        (row_case("softmax", (12, 128), 197), "rowwise", {"rows": 1536, "row": 197, "last": 128, "reductions": 2}),
        (row_case("layer_norm", (1, 128), 768), "rowwise", {"rows": 128, "row": 768, "last": 128, "reductions": 2}),
        (row_case("softmax", (64,), 5), "generic", {"stages": 4}),
        (plain_case("columns", (4, 16, 32)), "generic", {"reduced": 16, "transposed": 0}),
        (plain_case("max_pool", (4, 16, 32)), "generic", {"reduced": 9, "padded": 1}),
        (plain_case("transpose", (4, 16, 32)), "generic", {"blocks": 1, "transposed": 1}),
        (plain_case("chain", (4, 16, 32)), "generic", {"blocks": 1, "contiguous": 512, "iterations": 2048}),
    ],
)
def test_the_template_and_the_geometry_follow_from_the_function(case: Case, name: str, sizes: dict[str, int]) -> None:
    """Reductions along rows of eight and more are `rowwise`, all else is `generic`; sizes are those of the loops."""
    found, geometry = plain.plain_template(case.function)
    assert found == name
    assert {key: geometry[key] for key in sizes} == sizes
    assert all(type(size) is int for size in geometry.values())


@pytest.mark.parametrize("cpu", CPUS)
def test_features_are_as_many_for_every_choice_and_function(cpu: Cpu) -> None:
    """A cost model is trained on all functions of a template: vectors of one length, with finite numbers."""
    lengths: dict[str, set[int]] = {"rowwise": set(), "generic": set()}
    cases = [row_case(kind, (3,), row) for kind in ROW_KINDS for row in (1, 131)]
    for case in [*cases, *(plain_case(kind, (1, 7, 16)) for kind in PLAIN_KINDS)]:
        name, geometry = plain.plain_template(case.function)
        configs = TEMPLATES[name].configs(geometry, cpu)
        assert len({tuple(sorted(config.items())) for config in configs}) == len(configs) >= 1
        for config in configs:
            features = TEMPLATES[name].features(geometry, config, cpu)
            lengths[name].add(len(features))
            assert np.isfinite(features).all()
    assert all(len(found) == 1 for found in lengths.values())


@pytest.mark.parametrize("row", [128, 169, 131])
def test_a_row_is_summed_in_vectors(row: int, host: Host) -> None:
    """Whole vectors, odd ones, and the padded vectors of a prime length: the machine code adds packed numbers."""
    case = row_case("sum", (64,), row)
    _, geometry = plain.plain_template(case.function)
    template = TEMPLATES["rowwise"]
    schedule = scheduled(case.function, template, template.configs(geometry, CPUS[0])[0], CPUS[0])
    assembly = tvm.compile(schedule.mod, target=host.target).mod.inspect_source("asm")
    packed = r"vaddps\s.*%[xyz]mm" if host.identity.arch == "x86_64" else r"fadd\s+v\d+\.4s"
    assert re.search(packed, assembly)


def test_what_is_not_understood_stays_as_it_is() -> None:
    """A scan has no stage: its schedule is the function as it came."""
    function = plain_case("cumsum", (2, 3, 16)).function
    name, geometry = plain.plain_template(function)
    config = TEMPLATES[name].configs(geometry, CPUS[0])[0]
    schedule = scheduled(function, TEMPLATES[name], config, CPUS[0])
    tvm.ir.assert_structural_equal(schedule.mod, s_tir.Schedule(function).mod)


def test_partial_results_divide_the_row() -> None:
    """As many whole vectors as asked for and the row has, else narrower ones, else an odd divisor, else none."""
    assert partial_width(768, 4, 16) == (64, 16)
    assert partial_width(48, 4, 16) == (48, 16)
    assert partial_width(24, 4, 16) == (24, 8)
    assert partial_width(49, 4, 16) == (7, 7)
    assert partial_width(131, 4, 16) == (0, 0)
