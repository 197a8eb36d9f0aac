"""Request bodies as they arrive: files go straight to the blob store, and no limit is checked too late."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from tuning_db.blobs import BlobStore, BlobWriter
from tuning_db.errors import (
    BlobCorrupt,
    InvalidCalibration,
    InvalidModel,
    InvalidRequest,
    NotFound,
    TooLarge,
)

#: For everything that is not the file: JSON, part headers, boundaries.
MAX_FIELD_BYTES: Final = 2**20
_MAX_PARTS: Final = 8
_WRITE_BYTES: Final = 2**20


@dataclass(slots=True)
class Upload:
    """A body that has been read to its end. The file's bytes are not kept until `commit`."""

    writer: BlobWriter
    fields: dict[str, bytes] = field(default_factory=dict)

    async def staged(self) -> tuple[Path, str]:
        """Where the file lies until then, and the SHA-256 of its bytes."""
        return await run_in_threadpool(self.writer.staged)

    async def replace(self, blobs: BlobStore, source: Path) -> None:
        """Let the bytes of a file take the place of those that came."""

        def copy() -> BlobWriter:
            with contextlib.ExitStack() as stack:
                writer = stack.enter_context(blobs.writer())
                with source.open("rb") as file:
                    while chunk := file.read(_WRITE_BYTES):
                        writer.write(chunk)
                stack.pop_all()
                return writer

        replaced, self.writer = self.writer, await run_in_threadpool(copy)
        await run_in_threadpool(replaced.close)

    async def commit(self) -> int:
        """Keep the bytes under their SHA-256; how many there are."""
        _, size_bytes = await run_in_threadpool(self.writer.commit)
        return size_bytes


class Kept(Protocol):
    """A row about an upload: `digest` says what it is, `blob` where the bytes of its first file are."""

    @property
    def digest(self) -> str: ...

    @property
    def blob(self) -> str: ...


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, slots=True)
class Shelf(Generic[K]):
    """The store's methods for one kind of upload."""

    find: Callable[[str], K]
    add: Callable[[K], bool]
    replace_blob: Callable[[str, str, tuple[str, int]], bool]


async def keep(
    upload: Upload, blobs: BlobStore, shelf: Shelf[K], digest: str, row: Callable[[str, int], K]
) -> tuple[K, bool]:
    """Keep the bytes and remember what they are, by `row` of their SHA-256 and number; whether that was new.

    A second file of what is known under `digest` is not kept, unless the first one's bytes were lost.
    """
    _, sha256 = await upload.staged()
    try:
        known = await run_in_threadpool(shelf.find, digest)
    except NotFound:
        made = row(sha256, await upload.commit())
        if await run_in_threadpool(shelf.add, made):
            return made, True
        return await run_in_threadpool(shelf.find, digest), False
    if known.blob == sha256:
        await upload.commit()  # the stored bytes may have been damaged since
        return known, False
    try:
        await run_in_threadpool(blobs.path_verified, known.blob)
    except (NotFound, BlobCorrupt):
        size_bytes = await upload.commit()
        await run_in_threadpool(shelf.replace_blob, digest, known.blob, (sha256, size_bytes))
        return await run_in_threadpool(shelf.find, digest), False
    return known, False


def file_body(part: str) -> dict[str, Any]:
    """How OpenAPI describes a body that is one file."""
    file = {"type": "string", "format": "binary"}
    form = {"type": "object", "properties": {part: file}, "required": [part]}
    content = {"multipart/form-data": {"schema": form}, "application/octet-stream": {"schema": file}}
    return {"requestBody": {"required": True, "content": content}}


