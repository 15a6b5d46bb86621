"""A checkpoint that is there: which file has which part of which parameter, and the sums to check them by.

``open_checkpoint`` reads JSON and headers and compares them with each other, whole, before anything is done with what
they say. Tensors are read by ``tiering.weights.reader``, which compares every page with its sum.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tiering.arena import PAGE, round_up
from tiering.checkpoint.manifest import WEIGHTS, Manifest, damaged, file_name, read_sealed
from tiering.checkpoint.pages import PageSums, SumsSource
from tiering.errors import CheckpointError, WeightsError
from tiering.strict_json import short
from tiering.weights.files import FileVersion, StoredTensor, WeightFiles, open_weights, opened

_PIECE = 1 << 20  # bytes of a header that are looked at together


@dataclass(frozen=True)
class Checkpoint:
    """``weights`` and each of ``states`` (by kind) give parameters by name; their parts may lie in several files.

    ``sums`` are those of all files that have some.
    """

    path: Path
    manifest: Manifest
    weights: WeightFiles
    states: Mapping[str, WeightFiles]
    sums: Mapping[Path, PageSums]

    def rank(self, number: int) -> RankFiles:
        """What rank ``number`` had of its own. Raises CheckpointError if that is damaged."""
        with _naming(self.path):
            file = self.path / file_name("rank", number, self.manifest.world_size)
            found = open_weights(file)
            tensors = WeightFiles(
                file, found.tensors, found.metadata, found.versions, sums={file: self.sums[file]}
            )
            return RankFiles(read_sealed(file.with_suffix(".json")), tensors)

    def with_buffers(self, number: int) -> WeightFiles:
        """Parameters, and the buffers that rank ``number`` had, or rank 0 if there was none of that number."""
        rank, weights = self.rank(number if number < self.manifest.world_size else 0), self.weights
        return WeightFiles(
            self.path,
            {**{name: rank.tensors.tensors[name] for name in rank.buffers}, **weights.tensors},
            {},
            {**weights.versions, **rank.tensors.versions},
            weights.parts,
            {**weights.sums, **rank.tensors.sums},
        )


@dataclass(frozen=True)
class RankFiles:
    """A rank's own state: plain JSON, and the tensors that it refers to. ``buffers`` are the names of the model's."""

    content: Mapping[str, Any]
    tensors: WeightFiles

    @property
    def buffers(self) -> list[str]:
        names = self.content.get("buffers")
        if not isinstance(names, list):
            raise damaged(self.tensors.path.with_suffix(".json"), "its 'buffers' is no list")
        for name in names:
            if not isinstance(name, str) or name not in self.tensors.tensors:
                raise damaged(
                    self.tensors.path, f"it has no buffer {short.repr(name)}, which the JSON beside it names"
                )
        return names


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the directory ``path``. Raises CheckpointError, which names the file, unless it is whole.

    No tensor is read.
    """
    with _naming(path):
        manifest = Manifest.read(path)
        _check_files(path, manifest)
        sums: dict[Path, PageSums] = {}
        for number in range(manifest.world_size):
            sums |= _sums(path, manifest, number)
        for file, expected in sums.items():
            _check_header(file, expected)
        kinds = {kind: _open_kind(path, manifest, kind, sums) for kind in (WEIGHTS, *manifest.kinds)}
    return Checkpoint(path, manifest, kinds.pop(WEIGHTS), kinds, sums)


