"""What a tuned library depends on, and the one key made of all of it.

`ArtifactKey.digest()` is the SHA-256 of canonical JSON: sorted names, no white space, UTF-8. Every field that can
change the library's bytes, its numbers or its speed on the device is in it; the search budget is not. A change to
what the JSON holds or how it is spelled needs a new `KEY_VERSION`: see docs/decisions/0001-key-format.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Self, TypeAlias

from tuning_db.errors import InvalidRequest

KEY_VERSION: Final = 2

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

#: Element types in ONNX's spelling that a graph input may have, with NumPy's names.
DTYPES: Final = frozenset(
    {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}
)

#: How numbers may be represented inside a library.
SCHEMES: Final = ("none", "fp16", "int8")
#: When int8 learns the ranges of activations: from calibration data before compiling, or as the model runs.
MODES: Final = ("static", "dynamic")
#: How static int8 chooses the range of a tensor from the values that the calibration data gives it.
CALIBRATION_METHODS: Final = ("minmax", "entropy", "percentile")
#: Percent of a tensor's values that the method `percentile` keeps in range, unless the request says otherwise.
PERCENTILE: Final = 99.999

#: A range of a dimension ends here at most, and has so many points at most: each is a model of its own to search.
MOST_ITEMS: Final = 1024
MOST_POINTS: Final = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")

#: Name, dtype and sizes of ``NAME:DTYPE[1,3,224,224]``.
TYPED_INPUT: Final = re.compile(r"(?s)(.+):([a-z0-9]+)\[([0-9, ./]*)\]")


def is_sha256(text: str) -> bool:
    """Whether `text` is 64 lower-case hexadecimal digits and nothing else."""
    return _SHA256.fullmatch(text) is not None


def canonical_json(value: Json) -> bytes:
    """The one spelling of `value`: sorted names, no white space, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_json(value: Json) -> str:
    """SHA-256 of `canonical_json(value)`, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def to_json(value: Any) -> Json:
    """A frozen dataclass of this module as plain JSON; tuples become lists."""
    if isinstance(value, QuantizationConfig | BuildOptions):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no place in a key")


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """What tells one device model from another. Read from the device itself, never typed in.

    Two machines with equal identities are one device with two slots; records and libraries are shared between them.
    """

    kind: str  #: "cpu" or "cuda"
    vendor: str
    model: str
    arch: str  #: "x86_64", "aarch64", "armv7l", "riscv64", "sm_90"
    features: tuple[str, ...]  #: instruction-set features that TVM can use, sorted
    cores: int  #: cores that one inference uses; streaming multiprocessors for a GPU
    cache_bytes: tuple[int, ...] = ()  #: L1 data, L2, L3, of one core's view
    board: str | None = None  #: from the device tree
    memory_bytes: int | None = None  #: of a GPU
    driver: str | None = None  #: of a GPU

    @property
    def name(self) -> str:
        """A short, stable, unique name that is safe in a path, a URL and a queue's name."""
        slug = re.sub(r"[^a-z0-9]+", "-", f"{self.vendor} {self.model}".lower()).strip("-")
        return f"{slug[:40].rstrip('-') or self.kind}-{self.cores}c-{sha256_json(to_json(self))[:8]}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "features": tuple(data["features"]), "cache_bytes": tuple(data["cache_bytes"])})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output with every dimension bound. Written ``NAME:DTYPE[1,3,224,224]``, as `parse_input` reads
    it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidRequest(
                f"input {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(sorted(DTYPES))}",
                field=f"inputs.{self.name}.dtype",
            )
        for axis, size in enumerate(self.shape):
            if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**31:
                raise InvalidRequest(
                    f"input {self.name!r}: dimension {axis} is {size!r}; give a whole number from 1 to 2147483647",
                    field=f"inputs.{self.name}.shape",
                )

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["name"], data["dtype"], tuple(data["shape"]))


