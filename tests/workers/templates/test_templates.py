"""What every template promises, for blocked computations of all kinds and three kinds of CPU; nothing is compiled."""

from __future__ import annotations

import json
import math

import pytest
import tvm
from tvm import s_tir, tirx

from tests.workers.graph.kernels import AVX2, AVX512, CPUS, NEON, scheduled
from workers.graph.computations import (
    BatchMatmul,
    Computation,
    Convolution,
    Copy,
    Dense,
    Fused,
    Pointwise,
    Pooling,
    View,
    Window,
    variants,
)  # fmt: skip
from workers.graph.pointwise import VALUE, Program, Step
from workers.search.candidates import canonical_trace
from workers.search.templates.knobs import Config, Cpu, Geometry, config_of, template_of
from workers.search.templates.registry import TEMPLATES

RELU = Fused(Program((Step("add", (VALUE, ("input", 0))), Step("relu", (("step", 0),)))), ((1, 2, 1, 1, 16),))
SAME = Window((3, 3), (1, 1), (1, 1), (1, 1, 1, 1))

COMPUTATIONS: dict[str, Computation] = {
    "3x3": Convolution(1, 2, 14, 14, 2, 16, 32, SAME, epilogue=RELU),
    "3x3 of a prime map": Convolution(2, 2, 13, 7, 2, 16, 32, SAME, prologue=Fused(RELU.program, ((1, 2, 1, 1, 16),))),
    "3x3 of odd channels": Convolution(1, 3, 9, 31, 5, 16, 34, Window((3, 3), (2, 2), (1, 1), (0, 1, 1, 0))),
    "5x5": Convolution(1, 1, 12, 12, 1, 16, 16, Window((5, 5), (1, 1), (1, 1), (2, 2, 2, 2))),
    "one row": Convolution(1, 1, 1, 37, 1, 16, 8, Window((1, 5), (1, 1), (1, 1), (0, 2, 0, 2))),
    "one pixel": Convolution(1, 2, 1, 1, 4, 16, 32),
    "1x1": Convolution(1, 4, 7, 7, 8, 16, 64, epilogue=Fused()),
    "1x1 strided": Convolution(1, 4, 7, 7, 3, 16, 50, Window((1, 1), (2, 2))),
    "picture": Convolution(1, 1, 32, 32, 2, 16, 3, Window((7, 7), (2, 2), (1, 1), (3, 3, 3, 3)), plain_channels=3),
    "groups": Convolution(1, 4, 9, 9, 4, 16, 64, SAME, groups=2),
    "table": Convolution(1, 2, 9, 9, 3, 16, 24, SAME, table=11),
    "table of pixels": Convolution(1, 2, 9, 9, 3, 16, 24, Window((1, 1), (2, 2)), table=11),
    "depthwise": Pooling("depthwise", 1, 3, 14, 14, 16, SAME, epilogue=Fused(RELU.program, ((1, 3, 1, 1, 16),))),
    "max": Pooling("max", 1, 3, 15, 11, 16, Window((3, 3), (2, 2), (1, 1), (1, 1, 1, 1))),
    "average": Pooling("average", 2, 1, 7, 7, 16, Window((2, 2), (2, 2))),
    "mean": Pooling("average", 1, 4, 13, 5, 16, Window((13, 5))),
    "pointwise": Pointwise(1, 2, 5, 7, 16, (2, 3), RELU),
    "to blocks": Copy("block", 1, 21, 6, 5, 16, (), 2),
    "to plain": Copy("plain", 2, 21, 6, 5, 16, (2,), 0, True),
    "remap": Copy("remap", 1, 21, 6, 5, 16, (3,), 2, True),
    "concat": Copy("concat", 1, 40, 6, 5, 16, (2, 1), 3),
    "spread": Copy("spread", 1, 5, 6, 5, 16, (2,), 1, False, (2, 3)),
    "spread of parts": Copy("spread", 1, 21, 6, 5, 16, (8,), 2, False, (2, 2), True, (1, 0), (11, 9)),
    "dense": Dense(7, 96, 48, 16, Fused(RELU.program, ((1, 3, 1, 1, 16),))),
    "dense with a tail": Dense(5, 30, 21, 16),
    "matmul": BatchMatmul(4, 9, 24, 32, 16, View(2), View(2, True), View(2)),
    "matmul of rows that lie": BatchMatmul(4, 9, 24, 32, 16),
    "matmul with a tail": BatchMatmul(4, 9, 24, 21, 16, View(2), View(2, True), View(2)),
}  # fmt: skip

FUNCTIONS: list[tuple[str, str]] = [
    (name, variant) for name, computation in COMPUTATIONS.items() for variant in variants(computation, rounding=True)
]
everywhere = pytest.mark.parametrize("cpu", CPUS, ids=["avx512", "avx2", "neon"])
each = pytest.mark.parametrize(("name", "variant"), FUNCTIONS)


def function(name: str, variant: str) -> tirx.PrimFunc:
    return variants(COMPUTATIONS[name], rounding=True)[variant]


def made_for(name: str, variant: str) -> tuple[str, Geometry]:
    found = template_of(function(name, variant))
    assert found is not None
    return found


