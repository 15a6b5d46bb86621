"""Weights on disk in Hugging Face's format: one safetensors file, or shards with an index.

A safetensors file has eight bytes (the length of the header, little endian), a header in JSON (``{name: {"dtype",
"shape", "data_offsets"}}``, and strings under ``__metadata__``), and the bytes of the tensors without gaps. Files may
be malicious or truncated, so the whole header is checked against the format and the size of the file before a tensor
is read: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from tiering._strict_json import FormatError, natural, parse, short, strings
from tiering._text import shorten
from tiering.errors import WeightsError
from tiering.storage.file_system import FileVersion, unopened

# Bytes. The limit of the format for a header; also used for an index.
_MOST_HEADER = 100_000_000
# Bytes per read.
_PIECE = 1 << 20
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
    """Bytes of ``numel`` elements of ``dtype``, by its name in the format."""
    return numel * _BITS[dtype] // 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of ``nbytes`` at byte ``offset`` of ``file``. ``dtype`` is its name in the format, such as "BF16".

    An F32 tensor may be in ``halves``, tensors of the upper and of the lower 16 bits of its elements; then ``file`` and
    ``offset`` are those of the first of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    halves: tuple[StoredTensor, StoredTensor] | None = None

    @classmethod
    def joined(cls, upper: StoredTensor, lower: StoredTensor) -> Self:
        """The F32 tensor whose elements have these ``halves``, both U16."""
        nbytes = upper.nbytes + lower.nbytes
        return cls(upper.name, "F32", upper.shape, upper.file, upper.offset, nbytes, (upper, lower))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.nbytes * 8 // _BITS[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element; ValueError for dtypes of less than a byte."""
        if _BITS[self.dtype] % 8:
            raise ValueError(f"{self.name!r} is {self.dtype}, whose elements are not whole bytes")
        return _BITS[self.dtype] // 8

    def range(self, first: int, numel: int) -> StoredTensor:
        """``numel`` elements from ``first`` on, flat, under the same name."""
        if self.halves is not None:
            upper, lower = self.halves
            joined = self.joined(upper.range(first, numel), lower.range(first, numel))
            # The halves may have other names: a tensor of several tiles has another name than they.
            return replace(joined, name=self.name)
        offset, nbytes = (nbytes_of(self.dtype, each) for each in (first, numel))
        return replace(self, shape=(numel,), offset=self.offset + offset, nbytes=nbytes)


class Sums(Protocol):
    """The checksums of a file's pages."""

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """The first of ``pages`` pages in memory at ``address`` that differs from the file, which starts at ``page``.

        Returns a page number of the file, or None.
        """


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of one file, or of the shards of an index. ``metadata`` is that of the files.

    ``parts`` has, in order, the parts of a tensor that is stored in several places. Files with ``sums`` are compared
    with these checksums as they are read.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    versions: Mapping[Path, FileVersion]
    parts: Mapping[str, tuple[StoredTensor, ...]] = field(default_factory=dict)
    sums: Mapping[Path, Sums] = field(default_factory=dict)

    def parts_of(self, tensor: StoredTensor) -> tuple[StoredTensor, ...]:
        """The stored parts of ``tensor``, in order."""
        return self.parts.get(tensor.name, (tensor,))


def open_weights(path: Path | str) -> WeightFiles:
    """Opens a .safetensors file, an index of shards (.safetensors.index.json), or a directory with one of them.

    Raises WeightsError, which names the file, the tensor and the remedy, if a file is missing or a header is invalid.
    No tensor is read.
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


def same_bytes(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors are bitwise equal."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    with opened(tensor.file) as first, opened(other.file) as second:
        for at in range(0, tensor.nbytes, _PIECE):
            nbytes = min(_PIECE, tensor.nbytes - at)
            content = _read(first, tensor.file, tensor.offset + at, nbytes)
            if content != _read(second, other.file, other.offset + at, nbytes):
                return False
    return True


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the regular file ``path``. Raises WeightsError if it cannot be opened."""
    try:
        # With O_NONBLOCK, opening a pipe does not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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


def damaged(file: Path, problem: str, remedy: str = "download it again") -> WeightsError:
    """The error for an invalid ``file``."""
    return WeightsError(f"{file}: {problem}", remedy)


@dataclass(frozen=True)
class _Header:
    """The verified header of a file."""

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
    start = _read(fd, path, 0, min(size, 40))
    if start.startswith(b"version https://git-lfs"):
        raise damaged(
            path, "it is a Git LFS pointer, not the file itself", "run git lfs pull in its directory"
        )
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > size - 8 or length > _MOST_HEADER:
        problem = "it has no room for a header" if size < 8 else f"it claims a header of {length} bytes"
        raise damaged(path, f"{problem}, but has {size} bytes: truncated, or not a safetensors file")
    if length == 0 or start[8:9] != b"{":
        raise damaged(path, "its header does not start with '{': it is not a safetensors file")
    return _read(fd, path, 8, length)


