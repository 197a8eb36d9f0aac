"""Jobs: submitted once, answered at once when they can be, watched and cancelled."""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import onnx
import pytest
from onnx import TensorProto, helper

from tests.samples import DEVICE, TARGET, TOOLCHAIN
from tests.service.conftest import Service, relu_model
from tuning_db.catalog import Health, Roof
from tuning_db.jobs import JobError
from tuning_db.keys import DeviceIdentity, to_json

#: An inspector that refuses everything: whoever is answered did not need it.
NO_INSPECTOR = (sys.executable, "-c", "raise SystemExit(1)")


def events_of(text: str) -> list[tuple[str | None, str, Any]]:
    """(id, event, data) of a finished stream."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


def test_new_then_the_same(service: Service, model: str, batch: int) -> None:
    """201 with a Location for a new job; 200 and the same job while it waits."""
    first = service.submit(model, batch)
    assert first.status_code == 201
    job = first.json()
    assert first.headers["location"] == job["links"]["self"] == f"/v1/jobs/{job['id']}"
    assert (job["state"], job["attempt"], job["trials_measured"], job["cached"]) == ("QUEUED", 0, 0, False)
    assert job["spec"]["inputs"] == {"x": {"dtype": "float32", "shape": [batch, 4]}}
    assert job["spec"]["device"] == DEVICE.name
    assert "error" not in job
    again = service.submit(model, batch)
    assert (again.status_code, again.json()["id"], again.json()["cached"]) == (200, job["id"], False)
    shown = service.http.get(first.headers["location"]).json()
    assert shown == {name: value for name, value in job.items() if name != "cached"}


def test_one_request_does_it_all(service: Service, model: str, batch: int) -> None:
    """A multipart body with the model and the spec, in either order, is a whole submission."""
    spec = (None, json.dumps({"inputs": {"x": {"shape": [batch, 4]}}}), "application/json")
    first = service.http.post("/v1/jobs", files=[("model", ("m.onnx", relu_model())), ("spec", spec)])
    assert first.status_code == 201, first.text
    assert first.json()["spec"]["model"] == model
    again = service.http.post("/v1/jobs", files=[("spec", spec), ("model", ("m.onnx", relu_model()))])
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


def test_more_inputs_than_an_argument_holds(service: Service) -> None:
    """A model with thousands of inputs, bound by its own shapes, is a job like any other."""
    inputs = [helper.make_tensor_value_info(f"{index}_of_the_inputs", TensorProto.FLOAT, [2]) for index in range(4000)]
    sum_of_two = helper.make_node("Add", [inputs[0].name, inputs[-1].name], ["y"])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph([sum_of_two], "graph", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    answer = service.http.post("/v1/jobs", json={"model": service.upload(model.SerializeToString())})
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"model": relu_model()}, "spec"),
        ({"spec": (None, "{}")}, "model"),
        ({"model": relu_model(), "spec": (None, '{"inputz": {}}')}, "inputz"),
        ({"model": relu_model(), "spec": (None, '{"model": "m"}')}, "model"),
        ({"model": relu_model(), "spec": (None, '{"search": {"trials": -1}}')}, "search.trials"),
        ({"model": relu_model(), "spec": (None, '{"options": {"fast_maths": true}}')}, "options.fast_maths"),
    ],
)
def test_one_request_with_a_fault_names_it(service: Service, files: Any, field: str) -> None:
    """The one-request form is checked as strictly as the other."""
    answer = service.http.post("/v1/jobs", files=files)
    assert answer.status_code == 422
    assert answer.json()["field"] == field


def test_twenty_at_once_make_one_job(service: Service, model: str, batch: int) -> None:
    """Identical submissions that arrive together get the same job, and one of them 201."""

    def submit(_: int) -> httpx.Response:
        body = {"model": model, "inputs": {"x": {"shape": [batch, 4]}}}
        return httpx.post(f"{service.url}/v1/jobs", json=body, timeout=60)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(submit, range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_idempotency_key(service: Service, model: str, batch: int) -> None:
    """The same key and body give the same job whatever became of it; another body is 409."""
    headers = {"idempotency-key": f"key-{batch}"}
    body = {"model": model, "inputs": {"x": {"shape": [batch, 4]}}}
    first = service.http.post("/v1/jobs", json=body, headers=headers)
    assert first.status_code == 201
    job_id = first.json()["id"]
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    # Defaults spelled out are the same body.
    spelled = {**body, "search": {"tuner": "auto"}, "options": {"reassociation": False}}
    again = service.http.post("/v1/jobs", json=spelled, headers=headers)
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (200, job_id, "CANCELLED")
    other = service.http.post("/v1/jobs", json={**body, "search": {"trials": 3}}, headers=headers)
    assert other.status_code == 409
    assert other.json()["type"] == "/problems/idempotency-conflict"
    bad = service.http.post("/v1/jobs", json=body, headers={"idempotency-key": "a b"})
    assert (bad.status_code, bad.json()["field"]) == (422, "Idempotency-Key")


def test_dimensions_that_are_not_fixed(service: Service) -> None:
    """A picture of whatever batch, height and width (tvm#15336, tvm#17465) needs a shape, which is then in the key."""
    from onnx import TensorProto, helper

    picture = helper.make_tensor_value_info("data", TensorProto.FLOAT, ["N", 3, -1, "?"])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3, 3, 3], [0.125] * 108)
    nodes = [helper.make_node("Conv", ["data", "w"], ["c"]), helper.make_node("GlobalAveragePool", ["c"], ["y"])]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, 1, 1])
    graph = helper.make_graph(nodes, "resnet", [picture], [result], [weight])
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = service.upload(onnx_model.SerializeToString())
    refused = service.http.post("/v1/jobs", json={"model": model})
    assert refused.status_code == 422
    assert (refused.json()["type"], refused.json()["field"]) == ("/problems/shape-mismatch", "inputs.data.shape")
    assert "dimension 0 of [N, 3, ?, ?] is not fixed by the model" in refused.json()["detail"]
    shapes = [[1, 3, 9, 9], [2, 3, 9, 11]]
    jobs = [service.http.post("/v1/jobs", json={"model": model, "inputs": {"data": {"shape": s}}}) for s in shapes]
    assert [job.status_code for job in jobs] == [201] * 2
    assert len({job.json()["key"] for job in jobs}) == 2
    assert [job.json()["spec"]["inputs"]["data"]["shape"] for job in jobs] == shapes


