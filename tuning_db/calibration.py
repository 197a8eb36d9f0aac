"""Calibration data as a stored noun: which arrays an upload holds, and how they are samples of a model's inputs.

Two layouts, told apart by the arrays' names:

- one array an input, ``INPUT`` (what `numpy.savez` writes): [samples, *shape], or as many batches in a row as there
  are, [samples × batch, …], or one sample as it is;
- one folder a sample, ``…/SAMPLE/INPUT``, each array of the input's shape. With one input the arrays may have any
  name, one or more samples in each.

Samples are in the order of their names, whatever the archive's own order, so that equal data gives equal ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tuning_db.errors import InvalidRequest
from tuning_db.keys import Json, TensorSpec, sha256_json

#: The dotted path of the request's field that names the data.
FIELD: Final = "quantization.calibration"
_SUFFIX: Final = ".npy"


@dataclass(frozen=True, slots=True)
class Part:
    """One array of an upload: `count` samples of one input, one after the other."""

    array: str
    count: int


@dataclass(frozen=True, slots=True)
class CalibrationInfo:
    """Uploaded samples. `digest` names the arrays, whatever they are packed in; `blob` the bytes as they came."""

    digest: str
    blob: str  #: sha256 of the uploaded file
    size_bytes: int
    arrays: tuple[TensorSpec, ...]  #: sorted by name

    def arrange(self, inputs: Sequence[TensorSpec]) -> dict[str, list[Part]]:
        """As `arrange`, of the arrays of this upload."""
        return arrange(self.arrays, inputs)


def calibration_digest(arrays: Mapping[TensorSpec, str]) -> str:
    """Names arrays by their names, dtypes, shapes and the SHA-256 of their elements in C order: neither the kind of
    archive, nor its order, times and compression, nor files in it that are no arrays change it."""
    listed: list[Json] = [
        [spec.name, spec.dtype, list(spec.shape), arrays[spec]] for spec in sorted(arrays, key=lambda spec: spec.name)
    ]
    return sha256_json(["calibration", listed])


def arrange(arrays: Sequence[TensorSpec], inputs: Sequence[TensorSpec]) -> dict[str, list[Part]]:
    """The arrays of each input, by its name, in the order of the samples; each input has as many as the others.

    Raises InvalidRequest, naming array and input, for arrays that are not samples of these inputs.
    """
    arrays = sorted(arrays, key=lambda array: array.name)
    if not inputs:
        raise InvalidRequest("calibration: the model has no inputs to calibrate", field=FIELD)
    specs = {spec.name: spec for spec in inputs}
    names = list(specs)
    parts: dict[str, list[Part]] = {name: [] for name in names}
    if {array.name for array in arrays} <= set(names):
        for array in arrays:
            parts[array.name].append(_part(array, specs[array.name]))
    else:
        samples: dict[str, set[str]] = {name: set() for name in names}
        for array in arrays:
            # Names of inputs may hold slashes: the longest that fits is meant.
            fits = [name for name in names if array.name.endswith(f"/{name}")]
            if not fits and len(names) > 1:
                raise InvalidRequest(
                    f"calibration: {_file(array)} belongs to no input; name files SAMPLE/INPUT.npy with INPUT one of "
                    f"{', '.join(map(repr, names))}, or give one INPUT.npy each",
                    field=FIELD,
                )
            name = max(fits, key=len, default=names[0])
            samples[name].add(array.name.removesuffix(f"/{name}"))
            parts[name].append(_part(array, specs[name]))
        _refuse_halves(samples)
    for name, found in parts.items():
        if not found:
            held = ", ".join(map(_file, arrays[:5]))
            raise InvalidRequest(
                f"calibration: there is no array for input {name!r}; the archive holds {held}", field=FIELD
            )
    counts = {name: sum(part.count for part in found) for name, found in parts.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
        raise InvalidRequest(f"calibration: each input needs as many samples as the others: {told}", field=FIELD)
    return parts


def _refuse_halves(samples: Mapping[str, set[str]]) -> None:
    """InvalidRequest for a sample that has only some of the inputs."""
    first, *others = samples
    for other in others:
        missing = sorted(samples[first] ^ samples[other])
        if samples[first] and samples[other] and missing:
            raise InvalidRequest(
                f"calibration: sample {missing[0]!r} has only one of the inputs {first!r} and {other!r}", field=FIELD
            )


def _part(array: TensorSpec, wanted: TensorSpec) -> Part:
    if array.dtype != wanted.dtype:
        raise InvalidRequest(
            f"calibration: {_file(array)} is {array.dtype}, input {wanted.name!r} takes {wanted.dtype}; convert it "
            f"with array.astype({wanted.dtype!r})",
            field=FIELD,
        )
    count = _samples_in(array.shape, wanted.shape)
    if count is None:
        raise InvalidRequest(
            f"calibration: {_file(array)} has the shape {list(array.shape)}; input {wanted.name!r} takes "
            f"{list(wanted.shape)}, or several of them behind each other, {['samples', *wanted.shape]}",
            field=FIELD,
        )
    return Part(array.name, count)


def _file(array: TensorSpec) -> str:
    return repr(array.name + _SUFFIX)


def _samples_in(shape: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    """How many arrays of the shape `wanted` one of `shape` holds in a row; None if it cannot be cut into them."""
    if shape == wanted:
        return 1
    if len(shape) == len(wanted) + 1 and shape[1:] == wanted:
        return shape[0]
    if wanted and len(shape) == len(wanted) and shape[1:] == wanted[1:] and shape[0] % wanted[0] == 0:
        return shape[0] // wanted[0]
    return None
