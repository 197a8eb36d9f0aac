"""Quantization in its own process, as a worker starts it: real archives, ONNX Runtime's quantizer, the report."""

from __future__ import annotations

import io
import math
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, helper

from tests.workers.frontend.test_recurrent import recognizer
from tests.workers.models import make_model, matmuls, normal, port, save
from tuning_db.errors import InvalidCalibration, InvalidRequest, QuantizationFailed
from tuning_db.keys import QuantizationConfig, TensorSpec
from workers.quantize.__main__ import run
from workers.quantize.request import Recipe, Request, quantize_apart
from workers.quantize.samples import Samples, examine

Arrays = Mapping[str, NDArray[Any]]


def residual_net(spoilt: str = "") -> ModelProto:
    """Two residual blocks and a classifier, y [1, 10]. In the convolution named `spoilt` one channel's weights are a
    thousand times those of the others, and only its ReLU's input, shifted far down, knows of it."""
    nodes, weights = [], {"stem_w": normal(16, 3, 3, 3, seed=1)}
    nodes.append(helper.make_node("Conv", ["x", "stem_w"], ["stem_c"], name="stem", pads=[1, 1, 1, 1], strides=[2, 2]))
    nodes.append(helper.make_node("Relu", ["stem_c"], ["b0"], name="stem_relu"))
    for block in range(2):
        for number in range(2):
            name = f"block{block}_conv{number}"
            source = f"b{block}" if number == 0 else f"block{block}_r"
            weight = normal(16, 16, 3, 3, seed=10 + 2 * block + number)
            bias = np.zeros(16, np.float32)
            if name == spoilt:
                weight[5] *= 1000
                bias[5] = -10000
            weights |= {f"{name}_w": weight, f"{name}_b": bias}
            nodes.append(
                helper.make_node("Conv", [source, f"{name}_w", f"{name}_b"], [f"{name}_c"], name=name, pads=[1] * 4)
            )
            if number == 0:
                nodes.append(helper.make_node("Relu", [f"{name}_c"], [f"block{block}_r"], name=f"{name}_relu"))
        nodes.append(helper.make_node("Add", [f"b{block}", f"block{block}_conv1_c"], [f"s{block}"], name=f"add{block}"))
        nodes.append(helper.make_node("Relu", [f"s{block}"], [f"b{block + 1}"], name=f"relu{block}"))
    nodes.append(helper.make_node("GlobalAveragePool", ["b2"], ["pooled"], name="pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"], name="flatten"))
    weights |= {"fc_w": normal(16, 10, seed=30), "fc_b": normal(10, seed=31)}
    nodes.append(helper.make_node("Gemm", ["flat", "fc_w", "fc_b"], ["y"], name="classifier"))
    return make_model(nodes, [port("x", 1, 3, 16, 16)], [port("y", 1, 10)], weights)


ALL_NODES = tuple(node.name for node in residual_net().graph.node)
IMAGE = TensorSpec("x", "float32", (1, 3, 16, 16))


def images(count: int = 6, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, 1, 3, 16, 16)).astype(np.float32)


def npz(folder: Path, name: str = "samples.npz", **arrays: NDArray[Any]) -> Path:
    np.savez(folder / name, **arrays)
    return folder / name


def npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def zipped(folder: Path, members: Mapping[str, bytes]) -> Path:
    path = folder / "samples.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def tarred(folder: Path, members: Mapping[str, bytes]) -> Path:
    path = folder / "samples.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def ask(
    folder: Path,
    model: ModelProto,
    calibration: Path | None,
    inputs: tuple[TensorSpec, ...] = (IMAGE,),
    recipe: Recipe | None = None,
) -> Request:
    """Quantization of `model` into a folder of its own in `folder`."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return Request(
        str(save(model, folder)),
        inputs,
        recipe or Recipe(),
        str(scratch / "quantized.onnx"),
        str(calibration) if calibration else None,
    )


def quantize(*arguments: Any, **options: Any) -> tuple[dict[str, Any], Path]:
    """The report and the quantized model, within this process; arguments as of `ask`."""
    request = ask(*arguments, **options)
    report: Any = run(request)
    return report, Path(request.target)


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_recipe_of_a_key() -> None:
    """What a key says of int8 is what the quantizer does."""
    asked = QuantizationConfig("int8", "ab" * 32, "percentile", ("conv",), percentile=99.0, per_channel=False)
    assert Recipe.of(asked.resolved()) == Recipe("percentile", per_channel=False, exclude=("conv",), percentile=99.0)
    assert Recipe.of(QuantizationConfig("int8", mode="dynamic").resolved()) == Recipe(None)
    assert Recipe.of(QuantizationConfig("int8", "ab" * 32).resolved()) == Recipe()


def test_percentile(tmp_path: Path) -> None:
    """The fewer values are kept in range, the shorter the ranges: the scale of the input says so."""
    scales = []
    for percentile in (100.0, 90.0):
        recipe = Recipe("percentile", percentile=percentile)
        _, path = quantize(tmp_path, residual_net(), npz(tmp_path, x=images()), recipe=recipe)
        (scale,) = (t for t in onnx.load(path).graph.initializer if t.name == "x_scale")
        scales.append(float(onnx.numpy_helper.to_array(scale)))
    assert scales[1] < 0.7 * scales[0]


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_static(tmp_path: Path, method: str) -> None:
    """Each method gives a QDQ model that ONNX Runtime runs close to fp32, and the report says how close."""
    report, path = quantize(tmp_path, residual_net(), npz(tmp_path, x=images()), recipe=Recipe(method))
    (output,) = report["outputs"]
    assert report["samples"] == 6
    assert output["output"] == "y"
    assert output["cosine"] > 0.98
    assert 15 < output["sqnr_db"] < 60
    assert 0 <= output["top1_agreement"] <= 1
    assert {"QuantizeLinear", "DequantizeLinear"} <= set(operators(path))
    assert {"stem", "block0_conv0", "add1", "classifier"} <= {layer["node"] for layer in report["layers"]}


def test_old_operator_set(tmp_path: Path) -> None:
    """A model from before DequantizeLinear knew channels is converted: it has a scale for each channel too."""
    model = residual_net()
    model.opset_import[0].version = 11
    report, path = quantize(tmp_path, model, npz(tmp_path, x=images()))
    assert report["outputs"][0]["sqnr_db"] > 15
    (scales,) = (tensor for tensor in onnx.load(path).graph.initializer if tensor.name == "stem_w_scale")
    assert list(scales.dims) == [16]


def test_numbers_of_the_report(tmp_path: Path) -> None:
    """SQNR, cosine and agreement of an output are those that numpy computes of the two models' outputs."""
    data = images()
    report, path = quantize(tmp_path, residual_net(), npz(tmp_path, x=data))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    both = []
    for file in (tmp_path / "model.onnx", path):
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        both.append(np.concatenate([session.run(None, {"x": x})[0] for x in data]).astype(np.float64))
    fp32, int8 = both
    (output,) = report["outputs"]
    assert output["sqnr_db"] == pytest.approx(10 * math.log10((fp32**2).sum() / ((fp32 - int8) ** 2).sum()), abs=0.01)
    assert output["cosine"] == pytest.approx((fp32 * int8).sum() / np.sqrt((fp32**2).sum() * (int8**2).sum()), abs=1e-6)
    assert output["top1_agreement"] == (fp32.argmax(1) == int8.argmax(1)).mean()


def sqnr_of(report: dict[str, Any], node: str, which: str = "own_sqnr_db") -> float:
    (layer,) = (layer for layer in report["layers"] if layer["node"] == node)
    return float(layer[which])


def test_worst_layer_comes_first(tmp_path: Path) -> None:
    """With one scale for all channels, the convolution with one channel of huge weights is the first of the list; with
    a scale for each channel, or left out, it has far less noise."""
    bad = "block0_conv0"
    model, data = residual_net(spoilt=bad), npz(tmp_path, x=images())
    report, _ = quantize(tmp_path, model, data, recipe=Recipe(per_channel=False))
    layers = report["layers"]
    assert layers[0]["node"] == bad
    assert [layer["own_sqnr_db"] for layer in layers] == sorted(layer["own_sqnr_db"] for layer in layers)
    without, _ = quantize(tmp_path, model, data, recipe=Recipe(per_channel=False, exclude=(bad,)))
    assert sqnr_of(without, bad) > sqnr_of(report, bad) + 10
    assert without["outputs"][0]["sqnr_db"] > report["outputs"][0]["sqnr_db"] + 3


def test_layers_on_their_own(tmp_path: Path) -> None:
    """A layer's own noise does not depend on how noisy the layers before it are; its noise within the model does."""
    data = npz(tmp_path, x=images())
    coarse, _ = quantize(tmp_path, residual_net(spoilt="block0_conv0"), data, recipe=Recipe(per_channel=False))
    fine, _ = quantize(tmp_path, residual_net(spoilt="block0_conv0"), data, recipe=Recipe(per_channel=True))
    assert sqnr_of(fine, "block0_conv0") > sqnr_of(coarse, "block0_conv0") + 10
    behind = "block0_conv1"
    assert sqnr_of(coarse, behind) > sqnr_of(coarse, behind, "sqnr_db") + 10


