"""Models as people have them: whether each is imported, compiled and equal to its reference, and how long that takes.

    python benchmarks/real_models.py [MODEL ...] [--report docs/models.md]      # without a name all of them

Each model goes through a whole job of 0 trials, in a process of its own, by the workers' own interface and without a
service: conversion where it is not ONNX, import, graph, first guesses of every schedule, two libraries (ours and TVM's
own), comparison with ONNX Runtime on three sets of inputs, publication. Import is from the file to Relax; build is all
from there to two linked libraries; the comparison, with its measurements, comes on top. The difference is the largest
of any output from ONNX Runtime without optimisations, relative to that output's largest magnitude; beside it stands
what ONNX Runtime's own optimisations change. A model whose libraries are missing is told and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import model_zoo
import numpy as np
import onnx

Shapes = Mapping[str, tuple[int, ...]]

_TIMEOUT_S: Final = 900.0
#: Import and build of each model together.
_MOST_S: Final = 60.0

_HEAD: Final = """# Real models

Written by `benchmarks/real_models.py`, whose head says what is measured; on {cores} cores of {machine}, with TVM {tvm}
and ONNX Runtime {ort}. Nodes are the file's own; kernels are calls in one inference of ours.

| model | from | nodes | kernels | convert, s | import, s | build, s | difference | ONNX Runtime's |
|---|---|--:|--:|--:|--:|--:|--:|--:|
"""


class Missing(Exception):
    """What a model is made with is not installed. The message names the extra."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and what its inputs are bound to."""

    source: str  #: where it comes from, as the table tells it
    write: Callable[[Path], Path]  #: into a folder; raises Missing
    inputs: Shapes


def rapidocr(file: str) -> Callable[[Path], Path]:
    """The model as the package ships it. The package itself is not imported."""

    def write(_folder: Path) -> Path:
        found = importlib.util.find_spec("rapidocr_onnxruntime")
        if found is None or not found.submodule_search_locations:
            raise Missing("pip install --no-deps -r requirements/models.txt")
        return Path(found.submodule_search_locations[0]) / "models" / file

    return write


def light(file: str) -> Callable[[Path], Path]:
    """A graph of the onnx package with random weights, as `model_zoo.light` draws them."""

    def write(folder: Path) -> Path:
        path = folder / f"{file}.onnx"
        onnx.save_model(model_zoo.light(file)(0), path)
        return path

    return write


#: Two layers of a transformer's encoder, with what torch makes of them; called with a format and a path.
_TORCH: Final = """
import sys
import torch

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
        self.words = torch.nn.Embedding(1000, 128)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(128, 32)

    def forward(self, tokens):
        return self.head(self.encoder(self.words(tokens)))

torch.manual_seed(0)
given = (torch.randint(0, 1000, (1, 64)),)
if sys.argv[1] == "onnx":
    torch.onnx.export(Encoder().eval(), given, sys.argv[2], dynamo=True, external_data=False)
else:
    torch.export.save(torch.export.export(Encoder().eval(), given), sys.argv[2])
"""


