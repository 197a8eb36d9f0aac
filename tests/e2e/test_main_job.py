"""The main job, end to end, by the service as users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from service.client import CacheMissError, Event, JobFailed, RequestRefused, Tunery
from tests.e2e.conftest import FAST, INPUTS, Service, running, wait_for
from tests.workers.graph.nets import Net
from tests.workers.models import port, save

REPOSITORY = Path(__file__).parents[2]


def test_no_trials_on_an_empty_store(service: Service, client: Tunery, small_model: Path) -> None:
    """`"tuner": "none"` measures nothing: where nothing is known, the templates' first guesses make a library that
    agrees with ONNX Runtime."""
    stored = service.stored_trials()
    job = client.submit(small_model, inputs={"image": [3, 8, 28, 28]}, search={"tuner": "none"})
    job.wait(240)
    assert job.job["trials_measured"] == 0
    assert service.stored_trials() == stored
    manifest = client.manifest(job.key)
    assert manifest["check"]["ok"]
    assert manifest["search"]["ended_by"] == "none"
    assert manifest["records"]["tuned_tasks"] == 0


def test_a_model_comes_back_as_a_library_that_agrees_and_is_then_a_hit(
    service: Service, client: Tunery, small_model: Path, tmp_path: Path
) -> None:
    """A model goes in, is tuned, is fetched by key, runs in a fresh process, and is not tuned a second time."""
    events: list[Event] = []
    job = client.submit(small_model, inputs=INPUTS, search={"trials": 24, "seconds": 120})
    job.wait(240, on_event=events.append)
    assert job.job["trials_measured"] == 24 == service.stored_trials()
    stages = [e.data["stage"] for e in events if e.type == "stage"]
    # A device's first search measures its roof too. A second "check" tells of another variant that won.
    assert list(dict.fromkeys(stages)) == ["import", "graph", "search", "roof", "build", "check", "publish"]
    assert [e.data["trial"] for e in events if e.type == "trial"] == list(range(1, 25))

    fetched = client.fetch(job.key, tmp_path / "library")
    manifest = fetched.manifest
    assert manifest["check"]["ok"]
    assert manifest["records"]["applied"] > 0
    # Each trial is judged by what the machine was like; what that came to is told of the device too.
    [(slot, was)] = manifest["search"]["guard"]["slots"].items()
    assert was["reference_s"] > 0
    [device] = client.devices()
    assert [health["slot"] for health in device["health"]] == [slot]
    assert device["drift"] >= 0
    assert manifest["inputs"] == [{"name": "image", "dtype": "float32", "shape": [1, 8, 28, 28]}]
    assert manifest["outputs"] == [{"name": "scores", "dtype": "float32", "shape": [1, 10]}]
    assert all(len(manifest["latency"][name]["samples_s"]) >= 10 for name in ("untuned", "tuned", "onnxruntime"))
    assert manifest["engines"]["onnxruntime"] == {"version": metadata.version("onnxruntime")}
    script = REPOSITORY / "benchmarks" / "run_library.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "library"), str(_bound(small_model, tmp_path))],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert json.loads(ran.stdout)["max_abs_diff"] < 1e-4

    again = client.submit(small_model, inputs=INPUTS, search={"trials": 24, "seconds": 120})
    assert again.cached
    assert again.id == job.id
    assert service.stored_trials() == 24
    with pytest.raises(CacheMissError) as miss:
        client.find(small_model, inputs={"image": [2, 8, 28, 28]})
    assert [d["field"] for d in miss.value.nearest[0]["differences"]] == ["inputs.image.shape"]


def test_one_library_serves_a_range(service: Service, client: Tunery, small_model: Path, tmp_path: Path) -> None:
    """A range of batches is one key and one library, searched at its points, that agrees with ONNX Runtime at all of
    them and between; what lies outside is refused by name. Models that compute with the size, or mix the items, are
    refused."""
    ranged = {"image": [{"range": [1, 5], "points": [1, 4]}, 8, 28, 28]}
    job = client.submit(small_model, inputs=ranged, search={"trials": 8, "seconds": 60})
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 7]) for name in "xy")
    wrong = {}
    for name, nodes in (
        (
            "scaling",
            [
                helper.make_node("Shape", ["x"], ["shape"], end=1),
                helper.make_node("Cast", ["shape"], ["size"], to=TensorProto.FLOAT),
                helper.make_node("Mul", ["x", "size"], ["y"]),
            ],
        ),
        ("mixing", [helper.make_node("Softmax", ["x"], ["y"], axis=0)]),
        ("cut off", [helper.make_node("Slice", ["x", "zero", "two", "zero"], ["y"])]),
        ("squeezed", [helper.make_node("Squeeze", ["x"], ["y"])]),
    ):
        numbers = [
            helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in (("zero", 0), ("two", 2))
        ]
        graph = helper.make_graph(nodes, name, [x], [y], numbers if name == "cut off" else [])
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8),
            tmp_path / f"{name}.onnx",
        )
        small = {"x": [{"range": [1, 3], "points": [1, 2]}, 7]}
        wrong[name] = client.submit(tmp_path / f"{name}.onnx", inputs=small, search={"tuner": "none"})

    job.wait(240)
    assert job.job["spec"]["inputs"]["image"]["shape"][0] == ranged["image"][0]
    fetched = client.fetch(job.key, tmp_path / "library")
    told = fetched.manifest["range"]
    assert [point["size"] for point in told["points"]] == [1, 4]
    assert all(point["latency"]["onnxruntime"]["median_s"] > 0 for point in told["points"])
    assert told["checked_between"] == [2, 5]
    script = f"""
