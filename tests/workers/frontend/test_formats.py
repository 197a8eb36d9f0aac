"""What an upload is, told by its content, and what is said of formats that are not ONNX."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.workers.models import matmuls
from tuning_db.errors import InvalidModel, UnsupportedFormat, UnsupportedOperator
from workers.frontend import archives, convert, formats, from_torch
from workers.frontend.inspect import inspect


def zipped(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return content.getvalue()


def program(description: Any, **more: bytes) -> bytes:
    """A PyTorch program with that description, as torch.export.save lays it out."""
    text = json.dumps(description).encode()
    return zipped({"p/archive_format": b"pt2", "p/models/model.json": text} | {f"p/{k}": v for k, v in more.items()})


CONTENT = {
    "onnx": [matmuls().SerializeToString(), b"not a model", zipped({"a/b.onnx": b"", "data.pkl": b""})],
    "pt2": [program({}), zipped({"serialized_exported_program.json": b"{}", "version": b"8.1"})],
    "tflite": [b"\x1c\0\0\0TFL3" + bytes(40)],
    "saved-model": [zipped({"m/saved_model.pb": b"", "m/variables/variables.index": b""})],
    "keras": [zipped({"config.json": b"{}", "metadata.json": b"{}", "model.weights.h5": b""})],
    "hdf5": [b"\x89HDF\r\n\x1a\n" + bytes(40)],
    "frozen-graph": [b"\x0a\x0c\x0a\x01x\x12\x07Shape_A" + bytes(40)],
    "saved-model-graph": [b"\x08\x01\x12\x06\x0a\x04\x22\x02tf" + bytes(40)],
    "torchscript": [zipped({"m/data.pkl": b"", "m/constants.pkl": b""})],
    "pickle": [zipped({"m/data.pkl": b""}), pickle.dumps({"a": 1}, 2), pickle.dumps([1.5], 5)],
    "safetensors": [(60).to_bytes(8, "little") + b'{"weight":{"dtype":"F32"}}' + bytes(40)],
    "gguf": [b"GGUF\x03\0\0\0"],
    "stablehlo": [b"ML\xefR\rStableHLO_v1.9.3", b"module @jit_f {\n  %0 = stablehlo.add %a, %b : tensor<2xf32>\n}"],
    "openvino": [b'<?xml version="1.0"?>\n<net name="Model0" version="11">'],
}


@pytest.mark.parametrize(("name", "content"), [(name, data) for name, files in CONTENT.items() for data in files])
def test_formats_are_told_by_content(name: str, content: bytes, tmp_path: Path) -> None:
    """Each format is known whatever its file is called; what only ONNX's parser can judge is left to that."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert formats.format_of(path).name == name


def test_what_is_not_taken_says_what_to_send(tmp_path: Path) -> None:
    """A format that nothing takes is refused by name, with advice; one that is converted is passed on by name."""
    path = tmp_path / "model"
    for name, files in CONTENT.items():
        path.write_bytes(files[0])
        if name in {found.name for found in formats.CONVERTED}:
            assert inspect(path, None) == {"ok": True, "convert": name}
        elif name != "onnx":
            with pytest.raises(UnsupportedFormat, match=r"the file is .*, which is not taken; \w+") as caught:
                inspect(path, None)
            assert caught.value.format == name


@pytest.mark.parametrize("wanted", formats.CONVERTED, ids=lambda wanted: wanted.name)
def test_missing_converters_say_which_extra_brings_them(
    wanted: formats.Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its libraries are not installed, a format is refused with the command that installs them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedFormat, match=rf"pip install 'tunery\[{wanted.extra}\]'") as caught:
        convert.convert(wanted, tmp_path / "model", tmp_path / "model.onnx")
    assert caught.value.format == wanted.name


def node(target: str, **changes: Any) -> dict[str, Any]:
    return {"nodes": [{"target": target, "inputs": [], "outputs": [], "name": "n", **changes}]}


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (program(node("torch.ops.mine.scale.default")), UnsupportedOperator, "operator 'torch.ops.mine.scale.default'"),
        (program(node("torch.serialization.os.system")), UnsupportedOperator, "not one of PyTorch's own"),
        (program(node("torch.ops.aten.__class__.__init__")), UnsupportedOperator, "not one of PyTorch's own"),
        (program(node("_operator.attrgetter")), UnsupportedOperator, "not one of PyTorch's own"),
        (program({"as_expr": {"expr_str": "eval(chr(49))"}}), InvalidModel, "which is no arithmetic"),
        (program({"as_expr": {"expr_str": "s0.__class__"}}), InvalidModel, "which is no arithmetic"),
        (program({"as_expr": {"expr_str": "Symbol('s0').as_poly()"}}), InvalidModel, "which is no arithmetic"),
        (program({"as_tensor": {"name": "x=print(1)"}}), InvalidModel, "which is no name"),
        (program({"parameter_name": "a.__class__.b"}), InvalidModel, "which is no name"),
        (program({"in_spec": '[1, {"__enum__": true, "fqn": "os:x"}]'}), InvalidModel, "classes of Python"),
        (program({}, **{"data/constants/custom_obj_0": b"\x80"}), InvalidModel, "an object of Python"),
        (program({}, **{"models/second.json": b"{}"}), InvalidModel, "2 PyTorch programs"),
        (zipped({"p/archive_format": b"pt2"}), InvalidModel, "0 PyTorch programs"),
        (zipped({"p/archive_format": b"pt2", "p/models/m.json": b"\xff"}), InvalidModel, "no JSON"),
    ],
)
def test_programs_with_more_than_tensors_are_not_loaded(
    content: bytes, error: type[Exception], says: str, tmp_path: Path
) -> None:
    """What PyTorch would evaluate, import or unpickle is refused before PyTorch sees the file."""
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with archives.opened(path) as archive:
        assert archive is not None
        with pytest.raises(error) as caught:
            from_torch.screen(archive)
    assert says in str(caught.value)


def test_plain_programs_pass(tmp_path: Path) -> None:
    """Operators, names and sizes as PyTorch writes them are taken as what they are."""
    names = [{"parameter_name": "layers.0.attn.in_proj_weight"}, {"name": "p_layers_0___attn_in_proj_weight"}]
    symbol = "Symbol('s23', positive=True, integer=True)"
    sizes = [{"expr_str": "Max(1, 2*s77 + (s0//2)) - CeilDiv(s1, 4)"}, {"expr_str": f"Mul(Integer(-8), {symbol})"}]
    called = ["torch.ops.aten.add.Tensor", "torch.ops.aten._softmax.default", "_operator.getitem", "torch.sym_size"]
    path = tmp_path / "model.pt2"
    path.write_bytes(program([*names, *sizes, *map(node, called)]))
    with archives.opened(path) as archive:
        assert archive is not None
        from_torch.screen(archive)