def by_torch(suffix: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        if importlib.util.find_spec("torch") is None:
            raise Missing("pip install '.[torch]'")
        path = folder / f"transformer.{suffix}"
        subprocess.run([sys.executable, "-c", _TORCH, suffix, str(path)], check=True, stdout=subprocess.DEVNULL)
        return path

    return write


#: A small MobileNet-like classifier, with what TensorFlow makes of it; called with a path.
_TENSORFLOW: Final = """
import sys, tempfile
import keras
import tensorflow as tf

keras.utils.set_random_seed(0)
image = keras.Input((96, 96, 3), name="image", batch_size=1)
hidden = keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(image)
for channels, strides in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
    hidden = keras.layers.DepthwiseConv2D(3, strides=strides, padding="same", use_bias=False)(hidden)
    hidden = keras.layers.ReLU(6.0)(keras.layers.BatchNormalization()(hidden))
    hidden = keras.layers.Conv2D(channels, 1, use_bias=False)(hidden)
    hidden = keras.layers.ReLU(6.0)(keras.layers.BatchNormalization()(hidden))
hidden = keras.layers.GlobalAveragePooling2D()(hidden)
model = keras.Model(image, keras.layers.Dense(10, activation="softmax")(hidden))
with tempfile.TemporaryDirectory() as folder:
    model.export(folder)
    open(sys.argv[1], "wb").write(tf.lite.TFLiteConverter.from_saved_model(folder).convert())
"""


def by_tensorflow(folder: Path) -> Path:
    if importlib.util.find_spec("tensorflow") is None:
        raise Missing("pip install '.[tensorflow]'")
    path = folder / "classifier.tflite"
    subprocess.run([sys.executable, "-c", _TENSORFLOW, str(path)], check=True, capture_output=True)
    return path


_IMAGE: Final = (1, 3, 224, 224)
SUBJECTS: Final[Mapping[str, Subject]] = {
    "text_detector": Subject(
        "rapidocr-onnxruntime", rapidocr("ch_PP-OCRv4_det_infer.onnx"), {"x": (1, 3, 320, 320)}
    ),
    "text_direction": Subject(
        "rapidocr-onnxruntime", rapidocr("ch_ppocr_mobile_v2.0_cls_infer.onnx"), {"x": (1, 3, 48, 192)}
    ),
    "text_recognizer": Subject(
        "rapidocr-onnxruntime", rapidocr("ch_PP-OCRv4_rec_infer.onnx"), {"x": (1, 3, 48, 320)}
    ),
    "alexnet": Subject("onnx", light("bvlc_alexnet"), {"data_0": _IMAGE}),
    "densenet121": Subject("onnx", light("densenet121"), {"data_0": _IMAGE}),
    "inception_v1": Subject("onnx", light("inception_v1"), {"data_0": _IMAGE}),
    "inception_v2": Subject("onnx", light("inception_v2"), {"data_0": _IMAGE}),
    "resnet50": Subject("onnx", light("resnet50"), {"gpu_0/data_0": _IMAGE}),
    "shufflenet": Subject("onnx", light("shufflenet"), {"gpu_0/data_0": _IMAGE}),
    "squeezenet": Subject("onnx", light("squeezenet"), {"data_0": _IMAGE}),
    "vgg19": Subject("onnx", light("vgg19"), {"data_0": _IMAGE}),
    "zfnet512": Subject("onnx", light("zfnet512"), {"gpu_0/data_0": _IMAGE}),
    "transformer": Subject("torch.onnx.export", by_torch("onnx"), {"tokens": (1, 64)}),
    "classifier.tflite": Subject("TensorFlow Lite", by_tensorflow, {"serving_default_image:0": (1, 96, 96, 3)}),
    "transformer.pt2": Subject("torch.export.save", by_torch("pt2"), {"tokens": (1, 64)}),
}  # fmt: skip


# --- In the process of one model ------------------------------------------------------------------------------------


def do_job(name: str, folder: Path) -> dict[str, Any]:
    """The figures of one model."""
    from tuning_db.blobs import BlobStore
    from tuning_db.catalog import ModelInfo
    from tuning_db.jobs import JobSpec, SearchConfig
    from tuning_db.keys import ArtifactKey, BuildOptions, QuantizationConfig
    from tuning_db.layout import blob_dir
    from tuning_db.migrations import upgrade
    from tuning_db.store import TuningStore
    from workers import toolchain
    from workers.devices import local_cpu
    from workers.frontend import onnx_model
    from workers.settings import Settings
    from workers.tuning import Attempt

    subject = SUBJECTS[name]
    written = subject.write(folder)
    began_s = time.monotonic()
    path = as_onnx(written, folder)
    converted_s = None if path is written else time.monotonic() - began_s
    settings = Settings(data_dir=folder / "data", database_url="")
    settings.data_dir.mkdir()
    upgrade(settings.database_url)
    store, blobs = TuningStore(settings.database_url), BlobStore(blob_dir(settings.data_dir))
    blob, size_bytes = blobs.put(path)
    model = onnx_model.load(path)
    info = ModelInfo(
        onnx_model.model_digest(model), blob, "onnx", size_bytes,
        onnx_model.inputs_of(model), onnx_model.outputs_of(model),
    )  # fmt: skip
    store.add_model(info)
    identity, target = local_cpu.probe()
    key = ArtifactKey(
        model=info.digest,
        inputs=info.bind({port: {"shape": list(shape)} for port, shape in subject.inputs.items()}),
        device=identity,
        target=target,
        toolchain=toolchain.current(),
        quantization=QuantizationConfig(),
        options=BuildOptions(),
    )
    job = store.submit(JobSpec(key, SearchConfig(tuner="none"))).job
    claimed = store.claim(job.id, "real_models")
    assert claimed is not None
    (folder / "scratch").mkdir()
    Attempt(settings, store, blobs, claimed[0], folder / "scratch").run()
    stages: dict[str, Any] = {}
    for event in store.events(job.id):
        if event.type == "stage":
            stages.setdefault(str(event.data["stage"]), event.at)
    artifact = store.artifact(key.digest())
    graph: Any = artifact.manifest["graph"]
    library = folder / "library.so"
    shutil.copy(blobs.path_verified(artifact.library), library)
    compared: Any = json.loads((folder / "scratch" / "comparison.json").read_text())
    return {
        "nodes": len(model.graph.node),
        "kernels": graph["kernels"],
        "variant": artifact.manifest["variant"],
        "convert_s": converted_s,
        "import_s": (stages["graph"] - stages["import"]).total_seconds(),
        "build_s": (stages["check"] - stages["graph"]).total_seconds(),
        "check_s": (stages["publish"] - stages["check"]).total_seconds(),
        **differences(Path(compared["reference"]), library, key.inputs),
    }


def as_onnx(path: Path, folder: Path) -> Path:
    """The model, converted as an upload is if it is of another format."""
    from workers.frontend import formats

    found = formats.format_of(path)
    if found is formats.ONNX:
        return path
    target = folder / "converted.onnx"
    done = subprocess.run(
        [sys.executable, "-m", "workers.frontend.convert", found.name, str(path), str(target)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    if not answer["ok"]:
        raise SystemExit(answer["error"]["message"])
    return target


def differences(reference: Path, library: Path, inputs: Any) -> dict[str, float]:
    """The library's, and those of ONNX Runtime's optimisations, from ONNX Runtime without them."""
    import onnxruntime
    import tvm
    from tvm import relax

    from workers.packaging.reference import example_inputs

    examples = example_inputs(inputs, 0)
    level = onnxruntime.GraphOptimizationLevel

    def run_reference(optimised: Any) -> list[Any]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = optimised
        session = onnxruntime.InferenceSession(reference, options, providers=["CPUExecutionProvider"])
        return list(session.run(None, examples))

    wanted = run_reference(level.ORT_DISABLE_ALL)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(examples[spec.name]) for spec in inputs))
    got = [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]

    def from_wanted(outputs: list[Any]) -> float:
        return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(wanted, outputs, strict=True))

    return {"difference": from_wanted(got), "of_reference": from_wanted(run_reference(level.ORT_ENABLE_ALL))}


