"""Keys: every field counts, a difference is named by its path, and the spelling never changes by accident."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import DEVICE, TOOLCHAIN, make_key
from tuning_db.errors import InvalidRequest
from tuning_db.keys import (
    DTYPES,
    PERCENTILE,
    ArtifactKey,
    BuildOptions,
    DeviceIdentity,
    DimensionRange,
    FieldDifference,
    QuantizationConfig,
    TensorSpec,
    Toolchain,
    canonical_json,
    is_sha256,
    nearest,
    parse_input,
    sha256_json,
    spell_shape,
    to_json,
)

# Surrogates are no characters: JSON from a client cannot be encoded with them, so they never get this far.
TEXT = st.text(max_size=20)
SPECS = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=20),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(1, 2**31 - 1), max_size=5).map(tuple),
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values for a field of a key, by its type."""
    if hint is DimensionRange:
        points = st.sets(st.integers(1, 64), min_size=1, max_size=3).map(sorted)
        axes = st.lists(st.none() | st.integers(0, 3), max_size=4).map(tuple)
        return st.builds(
            lambda p, more, a: DimensionRange(p[0], p[-1] + more, tuple(p), a), points, st.integers(0, 9), axes
        )
    if is_dataclass(hint):
        assert isinstance(hint, type)
        hints = get_type_hints(hint)
        return (
            SPECS if hint is TensorSpec else st.builds(hint, **{f.name: values_of(hints[f.name]) for f in fields(hint)})
        )
    if hint is str:
        return TEXT
    if hint is bool:
        return st.booleans()
    if hint is float:
        return st.floats(0, 1e6)
    if hint is int:
        return st.integers(-(2**63), 2**63)
    if get_origin(hint) is tuple:
        (item, _) = get_args(hint)
        unique = (lambda spec: spec.name) if item is TensorSpec else None
        return st.lists(values_of(item), max_size=4, unique_by=unique).map(tuple)
    return st.one_of([st.none() if part is type(None) else values_of(part) for part in get_args(hint)])


KEYS = values_of(ArtifactKey)