def test_several_shapes(service: Service, model: str, batch: int) -> None:
    """One submission of several shapes gives a job and a key each, in order; the same again, and with its
    Idempotency-Key whatever became of them, the same jobs. One shape alone is answered by the job it has among them."""
    sizes = [batch, batch + 10**5, batch + 2 * 10**5]
    body = {"model": model, "shapes": [{"x": {"shape": [size, 4]}} for size in sizes], "search": {"trials": 3}}
    headers = {"idempotency-key": f"shapes-{batch}"}
    first = service.http.post("/v1/jobs", json=body, headers=headers)
    assert first.status_code == 201, first.text
    assert set(first.json()) == {"jobs"}
    jobs = first.json()["jobs"]
    assert [job["spec"]["inputs"]["x"]["shape"][0] for job in jobs] == sizes
    assert len({job["key"] for job in jobs}) == 3
    service.finish(jobs[1]["id"], b"the second")
    spec = (None, json.dumps({name: value for name, value in body.items() if name != "model"}))
    again = service.http.post("/v1/jobs", files={"model": relu_model(), "spec": spec})
    assert (again.status_code, [job["id"] for job in again.json()["jobs"]]) == (200, [job["id"] for job in jobs])
    assert [job["cached"] for job in again.json()["jobs"]] == [False, True, False]
    assert service.submit(model, sizes[2], search={"trials": 3}).json()["id"] == jobs[2]["id"]
    service.http.post(f"/v1/jobs/{jobs[0]['id']}/cancel")
    retried = service.http.post("/v1/jobs", json=body, headers=headers)
    assert [job["id"] for job in retried.json()["jobs"]] == [job["id"] for job in jobs]
    other = service.http.post("/v1/jobs", json={**body, "shapes": body["shapes"][:2]}, headers=headers)
    assert other.status_code == 409


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"shapes": [{"x": {"shape": [9, 4]}}, {"x": {"shape": [9, 5]}}]}, "shapes.1.x.shape", "shape 2 of 2: input"),
        ({"shapes": [{"x": {"shape": [9, 4]}}, {}]}, "shapes.1.x.shape", "needs a shape"),
        ({"shapes": [{"x": {"shape": [9, 4]}}, {"x": {"shape": [9, 4]}}]}, "shapes.1", "there already"),
        ({"shapes": [{"x": {"shape": [9, 4]}}, {"x": {"size": 3}}]}, "shapes.1.x.shape", "missing"),
        ({"shapes": [{"x": {"shape": [9, 4]}}], "inputs": {"x": {"shape": [9, 4]}}}, "shapes.0.x", "one of the two"),
        ({"shapes": []}, "shapes", "at least 1"),
        ({"shapes": [{"x": {"shape": [n, 4]}} for n in range(1, 40)]}, "shapes", "at most 32"),
    ],
)
def test_one_wrong_shape_refuses_all(
    service: Service, model: str, changes: dict[str, Any], field: str, said: str
) -> None:
    """A mistake in one shape is named with its place, and no job of the submission is stored."""
    before = service.store.jobs()
    answer = service.http.post("/v1/jobs", json={"model": model, **changes})
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert said in answer.json()["detail"]
    assert service.store.jobs() == before


