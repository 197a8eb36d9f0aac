"""The `tunery` command. Standard output holds the answer alone, so that it can be piped; all else goes to stderr.

Exit codes: 0 done · 2 usage, or a request that the service refuses · 3 no library under that key · 4 the job failed or
was cancelled · 5 the service cannot be reached or fails · 6 damaged bytes, or numbers that differ from the reference or
are not as good as was asked ·
130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from service.client import (
    DEFAULT_URL,
    CacheMissError,
    Event,
    FetchedLibrary,
    IntegrityFailed,
    JobCancelled,
    JobFailed,
    JobHandle,
    ModelFilesRefused,
    RequestRefused,
    ServiceUnreachable,
    Tunery,
    TuneryClientError,
    WaitTimeout,
    wait_all,
)
from service.supervisor import StartFailed, Supervisor, settings_complaint
from tuning_db.jobs import TUNERS
from tuning_db.keys import (
    CALIBRATION_METHODS,
    TYPED_INPUT,
    ArtifactKey,
    DeviceIdentity,
    is_sha256,
    parse_shape,
    spell_shape,
)

USAGE: Final = 2
CACHE_MISS: Final = 3
JOB_FAILED: Final = 4
UNREACHABLE: Final = 5
INTEGRITY: Final = 6
INTERRUPTED: Final = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tune a model for a device once, and fetch the tuned library by its key from then on.",
)
db = typer.Typer(no_args_is_help=True, help="The service's database.")
app.add_typer(db, name="db")

out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)

UrlOption = Annotated[str, typer.Option("--url", envvar="TUNERY_URL", help="Where the service answers.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, to stdout.")]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=1,3,48,192",
        help="An input's shape; NAME:float32[1,3,48,192] too. 1..32 is a range that one library serves, 1..32/1/8/32 "
        "one that is searched at these sizes. Repeat, for one input too: a job and a key each.",
    ),
]
WinogradOption = Annotated[
    bool,
    typer.Option(
        "--winograd/--no-winograd",
        help="Convolutions may be computed by Winograd's algorithm where it measures faster; it rounds otherwise.",
    ),
]
FastMathOption = Annotated[
    bool,
    typer.Option(
        "--fast-math", help="Quotients may be products with reciprocals, sums fused with products, zeros without sign."
    ),
]
ReassociationOption = Annotated[
    bool, typer.Option("--reassociation", help="Sums and products may be computed in any order; rounds otherwise.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="A name that `tunery devices` lists.")]
DataDirOption = Annotated[Path, typer.Option("--data-dir", envvar="TUNERY_DATA_DIR", help="Where everything is kept.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Fetch the library into this folder; several: into one for each key in it."),
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0.001, help="Stop waiting after so many seconds; the job runs on.")
]

DEFAULT_DATA_DIR: Final = Path(".tunery")


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """What `submit` and `key` both take about how numbers are represented, each field an option of theirs."""

    int8: Annotated[bool, typer.Option("--int8", help="Compute in 8-bit integers, as the options below say.")] = False
    fp16: Annotated[
        bool,
        typer.Option("--fp16", help="Keep weights in 16-bit floats, but those of --exclude; GPUs compute in them."),
    ] = False
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="SAMPLES", help="An .npz, a zip, tar or folder of .npy files, or the digest of uploaded samples."
        ),
    ] = None
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Take the ranges of activations from each inference, not from samples.")
    ] = False
    method: Annotated[
        str | None, typer.Option(help=f"How ranges come from samples: {', '.join(CALIBRATION_METHODS)}.")
    ] = None
    percentile: Annotated[
        float | None, typer.Option(help="Percent of the values that the method percentile keeps in range.")
    ] = None
    per_channel: Annotated[
        bool | None,
        typer.Option(
            "--per-channel/--per-tensor", help="A scale for each channel of a weight (default), or one for all."
        ),
    ] = None
    exclude: Annotated[list[str] | None, typer.Option(metavar="NODE", help="A node that stays in fp32. Repeat.")] = None

    def quantization(self, *, min_sqnr_db: float | None = None) -> dict[str, Any] | None:
        """The request's `quantization`; what has no meaning together is for the service to say."""
        wanted = {
            "calibration": self.calibration,
            "mode": "dynamic" if self.dynamic else None,
            "method": self.method,
            "percentile": self.percentile,
            "per_channel": self.per_channel,
            "exclude": self.exclude or None,
            "min_sqnr_db": min_sqnr_db,
        }
        said = {name: value for name, value in wanted.items() if value is not None}
        if self.int8 and self.fp16:
            raise typer.BadParameter("is one scheme and --int8 another", param_hint="--fp16")
        if not self.int8 and not self.fp16:
            if said:
                option = {"mode": "--dynamic"}.get(next(iter(said)), f"--{next(iter(said)).replace('_', '-')}")
                raise typer.BadParameter("has a meaning with --int8 or --fp16 alone", param_hint=option)
            return None
        if self.calibration is not None and not is_sha256(self.calibration):
            try:
                if not Path(self.calibration).is_dir():
                    Path(self.calibration).open("rb").close()
            except OSError as error:
                raise typer.BadParameter(
                    f"{self.calibration!r} cannot be read: {error.strerror or error}", param_hint="--calibration"
                ) from None
        return {"scheme": "int8" if self.int8 else "fp16", **said}


