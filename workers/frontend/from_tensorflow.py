"""TFLite, SavedModel, frozen graphs and Keras models as ONNX, by tf2onnx, compared with TensorFlow's numbers.

tf2onnx is run by its command. What it cannot write it names; what it writes is run beside the original on random data.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.errors import InvalidModel, UnsupportedOperator
from workers.frontend import archives
from workers.packaging.reference import compare
from workers.said import last_line

#: The newest that tf2onnx writes.
_OPSET: Final = 18

Feeds = Mapping[str, NDArray[Any]]


def convert_tflite(path: Path, target: Path) -> None:
    """Inputs and outputs keep the names that the file gives them."""
    _run_tf2onnx("--tflite", path, target)
    _check(target, lambda feeds: _run_tflite(path, feeds))


def convert_saved_model(path: Path, target: Path) -> None:
    """A zip or tar of a SavedModel's folder. Inputs and outputs are called as its serving signature calls them."""
    folder = target.parent / "saved_model"
    with archives.opened(path) as archive:
        assert archive is not None
        root = next(name for name in archive.members if name.split("/")[-1] == "saved_model.pb").rpartition("/")[0]
        for name, member in archive.members.items():
            if root and not name.startswith(root + "/"):
                continue
            place = folder / (name.removeprefix(root + "/") if root else name)
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                file.writelines(member.chunks(0, member.size_bytes))
    _convert_folder(folder, target)


def convert_frozen_graph(path: Path, target: Path) -> None:
    """A GraphDef without variables. Its placeholders are the inputs; the outputs, which nothing in it names, are all
    results of operations of which nobody reads any. All are called as TensorFlow calls tensors, such as "scores:0"."""
    import tensorflow
    from google.protobuf.message import DecodeError

    definition = tensorflow.compat.v1.GraphDef()
    try:
        definition.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise InvalidModel(f"the file is no TensorFlow graph: {last_line(error)}") from error
    graph = tensorflow.Graph()
    with graph.as_default():
        tensorflow.import_graph_def(definition, name="")
    inputs, outputs = _ends(graph.get_operations())

    def run(feeds: Feeds) -> Feeds:
        with tensorflow.compat.v1.Session(graph=graph) as session:
            return dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))

    _run_tf2onnx("--graphdef", path, target, f"--inputs={','.join(inputs)}", f"--outputs={','.join(outputs)}")
    _check(target, run)


def _ends(operations: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The names of a graph's inputs and outputs. InvalidModel if it has variables or no outputs."""
    for operation in operations:
        if operation.type.startswith(("Var", "ReadVariable")):
            raise InvalidModel(
                f"the TensorFlow graph is not frozen: node {operation.name!r} is a variable; send the SavedModel"
            )
    inputs = [operation.outputs[0].name for operation in operations if operation.type == "Placeholder"]
    outputs = [
        result.name
        for operation in operations
        if operation.type not in ("Const", "Placeholder") and not any(r.consumers() for r in operation.outputs)
        for result in operation.outputs
    ]
    if not outputs:
        raise InvalidModel("the TensorFlow graph has no outputs: every result is read by another node")
    return inputs, outputs


def convert_keras(path: Path, target: Path) -> None:
    """A .keras archive or an .h5 file whose layers are Keras's own: code of the model's author is not run."""
    import keras

    # Keras looks at the name, which here says nothing.
    named = target.parent / ("model.h5" if path.open("rb").read(4) == b"\x89HDF" else "model.keras")
    named.symlink_to(path)
    try:
        model = keras.saving.load_model(named, compile=False, safe_mode=True)
    except (ValueError, TypeError) as error:
        raise InvalidModel(f"Keras does not load the model: {last_line(error)}") from error
    folder = target.parent / "saved_model"
    model.export(folder, format="tf_saved_model", verbose=False)
    _convert_folder(folder, target)


def _convert_folder(folder: Path, target: Path) -> None:
    _run_tf2onnx("--saved-model", folder, target)
    _check(target, lambda feeds: _run_saved_model(folder, feeds))


def _run_tf2onnx(kind: str, path: Path, target: Path, *more: str) -> None:
    command = [sys.executable, "-m", "tf2onnx.convert", kind, str(path), "--output", str(target), *more]
    done = subprocess.run(
        [*command, "--opset", str(_OPSET)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    unsupported = re.search(r"Tensorflow op \[([^\]:]*): (\w+)\] is not supported", done.stdout)
    if unsupported is not None:
        node, operator = unsupported[1], unsupported[2]
        raise UnsupportedOperator(
            f"operator {operator} (node {node!r}) cannot be compiled: tf2onnx has no ONNX for it; "
            "write the model without it",
            operator=operator, node=node, opset=_OPSET,
        )  # fmt: skip
    if done.returncode != 0 or not target.is_file():
        raise InvalidModel(f"tf2onnx cannot write the model as ONNX: {last_line(done.stdout)}")


def _check(model: Path, run: Callable[[Feeds], Feeds]) -> None:
    """InvalidModel if ONNX Runtime on the model differs from `run`, on two random inputs with unknown sizes of 1."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_outputs()]
    for seed in range(2):
        generator = np.random.default_rng(seed)
        feeds: dict[str, NDArray[Any]] = {}
        for port in session.get_inputs():
            shape = [size if isinstance(size, int) and size > 0 else 1 for size in port.shape]
            dtype = _DTYPES[port.type]
            drawn = generator.standard_normal(shape) if np.dtype(dtype).kind == "f" else generator.integers(0, 2, shape)
            feeds[port.name] = np.asarray(drawn).astype(dtype)
        wanted = run(feeds)
        entries = compare([wanted[name] for name in names], session.run(names, dict(feeds)), names)
        for entry in entries:
            if not entry["ok"]:
                raise InvalidModel(
                    "as tf2onnx writes it in ONNX, the model gives other numbers than in TensorFlow: output "
                    f"{entry['output']!r} {entry['problem']}; convert it yourself and compare"
                )


_DTYPES: Final[Mapping[str, str]] = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(bool)": "bool",
    "tensor(int8)": "int8", "tensor(int16)": "int16", "tensor(int32)": "int32", "tensor(int64)": "int64",
    "tensor(uint8)": "uint8", "tensor(uint16)": "uint16", "tensor(uint32)": "uint32", "tensor(uint64)": "uint64",
}  # fmt: skip


def _run_tflite(path: Path, feeds: Feeds) -> Feeds:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    places = {entry["name"]: entry["index"] for entry in interpreter.get_input_details()}
    for name, array in feeds.items():
        interpreter.resize_tensor_input(places[name], array.shape)
    interpreter.allocate_tensors()
    for name, array in feeds.items():
        interpreter.set_tensor(places[name], array)
    interpreter.invoke()
    return {entry["name"]: interpreter.get_tensor(entry["index"]) for entry in interpreter.get_output_details()}


def _run_saved_model(folder: Path, feeds: Feeds) -> Feeds:
    import tensorflow

    signature = tensorflow.saved_model.load(str(folder)).signatures["serving_default"]
    outputs = signature(**{name: tensorflow.constant(array) for name, array in feeds.items()})
    return {name: value.numpy() for name, value in outputs.items()}