def test_a_shape_that_the_model_cannot_work_with_refuses_all(service: Service) -> None:
    """What only shape inference finds out about one of the shapes refuses all of them too."""
    two_rows = helper.make_tensor("c", TensorProto.FLOAT, [2, 4], [1.0] * 8)
    added = onnx.load_from_string(relu_model(operator="Add"))
    added.graph.node[0].input.append("c")
    added.graph.initializer.append(two_rows)
    model = service.upload(added.SerializeToString())
    before = service.store.jobs()
    shapes = [{"x": {"shape": [size, 4]}} for size in (1, 2, 3)]
    answer = service.http.post("/v1/jobs", json={"model": model, "shapes": shapes})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("shape 3 of 3: ")
    assert service.store.jobs() == before


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"search": {"trials": -1}}, "invalid-request", "search.trials"),
        ({"search": {"trials": 10**9}}, "invalid-request", "search.trials"),
        ({"search": {"seconds": 0}}, "invalid-request", "search.seconds"),
        ({"search": {"seed": -1}}, "invalid-request", "search.seed"),
        ({"search": {"trials": 0, "seed": -1}}, "invalid-request", "search.seed"),
        ({"search": {"tuner": "random"}}, "unsupported-option", "search.tuner"),
        ({"inputs": {}}, "shape-mismatch", "inputs.x.shape"),
        ({"inputs": {"x": {"shape": [2, 4, 1, 1, 1]}}}, "shape-mismatch", "inputs.x.shape"),
        ({"inputs": {"x": {"shape": [2, 5]}}}, "shape-mismatch", "inputs.x.shape"),
        ({"inputs": {"x": {"shape": [0, 4]}}}, "invalid-request", "inputs.x.shape"),
        ({"inputs": {"x": {"shape": [-1, 4]}}}, "invalid-request", "inputs.x.shape"),
        ({"inputs": {"x": {"shape": [2, 4], "dtype": "int8"}}}, "invalid-request", "inputs.x.dtype"),
        ({"inputs": {"x": {"shape": [2, 4]}, "z": {"shape": [1]}}}, "shape-mismatch", "inputs.z"),
        ({"inputs": {"x": {"shape": [{"range": [3, 2]}, 4]}}}, "invalid-request", "inputs.x.shape"),
        ({"inputs": {"x": {"shape": [{"range": [1, 2, 3]}, 4]}}}, "invalid-request", "inputs.x.shape.0.range"),
        ({"inputs": {"x": {"shape": [2, {"range": [4, 5]}]}}}, "shape-mismatch", "inputs.x.shape"),
        (
            {
                "inputs": {"x": {"shape": [{"range": [1, 2]}, 4]}},
                "quantization": {"scheme": "int8", "mode": "dynamic"},
            },
            "unsupported-option",
            "inputs.x.shape",
        ),
        ({"quantization": {"scheme": "fp16"}}, "unsupported-option", "quantization.scheme"),
        ({"quantization": {"scheme": "int8"}}, "invalid-request", "quantization.calibration"),
        ({"quantization": {"scheme": "int8", "calibration": "samples"}}, "invalid-request", "quantization.calibration"),
        ({"quantization": {"mode": "dynamic"}}, "invalid-request", "quantization.mode"),
        (
            {"quantization": {"scheme": "int8", "mode": "dynamic", "method": "minmax"}},
            "invalid-request",
            "quantization.method",
        ),
        (
            {"quantization": {"scheme": "int8", "mode": "dynamic", "min_sqnr_db": 20}},
            "invalid-request",
            "quantization.min_sqnr_db",
        ),
        ({"quantization": {"scheme": "int3"}}, "invalid-request", "quantization.scheme"),
        ({"device": "toaster"}, "unknown-device", "device"),
    ],
)
def test_what_cannot_be_done_is_refused(
    service: Service, model: str, changes: dict[str, Any], kind: str, field: str
) -> None:
    """Each wrong or unsupported wish is a 422 that names the field, and no job."""
    before = service.http.get("/v1/jobs").json()["jobs"][:1]
    body = {"model": model, "inputs": {"x": {"shape": [2, 4]}}, **changes}
    answer = service.http.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert (answer.json()["type"], answer.json()["field"]) == (f"/problems/{kind}", field)
    assert service.http.get("/v1/jobs").json()["jobs"][:1] == before


