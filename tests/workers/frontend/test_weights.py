"""Weights in files beside the graph: the same kernels as with all inside, and no file but our own is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.workers.conftest import Host, run_pipeline
from tests.workers.frontend import test_quantized, test_recurrent
from tests.workers.frontend.test_archives import large, tar_of, with_data_file, write
from tests.workers.models import conv_bn_relu, make_model, matmuls, normal, port, save
from tuning_db.errors import InvalidModel, InvalidRequest
from tuning_db.keys import TensorSpec
from workers.frontend import inspect as inspector
from workers.frontend import onnx_model
from workers.frontend.onnx_import import import_onnx
from workers.packaging import library
from workers.packaging.reference import compare, example_inputs

LARGE_BYTES = 64


def inputs_of(model: ModelProto) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(p.name, p.dtype, tuple(d if isinstance(d, int) else 2 for d in p.shape))
        for p in onnx_model.inputs_of(model)
    )


def outside(path: Path) -> list[str]:
    """The weights that a model has in other files."""
    model = onnx.load(path, load_external_data=False)
    return [tensor.name for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def looped() -> ModelProto:
    """A loop with a weight of its own, which reads another from outside."""
    number, on = port("i", dtype=TensorProto.INT64), port("on", dtype=TensorProto.BOOL)
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["s", "own"], ["m"]),
            helper.make_node("Add", ["m", "outer"], ["s1"]),
            helper.make_node("Identity", ["on"], ["on1"]),
        ],
        "body",
        [number, on, port("s", 4, 4)],
        [port("on1", dtype=TensorProto.BOOL), port("s1", 4, 4)],
        [numpy_helper.from_array(normal(4, 4), "own")],
    )
    node = helper.make_node("Loop", ["times", "", "x"], ["y"], name="loop", body=body)
    weights = {"times": np.array(3), "outer": normal(4, 4, seed=1)}
    return make_model([node], [port("x", 4, 4)], [port("y", 4, 4)], weights)


@pytest.mark.parametrize(
    "make", [conv_bn_relu, looped, test_quantized.static, test_quantized.dynamic, test_recurrent.recognizer]
)
def test_same_module(make: Callable[[], ModelProto], tmp_path: Path) -> None:
    """Folding, loops and rewrites come to the same module, weights included, as of a model with its weights inside."""
    model = make()
    path, inputs = save(model, tmp_path), inputs_of(model)
    apart = import_onnx(path, inputs, tmp_path, large_bytes=LARGE_BYTES)
    together = import_onnx(path, inputs, tmp_path)
    assert outside(apart.bound)
    assert not outside(together.bound)
    tvm.ir.assert_structural_equal(apart.module, together.module)


def test_same_result(host: Host, tmp_path: Path) -> None:
    """A model that is uploaded with a data file runs, as reference and as library, as the one with all inside."""
    content, data = with_data_file("weights.bin", offset="4")
    path = write(tmp_path, tar_of({"net/model.onnx": content, "net/weights.bin": b"\0" * 4 + data}))
    inputs = inputs_of(matmuls())
    imported = import_onnx(path, inputs, tmp_path, large_bytes=LARGE_BYTES)
    assert outside(imported.bound) == ["left", "right"]
    library.compile_library(run_pipeline(imported, host), host.target, tmp_path / "untuned.so")
    examples = example_inputs(inputs, 0)
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "untuned.so")), tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(examples[spec.name]) for spec in inputs)).numpy()
    for reference in (imported.bound, save(matmuls(), tmp_path)):
        session = onnxruntime.InferenceSession(reference, providers=["CPUExecutionProvider"])
        [entry] = compare(session.run(None, examples), [got], ["y"])
        assert entry["ok"], entry


@pytest.mark.parametrize("location", ["/etc/hostname", "../secret", "secret", "sub/../../secret", "weights-1.bin"])
def test_files_that_are_not_in_the_archive(location: str, tmp_path: Path) -> None:
    """Data files are members of the archive, whatever lies in the folder of the job, and however they are named."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for secret in (tmp_path / "secret", scratch / "secret", scratch / "weights-1.bin"):
        secret.write_bytes(bytes(128))
    content, data = with_data_file(location)
    upload = write(tmp_path, tar_of({"model.onnx": content, "weights.bin": data}))
    alone = tmp_path / "alone.onnx"
    alone.write_bytes(content)
    for path in (upload, alone):
        with pytest.raises(InvalidModel, match="data"):
            import_onnx(path, inputs_of(matmuls()), scratch, large_bytes=LARGE_BYTES)


@pytest.mark.parametrize("entries", [{"length": "124"}, {"offset": "4"}, {"length": "132"}, {"offset": "-4"}])
def test_data_files_that_lie(entries: dict[str, str], tmp_path: Path) -> None:
    """What a tensor says of its bytes is compared with its shape and with the file before any are written."""
    content, data = with_data_file(**entries)
    path = write(tmp_path, tar_of({"model.onnx": content, "weights.bin": data}))
    with pytest.raises(InvalidModel, match="left"):
        import_onnx(path, inputs_of(matmuls()), tmp_path, large_bytes=LARGE_BYTES)
    assert [file.stat().st_size for file in tmp_path.glob("weights-*.bin")] == [0]


@pytest.mark.parametrize("scheme", ["int8", "fp16"])
def test_more_than_can_be_quantized(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 and fp16 take models that protobuf holds in one piece; others are refused before there is a job."""
    model, data = large(1 << 18)
    [tensor] = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w")
    path = write(tmp_path, tar_of({"model.onnx": model.SerializeToString(), "w": data}))
    bind = {"x": {"shape": [1 << 18]}}
    assert inspector.inspect(path, bind, scheme=scheme)["ok"]
    monkeypatch.setattr(onnx_model, "_MOST_PROTOBUF_BYTES", (1 << 20) - 1)
    assert inspector.inspect(path, bind)["ok"]
    with pytest.raises(InvalidRequest, match=f"{1 << 20} bytes.* cannot be made {scheme}") as caught:
        inspector.inspect(path, bind, scheme=scheme)
    assert caught.value.field == "quantization.scheme"