def leaves(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field of `cls` that is not a dataclass itself."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], (*path, field.name))
        else:
            yield (*path, field.name)


def hint_at(path: tuple[str, ...]) -> Any:
    hint: Any = ArtifactKey
    for name in path:
        hint = get_type_hints(hint)[name]
    return hint


def value_at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = getattr(value, name)
    return value


def changed_at(value: Any, path: tuple[str, ...], new: Any) -> Any:
    inner = new if len(path) == 1 else changed_at(getattr(value, path[0]), path[1:], new)
    return replace(value, **{path[0]: inner})


LEAVES = [path for path in leaves(ArtifactKey) if path != ("inputs",)]


def test_the_walk_sees_every_field() -> None:
    """The property below is about all of these; a field that is added to a key is added to it by itself."""
    assert {".".join(path) for path in LEAVES} == {
        "model",
        "device.kind", "device.vendor", "device.model", "device.arch", "device.features", "device.cores",
        "device.cache_bytes", "device.board", "device.memory_bytes", "device.driver",
        "target",
        "toolchain.tvm", "toolchain.tvm_ffi", "toolchain.llvm", "toolchain.pipeline", "toolchain.cuda",
        "quantization.scheme", "quantization.calibration", "quantization.method", "quantization.exclude",
        "quantization.mode", "quantization.percentile", "quantization.per_channel",
        "options.fast_math", "options.opt_level", "options.winograd", "options.reassociation",
        "range",
    }  # fmt: skip


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
@given(data=st.data())
def test_any_field_changes_the_key(path: tuple[str, ...], data: st.DataObject) -> None:
    """A change of one field is another digest, and the difference names exactly that field, both values with it."""
    key = data.draw(KEYS)
    old = value_at(key, path)
    new = data.draw(values_of(hint_at(path)).filter(lambda value: value != old))
    other = changed_at(key, path, new)
    assert other.digest() != key.digest()
    (difference,) = other.diff(key)
    assert difference.field == ".".join(path)
    assert canonical_json([difference.wanted, difference.stored]) == canonical_json([to_json(new), to_json(old)])
    assert [d.field for d in key.diff(other)] == [".".join(path)]


@given(key=KEYS, data=st.data())
def test_any_input_changes_the_key(key: ArtifactKey, data: st.DataObject) -> None:
    """Another shape or dtype of one input is another digest, and the difference names input and field."""
    spec = data.draw(SPECS.filter(lambda s: s.name not in {i.name for i in key.inputs}))
    place = data.draw(st.integers(0, len(key.inputs)))
    field = data.draw(st.sampled_from(["shape", "dtype"]))
    changed = data.draw(SPECS.filter(lambda s: getattr(s, field) != getattr(spec, field)))
    with_spec = [
        replace(key, inputs=(*key.inputs[:place], s, *key.inputs[place:]))
        for s in (spec, replace(spec, **{field: getattr(changed, field)}))
    ]
    assert with_spec[0].digest() != with_spec[1].digest()
    assert [d.field for d in with_spec[0].diff(with_spec[1])] == [f"inputs.{spec.name}.{field}"]


@given(key=KEYS, data=st.data())
def test_other_inputs(key: ArtifactKey, data: st.DataObject) -> None:
    """An input more, under another name or in another order is a difference of the inputs as a whole."""
    more = data.draw(SPECS.filter(lambda s: s.name not in {i.name for i in key.inputs}))
    longer = replace(key, inputs=(*key.inputs, more))
    assert longer.digest() != key.digest()
    assert [d.field for d in longer.diff(key)] == ["inputs"]
    if key.inputs:
        moved = replace(longer, inputs=(more, *key.inputs))
        renamed = replace(longer, inputs=(*key.inputs, replace(more, name=more.name + "'")))
        for other in (moved, renamed):
            assert other.digest() != longer.digest()
            assert other.diff(longer)[0].field == "inputs"


@given(one=KEYS, two=KEYS)
def test_equal_digests_mean_equal_keys(one: ArtifactKey, two: ArtifactKey) -> None:
    """Two keys have one digest exactly if nothing differs between them."""
    assert (one.digest() == two.digest()) == (one.diff(two) == ())
    assert one.diff(one) == ()


@given(key=KEYS)
def test_json_round_trip(key: ArtifactKey) -> None:
    """A key read back from its JSON, as a database or a client spells it, is the same key."""
    again = ArtifactKey.from_json(json.loads(json.dumps(key.to_json(), indent=2)))
    assert again == key
    assert again.digest() == key.digest()


def test_golden_digest() -> None:
    """These digests are what they have always been: a change loses every stored library (see KEY_VERSION)."""
    key = make_key(
        quantization=QuantizationConfig(scheme="int8", calibration="ab" * 32, method="minmax", exclude=("/head/Conv",)),
        options=BuildOptions(fast_math=True, opt_level=2, winograd=False),
        toolchain=replace(TOOLCHAIN, cuda="12.8"),
        inputs=(TensorSpec("x", "float32", (1, 3, 48, 192)), TensorSpec("größe", "int64", ())),
    )
    int8 = QuantizationConfig("int8", "cd" * 32, "percentile", ("/head/Conv",), "static", 99.9, False)
    assert make_key(quantization=int8).digest() == "12fedf6624e079e453d498ba0e6a50221a4ef070b0ecba58980a37531764c6af"
    assert make_key().digest() == "aaa6425744f1bce68649ca3cbc0499ea01abb03d6cf3ba653830fdb26b9cf7eb"
    assert key.digest() == "b0ad58b46134889e056111d635c33af489408e287c05dc563ee68f65e716e60d"
    assert DEVICE.name == "genuineintel-xeon-platinum-8488c-2c-3ef6963d"


@pytest.mark.parametrize(
    ("wish", "meant"),
    [
        ({}, {"mode": "static", "method": "minmax", "per_channel": True}),
        ({"method": "percentile"}, {"mode": "static", "percentile": PERCENTILE, "per_channel": True}),
        (
            {"exclude": ("b", "a", "b")},
            {"mode": "static", "method": "minmax", "per_channel": True, "exclude": ("a", "b")},
        ),
        ({"mode": "dynamic", "calibration": None}, {"per_channel": True}),
        ({"mode": "dynamic"}, {"per_channel": True}),
        ({"per_channel": False}, {"mode": "static", "method": "minmax"}),
    ],
)
def test_one_wish_has_one_spelling(wish: dict[str, Any], meant: dict[str, Any]) -> None:
    """What a request for int8 leaves out has its default, so that saying it makes no other key."""
    config = QuantizationConfig(**{"scheme": "int8", "calibration": "ab" * 32, **wish})
    resolved = config.resolved()
    assert resolved == replace(config, **meant)
    assert resolved.resolved() == resolved
    assert QuantizationConfig.from_json(json.loads(json.dumps(resolved.to_json()))) == resolved


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"scheme": "int4"}, "scheme"),
        ({"scheme": "none"}, "calibration"),
        ({"scheme": "none", "calibration": None, "per_channel": False}, "per_channel"),
        ({"scheme": "none", "calibration": None, "exclude": ("a",)}, "exclude"),
        ({"scheme": "fp16", "calibration": "samples"}, "calibration"),
        ({"scheme": "fp16", "method": "minmax"}, "method"),
        ({"mode": "online"}, "mode"),
        ({"calibration": None}, "calibration"),
        ({"calibration": "AB" * 32}, "calibration"),
        ({"mode": "dynamic", "calibration": "ab"}, "calibration"),
        ({"method": "kl"}, "method"),
        ({"mode": "dynamic", "method": "minmax"}, "method"),
        ({"mode": "dynamic", "percentile": 99.0}, "percentile"),
        ({"percentile": 99.0}, "percentile"),
        ({"method": "percentile", "percentile": 100.1}, "percentile"),
        ({"method": "percentile", "percentile": 50.0}, "percentile"),
        ({"method": "percentile", "percentile": float("nan")}, "percentile"),
    ],
)
def test_what_has_no_meaning_together(wish: dict[str, Any], field: str) -> None:
    """A wish that contradicts itself is refused by the field that does not fit."""
    with pytest.raises(InvalidRequest, match=f"^quantization.{field} ") as caught:
        QuantizationConfig(**{"scheme": "int8", "calibration": "ab" * 32, **wish}).resolved()
    assert caught.value.field == f"quantization.{field}"


