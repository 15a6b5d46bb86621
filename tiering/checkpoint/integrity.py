"""Integrity check of a checkpoint: compares every page of every file with its checksum, at the speed of the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiering.checkpoint.reader import Checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, WeightsError
from tiering.storage.arena import PAGE
from tiering.storage.file_system import FileVersion
from tiering.weights.files import StoredTensor, Sums, WeightFiles, opened
from tiering.weights.pages import SwapSums
from tiering.weights.reader import WINDOW_BYTES, WeightReader


@dataclass(frozen=True)
class Damage:
    """A ``problem`` on page number ``page`` of ``file``, which holds parts of the tensors ``names``.

    If ``file`` is None, ``problem`` names the file.
    """

    file: Path | None
    problem: str
    page: int | None = None
    names: tuple[str, ...] = ()


def damages(
    checkpoint: Checkpoint, on_read: Callable[[int], None] = lambda _: None, *, swap: bool = True
) -> Iterator[Damage]:
    """Yields the damaged pages of ``checkpoint``. ``on_read`` is called with the bytes of each read.

    ``swap``: also those of a snapshot's swap files, inside ``Checkpoint.held``.

    Needs the memory of one WeightReader.
    """
    stored = _stored(checkpoint)
    for number in range(checkpoint.manifest.world_size):
        try:
            rank = checkpoint.rank(number)
        except CheckpointError as error:
            yield Damage(None, error.message)
        else:
            stored[rank.tensors.path] = list(rank.tensors.tensors.values())
    compared = {
        file: sums for file, sums in checkpoint.sums.items() if swap or not isinstance(sums, SwapSums)
    }
    files = _as_bytes(checkpoint.path, compared)
    # One damaged page of checksums makes many pages unreadable; report it once.
    unread: set[str] = set()
    with WeightReader(files, IoConfig(), order=files.tensors.values()) as reader:
        for (file, sums), whole in zip(compared.items(), files.tensors.values(), strict=True):
            for first in range(0, whole.nbytes, WINDOW_BYTES):
                numel = min(WINDOW_BYTES, whole.nbytes - first)
                try:
                    if isinstance(sums, SwapSums) and not sums.compares(first // PAGE, numel // PAGE):
                        continue
                    view = reader.read(whole, first, numel)
                    pages = list(_different(view, first // PAGE, sums))
                except (WeightsError, CheckpointError) as error:
                    names = _between(stored.get(file, ()), first, first + numel)
                    if error.message not in unread:
                        yield Damage(None, error.message, first // PAGE, names)
                    unread.add(error.message)
                else:
                    for page in pages:
                        names = _between(stored.get(file, ()), page * PAGE, (page + 1) * PAGE)
                        yield Damage(file, "CRC32C mismatch", page, names)
                on_read(numel)


def _stored(checkpoint: Checkpoint) -> dict[Path, list[StoredTensor]]:
    """The tensors in each file."""
    stored: dict[Path, list[StoredTensor]] = {}
    for kind in (checkpoint.weights, *checkpoint.states.values()):
        for tensor in kind.tensors.values():
            for part in kind.parts_of(tensor):
                for each in part.halves or (part,):
                    stored.setdefault(each.file, []).append(each)
    return stored


def _as_bytes(path: Path, files: Iterable[Path]) -> WeightFiles:
    """The ``files`` of the checkpoint ``path``, each as one tensor of dtype U8."""
    tensors, versions = {}, {}
    for file in files:
        with opened(file) as fd:
            versions[file] = FileVersion.of(fd)
        nbytes = versions[file].nbytes
        tensors[file.name] = StoredTensor(file.name, "U8", (nbytes,), file, 0, nbytes)
    return WeightFiles(path, tensors, {}, versions)


def _different(view: memoryview, page: int, sums: Sums) -> Iterator[int]:
    """The page numbers of ``view``, whose first page is ``page`` of the file, that differ from their checksums."""
    content = np.frombuffer(view, dtype=np.uint8)
    if content.size % PAGE:
        content = np.concatenate([content, np.zeros(-content.size % PAGE, dtype=np.uint8)])
    address, end = content.ctypes.data, page + content.size // PAGE
    while page < end:
        bad = sums.first_difference(address, page, end - page)
        if bad is None:
            return
        yield bad
        address += (bad + 1 - page) * PAGE
        page = bad + 1


def _between(stored: Iterable[StoredTensor], begin: int, end: int) -> tuple[str, ...]:
    return tuple(
        tensor.name for tensor in stored if tensor.offset < end and begin < tensor.offset + tensor.nbytes
    )
