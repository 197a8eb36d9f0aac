"""How a model is handed from one library to the next: its large weights lie in files of one folder, beside the graph.

The graph alone goes through protobuf, whose messages end at 2 GiB, and is written into that folder where a library
wants the whole model. Weights are copied there piece by piece, and mapped where their values are needed, so memory does
not grow with them. Every file in the folder is ours: what an upload says of files is not looked at any more.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper

#: Smaller tensors stay in the graph: a file for them would save nothing.
LARGE_BYTES: Final = 1 << 20

#: Libraries map a file in pages.
_PAGE_BYTES: Final = 4096

#: Element types of which several share a byte.
PACKED: Final = frozenset(
    number
    for name in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2")
    if (number := dict(TensorProto.DataType.items()).get(name)) is not None
)
_INTEGERS: Final = frozenset({TensorProto.INT32, TensorProto.INT64})


def separable(tensor: TensorProto) -> bool:
    """Whether shape inference does without the tensor's numbers, and they can be mapped as they are."""
    may_be_a_shape = tensor.data_type in _INTEGERS and len(tensor.dims) <= 1
    return not may_be_a_shape and tensor.data_type not in PACKED and tensor.data_type != TensorProto.STRING


class WeightsFile:
    """A new file in `folder`, which takes tensors of `large_bytes` and more."""

    def __init__(self, folder: Path, large_bytes: int) -> None:
        self._large_bytes = large_bytes
        self._path = _new_file(folder, "weights-", ".bin")

    def takes(self, tensor: TensorProto, size_bytes: int) -> bool:
        return size_bytes >= self._large_bytes and separable(tensor)

    def take(self, tensor: TensorProto, chunks: Iterable[bytes]) -> None:
        """Write the tensor's bytes, and have it say where they are."""
        with self._path.open("ab") as file:
            file.write(bytes(-file.tell() % _PAGE_BYTES))
            begin = file.tell()
            for chunk in chunks:
                file.write(chunk)
            length = file.tell() - begin
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self._path.name), ("offset", str(begin)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)


def _new_file(folder: Path, prefix: str, suffix: str) -> Path:
    number, name = tempfile.mkstemp(suffix, prefix, folder)
    os.close(number)
    return Path(name)


def write(model: ModelProto, folder: Path) -> Path:
    """The model in a new file beside its weights, as ONNX Runtime wants it."""
    path = _new_file(folder, "graph-", ".onnx")
    onnx.save_model(model, path)
    return path


def array(tensor: TensorProto, folder: Path | None) -> NDArray[Any]:
    """The tensor's values, mapped if they lie in a file of `folder`; None is for models that have all inside."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return np.asarray(numpy_helper.to_array(tensor))
    entries = {entry.key: entry.value for entry in tensor.external_data}
    assert folder is not None
    assert Path(entries["location"]).name == entries["location"]
    if tensor.data_type in PACKED:
        return np.asarray(numpy_helper.to_array(tensor, str(folder)))
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    offset = int(entries.get("offset", "0"))
    return np.asarray(np.memmap(folder / entries["location"], dtype, "r", offset, tuple(tensor.dims)))


def take_in(model: ModelProto, folder: Path) -> ModelProto:
    """The model with all weights inside, for libraries that want it in one piece. Changes `model`."""
    external_data_helper.load_external_data_for_model(model, str(folder))
    return model
