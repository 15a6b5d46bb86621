"""Weights on disk in Hugging Face style: safetensors files, alone or as shards with an index.

A safetensors file is eight bytes (the length of the header, little endian), a header in JSON (``{name: {"dtype",
"shape", "data_offsets"}}``, and strings under ``__metadata__``), and the tensors' bytes without a gap. Files come from
strangers and over broken connections, so all of the header is checked against the rules of the format and against the
file's size before a byte of a tensor is read: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from tiering.errors import WeightsError
from tiering.strict_json import FormatError, natural, parse, short, strings
from tiering.text import shorten

_MOST_HEADER = 100_000_000  # bytes; the format's own limit, which also holds for an index here
_PIECE = 1 << 20  # bytes
_INDEX = ".safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".bin.index.json")
_FIELDS = {"dtype", "shape", "data_offsets"}
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def nbytes_of(dtype: str, numel: int) -> int:
    """Bytes of ``numel`` elements of ``dtype``, the format's word for it."""
    return numel * _BITS[dtype] // 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``nbytes`` at byte ``offset`` of ``file``. ``dtype`` is the format's word for it: "F32", "BF16" and so on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.nbytes * 8 // _BITS[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element; ValueError for dtypes of less than a byte."""
        if _BITS[self.dtype] % 8:
            raise ValueError(f"{self.name!r} is {self.dtype}, whose elements are not whole bytes")
        return _BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What tells whether a file is still the one whose header was read."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, fd: int) -> FileVersion:
        """That of an open file."""
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Sums(Protocol):
    """What the pages of a file should be."""

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """The first of ``pages`` pages in memory at ``address`` that is not page ``page + i`` of the file."""


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of one file, or of the shards that an index names. ``metadata`` are the files' own words.

    A tensor that lies in several places is the ``parts`` of its name, one after the other. Files with ``sums`` are
    compared with them as they are read.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    versions: Mapping[Path, FileVersion]
    parts: Mapping[str, tuple[StoredTensor, ...]] = field(default_factory=dict)
    sums: Mapping[Path, Sums] = field(default_factory=dict)

    def parts_of(self, tensor: StoredTensor) -> tuple[StoredTensor, ...]:
        """Where the elements of ``tensor`` lie."""
        return self.parts.get(tensor.name, (tensor,))


