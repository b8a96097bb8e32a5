# SPDX-License-Identifier: Apache-2.0
"""The machine code of CUDA kernels as it lies in a library or an object file, read without a disassembler.

A compiled CUDA file holds, in its section .nv_fatbin, one cubin (an ELF file) for each compiled source and
architecture. What a kernel does on the device is decided by its own sections there: code, constants, static shared
memory, and attributes such as its registers and the layout of its parameters. None of them holds a name: names of
functions, files and symbols are left out of a digest.
"""

import hashlib
import struct
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
KIND_ELF = 2
SYMBOL_FUNCTION, SYMBOL_ENTRY = 2, 0x10  # type of a function; flag in st_other of a kernel
# Attributes of .nv.info that begin with a symbol's number in the cubin's table.
INFO_FRAME_SIZE, INFO_MIN_STACK, INFO_REGISTERS, INFO_PARAMETER_BANK = 0x11, 0x12, 0x2F, 0x0A


class CubinError(ValueError):
    """A file that does not hold CUDA code as this reader knows it."""


class Elf:
    """Sections and symbols of a 64-bit little-endian ELF file."""

    def __init__(self, data):
        if data[:6] != b"\x7fELF\x02\x01":
            raise CubinError("not a 64-bit little-endian ELF file")
        self.data = data
        (begin,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<HHH", data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, begin + n * size) for n in range(count)]
        self.sections = [Section(self._name(headers[names], header[0]), header) for header in headers]
        self.by_name = {section.name: section for section in self.sections}

    def _name(self, table, offset):
        begin = table[4] + offset
        return self.data[begin : self.data.index(b"\0", begin)].decode()

    def content(self, name):
        """Bytes of a section; none if there is no such section, or it takes no space in the file."""
        section = self.by_name.get(name)
        if section is None or section.takes_no_space:
            return b""
        return self.data[section.offset : section.offset + section.size]

    def symbols(self):
        """[(name, type, st_other, value, size)] in the order of their numbers."""
        table = self.by_name.get(".symtab")
        if table is None:
            return []
        names = self.sections[table.link].header
        entries = struct.iter_unpack("<IBBHQQ", self.content(".symtab"))
        return [
            (self._name(names, name), info & 15, other, value, size) for name, info, other, _, value, size in entries
        ]


class Section:
    def __init__(self, name, header):
        self.name, self.header = name, header
        _, self.type, self.flags, _, self.offset, self.size, self.link, *_ = header

    @property
    def takes_no_space(self):
        return self.type == 8


def cubins(path):
    """[(architecture such as 'sm90', the cubin)] of a library, program or object file."""
    found = []
    for arch, kind, content in _fatbin_entries(Elf(Path(path).read_bytes()).content(".nv_fatbin")):
        if kind != KIND_ELF:
            continue
        if content[:4] != b"\x7fELF":
            raise CubinError(f"{path}: the code for sm_{arch} is compressed; build with nvcc --no-compress")
        found.append((f"sm{arch}", Elf(content)))
    return found


def _fatbin_entries(data):
    """(architecture, kind, content) of everything in a section that is a row of fat binaries."""
    at = 0
    while at + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN_MAGIC:
            at += 8  # padding between two
            continue
        at, end = at + header, at + header + size
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            yield arch, kind, data[at + header : at + header + size]
            at += header + size


def kernel_digests(path):
    """{(architecture, symbol): digest} of every kernel in a file."""
    digests = {}
    for arch, cubin in cubins(path):
        shared = [cubin.content(name) for name in (".nv.global.init", ".nv.constant3")]
        for number, (name, kind, other, *_) in enumerate(cubin.symbols()):
            if kind == SYMBOL_FUNCTION and other & SYMBOL_ENTRY:
                digests[arch, name] = _digest([*shared, *_parts(cubin, name, number)])
    return digests


def toolkit(path):
    """nvcc's full build, 'Build cuda_13.0.r13.0/compiler.36424714_0', as the notes of all cubins must agree on it."""
    builds = {
        line
        for _, cubin in cubins(path)
        for line in _strings(cubin.content(".note.nv.tkinfo"))
        if line.startswith("Build ")
    }
    if len(builds) != 1:
        raise CubinError(
            f"{path}: made by {len(builds)} toolkits ({', '.join(sorted(builds)) or 'no cubin says which'}); "
            "it must be one"
        )
    return builds.pop()


def _strings(data):
    return [part.decode(errors="replace").strip() for part in data.split(b"\0")]


def _parts(cubin, kernel, number):
    """Yields the bytes that decide a kernel's work; none depends on a name."""
    text = cubin.by_name[f".text.{kernel}"]
    yield cubin.content(text.name)
    yield struct.pack("<Q", text.flags)
    yield from (cubin.content(f".nv.constant{bank}.{kernel}") for bank in range(16))
    shared = cubin.by_name.get(f".nv.shared.{kernel}")
    yield struct.pack("<Q", shared.size if shared else 0)
    yield _relocations(cubin, kernel)
    yield _own_attributes(cubin.content(f".nv.info.{kernel}"))
    yield _module_attributes(cubin.content(".nv.info"), number)


def _relocations(cubin, kernel):
    """Packs the places where code is patched when it is loaded, each with its offset into something."""
    symbols, words = cubin.symbols(), []
    for offset, info, addend in struct.iter_unpack("<QQq", cubin.content(f".rela.text.{kernel}")):
        words += [offset, info & 0xFFFFFFFF, addend & 0xFFFFFFFFFFFFFFFF, *symbols[info >> 32][3:]]
    return struct.pack(f"<{len(words)}Q", *words)


def _attributes(data):
    """(attribute, value) of a section .nv.info."""
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != 4:
            yield attribute, struct.pack("<H", value)
            continue
        yield attribute, data[at : at + value]
        at += value


def _own_attributes(data):
    """A kernel's attributes: their values are offsets into its code and sizes, but for one that names a section."""
    return b"".join(
        bytes([attribute]) + (value[4:] if attribute == INFO_PARAMETER_BANK else value)
        for attribute, value in _attributes(data)
    )


def _module_attributes(data, number):
    """Registers, frame and stack of symbol `number`."""
    wanted = {INFO_REGISTERS, INFO_FRAME_SIZE, INFO_MIN_STACK}
    mine = sorted(
        (attribute, value[4:])
        for attribute, value in _attributes(data)
        if attribute in wanted and struct.unpack_from("<I", value)[0] == number
    )
    return b"".join(bytes([attribute]) + value for attribute, value in mine)


def _digest(parts):
    """One hash of parts, whose bounds count."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()