async def read_body(request: Request, max_bytes: int = MAX_FIELD_BYTES) -> bytes:
    """A small body whole; TooLarge as soon as it is known to be longer."""
    _refuse_announced(request, max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


@contextlib.asynccontextmanager
async def receive(
    request: Request,
    blobs: BlobStore,
    *,
    file_parts: tuple[str, ...],
    text_parts: tuple[str, ...],
    max_bytes: int,
    invalid: type[InvalidModel | InvalidCalibration] = InvalidModel,
) -> AsyncIterator[Upload]:
    """The file in a multipart body, or in a bare one (`application/octet-stream`), on its way to the blob store.

    Raises TooLarge before the body is read if its length says so, else as soon as the limit is passed; StorageFull;
    InvalidRequest for a body that is malformed, ends early or has parts that nobody asked for. The names of files
    are not looked at, and one without a byte is `invalid`. Nothing is kept of a body that is refused.
    """
    content_type, options = parse_options_header(request.headers.get("content-type"))
    multipart = content_type == b"multipart/form-data"
    if not multipart and (text_parts or content_type != b"application/octet-stream"):
        raise InvalidRequest(
            "send multipart/form-data with a file part "
            + " or ".join(map(repr, file_parts))
            + (f" and a JSON part {text_parts[0]!r}" if text_parts else ""),
            field="Content-Type",
        )
    # Part headers and boundaries are announced too.
    _refuse_announced(request, max_bytes, slack=MAX_FIELD_BYTES if multipart else 0)
    writer = await run_in_threadpool(lambda: blobs.writer(max_bytes=max_bytes))
    upload = Upload(writer)
    try:
        if multipart:
            await _read_parts(request, options.get(b"boundary", b""), upload, file_parts, text_parts, max_bytes)
        else:
            pending = bytearray()
            async for chunk in request.stream():
                pending += chunk
                if len(pending) >= _WRITE_BYTES or writer.size_bytes + len(pending) > max_bytes:
                    await run_in_threadpool(writer.write, bytes(pending))
                    pending.clear()
            await run_in_threadpool(writer.write, bytes(pending))
        if writer.size_bytes == 0:
            raise invalid(f"the {file_parts[0]} is empty: not one byte came")
        yield upload
    finally:
        await run_in_threadpool(upload.writer.close)


async def _read_parts(
    request: Request,
    boundary: bytes,
    upload: Upload,
    file_parts: tuple[str, ...],
    text_parts: tuple[str, ...],
    max_bytes: int,
) -> None:
    if not boundary:
        raise InvalidRequest("the multipart body has no boundary; let your HTTP client set it", field="Content-Type")
    parts = _Parts(file_parts, text_parts)
    total = 0
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        async for chunk in request.stream():
            total += len(chunk)
            if total > max_bytes + MAX_FIELD_BYTES:
                raise _too_large(max_bytes)
            parser.write(chunk)
            if len(parts.file) >= _WRITE_BYTES or upload.writer.size_bytes + len(parts.file) > max_bytes:
                await run_in_threadpool(upload.writer.write, bytes(parts.file))
                parts.file.clear()
    except FormParserError as error:
        raise InvalidRequest(f"the multipart body is malformed: {error}", field="body") from error
    if not parts.ended:
        raise InvalidRequest("the multipart body ends before its last boundary; send it again", field="body")
    if not parts.file_seen:
        raise InvalidRequest(f"the file part {file_parts[0]!r} is missing", field=file_parts[0])
    await run_in_threadpool(upload.writer.write, bytes(parts.file))
    upload.fields = {name: bytes(value) for name, value in parts.fields.items()}


class _Parts:
    """Callbacks of the parser: collects what came since the file's bytes were last written out."""

    def __init__(self, file_parts: tuple[str, ...], text_parts: tuple[str, ...]) -> None:
        self._file_parts = file_parts
        self._text_parts = text_parts
        self._count = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._into: bytearray | None = None
        self.file = bytearray()
        self.file_seen = False
        self.fields: dict[str, bytearray] = {}
        self.ended = False

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._part_begin,
            "on_header_begin": self._header_begin,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._count += 1
        if self._count > _MAX_PARTS:
            raise InvalidRequest(f"the body has more than {_MAX_PARTS} parts", field="body")
        self._disposition = b""
        self._into = None

    def _header_begin(self) -> None:
        self._header_name.clear()
        self._header_value.clear()

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name in self._file_parts:
            if self.file_seen:
                raise InvalidRequest("the body has two files; send one", field=name)
            self.file_seen = True
            self._into = self.file
        elif name in self._text_parts:
            if name in self.fields:
                raise InvalidRequest(f"the part {name!r} comes twice", field=name)
            self._into = self.fields[name] = bytearray()
        else:
            wanted = ", ".join(map(repr, (*self._file_parts, *self._text_parts)))
            raise InvalidRequest(f"the part {name[:80]!r} is not one of {wanted}", field=name[:80] or "body")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._into is not None, "data comes after headers"
        self._into += data[start:end]
        if self._into is not self.file and len(self._into) > MAX_FIELD_BYTES:
            raise _too_large(MAX_FIELD_BYTES)

    def _end(self) -> None:
        self.ended = True


def _refuse_announced(request: Request, max_bytes: int, *, slack: int = 0) -> None:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes + slack:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is longer than {max_bytes} bytes; this service takes no more", limit_bytes=max_bytes)
