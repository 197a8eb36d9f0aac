"""Writes the models that benchmarks compare engines on: `python benchmarks/model_zoo.py FOLDER [NAME ...]`.

Graphs are real (from the onnx package, from rapidocr-onnxruntime, from torch's exporter); weights are random, seeded
and of a sane scale, but for the text detector, which has its own. A final Softmax or Sigmoid is cut off: on random
numbers it saturates, and then any two engines agree. `pip install '.[bench]'` is needed for the BERT layer alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.backend.test
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from rich.console import Console

Array = NDArray[np.float32]
DETECTOR_FILE: Final = "ch_PP-OCRv4_det_infer.onnx"


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of the zoo and the shapes, all static, that it is written with."""

    name: str
    inputs: Mapping[str, tuple[int, ...]]
    make: Callable[[int], ModelProto]  #: from a seed


def write(name: str, folder: Path, seed: int = 0, *, fresh: bool = False) -> Path:
    """The path of the model in `folder`. A file that is there already is kept, unless `fresh`.

    Raises KeyError for a name that is not in `ZOO`.
    """
    path = folder / f"{name}.onnx"
    if path.exists() and not fresh:
        return path
    model = ZOO[name].make(seed)
    onnx.checker.check_model(model, full_check=True)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    onnx.save_model(model, partial)
    partial.replace(path)
    return path


def inputs_for(model: Path, seed: int = 1) -> dict[str, Array]:
    """Standard normal inputs of the shapes that the file declares."""
    graph = onnx.load(model).graph
    weights = {tensor.name for tensor in graph.initializer}
    generator = np.random.default_rng(seed)
    return {
        value.name: generator.standard_normal(shape_of(value)).astype(np.float32)
        for value in graph.input
        if value.name not in weights
    }


