"""Writes one rank's share of a checkpoint: a file for each kind of tensor, the checksums, and the JSON."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from tiering.checkpoint.manifest import file_name, metadata_of, write_sealed
from tiering.storage.arena import PAGE, round_up
from tiering.weights.files import open_weights
from tiering.weights.pages import SUMS
from tiering.weights.sums_file import SumsFile
from tiering.weights.tensor_file import Output, TensorFileWriter, TensorSpec, naming, pages_of


@dataclass(frozen=True)
class RankRecord:
    """The entries of checkpoint.json for the files of one rank, or of several: their bytes and digests."""

    files: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(self.files.values())

    @classmethod
    def of_all(cls, records: Iterable[RankRecord]) -> RankRecord:
        """The merged records of several ranks."""
        files: dict[str, int] = {}
        digests: dict[str, str] = {}
        for record in records:
            files |= record.files
            digests |= record.digests
        return cls(files, digests)


# Of a file system without hard links, or where this file has too many.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS)


def link_earlier(directory: Path, earlier: Path, kind: str, rank: int, world_size: int) -> bool:
    """Give the file of ``kind`` in the checkpoint ``earlier`` a further name in ``directory``; False if it cannot."""
    path = directory / file_name(kind, rank, world_size)
    with naming(path):
        try:
            os.link(earlier / path.name, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
    return True


class RankWriter:
    """Writes the files of rank ``rank`` of ``world_size`` into ``directory``, as part of the save with the id ``save``.

    ``tensors`` has, by kind, the tensors, and by name the first element of each that is a part of a parameter. Files of
    the kinds ``linked`` are those of earlier checkpoints of as many ranks, in these directories: see ``link_earlier``.
    ``swap_pages`` are the pages of swap files by their names, whose checksums ``put_swap_sums`` gets. Use it in a
    ``with`` block: an exception abandons the files and leaves them on disk.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        world_size: int,
        save: str,
        tensors: Mapping[str, tuple[Sequence[TensorSpec], Mapping[str, str]]],
        *,
        output: Output,
        linked: Mapping[str, Path] = MappingProxyType({}),
        swap_pages: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._directory = directory
        self._standing = rank, world_size
        self._save = save
        self._writers: dict[str, TensorFileWriter] = {}
        self._linked: dict[str, int] = {}
        self._sums: SumsFile | None = None
        described = {kind: (specs, metadata_of(save, firsts)) for kind, (specs, firsts) in tensors.items()}
        try:
            pages = {self._path(kind).name: pages_of(*each) for kind, each in described.items()}
            for kind in linked:
                path = self._path(kind)
                with naming(path):
                    self._linked[path.name] = path.stat().st_size
                pages[path.name] = round_up(self._linked[path.name]) // PAGE
            self._sums = SumsFile(self._path("checksums"), {**pages, **swap_pages}, metadata_of(save, {}))
            for kind, earlier in linked.items():
                self._copy_sums(earlier / self._path("checksums").name, self._path(kind).name)
            for kind, (specs, metadata) in described.items():
                path = self._path(kind)
                self._writers[kind] = TensorFileWriter(
                    path, specs, metadata, output=output, on_sums=self._sums.of(path.name)
                )
        except BaseException:
            self.abandon()
            raise

    def append(self, kind: str, content: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Appends the next bytes of the tensors of ``kind``."""
        self._writers[kind].append(content)

    def put_swap_sums(self, name: str, page: int, sums: np.ndarray) -> None:
        """Write the checksums of pages of the swap file ``name`` from ``page`` on; 0 for those that are not given."""
        assert self._sums is not None
        self._sums.of(name)(page, sums)

    def finish(self, content: Mapping[str, Any], on_file: Callable[[], None] = lambda: None) -> RankRecord:
        """Writes the checksums and the JSON with ``content``, after all tensors; returns when all files are on disk.

        ``on_file`` is called after each file of tensors.
        """
        assert self._sums is not None
        for writer in self._writers.values():
            # Returns when the file is on disk: the record below may name only such files.
            writer.close()
            on_file()
        # After all windows of tensors, whose checksums are in this file.
        sums_digest = self._sums.close()
        path = self._path("rank", "json")
        with naming(path):
            plain = write_sealed(path, {"save": self._save, **content})
        files = {writer.path.name: writer.nbytes for writer in self._writers.values()} | self._linked
        return RankRecord(
            files | {self._sums.path.name: self._sums.nbytes, path.name: plain.nbytes},
            {self._sums.path.name: sums_digest, path.name: plain.sha256},
        )

    def _copy_sums(self, earlier: Path, name: str) -> None:
        """Take the checksums of the file ``name`` from the checksums file ``earlier``."""
        assert self._sums is not None
        with naming(earlier):
            stored = open_weights(earlier).tensors[name]
            sums = np.memmap(earlier, dtype="<u4", mode="r", offset=stored.offset, shape=stored.shape)
            put = self._sums.of(name)
            for first in range(0, stored.numel, SUMS):
                put(first, sums[first : first + SUMS])

    def abandon(self) -> None:
        """Stops writing and leaves unfinished files on disk. Finished files are not affected."""
        for writer in self._writers.values():
            writer.abandon()
        if self._sums is not None:
            self._sums.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()

    def _path(self, kind: str, suffix: str = "safetensors") -> Path:
        return self._directory / file_name(kind, *self._standing, suffix)
