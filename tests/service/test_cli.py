"""The command: what it prints where, and with which code it ends."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from service.cli import CACHE_MISS, INTEGRITY, JOB_FAILED, UNREACHABLE, USAGE, _print_table, app
from tests.samples import DEVICE
from tests.service.conftest import Service, relu_model
from tests.service.test_client import answering
from tuning_db.catalog import Health, Roof
from tuning_db.jobs import TUNERS, JobError, JobState
from tuning_db.migrations import check_schema

runner = CliRunner()


def tunery(service: Service | str, *arguments: str) -> Result:
    url = service if isinstance(service, str) else service.url
    return runner.invoke(app, [*arguments, "--url", url])


def answer_of(result: Result) -> Any:
    """Standard output as the one JSON document that it must be."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(relu_model())
    return str(path)


def test_submit_without_waiting(service: Service, model_file: str, batch: int) -> None:
    """--no-wait prints the job and ends; a typed input and a plain one mean the same."""
    first = tunery(service, "submit", model_file, "--input", f"x={batch},4", "--trials", "8", "--no-wait", "--json")
    assert first.exit_code == 0
    assert answer_of(first)["spec"]["search"]["trials"] == 8
    again = tunery(service, "submit", model_file, "--input", f"x:float32[{batch}, 4]", "--trials", "8", "--no-wait")
    assert again.exit_code == 0
    assert again.stdout.strip() == answer_of(first)["id"]
    shown = tunery(service, "jobs", "--state", "queued", "--json")
    assert answer_of(shown)["jobs"][0]["id"] == answer_of(first)["id"]


def test_hit_is_fetched_in_one_command(service: Service, model: str, batch: int, tmp_path: Path) -> None:
    """Submitting what is there already ends at once, with the library in the folder."""
    service.finish(service.submit(model, batch).json()["id"], b"a library")
    result = tunery(service, "submit", model, "--input", f"x={batch},4", "--output", str(tmp_path), "--json")
    assert result.exit_code == 0
    assert answer_of(result)["cached"] is True
    assert Path(answer_of(result)["fetched"]["library"]).read_bytes() == b"a library"
    plain = tunery(service, "submit", model, "--input", f"x={batch},4")
    assert plain.stdout.strip() == answer_of(result)["key"]
    assert "answered by the finished job" in plain.stderr


def test_several_shapes(service: Service, model: str, batch: int, tmp_path: Path) -> None:
    """An input given several times asks for a job and a key each; the command waits for all, names each in what it
    says, and fetches each library into a folder named by its key."""
    asked = [part for size in (batch, batch + 10**5, batch + 2 * 10**5) for part in ("--input", f"x={size},4")]
    started = answer_of(tunery(service, "submit", model, *asked, "--no-wait", "--json"))["jobs"]
    assert [job["spec"]["inputs"]["x"]["shape"] for job in started] == [[batch + n * 10**5, 4] for n in range(3)]
    missed = tunery(service, "key", model, *asked)
    assert (missed.exit_code, missed.stdout) == (CACHE_MISS, "")
    service.finish(started[1]["id"], b"library 1")
    ends = [threading.Timer(0.3 + n, service.finish, (started[n]["id"], f"library {n}".encode())) for n in (0, 2)]
    for end in ends:
        end.start()
    result = tunery(service, "submit", model, *asked, "--output", str(tmp_path))
    for end in ends:
        end.join()
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split() == [str(tmp_path / job["key"] / "library.so") for job in started]
    assert [Path(path).read_bytes() for path in result.stdout.split()] == [b"library 0", b"library 1", b"library 2"]
    assert f"x={batch + 10**5},4: answered by the finished job {started[1]['id']}" in result.stderr
    assert f"x={batch + 2 * 10**5},4: succeeded: 0 of 200 trials" in result.stderr
    found = tunery(service, "key", model, *asked)
    assert found.stdout.split() == [job["key"] for job in started]
    both = answer_of(tunery(service, "wait", started[0]["id"], started[1]["id"], "--json"))
    assert [job["id"] for job in both["jobs"]] == [job["id"] for job in started[:2]]


