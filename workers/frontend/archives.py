"""Reads an uploaded zip or tar of a model and its data files, as hostile as such a file can be.

No member's name ever becomes a path: members are looked up by name in a dictionary, and their bytes are read where
they lie in a tar, or from a nameless temporary file that one was unpacked into from a zip. What is no plain file is
refused, links and devices for what they are, and so are names that lead outside and names that stand twice. Sizes
that headers claim are bounds for reading, never promises.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Self

from tuning_db.errors import InvalidModel, StorageFull

#: What all members together may unpack to: so many times the archive, and this for small ones, and this at most.
#: Weights hardly pack.
_MOST_TIMES: Final = 8
_AND_BYTES: Final = 64 << 20
MOST_BYTES: Final = 16 << 30
_MOST_MEMBERS: Final = 4096
_LONGEST_NAME: Final = 1000
#: Blocks in front of a tar's member that hold names and attributes. tarfile reads them whole, each within the other.
_LONGEST_HEADER_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 20

#: First bytes of what people send instead.
_OTHERS: Final = {
    b"\x1f\x8b": "a gzip",
    b"BZh": "a bzip2",
    b"\xfd7zXZ\x00": "an xz",
    b"\x28\xb5\x2f\xfd": "a zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7z",
    b"Rar!\x1a\x07": "a rar",
}


@dataclass(slots=True)
class Member:
    """A plain file of an archive: `size_bytes` from `offset` on in `file`, which is opened when it is asked for."""

    name: str
    size_bytes: int
    _archive: Archive
    _tar_offset: int | None = None
    _zip: zipfile.ZipInfo | None = None
    _unpacked: BinaryIO | None = field(default=None, repr=False)

    def chunks(self, offset: int, length: int) -> Iterator[bytes]:
        """The bytes from `offset` on, `length` of them, in pieces. The range must lie inside the member."""
        assert 0 <= offset <= offset + length <= self.size_bytes
        if self._tar_offset is not None:
            file, start = self._archive.file, self._tar_offset
        else:
            if self._unpacked is None:
                self._unpacked = self._archive.unpack(self)
            file, start = self._unpacked, 0
        while length:
            file.seek(start + offset)
            chunk = file.read(min(length, _CHUNK_BYTES))
            if not chunk:
                raise InvalidModel(f"the archive ends within its member {shown(self.name)}; send it again")
            yield chunk
            offset += len(chunk)
            length -= len(chunk)

    def read(self) -> bytes:
        return b"".join(self.chunks(0, self.size_bytes))


class Archive:
    """An opened zip or tar. `members` are its plain files by name; the bytes of none have been read."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.file: BinaryIO = stack.enter_context(path.open("rb"))
        self.size_bytes = path.stat().st_size
        self.members: dict[str, Member] = {}
        self._folder = path.parent if os.access(path.parent, os.W_OK) else None
        self._stack = stack
        self._zip: zipfile.ZipFile | None = None

    def model(self) -> Member:
        """The one ONNX file among the members."""
        found = [
            name
            for name in self.members
            # What macOS adds to its archives begins so.
            if name.lower().endswith(".onnx") and not posixpath.basename(name).startswith("._")
        ]
        if len(found) == 1:
            return self.members[found[0]]
        if found:
            raise InvalidModel(f"the archive holds {len(found)} .onnx files, {listed(found)}; send one of them")
        raise InvalidModel(f"the archive holds no .onnx file; it holds {listed(list(self.members))}")

    def unpack(self, member: Member) -> BinaryIO:
        """A member of a zip in a temporary file beside the archive, which goes with this process, however it ends."""
        assert self._zip is not None
        assert member._zip is not None
        try:
            temporary = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - the stack closes it
            target: BinaryIO = self._stack.enter_context(temporary)
            left = member.size_bytes
            with self._zip.open(member._zip) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        break
                    target.write(chunk)
            target.flush()
        except (InvalidModel, MemoryError):
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFull("no room is left to unpack the model; free some space, then try again") from None
            raise _damaged(member.name) from None
        except Exception:  # zipfile raises whatever it runs into, zlib.error and RuntimeError among it
            raise _damaged(member.name) from None
        if left:
            raise InvalidModel(f"the zip claims another size for {shown(member.name)} than it holds; pack it again")
        return target

    def _add(self, member: Member) -> None:
        if member.name in self.members:
            raise InvalidModel(f"the archive holds {shown(member.name)} twice; pack it again")
        self.members[member.name] = member

    def _read_tar(self) -> None:
        total = 0
        try:
            tar = self._stack.enter_context(_Tar(fileobj=self.file, errorlevel=2))
            for count, info in enumerate(tar, start=1):
                name = self._name(info.name, count)
                if info.isdir():
                    continue
                for what, is_one in (("a symbolic link", info.issym()), ("a hard link", info.islnk())):
                    if is_one:
                        raise InvalidModel(f"{shown(name)} is {what} in the archive; pack the file itself")
                if not info.isreg() or info.issparse():
                    raise InvalidModel(f"{shown(name)} is no plain file in the archive; pack plain files only")
                total += info.size
                if info.size < 0 or info.offset_data + info.size > self.size_bytes:
                    raise InvalidModel(f"the archive ends within its member {shown(name)}; send it again")
                self._bound(total)
                self._add(Member(name, info.size, self, _tar_offset=info.offset_data))
        except (InvalidModel, MemoryError):
            raise
        except Exception:  # tarfile raises whatever it runs into
            raise InvalidModel("the tar is damaged; pack it again") from None
        if not tar.at_end:
            raise InvalidModel("the tar ends without its mark, so a part of it is missing; send it again")

    def _read_zip(self) -> None:
        total = 0
        try:
            self._zip = self._stack.enter_context(zipfile.ZipFile(self.file))
            for count, info in enumerate(self._zip.infolist(), start=1):
                name = self._name(info.orig_filename, count)
                kind = stat.S_IFMT(info.external_attr >> 16)
                if stat.S_ISLNK(kind):
                    raise InvalidModel(f"{shown(name)} is a symbolic link in the archive; pack the file itself")
                if kind and not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                    raise InvalidModel(f"{shown(name)} is no plain file in the archive; pack plain files only")
                if info.is_dir():
                    continue
                if info.flag_bits & 1:
                    raise InvalidModel(f"{shown(name)} is encrypted; pack it without a password")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise InvalidModel(
                        f"{shown(name)} is compressed in a way that is not read; store or deflate the members of a zip"
                    )
                total += info.file_size
                self._bound(total)
                self._add(Member(name, info.file_size, self, _zip=info))
        except (InvalidModel, MemoryError):
            raise
        except Exception:  # zipfile raises whatever it runs into
            raise InvalidModel("the zip is damaged; pack it again") from None

    def _name(self, name: str, count: int) -> str:
        if count > _MOST_MEMBERS:
            raise InvalidModel(f"the archive has more than {_MOST_MEMBERS} members; pack the model and its data alone")
        if len(name) > _LONGEST_NAME:
            raise InvalidModel(f"the archive has a member whose name is longer than {_LONGEST_NAME} characters")
        inside = inner_path(name)
        if inside is None:
            raise InvalidModel(f"the archive has a member that would lie outside of it, {shown(name)}; pack it again")
        return inside

    def _bound(self, total_bytes: int) -> None:
        most = min(_MOST_TIMES * self.size_bytes + _AND_BYTES, MOST_BYTES)
        if total_bytes > most:
            raise InvalidModel(
                f"the archive of {self.size_bytes} bytes unpacks to {total_bytes} or more, and {most} are taken; "
                "pack the model without compression, or as a tar"
            )