def some(configs: list[Config], count: int) -> list[Config]:
    """The first, the last, and what lies evenly between."""
    step = max(1, (len(configs) - 1) // max(1, count - 1))
    return configs[::step][: count - 1] + configs[-1:]


@everywhere
@each
def test_choices_apply_and_replay(name: str, variant: str, cpu: Cpu) -> None:
    """Choices of the whole space can be scheduled; the knobs can be read from the stored trace; and the trace gives
    the same function."""
    template, geometry = made_for(name, variant)
    configs = TEMPLATES[template].configs(geometry, cpu)
    for config in some(configs, 6):
        schedule = scheduled(function(name, variant), config, cpu)
        trace = canonical_trace(schedule.trace.as_json())
        assert config_of(TEMPLATES[template], trace) == config
        again = s_tir.Schedule(function(name, variant), seed=1)
        s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), again)
        tvm.ir.assert_structural_equal(again.mod, schedule.mod)


@everywhere
@each
def test_spaces_are_deterministic_without_repetition(name: str, variant: str, cpu: Cpu) -> None:
    """Asked twice, a template offers the same choices in the same order, each once, each with every knob."""
    template, geometry = made_for(name, variant)
    configs = TEMPLATES[template].configs(geometry, cpu)
    assert configs
    assert configs == TEMPLATES[template].configs(dict(geometry), cpu)
    assert len({tuple(config[knob] for knob in TEMPLATES[template].knobs) for config in configs}) == len(configs)
    assert all(set(config) == set(TEMPLATES[template].knobs) for config in configs)
    assert all(type(value) is int for config in configs for value in config.values())


@pytest.mark.parametrize("template", sorted({made_for(*each)[0] for each in FUNCTIONS}))
def test_features_are_as_many_for_every_choice(template: str) -> None:
    """One length and finite numbers for every computation of a template, on every CPU."""
    lengths = set()
    for name, variant in FUNCTIONS:
        own, geometry = made_for(name, variant)
        for cpu in CPUS if own == template else ():
            for config in some(TEMPLATES[own].configs(geometry, cpu), 50):
                features = TEMPLATES[own].features(geometry, config, cpu)
                lengths.add(len(features))
                assert all(map(math.isfinite, features)), config
    assert len(lengths) == 1


def accumulators(template: str, config: Config) -> int:
    """Numbers in registers at once, in blocks of channels: sums of a tile."""
    if template == "conv":
        return config["tile_o"] * config["tile_h"] * config["tile_w"]
    if template == "winograd":
        return config["tile_o"] * config["tile_p"]
    return config["tile_h"] * config["tile_w"]


@everywhere
@each
def test_tiles_fit_the_registers(name: str, variant: str, cpu: Cpu) -> None:
    """The sums of a tile, the weights of a step and one number of data are at most as many vectors as there are."""
    template, geometry = made_for(name, variant)
    if template == "copy":
        assert all(c["vector"] in (1, cpu.lanes) for c in TEMPLATES[template].configs(geometry, cpu))
        return
    vectors = max(1, geometry["v"] // cpu.lanes)
    for config in TEMPLATES[template].configs(geometry, cpu):
        # A window's lanes do not meet: of its weights there need not be more than one vector at a time.
        others = 4 if template == "window" else config["tile_o"] * vectors + 1
        assert accumulators(template, config) * vectors + others <= cpu.registers, config


@pytest.mark.parametrize("cpu", [AVX512, AVX2, NEON, Cpu(4, 16, 32 << 10, 256 << 10, 2)])
@pytest.mark.parametrize("outputs", [1, 3])
def test_every_width_has_a_choice(outputs: int, cpu: Cpu) -> None:
    """Rows of any length can be tiled, primes among them, with vectors as wide as a block of channels or narrower."""
    for width in (*range(1, 40), 49, 97, 112, 196, 224, 3136):
        flat = {"n": 1, "o": outputs, "h": 1, "w": width, "v": 16, "ic": 2, "kh": 1, "kw": 1, "ii": 16, "stride": 1,
                "staged": 0, "others": 0, "indirect": 0}  # fmt: skip
        window = {"n": 1, "c": 2, "h": 3, "w": width, "v": 16, "kh": 3, "kw": 3, "stride": 1, "staged": 1,
                  "depthwise": 1, "others": 0}  # fmt: skip
        tiles = {"n": 1, "o": outputs, "h": 4, "w": 4 * width, "v": 16, "ic": 2, "ii": 16, "outputs": 4, "tile": 6,
                 "rows": 1, "columns": width, "others": 0}  # fmt: skip
        for template, geometry in (("conv", flat), ("window", window), ("winograd", tiles)):
            configs = TEMPLATES[template].configs(geometry, cpu)
            assert configs, (template, width)
            assert len({tuple(sorted(c.items())) for c in configs}) == len(configs), (template, width)


@pytest.mark.parametrize("trace", ["[[], []]", '[[["GetSBlock", [], ["sum", "main"], ["b0"]]], []]'])
@pytest.mark.parametrize("template", TEMPLATES)
def test_traces_of_others_are_refused(template: str, trace: str) -> None:
    """A trace that does not begin with the knobs is not one of this template's."""
    with pytest.raises(ValueError, match=f"knobs of '{template}'"):
        config_of(TEMPLATES[template], trace)
