"""BlobStore: whole or not at all, and never other bytes than the name says."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuning_db.blobs import CHUNK_BYTES, BlobStore
from tuning_db.errors import BlobCorrupt, NotFound, TooLarge

DATA = b"a library" * 1000
NAME = hashlib.sha256(DATA).hexdigest()


def put(blobs: BlobStore, data: bytes = DATA) -> str:
    return blobs.put(io.BytesIO(data))[0]


def on_disk(blobs: BlobStore) -> list[str]:
    """Every file below the root, by its path from there."""
    return sorted(str(p.relative_to(blobs.root)) for p in blobs.root.rglob("*") if p.is_file())


def overwrite(path: Path, data: bytes) -> None:
    """Put other bytes into a blob's file behind the store's back, keeping the file itself."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.binary(max_size=300)))
def test_round_trip(blobs: BlobStore, chunks: list[bytes]) -> None:
    """Bytes come back as they went in, however they were cut, under the SHA-256 of all of them."""
    data = b"".join(chunks)
    with blobs.writer() as writer:
        for chunk in chunks:
            writer.write(chunk)
        assert writer.commit() == (hashlib.sha256(data).hexdigest(), len(data))
    assert blobs.read(hashlib.sha256(data).hexdigest()) == data


def test_put_a_file(blobs: BlobStore, tmp_path: Path) -> None:
    """A file larger than one portion is stored, and the file itself stays."""
    source = tmp_path / "model.onnx"
    source.write_bytes(os.urandom(2 * CHUNK_BYTES + 17))
    sha256, size = blobs.put(source, hashlib.sha256(source.read_bytes()).hexdigest())
    assert size == source.stat().st_size
    assert blobs.path_verified(sha256).read_bytes() == source.read_bytes()
    assert on_disk(blobs) == [f"{sha256[:2]}/{sha256}"]


def test_expected_hash(blobs: BlobStore) -> None:
    """Bytes that are not the ones announced are refused, and nothing of them stays."""
    with pytest.raises(BlobCorrupt, match="send them again"):
        blobs.put(io.BytesIO(DATA), "0" * 64)
    assert on_disk(blobs) == []


def test_too_large(blobs: BlobStore) -> None:
    """A stream is refused with the chunk that passes the limit, not at its end, and nothing of it stays."""

    class Endless:
        taken = 0

        def read(self, size: int, /) -> bytes:
            self.taken += size
            return bytes(size)

    stream = Endless()
    with pytest.raises(TooLarge) as caught:
        blobs.put(stream, max_bytes=3 * CHUNK_BYTES)
    assert caught.value.limit_bytes == 3 * CHUNK_BYTES
    assert stream.taken == 4 * CHUNK_BYTES
    assert on_disk(blobs) == []


def test_exactly_the_limit(blobs: BlobStore) -> None:
    """As many bytes as the limit are not too many."""
    assert blobs.put(io.BytesIO(DATA), max_bytes=len(DATA)) == (NAME, len(DATA))


def test_given_up(blobs: BlobStore) -> None:
    """A writer that is left without commit, or by an error, leaves nothing behind."""
    with blobs.writer() as writer:
        writer.write(DATA)
        assert len(on_disk(blobs)) == 1
    assert on_disk(blobs) == []

    def interrupted() -> None:
        with blobs.writer() as writer:
            writer.write(DATA)
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        interrupted()
    assert on_disk(blobs) == []
    assert not blobs.exists(NAME)


def test_two_writers_of_the_same(blobs: BlobStore) -> None:
    """Ten writers of the same bytes at once all succeed, and one file stays (gradle-cache-action#176)."""
    barrier = threading.Barrier(10)

    def write(_: int) -> str:
        with blobs.writer() as writer:
            writer.write(DATA[:100])
            barrier.wait(timeout=60)
            writer.write(DATA[100:])
            return writer.commit()[0]

    with ThreadPoolExecutor(10) as pool:
        assert set(pool.map(write, range(10))) == {NAME}
    assert on_disk(blobs) == [f"{NAME[:2]}/{NAME}"]
    assert blobs.read(NAME) == DATA


@pytest.mark.parametrize(
    "damaged", [b"A" + DATA[1:], DATA[:-1], DATA + b"x", b""], ids=["altered", "truncated", "appended", "emptied"]
)
def test_damaged(blobs: BlobStore, damaged: bytes) -> None:
    """A damaged file is never given out: an error once, then it is in quarantine and missing (artifact-keeper#3152)."""
    put(blobs)
    path = blobs.path_verified(NAME)
    overwrite(path, damaged)
    with pytest.raises(BlobCorrupt, match=NAME):
        blobs.open_verified(NAME)
    with pytest.raises(NotFound):
        blobs.open_verified(NAME)
    (aside,) = (blobs.root / "quarantine").iterdir()
    assert aside.read_bytes() == damaged
    assert put(blobs) == NAME
    assert blobs.read(NAME) == DATA