def test_a_range(service: Service, model: str, batch: int) -> None:
    """A range is one job and one key, in the words of the request wherever it is shown; a range of other points is
    another key, and the miss says so."""
    low, high = batch % 500 + 2, batch % 500 + 400
    asked = ["--input", f"x={low}..{high}/{low}/{high},4"]
    job = answer_of(tunery(service, "submit", model, *asked, "--no-wait", "--json"))
    assert job["spec"]["inputs"]["x"]["shape"] == [{"range": [low, high], "points": [low, high]}, 4]
    assert f"x={low}..{high}/{low}/{high},4" in tunery(service, "jobs").stdout
    service.finish(job["id"], b"ranged")
    assert tunery(service, "key", model, *asked).stdout.split() == [job["key"]]
    assert f"x={low}..{high}/{low}/{high},4" in tunery(service, "show", job["key"]).stdout
    missed = tunery(service, "key", model, "--input", f"x={low}..{high}/{low},4")
    assert missed.exit_code == CACHE_MISS
    assert "\trange\t" in missed.stderr


def test_one_of_several_fails(service: Service, model: str, batch: int, tmp_path: Path) -> None:
    """When one of several jobs fails, the others are waited for and fetched, and the exit code is the failed one's."""
    asked = ["--input", f"x={batch},4", "--input", f"x={batch + 10**5},4"]
    started = answer_of(tunery(service, "submit", model, *asked, "--no-wait", "--json"))["jobs"]
    service.store.fail(service.claim(started[0]["id"]), JobError("build-failed", "this is why"))
    end = threading.Timer(0.5, service.finish, (started[1]["id"], b"it works"))
    end.start()
    result = tunery(service, "wait", *(job["id"] for job in started), "--output", str(tmp_path))
    end.join()
    assert (result.exit_code, result.stdout) == (JOB_FAILED, "")
    assert "this is why" in result.stderr
    assert (tmp_path / started[1]["key"] / "library.so").read_bytes() == b"it works"


def test_key_then_fetch(service: Service, model: str, batch: int, tmp_path: Path) -> None:
    """`key` prints what `fetch` takes."""
    service.finish(service.submit(model, batch).json()["id"], b"by key")
    key = tunery(service, "key", model, "--input", f"x={batch},4")
    assert key.exit_code == 0
    assert len(key.stdout.strip()) == 64
    fetched = tunery(service, "fetch", key.stdout.strip(), "-o", str(tmp_path))
    assert fetched.exit_code == 0
    assert fetched.stdout.strip() == str(tmp_path / "library.so")
    again = tunery(service, "fetch", key.stdout.strip(), "-o", str(tmp_path), "--json")
    assert answer_of(again)["downloaded"] is False


def test_miss_is_3_and_shows_what_differs(service: Service, model: str, batch: int, tmp_path: Path) -> None:
    """A miss prints no key, and the field that differs from the nearest one."""
    miss = tunery(service, "key", model, "--input", f"x={batch},4")
    assert (miss.exit_code, miss.stdout) == (CACHE_MISS, "")
    service.finish(service.submit(model, batch).json()["id"], b"near")
    near = tunery(service, "key", model, "--input", f"x={batch + 10**6},4")
    assert (near.exit_code, near.stdout) == (CACHE_MISS, "")
    assert "inputs.x.shape" in near.stderr
    as_json = tunery(service, "key", model, "--input", f"x={batch + 10**6},4", "--json")
    assert as_json.exit_code == CACHE_MISS
    assert answer_of(as_json)["nearest"][0]["differences"][0]["field"] == "inputs.x.shape"
    assert tunery(service, "fetch", "0" * 64, "-o", str(tmp_path)).exit_code == CACHE_MISS