def test_fp16() -> None:
    """Of fp16 the nodes that stay fp32 are in the key, in one order, and the samples that it is judged by."""
    wishes = [{}, {"exclude": ("b", "a")}, {"exclude": ("a",)}, {"calibration": "ab" * 32}]
    configs = [QuantizationConfig("fp16", **wish).resolved() for wish in wishes]
    assert configs[1] == QuantizationConfig("fp16", exclude=("a", "b"))
    assert len({make_key(quantization=config).digest() for config in (QuantizationConfig(), *configs)}) == 5
    assert configs[0].to_json() == {"scheme": "fp16", "calibration": None, "method": None, "exclude": []}


def test_keys_from_before_int8() -> None:
    """A stored key that knows nothing of the later fields of quantization is read, and still has its name."""
    stored = make_key().to_json()
    assert stored["quantization"] == {"scheme": "none", "calibration": None, "method": None, "exclude": []}
    assert ArtifactKey.from_json(stored).digest() == sha256_json(stored)


def test_another_version_is_not_read() -> None:
    """A key of another version is refused, not guessed at (pytorch#150494)."""
    for version in (1, 3, None):
        with pytest.raises(ValueError, match=f"key version {version} is not 2"):
            ArtifactKey.from_json({**make_key().to_json(), "key_version": version})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=JSON, seed=st.integers())