def parse_input(text: str) -> tuple[str, dict[str, Any]]:
    """Name, and dtype and shape as a request has them, of ``NAME:DTYPE[1,3,224,224]``. The name may hold any character,
    colons and brackets too."""
    match = TYPED_INPUT.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"input {text!r} is not NAME:DTYPE[1,3,224,224]", field="input")
    name, dtype, dims = match.groups()
    try:
        return name, {"dtype": dtype, "shape": parse_shape(dims)}
    except ValueError:
        raise InvalidRequest(f"input {text!r}: [{dims}] is not a list of sizes", field="input") from None


def parse_shape(text: str) -> list[int | dict[str, list[int]]]:
    """``1,3,224,224``, in which ``1..32`` is a range, and ``1..32/1/8/32`` one with its points. ValueError for else."""
    return [_parse_dimension(part) for part in text.split(",")] if text.strip() else []


def _parse_dimension(text: str) -> int | dict[str, list[int]]:
    ends, *points = text.split("/")
    low, dots, high = ends.partition("..")
    if not dots:
        return int(text)
    found = {"range": [int(low), int(high)]}
    return {**found, "points": [int(point) for point in points]} if points else found


def spell_shape(shape: Iterable[Any]) -> str:
    """The inverse of `parse_shape`."""
    return ",".join(
        "/".join(["..".join(map(str, size["range"])), *map(str, size.get("points") or ())])
        if isinstance(size, Mapping)
        else str(size)
        for size in shape
    )