def test_without_winograd(service: Service, model: str, batch: int) -> None:
    """`--no-winograd` asks for another library than its opposite, in `submit` and in `key`, and a miss names it."""
    asked = ("submit", model, "--input", f"x={batch},4", "--no-wait", "--json")
    allowed, forbidden = answer_of(tunery(service, *asked)), answer_of(tunery(service, *asked, "--no-winograd"))
    assert [job["spec"]["options"]["winograd"] for job in (allowed, forbidden)] == [True, False]
    assert answer_of(tunery(service, *asked, "--winograd"))["id"] == allowed["id"]
    service.finish(allowed["id"], b"by Winograd")
    miss = tunery(service, "key", model, "--input", f"x={batch},4", "--no-winograd")
    assert miss.exit_code == CACHE_MISS
    assert "options.winograd" in miss.stderr
    service.finish(forbidden["id"], b"not by Winograd")
    faster = answer_of(tunery(service, *asked, "--fast-math", "--reassociation"))
    assert faster["spec"]["options"] == {"fast_math": True, "opt_level": 3, "reassociation": True, "winograd": True}
    assert faster["key"] != allowed["key"]
    for option, job in (("--winograd", allowed), ("--no-winograd", forbidden)):
        found = tunery(service, "key", model, "--input", f"x={batch},4", option)
        assert found.stdout.strip() == job["key"]


def test_int8(service: Service, model: str, batch: int, tmp_path: Path) -> None:
    """`--int8` and its options ask for another library, in `submit` and in `key`; `show` tells what it costs."""
    samples = tmp_path / "samples.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((3, batch, 4)).astype(np.float32))
    options = ["--int8", "--calibration", str(samples), "--method", "percentile", "--percentile", "99.5",
               "--per-tensor", "--exclude", "y", "--exclude", "the_node"]  # fmt: skip
    asked = ("submit", model, "--input", f"x={batch},4", "--no-wait", "--json")
    job = answer_of(tunery(service, *asked, *options, "--min-sqnr-db", "20"))
    said = job["spec"]["quantization"]
    digest = said.pop("calibration")
    assert said == {
        "scheme": "int8", "mode": "static", "method": "percentile", "percentile": 99.5, "per_channel": False,
        "exclude": ["the_node", "y"], "min_sqnr_db": 20,
    }  # fmt: skip
    dynamic = answer_of(tunery(service, *asked, "--int8", "--dynamic"))
    assert dynamic["spec"]["quantization"]["mode"] == "dynamic"
    layers = [{"node": f"conv{n}", "operator": "Conv", "own_sqnr_db": 20.5 + n, "sqnr_db": None} for n in range(12)]
    outputs = [{"output": "y", "sqnr_db": 31.25, "cosine": 0.9996, "top1_agreement": None}]
    manifest = {
        "latency": {
            "tuned": {"median_s": 0.0012345},
            "untuned": {"median_s": 0.002, "with_copies": {"median_s": 0.003}, "overlapped": {"median_s": 0.0021}},
        },
        "engines": {"onnxruntime": {"version": "1.32.0"}, "tensorrt": {"unavailable": "its parser: NonZero"}},
        "check": {"quantized": [{"output": "y", "sqnr_db": 31.0, "reference_sqnr_db": 31.25}]},
        "quantization": {"report": {"samples": 3, "outputs": outputs, "layers": layers}},
    }
    with service.blobs.writer() as writer:
        writer.write(b"int8")
        blob = writer.commit()
    service.store.publish(service.claim(job["id"]), blob, 0.0012345, manifest)
    for named in (str(samples), digest):
        found = tunery(service, "key", model, "--input", f"x={batch},4", *options[:2], named, *options[3:])
        assert found.stdout.strip() == job["key"]
    miss = tunery(service, "key", model, "--input", f"x={batch},4", *options[:3])
    assert miss.exit_code == CACHE_MISS
    assert "quantization.percentile" in miss.stderr
    half = tunery(service, "key", model, "--input", f"x={batch},4", "--fp16", "--exclude", "a")
    assert half.exit_code == CACHE_MISS
    assert 'quantization.scheme: wanted "fp16"' in half.stderr
    assert tunery(service, *asked, "--int8", "--fp16").exit_code == USAGE
    shown = tunery(service, "show", job["key"])
    assert shown.exit_code == 0
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    assert ["latency, tuned", "1.234 ms"] in rows
    assert ["latency, untuned, with copies", "3.000 ms"] in rows
    assert ["latency, untuned, copies overlapped", "2.100 ms"] in rows
    assert ["latency, tensorrt", "none: its parser: NonZero"] in rows
    assert not any(row[0].startswith("latency, onnxruntime") for row in rows)
    assert ["SQNR of y, checked", "31 dB, ONNX Runtime 31.25 dB"] in rows
    assert ["y", "31.25", "0.9996", "-"] in rows
    assert [row[:3] for row in rows[-10:]] == [[f"conv{n}", "Conv", f"{20.5 + n:g}"] for n in range(10)]
    assert answer_of(tunery(service, "show", job["key"], "--json"))["quantization"]["report"]["layers"] == layers
    plain = service.finish(service.submit(model, batch).json()["id"], b"fp32")
    assert tunery(service, "show", plain.key.digest()).exit_code == 0