# --- In the process that the user started ---------------------------------------------------------------------------


def run(name: str) -> dict[str, Any]:
    """`do_job` in a process of its own. `{"failed": why}` if that ends without figures, `{"missing": what}`."""
    with tempfile.TemporaryDirectory(prefix="tunery-real-models-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name, folder],
                capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than {_TIMEOUT_S:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-1500:]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def line(name: str, row: Mapping[str, Any]) -> str:
    source = SUBJECTS[name].source
    if "missing" in row:
        return f"| {name} | {source} | left out: {row['missing']} | | | | | | |"
    if "failed" in row:
        return f"| {name} | {source} | failed: {row['failed'].splitlines()[-1]} | | | | | | |"
    converted = "" if row["convert_s"] is None else f"{row['convert_s']:.1f}"
    return (
        f"| {name} | {source} | {row['nodes']} | {row['kernels']} | {converted} | {row['import_s']:.1f} "
        f"| {row['build_s']:.1f} | {row['difference']:.1e} | {row['of_reference']:.1e} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SUBJECTS)}; all if none is named")
    parser.add_argument("--report", type=Path, help="write the table to this file")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        try:
            row = do_job(options.one[0], Path(options.one[1]))
        except Missing as error:
            row = {"missing": str(error)}
        print(json.dumps(row), file=answers, flush=True)
        os._exit(0)  # TVM's destructors can hang
    import onnxruntime
    import tvm

    from workers.devices import local_cpu

    identity, _ = local_cpu.probe()
    text = _HEAD.format(
        cores=identity.cores, machine=f"{identity.model} ({platform.machine()})", tvm=tvm.__version__,
        ort=onnxruntime.__version__,
    )  # fmt: skip
    good = True
    for name in options.models or SUBJECTS:
        row = run(name)
        if "failed" in row:
            print(row["failed"], file=sys.stderr)
        slow = row.get("import_s", 0) + row.get("build_s", 0) > _MOST_S
        good &= "failed" not in row and not slow
        text += line(name, row) + "\n"
        print(line(name, row), f"check {row.get('check_s', 0):.0f} s", "TOO SLOW" if slow else "", flush=True)
    if options.report:
        options.report.write_text(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
