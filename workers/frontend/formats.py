"""What kind of model an upload is, told by its first bytes or by what its archive holds, never by its name.

Only ONNX is compiled. A format with an `extra` is made into ONNX first, by `workers.frontend.convert`; the others are
known so that their users are told what to send instead.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuning_db.errors import UnsupportedFormat
from workers.frontend import archives
from workers.frontend.archives import Archive

_HEAD_BYTES: Final = 1 << 16
_MLIR_TEXT: Final = (b"module", b"func", b"#", b"//")


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file. `title` follows "the file is", `advice` ends a sentence."""

    name: str
    title: str
    advice: str
    extra: str | None = None  #: what has to be installed to take it; None: it is taken by nothing

    def refused(self) -> UnsupportedFormat:
        """The error for a file of a format that nothing takes."""
        return UnsupportedFormat(f"the file is {self.title}, which is not taken; {self.advice}", format=self.name)

    def not_installed(self) -> UnsupportedFormat:
        """The error for a file whose converter is missing."""
        return UnsupportedFormat(
            f"the file is {self.title}, and its converter is not installed where the API runs: "
            f"pip install 'tunery[{self.extra}]'; or {self.advice}",
            format=self.name,
        )


_TO_ONNX: Final = "convert it with tf2onnx and send the ONNX file"
_FROM_TORCH: Final = "send the ONNX file that torch.onnx.export(..., dynamo=True) writes"

ONNX: Final = Format("onnx", "an ONNX model", "")
PT2: Final = Format("pt2", "a PyTorch program of torch.export (.pt2)", _FROM_TORCH, "torch")
TFLITE: Final = Format("tflite", "a TFLite model", _TO_ONNX, "tensorflow")
SAVED_MODEL: Final = Format("saved-model", "a TensorFlow SavedModel", _TO_ONNX, "tensorflow")
KERAS: Final = Format("keras", "a Keras model (.keras)", _TO_ONNX, "tensorflow")
HDF5: Final = Format("hdf5", "an HDF5 file, as Keras writes models (.h5)", _TO_ONNX, "tensorflow")
FROZEN_GRAPH: Final = Format("frozen-graph", "a TensorFlow graph", _TO_ONNX, "tensorflow")
SAVED_MODEL_GRAPH: Final = Format(
    "saved-model-graph", "the saved_model.pb of a SavedModel without its variables", "send the whole folder as one zip"
)
TORCHSCRIPT: Final = Format("torchscript", "a TorchScript program", _FROM_TORCH)
PICKLE: Final = Format("pickle", "a pickle, as torch.save writes weights and modules", _FROM_TORCH)
SAFETENSORS: Final = Format("safetensors", "a file of weights alone (safetensors)", _FROM_TORCH)
GGUF: Final = Format("gguf", "a GGUF file", "send the model as ONNX")
STABLEHLO: Final = Format("stablehlo", "an MLIR module, as StableHLO is written", "export the function with jax2onnx")
OPENVINO: Final = Format("openvino", "an OpenVINO model", "send the model that it was converted from")

#: What `workers.frontend.convert` makes into ONNX.
CONVERTED: Final = (PT2, TFLITE, SAVED_MODEL, FROZEN_GRAPH, KERAS, HDF5)


def format_of(path: Path) -> Format:
    """What the file is; ONNX for what is nothing else that is known. InvalidModel for an archive that is refused."""
    with archives.opened(path) as archive:
        if archive is not None:
            return _of_archive(archive)
    with path.open("rb") as file:
        return _of_head(file.read(_HEAD_BYTES))


def _of_archive(archive: Archive) -> Format:
    names = list(archive.members)
    if any(name.lower().endswith(".onnx") for name in names):
        return ONNX
    for name in _called(names, "archive_format"):
        member = archive.members[name]
        if member.size_bytes <= 16 and member.read().strip() == b"pt2":
            return PT2
    if "serialized_exported_program.json" in names:  # as PyTorch wrote it up to 2.7
        return PT2
    if _called(names, "data.pkl"):
        return TORCHSCRIPT if _called(names, "constants.pkl") else PICKLE
    if {"config.json", "metadata.json", "model.weights.h5"} <= set(names):
        return KERAS
    if _called(names, "saved_model.pb"):
        return SAVED_MODEL
    return ONNX


def _called(names: Iterable[str], wanted: str) -> list[str]:
    """The members of that name, in whichever folder."""
    return [name for name in names if posixpath.basename(name) == wanted]


def _of_head(head: bytes) -> Format:
    """What a file is that begins so. No ONNX file does: its first byte is the tag of a small field."""
    if head[4:8] == b"TFL3":
        return TFLITE
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return HDF5
    if head.startswith(b"GGUF"):
        return GGUF
    if head.startswith(b"ML\xefR") or (head.lstrip()[:6].startswith(_MLIR_TEXT) and b"stablehlo." in head):
        return STABLEHLO
    if head.startswith(b"<?xml") and b"<net " in head:
        return OPENVINO
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLE
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32:
        return SAFETENSORS
    if head.startswith(b"\x08\x01\x12") and _inside(head, 2)[:1] == b"\x0a":
        return SAVED_MODEL_GRAPH
    if head[:1] == b"\x0a" and _inside(head, 0)[:1] == b"\x0a":
        return FROZEN_GRAPH
    return ONNX


def _inside(head: bytes, tag_at: int) -> bytes:
    """What stands in the protobuf field of bytes whose tag, of one byte, is there."""
    at, length, shift = tag_at + 1, 0, 0
    for byte in head[at : at + 10]:
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return head[at : at + length]
    return b""
