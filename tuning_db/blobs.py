"""BlobStore: bytes under the SHA-256 of themselves, on a local disk, whole or not at all.

A blob is written to a temporary file in the same file system, hashed on the way, flushed to the disk, and only then
renamed to its name, so no reader ever sees half of one and two writers of the same bytes do not disturb each other.
Every opening hashes the whole file first. There is deliberately no memory of "verified before": a file's times do
not change when the disk below them goes bad, and can be set back by whoever altered it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Protocol, Self

from tuning_db.errors import BlobCorrupt, NotFound, StorageFull, TooLarge
from tuning_db.keys import is_sha256

CHUNK_BYTES: Final = 1 << 20

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Readable(Protocol):
    """Anything to copy bytes from."""

    def read(self, size: int, /) -> bytes: ...


class BlobStore:
    """Blobs below `root`, which is made if it is missing. Safe between threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temp = root / "tmp"
        self._quarantine = root / "quarantine"
        with _no_room_is_storage_full(root):
            for folder in (root, self._temp, self._quarantine):
                folder.mkdir(parents=True, exist_ok=True)

    def ping(self) -> None:
        """Raises StorageFull if nothing can be stored: a page goes to the disk, in a file that nobody else sees."""
        try:
            with _no_room_is_storage_full(self.root), tempfile.TemporaryFile(dir=self._temp) as probe:
                probe.write(bytes(4096))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            raise StorageFull(
                f"{self._temp} cannot be written ({error.strerror}); check that it exists and who owns it"
            ) from error

    def put(
        self, source: Path | Readable, expected_sha256: str | None = None, *, max_bytes: int | None = None
    ) -> tuple[str, int]:
        """Store a file's or a stream's bytes: their SHA-256 and how many there are.

        Raises BlobCorrupt if they are not `expected_sha256`, TooLarge as soon as `max_bytes` is passed, StorageFull
        when there is no room; nothing is left behind then.
        """
        if isinstance(source, Path):
            with source.open("rb") as stream:
                return self.put(stream, expected_sha256, max_bytes=max_bytes)
        with self.writer(max_bytes=max_bytes) as writer:
            while chunk := source.read(CHUNK_BYTES):
                writer.write(chunk)
            return writer.commit(expected_sha256)

    def writer(self, *, max_bytes: int | None = None) -> BlobWriter:
        """For bytes that come in pieces: ``with blobs.writer() as w: w.write(...); sha256, size = w.commit()``."""
        return BlobWriter(self, max_bytes)

    def exists(self, sha256: str) -> bool:
        """Whether there is such a file. Its bytes are not looked at."""
        return is_sha256(sha256) and self._path(sha256).is_file()

    def open_verified(self, sha256: str) -> BinaryIO:
        """The blob, open at its first byte, after all of it was hashed.

        The handle keeps working when the name is removed or replaced meanwhile. Raises NotFound, or BlobCorrupt after
        moving the damaged file to quarantine.
        """
        path = self._path(sha256)
        try:
            # Not through a link: what a name leads to is decided by `put` alone.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"no blob {sha256} is stored") from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise NotFound(f"no blob {sha256} is stored: a link stands in its place") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotFound(f"no blob {sha256} is stored: what stands in its place is no file")
        handle = os.fdopen(fd, "rb")
        try:
            try:
                found = hashlib.file_digest(handle, "sha256").hexdigest()
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                found = "unreadable"
            if found != sha256:
                self._set_aside(path, handle)
                raise BlobCorrupt(f"blob {sha256} is damaged ({found}); it was moved to {self._quarantine}")
            handle.seek(0)
        except BaseException:
            handle.close()
            raise
        return handle

    def read(self, sha256: str) -> bytes:
        """All of the blob's bytes, verified. Errors as `open_verified`."""
        with self.open_verified(sha256) as handle:
            return handle.read()

    def path_verified(self, sha256: str) -> Path:
        """Where the blob lies, for readers that need a path. Verified now, so open it now. Errors: `open_verified`."""
        self.open_verified(sha256).close()
        return self._path(sha256)

    def delete(self, sha256: str) -> None:
        """Remove the name. Whoever has the blob open reads on."""
        self._path(sha256).unlink(missing_ok=True)

    def sweep_temp(self, older_than_s: float) -> int:
        """Remove what writers that were killed have left behind; how many files that were."""
        removed = 0
        oldest = time.time() - older_than_s
        for path in self._temp.iterdir():
            # A writer may finish, or another sweep be quicker, between the listing and this line.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    removed += 1
        return removed

    def _path(self, sha256: str) -> Path:
        """The only place where a name becomes a path."""
        if not is_sha256(sha256):
            raise NotFound(f"{sha256[:80]!r} names no blob: a blob's name is 64 lower-case hexadecimal digits")
        return self.root / sha256[:2] / sha256

    def _set_aside(self, path: Path, damaged: BinaryIO) -> None:
        aside = self._quarantine / f"{path.name}.{time.time_ns()}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return  # another reader found the same and was quicker
        if not os.path.samestat(aside.stat(), os.fstat(damaged.fileno())):
            # Between our reading and our renaming somebody stored the blob anew: that file is good, put it back.
            aside.rename(path)
            return
        _sync_folder(path.parent)