NOT_QUANTIZED: Final = QuantizationOptions()


def _with_quantization_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer sees it: in place of its parameter `quantized`, the options that are gathered in it."""
    options = inspect.signature(QuantizationOptions, eval_str=True).parameters
    parameters = inspect.signature(command, eval_str=True).parameters
    shown = [p for name, own in parameters.items() for p in (options.values() if name == "quantized" else (own,))]

    @functools.wraps(command)
    def gathered(**given: Any) -> None:
        quantized = QuantizationOptions(**{name: given.pop(name) for name in options})
        command(**given, quantized=quantized)

    gathered.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return gathered


@app.command()
def up(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until everything must be ready.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Run the API and a worker for this machine, until Ctrl-C. Nothing else is needed."""
    _need("fastapi", "server")
    with _exit_codes():
        if (complaint := settings_complaint()) is not None:
            _say(complaint)
            raise typer.Exit(USAGE)
        with _usable(data_dir, "--data-dir"):
            supervisor = Supervisor(data_dir, host=host, port=port)
        supervisor.upgrade_database()
        began = datetime.now(UTC)
        with supervisor.running(), Tunery(supervisor.url, attempts=1) as client:
            _say(f"starting on {supervisor.url}, data in {supervisor.data_dir}")
            devices: list[dict[str, Any]] = []

            def ready() -> bool:
                # The socket is open from the start, so an API that is not yet up leaves requests waiting.
                with contextlib.suppress(TuneryClientError):
                    if client.ready():
                        devices[:] = [d for d in client.devices() if _time(d["last_seen"]) >= began]
                return bool(devices)

            if not supervisor.watch(_say, ready, start_timeout):
                return
            names = [device["name"] for device in devices]
            if as_json:
                pids = {child.name: child.process.pid for child in supervisor.children if child.process}
                _print_json({"url": supervisor.url, "devices": names, "pids": pids})
            else:
                out.print(supervisor.url)
                _say(f"ready: {', '.join(names)}; Ctrl-C stops it")
            supervisor.watch(_say, lambda: False)
            _say("stopping")