def test_tuners(service: Service, model: str, batch: int) -> None:
    """Every tuner makes a job of its own, "none" none besides them; without trials, seconds are 0."""
    searches = [{"tuner": tuner, "trials": trials} for tuner in ("auto", "autotvm", "ansor") for trials in (0, 8)]
    answers = [service.submit(model, batch, search={**search, "seconds": 60}) for search in searches]
    assert [answer.status_code for answer in answers] == [201] * 6
    spelled = [answer.json()["spec"]["search"] for answer in answers]
    assert [(s["tuner"], s["trials"]) for s in spelled] == [(s["tuner"], s["trials"]) for s in searches]
    assert [s["seconds"] for s in spelled] == [0, 60] * 3
    assert service.submit(model, batch, search={"tuner": "none"}).status_code == 200
    assert service.submit(model, batch, search={"trials": 0}).json()["id"] == answers[0].json()["id"]
    default = service.submit(model, batch)
    assert (default.status_code, default.json()["spec"]["search"]["tuner"]) == (201, "auto")


def test_unknown_model_is_404(service: Service) -> None:
    """A digest that nobody uploaded is not found, and the field is named."""
    answer = service.http.post("/v1/jobs", json={"model": "0" * 64})
    assert (answer.status_code, answer.json()["field"]) == (404, "model")


def test_shape_that_contradicts_the_graph_is_refused_at_once(service: Service) -> None:
    """A shape that only shape inference can refute is a 422 before there is a job."""
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["y"], name="product")],
        "graph",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", "K"]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, ["L", "M"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "M"])],
    )
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = service.upload(onnx_model.SerializeToString())
    inputs = {"a": {"shape": [2, 3]}, "b": {"shape": [4, 5]}}
    answer = service.http.post("/v1/jobs", json={"model": model, "inputs": inputs})
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/shape-mismatch"


def test_devices_by_name_and_attributes(own_service: Callable[..., Any]) -> None:
    """A device is found by its name or by attributes that fit one alone; else the candidates are listed."""
    with own_service() as service:
        model = service.upload(relu_model())
        assert service.submit(model, 2, device={"vendor": DEVICE.vendor, "features": ["fma"]}).status_code == 201
        assert service.submit(model, 3).status_code == 201, "the only device needs no name"
        other = DeviceIdentity("cpu", DEVICE.vendor, "Other", "x86_64", ("avx2",), 4)
        service.store.report_device("worker-2", other, TARGET, TOOLCHAIN)
        names = {DEVICE.name, other.name}
        unnamed = service.submit(model, 4)
        assert unnamed.status_code == 422
        assert set(unnamed.json()["candidates"]) == names
        both = service.submit(model, 4, device={"vendor": DEVICE.vendor})
        assert set(both.json()["candidates"]) == names
        none = service.submit(model, 4, device={"vendor": "Acme"})
        assert (none.status_code, set(none.json()["candidates"])) == (422, names)
        for device in (other.name, {"cores": 4}, {"model": "Other", "arch": "x86_64"}):
            chosen = service.submit(model, 5, device=device)
            assert chosen.json()["spec"]["device"] == other.name
        shown = service.http.get(f"/v1/devices/{other.name}").json()
        assert (shown["identity"]["model"], shown["queued"], shown["workers"]) == ("Other", 1, 1)
        listed = service.http.get("/v1/jobs", params={"device": other.name}).json()["jobs"]
        assert [job["id"] for job in listed] == [chosen.json()["id"]]