@dataclass(frozen=True, slots=True)
class DimensionRange:
    """A dimension of the inputs in which one library serves every size from `low` to `high`.

    Of each of `points` (ascending, `low` the first of them) it has a function of its own, searched at that size; what
    lies between is cut into pieces of such sizes (`tuning_db.pieces`).
    """

    low: int
    high: int
    points: tuple[int, ...]
    axes: tuple[int | None, ...]  #: each input's axis of that dimension, in the model's order; None: it has none

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["low"], data["high"], tuple(data["points"]), tuple(data["axes"]))

    def at(self, inputs: Sequence[TensorSpec], size: int) -> tuple[TensorSpec, ...]:
        """The inputs with that size in this dimension."""
        return tuple(
            spec if axis is None else replace(spec, shape=(*spec.shape[:axis], size, *spec.shape[axis + 1 :]))
            for spec, axis in zip(inputs, self.axes, strict=True)
        )

    def between(self) -> tuple[int, ...]:
        """Of the sizes that are no points the middle of each gap, and the largest of all if it is one."""
        middles = {(a + b) // 2 for a, b in itertools.pairwise((*self.points, self.high + 1)) if b - a > 1}
        return tuple(sorted(middles | ({self.high} - {*self.points})))


def default_points(low: int, high: int) -> tuple[int, ...]:
    """Where a range is searched if nothing is said: at its low end, at 8 and 64 times that, and at its high end unless
    that is further still. A larger batch gains little over pieces of it."""
    powers = [low * 8**power for power in range(3)]
    return tuple(sorted({*(size for size in powers if size <= high), *([high] if high <= powers[-1] else [])}))


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How numbers are represented inside the library. What a request says is `resolved` before it is in a key.

    The JSON leaves out the later fields where they are None: keys that were made before there were such fields are
    spelled, and named, as they have always been.
    """

    scheme: str = "none"  #: one of SCHEMES
    calibration: str | None = None  #: digest of the calibration data
    method: str | None = None  #: one of CALIBRATION_METHODS
    exclude: tuple[str, ...] = ()  #: nodes kept in fp32, sorted
    mode: str | None = None  #: one of MODES
    percentile: float | None = None
    per_channel: bool | None = None  #: a scale for each channel of a weight, not one for all of them

    def __post_init__(self) -> None:
        if self.percentile is not None:
            object.__setattr__(self, "percentile", float(self.percentile))  # one spelling of 100

    def resolved(self) -> Self:
        """The config that is meant, with defaults filled in and exclusions sorted: one spelling of one wish.

        Raises InvalidRequest, by field, for words that are not known and for what has no meaning together.
        """
        _one_of("scheme", self.scheme, SCHEMES)
        if self.scheme != "int8":
            of_both = () if self.scheme == "fp16" else ("calibration", "exclude")
            for name in ("mode", "method", "percentile", "per_channel", *of_both):
                if getattr(self, name) not in (None, ()):
                    raise _senseless(
                        name, f"has no meaning with the scheme {self.scheme!r}; leave it out, or ask for 'int8'"
                    )
        if self.calibration is not None and not is_sha256(self.calibration):
            raise _senseless(
                "calibration", "is not the digest of calibration data; upload samples with POST /v1/calibrations"
            )
        exclude = tuple(sorted(set(self.exclude)))
        if self.scheme != "int8":
            return replace(self, exclude=exclude)
        mode = self.mode or "static"
        _one_of("mode", mode, MODES)
        method, percentile = self.method, self.percentile
        if mode == "static":
            if self.calibration is None:
                raise _senseless(
                    "calibration",
                    "is missing: static int8 needs samples of the model's inputs; upload some with "
                    "POST /v1/calibrations, or ask for the mode 'dynamic'",
                )
            method = method or "minmax"
            _one_of("method", method, CALIBRATION_METHODS)
        elif method is not None:
            raise _senseless(
                "method", "has no meaning with the mode 'dynamic', which measures ranges as the model runs"
            )
        if method == "percentile":
            percentile = PERCENTILE if percentile is None else percentile
            if not 50 < percentile <= 100:
                raise _senseless("percentile", "must be a number above 50, and 100 at most")
        elif percentile is not None:
            raise _senseless("percentile", "has a meaning with the method 'percentile' alone")
        return replace(
            self,
            mode=mode,
            method=method,
            percentile=percentile,
            per_channel=True if self.per_channel is None else self.per_channel,
            exclude=exclude,
        )

    def to_json(self) -> dict[str, Json]:
        values = {f.name: to_json(getattr(self, f.name)) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None or name in _FIRST_FIELDS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "exclude": tuple(data.get("exclude", ()))})


#: Fields of QuantizationConfig that its JSON always holds.
_FIRST_FIELDS: Final = ("scheme", "calibration", "method", "exclude")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _senseless(name, f"{value!r} is not one of {', '.join(map(repr, known))}")


def _senseless(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"quantization.{name} {why}", field=f"quantization.{name}")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options that change code. The JSON leaves out `reassociation` where it is not asked for: older keys lack it."""

    #: Quotients may be products with reciprocals, products and sums fused, and zeros lose their sign.
    fast_math: bool = False
    opt_level: int = 3
    #: Convolutions may be computed by Winograd's algorithm where it measures faster; changes rounding.
    winograd: bool = True
    #: Sums and products may be computed in any order.
    reassociation: bool = False

    def to_json(self) -> dict[str, Json]:
        values: dict[str, Json] = dict(asdict(self))
        if not self.reassociation:
            del values["reassociation"]
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What made the code. `pipeline` is the name and version of our own graph passes."""

    tvm: str
    tvm_ffi: str
    llvm: str
    pipeline: str
    cuda: str | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two keys differ, by its dotted path."""

    field: str
    wanted: Json
    stored: Json

    def __str__(self) -> str:
        return f"{self.field}: wanted {json.dumps(self.wanted)}, stored {json.dumps(self.stored)}"


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """Everything that a tuned library depends on."""

    model: str  #: digest of graph and weights
    inputs: tuple[TensorSpec, ...]  #: in the model's order; of a range, with its largest size
    device: DeviceIdentity
    target: str  #: canonical JSON of the resolved TVM target
    toolchain: Toolchain
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    options: BuildOptions = field(default_factory=BuildOptions)
    range: DimensionRange | None = None  #: None: every dimension is fixed, and the JSON has no such member

    def to_json(self) -> dict[str, Json]:
        data = to_json(self)
        assert isinstance(data, dict)
        if self.range is None:
            del data["range"]
        return {"key_version": KEY_VERSION, **data}

    def functions(self) -> dict[str, tuple[TensorSpec, ...]]:
        """The inputs of each of the library's functions: `main`, or of a range one for each point, the largest last."""
        if self.range is None:
            return {"main": self.inputs}
        return {f"main_{size}": self.range.at(self.inputs, size) for size in self.range.points}

    def asked_inputs(self) -> dict[str, dict[str, Json]]:
        """The inputs by name as a request has them: `dtype` and `shape`, a range among its sizes."""
        asked: dict[str, dict[str, Json]] = {}
        for position, spec in enumerate(self.inputs):
            shape: list[Json] = list(spec.shape)
            axis = None if self.range is None else self.range.axes[position]
            if self.range is not None and axis is not None:
                shape[axis] = {"range": [self.range.low, self.range.high], "points": list(self.range.points)}
            asked[spec.name] = {"dtype": spec.dtype, "shape": shape}
        return asked

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises ValueError for a key of another version: such an entry is a miss, never a guess."""
        if data.get("key_version") != KEY_VERSION:
            raise ValueError(f"key version {data.get('key_version')!r} is not {KEY_VERSION}")
        return cls(
            model=data["model"],
            inputs=tuple(TensorSpec.from_json(i) for i in data["inputs"]),
            device=DeviceIdentity.from_json(data["device"]),
            target=data["target"],
            toolchain=Toolchain.from_json(data["toolchain"]),
            quantization=QuantizationConfig.from_json(data["quantization"]),
            options=BuildOptions.from_json(data["options"]),
            range=DimensionRange.from_json(data["range"]) if "range" in data else None,
        )

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal: the key under which people fetch."""
        return sha256_json(self.to_json())

    def diff(self, stored: ArtifactKey) -> tuple[FieldDifference, ...]:
        """Every field in which `stored` differs from this key, in the order of the fields; empty if equal."""
        return tuple(_differences("", self._compared(), stored._compared()))

    def _compared(self) -> dict[str, Json]:
        """The JSON with every option: a difference tells both values."""
        return {**self.to_json(), "options": dict(asdict(self.options))}

    def record_scope(self) -> RecordScope:
        return RecordScope(self.device, self.target, self.toolchain, self.options)


@dataclass(frozen=True, slots=True)
class RecordScope:
    """What a measured schedule depends on besides its workload: models that share an operator share its tuning.

    Of the options, `winograd` does not count: it chooses between computations, and each computation is a workload of
    its own, whose records are as good where the other one is not allowed. Here it always has its default.
    """

    device: DeviceIdentity
    target: str
    toolchain: Toolchain
    options: BuildOptions

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", replace(self.options, winograd=BuildOptions().winograd))

    def to_json(self) -> dict[str, Json]:
        data, options = to_json(self), to_json(self.options)
        assert isinstance(data, dict)
        assert isinstance(options, dict)
        del options["winograd"]
        return {**data, "options": options}

    def digest(self) -> str:
        return sha256_json(self.to_json())


@dataclass(frozen=True, slots=True)
class NearestKey:
    """A stored key that is not the one asked for, and why."""

    key: ArtifactKey
    differences: tuple[FieldDifference, ...]


def nearest(wanted: ArtifactKey, stored: Iterable[ArtifactKey], limit: int = 3) -> tuple[NearestKey, ...]:
    """The stored keys with the fewest differences, closest first."""
    found = [NearestKey(key, wanted.diff(key)) for key in stored]
    found.sort(key=lambda n: (len(n.differences), n.key.digest()))
    return tuple(found[:limit])


def _differences(path: str, wanted: Json, stored: Json) -> Iterable[FieldDifference]:
    if isinstance(wanted, dict) and isinstance(stored, dict) and path != "range":  # which is one wish
        for name in [*wanted, *(n for n in stored if n not in wanted)]:
            yield from _differences(f"{path}.{name}" if path else name, wanted.get(name), stored.get(name))
    elif path == "inputs" and isinstance(wanted, list) and isinstance(stored, list):
        # Inputs are compared by name, so that the path reads inputs.x.shape and not inputs.0.shape.
        by_name = [{str(i.get("name")): i for i in side if isinstance(i, dict)} for side in (wanted, stored)]
        if list(by_name[0]) != list(by_name[1]):
            yield FieldDifference("inputs", list(by_name[0]), list(by_name[1]))
        for name in by_name[0]:
            if name in by_name[1]:
                yield from _differences(f"inputs.{name}", by_name[0][name], by_name[1][name])
    elif wanted != stored or type(wanted) is not type(stored):
        yield FieldDifference(path, wanted, stored)
