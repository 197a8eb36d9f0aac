"""The Python client: `Tunery(url)`. Needs neither TVM nor a database, only HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Self, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

from service.packing import DataFileRefused, Packed, packed, packed_samples
from tuning_db.keys import spell_shape

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_PROBLEM: Final = "application/problem+json"
_CHUNK_BYTES: Final = 1 << 18

T = TypeVar("T")

#: ``{"x": [1, 3, 224, 224]}`` or ``{"x": {"shape": [1, 3, 224, 224], "dtype": "float32"}}``. In place of a size may
#: stand a range, ``{"range": [1, 32]}``, or ``{"range": [1, 32], "points": [1, 8, 32]}`` with the sizes to be searched.
Inputs: TypeAlias = Mapping[str, Sequence[int | Mapping[str, Any]] | Mapping[str, Any]]


class TuneryClientError(Exception):
    """Base of all. `request_id` finds the request in the service's log.

    TuneryClientError
    ├── ServiceUnreachable   no connection, or no answer in time, after retries
    ├── RequestRefused       the service answered with a problem
    │   └── CacheMissError   no library under that key; carries the nearest ones
    ├── ModelFilesRefused    a file to be sent is missing, or lies outside the model's folder
    ├── JobFailed            the job ended without a library
    ├── JobCancelled         somebody cancelled the job
    ├── IntegrityFailed      the bytes that came are not those the manifest names
    └── WaitTimeout          the job runs on; the caller's patience ended
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class ServiceUnreachable(TuneryClientError):
    """No connection, or no answer in time, after retries."""


class RequestRefused(TuneryClientError):
    """The service answered with a problem. `str(error)` is the service's own sentence."""

    def __init__(self, status: int, problem: Mapping[str, Any], *, request_id: str | None = None) -> None:
        super().__init__(str(problem.get("detail") or f"HTTP {status}"), request_id=request_id)
        self.status = status
        self.problem = dict(problem)

    @property
    def type(self) -> str:
        """Stable: "/problems/shape-mismatch" and the like."""
        return str(self.problem.get("type", "about:blank"))

    @property
    def field(self) -> str | None:
        """The dotted path of the field that is wrong, if one is."""
        return self.problem.get("field")


class CacheMissError(RequestRefused):
    """No library under that key."""

    @property
    def nearest(self) -> list[dict[str, Any]]:
        """Stored keys, closest first: ``{"key": …, "differences": [{"field", "wanted", "stored"}]}``."""
        return list(self.problem.get("nearest", []))


class ModelFilesRefused(TuneryClientError):
    """A file to be sent is missing: a data file that the model names, or all samples. Or it lies outside the model's
    folder. Nothing was sent."""


class JobFailed(TuneryClientError):
    """The job ended without a library. `kind` is stable."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        error = job.get("error") or {}
        super().__init__(f"job {job['id']} failed: {error.get('message', 'no reason was given')}")
        self.job = dict(job)
        self.kind = str(error.get("kind", "tuning-failed"))


class JobCancelled(TuneryClientError):
    """Somebody cancelled the job."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__(f"job {job['id']} was cancelled")
        self.job = dict(job)


class IntegrityFailed(TuneryClientError):
    """The bytes that came are not those the manifest names. Nothing was kept."""


class WaitTimeout(TuneryClientError):
    """The job runs on; the caller's patience ended."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a job's progress; `seq` is None for the last, "end", whose data is the job itself."""

    seq: int | None
    type: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FetchedLibrary:
    """A library on this machine, verified."""

    library: Path
    manifest_path: Path
    manifest: dict[str, Any]
    downloaded: bool  #: False if the copy that was there was the right one

    @property
    def key(self) -> str:
        return str(self.manifest["key"])

    @property
    def sha256(self) -> str:
        return str(self.manifest["library"]["sha256"])


class _Retryable(Exception):
    """The request may be sent again. Holds what to raise when that has been done often enough."""

    def __init__(self, error: TuneryClientError) -> None:
        super().__init__(str(error))
        self.error = error


