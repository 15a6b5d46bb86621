"""Where a snapshot has the weights and the optimizer state of a rank: ranges of swap files, in its JSON file.

    "swap": {
      "files": [{"path": "/nvme/tiering-...-rank0-....swap", "inode": 4711, "nbytes": 1073741824}],
      "tensors": {"weights": {"layer.weight": {"dtype": "F32", "first": 0, "ranges": [[0, 8192, 4096], ...]}},
                  "exp_avg": ...}
    }

A range is [number of the file, offset, bytes]. The ranges of a tensor hold its elements from ``first`` on, in order. If
masters are split, "ranges" has the lower 16 bits of their elements, and "upper" the ranges of the upper 16 bits.

"layout" has the places of all extents of the swap space, and "plan" is a digest of what is in them: a later run with
the same plan adopts the files with it (zero3/checkpoint/adoption.py).

"replaced" are swap files of the snapshot before, made by another run: they are removed once this one is published.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiering._strict_json import short
from tiering.checkpoint.manifest import Manifest, damaged, read_sealed
from tiering.checkpoint.root import Root
from tiering.errors import CheckpointError
from tiering.storage import named_files
from tiering.storage.file_system import FileVersion
from tiering.storage.named_files import NamedFile
from tiering.storage.swap_layout import SwapLayout
from tiering.weights.files import StoredTensor, nbytes_of, opened

Place = tuple[int, int, int]
"""A range: the number of the file, the offset in it, and the bytes."""

SwappedParts = tuple[dict[str, list[tuple[int, StoredTensor]]], dict[Path, FileVersion]]
"""The parts of each parameter, with their first elements; and the files."""

SWAP = "swap"
SNAPSHOT_TAG = "snapshot"
"""The tag of the snapshot in a directory of checkpoints."""
_DTYPES = ("F32", "BF16")


@dataclass(frozen=True)
class SwappedTensor:
    """The places of the elements of a tensor from ``first`` on; with ``upper``, those of their halves."""

    dtype: str
    first: int
    places: Sequence[Place]
    upper: Sequence[Place] = ()

    def as_dict(self) -> dict[str, Any]:
        """The object as a JSON value."""
        value = {"dtype": self.dtype, "first": self.first, "ranges": [*map(list, self.places)]}
        return value | ({"upper": [*map(list, self.upper)]} if self.upper else {})

    def parts(self, name: str, files: Sequence[NamedFile]) -> Iterator[tuple[int, StoredTensor]]:
        """Each part, with its first element."""
        first = self.first
        halves = zip(*_aligned(self.upper, self.places), strict=True) if self.upper else ()
        parts = [
            StoredTensor.joined(*(_stored(name, "U16", half, files) for half in pair)) for pair in halves
        ]
        # A parameter without elements is in the files, too.
        places = self.places or [(0, 0, 0)]
        for part in parts or (_stored(name, self.dtype, place, files) for place in places):
            yield first, part
            first += part.numel


def join_up(places: Iterable[Place]) -> list[Place]:
    """``places`` with those joined that follow each other in a file."""
    joined: list[Place] = []
    for file, offset, nbytes in places:
        if joined and joined[-1][0] == file and joined[-1][1] + joined[-1][2] == offset:
            joined[-1] = (file, joined[-1][1], joined[-1][2] + nbytes)
        else:
            joined.append((file, offset, nbytes))
    return joined


@dataclass(frozen=True)
class RankSwap:
    """The swap files of a rank, the places of its tensors by kind and name, and files that the snapshot replaces.

    A run whose digest ``plan`` is the same has the same in each extent of the ``layout``.
    """

    files: tuple[NamedFile, ...]
    tensors: Mapping[str, Mapping[str, SwappedTensor]]
    layout: SwapLayout
    plan: str
    replaced: tuple[NamedFile, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The object as a JSON value."""
        return {
            "files": [*map(_as_dict, self.files)],
            "replaced": [*map(_as_dict, self.replaced)],
            "plan": self.plan,
            "layout": self.layout.as_dict(),
            "tensors": {
                kind: {name: tensor.as_dict() for name, tensor in tensors.items()}
                for kind, tensors in self.tensors.items()
            },
        }

    @classmethod
    def of(cls, file: Path, content: Mapping[str, Any]) -> RankSwap:
        """From the ``content`` of the JSON file of a rank. Raises CheckpointError if it is damaged."""
        try:
            swap = content[SWAP]
            files, replaced = (tuple(map(_file, swap[key])) for key in ("files", "replaced"))
            # That of tensors without elements.
            files[0]
            layout = SwapLayout.of(swap["layout"], [file.nbytes for file in files])
            plan = _text(swap["plan"])
            tensors = {
                _text(kind): {_text(name): _tensor(each, files) for name, each in named.items()}
                for kind, named in swap["tensors"].items()
            }
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise damaged(file, f"its places in swap files are invalid ({short.repr(str(error))})") from None
        return cls(files, tensors, layout, plan, replaced)


