"""The README's commands, run as they are written, but for the service's port, smaller budgets, and, but in the demo,
a smaller model of the same input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.e2e.conftest import FAST, Service, wait_for

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
#: Where the README finds the demo's model.
MODEL = ".venv/lib/python3*/site-packages/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"


def blocks(heading: str, language: str) -> list[str]:
    """The code blocks of one section."""
    section = re.split(r"(?m)^#+ ", README.split(f"# {heading}\n", 1)[1])[0]
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", section)


def smaller(text: str, url: str) -> str:
    text = text.replace("http://127.0.0.1:8000", url).replace(MODEL, "model.onnx")
    return text.replace('"trials": 64', '"trials": 8').replace("64 --s", "8 --s")


def classifier() -> onnx.ModelProto:
    """Of two classes, by two convolutions, for an input like that of the demo's model."""
    generator = np.random.default_rng(5)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array((generator.standard_normal(shape) * 0.3).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], kernel_shape=[1, 1]),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3"], ["g"]),
        helper.make_node("Softmax", ["g"], ["scores"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 48, "W"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 2])],
        [weight("w1", 16, 3, 3, 3), weight("w2", 32, 16, 1, 1), weight("w3", 32, 2)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`make up`, on a free port and with a data folder of its own."""
    assert blocks("Use it", "sh") == ["make up\n"]
    data_dir = tmp_path_factory.mktemp("readme") / "data"
    process = subprocess.Popen(
        ["make", "--silent", "--no-print-directory", "up", f"UP_ARGS=--port 0 --json --data-dir {data_dir}"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env={**os.environ, **FAST}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    started = json.loads(process.stdout.readline())
    service = Service(started["url"], data_dir, process, started["pids"])
    try:
        yield service
    finally:
        # As Ctrl-C does it: to make and to all that it runs.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=40)
        process.stdout.close()
    wait_for(lambda: not service.processes(), 20, "no process is left behind")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's reader works: a clone with its environment, in which the demo's model is."""
    folder = tmp_path_factory.mktemp("reader")
    # A folder of links: what the commands write must not end up in the repository.
    environment = Path(sys.prefix)
    (folder / ".venv").symlink_to(environment)
    assert len(list(folder.glob(MODEL))) == 1
    assert f"MODEL=$(echo {MODEL})" in README
    onnx.save_model(classifier(), folder / "model.onnx")
    return folder


def run_shell(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def model_line() -> str:
    return next(line for line in blocks("From curl", "sh")[0].splitlines() if line.startswith("MODEL="))


def curl_script(url: str) -> str:
    return smaller("\n".join(blocks("From curl", "sh")), url)


def test_curl(up: Service, folder: Path) -> None:
    """From curl alone: one request, events to the end, the library by key, 304, 404, a miss that names the field."""
    output = run_shell(curl_script(up.url), folder)
    assert '"state":"SUCCEEDED"' in output.replace(" ", "")
    assert "\n304\n" in output
    assert "\n404\n" in output
    assert "inputs.x.shape" in output
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (folder / "library.so").stat().st_size == manifest["library"]["bytes"]
    assert manifest["check"]["ok"]


def test_python(up: Service, folder: Path) -> None:
    """The client's example tunes and fetches; the other loads the library with TVM alone and runs it."""
    client, library = (smaller(block, up.url) for block in blocks("From Python", "python"))
    for script in (client, library):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
    numbers = [float(n) for n in re.findall(r"\d\.\d+(?:e-?\d+)?", done.stdout)]
    assert sum(numbers) == pytest.approx(1, abs=1e-4)  # a softmax over two directions


def test_ci(up: Service, folder: Path) -> None:
    """A pipeline's commands fetch the library that is there, and tune when there is none."""
    script = smaller(f"{model_line()}\n" + "\n".join(blocks("From CI", "sh")), up.url)
    run_shell(script, folder)
    assert json.loads((folder / "library" / "manifest.json").read_text())["inputs"][0]["shape"] == [1, 3, 48, 192]
    run_shell(script.replace("1,3,48,192", "1,3,48,96").replace("--trials 8", "--tuner none"), folder)
    assert json.loads((folder / "library" / "manifest.json").read_text())["inputs"][0]["shape"] == [1, 3, 48, 96]


def test_int8(up: Service, folder: Path) -> None:
    """The model is quantized by samples, and its key leads to what that costs."""
    script = smaller(f"{model_line()}\n" + "\n".join(blocks("In 8-bit integers", "sh")), up.url)
    output = run_shell(f"export TUNERY_URL={up.url}\n{script}", folder)
    rows = [line.split("\t") for line in output.splitlines()]
    assert ["output", "SQNR dB", "cosine", "top-1 agreement"] in rows
    assert any(row[0].startswith("SQNR of") for row in rows)


def test_several_shapes(up: Service, folder: Path) -> None:
    """Each shape's library lies in a folder named by its key."""
    script = smaller(f"{model_line()}\n" + "\n".join(blocks("In several shapes", "sh")), up.url)
    run_shell(f"export TUNERY_URL={up.url}\n{script}", folder)
    manifests = [json.loads(path.read_text()) for path in (folder / "libraries").glob("*/manifest.json")]
    assert sorted(manifest["inputs"][0]["shape"][0] for manifest in manifests) == [1, 8]
    assert {manifest["key"] for manifest in manifests} == {path.name for path in (folder / "libraries").iterdir()}


def test_a_range(up: Service, folder: Path) -> None:
    """One library for all sizes of the range."""
    script = smaller(f"{model_line()}\n" + "\n".join(blocks("For a range of sizes", "sh")), up.url)
    run_shell(f"export TUNERY_URL={up.url}\n{script}", folder)
    manifest = json.loads((folder / "ranged" / "manifest.json").read_text())
    assert [point["size"] for point in manifest["range"]["points"]] == [1, 8]


def test_an_altered_byte_is_never_served(up: Service, folder: Path) -> None:
    """A library damaged on disk becomes a miss, and asking again builds it from its records."""
    key = json.loads((folder / "job.json").read_text())["key"]
    sha256 = json.loads((folder / "manifest.json").read_text())["library"]["sha256"]
    blob = next(path for path in (up.data_dir / "blobs").rglob(f"*{sha256[2:]}*") if path.is_file())
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    status = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", f"{up.url}/v1/artifacts/{key}/library"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == "404"
    again = curl_script(up.url).replace('"trials": 8', '"tuner": "none"').replace('"seconds": 90', '"seed": 0')
    output = run_shell(again, folder)
    assert '"state":"SUCCEEDED"' in output.replace(" ", "")
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == "200"


def test_demo(tmp_path: Path) -> None:
    """`make demo` ends well: agreement with ONNX Runtime, a hit without trials, a miss with its field."""
    assert blocks("See it work", "sh") == ["make demo\n"]
    report = tmp_path / "demo.json"
    subprocess.run(
        ["make", "--silent", "demo", f"DEMO_ARGS=--trials 8 --seconds 30 --report {report}"],
        cwd=REPOSITORY, check=True, timeout=280, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    figures = json.loads(report.read_text())
    assert figures["max_abs_diff"] < 1e-4
    assert figures["search"]["trials_measured"] <= 8
    assert [difference["field"] for difference in figures["miss"]] == ["inputs.x.shape"]


def test_every_command_of_the_readme_is_covered() -> None:
    """A command block that no test above runs would be found here."""
    covered = [
        *blocks("See it work", "sh"), *blocks("Run the tests", "sh"), *blocks("Use it", "sh"),
        *blocks("From curl", "sh"), *blocks("From CI", "sh"), *blocks("In several shapes", "sh"),
        *blocks("For a range of sizes", "sh"),
        *blocks("In 8-bit integers", "sh"),
    ]  # fmt: skip
    assert re.findall(r"(?ms)^```sh\n(.*?)^```", README) == covered
    assert blocks("Run the tests", "sh") == ["make test\n"]  # what is running now
