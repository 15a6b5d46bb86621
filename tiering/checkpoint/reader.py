"""Opens a checkpoint: which file has which part of which parameter, and the checksums of all pages.

``open_checkpoint`` reads all JSON files and headers and compares them with each other before it uses their content.
``tiering.weights.reader`` reads the tensors and compares every page with its checksum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiering._remedies import ANOTHER_CHECKPOINT
from tiering._strict_json import short
from tiering.checkpoint.manifest import WEIGHTS, Manifest, damaged, file_name
from tiering.checkpoint.root import Root
from tiering.checkpoint.swap_places import Swap, SwappedParts, swap_of
from tiering.errors import CheckpointError, WeightsError
from tiering.placement.row_tiles import joined_shape
from tiering.storage.file_system import FileVersion
from tiering.storage.named_files import NamedFile, locked
from tiering.weights.files import StoredTensor, Sums, WeightFiles, open_weights


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, with whole weights in place of their tiles.

    ``weights`` and each of ``states`` (by kind) hold parameters by name; the parts of one parameter may be in several
    files. ``sums`` are the page checksums, by file.
    """

    path: Path
    manifest: Manifest
    weights: WeightFiles
    states: Mapping[str, WeightFiles]
    sums: Mapping[Path, Sums]
    swap: Swap = field(default_factory=lambda: Swap(()))

    @contextmanager
    def held(self) -> Iterator[None]:
        """No process writes to the swap files of a snapshot in the block. CheckpointError if one has not ended."""
        with ExitStack() as files:
            for file in self.swap.files:
                try:
                    files.enter_context(locked(file))
                except OSError as error:
                    raise in_use(self.path, file, error) from error
            yield

    @property
    def caveat(self) -> str:
        """A warning about a property that cannot be checked; empty if there is none."""
        if any(file.path not in self.sums for file in self.swap.files):
            return (
                f"{self.path} is a snapshot: its weights and optimizer state are in swap files without checksums, where"
                " damage by the disk is not detected; set tiering.verify to save them"
            )
        if self.manifest.save is not None:
            return ""
        return (
            f"{self.path} has format version 1, which has no digests: whether all its files belong to one save cannot"
            " be checked; checkpoints saved by this version can be"
        )

    def rank(self, number: int) -> RankFiles:
        """The files with the state of rank ``number`` only. Raises CheckpointError if they are damaged."""
        with reading_checkpoint():
            file = self.path / file_name("rank", number, self.manifest.world_size)
            opened = open_weights(file)
            tensors = WeightFiles(
                file, opened.tensors, opened.metadata, opened.versions, sums={file: self.sums[file]}
            )
            return RankFiles(Root(self.path, self.manifest).read_json(number), tensors)

    def with_buffers(self, number: int) -> WeightFiles:
        """The parameters, and the buffers of rank ``number``, or of rank 0 if the checkpoint has fewer ranks."""
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
    """The state of one rank: JSON, and the tensors that it refers to. ``buffers`` are names of the model's buffers."""

    content: Mapping[str, Any]
    tensors: WeightFiles

    @property
    def buffers(self) -> list[str]:
        names = self.content.get("buffers")
        if not isinstance(names, list):
            raise damaged(self.tensors.path.with_suffix(".json"), "its 'buffers' is not a list")
        for name in names:
            if not isinstance(name, str) or name not in self.tensors.tensors:
                raise damaged(
                    self.tensors.path,
                    f"it has no buffer {short.repr(name)}, which the rank's JSON file lists",
                )
        return names


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint in the directory ``path``, without reading any tensor.

    Raises CheckpointError, which names the file, if a file is missing, or JSON or a header is damaged.
    """
    with reading_checkpoint():
        manifest = Manifest.read(path)
        root = Root(path, manifest)
        sums = root.check()
        swap = swap_of(root, manifest)
        for number, rank in enumerate(swap.ranks):
            sums |= root.swap_sums(number, rank.files)
        kinds = {
            kind: _open_kind(path, manifest, kind, sums, swap.parts(kind) if manifest.swapped else None)
            for kind in (WEIGHTS, *manifest.kinds)
        }
    return Checkpoint(path, manifest.joined(), kinds.pop(WEIGHTS), kinds, sums, swap)


def in_use(path: Path, file: NamedFile, error: OSError) -> CheckpointError:
    """The error: the swap ``file`` of the snapshot ``path`` cannot be locked."""
    return CheckpointError(
        f"snapshot {path} cannot be read: {file.path}: {error.strerror}; close the engine that wrote it or has resumed"
        f" from it, or {ANOTHER_CHECKPOINT}"
    )


@contextmanager
def reading_checkpoint() -> Iterator[None]:
    """Raise CheckpointError in place of a WeightsError of the block."""
    try:
        yield
    except WeightsError as error:
        raise CheckpointError(f"{error.problem}; {ANOTHER_CHECKPOINT}") from error


def _parts_in_files(
    path: Path, manifest: Manifest, kind: str
) -> tuple[dict[str, list[tuple[int, StoredTensor]]], dict[Path, FileVersion]]:
    """The parts of each parameter in the files of all ranks, with their first elements; and the files."""
    parts_by_name: dict[str, list[tuple[int, StoredTensor]]] = defaultdict(list)
    versions: dict[Path, FileVersion] = {}
    for number in range(manifest.world_size):
        file = path / file_name(kind, number, manifest.world_size)
        part = open_weights(file)
        versions |= part.versions
        for name, tensor in part.tensors.items():
            parts_by_name[name].append((_first_element(file, part.metadata, manifest, name), tensor))
    return parts_by_name, versions


def _open_kind(
    path: Path,
    manifest: Manifest,
    kind: str,
    sums: Mapping[Path, Sums],
    swapped: SwappedParts | None,
) -> WeightFiles:
    """The parameters by name, assembled from the parts of all ranks, which a snapshot has ``swapped``."""
    parts_by_name, versions = swapped or ({}, {})
    if kind in manifest.files_of_rank:
        in_files, versions_of_files = _parts_in_files(path, manifest, kind)
        parts_by_name, versions = {**parts_by_name, **in_files}, {**versions, **versions_of_files}
    tensors: dict[str, StoredTensor] = {}
    parts: dict[str, tuple[StoredTensor, ...]] = {}
    for name, stored in manifest.parameters.items():
        if kind != WEIGHTS and not stored.trained:
            continue
        first_file = path / file_name("rank" if swapped else kind, 0, manifest.world_size)
        own_parts = sorted(parts_by_name.pop(name, []), key=lambda part: (part[0], part[1].numel))
        dtypes = {tensor.dtype for _, tensor in own_parts}
        if len(dtypes) > 1 or (kind == WEIGHTS and dtypes - {stored.dtype}):
            raise damaged(
                first_file, f"{short.repr(name)} is {' and '.join(sorted(dtypes))}, not {stored.dtype}"
            )
        end = 0
        for first, tensor in own_parts:
            if first != end:
                raise damaged(tensor.file, f"{short.repr(name)} begins at element {first}, not {end}")
            end += tensor.numel
        if end != stored.numel or not own_parts:
            raise damaged(first_file, f"{short.repr(name)} has {end} elements, not {stored.numel}")
        whole = own_parts[0][1]
        tensors[name] = StoredTensor(
            name,
            whole.dtype,
            stored.shape,
            whole.file,
            whole.offset,
            sum(part.nbytes for _, part in own_parts),
        )
        parts[name] = tuple(part for _, part in own_parts)
    if parts_by_name:
        raise damaged(
            path, f"{kind} of {short.repr(next(iter(parts_by_name)))}, which checkpoint.json does not list"
        )
    for name, tiles in manifest.tiled.items():
        if tiles[0] in tensors:
            _join(name, tiles, tensors, parts)
    return WeightFiles(
        path,
        MappingProxyType(tensors),
        MappingProxyType({}),
        versions,
        MappingProxyType(parts),
        {file: sums[file] for file in versions if file in sums},
    )


def _join(
    name: str,
    tiles: Sequence[str],
    tensors: dict[str, StoredTensor],
    parts: dict[str, tuple[StoredTensor, ...]],
) -> None:
    """Replace ``tiles`` by the tensor ``name``, whose rows they have one after the other."""
    stored = [tensors.pop(tile) for tile in tiles]
    tensors[name] = replace(
        stored[0],
        name=name,
        shape=joined_shape([tile.shape for tile in stored]),
        nbytes=sum(tile.nbytes for tile in stored),
    )
    parts[name] = tuple(replace(part, name=name) for tile in tiles for part in parts.pop(tile))


def _first_element(file: Path, metadata: Mapping[str, str], manifest: Manifest, name: str) -> int:
    text = metadata.get(manifest.first_of(name), "0")
    if not text.isdecimal() or len(text) > 18:
        raise damaged(file, f"{short.repr(name)} begins at element {short.repr(text)}")
    return int(text)
