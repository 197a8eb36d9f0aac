"""A model and the data files that it names, or a folder of samples, as one tar, made while it is sent: what the client
does with what is more than one file.

Only the few fields of ONNX's messages that lead to such names are looked at, so neither `onnx` nor protobuf is needed,
and memory does not grow with the model.
"""

from __future__ import annotations

import mmap
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CHUNK_BYTES: Final = 1 << 20

#: Message -> field number -> the message that it holds, as onnx.proto numbers them. "" is text.
_FIELDS: Final[dict[str, dict[int, str]]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {1: "", 2: ""},
}
_DEEPEST: Final = 100


class DataFileRefused(Exception):
    """A data file that a model names is missing, or lies where nothing is sent from. `str(error)` says which."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tar of files. `chunks` may be called again and again."""

    files: tuple[tuple[str, Path, int], ...]  #: name in the tar, where it lies, bytes

    @property
    def size_bytes(self) -> int:
        return sum(len(_header(name, size)) + size + -size % tarfile.BLOCKSIZE for name, _, size in self.files) + (
            2 * tarfile.BLOCKSIZE
        )

    def chunks(self) -> Iterator[bytes]:
        for name, path, size in self.files:
            yield _header(name, size)
            left = size
            with path.open("rb") as file:
                while left:
                    chunk = file.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        raise DataFileRefused(f"{path} became shorter while it was sent; send it again")
                    yield chunk
                    left -= len(chunk)
            yield bytes(-size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


def packed(model: Path) -> Packed | None:
    """The model with its data files, or None if it names none, or is something else than an ONNX model.

    DataFileRefused for one that is missing, or that lies outside the model's folder, links followed: a model from
    elsewhere must not have its user's files sent.
    """
    locations = locations_in(model)
    if not locations:
        return None
    # A model may be a link into a store of files by content, as may its data files.
    allowed = {model.parent.resolve(), model.resolve().parent}
    files = [("model.onnx", model, model.stat().st_size)]
    for location in sorted(locations):
        steps = [step for step in location.split("/") if step not in ("", ".")]
        path = model.parent.joinpath(*steps)
        if location.startswith("/") or ".." in steps or "\0" in location or not steps:
            raise DataFileRefused(
                f"{model} keeps weights in {location!r}, which is outside its folder; "
                "put the file beside the model, and save the model with that name in it"
            )
        if not path.is_file():
            raise DataFileRefused(f"{model} keeps weights in {location!r}, and there is no file {path}; put it there")
        if not any(path.resolve().is_relative_to(folder) for folder in allowed):
            raise DataFileRefused(f"{path} is a link that leads outside the model's folder; copy the file there")
        files.append(("/".join(steps), path, path.stat().st_size))
    return Packed(tuple({name: (name, path, size) for name, path, size in files}.values()))


def packed_samples(folder: Path) -> Packed:
    """The .npy files in a folder and the folders in it, by their names there. DataFileRefused if there are none."""
    files = sorted(path for path in folder.rglob("*.npy") if path.is_file())
    if not files:
        raise DataFileRefused(f"{folder} holds no .npy file; put the samples there, or send an .npz file")
    return Packed(tuple((path.relative_to(folder).as_posix(), path, path.stat().st_size) for path in files))


def locations_in(model: Path) -> set[str]:
    """The data files that an ONNX model names. Empty for what is no ONNX model: the service says what is wrong."""
    found: set[str] = set()
    if not model.is_file() or model.stat().st_size == 0:
        return found
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _walk(data, 0, len(data), "Model", found, 0)
        except (IndexError, RecursionError):
            return set()
    return found


def _walk(data: mmap.mmap, at: int, end: int, message: str, found: set[str], depth: int) -> None:
    if depth > _DEEPEST:
        raise RecursionError
    texts: dict[int, str] = {}
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, at = _varint(data, at)
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > end:
                raise IndexError
            inner = _FIELDS[message].get(number)
            if inner == "":
                texts[number] = data[at : at + min(length, 4096)].decode("utf-8", "replace")
            elif inner is not None:
                _walk(data, at, at + length, inner, found, depth + 1)
            at += length
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise IndexError
    if at != end:
        raise IndexError
    if texts.get(1) == "location" and texts.get(2):
        found.add(texts[2])


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise IndexError


def _header(name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    return info.tobuf(tarfile.PAX_FORMAT)