def test_same_request_same_bytes(tmp_path: Path) -> None:
    """Quantizing twice gives the same model, byte for byte, and the same report; other samples give another model."""
    first, path = quantize(tmp_path, residual_net(), npz(tmp_path, x=images()))
    data = path.read_bytes()
    again, path = quantize(tmp_path, residual_net(), npz(tmp_path, x=images()))
    assert (again, path.read_bytes()) == (first, data)
    _, path = quantize(tmp_path, residual_net(), npz(tmp_path, x=images(seed=1)))
    assert path.read_bytes() != data


def test_dynamic(tmp_path: Path) -> None:
    """Dynamic int8 needs no samples; with some there is a report as well. A symbolic batch is bound first."""
    inputs = (TensorSpec("x", "float32", (3, 8)),)
    report, path = quantize(tmp_path, matmuls(), None, inputs, Recipe(None))
    assert report is None
    assert operators(path).count("MatMulInteger") == 2
    report, _ = quantize(tmp_path, matmuls(), npz(tmp_path, x=normal(5, 3, 8)), inputs, Recipe(None))
    # ONNX Runtime adds the sum within the second product.
    assert {layer["node"] for layer in report["layers"]} == {"first", "second/MatMulAddFusion"}
    _, path = quantize(tmp_path, matmuls(), None, inputs, Recipe(None, exclude=("second",)))
    assert operators(path).count("MatMulInteger") == 1
    assert report["outputs"][0]["cosine"] > 0.999


