"""The whole job on a real model: start a service, tune, fetch by key, run, ask again, ask for something else.

The model is the text-direction classifier that the rapidocr-onnxruntime package ships. Everything that this starts it
stops, and what it stores goes to a temporary folder. The device is this machine's CPU, or a GPU of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.client import CacheMissError, Event, JobFailed, Tunery

MODEL_FILE = "ch_ppocr_mobile_v2.0_cls_infer.onnx"
SHAPE = [1, 3, 48, 192]
OTHER_SHAPE = [1, 3, 48, 160]

console = Console(highlight=False)


def model_path() -> Path:
    """Where the package keeps the model. The package itself is not imported: its dependencies are not needed."""
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the model's package is missing; run: pip install --no-deps -r requirements/models.txt")
    return Path(spec.submodule_search_locations[0]) / "models" / MODEL_FILE


@contextlib.contextmanager
def running_service(data_dir: Path) -> Iterator[str]:
    """`tunery up` on a free port, and its URL. Stopped by its pid, with the worker and all that it started."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tunery"), "up", "--port", "0", "--data-dir", str(data_dir), "--json"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the service did not start; its logs are in {data_dir / 'logs'}")
        yield json.loads(line)["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_gpu_worker(data_dir: Path, gpu: str, client: Tunery) -> Iterator[str]:
    """A worker for a GPU beside the service, and the device's name. Stopped by its pid."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tunery"), "worker", "--data-dir", str(data_dir), "--gpu", gpu],
        start_new_session=True,
    )
    try:
        names: list[str] = []
        while not names:
            if process.poll() is not None:
                sys.exit(process.returncode)  # it has said why
            time.sleep(0.5)
            names = [device["name"] for device in client.devices() if device["identity"]["kind"] == "cuda"]
        yield names[0]
    finally:
        process.terminate()
        process.wait()


class Bar:
    """The job's events as a bar in the terminal."""

    def __init__(self, progress: Progress, trials: int, seconds: float) -> None:
        self._progress = progress
        self._task = progress.add_task("queued", total=trials)
        self._seconds = seconds

    def __call__(self, event: Event) -> None:
        data = event.data
        if event.type == "stage":
            self._progress.update(self._task, description=f"{data['stage']}: {data['message']}"[:60])
        elif event.type == "trial":
            self._progress.update(self._task, completed=data["trial"])
        elif event.type == "progress":
            left_s = max(0.0, self._seconds - data["elapsed_s"])
            # Unknown until every operator has been measured once.
            predicted_s = data["predicted_s"]
            predicted = "first measurements" if predicted_s is None else f"model at {predicted_s * 1e3:.2f} ms"
            self._progress.update(
                self._task,
                description=f"search: {predicted}, at most {left_s:.0f} s left",
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--gpu", metavar="NUMBER|UUID", help="of a GPU, as tunery worker takes it")
    parser.add_argument("--report", type=Path, help="write the figures to this file as JSON")
    options = parser.parse_args()
    model = model_path()
    inputs = {"x": SHAPE}
    with tempfile.TemporaryDirectory(prefix="tunery-demo-") as folder:
        data_dir = Path(folder) / "data"
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(running_service(data_dir))
            client = stack.enter_context(Tunery(url))
            device = client.devices()[0]["name"]
            if options.gpu is not None:
                device = stack.enter_context(running_gpu_worker(data_dir, options.gpu, client))
            console.print(f"service at {url}, device {device}")
            console.print(f"POST {MODEL_FILE} for x={SHAPE}")
            asked = {
                "inputs": inputs, "device": device, "search": {"trials": options.trials, "seconds": options.seconds}
            }  # fmt: skip
            job = client.submit(model, **asked)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as progress:
                try:
                    job.wait(on_event=Bar(progress, options.trials, options.seconds))
                except JobFailed as error:
                    console.print(f"[red]{error}")
                    return 1
            fetched = client.fetch(job.key, Path(folder) / "library")
            console.print(
                f"GET  {fetched.sha256[:16]}… ({fetched.library.stat().st_size:,} bytes) by key {job.key[:16]}…"
            )

            script = Path(__file__).with_name("run_library.py")
            ran = subprocess.run(
                [sys.executable, str(script), str(fetched.library.parent), str(model)],
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            fresh = json.loads(ran.stdout)
            manifest = fetched.manifest
            show(manifest, fresh)

            digest = client.upload(model)
            start_s = time.perf_counter()
            again = client.submit(digest, **asked)
            hit_ms = (time.perf_counter() - start_s) * 1e3
            new_trials = again.job["trials_measured"] - job.job["trials_measured"]
            console.print(f"the same again: [green]hit[/] in {hit_ms:.0f} ms, {new_trials} trials measured")
            if not again.cached or again.id != job.id:
                console.print("[red]the second request was not answered by the first job")
                return 1
            missed = []
            try:
                client.find(digest, inputs={"x": OTHER_SHAPE}, device=device)
                console.print("[red]another shape was answered by this library")
                return 1
            except CacheMissError as miss:
                missed = [d for near in miss.nearest[:1] for d in near["differences"]]
                for difference in missed:
                    console.print(
                        f"another shape: [yellow]miss[/], {difference['field']} "
                        f"wanted {difference['wanted']}, stored {difference['stored']}"
                    )
        medians = {name: entry["median_s"] for name, entry in manifest["latency"].items()}
        if options.report:
            options.report.write_text(
                json.dumps(
                    {
                        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device}",
                        "median_s": medians,
                        "speedup_over_untuned": medians["untuned"] / medians["tuned"],
                        "max_abs_diff": fresh["max_abs_diff"],
                        "search": manifest["search"],
                        "hit_ms": hit_ms,
                        "miss": missed,
                    },
                    indent=1,
                )
            )
    return 0


def show(manifest: dict[str, object], fresh: dict[str, float]) -> None:
    """The table of the gain. All medians come from one run, in turns, on the device."""
    latency = manifest["latency"]
    search = manifest["search"]
    assert isinstance(latency, dict)
    assert isinstance(search, dict)
    tuned_s = latency["tuned"]["median_s"]
    table = Table(title="one inference, median", title_justify="left")
    for column in ("", "ms", "tuned is faster by"):
        table.add_column(column, justify="right" if column else "left")
    for label, name in (("ONNX Runtime", "onnxruntime"), ("TVM before tuning", "untuned"), ("tuned", "tuned")):
        median_s = latency[name]["median_s"]
        table.add_row(label, f"{median_s * 1e3:.3f}", f"{median_s / tuned_s:.2f}x" if name != "tuned" else "")
    console.print(table)
    console.print(
        f"largest difference from ONNX Runtime, fetched library in a fresh process: {fresh['max_abs_diff']:.2g}\n"
        f"{search['trials_measured']} trials in {search['elapsed_s']:.0f} s of search, ended by: {search['ended_by']}"
    )


if __name__ == "__main__":
    sys.exit(main())