def test_what_is_not_made_for_gpus(own_service: Callable[..., Any]) -> None:
    """A wish that no GPU's worker fulfils is refused at the submission, and is no job; int8 is none of them."""
    with own_service() as service:
        gpu = DeviceIdentity("cuda", "NVIDIA", "H100", "sm_90", (), 132)
        service.store.report_device("worker-2", gpu, TARGET, TOOLCHAIN)
        model = service.upload(relu_model())
        wish = {"options": {"reassociation": True}}
        answer = service.submit(model, 2, device=gpu.name, **wish)
        assert (answer.status_code, answer.json()["field"]) == (422, "options.reassociation")
        assert service.submit(model, 2, device=DEVICE.name, **wish).status_code == 201
        assert len(service.store.jobs()) == 1
        int8 = {"quantization": {"scheme": "int8", "mode": "dynamic"}}
        assert service.submit(model, 2, device=gpu.name, **int8).status_code == 201


def test_fp16_needs_a_cpu_that_converts_it(own_service: Callable[..., Any]) -> None:
    """Weights of 16 bits are refused, by the missing feature, on x86 CPUs without F16C; others and GPUs take them."""
    wish = {"quantization": {"scheme": "fp16"}}
    able = [
        DeviceIdentity("cpu", "GenuineIntel", "Xeon", "x86_64", ("avx2", "f16c"), 4),
        DeviceIdentity("cpu", "ARM", "Neoverse", "aarch64", ("fp",), 4),
        DeviceIdentity("cuda", "NVIDIA", "H100", "sm_90", (), 132),
    ]
    with own_service() as service:
        model = service.upload(relu_model())
        refused = service.submit(model, 2, **wish)
        assert (refused.status_code, refused.json()["field"]) == (422, "quantization.scheme")
        assert f"needs a CPU with F16C, which {DEVICE.name} has not" in refused.json()["detail"]
        for number, device in enumerate(able):
            service.store.report_device(f"worker-{number}", device, TARGET, TOOLCHAIN)
            assert service.submit(model, 2, device=device.name, **wish).status_code == 201


def test_device_shows_its_roof(own_service: Callable[..., Any]) -> None:
    """A device's roof and its slots' health are null until somebody has measured them, and then stand in the list and
    by name."""
    with own_service() as service:
        for path in ("/v1/devices", f"/v1/devices/{DEVICE.name}"):
            answer = service.http.get(path).json()
            assert (answer["devices"][0] if "devices" in answer else answer)["roof"] is None
        measured_at = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
        service.store.put_roof(DEVICE, Roof(4.12e11, 3.8e10, 2.1e11, measured_at, TOOLCHAIN))
        shown = service.http.get(f"/v1/devices/{DEVICE.name}").json()
        assert shown["roof"] == {
            "flops_per_s": 4.12e11,
            "bytes_per_s": 3.8e10,
            "flops_per_s_one_thread": 2.1e11,
            "measured_at": "2026-03-01T00:00:00Z",
            "toolchain": to_json(TOOLCHAIN),
        }
        assert service.http.get("/v1/devices").json()["devices"] == [shown]
        assert (shown["drift"], shown["health"]) == (None, [])
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        service.store.put_health(DEVICE, [Health("board:9090", 0.005, 0.004, 71.5, 1_500_000, "ondemand", now)])
        shown = service.http.get(f"/v1/devices/{DEVICE.name}").json()
        assert shown["drift"] == pytest.approx(0.25)
        assert shown["health"] == [
            {
                "slot": "board:9090", "drift": shown["drift"], "temperature_c": 71.5, "khz": 1_500_000,
                "governor": "ondemand", "measured_at": now.isoformat().replace("+00:00", "Z"),
            }
        ]  # fmt: skip
        assert {"identity", "target", "workers", "busy", "queued", "last_seen"} <= set(shown)
        service.store.put_roof(DEVICE, Roof(4.12e11, 3.8e10, 2.1e11, measured_at))
        assert service.http.get(f"/v1/devices/{DEVICE.name}").json()["roof"]["toolchain"] is None


def test_no_device_yet(own_service: Callable[..., Any]) -> None:
    """Without any device the answer says how to get one."""
    with own_service(device=False) as service:
        answer = service.submit(service.upload(relu_model()), 2)
        assert answer.status_code == 422
        assert "tunery worker" in answer.json()["detail"]
        assert answer.json()["candidates"] == []