class _Tar(tarfile.TarFile):
    """Reads headers of bounded size, and knows whether it stopped at the archive's mark."""

    at_end = False

    class Header(tarfile.TarInfo):
        @classmethod
        def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
            try:
                return super().fromtarfile(tar)
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                assert isinstance(tar, _Tar)
                tar.at_end = True
                raise

        def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
            extended = self.type in (
                tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
                tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
            )  # fmt: skip
            if self.size < 0 or (extended and self.size > _LONGEST_HEADER_BYTES):
                raise InvalidModel("the tar has a member whose name or attributes are too long; pack it again")
            member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
            return member

    tarinfo = Header


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Archive | None]:
    """The archive that the file is, told by its content, or None if it is none. InvalidModel for one that is refused,
    and for archives of other kinds."""
    with path.open("rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            raise InvalidModel(f"the file is {name} archive; send the model, or a zip or an uncompressed tar of it")
    with contextlib.ExitStack() as stack:
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            archive = Archive(path, stack)
            archive._read_zip()
        elif _is_tar_header(head):
            archive = Archive(path, stack)
            archive._read_tar()
        else:
            yield None
            return
        yield archive


def inner_path(name: str) -> str | None:
    """`name` as a path inside an archive, "./" and the like left out; None if it is none or leads outside."""
    if not name or name.startswith("/") or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        return None
    steps = [step for step in name.split("/") if step not in ("", ".")]
    return None if ".." in steps else "/".join(steps) or "."


def shown(name: str) -> str:
    """A name from the upload as messages repeat it."""
    return repr(name if len(name) <= 80 else name[:79] + "…")


def listed(names: list[str]) -> str:
    """Some of the names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(shown, names[:5])) or "no file") + more


def _is_tar_header(head: bytes) -> bool:
    """Whether the sum that a tar's first block holds of itself is right."""
    if len(head) < tarfile.BLOCKSIZE:
        return False
    try:
        wanted = tarfile.nti(head[148:156])  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        return False
    return bool(any(head)) and wanted in tarfile.calc_chksums(head)  # type: ignore[attr-defined]


def _damaged(name: str) -> InvalidModel:
    return InvalidModel(f"the zip's member {shown(name)} is damaged; pack it again")
