"""A checkpoint that is there: which file has which part of which parameter, and the sums to check them by.

``open_checkpoint`` reads JSON and headers and compares them with each other, whole, before anything is done with what
they say. Tensors are read by ``tiering.weights.reader``, which compares every page with its sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiering.checkpoint.manifest import WEIGHTS, Manifest, damaged, file_name
from tiering.checkpoint.root import Root
from tiering.errors import CheckpointError, WeightsError
from tiering.strict_json import short
from tiering.weights.files import FileVersion, StoredTensor, Sums, WeightFiles, open_weights


@dataclass(frozen=True)
class Checkpoint:
    """``weights`` and each of ``states`` (by kind) give parameters by name; their parts may lie in several files.

    ``sums`` are those of all files that have some.
    """

    path: Path
    manifest: Manifest
    weights: WeightFiles
    states: Mapping[str, WeightFiles]
    sums: Mapping[Path, Sums]

    @property
    def caveat(self) -> str:
        """What nothing can tell about it, for whoever takes it; empty if there is no such thing."""
        if self.manifest.save is not None:
            return ""
        return (
            f"{self.path} is of an earlier version, which recorded no digests: that all of its files are of one save"
            " cannot be checked; checkpoints that are saved from now on can be"
        )

    def rank(self, number: int) -> RankFiles:
        """What rank ``number`` had of its own. Raises CheckpointError if that is damaged."""
        with reading_checkpoint(self.path):
            file = self.path / file_name("rank", number, self.manifest.world_size)
            found = open_weights(file)
            tensors = WeightFiles(
                file, found.tensors, found.metadata, found.versions, sums={file: self.sums[file]}
            )
            return RankFiles(Root(self.path, self.manifest).read_json(number), tensors)

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
    with reading_checkpoint(path):
        manifest = Manifest.read(path)
        sums = Root(path, manifest).check()
        kinds = {kind: _open_kind(path, manifest, kind, sums) for kind in (WEIGHTS, *manifest.kinds)}
    return Checkpoint(path, manifest, kinds.pop(WEIGHTS), kinds, sums)


class reading_checkpoint:  # noqa: N801 # read as a function
    """What the reader of weights raises inside becomes a CheckpointError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeightsError):
            raise CheckpointError(
                f"{error.problem}; load another checkpoint than {self._path} (tag=)"
            ) from error


def _open_kind(path: Path, manifest: Manifest, kind: str, sums: Mapping[Path, Sums]) -> WeightFiles:
    """Parameters by name, put together from all ranks' parts."""
    found: dict[str, list[tuple[int, StoredTensor]]] = defaultdict(list)
    versions: dict[Path, FileVersion] = {}
    for number in range(manifest.world_size):
        file = path / file_name(kind, number, manifest.world_size)
        part = open_weights(file)
        versions |= part.versions
        for name, tensor in part.tensors.items():
            found[name].append((_first_element(file, part.metadata, manifest, name), tensor))
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


def _first_element(file: Path, metadata: Mapping[str, str], manifest: Manifest, name: str) -> int:
    text = metadata.get(manifest.first_of(name), "0")
    if not text.isdecimal() or len(text) > 18:
        raise damaged(file, f"{short.repr(name)} begins at element {short.repr(text)}")
    return int(text)
