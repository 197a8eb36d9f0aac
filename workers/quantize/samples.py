"""Calibration data as bytes: an uploaded .npz, .zip or .tar of .npy files, read one array or one sample at a time.

How arrays are samples of a model's inputs says `tuning_db.calibration`. Nothing is unpickled or written to disk, and
memory holds one sample at a time. Only NumPy is needed here: the API's inspector reads uploads by `examine`.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.calibration import arrange, calibration_digest
from tuning_db.errors import InvalidCalibration
from tuning_db.keys import DTYPES, TensorSpec

#: What all arrays together may unpack to: a small archive of zeros must not keep a worker busy for days.
MAX_UNPACKED_BYTES: Final = 8 << 30
MAX_ARRAYS: Final = 10_000
_MOST_MEMBERS: Final = 100_000
_LONGEST_NAME: Final = 1000
_SUFFIX: Final = ".npy"
_CHUNK_BYTES: Final = 1 << 20

#: What reading an archive that is damaged, encrypted, or packed in a way that Python does not know may raise.
_UNREADABLE: Final = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError,
)  # fmt: skip

Sample = dict[str, NDArray[Any]]


def examine(path: Path) -> tuple[str, tuple[TensorSpec, ...]]:
    """The digest of an upload's arrays, and the arrays by name. Every byte is read.

    Raises InvalidCalibration, naming the array, for what is no array of numbers, NaN and infinities among them: no
    range holds them.
    """
    with _open(path) as archive:
        found: dict[TensorSpec, str] = {}
        for name in archive.arrays():
            spec = archive.spec(name)
            dtype = np.dtype(spec.dtype)
            digest = hashlib.sha256()
            with archive.open(name) as stream:
                _header(stream, name)
                left = math.prod(spec.shape) * dtype.itemsize
                while left:
                    data = _read(stream, min(left, _CHUNK_BYTES), name)
                    digest.update(data)
                    left -= len(data)
                    if dtype.kind == "b" and max(data) > 1:
                        raise InvalidCalibration(f"calibration: {_shown(name)} holds bytes that are no bool")
                    if dtype.kind == "f" and not np.isfinite(np.frombuffer(data, dtype)).all():
                        raise InvalidCalibration(
                            f"calibration: {_shown(name)} holds NaN or infinity; leave that sample out"
                        )
                if _read(stream, 1, name, whole=False):
                    raise InvalidCalibration(f"calibration: {_shown(name)} goes on behind its array")
            found[spec] = digest.hexdigest()
        return calibration_digest(found), tuple(sorted(found, key=lambda spec: spec.name))


class Samples(AbstractContextManager["Samples"]):
    """The samples of one archive for a model's inputs; iterating reads them again from the first.

    Opening it checks names, dtypes and shapes of all arrays by their headers. Values are checked as they are read: NaN
    and infinities raise InvalidCalibration too. `on_sample` is told each sample's number, from 1, as it is read.
    """

    def __init__(
        self, path: Path, inputs: Sequence[TensorSpec], on_sample: Callable[[int], None] | None = None
    ) -> None:
        self._inputs = tuple(inputs)
        self._on_sample = on_sample
        self._archive = _open(path)
        try:
            specs = [self._archive.spec(name) for name in self._archive.arrays()]
            self._parts = arrange(specs, self._inputs)
            self._count = sum(part.count for part in next(iter(self._parts.values())))
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
                    raise InvalidCalibration(
                        f"calibration: sample {number} of input {name!r} holds NaN or infinity; leave it out"
                    )
            if self._on_sample is not None:
                self._on_sample(number + 1)
            yield sample

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._archive.close()

    def _stream(self, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        dtype = np.dtype(spec.dtype)
        for part in self._parts[spec.name]:
            with self._archive.open(part.array) as stream:
                _header(stream, part.array)
                for _ in range(part.count):
                    data = _read(stream, math.prod(spec.shape) * dtype.itemsize, part.array)
                    yield np.frombuffer(data, dtype).reshape(spec.shape).copy()


class _Archive(AbstractContextManager["_Archive"]):
    """A zip or tar file as arrays and streams. What is no .npy file is not looked at, nor are links and devices, nor
    what macOS adds to archives."""

    def __init__(self, archive: zipfile.ZipFile | tarfile.TarFile) -> None:
        self._archive = archive
        if isinstance(archive, zipfile.ZipFile):
            entries = [(i.filename, i.file_size) for i in archive.infolist() if not i.is_dir()]
        else:
            entries = [(i.name, i.size) for i in archive.getmembers() if i.isreg() and not i.issparse()]
        if len(entries) > _MOST_MEMBERS:
            raise InvalidCalibration(f"calibration: the archive holds more than {_MOST_MEMBERS} files")
        self._stored: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        for stored, size in entries:
            if not stored.endswith(_SUFFIX) or posixpath.basename(stored).startswith("._"):
                continue
            name = stored.removeprefix("./").removesuffix(_SUFFIX)
            if name in self._stored:
                raise InvalidCalibration(f"calibration: the archive holds {_shown(name)} twice")
            if len(name) > _LONGEST_NAME or not name or name.encode("utf-8", "replace").decode() != name:
                raise InvalidCalibration(
                    f"calibration: the archive holds {_shown(name)}; a name has 1 to {_LONGEST_NAME} characters"
                )
            self._stored[name], self._sizes[name] = stored, size
        if not self._stored:
            raise InvalidCalibration("calibration: the archive holds no .npy file")
        if len(self._stored) > MAX_ARRAYS or sum(self._sizes.values()) > MAX_UNPACKED_BYTES:
            raise InvalidCalibration(
                f"calibration: the archive unpacks to more than {MAX_ARRAYS} arrays or {MAX_UNPACKED_BYTES >> 30} GiB; "
                "a few hundred samples are enough"
            )

    def arrays(self) -> list[str]:
        """The names of the .npy files without that ending, sorted."""
        return sorted(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """What the header of an array says, if it is one that a sample can be, and as long as that."""
        with self.open(name) as stream:
            shape, dtype = _header(stream, name)
        if str(dtype) not in DTYPES:
            raise InvalidCalibration(
                f"calibration: {_shown(name)} is {dtype}, which no input takes; convert it with array.astype(…)"
            )
        if self._sizes[name] < math.prod(shape) * dtype.itemsize:
            raise InvalidCalibration(f"calibration: {_shown(name)} is cut short")
        if 0 in shape:
            raise InvalidCalibration(f"calibration: {_shown(name)} holds no samples: its shape is {list(shape)}")
        return TensorSpec(name, str(dtype), shape)

    def open(self, name: str) -> IO[bytes]:
        try:
            if isinstance(self._archive, zipfile.ZipFile):
                return self._archive.open(self._stored[name])
            stream = self._archive.extractfile(self._stored[name])
        except _UNREADABLE as error:
            raise _damaged(error) from None
        assert stream is not None
        return stream

    def close(self) -> None:
        self._archive.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a .npy file; the stream is left at the first byte of its data."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format has the version {version[0]}.{version[1]}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except (*_UNREADABLE, RecursionError):
        raise InvalidCalibration(f"calibration: {_shown(name)} is not an array that numpy.save wrote") from None
    if dtype.hasobject:
        raise InvalidCalibration(f"calibration: {_shown(name)} holds Python objects, not numbers")
    if by_columns and len(shape) > 1:
        raise InvalidCalibration(
            f"calibration: {_shown(name)} is stored by columns; save numpy.ascontiguousarray(array)"
        )
    return tuple(int(size) for size in shape), dtype


def _read(stream: IO[bytes], size: int, name: str, *, whole: bool = True) -> bytes:
    try:
        data = stream.read(size)
    except _UNREADABLE as error:
        raise _damaged(error) from None
    if whole and len(data) != size:
        raise InvalidCalibration(f"calibration: {_shown(name)} is cut short")
    return data


def _shown(name: str) -> str:
    """The file of an array as messages repeat it."""
    return repr(name + _SUFFIX if len(name) <= 80 else name[:79] + "…")


def _damaged(error: Exception) -> InvalidCalibration:
    return InvalidCalibration(f"calibration: the archive cannot be read: {type(error).__name__}")


def _open(path: Path) -> _Archive:
    if path.stat().st_size == 0:
        raise InvalidCalibration("calibration: the file is empty")
    archive: zipfile.ZipFile | tarfile.TarFile
    try:
        # A compressed tar has to be read from its beginning for each array; a zip is compressed file by file.
        archive = zipfile.ZipFile(path) if zipfile.is_zipfile(path) else tarfile.open(path, "r:")  # noqa: SIM115
    except _UNREADABLE:
        raise InvalidCalibration(
            "calibration: the file is neither a .npz or .zip nor an uncompressed .tar of .npy files"
        ) from None
    try:
        return _Archive(archive)
    except _UNREADABLE as error:
        archive.close()
        raise _damaged(error) from None
    except BaseException:
        archive.close()
        raise
