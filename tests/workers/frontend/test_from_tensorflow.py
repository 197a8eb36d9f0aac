"""TFLite, SavedModel, frozen graphs and Keras models made into ONNX, in the process that the API starts for that."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.workers.frontend.frameworks import convert, inspect, write

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tensorflow", "tf2onnx", "ai_edge_litert")),
    reason="TensorFlow is not installed; pip install '.[tensorflow]'",
)

#: Saves one model in every format, and one that runs its author's code.
MODELS = """
import shutil, sys
import keras
import tensorflow as tf

folder = sys.argv[1]
keras.utils.set_random_seed(0)
image = keras.Input((12, 12, 3), name="image")
hidden = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(image)
hidden = keras.layers.DepthwiseConv2D(3, strides=2, padding="same")(hidden)
hidden = keras.layers.GlobalAveragePooling2D()(keras.layers.BatchNormalization()(hidden))
model = keras.Model(image, keras.layers.Dense(5, name="scores")(hidden))
model.save(f"{folder}/model.keras")
model.save(f"{folder}/model.h5")
model.export(f"{folder}/saved", format="tf_saved_model", verbose=False)
shutil.make_archive(f"{folder}/saved", "zip", folder, "saved")
converter = tf.lite.TFLiteConverter.from_saved_model(f"{folder}/saved")
open(f"{folder}/model.tflite", "wb").write(converter.convert())
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
shape = tf.TensorSpec((None, 12, 12, 3), tf.float32, name="image")
function = tf.function(lambda image: {"scores": model(image), "sums": tf.unstack(model(image), axis=1)[0]})
function = function.get_concrete_function(shape)
frozen = convert_variables_to_constants_v2(function).graph.as_graph_def()
open(f"{folder}/frozen.pb", "wb").write(frozen.SerializeToString())
with tf.Graph().as_default() as graph:
    weight = tf.compat.v1.get_variable("weight", (3, 2))
    tf.identity(tf.matmul(tf.compat.v1.placeholder(tf.float32, (1, 3), name="x"), weight), name="y")
    open(f"{folder}/variables.pb", "wb").write(graph.as_graph_def().SerializeToString())
own = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x + 1)])
own.save(f"{folder}/lambda.keras")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(MODELS, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["model.tflite", "saved.zip", "model.keras", "model.h5"])
def test_model_becomes_onnx(name: str, models: Path, tmp_path: Path) -> None:
    """A small image classifier in each format: its image is NHWC as it was, and the conversion has compared the
    numbers with TensorFlow's."""
    target = tmp_path / "model.onnx"
    assert convert(models / name, target) == {"ok": True}
    answer = inspect(target)
    (image,), (scores,) = answer["inputs"], answer["outputs"]
    assert "image" in image["name"]
    assert image["shape"][1:] == [12, 12, 3]
    assert scores["shape"][1:] == [5]


def test_ends_of_a_frozen_graph(models: Path, tmp_path: Path) -> None:
    """A graph's placeholders are its inputs, and what nobody reads its outputs, by TensorFlow's names, compared with
    TensorFlow's numbers. One that has variables is refused by the first of them."""
    target = tmp_path / "model.onnx"
    assert convert(models / "frozen.pb", target) == {"ok": True}
    answer = inspect(target)
    assert [(port["name"], port["shape"][1:]) for port in answer["inputs"]] == [("image:0", [12, 12, 3])]
    assert sorted(port["shape"][1:] for port in answer["outputs"]) == [[], [5]]
    assert all(port["name"].endswith(":0") for port in answer["outputs"])
    error = convert(models / "variables.pb", target)["error"]
    assert error["type"] == "InvalidModel"
    assert "not frozen: node 'weight'" in error["message"]


def test_code_of_the_models_author_is_not_run(models: Path, tmp_path: Path) -> None:
    """A Lambda layer is refused: Keras would have to run the bytes of a function."""
    error = convert(models / "lambda.keras", tmp_path / "model.onnx")["error"]
    assert error["type"] == "InvalidModel"
    assert "ambda" in error["message"]