def _read(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    try:
        content = os.pread(fd, nbytes, offset)
    except OSError as error:
        raise damaged(path, f"reading it at byte {offset} failed: {error.strerror}", "see dmesg") from error
    if len(content) != nbytes:
        raise damaged(path, f"it ends at byte {offset + len(content)}: another process is changing it")
    return content


def _stored(name: str, entry: Any, file: Path, begin: int) -> StoredTensor:
    quoted = short.repr(name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise FormatError(f"the keys of {quoted} are not 'dtype', 'shape' and 'data_offsets'")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise FormatError(f"{quoted} has the unknown dtype {short.repr(dtype)}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise FormatError(f"{quoted} has a shape or data_offsets that are not lists of whole numbers")
    numel = 1
    for size in shape:
        numel *= size
        if numel >= 1 << 63:
            raise FormatError(f"{quoted} has a shape of more elements than 63 bits can count")
    start, end = offsets
    if numel * _BITS[dtype] != (end - start) * 8:
        length = f"{end - start} bytes for {dtype} {short.repr(shape)}"
        raise FormatError(f"{quoted} has data_offsets {start} to {end}, {length}")
    return StoredTensor(name, dtype, tuple(shape), file, begin + start, end - start)


def _whole_numbers(value: Any) -> bool:
    # isinstance would accept True.
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_layout(stored: list[StoredTensor], begin: int, size: int) -> None:
    """Raises FormatError unless the tensors fill the file from ``begin`` to its end without gap or overlap."""
    ordered = sorted(stored, key=lambda tensor: (tensor.offset, tensor.nbytes))
    end, last = begin, "the header"
    for tensor in ordered:
        if tensor.offset != end:
            problem = "leaves a gap after" if tensor.offset > end else "overlaps"
            raise FormatError(f"{short.repr(tensor.name)} {problem} {last}")
        end, last = end + tensor.nbytes, short.repr(tensor.name)
    if end != size:
        problem = "truncated" if size < end else "bytes were appended"
        raise FormatError(f"its tensors end at byte {end}, but the file at byte {size} ({problem})")


def _weights_in(directory: Path) -> Path:
    """The file of weights or index in ``directory``: the one with the usual name, or the only tensor."""
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
        lacking = "" if usual or indices else ", and no index"
        raise damaged(directory, f"it has {_shorten(tuple(candidates))}{lacking}", "name the file to load")
    pickled = [name for name in names if name.endswith(_PICKLES)]
    if pickled:
        raise _pickled(directory / pickled[0])
    raise damaged(directory, "it has no .safetensors file", "name the directory with the weights")


def _pickled(path: Path) -> WeightsError:
    return damaged(
        path,
        "it is a pickle, which is not supported because loading it can run any code",
        "if you trust it, convert it with from_pretrained(DIR).save_pretrained(NEW_DIR) in transformers",
    )


def _open_shards(index: Path) -> WeightFiles:
    """Opens the shards of ``index``. Raises WeightsError unless each has exactly the tensors that the index lists."""
    with opened(index) as fd:
        size = os.fstat(fd).st_size
        if size > _MOST_HEADER:
            raise damaged(index, f"it has {size} bytes, too many for an index")
        text = _read(fd, index, 0, size)
    try:
        weight_map = _weight_map(parse(text))
    except FormatError as wrong:
        raise damaged(index, f"it is damaged: {wrong}") from None
    names_by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        names_by_shard.setdefault(shard, set()).add(name)
    absent = tuple(shard for shard in sorted(names_by_shard) if not (index.parent / shard).exists())
    if absent:
        raise damaged(
            index, f"it lists {_shorten(absent)}, which does not exist", "download the missing shards"
        )
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    versions: dict[Path, FileVersion] = {}
    for shard in sorted(names_by_shard):
        file = index.parent / shard
        header = _Header.read(file)
        _check_shard(file, header.tensors.keys(), names_by_shard[shard], weight_map)
        tensors |= header.tensors
        metadata = header.metadata | metadata
        versions[file] = header.version
    in_order = {name: tensors[name] for name in weight_map}
    return WeightFiles(index, MappingProxyType(in_order), MappingProxyType(metadata), versions)


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    """The shard of each tensor, a file in the directory of the index."""
    if "weight_map" not in index:
        raise FormatError("it has no 'weight_map'")
    weight_map = strings(index, "weight_map")
    for name, shard in weight_map.items():
        if not shard.endswith(".safetensors") or any(mark in shard for mark in "/\\\0"):
            location = f"{short.repr(name)} in {short.repr(shard)}"
            raise FormatError(f"it puts {location}, which is not a .safetensors file in its directory")
    return weight_map


def _check_shard(
    file: Path, stored: Collection[str], promised: Collection[str], weight_map: Mapping[str, str]
) -> None:
    """Raises WeightsError unless the shard has exactly the tensors that the index lists for it."""
    remedy = "index and shards belong to different saves: download all of them again"
    missing = tuple(sorted(set(promised) - set(stored)))
    if missing:
        raise damaged(file, f"it lacks {_shorten(missing)}, which the index lists for it", remedy)
    unexpected = tuple(sorted(set(stored) - set(promised)))
    misplaced = tuple(name for name in unexpected if name in weight_map)
    if misplaced:
        shard = short.repr(weight_map[misplaced[0]])
        raise damaged(file, f"it has {_shorten(misplaced)}, which the index lists for {shard}", remedy)
    if unexpected:
        raise damaged(file, f"it has {_shorten(unexpected)}, which the index does not list", remedy)


def _shorten(names: tuple[str, ...]) -> str:
    return shorten(tuple(short.repr(name) for name in names))