import json, numpy as np, onnxruntime
from service.loading import load
from tuning_db.pieces import OutOfRange
library = load({str(fetched.library.parent)!r})
session = onnxruntime.InferenceSession({str(small_model)!r})
for batch in range(1, 6):
    image = np.random.default_rng(batch).standard_normal((batch, 8, 28, 28)).astype("float32")
    [wanted], [got] = session.run(None, {{"image": image}}), library({{"image": image}})
    np.testing.assert_allclose(got, wanted, atol=1e-4)
try:
    library({{"image": np.zeros((6, 8, 28, 28), "float32")}})
except OutOfRange as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert "'image': dimension 0 is 6; the library serves 1 to 5" in ran.stdout
    run_library = [sys.executable, str(REPOSITORY / "benchmarks" / "run_library.py"), str(fetched.library.parent)]
    ran = subprocess.run([*run_library, str(small_model), "3"], stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(ran.stdout)["max_abs_diff"] < 1e-4

    assert client.find(small_model, inputs=ranged)["key"] == job.key
    with pytest.raises(CacheMissError) as miss:
        client.find(small_model, inputs={"image": [5, 8, 28, 28]})
    assert [d["field"] for d in miss.value.nearest[0]["differences"]] in (["range"], ["inputs.image.shape"])
    for name in ("scaling", "cut off"):
        with pytest.raises(JobFailed, match=r"at a size of 3, which is no point, .* computes with the size itself"):
            wrong[name].wait(240)
    with pytest.raises(JobFailed, match=r"output 'y' of a batch of 1 is \[7\], which is no part of \[2, 7\] for 2"):
        wrong["squeezed"].wait(240)
    with pytest.raises(JobFailed, match=r"each item of a batch by itself: .*softmax") as mixed:
        wrong["mixing"].wait(240)
    assert mixed.value.kind == "unsupported-option"


def test_more_trials_continue_from_the_records(service: Service, client: Tunery, small_model: Path) -> None:
    """A larger budget makes a new job of the same key that measures new candidates only, and never a slower library."""
    first = client.submit(small_model, inputs=INPUTS, search={"trials": 24, "seconds": 120})
    first.wait(240)
    before = client.manifest(first.key)
    stored = service.stored_trials()
    second = client.submit(small_model, inputs=INPUTS, search={"trials": 32, "seconds": 120})
    assert second.id != first.id
    assert second.key == first.key
    second.wait(240)
    # Every trial of the second job is a new row: nothing that was known was measured again.
    assert service.stored_trials() == stored + second.job["trials_measured"]
    assert client.manifest(first.key)["latency_s"] <= before["latency_s"]


def test_fp16_halves_the_weights(client: Tunery, tmp_path: Path) -> None:
    """A library with fp16 has half the bytes of weights, and agrees with the fp32 model within a tolerance of its own;
    what that costs on samples, and the node that is left out, are told."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 8, 14, 14), 8, 16, (3, 3), pads=[1, 1, 1, 1]))
    x = net("Flatten", x)
    model = net.model(net("Gemm", x, net.weights(128, 3136), transB=1))
    model.graph.node[0].name = "stem"
    path = save(model, tmp_path)
    samples = np.random.default_rng(0).standard_normal((2, 1, 8, 14, 14)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x0=samples)
    wanted = {"scheme": "fp16", "exclude": ["stem"], "calibration": tmp_path / "samples.npz"}
    job = client.submit(path, search={"trials": 8, "seconds": 60}, quantization=wanted)
    job.wait(240)
    fetched = client.fetch(job.key, tmp_path / "library")
    manifest = fetched.manifest
    assert (manifest["search"]["trials_measured"], manifest["search"]["failed_trials"]) == (8, 0)
    assert manifest["variant"] == "tuned"
    assert manifest["graph"]["weights"] == {"float16": 1, "float32": 1}
    assert 2 * 3136 * 128 < fetched.library.stat().st_size < 3 * 3136 * 128
    check, report = manifest["check"], manifest["quantization"]["report"]
    assert (check["ok"], check["tolerance"]["float32"]) == (True, 1e-2)
    assert 1e-6 < check["max_abs_diff"] < 1e-2
    assert report["weights"] == {
        "float16": 1,
        "float32": [{"node": "stem", "operator": "Conv", "reason": "excluded"}],
    }
    assert report["samples"] == 2
    assert 50 < report["outputs"][0]["sqnr_db"] < 100
    assert len(report["layers"]) == 1
    with pytest.raises(CacheMissError) as miss:
        client.find(path, quantization={**wanted, "exclude": []})
    assert [d["field"] for d in miss.value.nearest[0]["differences"]] == ["quantization.exclude"]


def test_a_detector_answers_as_many_boxes_as_it_selects(client: Tunery, tmp_path: Path) -> None:
    """A model that ends in a NonMaxSuppression comes back as a library whose results are as long as the data make them,
    as ONNX Runtime's are, and which axis that is the manifest tells; with fp16 it is refused at once."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 32, 32), 3, 8, (3, 3), strides=[4, 4], pads=[1, 1, 1, 1]))
    corners = net("Reshape", net.conv(x, 8, 4, (1, 1)), net.constant(np.array([1, 4, 64])))
    boxes = net("Transpose", corners, perm=[0, 2, 1])
    scores = net("Sigmoid", net("Reshape", net.conv(x, 8, 3, (1, 1)), net.constant(np.array([1, 3, 64]))))
    selected = net("NonMaxSuppression", boxes, scores, net.constant(np.array([10])), net.number(0.5), net.number(0.5))
    picked = net("GatherND", boxes, net("Gather", selected, net.constant(np.array([0, 2])), axis=1))
    model = net.model(net("Concat", picked, net("Cast", selected, to=TensorProto.FLOAT), axis=1))
    model.graph.output[0].CopyFrom(port(model.graph.output[0].name, "K", 7))
    path = save(model, tmp_path)
    job = client.submit(path, search={"tuner": "none"})
    job.wait(240)
    fetched = client.fetch(job.key, tmp_path / "library")
    manifest = fetched.manifest
    assert manifest["check"]["ok"]
    assert manifest["check"]["outputs_without_finite_values"] == []
    [output] = manifest["outputs"]
    assert (output["shape"], output["varying_axis"]) == ([30, 7], 0)
    [image] = manifest["inputs"]
    script = """
import sys, numpy as np
from service.loading import load
library = load(sys.argv[1])
images = np.load(sys.argv[2])
np.savez(sys.argv[3], *(library({sys.argv[4]: image})[0] for image in images))
"""
    images = np.random.default_rng(0).standard_normal((6, 1, 3, 32, 32)).astype(np.float32)
    images[0] -= 100
    np.save(tmp_path / "images.npy", images)
    arguments = [str(tmp_path / name) for name in ("library", "images.npy", "answers.npz")]
    subprocess.run([sys.executable, "-c", script, *arguments, image["name"]], check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with np.load(tmp_path / "answers.npz") as answers:
        for number, one in enumerate(images):
            [wanted] = session.run(None, {image["name"]: one})
            np.testing.assert_allclose(answers[f"arr_{number}"], wanted, atol=1e-4)
        assert len({len(answers[name]) for name in answers.files}) > 1
    with pytest.raises(RequestRefused, match=r"NonMaxSuppression.*as fp16") as refused:
        client.submit(path, quantization={"scheme": "fp16"})
    assert refused.value.problem["field"] == "quantization.scheme"


def test_int8_is_calibrated_checked_and_part_of_the_key(client: Tunery, small_model: Path, tmp_path: Path) -> None:
    """A model is quantized by the user's samples, compared with ONNX Runtime's run of the same quantized model, and
    published with what that costs; other samples are another key, and less than was asked for is not published."""
    for seed in (0, 1):
        samples = np.random.default_rng(seed).standard_normal((4, 1, 8, 28, 28)).astype(np.float32)
        np.savez(tmp_path / f"{seed}.npz", image=samples)
    wanted = {"scheme": "int8", "calibration": tmp_path / "0.npz", "min_sqnr_db": 10}
    events: list[Event] = []
    job = client.submit(small_model, inputs=INPUTS, search={"tuner": "none"}, quantization=wanted)
    job.wait(240, on_event=events.append)
    stages = [event.data["stage"] for event in events if event.type == "stage"]
    assert list(dict.fromkeys(stages)) == ["quantize", "import", "graph", "search", "build", "check", "publish"]
    manifest = client.fetch(job.key, tmp_path / "library").manifest
    assert manifest["check"]["ok"]
    assert (manifest["quantization"]["scheme"], manifest["quantization"]["method"]) == ("int8", "minmax")
    report = manifest["quantization"]["report"]
    assert report["samples"] == 4
    (output,) = report["outputs"]
    assert output["sqnr_db"] > 10
    assert 0.9 < output["cosine"] <= 1
    (checked,) = manifest["check"]["quantized"]
    assert checked["sqnr_db"] > checked["reference_sqnr_db"] - 1
    own = [layer["own_sqnr_db"] for layer in report["layers"]]
    assert len(own) >= 3
    assert own == sorted(own)

    stricter = {**wanted, "calibration": tmp_path / "1.npz", "min_sqnr_db": 140}
    other = client.submit(small_model, inputs=INPUTS, search={"tuner": "none"}, quantization=stricter)
    assert other.key != job.key
    events.clear()
    with pytest.raises(JobFailed, match=r"int8 keeps .* dB of output 'scores' on 4 samples") as failed:
        other.wait(120, on_event=events.append)
    (told,) = [event.data for event in events if event.type == "quantization"]
    assert len(told["layers"]) == len(own), "what to leave out is told all the same"
    assert failed.value.kind == "accuracy-too-low"
    with pytest.raises(CacheMissError):
        client.manifest(other.key)


def test_an_operator_that_tvm_lacks_is_refused_by_name_at_once(client: Tunery, tmp_path: Path) -> None:
    """The refusal comes with the upload and names the operator, its node and its opset."""
    import onnx
    from onnx import TensorProto, helper

    node = helper.make_node("Det", ["a"], ["d"], name="the_determinant")
    graph = helper.make_graph(
        [node], "det",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [3, 3])],
        [helper.make_tensor_value_info("d", TensorProto.FLOAT, [])],
    )  # fmt: skip
    path = tmp_path / "det.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    with pytest.raises(RequestRefused) as refused:
        client.upload(path)
    assert refused.value.status == 422
    assert (refused.value.problem["operator"], refused.value.problem["node"]) == ("Det", "the_determinant")
    assert refused.value.problem["opset"] == 13