class _naming:  # noqa: N801 # read as a function
    """What the reader of weights raises inside becomes a CheckpointError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeightsError):
            raise CheckpointError(
                f"{error.what}; load another checkpoint than {self._path} (tag=)"
            ) from error


def _check_files(path: Path, manifest: Manifest) -> None:
    """Each file that belongs to it is there, with its bytes."""
    for number in range(manifest.world_size):
        for kind in (WEIGHTS, *manifest.kinds, "rank", "checksums"):
            name = file_name(kind, number, manifest.world_size)
            if name not in manifest.files:
                raise damaged(path / "checkpoint.json", f"it does not name {name}")
    for name, nbytes in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise damaged(path, f"{name} cannot be read: {error.strerror}") from error
        if size != nbytes:
            raise damaged(path / name, f"it has {size} bytes and should have {nbytes}")


def _check_header(file: Path, sums: PageSums) -> None:
    """The header is what was written, before anything is done by what it says."""
    with opened(file) as fd:
        length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        size = os.fstat(fd).st_size
        for at in range(0, min(length, size), _PIECE):
            content = os.pread(fd, min(_PIECE, length - at, size - at), at)
            pages = np.zeros(round_up(len(content)), dtype=np.uint8)
            pages[: len(content)] = np.frombuffer(content, dtype=np.uint8)
            bad = sums.first_difference(pages.ctypes.data, at // PAGE, len(pages) // PAGE)
            if bad is not None:
                raise damaged(
                    file, f"page {bad} of its header is not what was written: it has another CRC32C"
                )


def _open_kind(path: Path, manifest: Manifest, kind: str, sums: Mapping[Path, PageSums]) -> WeightFiles:
    """Parameters by name, put together from all ranks' parts."""
    found: dict[str, list[tuple[int, StoredTensor]]] = defaultdict(list)
    versions: dict[Path, FileVersion] = {}
    for number in range(manifest.world_size):
        file = path / file_name(kind, number, manifest.world_size)
        part = open_weights(file)
        versions |= part.versions
        for name, tensor in part.tensors.items():
            found[name].append((_first_element(file, name, part.metadata), tensor))
    tensors: dict[str, StoredTensor] = {}
    parts: dict[str, tuple[StoredTensor, ...]] = {}
    for name, stored in manifest.parameters.items():
        if kind != WEIGHTS and not stored.trained:
            continue
        place = path / file_name(kind, 0, manifest.world_size)
        mine = sorted(found.pop(name, []), key=lambda part: (part[0], part[1].numel))
        dtypes = {tensor.dtype for _, tensor in mine}
        if len(dtypes) > 1 or (kind == WEIGHTS and dtypes - {stored.dtype}):
            raise damaged(place, f"{short.repr(name)} is {' and '.join(sorted(dtypes))}, not {stored.dtype}")
        end = 0
        for first, tensor in mine:
            if first != end:
                raise damaged(tensor.file, f"{short.repr(name)} begins at element {first}, not {end}")
            end += tensor.numel
        if end != stored.numel or not mine:
            raise damaged(place, f"of {short.repr(name)} there are {end} elements, not {stored.numel}")
        whole = mine[0][1]
        tensors[name] = StoredTensor(
            name, whole.dtype, stored.shape, whole.file, whole.offset, sum(part.nbytes for _, part in mine)
        )
        parts[name] = tuple(part for _, part in mine)
    if found:
        raise damaged(path, f"{kind} of {short.repr(next(iter(found)))}, which checkpoint.json does not name")
    return WeightFiles(
        path,
        MappingProxyType(tensors),
        MappingProxyType({}),
        versions,
        MappingProxyType(parts),
        {file: sums[file] for file in versions},
    )


def _first_element(file: Path, name: str, metadata: Mapping[str, str]) -> int:
    text = metadata.get(name, "0")
    if not text.isdecimal() or len(text) > 18:
        raise damaged(file, f"{short.repr(name)} begins at element {short.repr(text)}")
    return int(text)


def _sums(path: Path, manifest: Manifest, number: int) -> dict[Path, PageSums]:
    """Those of a rank's files."""
    file = path / file_name("checksums", number, manifest.world_size)
    stored, source = open_weights(file).tensors, SumsSource(file)
    found = {}
    for kind in (WEIGHTS, *manifest.kinds, "rank"):
        name = file_name(kind, number, manifest.world_size)
        pages = round_up(manifest.files[name]) // PAGE
        tensor = stored.get(name)
        if tensor is None or tensor.dtype != "U32" or tensor.numel != pages:
            raise damaged(file, f"it does not have the {pages} sums of {name}")
        found[path / name] = PageSums(tensor, source)
    return found
