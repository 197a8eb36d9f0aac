"""Conditional and ranged answers (RFC 9110, sections 13 and 14) for bytes named by their SHA-256."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO, Final

from fastapi import Request, Response
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from service.problems import Problem, ProblemKind

_CHUNK_BYTES: Final = 256 * 1024
_PRECONDITION_FAILED: Final = ProblemKind(412, "precondition-failed", "The bytes are not those that were asked for")
_NOT_SATISFIABLE: Final = ProblemKind(416, "range-not-satisfiable", "The range lies outside the bytes")


def serve(request: Request, handle: BinaryIO, sha256: str, *, filename: str, cache_control: str) -> Response:
    """200, 206, 304, 412 or 416 for the open, verified `handle`, which is closed when the answer has gone out.

    The entity tag is strong and names the content, so a download that is resumed never joins two versions.
    """
    etag = f'"{sha256}"'
    size = os.fstat(handle.fileno()).st_size
    headers = {"etag": etag, "cache-control": cache_control, "accept-ranges": "bytes"}
    if not _match(request.headers.get("if-match"), etag):
        handle.close()
        return Problem(
            _PRECONDITION_FAILED,
            f"the bytes here have the entity tag {etag}, which If-Match does not name; ask again without it",
            headers={"etag": etag},
        )
    if _none_match(request.headers.get("if-none-match"), etag):
        handle.close()
        return Response(status_code=304, headers=headers)
    headers |= {"content-disposition": f'attachment; filename="{filename}"', "x-content-type-options": "nosniff"}
    start, end, status = 0, size, 200
    # A weak or another tag, or a date, means that the client may hold other bytes: it gets everything.
    if request.method == "GET" and request.headers.get("if-range", etag) == etag:
        match parse_range(request.headers.get("range"), size):
            case (first, last):
                start, end, status = first, last + 1, 206
                headers["content-range"] = f"bytes {first}-{last}/{size}"
            case "unsatisfiable":
                handle.close()
                return Problem(
                    _NOT_SATISFIABLE,
                    f"the library has {size} bytes; ask for a range within them",
                    headers={"content-range": f"bytes */{size}", "etag": etag, "accept-ranges": "bytes"},
                )
    headers["content-length"] = str(end - start)
    if request.method == "HEAD":
        handle.close()
        return Response(status_code=status, headers=headers, media_type="application/octet-stream")
    return StreamingResponse(
        _pieces(handle, start, end),
        status_code=status,
        headers=headers,
        media_type="application/octet-stream",
        background=BackgroundTask(handle.close),
    )


def parse_range(header: str | None, size: int) -> tuple[int, int] | str | None:
    """First and last byte of a single range; "unsatisfiable"; None when the header is absent, invalid, of another
    unit or asks for several ranges: all of these are answered with everything, as RFC 9110 allows or demands."""
    match = re.fullmatch(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", header or "", re.IGNORECASE)
    if match is None or match.groups() == ("", ""):
        return None
    first_text, last_text = match.groups()
    if not first_text:
        length = int(last_text)
        return (max(size - length, 0), size - 1) if length and size else "unsatisfiable"
    first = int(first_text)
    if last_text and int(last_text) < first:
        return None
    if first >= size:
        return "unsatisfiable"
    return first, min(int(last_text), size - 1) if last_text else size - 1


def _match(header: str | None, etag: str) -> bool:
    """Whether If-Match allows an answer. The comparison is strong, as the RFC demands here: a weak tag never fits."""
    return header is None or header.strip() == "*" or ("", etag) in re.findall(r'(W/)?("[^"]*")', header)


def _none_match(header: str | None, etag: str) -> bool:
    """Whether If-None-Match names the tag. The comparison is weak, as the RFC demands here."""
    if header is None:
        return False
    if header.strip() == "*":
        return True
    return etag in re.findall(r'(?:W/)?("[^"]*")', header)


def _pieces(handle: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Starlette runs this in a thread. A generator that is dropped half-way closes the handle too."""
    with handle:
        handle.seek(start)
        while start < end and (piece := handle.read(min(_CHUNK_BYTES, end - start))):
            start += len(piece)
            yield piece