@pytest.mark.parametrize(
    ("recipe", "calibrated", "field", "words"),
    [
        (Recipe(), False, "quantization.calibration", "needs calibration data"),
        (Recipe(exclude=("block0_conv",)), True, "quantization.exclude", "did you mean 'block0_conv"),
        (Recipe(None, exclude=ALL_NODES), True, "quantization.scheme", "no operator"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, recipe: Recipe, calibrated: bool, field: str, words: str) -> None:
    """What cannot be quantized as asked is refused, and the field named."""
    samples = npz(tmp_path, x=images()) if calibrated else None
    with pytest.raises(InvalidRequest, match=words) as caught:
        quantize(tmp_path, residual_net(), samples, recipe=recipe)
    assert caught.value.field == field


def test_unknown_method() -> None:
    """A method that does not exist is refused by name."""
    with pytest.raises(InvalidRequest, match="'minmax', 'entropy', 'percentile'") as caught:
        Recipe("kl")
    assert caught.value.field == "quantization.method"


def test_layouts_of_archives(tmp_path: Path) -> None:
    """Stacked, batched, a folder a sample, in a tar or a zip in any order: the same samples in the same order."""
    data = images(4)
    single = TensorSpec("x", "float32", (2, 3, 16, 16))
    pair = (IMAGE, TensorSpec("a/b", "int64", ()))

    def read(path: Path, *inputs: TensorSpec) -> list[dict[str, NDArray[Any]]]:
        with Samples(path, inputs) as samples:
            taken = list(samples)
            assert len(samples) == len(taken) == len(list(samples))  # it can be read again
            return taken

    for arrays in ({"x": data}, {"x": data.reshape(4, 3, 16, 16)}):
        np.testing.assert_array_equal([s["x"] for s in read(npz(tmp_path, **arrays), IMAGE)], data)
    np.testing.assert_array_equal(
        np.concatenate([s["x"] for s in read(npz(tmp_path, x=data.reshape(4, 3, 16, 16)), single)]), data[:, 0]
    )
    members = {f"set/{i}/x.npy": npy(data[i]) for i in (2, 0, 3, 1)}
    members |= {f"set/{i}/a/b.npy": npy(np.int64(i)) for i in range(4)}
    for path in (zipped(tmp_path, members), tarred(tmp_path, {f"./{name}": value for name, value in members.items()})):
        taken = read(path, *pair)
        np.testing.assert_array_equal([s["x"] for s in taken], data)
        assert [int(s["a/b"]) for s in taken] == [0, 1, 2, 3]
    anything = tarred(tmp_path, {f"picture {i}.npy": npy(data[i]) for i in range(4)})
    np.testing.assert_array_equal([s["x"] for s in read(anything, IMAGE)], data)
    bigger = data.astype(">f4")
    with pytest.raises(InvalidCalibration, match=r"'x\.npy' is >f4"):
        read(npz(tmp_path, x=bigger), IMAGE)


def bad_archives(folder: Path) -> dict[str, tuple[Path, str]]:
    """Archives that do not fit, each with what has to be said about it."""
    good = npy(images(1)[0])
    spoilt = images(3)
    spoilt[1, 0, 2, 3, 4] = np.nan
    cases = {
        "nan": ({"x.npy": npy(spoilt)}, "sample 1 of input 'x' holds NaN"),
        "none": ({"x.npy": npy(images(0))}, "holds no samples"),
        "no array": ({"readme.txt": b"hello"}, "no .npy file"),
        "dtype": ({"x.npy": npy(images(2).astype(np.float64))}, r"float64, input 'x' takes float32; convert it"),
        "shape": ({"x.npy": npy(images(2)[..., :8])}, r"\[2, 1, 3, 16, 8\]; input 'x' takes \[1, 3, 16, 16\]"),
        "objects": ({"x.npy": npy(np.array([{}], dtype=object))}, "Python objects"),
        "columns": ({"x.npy": npy(np.asfortranarray(images(2)))}, "stored by columns"),
        "cut": ({"x.npy": good[:-4]}, "cut short"),
        "not npy": ({"x.npy": b"hello"}, "not an array"),
    }  # fmt: skip
    made = {}
    for number, (name, (members, words)) in enumerate(cases.items()):
        inside = folder / str(number)
        inside.mkdir()
        made[name] = (zipped(inside, members), words)
    noise = folder / "noise"
    noise.write_bytes(b"neither" * 100)
    made["neither"] = (noise, "neither a .npz or .zip nor")
    empty = folder / "empty"
    empty.write_bytes(b"")
    made["empty"] = (empty, "is empty")
    return made


def test_bad_archives(tmp_path: Path) -> None:
    """Samples that do not fit the model's inputs are refused with a sentence that says which and why."""
    for name, (path, words) in bad_archives(tmp_path).items():
        with pytest.raises(InvalidRequest, match=words) as caught, Samples(path, (IMAGE,)) as samples:
            list(samples)
        of_model = name in ("dtype", "shape")  # else no model could use it, and no upload is kept
        assert caught.value.field == ("quantization.calibration" if of_model else "calibration"), name
        if not of_model:
            with pytest.raises(InvalidCalibration):
                examine(path)


def test_inputs_that_do_not_match(tmp_path: Path) -> None:
    """Of several inputs each needs its array, and as many samples as the others."""
    inputs = (IMAGE, TensorSpec("size", "int64", (2,)))
    for archive, words in [
        (npz(tmp_path, "one.npz", x=images(2)), "no array for input 'size'"),
        (npz(tmp_path, "counts.npz", x=images(2), size=np.ones((3, 2), np.int64)), "'x' has 2, 'size' has 3"),
        (npz(tmp_path, "names.npz", x=images(2), shape=np.ones((2, 2), np.int64)), "'shape.npy' belongs to no input"),
        (
            zipped(tmp_path, {"0/x.npy": npy(images(1)[0]), "1/size.npy": npy(np.ones(2, np.int64))}),
            "sample '0' has only one of the inputs",
        ),
    ]:
        with pytest.raises(InvalidRequest, match=words):
            Samples(archive, inputs)


def test_process(tmp_path: Path) -> None:
    """A job's process says how far it is, and answers with the report, or with what is wrong and what kind that is."""
    data = images(3)
    good = ask(tmp_path, residual_net(), npz(tmp_path, x=data))
    said: list[str] = []
    assert quantize_apart(good, tmp_path, said.append) == run(good)
    assert said == ["int8, calibrated by minmax on 3 samples", "comparing with fp32 on 3 samples"]
    data[2, 0, 0, 0, 0] = np.inf
    bad = ask(tmp_path, residual_net(), npz(tmp_path, x=data))
    with pytest.raises(QuantizationFailed, match="sample 2 of input 'x' holds NaN or infinity") as caught:
        quantize_apart(bad, tmp_path, said.append)
    assert caught.value.kind == "invalid-calibration"
    with pytest.raises(QuantizationFailed, match="exit status 1: FileNotFoundError") as caught:
        quantize_apart(replace(good, model=str(tmp_path / "gone")), tmp_path, said.append)
    assert caught.value.kind == "quantization-failed"


def test_recurrent(tmp_path: Path) -> None:
    """Dynamic int8 takes a model with an LSTM, as a library does, though it is written out only when that is made."""
    _, path = quantize(tmp_path, recognizer(3), None, (TensorSpec("x", "float32", (3, 1, 10)),), Recipe(None))
    assert operators(path).count("DynamicQuantizeLSTM") == 2
