"""The inspector as the API starts it: a process of its own that may die, one JSON object on its stdout."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.workers.models import conv_bn_relu, determinant, make_model, matmuls, port, save
from tuning_db.errors import InvalidRequest, ShapeMismatch, UnsupportedOption
from workers.frontend import inspect as inspector
from workers.frontend import onnx_model


def start(path: Path, bind: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workers.frontend.inspect", str(path)]
    asked = None
    if bind is not None:
        command.append("--bind")
        asked = json.dumps({"inputs": bind, "exclude": []})
    return subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60, check=False)


def inspect(path: Path, bind: dict[str, Any] | None = None) -> dict[str, Any]:
    done = start(path, bind)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_good_model(tmp_path: Path) -> None:
    """The answer says what the model is called, what it takes and gives, and which operators it holds."""
    answer = inspect(save(matmuls(), tmp_path))
    assert answer == {
        "ok": True,
        "digest": onnx_model.model_digest(matmuls()),
        "format": "onnx",
        "opset": 17,
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["N", 8]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["N", 4]}],
        "operators": {"MatMul": 2, "Add": 1, "Softmax": 1},
    }


def test_not_a_model(tmp_path: Path) -> None:
    """A truncated model is answered as an invalid one, with exit status 0."""
    path = tmp_path / "model.onnx"
    path.write_bytes(matmuls().SerializeToString()[:150])
    answer = inspect(path)
    assert answer["ok"] is False
    assert (answer["error"]["type"], answer["error"]["field"]) == ("InvalidModel", "model")
    assert "does not parse" in answer["error"]["message"]


def test_unsupported_operator(tmp_path: Path) -> None:
    """The answer names operator, node and operator set."""
    error = inspect(save(determinant(), tmp_path))["error"]
    assert (error["type"], error["operator"], error["node"], error["opset"]) == (
        "UnsupportedOperator", "Det", "volume", 17,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bind", "error", "field"),
    [
        ({"x": {"shape": [1, 8, 14, 14, 1]}}, ShapeMismatch, "inputs.x.shape"),
        ({"x": {"shape": [1, 9, 14, 14]}}, ShapeMismatch, "inputs.x.shape"),
        ({}, ShapeMismatch, "inputs.x.shape"),
        ({"image": {"shape": [1, 8, 14, 14]}}, ShapeMismatch, "inputs.image"),
        ({"x": {"shape": [1, 8, 14, 14], "dtype": "float16"}}, InvalidRequest, "inputs.x.dtype"),
        ({"x": {"shape": [0, 8, 14, 14]}}, InvalidRequest, "inputs.x.shape"),
    ],
)
def test_bad_binding(bind: dict[str, Any], error: type[InvalidRequest], field: str, tmp_path: Path) -> None:
    """A shape or dtype that the model does not take is refused with the field's name."""
    with pytest.raises(InvalidRequest) as caught:
        inspector.inspect(save(conv_bn_relu(), tmp_path), bind)
    assert (type(caught.value), caught.value.field) == (error, field)


def test_binding_that_contradicts_a_weight(tmp_path: Path) -> None:
    """A symbol bound to a size that some node cannot work on is found before any search."""
    model = matmuls()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "features"
    path = save(model, tmp_path)
    assert inspect(path, {"x": {"shape": [2, 8]}})["ok"] is True
    error = inspect(path, {"x": {"shape": [2, 9]}})["error"]
    assert (error["type"], error["field"]) == ("ShapeMismatch", "inputs.x.shape")


@pytest.mark.parametrize(
    ("asked", "field", "what"),
    [
        ({"device_kind": "cuda"}, "device", "on GPUs"),
        ({"scheme": "int8"}, "quantization.scheme", "as int8"),
        ({"ranged": True}, "inputs", "for a range of sizes"),
        ({}, None, ""),
    ],
    ids=["GPU", "int8", "range", "CPU"],
)
def test_a_model_that_selects_boxes(asked: dict[str, Any], field: str | None, what: str, tmp_path: Path) -> None:
    """A model with a NonMaxSuppression is taken for CPUs in fixed shapes, and refused for what is not done with it."""
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["y"])
    inputs = [port("boxes", 1, 8, 4), port("scores", 1, 1, 8)]
    outputs = [port("y", "K", 3, dtype=TensorProto.INT64)]
    path = save(make_model([node], inputs, outputs, {"most": np.array([3])}), tmp_path)
    bind = {"boxes": {"shape": [1, 8, 4]}, "scores": {"shape": [1, 1, 8]}}
    if field is None:
        assert inspector.inspect(path, bind, **asked)["ok"] is True
        return
    with pytest.raises(UnsupportedOption, match=f"NonMaxSuppression.* {what}") as refused:
        inspector.inspect(path, bind, **asked)
    assert refused.value.field == field


def test_external_data_is_not_opened(tmp_path: Path) -> None:
    """A model whose weights lie in another file is refused without opening it: here that would never return."""
    model = matmuls()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    tensor.external_data.add(key="location", value="weights.bin")
    os.mkfifo(tmp_path / "weights.bin")
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert "keeps its data in another file" in inspect(path)["error"]["message"]


def test_memory_limit(tmp_path: Path) -> None:
    """A small file that asks for more memory than its size allows is refused, and does not take the machine's."""
    size = 1 << 17
    model = make_model(
        [
            helper.make_node("ConstantOfShape", ["s"], ["big"]),
            helper.make_node("ReduceMax", ["big"], ["m"], keepdims=0),
            helper.make_node("Add", ["x", "m"], ["y"]),
        ],
        [port("x", 2)],
        [port("y", 2)],
        {"s": np.array([size, size])},
    )
    # A sparse tensor of 2^60 elements, spelt in a few bytes.
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[1 << 30, 1 << 30])
    tensor.raw_data = b"\0" * 8
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    answer = inspect(path, {"x": {"shape": [2]}})
    assert answer["error"]["type"] == "InvalidModel"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < before + (2 << 20)  # KiB


def test_limits_hold() -> None:
    """Memory beyond the limit is refused to the process, and its CPU time ends it."""
    program = """
import resource
from workers.frontend.inspect import limit_resources
limit_resources(1000)
assert resource.getrlimit(resource.RLIMIT_CPU)[0] <= 60
try:
    bytearray(5 << 30)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_CPU, (1, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    while True:
        pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert -done.returncode in (signal.SIGXCPU, signal.SIGKILL), done.stderr