@app.command()
@_with_quantization_options
def submit(
    model: Annotated[str, typer.Argument(help="A model file, a zip or tar of one, or a model's digest.")],
    inputs: InputOption = None,
    device: DeviceOption = None,
    trials: Annotated[
        int | None, typer.Option(help="Measure at most so many candidates; 0: none, as with the tuner `none`.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Search at most so long.")] = None,
    tuner: Annotated[
        str | None, typer.Option(help="; ".join(f"{name}: {what}" for name, what in TUNERS.items()) + ".")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The search's random seed.")] = None,
    winograd: WinogradOption = True,
    fast_math: FastMathOption = False,
    reassociation: ReassociationOption = False,
    quantized: QuantizationOptions = NOT_QUANTIZED,
    min_sqnr_db: Annotated[
        float | None,
        typer.Option(help="Publish only what keeps so many decibels of each output on the samples."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show progress until the job has ended.")] = True,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Ask for a tuned library. The same question again is answered at once."""
    search = {
        name: value
        for name, value in (("tuner", tuner), ("trials", trials), ("seconds", seconds), ("seed", seed))
        if value is not None
    }
    if output is not None and not wait:
        raise typer.BadParameter("--output needs the job to end; leave --no-wait out", param_hint="--output")
    quantization = quantized.quantization(min_sqnr_db=min_sqnr_db)
    options = {} if winograd else {"winograd": False}
    options |= {name: True for name, on in (("fast_math", fast_math), ("reassociation", reassociation)) if on}
    _make(output)
    with _exit_codes(), Tunery(url) as client:
        common, shapes = _inputs(inputs)
        wanted: dict[str, Any] = {
            "inputs": common,
            "device": device,
            "search": search or None,
            "quantization": quantization,
            "options": options or None,
        }
        file = _model(model)
        handles = client.submit_shapes(file, shapes, **wanted) if shapes else [client.submit(file, **wanted)]
        announce = [
            _label(handle, bool(shapes))
            + ("answered by the finished job" if handle.cached else f"{handle.state.lower()}: job")
            + f" {handle.id}, key {handle.key}"
            for handle in handles
        ]
        _finish(handles, wait, timeout, output, as_json, several=bool(shapes), announce=announce)


@app.command()
def wait(
    job: Annotated[list[str], typer.Argument(help="A job's id, or several.")],
    timeout: TimeoutOption = None,
    output: OutputOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show jobs' progress until they have ended."""
    _make(output)
    with _exit_codes(), Tunery(url) as client:
        _finish([client.job(each) for each in job], True, timeout, output, as_json, several=len(job) > 1)


@app.command()
def fetch(
    key: Annotated[str, typer.Argument(help="A key, as `tunery key` and `tunery submit` print it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for library.so and manifest.json.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Fetch a library by its key, verified. A copy that is there already is kept."""
    with _exit_codes(), Tunery(url) as client:
        with _usable(output, "--output"):
            fetched = client.fetch(key, output)
        if as_json:
            _print_json(_fetched(fetched))
        else:
            out.print(str(fetched.library), soft_wrap=True)


@app.command()
@_with_quantization_options
def key(
    model: Annotated[str, typer.Argument(help="A model file, a zip or tar of one, or a model's digest.")],
    inputs: InputOption = None,
    device: DeviceOption = None,
    winograd: WinogradOption = True,
    fast_math: FastMathOption = False,
    reassociation: ReassociationOption = False,
    quantized: QuantizationOptions = NOT_QUANTIZED,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Print the key of the library that answers this, if there is one; else exit 3 and say what is nearest. Of several
    shapes, the keys in their order, if there are all."""
    quantization = quantized.quantization()
    with _exit_codes(as_json), Tunery(url) as client:
        common, shapes = _inputs(inputs)
        manifests = client.find_shapes(
            _model(model),
            shapes or [{}],
            inputs=common,
            device=device,
            quantization=quantization or "none",
            winograd=winograd,
            fast_math=fast_math,
            reassociation=reassociation,
        )
        if as_json:
            _print_json({"artifacts": manifests} if shapes else manifests[0])
        else:
            for manifest in manifests:
                out.print(manifest["key"], soft_wrap=True)


@app.command("inspect")
def inspect_model(
    model: Annotated[str, typer.Argument(help="A model file, a zip or tar of one, or a model's digest.")],
    nodes: Annotated[bool, typer.Option("--nodes", help="Also the nodes that --exclude can leave in fp32.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Upload a model and show what it is: digest, format, inputs and outputs."""
    with _exit_codes(), Tunery(url) as client:
        text = _model(model)
        found = client.model(text) if is_sha256(text) else client.upload_model(text)
        listed = client.nodes(found["digest"]) if nodes else None
        if as_json:
            _print_json(found | (listed or {}))
            return
        facts = [("digest", found["digest"]), ("format", found["format"]), ("bytes", str(found["bytes"]))]
        for what in ("inputs", "outputs"):
            facts += [(what[:-1], f"{p['name']}:{p['dtype']}{_dimensions(p['shape'])}") for p in found[what]]
        _print_table(("of", "is"), facts)
        if listed is not None:
            _print_table(("node", "operator"), [(n["node"], n["operator"]) for n in listed["nodes"]])
            if listed["more"]:
                _say(f"and {listed['more']} more")


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="A key, as `tunery key` and `tunery submit` print it.")],
    layers: Annotated[int, typer.Option(min=0, help="Of a quantized model, so many layers, the worst first.")] = 10,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show what is known of a library: latencies, agreement, and what quantization costs."""
    with _exit_codes(as_json), Tunery(url) as client:
        manifest = client.manifest(key)
        if as_json:
            _print_json(manifest)
            return
        _print_table(("of", "is"), _facts(manifest))
        report = (manifest.get("quantization") or {}).get("report")
        if report is not None:
            if kept := (report.get("weights") or {}).get("float32"):
                _print_table(
                    ("layer in fp32", "operator", "why"),
                    [(layer["node"], layer["operator"], layer["reason"]) for layer in kept[:layers]],
                )
            columns = ("output", "SQNR dB", "cosine", "top-1 agreement")
            figures = [
                (o["output"], *map(_figure, (o["sqnr_db"], o["cosine"], o["top1_agreement"])))
                for o in report["outputs"]
            ]
            _print_table(columns, figures)
            worst = report["layers"][:layers]
            if worst:
                columns = ("layer, worst first", "operator", "own SQNR dB", "SQNR dB in the model")
                _print_table(
                    columns,
                    [(w["node"], w["operator"], _figure(w["own_sqnr_db"]), _figure(w["sqnr_db"])) for w in worst],
                )


@app.command()
def jobs(
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state. Repeat.")] = None,
    device: DeviceOption = None,
    limit: Annotated[int, typer.Option(min=1)] = 20,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """List the newest jobs."""
    with _exit_codes(), Tunery(url) as client:
        found = client.jobs(states=[s.upper() for s in state or ()], device=device, limit=limit)
        if as_json:
            _print_json({"jobs": found})
            return
        rows = [
            (
                j["id"],
                j["state"],
                str(j["trials_measured"]),
                j["spec"]["device"],
                _shapes(j["spec"]["inputs"]),
                j["key"][:16] if out.is_terminal else j["key"],
            )
            for j in found
        ]
        _print_table(("job", "state", "trials", "device", "inputs", "key"), rows, elastic=("inputs",))


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="A job's id.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Cancel a job. What it has measured is kept."""
    with _exit_codes(), Tunery(url) as client:
        cancelled = client.job(job).cancel()
        if as_json:
            _print_json(cancelled)
        else:
            out.print(cancelled["state"] if cancelled["state"] == "CANCELLED" else "cancel requested")


@app.command()
def devices(url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the devices that workers have reported."""
    with _exit_codes(), Tunery(url) as client:
        found = client.devices()
        if as_json:
            _print_json({"devices": found})
            return
        rows = [
            (
                d["name"],
                d["identity"]["arch"],
                str(d["workers"]),
                str(d["busy"]),
                str(d["queued"]),
                _giga(d, "flops_per_s"),
                _giga(d, "bytes_per_s"),
                "-" if d["drift"] is None else f"{d['drift']:.0%}",
                d["last_seen"],
            )
            for d in found
        ]
        _print_table(("device", "arch", "workers", "busy", "queued", "GFLOP/s", "GB/s", "drift", "last seen"), rows)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(context: typer.Context, data_dir: DataDirOption = DEFAULT_DATA_DIR) -> None:
    """Run a worker for this machine's device, in this process. Further arguments go to it."""
    _need("tvm", "worker")
    os.environ["TUNERY_DATA_DIR"] = str(data_dir.absolute())
    os.execv(sys.executable, [sys.executable, "-m", "workers", *context.args])  # noqa: S606 - no shell is meant


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def board(context: typer.Context) -> None:
    """Lend this board to workers: run TVM's RPC server for `--tracker HOST:PORT` under the name `--key NAME`."""
    _need("tvm", "board")
    # Names no import: a board has none of the packages that the other side needs.
    os.execv(sys.executable, [sys.executable, "-m", "workers.devices.board", *context.args])  # noqa: S606


@db.command()
def upgrade(
    database_url: Annotated[
        str | None,
        typer.Option("--database-url", envvar="TUNERY_DATABASE_URL", help="SQLite in --data-dir if not given."),
    ] = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonOption = False,
) -> None:
    """Bring the database's schema to this version's. Safe to run at any time, by several at once."""
    from tuning_db.layout import default_database_url

    _need("sqlalchemy", "server")
    if not database_url:
        with _usable(data_dir, "--data-dir"):
            data_dir.mkdir(parents=True, exist_ok=True)
    target = database_url or default_database_url(data_dir)
    done = subprocess.run(
        [sys.executable, "-m", "tuning_db.migrations", "upgrade", target],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        _say((done.stderr.strip().splitlines() or ["the upgrade failed"])[-1])
        raise typer.Exit(UNREACHABLE)
    if as_json:
        _print_json({"upgraded": True})
    else:
        _say("the database is up to date")


def _finish(
    handles: Sequence[JobHandle],
    wait: bool,
    timeout_s: float | None,
    output: Path | None,
    as_json: bool,
    *,
    several: bool,
    announce: Sequence[str] = (),
) -> None:
    """Wait if asked, fetch if asked, and print what came of it. `several` is how it was asked, and how it is printed:
    libraries then lie in folders named by their keys."""
    fetched: dict[str, FetchedLibrary] = {}
    failure: JobFailed | JobCancelled | None = None
    try:
        # Within the block: who presses Ctrl-C as soon as there is a job is told of it too.
        for sentence in announce if not as_json else ():
            _say(sentence)
        if wait:
            waited_for = [handle for handle in handles if not handle.ended]
            with _progress(waited_for, quiet=as_json, several=several) as show:
                try:
                    wait_all(handles, timeout_s, on_event=show)
                except (JobFailed, JobCancelled) as error:
                    failure = error
            for handle in handles:
                if handle.state == "SUCCEEDED":
                    if handle in waited_for and not as_json:
                        _say(_label(handle, several) + _outcome(handle))
                    if output is not None:
                        with _usable(output, "--output"):
                            fetched[handle.id] = handle.fetch(output / handle.key if several else output)
        if failure is not None:
            raise failure
    except KeyboardInterrupt:
        for handle in handles:
            if not handle.ended:
                _say(
                    f"the job runs on; see it with: tunery wait {handle.id}, or end it with: tunery cancel {handle.id}"
                )
        raise
    finally:
        # A job that failed is printed too: the exit code says how it ended, the document why.
        if as_json:
            documents = [
                handle.job | ({"fetched": _fetched(fetched[handle.id])} if handle.id in fetched else {})
                for handle in handles
            ]
            _print_json({"jobs": documents} if several else documents[0])
    if not as_json:
        for handle in handles:
            if handle.id in fetched:
                out.print(str(fetched[handle.id].library), soft_wrap=True)
            else:
                out.print(handle.key if handle.state == "SUCCEEDED" else handle.id, soft_wrap=True)


def _label(handle: JobHandle, several: bool) -> str:
    return f"{_printable(_shapes(handle.job['spec']['inputs']))}: " if several else ""


def _outcome(handle: JobHandle) -> str:
    """How much of its budget a job that succeeded has used, and what ended its search, as far as the service knows."""
    search = handle.job["spec"]["search"]
    wanted = search["trials"]
    if not wanted:
        return "succeeded: built from stored records, cost models and first guesses, nothing measured"
    said = f"succeeded: {handle.job['trials_measured']} of {wanted} trials"
    with contextlib.suppress(TuneryClientError):
        manifest = handle.manifest()
        reason = manifest.get("search", {}).get("ended_by")
        # Another job's library may be the faster one; its search is not this job's.
        if manifest.get("job") == handle.id and reason not in (None, "none"):
            said += f", ended by {reason}"
    return said


class _Show:
    """Events as progress bars on stderr, one for each job."""

    def __init__(self, progress: Progress, handles: Sequence[JobHandle], several: bool) -> None:
        self._progress = progress
        self._several = several
        waiting = "waiting" if several else "waiting for a worker"
        self._tasks = {
            handle.id: progress.add_task(_label(handle, several) + waiting, total=None) for handle in handles
        }

    def __call__(self, handle: JobHandle, event: Event) -> None:
        data, task, label = event.data, self._tasks[handle.id], _label(handle, self._several)
        if event.type == "state":
            self._progress.update(task, description=label + str(data.get("state", "")).lower())
        elif event.type == "stage":
            self._progress.update(task, description=label + str(data.get("stage", "")))
        elif event.type == "trial":
            self._progress.update(task, completed=data.get("trial") or 0, total=data.get("trials"))
        elif event.type == "progress":
            predicted_s = data.get("predicted_s")
            self._progress.update(
                task,
                description=label + (f"search, model at {predicted_s * 1e3:.3f} ms" if predicted_s else "search"),
                completed=data.get("trials_measured") or 0,
                total=data.get("trials"),
            )


@contextlib.contextmanager
def _progress(handles: Sequence[JobHandle], *, quiet: bool, several: bool) -> Iterator[_Show | None]:
    if quiet or not handles:
        yield None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
    ) as progress:
        yield _Show(progress, handles, several)


@contextlib.contextmanager
def _exit_codes(as_json: bool = False) -> Iterator[None]:
    """The one place where an error becomes an exit code."""
    try:
        yield
    except CacheMissError as error:
        _say(str(error))
        if as_json:
            _print_json(error.problem)
        elif error.nearest:
            rows = [
                (near["key"][:16], difference["field"], _short(difference["wanted"]), _short(difference["stored"]))
                for near in error.nearest
                for difference in near["differences"]
            ]
            _print_table(("nearest key", "field", "wanted", "stored"), rows, elastic=("wanted", "stored"), to=err)
        raise typer.Exit(CACHE_MISS) from None
    except RequestRefused as error:
        where = f" [request {error.request_id}]" if error.status >= 500 and error.request_id else ""
        _say(f"{error}{where}")
        raise typer.Exit(UNREACHABLE if error.status >= 500 else USAGE) from None
    except ModelFilesRefused as error:
        _say(str(error))
        raise typer.Exit(USAGE) from None
    except JobFailed as error:
        _say(str(error))
        raise typer.Exit(INTEGRITY if error.kind in ("check-failed", "accuracy-too-low") else JOB_FAILED) from None
    except (JobCancelled, WaitTimeout) as error:
        _say(str(error))
        raise typer.Exit(JOB_FAILED) from None
    except IntegrityFailed as error:
        _say(str(error))
        raise typer.Exit(INTEGRITY) from None
    except (ServiceUnreachable, StartFailed) as error:
        _say(str(error))
        raise typer.Exit(UNREACHABLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _usable(path: Path, option: str) -> Iterator[None]:
    """What the file system refuses in the block is a wrong value of `option`."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(
            f"{str(path)!r} cannot be used: {error.strerror or error}; give a folder that can be written",
            param_hint=option,
        ) from None


def _make(output: Path | None) -> None:
    """What cannot be written to is said before the job runs, not hours later."""
    if output is not None:
        with _usable(output, "--output"):
            output.mkdir(parents=True, exist_ok=True)


def _model(text: str) -> str:
    if is_sha256(text):
        return text
    try:
        if Path(text).is_file():
            with Path(text).open("rb"):
                return text
    except OSError as error:
        raise typer.BadParameter(f"{text!r} cannot be read: {error.strerror or error}", param_hint="MODEL") from None
    raise typer.BadParameter(f"{text!r} is neither a file nor a model's digest", param_hint="MODEL")


def _inputs(texts: Sequence[str] | None) -> tuple[dict[str, dict[str, Any]], list[dict[str, dict[str, Any]]]]:
    """The inputs of all shapes, and those of each of several shapes: the first time that an input is given is for the
    first of them, and so on. ``NAME=1,3,48,192`` or ``NAME:float32[1,3,48,192]``, sizes as `parse_shape` reads them; a
    name may hold any character."""
    inputs: dict[str, list[dict[str, Any]]] = {}
    for text in texts or ():
        value: dict[str, Any]
        if typed := TYPED_INPUT.fullmatch(text):
            name, value = typed[1], {"dtype": typed[2]}
            dims = typed[3]
        elif plain := re.fullmatch(r"(?s)(.+)=([-0-9, ./]*)", text):
            name, value, dims = plain[1], {}, plain[2]
        else:
            raise typer.BadParameter(f"{text!r} is not NAME=1,3,48,192", param_hint="--input")
        try:
            value["shape"] = parse_shape(dims)
        except ValueError:
            raise typer.BadParameter(f"{text!r}: {dims!r} is not a list of sizes", param_hint="--input") from None
        inputs.setdefault(name, []).append(value)
    repeated = {name: values for name, values in inputs.items() if len(values) > 1}
    if len({len(values) for values in repeated.values()}) > 1:
        said = ", ".join(f"{name!r} {len(values)} times" for name, values in repeated.items())
        raise typer.BadParameter(
            f"several shapes need each input as often, or once for all of them, and not {said}", param_hint="--input"
        )
    common = {name: values[0] for name, values in inputs.items() if name not in repeated}
    return common, [dict(zip(repeated, values, strict=True)) for values in zip(*repeated.values(), strict=True)]


def _facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a manifest says, one fact a row."""
    key = manifest["key_fields"]
    facts = [
        ("key", manifest["key"]),
        ("model", key["model"]),
        ("device", DeviceIdentity.from_json(key["device"]).name),
        ("inputs", _shapes(ArtifactKey.from_json(key).asked_inputs())),
    ]
    for point in (manifest.get("range") or {}).get("points", []):
        facts.append((f"latency at {point['size']}", f"{point['latency_s'] * 1e3:.3f} ms"))
    for name, taken in manifest.get("latency", {}).items():
        facts.append((f"latency, {name}", f"{taken['median_s'] * 1e3:.3f} ms"))
        for part, which in (("with_copies", "with copies"), ("overlapped", "copies overlapped")):
            if part in taken:
                facts.append((f"latency, {name}, {which}", f"{taken[part]['median_s'] * 1e3:.3f} ms"))
    for name, engine in manifest.get("engines", {}).items():
        if "unavailable" in engine:
            facts.append((f"latency, {name}", f"none: {engine['unavailable']}"))
    quantization = manifest.get("quantization")
    if quantization is not None:
        said = {name: value for name, value in key["quantization"].items() if value not in (None, [])}
        facts.append(("quantization", ", ".join(f"{name} {value}" for name, value in said.items())))
    for output in manifest.get("check", {}).get("quantized", []):
        both = f"{_figure(output['sqnr_db'])} dB, ONNX Runtime {_figure(output['reference_sqnr_db'])} dB"
        facts.append((f"SQNR of {output['output']}, checked", both))
    return facts


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        _say(f"this command needs more than the client: pip install 'tunery[{extra}]'")
        raise typer.Exit(USAGE)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _fetched(fetched: FetchedLibrary) -> dict[str, Any]:
    return {
        "key": fetched.key,
        "library": str(fetched.library),
        "manifest": str(fetched.manifest_path),
        "sha256": fetched.sha256,
        "downloaded": fetched.downloaded,
    }


def _shapes(inputs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={spell_shape(value['shape'])}" for name, value in inputs.items())


def _dimensions(shape: Sequence[int | str | None]) -> str:
    return "[" + ",".join("?" if size is None else str(size) for size in shape) + "]"


def _giga(device: Mapping[str, Any], figure: str) -> str:
    """A figure of the device's roof in 10^9 of its unit, or a dash while nobody has measured it."""
    roof = device.get("roof")
    return f"{roof[figure] / 1e9:.0f}" if roof else "-"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else text[:47] + "…"


def _print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    """A sentence for people. Left to the terminal to wrap: a line break of ours would cut a key or a path in two."""
    err.print(text, soft_wrap=True)


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, elastic: Sequence[str] = (), to: Console = out
) -> None:
    """One line a row. In a pipe the cells are parted by tabs and whole. In a terminal they are aligned, and only
    `elastic` columns are cut, with an ellipsis, to fit: what may be copied from the table stays whole."""
    lines = [[_printable(cell) for cell in line] for line in (columns, *rows)]
    if not to.is_terminal:
        for line in lines:
            to.file.write("\t".join(line) + "\n")  # the console would turn tabs into blanks
        return
    widths = [max(cell_len(line[index]) for line in lines) for index in range(len(columns))]
    for name in elastic:
        index = columns.index(name)
        excess = sum(widths) + 2 * (len(widths) - 1) - to.width
        widths[index] = max(widths[index] - max(excess, 0), min(widths[index], 8))
    for line in lines:
        cells = [
            set_cell_size(cell, width) if cell_len(cell) <= width else set_cell_size(cell, width - 1) + "…"
            for cell, width in zip(line, widths, strict=True)
        ]
        to.print("  ".join(cells).rstrip(), soft_wrap=True)


def _printable(text: str) -> str:
    """Names of inputs may hold anything; a row stays a row."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