def test_canonical_json(value: Any, seed: int) -> None:
    """Equal values have one spelling, in whatever order their names were given, and it reads back as the value."""

    def shuffled(item: Any) -> Any:
        if isinstance(item, dict):
            names = list(item)
            random.Random(seed).shuffle(names)
            return {name: shuffled(item[name]) for name in names}
        return [shuffled(i) for i in item] if isinstance(item, list) else item

    spelled = canonical_json(value)
    assert spelled == canonical_json(shuffled(value))
    assert json.loads(spelled) == value
    assert canonical_json(json.loads(spelled)) == spelled


def test_canonical_spelling() -> None:
    """The spelling itself: sorted names, no white space, UTF-8; and what is not JSON is refused."""
    assert canonical_json({"b": [1, 1.5, None, True], "a": "é"}) == '{"a":"é","b":[1,1.5,null,true]}'.encode()
    assert sha256_json({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))


@given(spec=SPECS)
def test_tensor_spec_round_trip(spec: TensorSpec) -> None:
    """NAME:DTYPE[SHAPE] reads back, whatever characters the name holds."""
    assert parse_input(str(spec)) == (spec.name, {"dtype": spec.dtype, "shape": list(spec.shape)})


@given(dtype=st.sampled_from(sorted(DTYPES)))
def test_tensor_spec_of_tricky_names(dtype: str) -> None:
    """Names that look like a part of the notation are still names."""
    for name in ("a:float32[1]", "[1]", ":", "x:int8[2]:y", "a\nb", " x "):
        spec = TensorSpec(name, dtype, (1, 2))
        assert parse_input(str(spec)) == (spec.name, {"dtype": spec.dtype, "shape": list(spec.shape)})


@pytest.mark.parametrize(
    "text",
    ["", "x", "x:float32", "x[1]", ":float32[1]", "x:float32[1,,2]", "x:float32[-1]", "x:float32[1.5]",
     "x:float32[1..]", "x:float32[1/2]", "x:float32[1..2..3]", "x:float32[1]y", "x:float32[٣]"],
)  # fmt: skip
def test_tensor_spec_refuses(text: str) -> None:
    """What is not a whole name, dtype and list of sizes is refused with the field's name."""
    with pytest.raises(InvalidRequest) as caught:
        parse_input(text)
    assert caught.value.field.startswith("input")


@given(st.data())
def test_ranges_are_spelled_and_counted(data: st.DataObject) -> None:
    """A query's spelling of a range, with points or without, reads back; a key with one reads back from its JSON, and
    says so in the words of a request; a key without has no such member, as keys have always been."""
    size = st.integers(1, 2**31 - 1)
    ranged = st.fixed_dictionaries(
        {"range": st.tuples(size, size).map(list)}, optional={"points": st.lists(size, min_size=1, max_size=4)}
    )
    shape = data.draw(st.lists(size | ranged, max_size=5))
    assert parse_input(f"a:b:int8[{spell_shape(shape)}]") == ("a:b", {"dtype": "int8", "shape": shape})
    fixed = make_key()
    assert "range" not in fixed.to_json()
    key = replace(fixed, range=DimensionRange(1, 32, (1, 8, 32), (0,) * len(fixed.inputs)))
    assert ArtifactKey.from_json(json.loads(canonical_json(key.to_json()))) == key
    assert [difference.field for difference in key.diff(fixed)] == ["range"]
    asked = key.asked_inputs()[fixed.inputs[0].name]["shape"]
    assert asked == [{"range": [1, 32], "points": [1, 8, 32]}, *fixed.inputs[0].shape[1:]]


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 1.0, "1", None])
def test_tensor_spec_sizes(size: Any) -> None:
    """A dimension is a whole number from 1 to 2147483647, and nothing that only looks like one."""
    with pytest.raises(InvalidRequest, match="dimension 1") as caught:
        TensorSpec("x", "float32", (1, size))
    assert caught.value.field == "inputs.x.shape"