def test_a_contradiction_that_only_the_graph_shows_is_refused(client: Tunery, tmp_path: Path) -> None:
    """Inputs that fit their declarations but not each other are a 422, and no job is made."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])], "mm",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["M", "K1"]),
         helper.make_tensor_value_info("b", TensorProto.FLOAT, ["K2", "N"])],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, ["M", "N"])],
    )  # fmt: skip
    path = tmp_path / "mm.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    jobs = len(client.jobs(limit=200))
    with pytest.raises(RequestRefused) as refused:
        client.submit(path, inputs={"a": [2, 3], "b": [4, 5]})
    assert refused.value.status == 422
    assert refused.value.field == "inputs"
    assert len(client.jobs(limit=200)) == jobs


def test_postgresql_and_redis_carry_a_job(postgres_url: str, redis_url: str, small_model: Path, tmp_path: Path) -> None:
    """The same job runs with the database and the broker of a real deployment."""
    env = {**FAST, "TUNERY_DATABASE_URL": postgres_url, "TUNERY_BROKER_URL": redis_url}
    with running(tmp_path / "data", env) as service, Tunery(service.url) as client:
        job = client.submit(small_model, inputs=INPUTS, search={"trials": 8, "seconds": 120})
        job.wait(240)
        assert job.job["trials_measured"] == 8
        assert not (service.data_dir / "tunery.db").exists()
        assert client.fetch(job.key, tmp_path / "library").manifest["check"]["ok"]


def test_a_worker_that_is_told_to_stop_puts_its_job_back(service: Service, client: Tunery, small_model: Path) -> None:
    """SIGTERM of the worker ends its job's processes and leaves the job QUEUED; the next worker finishes it."""
    stored = service.stored_trials()
    job = client.submit(small_model, inputs={"image": [4, 8, 28, 28]}, search={"trials": 16, "seconds": 120})
    wait_for(lambda: service.stored_trials() >= stored + 4, 120, "trials are stored")
    worker = service.pid_of("-m workers ")
    assert worker is not None
    os.kill(worker, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), 20, "the worker ends")
    job.wait(240)
    assert job.job["attempt"] >= 2
    assert job.job["trials_measured"] == service.stored_trials() - stored == 16


