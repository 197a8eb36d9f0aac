"""ModelInfo.bind: every dimension bound, or an error that names input and dimension. Roofs: figures to divide by."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.samples import sha256
from tuning_db.catalog import ModelInfo, PortSpec, Roof
from tuning_db.errors import InvalidRequest, ShapeMismatch
from tuning_db.keys import DTYPES, TensorSpec


def model(*inputs: PortSpec) -> ModelInfo:
    return ModelInfo(sha256("graph"), sha256("bytes"), "onnx", 1, inputs, ())


PORTS = st.lists(
    st.builds(
        PortSpec,
        name=st.text(min_size=1, max_size=8),
        dtype=st.sampled_from(sorted(DTYPES)),
        shape=st.lists(st.integers(1, 64) | st.sampled_from(["N", "M", ""]) | st.none(), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda port: port.name,
)
SYMBOLS = st.fixed_dictionaries({"N": st.integers(1, 64), "M": st.integers(1, 64), "": st.integers(1, 64)})


def bound(port: PortSpec, symbols: dict[str, int]) -> list[int]:
    """A shape that fits the port: each symbol with its size, 7 where the model says nothing."""
    return [symbols[d] if isinstance(d, str) else 7 if d is None else d for d in port.shape]


@given(ports=PORTS, symbols=SYMBOLS, data=st.data())
def test_binds(ports: list[PortSpec], symbols: dict[str, int], data: st.DataObject) -> None:
    """Fitting shapes give the inputs in the model's order; one that the model fixes wholly may be left out."""
    shapes = {}
    for port in data.draw(st.permutations(ports)):
        if all(isinstance(d, int) for d in port.shape) and data.draw(st.booleans()):
            continue
        shapes[port.name] = {"shape": bound(port, symbols)} | data.draw(st.sampled_from([{}, {"dtype": port.dtype}]))
    assert model(*ports).bind(shapes) == tuple(TensorSpec(p.name, p.dtype, tuple(bound(p, symbols))) for p in ports)


@given(ports=PORTS, symbols=SYMBOLS, data=st.data())
def test_contradicted_dimension(ports: list[PortSpec], symbols: dict[str, int], data: st.DataObject) -> None:
    """A size other than the model's, or than the same symbol's elsewhere, is refused with input and dimension."""
    constrained = [
        (port, axis)
        for port in ports
        for axis, dim in enumerate(port.shape)
        if isinstance(dim, int) or (isinstance(dim, str) and sum(p.shape.count(dim) for p in ports) > 1)
    ]
    assume(constrained)
    port, axis = data.draw(st.sampled_from(constrained))
    shapes = {p.name: {"shape": bound(p, symbols)} for p in ports}
    shapes[port.name]["shape"][axis] += 1
    with pytest.raises(ShapeMismatch, match="dimension") as caught:
        model(*ports).bind(shapes)
    symbol = port.shape[axis]
    # Of two places of one symbol that disagree, the later one is named; the message has both.
    involved = [p.name for p in ports if p is port or symbol in p.shape]
    assert caught.value.field in {f"inputs.{name}.shape" for name in involved}
    assert repr(port.name) in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "field", "words"),
    [
        ({}, "inputs.x.shape", ["'x' needs a shape", "dimension 0 of [N, 3, ?]"]),
        ({"x": {"shape": [1, 3]}}, "inputs.x.shape", ["rank 3", "rank 2"]),
        ({"x": {"shape": [1, 3, 5, 5, 5]}}, "inputs.x.shape", ["rank 3", "rank 5"]),
        ({"x": {"shape": [1, 4, 5]}}, "inputs.x.shape", ["dimension 1 is 3 in the model, not 4"]),
        ({"x": {"shape": [0, 3, 5]}}, "inputs.x.shape", ["dimension 0 is 0"]),
        ({"x": {"shape": [1, 3, "5"]}}, "inputs.x.shape", ["dimension 2 is '5'"]),
        ({"x": {"shape": [2, 3, 5]}, "y": {"shape": [4]}}, "inputs.y.shape", ["symbol 'N'", "2 at dimension 0", "'x'"]),
        ({"x": {"shape": [1, 3, 5], "dtype": "float16"}}, "inputs.x.dtype", ["float32 in the model, not float16"]),
        ({"x": {"shape": [1, 3, 5]}, "z": {"shape": [1]}}, "inputs.z", ["no input 'z'", "'x', 'y'"]),
    ],
)  # fmt: skip
def test_refused(shapes: dict[str, Any], field: str, words: list[str]) -> None:
    """A missing, contradictory or nameless shape is refused in words that say which and why."""
    two = model(PortSpec("x", "float32", ("N", 3, None)), PortSpec("y", "int64", ("N",)))
    with pytest.raises(InvalidRequest) as caught:
        two.bind(shapes)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