IDENTITIES = st.builds(
    lambda identity, kind, cores: replace(identity, kind=kind, cores=cores),
    values_of(DeviceIdentity),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 100_000),
)


@given(one=IDENTITIES, two=IDENTITIES)
def test_device_names(one: DeviceIdentity, two: DeviceIdentity) -> None:
    """A device's name is short and safe in paths, URLs and queue names, and another one for any other identity."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.name)
    assert len(one.name) <= 64
    assert (one.name == two.name) == (one == two)


@given(key=KEYS, other=KEYS)
def test_record_scope(key: ArtifactKey, other: ArtifactKey) -> None:
    """Records are shared across models, inputs, quantization and the choice of algorithms, and across nothing else."""
    options = replace(key.options, winograd=not key.options.winograd)
    same = replace(key, model=other.model, inputs=other.inputs, quantization=other.quantization, options=options)
    assert same.digest() != key.digest()
    assert same.record_scope().digest() == key.record_scope().digest()
    assert same.record_scope() == key.record_scope()
    for path in LEAVES:
        if path[0] in ("device", "target", "toolchain", "options") and path != ("options", "winograd"):
            changed = changed_at(key, path, value_at(other, path))
            equal = value_at(other, path) == value_at(key, path)
            assert (changed.record_scope().digest() == key.record_scope().digest()) == equal
            assert (changed.record_scope() == key.record_scope()) == equal


def test_golden_scope() -> None:
    """This digest is what it has always been: a change loses every record."""
    assert make_key().record_scope().digest() == "cd59ae03774377a7c60177d8a93359c3a1d5cd1cddecf57722393336593025c6"


def test_nearest() -> None:
    """The keys with the fewest differences come first, no more than asked for."""
    wanted = make_key()
    one = make_key(options=BuildOptions(fast_math=True))
    two = make_key(options=BuildOptions(fast_math=True), toolchain=replace(TOOLCHAIN, tvm="0.28.0"))
    three = make_key(device=replace(DEVICE, cores=1, arch="aarch64", vendor="ARM"))
    found = nearest(wanted, [three, two, one], limit=2)
    assert [n.key for n in found] == [one, two]
    assert found[0].differences == (FieldDifference("options.fast_math", False, True),)
    assert str(found[1].differences[0]) == 'toolchain.tvm: wanted "0.27.0.post1", stored "0.28.0"'
    assert nearest(wanted, []) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a" * 64, True), ("A" * 64, False), ("a" * 63, False), ("a" * 65, False), ("a" * 64 + "\n", False),
     ("g" * 64, False), ("٣" * 64, False), ("", False)],
)  # fmt: skip
def test_is_sha256(text: str, expected: bool) -> None:
    """Exactly 64 lower-case hexadecimal digits name a blob."""
    assert is_sha256(text) is expected


def test_toolchain_of_a_cpu() -> None:
    """A toolchain without CUDA differs from one with it."""
    assert Toolchain.from_json({"tvm": "1", "tvm_ffi": "1", "llvm": "1", "pipeline": "p"}).cuda is None


@pytest.mark.parametrize(
    ("points", "high", "sizes"),
    [((1, 8, 32), 32, (4, 20)), ((1, 2), 2, ()), ((1, 8, 64), 1024, (4, 36, 544, 1024)), ((1, 4), 5, (2, 5))],
)
def test_sizes_that_are_no_points(points: tuple[int, ...], high: int, sizes: tuple[int, ...]) -> None:
    """A range is tried in the middle of each gap between its points, and at its end."""
    assert DimensionRange(1, high, points, (0,)).between() == sizes