class Tunery:
    """A connection to one service. Use it in a `with` block, or call `close`.

    Every request that is safe to repeat is sent up to `attempts` times when the connection fails or the service
    says 502, 503 or 504; submissions carry an Idempotency-Key, so they are safe too.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = 60.0, attempts: int = 4) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        # A model is answered when it has been read, and made into ONNX where it is of another format.
        self._upload_timeout = httpx.Timeout(timeout_s, connect=5.0, read=6 * timeout_s)
        try:
            self._http = httpx.Client(
                base_url=self.url, timeout=httpx.Timeout(timeout_s, connect=5.0), headers={"user-agent": "tunery"}
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServiceUnreachable(f"{url!r} is not an address: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def upload(self, path: str | os.PathLike[str]) -> str:
        """Upload a model file; its digest. Sending the same model again is harmless.

        The data files that an ONNX model names beside it are sent with it, as one tar. ModelFilesRefused if one is
        missing, or lies outside the model's folder.
        """
        return str(self.upload_model(path)["digest"])

    def upload_model(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """As `upload`, but all that the service found out: digest, format, inputs, outputs."""
        return self._upload("/v1/models", Path(path), packed)

    def upload_calibration(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Upload samples of a model's inputs: an .npz file, a zip or tar of .npy files, or a folder of them, which is
        sent as a tar. What the service found: digest, arrays. Sending the same samples again is harmless."""
        return self._upload("/v1/calibrations", Path(path), lambda p: packed_samples(p) if p.is_dir() else None)

    def _upload(self, address: str, file: Path, pack: Callable[[Path], Packed | None]) -> dict[str, Any]:
        """Send the file, or what `pack` makes of it."""
        headers = {"content-type": "application/octet-stream"}

        def send() -> httpx.Response:
            if tar is not None:
                announced = {**headers, "content-length": str(tar.size_bytes)}
                return self._http.post(address, content=tar.chunks(), headers=announced, timeout=self._upload_timeout)
            with file.open("rb") as stream:
                return self._http.post(address, content=stream, headers=headers, timeout=self._upload_timeout)

        try:
            tar = pack(file)
            return self._json(send)
        except DataFileRefused as error:
            raise ModelFilesRefused(str(error)) from error

    def calibration(self, digest: str) -> dict[str, Any]:
        return self._get(f"/v1/calibrations/{_segment(digest)}")

    def model(self, digest: str) -> dict[str, Any]:
        return self._get(f"/v1/models/{_segment(digest)}")

    def nodes(self, digest: str) -> dict[str, Any]:
        """The nodes of an uploaded model that int8 can leave in fp32: ``{"nodes": [{"node", "operator"}], "more": 0}``,
        `more` being how many are not told."""
        return self._get(f"/v1/models/{_segment(digest)}/nodes")

    def submit(
        self,
        model: str | os.PathLike[str],
        *,
        inputs: Inputs | None = None,
        device: str | Mapping[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
        quantization: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> JobHandle:
        """Ask for a tuned library. `model` is a file, which is uploaded first, or the digest of an uploaded one.

        `search` may hold `tuner` ("auto", "autotvm", "ansor" or "none"), `trials` (0 measures nothing), `seconds` and
        `seed`, `options` the members `fast_math`, `reassociation` and `winograd`; what is left out has the service's
        default.
        `quantization` is ``{"scheme": "int8", "calibration": …}`` with samples as `upload_calibration` takes them, or
        the digest of uploaded ones; and as members, if need be, `mode` ("static" or "dynamic"), `method` ("minmax",
        "entropy" or "percentile"), `percentile`, `per_channel`, `exclude` (names of nodes) and `min_sqnr_db`, below
        which the job fails instead of publishing; or ``{"scheme": "fp16"}``, with `exclude`, `calibration` or both.
        """
        body = {"inputs": _spelled(inputs), "device": device, "search": search, "options": options}
        return JobHandle(self, self._submit(model, body, quantization, idempotency_key))

    def submit_shapes(
        self,
        model: str | os.PathLike[str],
        shapes: Sequence[Inputs],
        *,
        inputs: Inputs | None = None,
        device: str | Mapping[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
        quantization: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> list[JobHandle]:
        """As `submit`, for several shapes of one model: a job and a key each, in the order of `shapes`.

        `inputs` are those that have the same shape in all of them, each of `shapes` the others. What is wrong with one
        refuses all. `search` holds for each job. `wait_all` waits for them.
        """
        body = {"inputs": _spelled(inputs), "shapes": [_spelled(shape) for shape in shapes], "device": device}
        answer = self._submit(model, body | {"search": search, "options": options}, quantization, idempotency_key)
        return [JobHandle(self, job) for job in answer["jobs"]]

    def _submit(
        self,
        model: str | os.PathLike[str],
        body: Mapping[str, Any],
        quantization: Mapping[str, Any] | None,
        idempotency_key: str | None,
    ) -> dict[str, Any]:
        """Members of `body` that are None are left to the service."""
        sent = {"model": self._digest_of(model), **{name: value for name, value in body.items() if value is not None}}
        if quantization is not None:
            sent["quantization"] = self._calibrated(quantization)
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._json(lambda: self._http.post("/v1/jobs", json=sent, headers=headers))

    def job(self, job_id: str) -> JobHandle:
        return JobHandle(self, self._get(f"/v1/jobs/{_segment(job_id)}"))

    def jobs(self, *, states: Sequence[str] = (), device: str | None = None, limit: int = 50) -> list[dict[str, Any]]:
        """The newest jobs, as many as `limit`."""
        params: dict[str, Any] = {"state": list(states), "limit": min(limit, 500)}
        if device is not None:
            params["device"] = device
        page = self._get("/v1/jobs", params)
        found: list[dict[str, Any]] = page["jobs"]
        while len(found) < limit and page.get("next"):
            page = self._get(page["next"])
            found += page["jobs"]
        return found[:limit]

    def devices(self) -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = self._get("/v1/devices")["devices"]
        return devices

    def ready(self) -> bool:
        """Whether the service says that it can do its work; asked once."""
        try:
            return self._http.get("/readyz", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def find(
        self,
        model: str | os.PathLike[str],
        *,
        inputs: Inputs | None = None,
        device: str | None = None,
        quantization: str | Mapping[str, Any] = "none",
        fast_math: bool = False,
        winograd: bool = True,
        reassociation: bool = False,
    ) -> dict[str, Any]:
        """The manifest of the library that answers this, or CacheMissError, which says what is nearest.

        `quantization` is a scheme, or as for `submit`, without `min_sqnr_db`.
        """
        return self.find_shapes(
            model,
            [{}],
            inputs=inputs,
            device=device,
            quantization=quantization,
            fast_math=fast_math,
            winograd=winograd,
            reassociation=reassociation,
        )[0]

    def find_shapes(
        self,
        model: str | os.PathLike[str],
        shapes: Sequence[Inputs],
        *,
        inputs: Inputs | None = None,
        device: str | None = None,
        quantization: str | Mapping[str, Any] = "none",
        fast_math: bool = False,
        winograd: bool = True,
        reassociation: bool = False,
    ) -> list[dict[str, Any]]:
        """As `find`, for what `submit_shapes` asked for. CacheMissError for the first shape that is not there."""
        if not isinstance(quantization, str):
            quantization = json.dumps(self._calibrated(quantization))
        digest = self._digest_of(model)
        wanted = [_spelled(inputs) | _spelled(shape) for shape in shapes]
        if any("dtype" not in value for spelled in wanted for value in spelled.values()):
            declared = {port["name"]: port["dtype"] for port in self.model(digest)["inputs"]}
            for spelled in wanted:
                for name, value in spelled.items():
                    # An input that the model lacks is for the service to refuse.
                    value.setdefault("dtype", declared.get(name, "float32"))
        common: dict[str, Any] = {
            "model": digest,
            "quantization": quantization,
            "fast_math": fast_math,
            "winograd": winograd,
            "reassociation": reassociation,
        }
        if device is not None:
            common["device"] = device
        return [
            self._get(
                "/v1/artifacts",
                common | {"input": [f"{n}:{v['dtype']}[{spell_shape(v['shape'])}]" for n, v in spelled.items()]},
            )
            for spelled in wanted
        ]

    def manifest(self, key: str) -> dict[str, Any]:
        return self._get(f"/v1/artifacts/{_segment(key)}")

    def fetch(self, key: str, folder: str | os.PathLike[str]) -> FetchedLibrary:
        """The library under `key` as `library.so` and `manifest.json` in `folder`, which is made if need be.

        An intact copy that is there already is kept. Otherwise the bytes go to a temporary file, are verified
        against the manifest, and only then take the name. IntegrityFailed if they are not what they should be.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        library = target / "library.so"
        for _ in range(3):
            manifest = self.manifest(key)
            wanted = str(manifest["library"]["sha256"])
            downloaded = self._download(key, wanted, library)
            if downloaded is not None:
                manifest_path = target / "manifest.json"
                with _replacing(manifest_path) as stream:
                    stream.write(json.dumps(manifest, indent=2).encode() + b"\n")
                return FetchedLibrary(library, manifest_path, manifest, downloaded)
            # A faster library took the key's place between the two requests; its manifest is another one.
        raise IntegrityFailed(f"the library under key {key} changed three times while it was fetched; try again")

    def _download(self, key: str, wanted: str, library: Path) -> bool | None:
        """Whether bytes had to be sent for `library` to be `wanted`; None if the key holds another library now."""
        etag = f'"{wanted}"'
        headers = {"if-none-match": etag} if library.is_file() and _sha256_of(library) == wanted else {}

        def get() -> bool | None:
            with self._http.stream("GET", f"/v1/artifacts/{_segment(key)}/library", headers=headers) as response:
                if response.status_code == 304:
                    return False
                if response.status_code != 200:
                    response.read()
                    _raise_for(response)
                if response.headers.get("etag") != etag:
                    return None
                digest = hashlib.sha256()
                with _replacing(library) as stream:
                    for chunk in response.iter_raw(_CHUNK_BYTES):
                        digest.update(chunk)
                        stream.write(chunk)
                    if digest.hexdigest() != wanted:
                        raise IntegrityFailed(
                            f"the bytes that came for key {key} are {digest.hexdigest()}, not {wanted}; fetch again",
                            request_id=response.headers.get("x-request-id"),
                        )
                return True

        return self._retried(get)

    def _calibrated(self, quantization: Mapping[str, Any]) -> dict[str, Any]:
        """`quantization` with the digest of its samples, uploaded if they are a file or a folder."""
        said = quantization.get("calibration")
        if said is None or re.fullmatch(r"[0-9a-f]{64}", os.fspath(said)):
            return dict(quantization)
        return {**quantization, "calibration": self.upload_calibration(said)["digest"]}

    def _digest_of(self, model: str | os.PathLike[str]) -> str:
        text = os.fspath(model)
        return text if re.fullmatch(r"[0-9a-f]{64}", text) else self.upload(text)

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._json(lambda: self._http.get(path, params=params))

    def _json(self, send: Callable[[], httpx.Response]) -> dict[str, Any]:
        def once() -> dict[str, Any]:
            response = send()
            if not response.is_success:
                _raise_for(response)
            try:
                answer = response.json()
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise ServiceUnreachable(f"{self.url} answers, but not as Tunery does; check the address")
            return answer

        return self._retried(once)

    def _retried(self, once: Callable[[], T]) -> T:
        """What `once` returns, called again after faults that pass."""

        def attempt() -> T:
            try:
                return once()
            except httpx.TransportError as error:
                raise _Retryable(_unreachable(self.url, error)) from error

        try:
            return Retrying(
                retry=retry_if_exception_type(_Retryable),
                stop=stop_after_attempt(self._attempts),
                wait=wait_exponential(multiplier=0.2, max=3.0) + wait_random(0, 0.2),
                reraise=True,
            )(attempt)
        except _Retryable as last:
            raise last.error from last.__cause__

    def _stream(self, job_id: str, after: int, deadline_s: float | None) -> Iterator[Event]:
        """One connection's events; ends when the service or the network ends it, or when `deadline_s` (of the
        monotonic clock) has come."""
        left_s = 40.0 if deadline_s is None else max(deadline_s - time.monotonic(), 0.1)
        headers = {"last-event-id": str(after)} if after else {}
        # The service says something every 15 s, if only a comment.
        timeout = httpx.Timeout(min(40.0, left_s), connect=5.0)
        with self._http.stream(
            "GET", f"/v1/jobs/{_segment(job_id)}/events", headers=headers, timeout=timeout
        ) as response:
            if response.status_code != 200:
                response.read()
                _raise_for(response)
            kind, seq, data = "message", None, ""
            for line in response.iter_lines():
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return  # comments alone would keep a silent job's connection open for ever
                name, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if name == "event":
                    kind = value
                elif name == "id":
                    seq = int(value)
                elif name == "data":
                    data += value
                elif line == "" and data:
                    yield Event(seq, kind, json.loads(data))
                    kind, seq, data = "message", None, ""


class JobHandle:
    """A job on the service. `job` is its newest known answer."""

    def __init__(self, client: Tunery, job: dict[str, Any]) -> None:
        self._client = client
        self.job = job

    @property
    def id(self) -> str:
        return str(self.job["id"])

    @property
    def state(self) -> str:
        return str(self.job["state"])

    @property
    def key(self) -> str:
        return str(self.job["key"])

    @property
    def ended(self) -> bool:
        return self.state in ("SUCCEEDED", "FAILED", "CANCELLED")

    @property
    def cached(self) -> bool:
        """Whether a finished job answered the submission: nothing was, or will be, measured for it."""
        return bool(self.job.get("cached", False))

    def refresh(self) -> dict[str, Any]:
        self.job = self._client._get(f"/v1/jobs/{_segment(self.id)}")
        return self.job

    def cancel(self) -> dict[str, Any]:
        self.job = self._client._json(lambda: self._client._http.post(f"/v1/jobs/{_segment(self.id)}/cancel"))
        return self.job

    def events(self, *, after: int = 0, timeout_s: float | None = None) -> Iterator[Event]:
        """Events with seq > `after`, as they happen, up to and with "end". A connection that is lost is taken up
        again where it broke. WaitTimeout after `timeout_s`; ServiceUnreachable when reconnecting fails for long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failures = 0
        while True:
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"job {self.id} is {self.state} after {timeout_s:g} s; wait longer: tunery wait {self.id}"
                )
            try:
                for event in self._client._stream(self.id, after, deadline):
                    failures = 0
                    after = event.seq or after
                    if event.type == "end":
                        self.job = event.data
                        yield event
                        return
                    yield event
                    if deadline is not None and time.monotonic() > deadline:
                        break
                else:
                    failures += 1  # closed without "end": the service is restarting
                reason: Exception | None = None
            except httpx.TransportError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    continue
                failures += 1
                reason = error
            except _Retryable as error:
                failures += 1
                reason = error.error
            if failures > 10:
                raise _unreachable(self._client.url, reason) from reason
            if failures:
                time.sleep(min(0.2 * 2**failures, 5.0))

    def wait(
        self, timeout_s: float | None = None, *, on_event: Callable[[Event], None] | None = None
    ) -> dict[str, Any]:
        """The job once it has SUCCEEDED. Raises JobFailed, JobCancelled or WaitTimeout."""
        if not self.ended:
            for event in self.events(timeout_s=timeout_s):
                if on_event is not None:
                    on_event(event)
        if self.state == "FAILED":
            raise JobFailed(self.job)
        if self.state == "CANCELLED":
            raise JobCancelled(self.job)
        return self.job

    def manifest(self) -> dict[str, Any]:
        """The manifest under the job's key; its `job` says whose library that is."""
        return self._client.manifest(self.key)

    def fetch(self, folder: str | os.PathLike[str]) -> FetchedLibrary:
        """The job's library; see `Tunery.fetch`."""
        return self._client.fetch(self.key, folder)


def wait_all(
    handles: Sequence[JobHandle],
    timeout_s: float | None = None,
    *,
    on_event: Callable[[JobHandle, Event], None] | None = None,
) -> None:
    """Wait until all jobs have ended; then raise what the first one that did not succeed came to, as `JobHandle.wait`.

    One after the other, as a device's worker takes them; a job that overtakes another is told of when its turn comes.
    WaitTimeout, after `timeout_s` for all of them, at once.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    first: JobFailed | JobCancelled | None = None
    for handle in handles:
        try:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            handle.wait(left_s, on_event=None if on_event is None else partial(on_event, handle))
        except (JobFailed, JobCancelled) as error:
            first = first or error
    if first is not None:
        raise first


def _raise_for(response: httpx.Response) -> NoReturn:
    """The error that an answer which is no success stands for."""
    request_id = response.headers.get("x-request-id")
    problem: Any = None
    if response.headers.get("content-type", "").startswith(_PROBLEM):
        with contextlib.suppress(ValueError):
            problem = response.json()
    if not isinstance(problem, dict):
        problem = {"detail": f"{response.request.url} answered {response.status_code} {response.reason_phrase}"}
    kind = CacheMissError if problem.get("type") == "/problems/cache-miss" else RequestRefused
    error = kind(response.status_code, problem, request_id=request_id)
    if response.status_code in (502, 503, 504):
        raise _Retryable(error)
    raise error


def _unreachable(url: str, reason: Exception | None) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"no answer from {url} ({reason or 'it keeps closing the connection'}); "
        "is it running? Start one with: tunery up, or name another with --url or TUNERY_URL"
    )


def _segment(text: str) -> str:
    """`text` as one segment of a path, whatever it holds. The service refuses names that it does not know."""
    return quote(text, safe="") or "-"


def _spelled(inputs: Inputs | None) -> dict[str, dict[str, Any]]:
    spelled: dict[str, dict[str, Any]] = {}
    for name, value in (inputs or {}).items():
        spelled[name] = dict(value) if isinstance(value, Mapping) else {"shape": list(value)}
    return spelled


def _sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A binary stream whose bytes take `path`'s name when the block ends well, and are removed when it does not."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temp = Path(name)
    try:
        with os.fdopen(fd, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temp.chmod(0o644)
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