class BlobWriter:
    """Takes a blob in pieces. Without `commit`, leaving the `with` block removes all trace of it."""

    def __init__(self, store: BlobStore, max_bytes: int | None) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self._size = 0
        with _no_room_is_storage_full(store.root):
            fd, name = tempfile.mkstemp(dir=store._temp)
        self._file = os.fdopen(fd, "wb", buffering=CHUNK_BYTES)
        self._temp_path: Path | None = Path(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size_bytes(self) -> int:
        """Bytes taken so far."""
        return self._size

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Raises TooLarge for the chunk that passes `max_bytes`, and StorageFull when there is no room."""
        self._size += len(chunk)
        if self._max_bytes is not None and self._size > self._max_bytes:
            raise TooLarge(
                f"more than {self._max_bytes} bytes; this service takes no more", limit_bytes=self._max_bytes
            )
        self._hash.update(chunk)
        with _no_room_is_storage_full(self._store.root):
            self._file.write(chunk)

    def staged(self) -> tuple[Path, str]:
        """Where the bytes taken so far lie, and their SHA-256, for a look at them before they are kept."""
        assert self._temp_path is not None, "the writer has ended"
        with _no_room_is_storage_full(self._store.root):
            self._file.flush()
        return self._temp_path, self._hash.hexdigest()

    def commit(self, expected_sha256: str | None = None) -> tuple[str, int]:
        """Make the blob durable under its name: its SHA-256 and its size. Ends the writer."""
        assert self._temp_path is not None, "the writer has ended"
        sha256 = self._hash.hexdigest()
        if expected_sha256 is not None and sha256 != expected_sha256:
            raise BlobCorrupt(f"the bytes that came are {sha256}, not {expected_sha256}; send them again")
        path = self._store._path(sha256)
        with _no_room_is_storage_full(self._store.root):
            self._file.flush()
            os.fchmod(self._file.fileno(), stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
            os.fsync(self._file.fileno())
            try:
                path.parent.mkdir()
            except FileExistsError:
                pass
            else:
                _sync_folder(self._store.root)
            # Also over a file of that name: it holds the same bytes, or it is damaged and healed by this.
            if path.is_dir() and not path.is_symlink():
                path.rename(self._store._quarantine / f"{path.name}.{time.time_ns()}")
            self._temp_path.rename(path)
            self._temp_path = None
            _sync_folder(path.parent)
        self.close()
        return sha256, self._size

    def close(self) -> None:
        """Give up, unless committed."""
        # Closing writes what is still buffered, which fails again on a full disk; it is thrown away anyway.
        with contextlib.suppress(OSError):
            self._file.close()
        if self._temp_path is not None:
            self._temp_path.unlink(missing_ok=True)
            self._temp_path = None


def _sync_folder(folder: Path) -> None:
    """A rename survives a power cut only once its folder is on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _no_room_is_storage_full(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise StorageFull(f"no room is left for blobs below {root}: free some space, then try again") from error