def test_altered_between_reads(blobs: BlobStore) -> None:
    """A byte altered after the blob was read once, with the file's size and times set back, is not served."""
    put(blobs)
    assert blobs.read(NAME) == DATA
    path = blobs.path_verified(NAME)
    before = path.stat()
    overwrite(path, b"A" + DATA[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(BlobCorrupt):
        blobs.read(NAME)


def test_put_heals(blobs: BlobStore) -> None:
    """Storing the same bytes again replaces a file that was damaged meanwhile."""
    put(blobs)
    overwrite(blobs.path_verified(NAME), b"damaged")
    put(blobs)
    assert blobs.read(NAME) == DATA


def test_quarantine_spares_a_healed_blob(blobs: BlobStore) -> None:
    """A reader that found damage does not take away the good file that was stored while it read."""
    put(blobs)
    path = blobs.path_verified(NAME)
    overwrite(path, b"damaged")
    with path.open("rb") as damaged:
        put(blobs)
        blobs._set_aside(path, damaged)
    assert blobs.read(NAME) == DATA
    assert on_disk(blobs) == [f"{NAME[:2]}/{NAME}"]


def test_open_handle_outlives_its_name(blobs: BlobStore) -> None:
    """A download that has begun ends well when the blob is removed; the next one is a miss (bazel-remote#893)."""
    put(blobs)
    with blobs.open_verified(NAME) as handle:
        assert handle.read(10) == DATA[:10]
        blobs.delete(NAME)
        assert handle.read() == DATA[10:]
    with pytest.raises(NotFound):
        blobs.open_verified(NAME)
    blobs.delete(NAME)


@pytest.mark.parametrize(
    "name",
    ["", "../" * 3 + "etc/passwd", "/etc/passwd", "%2e%2e%2f" * 3, "a\0b", NAME.upper(), NAME[:-1], NAME + "\n", "tmp"],
)
def test_names(blobs: BlobStore, name: str) -> None:
    """Only 64 lower-case hexadecimal digits ever become a path (marker#1059, cheshire-cat#1135)."""
    put(blobs)
    assert not blobs.exists(name)
    for method in (blobs.open_verified, blobs.read, blobs.path_verified, blobs.delete):
        with pytest.raises(NotFound, match="names no blob"):
            method(name)


def test_link(blobs: BlobStore, tmp_path: Path) -> None:
    """A symbolic link in a blob's place is not followed, even to the right bytes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(DATA)
    (blobs.root / NAME[:2]).mkdir()
    (blobs.root / NAME[:2] / NAME).symlink_to(elsewhere)
    with pytest.raises(NotFound, match="link"):
        blobs.open_verified(NAME)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_no_file(blobs: BlobStore, make: Callable[[Path], None]) -> None:
    """A folder or a pipe in a blob's place is no blob, and gives way when the blob is stored."""
    path = blobs.root / NAME[:2] / NAME
    path.parent.mkdir()
    make(path)
    with pytest.raises(NotFound, match="no file"):
        blobs.open_verified(NAME)
    blobs.put(io.BytesIO(DATA))
    assert blobs.read(NAME) == DATA


def test_no_room(blobs: BlobStore) -> None:
    """When the file cannot grow, the error is StorageFull, whether it shows in a write or only in the commit."""
    # A limit on the process's files is the one kind of "no room" that needs no file system of its own.
    script = """
import io, resource, sys
from pathlib import Path
from tuning_db.blobs import CHUNK_BYTES, BlobStore
from tuning_db.errors import StorageFull
blobs = BlobStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    blobs.ping()
except StorageFull as error:
    print(error)
for size in (5000, 3 * CHUNK_BYTES):
    try:
        blobs.put(io.BytesIO(bytes(size)))
    except StorageFull as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, blobs.root], capture_output=True, text=True, check=True)
    assert done.stdout.count("free some space") == 3
    assert done.stderr == ""
    assert on_disk(blobs) == []


def test_killed_writer(blobs: BlobStore) -> None:
    """A writer killed in the middle leaves no blob, only a temporary file that the sweep removes in its time."""
    script = """
import os, signal, sys
from pathlib import Path
from tuning_db.blobs import CHUNK_BYTES, BlobStore
writer = BlobStore(Path(sys.argv[1])).writer()
writer.write(bytes(2 * CHUNK_BYTES))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, blobs.root], check=False)
    assert done.returncode == -9
    (left,) = on_disk(blobs)
    assert left.startswith("tmp/")
    assert blobs.sweep_temp(older_than_s=3600) == 0
    os.utime(blobs.root / left, (0, 0))
    assert blobs.sweep_temp(older_than_s=3600) == 1
    assert on_disk(blobs) == []
