"""The other stored nouns: uploaded models, devices that have reported themselves, published artifacts."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tuning_db.errors import InvalidRequest, ShapeMismatch
from tuning_db.keys import (
    MOST_ITEMS,
    MOST_POINTS,
    ArtifactKey,
    DeviceIdentity,
    DimensionRange,
    Json,
    TensorSpec,
    Toolchain,
    default_points,
)


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One input or output as the model declares it. A dimension is a size, a symbol's name, or None: unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["name"], data["dtype"], tuple(data["shape"]))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An uploaded model. `digest` names graph and weights; `blob` names the ONNX file that holds them."""

    digest: str
    blob: str  #: sha256 of the uploaded file, or of what it was converted to
    format: str  #: what was uploaded: "onnx", or what was made into it, such as "pt2"
    size_bytes: int
    inputs: tuple[PortSpec, ...]
    outputs: tuple[PortSpec, ...]

    def bind(self, shapes: Mapping[str, Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
        """The inputs in the model's order with every dimension bound.

        `shapes` maps an input's name to ``{"shape": [1, 3, 224, 224], "dtype": "float32"}``; dtype may be left out.
        An input whose declared shape is fully known may be left out. Raises ShapeMismatch, naming input and
        dimension, for one that is missing or contradicts the model, a symbol bound to two sizes included.
        """
        declared = {port.name: port for port in self.inputs}
        for name in shapes:
            if name not in declared:
                raise ShapeMismatch(
                    f"the model has no input {name!r}; its inputs are {', '.join(map(repr, declared))}",
                    field=f"inputs.{name}",
                )
        symbols: dict[str, tuple[int, str]] = {}
        return tuple(_bind_port(port, shapes.get(port.name), symbols) for port in self.inputs)

    def bind_range(
        self, shapes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[tuple[TensorSpec, ...], DimensionRange | None]:
        """As `bind`, but one size of an input's shape may be ``{"range": [1, 32], "points": [1, 8, 32]}``, the same in
        each input that has one; the points may be left out (`default_points`). The inputs then have the range's end.

        Raises InvalidRequest, naming the input, for what is no range or more than one.
        """
        axes: dict[str, int] = {}
        found: tuple[str, tuple[int, int, tuple[int, ...]]] | None = None
        for name, wanted in shapes.items():
            for axis, size in enumerate(wanted["shape"]):
                if not isinstance(size, Mapping):
                    continue
                if name in axes:
                    raise InvalidRequest(
                        f"input {name!r} has ranges in dimensions {axes[name]} and {axis}; a library serves one",
                        field=f"inputs.{name}.shape",
                    )
                axes[name] = axis
                ends = _range_of(size, f"input {name!r}: dimension {axis}", f"inputs.{name}.shape")
                if found is not None and found[1] != ends:
                    raise InvalidRequest(
                        f"input {name!r}: dimension {axis} has another range, or other points, than input "
                        f"{found[0]!r}; a library serves one range",
                        field=f"inputs.{name}.shape",
                    )
                found = found or (name, ends)
        if found is None:
            return self.bind(shapes), None
        low, high, points = found[1]
        # Twice: a size that is fixed in one place and a range in another must not pass for equalling one end.
        _, inputs = (
            self.bind({n: _at(wanted, axes.get(n), size) for n, wanted in shapes.items()}) for size in (low, high)
        )
        return inputs, DimensionRange(low, high, points, tuple(axes.get(port.name) for port in self.inputs))


def _at(wanted: Mapping[str, Any], axis: int | None, size: int) -> Mapping[str, Any]:
    return (
        wanted if axis is None else {**wanted, "shape": [*wanted["shape"][:axis], size, *wanted["shape"][axis + 1 :]]}
    )


def _range_of(size: Mapping[str, Any], what: str, field: str) -> tuple[int, int, tuple[int, ...]]:
    """Low, high and points, ascending. InvalidRequest for what is no range."""
    low, high = size["range"]
    if not 1 <= low < high <= MOST_ITEMS:
        raise InvalidRequest(
            f"{what} is the range {low} to {high}; it must begin with 1 or more and end above that, by {MOST_ITEMS}",
            field=field,
        )
    points = tuple(sorted(set(size.get("points") or default_points(low, high))))
    if points[0] != low or points[-1] > high or points[-1] < 2 or len(points) > MOST_POINTS:
        raise InvalidRequest(
            f"{what} has the points {', '.join(map(str, points[:16]))}; up to {MOST_POINTS} are possible, the first of "
            f"them {low}, none above {high}, and one at least of 2 or more",
            field=field,
        )
    return low, high, points


def _bind_port(port: PortSpec, wanted: Mapping[str, Any] | None, symbols: dict[str, tuple[int, str]]) -> TensorSpec:
    where = f"inputs.{port.name}"
    written = "[" + ", ".join("?" if d is None else str(d) for d in port.shape) + "]"
    if wanted is None:
        for axis, size in enumerate(port.shape):
            if not isinstance(size, int):
                raise ShapeMismatch(
                    f"input {port.name!r} needs a shape: dimension {axis} of {written} is not fixed by the model",
                    field=f"{where}.shape",
                )
        wanted = {"shape": list(port.shape)}
    dtype = wanted.get("dtype") or port.dtype
    if dtype != port.dtype:
        raise InvalidRequest(f"input {port.name!r} is {port.dtype} in the model, not {dtype}", field=f"{where}.dtype")
    spec = TensorSpec(port.name, dtype, tuple(wanted["shape"]))
    if len(spec.shape) != len(port.shape):
        raise ShapeMismatch(
            f"input {port.name!r} has rank {len(port.shape)} in the model, {written}; "
            f"{list(spec.shape)} has rank {len(spec.shape)}",
            field=f"{where}.shape",
        )
    for axis, (declared, size) in enumerate(zip(port.shape, spec.shape, strict=True)):
        if isinstance(declared, int) and declared != size:
            raise ShapeMismatch(
                f"input {port.name!r}: dimension {axis} is {declared} in the model, not {size}", field=f"{where}.shape"
            )
        if isinstance(declared, str):
            bound, place = symbols.setdefault(declared, (size, f"dimension {axis} of input {port.name!r}"))
            if bound != size:
                raise ShapeMismatch(
                    f"input {port.name!r}: dimension {axis} is the symbol {declared!r}, "
                    f"which is {bound} at {place}, not {size}",
                    field=f"{where}.shape",
                )
    return spec


@dataclass(frozen=True, slots=True)
class Roof:
    """The most that a device was seen to do, in float32: no kernel on it is faster than its work divided by this.

    After the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785). ValueError for
    figures that nothing can be divided by.
    """

    flops_per_s: float  #: on all cores of the identity; a fused multiply-add counts as two
    bytes_per_s: float  #: between the cores and main memory, on all cores
    flops_per_s_one_thread: float
    measured_at: dt.datetime
    toolchain: Toolchain | None = None  #: what compiled the kernels that were timed

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "flops_per_s_one_thread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}: a roof is a finite number above 0")


@dataclass(frozen=True, slots=True)
class Health:
    """How one slot of a device was when something was last measured on it. None is what its system does not tell."""

    slot: str  #: the host of the worker, or the address of the board
    reference_s: float  #: of a fixed kernel, at the speed that the last job settled on
    best_reference_s: float  #: the least that it ever took there
    temperature_c: float | None
    khz: int | None  #: clock of the fastest processor
    governor: str | None
    measured_at: dt.datetime

    @property
    def drift(self) -> float:
        """How much longer the fixed kernel takes than at best: 0.1 is a tenth."""
        return self.reference_s / self.best_reference_s - 1


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its worker last reported it. Slots, queue length and the like are derived, not stored here."""

    identity: DeviceIdentity
    target: str  #: canonical JSON of the TVM target derived from the identity
    toolchain: Toolchain
    last_seen: dt.datetime
    workers: int = 1  #: workers of this identity seen within the last minute: its slots
    busy: int = 0  #: jobs RUNNING on it
    queued: int = 0  #: jobs QUEUED for it
    roof: Roof | None = None  #: None while nobody has measured it
    health: tuple[Health, ...] = ()  #: of each slot that was measured on within the last month

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def drift(self) -> float | None:
        """That of its slowest slot; None while nothing was measured."""
        return max((slot.drift for slot in self.health), default=None)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published library: the newest revision under its key. `manifest` is what `GET /v1/artifacts/{key}` answers."""

    key: ArtifactKey
    revision: int  #: counts from 1; a later one is faster
    library: str  #: sha256 of the library's bytes
    size_bytes: int
    latency_s: float  #: median of the final timing on the device
    manifest: dict[str, Json]
    job_id: str
    created_at: dt.datetime