@dataclass(frozen=True)
class Swap:
    """The swap files of a snapshot, and the places in them, of all ranks."""

    ranks: tuple[RankSwap, ...]

    @property
    def files(self) -> tuple[NamedFile, ...]:
        """The swap files."""
        return tuple(file for rank in self.ranks for file in rank.files)

    def parts(self, kind: str) -> SwappedParts:
        """The parts of the tensors of ``kind``. Raises WeightsError if a file cannot be opened."""
        parts: dict[str, list[tuple[int, StoredTensor]]] = defaultdict(list)
        for rank in self.ranks:
            for name, tensor in rank.tensors.get(kind, {}).items():
                parts[name] += tensor.parts(name, rank.files)
        versions = {}
        for file in self.files:
            with opened(file.path) as fd:
                # A run that has adopted it writes to pages that the snapshot does not have.
                versions[file.path] = replace(FileVersion.of(fd), modified_ns=None)
        return parts, versions


def swap_of(root: Root, manifest: Manifest) -> Swap:
    """The places of a snapshot; none of another checkpoint. Raises CheckpointError if a JSON file is damaged."""
    ranks = range(manifest.world_size if manifest.swapped else 0)
    return Swap(
        tuple(RankSwap.of(root.path_of("rank", rank, "json"), root.read_json(rank)) for rank in ranks)
    )


def swap_files_below(directory: Path) -> list[NamedFile]:
    """All swap files that the JSON files of ranks in ``directory`` name: a snapshot, or the remains of one."""
    # Each once: every rank names the files that the snapshot replaces.
    files: dict[NamedFile, None] = {}
    for path in sorted(directory.glob("rank-*.json")):
        try:
            content = read_sealed(path)
            if SWAP in content:
                swap = RankSwap.of(path, content)
                files |= dict.fromkeys((*swap.files, *swap.replaced))
        except CheckpointError:
            # A crash has cut it off: its swap files had no names by then.
            continue
    return list(files)


def remove_remains(partials: Iterable[Path], snapshot: Path) -> None:
    """Remove the swap files of ``partials``, the remains of crashed snapshots, that ``snapshot`` does not name.

    Before the remains themselves: nothing else names these files. One that a run still has open stays.
    """
    remains = [file for partial in partials for file in swap_files_below(partial)]
    # A run names the same files in all of its snapshots.
    needed = {file.path for file in swap_files_below(snapshot)} if remains else set()
    named_files.remove(file for file in remains if file.path not in needed)


def _aligned(*halves: Sequence[Place]) -> list[list[Place]]:
    """Both sequences of places, cut so that each place has as many bytes as the other one of the same number."""
    ends: set[int] = set()
    for places in halves:
        at = 0
        for _, _, nbytes in places:
            at += nbytes
            ends.add(at)
    return [[*_cut(places, sorted(ends))] for places in halves]


def _cut(places: Sequence[Place], ends: Iterable[int]) -> Iterator[Place]:
    remaining, at = list(reversed(places)), 0
    for end in ends:
        file, offset, nbytes = remaining.pop()
        taken = end - at
        yield file, offset, taken
        if taken < nbytes:
            remaining.append((file, offset + taken, nbytes - taken))
        at = end


def _stored(name: str, dtype: str, place: Place, files: Sequence[NamedFile]) -> StoredTensor:
    number, offset, nbytes = place
    return StoredTensor(name, dtype, (nbytes // nbytes_of(dtype, 1),), files[number].path, offset, nbytes)


def _as_dict(file: NamedFile) -> dict[str, Any]:
    return {**file._asdict(), "path": str(file.path)}


def _file(entry: Any) -> NamedFile:
    return NamedFile(Path(_text(entry["path"])), *(_count(entry[key]) for key in NamedFile._fields[1:]))


def _tensor(entry: Any, files: Sequence[NamedFile]) -> SwappedTensor:
    dtype, upper = entry["dtype"], _places(entry.get("upper", []), files)
    places = _places(entry["ranges"], files)
    if dtype not in _DTYPES or (upper and dtype != "F32"):
        raise ValueError(f"dtype {dtype}")
    size = 2 if upper else nbytes_of(dtype, 1)
    if any(nbytes % size or not nbytes for _, _, nbytes in (*places, *upper)):
        raise ValueError("a range is not of whole elements")
    if upper and sum(each[2] for each in upper) != sum(each[2] for each in places):
        raise ValueError("halves differ in length")
    return SwappedTensor(dtype, _count(entry["first"]), places, upper)


def _places(value: Any, files: Sequence[NamedFile]) -> list[Place]:
    places = []
    for entry in value:
        number, offset, nbytes = map(_count, entry)
        if offset + nbytes > files[number].nbytes:
            raise ValueError(f"a range ends behind file {number}")
        places.append((number, offset, nbytes))
    return places


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{short.repr(value)} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{short.repr(value)} is not a text")
    return value
