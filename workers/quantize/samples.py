"""Calibration data: an uploaded .npz, .zip or .tar of .npy files, read one sample at a time.

Two layouts, told apart by the names in the archive:

- one array an input, ``NAME.npy`` (what `numpy.savez` writes): [samples, *shape], or as many batches in a row as there
  are, [samples × batch, …], or one sample as it is;
- one folder a sample, ``…/SAMPLE/NAME.npy``, each array of the input's shape. With one input the files may have any
  name, one or more samples in each.

Samples are taken in the order of their names, whatever the archive's own order, so that equal data gives equal ranges.
Nothing is unpickled or written to disk, and memory holds one sample at a time.
"""

from __future__ import annotations

import math
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.errors import InvalidRequest
from tuning_db.keys import TensorSpec

#: The dotted path of the request's field that names the data.
FIELD: Final = "quantization.calibration"
#: What all arrays together may unpack to: a small archive of zeros must not keep a worker busy for days.
MAX_UNPACKED_BYTES: Final = 64 << 30
_MAX_MEMBERS: Final = 1_000_000
_SUFFIX: Final = ".npy"

Sample = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _File:
    """One array of the archive: `count` samples of one input, one after the other behind its header."""

    member: str
    count: int


class Samples(AbstractContextManager["Samples"]):
    """The samples of one archive for a model's inputs; iterating reads them again from the first.

    Opening it checks names, dtypes and shapes of all arrays by their headers. Values are checked as they are read: NaN
    and infinities raise InvalidRequest too, for no range holds them.
    """

    def __init__(self, path: Path, inputs: Sequence[TensorSpec]) -> None:
        self._inputs = tuple(inputs)
        self._archive = _open(path)
        try:
            self._files = self._arrange()
            counts = {name: sum(file.count for file in files) for name, files in self._files.items()}
            if len(set(counts.values())) > 1:
                told = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
                raise InvalidRequest(
                    f"calibration: each input needs as many samples as the others: {told}", field=FIELD
                )
            self._count = next(iter(counts.values()))
            if self._count == 0:
                raise InvalidRequest("calibration: the arrays hold no samples", field=FIELD)
        except BaseException:
            self._archive.close()
            raise

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sample]:
        streams = [self._stream(spec) for spec in self._inputs]
        for number, arrays in enumerate(zip(*streams, strict=True)):
            sample = {spec.name: array for spec, array in zip(self._inputs, arrays, strict=True)}
            for name, array in sample.items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise InvalidRequest(
                        f"calibration: sample {number} of input {name!r} holds NaN or infinity; leave it out",
                        field=FIELD,
                    )
            yield sample

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._archive.close()

    def _arrange(self) -> dict[str, list[_File]]:
        """The files of each input in the order of the samples."""
        members = sorted(name for name in self._archive.sizes if name.endswith(_SUFFIX))
        if not members:
            raise InvalidRequest("calibration: the archive holds no .npy file", field=FIELD)
        names = [spec.name for spec in self._inputs]
        if not names:
            raise InvalidRequest("calibration: the model has no inputs to calibrate", field=FIELD)
        by_input: dict[str, list[_File]] = {name: [] for name in names}
        if {member.removesuffix(_SUFFIX) for member in members} <= set(names):
            for member in members:
                self._add(by_input, member.removesuffix(_SUFFIX), member)
        else:
            of_sample: dict[str, list[str]] = {name: [] for name in names}
            for member in members:
                # Names of inputs may hold slashes: the longest that fits is meant.
                fits = [n for n in names if member.removesuffix(_SUFFIX).endswith(f"/{n}")]
                if not fits and len(names) > 1:
                    raise InvalidRequest(
                        f"calibration: {member!r} belongs to no input; name files SAMPLE/INPUT.npy with INPUT one of "
                        f"{', '.join(map(repr, names))}, or give one INPUT.npy each",
                        field=FIELD,
                    )
                name = max(fits, key=len, default=names[0])
                of_sample[name].append(member.removesuffix(f"/{name}{_SUFFIX}"))
                self._add(by_input, name, member)
            self._same_samples(of_sample)
        for name, files in by_input.items():
            if not files:
                raise InvalidRequest(
                    f"calibration: there is no array for input {name!r}; the archive holds {', '.join(members[:5])}",
                    field=FIELD,
                )
        return by_input

    @staticmethod
    def _same_samples(of_sample: Mapping[str, list[str]]) -> None:
        first, *others = of_sample
        for other in others:
            missing = sorted(set(of_sample[first]) ^ set(of_sample[other]))
            if of_sample[first] and of_sample[other] and missing:
                raise InvalidRequest(
                    f"calibration: sample {missing[0]!r} has only one of the inputs {first!r} and {other!r}",
                    field=FIELD,
                )

    def _add(self, by_input: dict[str, list[_File]], name: str, member: str) -> None:
        spec = next(spec for spec in self._inputs if spec.name == name)
        with self._archive.open(member) as stream:
            shape, dtype = _header(stream, member)
        if str(dtype) != spec.dtype:
            raise InvalidRequest(
                f"calibration: {member!r} is {dtype}, input {name!r} takes {spec.dtype}; convert it with "
                f"array.astype({spec.dtype!r})",
                field=FIELD,
            )
        held = _samples_in(shape, spec.shape)
        if held is None:
            raise InvalidRequest(
                f"calibration: {member!r} has the shape {list(shape)}; input {name!r} takes {list(spec.shape)}, or "
                f"several of them behind each other, {['samples', *spec.shape]}",
                field=FIELD,
            )
        bytes_needed = math.prod(shape) * dtype.itemsize
        if self._archive.sizes[member] < bytes_needed:
            raise InvalidRequest(f"calibration: {member!r} is cut short", field=FIELD)
        by_input[name].append(_File(member, held))

    def _stream(self, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        dtype = np.dtype(spec.dtype)
        size = math.prod(spec.shape) * dtype.itemsize
        for file in self._files[spec.name]:
            with self._archive.open(file.member) as stream:
                _, stored = _header(stream, file.member)
                for _ in range(file.count):
                    try:
                        data = stream.read(size)
                    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, ValueError) as error:
                        raise _damaged(error) from None
                    if len(data) != size:
                        raise InvalidRequest(f"calibration: {file.member!r} is cut short", field=FIELD)
                    yield np.frombuffer(data, stored).reshape(spec.shape).astype(dtype)