def test_inspect(service: Service, model: str, model_file: str) -> None:
    """A file or a digest is shown as what it is, with the nodes that can be left in fp32 if they are asked for."""
    shown = tunery(service, "inspect", model_file, "--nodes")
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    assert ["digest", model] in rows
    assert ["input", "x:float32[N,4]"] in rows
    assert rows[-2:] == [["node", "operator"], ["the_node", "Relu"]]
    known = answer_of(tunery(service, "inspect", model, "--json"))
    assert (known["digest"], "nodes" in known) == (model, False)
    assert tunery(service, "inspect", "0" * 64).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "no-such-file.onnx"),
        ("submit", "MODEL", "--input", "x"),
        ("submit", "MODEL", "--input", "x=1,a"),
        ("submit", "MODEL", "--input", "x=1,,2"),
        ("submit", "MODEL", "--input", "x=2,4", "--input", "x=2,4"),
        ("submit", "MODEL", "--input", "x=2,4", "--input", "x=2,5"),
        ("submit", "MODEL", *("--input", "x=2,4") * 2, *("--input", "z=1") * 3),
        ("submit", "MODEL", "--input", "x=2,4,1,1,1"),
        ("submit", "MODEL", "--input", "x=2,4", "--trials", "-1"),
        ("submit", "MODEL", "--input", "x=2,4", "--trials", "many"),
        ("submit", "MODEL", "--input", "x=2,4", "--device", "toaster"),
        ("submit", "MODEL", "--input", "x=2,4", "--tuner", "magic"),
        ("submit", "MODEL", "--input", "x=2,4", "--no-wait", "--output", "o"),
        ("submit", "MODEL", "--input", "x=2,4", "--calibration", "GARBAGE"),
        ("submit", "MODEL", "--input", "x=2,4", "--dynamic"),
        ("submit", "MODEL", "--input", "x=2,4", "--int8"),
        ("submit", "MODEL", "--input", "x=2,4", "--int8", "--calibration", "no-such-file.npz"),
        ("submit", "MODEL", "--input", "x=2,4", "--int8", "--calibration", "GARBAGE"),
        ("submit", "MODEL", "--input", "x=2,4", "--int8", "--dynamic", "--method", "minmax"),
        ("submit", "GARBAGE"),
        ("submit", "EMPTY"),
        ("wait", "../x"),
        ("cancel", "0" * 32),
        ("fetch",),
        ("fetch", "0" * 64, "-o", "/proc/x"),
        ("fetch", "0" * 64, "-o", "GARBAGE"),
        ("submit", "MODEL", "--input", "x=2,4", "-o", "GARBAGE"),
        ("submit", "x" * 5000),
        ("key", "MODEL", "--input", "z=1"),
        ("jobs", "--state", "sleeping"),
        ("nonsense",),
    ],
)
def test_what_the_user_got_wrong_is_2(
    service: Service, model_file: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Usage errors and refused requests end with 2, a sentence on stderr and nothing on stdout."""
    for name, content in (("GARBAGE", b"not a model"), ("EMPTY", b"")):
        (tmp_path / name).write_bytes(content)
    places = {"MODEL": model_file, "GARBAGE": str(tmp_path / "GARBAGE"), "EMPTY": str(tmp_path / "EMPTY")}
    result = tunery(service, *(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == USAGE
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("kind", "code"), [("build-failed", JOB_FAILED), ("check-failed", INTEGRITY), ("accuracy-too-low", INTEGRITY)]
)
def test_a_failed_job_has_its_code(service: Service, model: str, batch: int, kind: str, code: int) -> None:
    """4 for a job that failed, 6 if its numbers were wrong; the reason is printed, and the job with --json."""
    job_id = service.submit(model, batch).json()["id"]
    service.store.fail(service.claim(job_id), JobError(kind, "this is why"))
    result = tunery(service, "wait", job_id)
    assert (result.exit_code, result.stdout) == (code, "")
    assert "this is why" in result.stderr
    as_json = tunery(service, "wait", job_id, "--json")
    assert as_json.exit_code == code
    assert answer_of(as_json)["error"]["kind"] == kind


@pytest.mark.parametrize("options", [["--trials", "0"], ["--tuner", "none"]], ids=" ".join)
def test_a_job_that_measures_nothing(service: Service, model: str, batch: int, options: list[str]) -> None:
    """`--trials 0` and `--tuner none` are jobs, and the end says what the library was built from."""
    asked = tunery(service, "submit", model, "--input", f"x={batch},4", *options, "--no-wait")
    assert asked.exit_code == 0
    job_id = asked.stdout.strip()
    end = threading.Timer(1.0, lambda: service.finish(job_id, b"not measured"))
    end.start()
    result = tunery(service, "wait", job_id)
    end.join()
    assert result.exit_code == 0
    assert "built from stored records, cost models and first guesses, nothing measured" in result.stderr


def test_help_names_every_tuner() -> None:
    """`submit --help` says which tuners there are."""
    shown = runner.invoke(app, ["submit", "--help"], env={"COLUMNS": "200"}).stdout
    for tuner in TUNERS:
        assert f"{tuner}:" in shown


def test_cancel_and_impatience_are_4(service: Service, model: str, batch: int) -> None:
    """A cancelled job and a wait that was too short end with 4."""
    job_id = service.submit(model, batch).json()["id"]
    assert tunery(service, "wait", job_id, "--timeout", "0.2").exit_code == JOB_FAILED
    assert tunery(service, "cancel", job_id).stdout.strip() == "CANCELLED"
    assert tunery(service, "wait", job_id).exit_code == JOB_FAILED


def test_progress_goes_to_stderr(service: Service, model: str, batch: int) -> None:
    """While waiting, only stderr shows the progress; stdout holds the key at the end."""
    job_id = service.submit(model, batch).json()["id"]
    claim = service.claim(job_id)
    service.store.append_event(claim, "stage", {"stage": "search", "message": "m"})
    service.store.append_event(claim, "trial", {"trial": 3, "trials": 8, "operator": "o", "outcome": "measured"})
    service.store.append_event(claim, "progress", {"trials_measured": 3, "trials": 8, "predicted_s": 0.00125})
    with service.blobs.writer() as writer:
        writer.write(b"shown")
        blob = writer.commit()
    end = threading.Timer(1.0, lambda: service.store.publish(claim, blob, 0.001, {"search": {"ended_by": "seconds"}}))
    end.start()
    result = tunery(service, "wait", job_id)
    end.join()
    assert result.exit_code == 0
    assert len(result.stdout.strip()) == 64
    assert "3/8" in result.stderr
    assert "succeeded: 0 of 200 trials, ended by seconds" in result.stderr


def test_nobody_there_is_5() -> None:
    """No service is 5, with the command that starts one."""
    result = tunery("http://127.0.0.1:1", "devices")
    assert result.exit_code == UNREACHABLE
    assert "tunery up" in result.stderr.replace("\n", " ")


def test_wrong_bytes_are_6(tmp_path: Path) -> None:
    """Bytes that are not what the manifest names end with 6 and are not kept."""
    wanted = hashlib.sha256(b"right").hexdigest()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if path.endswith("/library"):
            return 200, {"etag": f'"{wanted}"'}, b"wrong"
        return 200, {}, json.dumps({"key": "k", "library": {"sha256": wanted}}).encode()

    with answering(answer) as url:
        result = tunery(url, "fetch", "a" * 64, "-o", str(tmp_path))
    assert result.exit_code == INTEGRITY
    assert list(tmp_path.iterdir()) == []


def test_tables(service: Service, model: str, batch: int) -> None:
    """Devices and jobs are listed for people, too."""
    job = service.submit(model, batch).json()
    devices = tunery(service, "devices")
    assert devices.exit_code == 0
    assert job["spec"]["device"][:20] in devices.stdout
    jobs = tunery(service, "jobs", "--limit", "1")
    header, row = jobs.stdout.splitlines()
    assert header.split("\t") == ["job", "state", "trials", "device", "inputs", "key"]
    assert row.split("\t") == [job["id"], "QUEUED", "0", DEVICE.name, f"x={batch},4", job["key"]]


def test_roofs_in_the_table(own_service: Callable[..., Any]) -> None:
    """`devices` shows what a device can do at most and how far it is from its best, and a dash while nobody has
    measured it."""
    with own_service() as service:
        for figures in (["-", "-", "-"], ["412", "38", "25%"]):
            header, row = (line.split("\t") for line in tunery(service, "devices").stdout.splitlines())
            assert header == ["device", "arch", "workers", "busy", "queued", "GFLOP/s", "GB/s", "drift", "last seen"]
            assert row[:8] == [DEVICE.name, "x86_64", "1", "0", "0", *figures]
            now = dt.datetime.now(dt.UTC)
            service.store.put_roof(DEVICE, Roof(4.12e11, 3.8e10, 2.1e11, now))
            service.store.put_health(DEVICE, [Health("host", 0.005, 0.004, None, None, None, now)])


def test_ids_stay_whole_in_a_terminal(service: Service, batch: int) -> None:
    """In a terminal of 80 columns each job is one row with its whole id and device; only long inputs are cut."""
    name = "x" * 100 + "\n\x1b[31m"
    model = service.upload(relu_model())
    job = service.submit(model, batch).json()
    terminal = Console(file=StringIO(), force_terminal=True, width=80, highlight=False, markup=False)
    _print_table(
        ("job", "inputs", "device"), [(job["id"], f"{name}={batch},4", DEVICE.name)], elastic=("inputs",), to=terminal
    )
    assert isinstance(terminal.file, StringIO)
    _, row = terminal.file.getvalue().splitlines()
    assert row.startswith(f"{job['id']}  x")
    assert row.endswith(f"…  {DEVICE.name}")
    assert "\x1b" not in row


def test_sentences_are_not_cut(service: Service, model: str, batch: int) -> None:
    """A key or an address in a sentence is never broken by a line break of ours."""
    first = tunery(service, "submit", model, "--input", f"x={batch},4", "--no-wait")
    assert f"key {service.submit(model, batch).json()['key']}\n" in first.stderr
    nobody = tunery("http://127.0.0.1:1", "devices")
    assert nobody.stderr.count("\n") == 1


def test_ctrl_c_while_waiting_is_130(service: Service, model: str, batch: int) -> None:
    """Who stops waiting is told that the job runs on, and how to see or end it."""
    command = [sys.executable, "-m", "service.cli", "submit", model, "--input", f"x={batch},4", "--url", service.url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests in the background of a shell ignore it, and what they start would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("queued: job ")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    job_id = service.submit(model, batch).json()["id"]
    assert (process.returncode, stdout) == (130, "")
    assert f"tunery wait {job_id}" in stderr
    assert f"tunery cancel {job_id}" in stderr
    assert service.store.job(job_id).state is JobState.QUEUED


def test_db_upgrade(tmp_path: Path) -> None:
    """`db upgrade` makes the database in the data folder, and does nothing the second time."""
    for _ in range(2):
        result = runner.invoke(app, ["db", "upgrade", "--data-dir", str(tmp_path / "data"), "--json"])
        assert result.exit_code == 0
        assert answer_of(result) == {"upgraded": True}
    check_schema(f"sqlite:///{tmp_path / 'data' / 'tunery.db'}")
    bad = runner.invoke(app, ["db", "upgrade", "--database-url", "nonsense://"])
    assert bad.exit_code == UNREACHABLE


def test_the_client_needs_no_server_installed() -> None:
    """Client and command import without any package of the server or the worker."""
    forbidden = ["fastapi", "pydantic", "sqlalchemy", "celery", "tvm", "onnx", "uvicorn", "structlog", "numpy"]
    code = f"""
import sys
for name in {forbidden}:
    sys.modules[name] = None  # an import of it raises
import service.cli, service.client
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