def test_hit_needs_no_process(own_service: Callable[..., Any]) -> None:
    """What has been tuned is answered from the store alone, by a service that could not even read a model."""
    with own_service() as service:
        model = service.upload(relu_model())
        job = service.submit(model, 2).json()
        service.finish(job["id"], b"library")
    with own_service(inspector=NO_INSPECTOR) as service:
        hit = service.submit(model, 2)
        assert (hit.status_code, hit.json()["id"], hit.json()["cached"]) == (200, job["id"], True)
        assert hit.json()["state"] == "SUCCEEDED"
        assert service.http.get(hit.json()["links"]["library"]).content == b"library"
        smaller = service.submit(model, 2, search={"trials": 1})
        assert (smaller.status_code, smaller.json()["cached"]) == (200, True)
        greater = service.submit(model, 2, search={"trials": 9999})
        assert (greater.status_code, greater.json()["cached"]) == (201, False)


def test_failed_job_says_why_and_may_be_tried_again(service: Service, model: str, batch: int) -> None:
    """A job's error is a field of the job; the next submission of the key is a new job."""
    job_id = service.submit(model, batch).json()["id"]
    service.store.fail(service.claim(job_id), JobError("no-valid-candidate", "all 64 candidates failed to build"))
    job = service.http.get(f"/v1/jobs/{job_id}").json()
    assert job["state"] == "FAILED"
    assert job["error"] == {"kind": "no-valid-candidate", "message": "all 64 candidates failed to build"}
    again = service.submit(model, batch)
    assert again.status_code == 201
    assert again.json()["id"] != job_id


def test_cancel(service: Service, model: str, batch: int) -> None:
    """A waiting job is cancelled at once, a running one marked, a finished one is 409."""
    job_id = service.submit(model, batch).json()["id"]
    assert service.http.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "CANCELLED"
    assert service.http.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "CANCELLED"
    second = service.submit(model, batch).json()["id"]
    claim = service.claim(second)
    marked = service.http.post(f"/v1/jobs/{second}/cancel").json()
    assert (marked["state"], marked["cancel_requested"]) == ("RUNNING", True)
    service.store.mark_cancelled(claim)
    third = service.submit(model, batch).json()["id"]
    service.finish(third, b"done")
    refused = service.http.post(f"/v1/jobs/{third}/cancel")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/illegal-transition")
    assert service.http.post(f"/v1/jobs/{'0' * 32}/cancel").status_code == 404


def test_pages(own_service: Callable[..., Any]) -> None:
    """Pages follow each other without gap or overlap, newest first; states filter."""
    with own_service() as service:
        model = service.upload(relu_model())
        ids = [service.submit(model, batch).json()["id"] for batch in range(1, 6)]
        seen: list[str] = []
        address: str | None = "/v1/jobs?limit=2"
        sizes = []
        while address:
            page = service.http.get(address).json()
            seen += [job["id"] for job in page["jobs"]]
            sizes.append(len(page["jobs"]))
            address = page.get("next")
        assert (seen, sizes) == (ids[::-1], [2, 2, 1])
        service.http.post(f"/v1/jobs/{ids[0]}/cancel")
        cancelled = service.http.get("/v1/jobs", params={"state": ["CANCELLED", "FAILED"]}).json()["jobs"]
        assert [job["id"] for job in cancelled] == ids[:1]
        assert service.http.get("/v1/jobs?state=SLEEPING").json()["field"] == "state.0"
        assert service.http.get("/v1/jobs?limit=0").json()["field"] == "limit"


def test_events_in_order_until_the_end(service: Service, model: str, batch: int) -> None:
    """The stream holds what the worker wrote, as it is written, and closes with the job when that is final."""
    job_id = service.submit(model, batch).json()["id"]
    claim = service.claim(job_id)
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        service.store.append_event(claim, "stage", {"stage": "search", "message": "é\u2028ü"})
        live = ""
        while "search" not in live:  # arrives while the job is still running
            live += next(lines) + "\n"
        service.store.append_event(claim, "trial", {"trial": 1, "trials": 64, "run_s": None})
        service.store.fail(claim, JobError("build-failed", "no compiler"))
        text = live + "\n".join(lines)
    events = events_of(text)
    assert [event for _, event, _ in events] == ["state", "state", "stage", "trial", "state", "end"]
    assert [number for number, _, _ in events[:-1]] == ["1", "2", "3", "4", "5"]
    assert events[2][2] == {"stage": "search", "message": "é\u2028ü"}
    assert events[-1][0] is None
    assert events[-1][2]["error"]["kind"] == "build-failed"
    resumed = service.http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": "3"})
    assert events_of(resumed.text) == events[3:]
    bad = service.http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": "three"})
    assert (bad.status_code, bad.json()["field"]) == (422, "Last-Event-ID")