def shape_of(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Every dimension, 0 where it is unknown."""
    return tuple(int(dim.dim_value) for dim in value.type.tensor_type.shape.dim)


# --- The onnx package's light models: real graphs whose weights are all the same number -----------------------------


def light(file: str, weights_of: str | None = None) -> Callable[[int], ModelProto]:
    """The graph of data/light/light_`file`.onnx with random weights. `weights_of` names another set of them."""

    def make(seed: int) -> ModelProto:
        path = Path(onnx.backend.test.__file__).parent / "data" / "light" / f"light_{file}.onnx"
        model = onnx.load(path)
        model.ir_version = 8
        model.graph.name = weights_of or file
        draw_weights(model, _generator(weights_of or file, seed))
        cut_softmax(model)
        set_batch_statistics(model, seed)
        return model

    return make


def draw_weights(model: ModelProto, generator: np.random.Generator) -> None:
    """Replace every float weight by a random one that suits its use; weights stop being inputs and generated tensors.

    Kernels of convolutions and products: He's normal, variance 2/fan-in (arXiv 1502.01852). Factors: near 1. Addends
    and biases: near 0. BatchNorm's statistics come later, from data.
    """
    graph = model.graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    stored = {tensor.name: tensor for tensor in graph.initializer}
    kept_nodes = []
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in stored:
            shapes[node.output[0]] = tuple(int(size) for size in numpy_helper.to_array(stored[node.input[0]]))
        else:
            kept_nodes.append(node)
    uses = dict(_uses(kept_nodes))
    fresh = [
        numpy_helper.from_array(_draw(shape, *uses[name], generator), name)
        for name, shape in shapes.items()
        if name in uses
    ]
    others = [t for t in graph.initializer if t.name in uses and t.name not in shapes]
    inputs = [v for v in graph.input if v.name not in stored and v.name not in shapes]
    for field, values in ((graph.node, kept_nodes), (graph.initializer, fresh + others), (graph.input, inputs)):
        del field[:]
        field.extend(values)


def _uses(nodes: list[NodeProto]) -> Iterator[tuple[str, tuple[NodeProto, int]]]:
    """Tensor → a node that reads it and as which input, looked for behind Unsqueeze and Reshape."""
    behind = {node.input[0]: node.output[0] for node in nodes if node.op_type in ("Unsqueeze", "Reshape")}
    direct = {name: (node, index) for node in nodes for index, name in enumerate(node.input)}
    for name, use in direct.items():
        yield name, direct[behind[name]] if name in behind else use


def _draw(shape: tuple[int, ...], node: NodeProto, index: int, generator: np.random.Generator) -> Array:
    role = (node.op_type, index)
    if role == ("Conv", 1):
        spread, mean = np.sqrt(2 / np.prod(shape[1:])), 0.0
    elif role == ("Gemm", 1):
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        spread, mean = np.sqrt(2 / shape[-1 if transposed else -2]), 0.0
    elif role in (("BatchNormalization", 1), ("BatchNormalization", 4)) or node.op_type == "Mul":
        spread, mean = 0.1, 1.0
    elif role in (("Conv", 2), ("Gemm", 2), ("BatchNormalization", 2), ("BatchNormalization", 3)) or (
        node.op_type == "Add"
    ):
        spread, mean = 0.1, 0.0
    else:
        raise ValueError(f"no scale is known for weights that {node.op_type} takes as input {index}")
    drawn = (generator.standard_normal(shape) * spread + mean).astype(np.float32)
    return np.maximum(drawn, np.float32(0.5)) if mean == 1.0 else drawn


def cut_softmax(model: ModelProto) -> None:
    """Make the logits the output where the last node is a Softmax or, in a detector, a Sigmoid."""
    graph = model.graph
    last = next(node for node in graph.node if graph.output[0].name in node.output)
    if last.op_type not in ("Softmax", "Sigmoid"):
        return
    shape = shape_of(graph.output[0])
    graph.node.remove(last)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(last.input[0], TensorProto.FLOAT, shape))


def set_batch_statistics(model: ModelProto, seed: int) -> None:
    """Set the mean and variance of each BatchNorm to what it sees on standard normal inputs, as training would have.

    So activations neither vanish nor explode at any depth. One run gives all: in a copy of the graph each BatchNorm
    takes the statistics of the very data that it is about to normalise.
    """
    measuring = ModelProto()
    measuring.CopyFrom(model)
    graph = measuring.graph
    nodes: list[NodeProto] = []
    wanted: list[str] = []
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            data, mean, variance = node.input[0], f"{node.input[3]}/seen", f"{node.input[4]}/seen"
            keep, flat = {"axes": [0, 2, 3], "keepdims": 1}, {"axes": [0, 2, 3], "keepdims": 0}
            nodes += [
                helper.make_node("ReduceMean", [data], [f"{mean}/kept"], **keep),
                helper.make_node("ReduceMean", [data], [mean], **flat),
                helper.make_node("Sub", [data, f"{mean}/kept"], [f"{mean}/centred"]),
                helper.make_node("Mul", [f"{mean}/centred"] * 2, [f"{mean}/squared"]),
                helper.make_node("ReduceMean", [f"{mean}/squared"], [variance], **flat),
            ]
            wanted += [mean, variance]
            node.input[3], node.input[4] = mean, variance
        nodes.append(node)
    if not wanted:
        return
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in wanted)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # sums in the same order everywhere
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(measuring.SerializeToString(), options, providers=["CPUExecutionProvider"])
    generator = np.random.default_rng([seed, 1])
    feeds = {v.name: generator.standard_normal(shape_of(v)).astype(np.float32) for v in graph.input}
    seen = dict(zip(wanted, session.run(wanted, feeds), strict=True))
    for tensor in model.graph.initializer:
        array = seen.get(f"{tensor.name}/seen")
        if array is not None:
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


# --- A ResNet of basic blocks -----------------------------------------------------------------------------------------


def resnet34_like(seed: int) -> ModelProto:
    """ResNet-34 (arXiv 1512.03385, table 1): basic blocks [3, 4, 6, 3], spelled like the onnx package's ResNet-50."""
    nodes: list[NodeProto] = []
    weights: dict[str, tuple[int, ...]] = {}

    def conv(data: str, name: str, shape: tuple[int, int, int], stride: int = 1, relu: bool = True) -> str:
        out, into, kernel = shape
        pad = kernel // 2
        weights[f"{name}_w"] = (out, into, kernel, kernel)
        statistics = [f"{name}_bn_{part}" for part in ("s", "b", "rm", "riv")]
        weights.update(dict.fromkeys(statistics, (out,)))
        nodes.append(
            helper.make_node(
                "Conv", [data, f"{name}_w"], [f"{name}_c"],
                kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4,
            )
        )  # fmt: skip
        nodes.append(helper.make_node("BatchNormalization", [f"{name}_c", *statistics], [f"{name}_n"]))
        if not relu:
            return f"{name}_n"
        nodes.append(helper.make_node("Relu", [f"{name}_n"], [f"{name}_r"]))
        return f"{name}_r"

    last = conv("data", "conv1", (64, 3, 7), stride=2)
    nodes.append(helper.make_node("MaxPool", [last], ["pool1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    last, channels = "pool1", 64
    for stage, blocks in enumerate((3, 4, 6, 3), start=2):
        width = 64 << (stage - 2)
        for block in range(blocks):
            name, stride = f"res{stage}_{block}", 2 if stage > 2 and block == 0 else 1
            left = conv(last, f"{name}_a", (width, channels, 3), stride)
            left = conv(left, f"{name}_b", (width, width, 3), relu=False)
            right = last if channels == width else conv(last, f"{name}_s", (width, channels, 1), stride, relu=False)
            nodes.append(helper.make_node("Sum", [left, right], [f"{name}_sum"]))
            nodes.append(helper.make_node("Relu", [f"{name}_sum"], [f"{name}_out"]))
            last, channels = f"{name}_out", width
    weights |= {"pred_w": (1000, 512), "pred_b": (1000,)}
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["features"]),
        helper.make_node("Gemm", ["features", "pred_w", "pred_b"], ["logits"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "resnet34_like",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [1, 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 1000])],
        [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    draw_weights(model, _generator("resnet34_like", seed))
    set_batch_statistics(model, seed)
    return model


# --- A trained detector, and a transformer's layer ------------------------------------------------------------------


def text_detector(_seed: int) -> ModelProto:
    """PaddleOCR's text detector with its own weights, bound to one image of 320x320. Its package is not imported."""
    found = importlib.util.find_spec("rapidocr_onnxruntime")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the detector's package is missing; run: pip install --no-deps -r requirements/models.txt")
    model = onnx.load(Path(found.submodule_search_locations[0]) / "models" / DETECTOR_FILE)
    (value,) = model.graph.input
    for dim, size in zip(value.type.tensor_type.shape.dim, (1, 3, 320, 320), strict=True):
        dim.dim_value = size
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    cut_softmax(model)
    return model


def bert_layer(seed: int, hidden: int = 768, heads: int = 12, inner: int = 3072, tokens: int = 128) -> ModelProto:
    """One encoder layer of BERT (arXiv 1810.04805), by default of BERT-base, with GELU by erf, as torch's TorchScript
    exporter spells it."""
    try:
        import torch
    except ImportError:
        raise SystemExit("the BERT layer is exported by torch, which is missing; run: pip install '.[bench]'") from None
    import io
    import math
    import warnings

    functional = torch.nn.functional

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            linear, norm = torch.nn.Linear, torch.nn.LayerNorm
            self.query, self.key, self.value = (linear(hidden, hidden) for _ in range(3))
            self.attention_output, self.attention_norm = linear(hidden, hidden), norm(hidden, eps=1e-12)
            self.intermediate, self.output = linear(hidden, inner), linear(inner, hidden)
            self.output_norm = norm(hidden, eps=1e-12)

        def forward(self, states: Any) -> Any:
            def split(x: Any) -> Any:
                return x.view(1, tokens, heads, hidden // heads).permute(0, 2, 1, 3)

            query, key, value = split(self.query(states)), split(self.key(states)), split(self.value(states))
            scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(hidden // heads)
            context = torch.matmul(torch.softmax(scores, dim=-1), value)
            context = context.permute(0, 2, 1, 3).contiguous().view(1, tokens, hidden)
            attended = self.attention_norm(self.attention_output(context) + states)
            return self.output_norm(self.output(functional.gelu(self.intermediate(attended))) + attended)

    layer = Layer().eval()
    generator = _generator("bert_layer", seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            shape = tuple(parameter.shape)
            drawn = generator.standard_normal(shape)
            if len(shape) == 2:
                drawn /= np.sqrt(shape[1])
            else:
                drawn = drawn * 0.1 + (1.0 if name.endswith("norm.weight") else 0.0)
            parameter.copy_(torch.from_numpy(drawn.astype(np.float32)))
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own deprecation
        torch.onnx.export(
            layer, (torch.zeros(1, tokens, hidden),), written, dynamo=False, opset_version=17,
            input_names=["states"], output_names=["hidden"],
        )  # fmt: skip
    return onnx.load_from_string(written.getvalue())


_IMAGE: Final = (1, 3, 224, 224)
ZOO: Final[Mapping[str, ZooModel]] = {
    model.name: model
    for model in (
        ZooModel("resnet50", {"gpu_0/data_0": _IMAGE}, light("resnet50")),
        ZooModel("squeezenet", {"data_0": _IMAGE}, light("squeezenet")),
        ZooModel("shufflenet", {"gpu_0/data_0": _IMAGE}, light("shufflenet")),
        ZooModel("densenet121", {"data_0": _IMAGE}, light("densenet121")),
        ZooModel("inception_v2", {"data_0": _IMAGE}, light("inception_v2")),
        ZooModel("text_detector", {"x": (1, 3, 320, 320)}, text_detector),
        ZooModel("bert_layer", {"states": (1, 128, 768)}, bert_layer),
        ZooModel("resnet34_like", {"data": _IMAGE}, resnet34_like),
        # The graph of resnet50 with other weights, as fine-tuning leaves it: its records are all there already.
        ZooModel("resnet50_twin", {"gpu_0/data_0": _IMAGE}, light("resnet50", weights_of="resnet50_twin")),
    )
}

#: The models of the comparison; the other two are for reuse of records.
COMPARED: Final = (
    "resnet50", "squeezenet", "shufflenet", "densenet121", "inception_v2", "text_detector", "bert_layer",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ZOO)}; all if none is given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="write anew what is there already")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(ZOO))
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(ZOO)}")
    console = Console(highlight=False)
    for name in options.names or ZOO:
        path = write(name, options.folder, options.seed, fresh=options.fresh)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        spreads = []
        for output in session.run(None, inputs_for(path)):
            if not np.isfinite(output).all():
                console.print(f"[red]{name}: an output is not finite")
                return 1
            spreads.append(f"{list(output.shape)} mean {output.mean():.3g} std {output.std():.3g}")
        console.print(f"{name}: {path.stat().st_size / 1e6:.1f} MB, outputs {'; '.join(spreads)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