def test_a_job_that_cannot_be_done_fails_alone(client: Tunery, tmp_path: Path) -> None:
    """A model that parses but does not import fails its own job with a kind and a message."""
    import onnx
    from onnx import TensorProto, helper

    # The number of non-zero elements is not known before the model runs; within a function nobody looks for that at the
    # upload.
    opset = helper.make_opsetid("", 17)
    places = helper.make_function("mine", "places", ["x"], ["y"], [helper.make_node("NonZero", ["x"], ["y"])], [opset])
    graph = helper.make_graph(
        [helper.make_node("places", ["a"], ["where"], domain="mine")], "nz",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [3, 3])],
        [helper.make_tensor_value_info("where", TensorProto.INT64, [2, "count"])],
    )  # fmt: skip
    path = tmp_path / "nz.onnx"
    opsets = [opset, helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, functions=[places], opset_imports=opsets, ir_version=8), path)
    job = client.submit(path, search={"trials": 4, "seconds": 30})
    with pytest.raises(JobFailed) as failed:
        job.wait(120)
    assert failed.value.kind == "import-failed"
    assert "where" in str(failed.value)


def _bound(model: Path, folder: Path) -> Path:
    """The model with batch 1: ONNX Runtime needs no help with it, but the file is what `run_library.py` is given."""
    copy = folder / "model.onnx"
    copy.write_bytes(model.read_bytes())
    return copy