def test_reading_status_never_writes(service: Service, model: str, batch: int) -> None:
    """Polling does not touch the database, so it cannot lock out those who write (podly_pure_podcasts#140)."""
    job_id = service.submit(model, batch).json()["id"]
    service.publish(model, b"read only")
    key = service.http.get("/v1/jobs?state=SUCCEEDED").json()["jobs"][0]["key"]
    with sqlite3.connect(service.settings.database_url.removeprefix("sqlite:///")) as connection:

        def version() -> Any:
            # Changes when another connection commits a write.
            return connection.execute("PRAGMA data_version").fetchone()

        before = version()
        for path in ("/v1/jobs", f"/v1/jobs/{job_id}", "/v1/devices", f"/v1/artifacts/{key}", "/readyz", "/healthz"):
            assert service.http.get(path).status_code == 200
        assert version() == before
        service.http.post(f"/v1/jobs/{job_id}/cancel")
        assert version() != before, "the measure itself works"


def test_many_pollers_and_writers(service: Service, model: str, batch: int) -> None:
    """Fifty pollers beside a worker that writes progress see no error (BentoML#5551)."""
    job_id = service.submit(model, batch).json()["id"]
    claim = service.claim(job_id)

    def poll(_: int) -> set[int]:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            return {http.get(f"/v1/jobs/{job_id}").status_code for _ in range(10)}

    with ThreadPoolExecutor(51) as pool:
        polls = [pool.submit(poll, n) for n in range(50)]
        for number in range(50):
            service.store.append_event(claim, "progress", {"trials_measured": number})
        assert set().union(*(p.result() for p in polls)) == {200}


def test_job_is_stored_while_the_broker_is_away(own_service: Callable[..., Any]) -> None:
    """Without a broker a submission is still 201, and readiness says what is missing."""
    with own_service(broker_url="redis://127.0.0.1:1/0") as service:
        model = service.upload(relu_model())
        assert service.submit(model, 2).status_code == 201
        ready = service.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["database"] == ready.json()["blobs"] == "ok"
        assert "TUNERY_BROKER_URL" in ready.json()["broker"]
        assert service.http.get("/healthz").status_code == 200


def test_sweep_sends_again_what_nobody_took(own_service: Callable[..., Any]) -> None:
    """A message that was lost is sent again, and a job whose worker vanished is queued again."""
    settings = {"sweep_interval_s": 0.1, "unclaimed_after_s": 0.3, "heartbeat_timeout_s": 0.5}
    with own_service(**settings) as service:
        queue = service.settings.data_dir / "broker" / "queue"
        model = service.upload(relu_model())
        job_id = service.submit(model, 2).json()["id"]
        for message in queue.iterdir():
            message.unlink()
        wait_until(lambda: any(queue.iterdir()))
        service.claim(job_id)  # and never a heartbeat
        wait_until(lambda: service.http.get(f"/v1/jobs/{job_id}").json()["state"] == "QUEUED")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "this should have happened long ago"
        time.sleep(0.05)


def test_full_queue_is_503(own_service: Callable[..., Any]) -> None:
    """More waiting jobs than the service accepts are refused for now, with a time to come back."""
    with own_service(max_queued=1) as service:
        model = service.upload(relu_model())
        assert service.submit(model, 2).status_code == 201
        refused = service.submit(model, 3)
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/queue-full")
        assert int(refused.headers["retry-after"]) > 0


def test_model_whose_bytes_are_lost_must_be_uploaded_again(own_service: Callable[..., Any]) -> None:
    """A damaged model is never tuned; uploading it again heals it."""
    with own_service() as service:
        model = service.upload(relu_model())
        path = service.blobs.path_verified(service.store.model(model).blob)
        path.chmod(0o600)
        path.write_bytes(b"\0" + path.read_bytes()[1:])
        refused = service.submit(model, 2)
        assert (refused.status_code, refused.json()["field"]) == (404, "model")
        assert service.upload(relu_model()) == model
        assert service.submit(model, 2).status_code == 201