@given(low=st.integers(1, 40), more=st.integers(1, 900), given=st.none() | st.sets(st.integers(1, 900), max_size=9))
def test_binds_a_range(low: int, more: int, given: set[int] | None) -> None:
    """Whatever the range and its points: either it is refused at its input, or every point lies in it, its low end is
    one, and the model binds at each; two inputs that share the symbol share the range."""
    high = min(low + more, 1024)
    size = {"range": [low, high]} | ({} if not given else {"points": sorted(given)})
    two = model(PortSpec("x", "float32", ("N", 3, None)), PortSpec("y", "int64", ("N",)), PortSpec("z", "int8", (5,)))
    shapes = {"x": {"shape": [size, 3, 7]}, "y": {"shape": [size]}}
    try:
        inputs, found = two.bind_range(shapes)
    except InvalidRequest:
        assert given
        assert min(given) != low or max(given) > high or max(given) < 2 or len(given) > 8
        return
    assert found is not None
    assert found.points[0] == low
    assert list(found.points) == sorted(given or found.points)
    assert found.points[-1] <= high
    assert found.axes == (0, 0, None)
    assert [spec.shape for spec in inputs] == [(high, 3, 7), (high,), (5,)]
    for point in found.points:
        at = {spec.name: {"shape": list(spec.shape)} for spec in found.at(inputs, point)}
        assert two.bind_range(at) == (found.at(inputs, point), None)


@pytest.mark.parametrize(
    ("x", "y", "field", "words"),
    [
        ([{"range": [4, 4]}, 3, 5], [4], "inputs.x.shape", "the range 4 to 4"),
        ([{"range": [0, 4]}, 3, 5], [4], "inputs.x.shape", "the range 0 to 4"),
        ([{"range": [1, 1025]}, 3, 5], [4], "inputs.x.shape", "by 1024"),
        ([{"range": [1, 4]}, 3, 5], [4], "inputs.y.shape", "symbol 'N'"),
        ([{"range": [1, 4]}, 3, 5], [{"range": [1, 5]}], "inputs.y.shape", "another range"),
        ([{"range": [1, 4]}, 3, {"range": [1, 4]}], [4], "inputs.x.shape", "dimensions 0 and 2"),
        ([2, {"range": [1, 4]}, 5], [2], "inputs.x.shape", "dimension 1 is 3 in the model"),
        ([{"range": [1, 4], "points": [1]}, 3, 5], [4], "inputs.x.shape", "one at least of 2"),
    ],
)  # fmt: skip
def test_ranges_refused(x: list[Any], y: list[Any], field: str, words: str) -> None:
    """A range that is none, contradicts the model or another input is refused by input and dimension."""
    two = model(PortSpec("x", "float32", ("N", 3, None)), PortSpec("y", "int64", ("N",)))
    with pytest.raises(InvalidRequest, match=words) as caught:
        two.bind_range({"x": {"shape": x}, "y": {"shape": y}})
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["flops_per_s", "bytes_per_s", "flops_per_s_one_thread"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_no_roof(field: str, value: float) -> None:
    """A figure that nothing can be divided by is a measurement that failed, not a roof."""
    roof = Roof(4e11, 4e10, 2e11, dt.datetime.now(dt.UTC))
    with pytest.raises(ValueError, match=field):
        replace(roof, **{field: value})
