"""ELF files: which machine they are for, what libraries they need, and what those of 64 bits hold.

Objects and libraries of every CPU, and cubins, which are NVIDIA's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

#: What of a file `machine_of` has to see.
HEAD_BYTES: Final = 20
_HEADER_BYTES: Final = 64
_SHT_GNU_VERNEED: Final = 0x6FFFFFFE  #: a section's type
_STB_GLOBAL: Final = 1  #: a symbol's binding
_ET_REL: Final = 1  #: a file's type, of object files


def machine_of(head: bytes) -> tuple[int, int]:
    """A file's e_machine and class (1: 32 bits, 2: 64 bits), by its first `HEAD_BYTES`. ValueError if it is none."""
    if len(head) < HEAD_BYTES or head[:4] != b"\x7fELF":
        raise ValueError("no ELF file")
    return int.from_bytes(head[18:20], "little" if head[5] == 1 else "big"), head[4]


@dataclass(frozen=True, slots=True)
class _Section:
    name: int
    type: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    section: int
    value: int
    at: int  #: where in the file its entry is


class Elf:
    """A little-endian file, as all devices here have it. ValueError or struct.error for anything else, and for symbols
    of a file of 32 bits."""

    def __init__(self, data: bytes) -> None:
        if len(data) < _HEADER_BYTES or data[:4] != b"\x7fELF" or data[4] not in (1, 2) or data[5] != 1:
            raise ValueError("no little-endian ELF file")
        self._data = data
        self._wide = data[4] == 2
        self.abi_version = data[8]
        (self.type,) = struct.unpack_from("<H", data, 16)
        self.machine, _ = machine_of(data)
        (sections_at,) = struct.unpack_from("<Q", data, 40) if self._wide else struct.unpack_from("<I", data, 32)
        (self.flags,) = struct.unpack_from("<I", data, 48 if self._wide else 36)
        entry_size, count, names = struct.unpack_from("<HHH", data, 58 if self._wide else 46)
        if names >= count:
            raise ValueError("an ELF file without names of its sections")
        self._headers = [sections_at + entry_size * index for index in range(count)]
        self._sections = [self._section(at) for at in self._headers]
        self.section_names = [self._name(self._sections[names], section.name) for section in self._sections]

    def versions_needed(self) -> Iterator[tuple[str, str]]:
        """Each library of which this one needs a version, and the version: ("libm.so.6", "GLIBC_2.29"). Whoever loads
        it refuses it where the library there has no such version."""
        for section in self._sections:
            if section.type != _SHT_GNU_VERNEED:
                continue
            strings, at, following = self._sections[section.link], section.offset, 1
            while following:
                _, count, library, first, following = struct.unpack_from("<HHIII", self._data, at)
                entry = at + first
                for _ in range(count):
                    _, _, _, version, step = struct.unpack_from("<IHHII", self._data, entry)
                    yield self._name(strings, library), self._name(strings, version)
                    entry += step
                at += following

    def offset_of(self, symbol: str) -> int:
        """Where in the file a symbol's data begins."""
        found = self._find(symbol)
        place = self._sections[found.section]
        # In an object file a value counts from its section, in a library from the whole.
        return place.offset + found.value - (0 if self.type == _ET_REL else place.address)

    def with_data(self, symbol: str, data: bytes) -> bytes:
        """This object file with other data for a symbol that is the only one in its section.

        The data goes to the file's end, and the headers point there.
        """
        found = self._find(symbol)
        if self.type != _ET_REL or sum(other.section == found.section for other in self._symbols()) != 1:
            raise ValueError(f"{symbol} is not alone in a section of an object file")
        file = bytearray(self._data)
        file += bytes(-len(file) % 64)
        struct.pack_into("<QQ", file, self._headers[found.section] + 24, len(file), len(data))
        struct.pack_into("<Q", file, found.at + 16, len(data))
        return bytes(file) + data

    def _find(self, name: str) -> _Symbol:
        for symbol in self._symbols():
            if symbol.name == name:
                return symbol
        raise ValueError(f"no symbol {name}")

    def _symbols(self) -> Iterator[_Symbol]:
        """Each symbol that is defined here for others: assemblers add marks of their own."""
        if not self._wide:
            raise ValueError("no 64-bit ELF file")
        for table in self._sections:
            if table.type not in (2, 11) or table.link >= len(self._sections):  # SHT_SYMTAB, SHT_DYNSYM
                continue
            for at in range(table.offset, table.offset + table.size, 24):
                name, info, _other, section, value = struct.unpack_from("<IBBHQ", self._data, at)
                if info >> 4 == _STB_GLOBAL and 0 < section < len(self._sections):
                    yield _Symbol(self._name(self._sections[table.link], name), section, value, at)

    def _section(self, at: int) -> _Section:
        layout = "<IIQQQQI" if self._wide else "<IIIIIII"
        name, kind, _flags, address, offset, size, link = struct.unpack_from(layout, self._data, at)
        return _Section(name, kind, address, offset, size, link)

    def _name(self, strings: _Section, offset: int) -> str:
        start = strings.offset + offset
        return self._data[start : self._data.index(b"\0", start)].decode()