def open_weights(path: Path | str) -> WeightFiles:
    """What ``path`` holds: a .safetensors file, an index of shards (.safetensors.index.json), or a directory with one.

    Raises WeightsError, which names file, tensor and remedy, unless everything about the files is as it should be;
    no tensor is read.
    """
    path = Path(path)
    if path.is_dir():
        path = _weights_in(path)
    if path.name.endswith(_PICKLES):
        raise _pickled(path)
    if path.name.endswith(_INDEX):
        return _open_shards(path)
    header = _Header.read(path)
    return WeightFiles(
        path, MappingProxyType(header.tensors), MappingProxyType(header.metadata), {path: header.version}
    )


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with opened(one.file) as first, opened(other.file) as second:
        for at in range(0, one.nbytes, _PIECE):
            nbytes = min(_PIECE, one.nbytes - at)
            content = _read(first, one.file, one.offset + at, nbytes)
            if content != _read(second, other.file, other.offset + at, nbytes):
                return False
    return True


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the regular file ``path``. Raises WeightsError if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    except OSError as error:
        raise unopened(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise damaged(
                path, "it is not a regular file", "name a .safetensors file or a directory with one"
            )
        yield fd
    finally:
        os.close(fd)


def damaged(file: Path, what: str, remedy: str = "download it again") -> WeightsError:
    """``file`` is not what it should be."""
    return WeightsError(f"{file}: {what}", remedy)


def unopened(path: Path, error: OSError) -> WeightsError:
    """``path`` could not be opened, because of ``error``."""
    if error.errno != errno.ENOENT:
        too_many = error.errno in (errno.EMFILE, errno.ENFILE)
        remedy = "raise the limit with ulimit -n" if too_many else "change its mode or name another"
        return damaged(path, f"it cannot be opened: {error.strerror}", remedy)
    if path.is_symlink():
        return damaged(path, "it is a symbolic link to a file that is gone")
    return damaged(path, "it does not exist", "name a .safetensors file or a directory with one")


@dataclass(frozen=True)
class _Header:
    """What a file says of itself, and is true."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    version: FileVersion

    @classmethod
    def read(cls, path: Path) -> _Header:
        with opened(path) as fd:
            version = FileVersion.of(fd)
            text = _header_text(path, fd, version.nbytes)
        begin = 8 + len(text)
        try:
            entries = parse(text, natural)
            metadata = strings(entries, "__metadata__")
            stored = [_stored(name, entry, path, begin) for name, entry in entries.items()]
            _check_layout(stored, begin, version.nbytes)
        except FormatError as wrong:
            raise damaged(path, f"its header is damaged: {wrong}") from None
        return cls({tensor.name: tensor for tensor in stored}, metadata, version)


def _header_text(path: Path, fd: int, size: int) -> bytes:
    first = _read(fd, path, 0, min(size, 40))
    if first.startswith(b"version https://git-lfs"):
        raise damaged(path, "it is a Git LFS pointer, which stands for the file", "run git lfs pull there")
    length = int.from_bytes(first[:8], "little")
    if size < 8 or length > size - 8 or length > _MOST_HEADER:
        what = "it has no room for a header" if size < 8 else f"it claims a header of {length} bytes"
        raise damaged(path, f"{what}, and is {size} bytes long: truncated, or no safetensors file")
    if length == 0 or first[8:9] != b"{":
        raise damaged(path, "its header does not begin with '{': it is no safetensors file")
    return _read(fd, path, 8, length)


def _read(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    try:
        content = os.pread(fd, nbytes, offset)
    except OSError as error:
        raise damaged(path, f"reading it at byte {offset} failed: {error.strerror}", "see dmesg") from error
    if len(content) != nbytes:
        raise damaged(path, f"it ends at byte {offset + len(content)}: somebody is changing it")
    return content


def _stored(name: str, entry: Any, file: Path, begin: int) -> StoredTensor:
    called = short.repr(name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise FormatError(f"{called} does not have a dtype, a shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise FormatError(f"{called} has a dtype that nobody knows, {short.repr(dtype)}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise FormatError(f"{called} has a shape or data_offsets that are not lists of whole numbers")
    numel = 1
    for size in shape:
        numel *= size
        if numel >= 1 << 63:
            raise FormatError(f"{called} has a shape of more elements than 63 bits can count")
    start, end = offsets
    if numel * _BITS[dtype] != (end - start) * 8:
        length = f"{end - start} bytes for {dtype} {short.repr(shape)}"
        raise FormatError(f"{called} has data_offsets {start} to {end}, {length}")
    return StoredTensor(name, dtype, tuple(shape), file, begin + start, end - start)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # True is an int


def _check_layout(stored: list[StoredTensor], begin: int, size: int) -> None:
    """The tensors fill the file from ``begin`` to its end, each byte once."""
    ordered = sorted(stored, key=lambda tensor: (tensor.offset, tensor.nbytes))
    end, last = begin, "the header"
    for tensor in ordered:
        if tensor.offset != end:
            how = "leaves a hole after" if tensor.offset > end else "overlaps"
            raise FormatError(f"{short.repr(tensor.name)} {how} {last}")
        end, last = end + tensor.nbytes, short.repr(tensor.name)
    if end != size:
        how = "truncated" if size < end else "something was appended"
        raise FormatError(f"its tensors end at byte {end}, but the file at byte {size} ({how})")


def _weights_in(directory: Path) -> Path:
    """The file in ``directory`` to start from: the one of the usual name, else the only one."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise unopened(directory, error) from error
    usual = [name for name in names if name in ("model.safetensors", "model" + _INDEX)]
    indices = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    candidates = usual or indices or files
    if len(candidates) == 1:
        return directory / candidates[0]
    if candidates:
        lacking = "" if usual or indices else ", and no index that says which belong together"
        raise damaged(directory, f"it holds {_shorten(tuple(candidates))}{lacking}", "name the file to take")
    pickled = [name for name in names if name.endswith(_PICKLES)]
    if pickled:
        raise _pickled(directory / pickled[0])
    raise damaged(
        directory, "there is no .safetensors file in it", "name the directory that holds the weights"
    )


def _pickled(path: Path) -> WeightsError:
    return damaged(
        path,
        "it is a pickle, which can run any code when it is read, and is not read here",
        "convert it where you trust it: from_pretrained(DIR).save_pretrained(NEW_DIR) in transformers",
    )


def _open_shards(index: Path) -> WeightFiles:
    """The shards that ``index`` names, each with the tensors that it says and no others."""
    with opened(index) as fd:
        size = os.fstat(fd).st_size
        if size > _MOST_HEADER:
            raise damaged(index, f"it is {size} bytes long, which no index is")
        text = _read(fd, index, 0, size)
    try:
        weight_map = _weight_map(parse(text))
    except FormatError as wrong:
        raise damaged(index, f"it is damaged: {wrong}") from None
    named: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        named.setdefault(shard, set()).add(name)
    absent = tuple(shard for shard in sorted(named) if not (index.parent / shard).exists())
    if absent:
        raise damaged(
            index, f"it names {_shorten(absent)}, which is not there", "download the rest of the shards"
        )
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    versions: dict[Path, FileVersion] = {}
    for shard in sorted(named):
        file = index.parent / shard
        header = _Header.read(file)
        _check_shard(file, header.tensors.keys(), named[shard], weight_map)
        tensors |= header.tensors
        metadata = header.metadata | metadata
        versions[file] = header.version
    in_order = {name: tensors[name] for name in weight_map}
    return WeightFiles(index, MappingProxyType(in_order), MappingProxyType(metadata), versions)


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    """The shard of each tensor: a file beside the index, and nowhere else."""
    if "weight_map" not in index:
        raise FormatError("it has no 'weight_map'")
    weight_map = strings(index, "weight_map")
    for name, shard in weight_map.items():
        if not shard.endswith(".safetensors") or any(mark in shard for mark in "/\\\0"):
            where = f"{short.repr(name)} in {short.repr(shard)}"
            raise FormatError(f"it keeps {where}, which is no .safetensors file beside it")
    return weight_map


def _check_shard(
    file: Path, stored: Collection[str], promised: Collection[str], weight_map: Mapping[str, str]
) -> None:
    """A shard has what the index promises, and nothing that the index keeps elsewhere or does not know."""
    both = "index and shards are of different saves: download all of them again"
    lacking = tuple(sorted(set(promised) - set(stored)))
    if lacking:
        raise damaged(file, f"it lacks {_shorten(lacking)}, which the index keeps in it", both)
    elsewhere = tuple(sorted(set(stored) - set(promised)))
    twice = tuple(name for name in elsewhere if name in weight_map)
    if twice:
        other = short.repr(weight_map[twice[0]])
        raise damaged(file, f"it has {_shorten(twice)}, which the index keeps in {other}", both)
    if elsewhere:
        raise damaged(file, f"it has {_shorten(elsewhere)}, which the index does not name", both)


def _shorten(names: tuple[str, ...]) -> str:
    return shorten(tuple(short.repr(name) for name in names))