def _samples_in(shape: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    """How many arrays of the shape `wanted` one of `shape` holds in a row; None if it cannot be cut into them."""
    if shape == wanted:
        return 1
    if len(shape) == len(wanted) + 1 and shape[1:] == wanted:
        return shape[0]
    if wanted and len(shape) == len(wanted) and shape[1:] == wanted[1:] and shape[0] % wanted[0] == 0:
        return shape[0] // wanted[0]
    return None


def _header(stream: IO[bytes], member: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a .npy file; the stream is left at the first byte of its data."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format has the version {version[0]}.{version[1]}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, tarfile.TarError, RecursionError):
        raise InvalidRequest(f"calibration: {member!r} is not an array that numpy.save wrote", field=FIELD) from None
    if dtype.hasobject:
        raise InvalidRequest(f"calibration: {member!r} holds Python objects, not numbers", field=FIELD)
    if by_columns and len(shape) > 1:
        raise InvalidRequest(
            f"calibration: {member!r} is stored by columns; save numpy.ascontiguousarray(array)", field=FIELD
        )
    return tuple(int(size) for size in shape), dtype


class _Archive:
    """A zip or tar file as names and streams. Links, devices and folders in it are not looked at."""

    def __init__(self, archive: zipfile.ZipFile | tarfile.TarFile) -> None:
        self._archive = archive
        if isinstance(archive, zipfile.ZipFile):
            entries = [(i.filename, i.file_size) for i in archive.infolist() if not i.is_dir()]
        else:
            entries = [(i.name, i.size) for i in archive.getmembers() if i.isreg()]
        self.sizes = {name.removeprefix("./"): size for name, size in entries}
        self._stored = {name.removeprefix("./"): name for name, _ in entries}
        if len(self.sizes) != len(entries):
            raise InvalidRequest("calibration: the archive holds two files of one name", field=FIELD)
        if len(entries) > _MAX_MEMBERS or sum(self.sizes.values()) > MAX_UNPACKED_BYTES:
            raise InvalidRequest(
                f"calibration: the archive unpacks to more than {_MAX_MEMBERS} files or "
                f"{MAX_UNPACKED_BYTES >> 30} GiB; a few hundred samples are enough",
                field=FIELD,
            )

    def open(self, member: str) -> IO[bytes]:
        try:
            if isinstance(self._archive, zipfile.ZipFile):
                return self._archive.open(self._stored[member])
            stream = self._archive.extractfile(self._stored[member])
        except (zipfile.BadZipFile, tarfile.TarError, NotImplementedError, RuntimeError, OSError) as error:
            raise _damaged(error) from None
        assert stream is not None
        return stream

    def close(self) -> None:
        self._archive.close()


def _damaged(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"calibration: the archive cannot be read: {type(error).__name__}", field=FIELD)


def _open(path: Path) -> _Archive:
    if path.stat().st_size == 0:
        raise InvalidRequest("calibration: the file is empty", field=FIELD)
    archive: zipfile.ZipFile | tarfile.TarFile
    try:
        # A compressed tar has to be read from its beginning for each array; a zip is compressed file by file.
        archive = zipfile.ZipFile(path) if zipfile.is_zipfile(path) else tarfile.open(path, "r:")  # noqa: SIM115
    except (zipfile.BadZipFile, tarfile.TarError, OSError, ValueError, NotImplementedError):
        raise InvalidRequest(
            "calibration: the file is neither a .npz or .zip nor an uncompressed .tar of .npy files", field=FIELD
        ) from None
    try:
        return _Archive(archive)
    except BaseException:
        archive.close()
        raise
