"""Verifies the files of a checkpoint against checkpoint.json: each belongs to the same save, and headers are intact.

checkpoint.json has two digests per rank: of the JSON file, and of the page checksums of the checksums file. The
checksums verify headers here, and tensors as they are read. A checkpoint of version 1 has no digests: each of its files
is only compared with its checksums file.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tiering._strict_json import short
from tiering.checkpoint.manifest import MANIFEST, Manifest, damaged, file_name, read_sealed
from tiering.errors import CheckpointError, WeightsError
from tiering.storage.arena import PAGE, round_up
from tiering.storage.named_files import NamedFile
from tiering.weights.files import Sums, WeightFiles, open_weights, opened
from tiering.weights.pages import KnownSums, PageSums, SumsSource, SwapSums

# Bytes of a header per read.
_PIECE = 1 << 20


class Root:
    """Compares the files of the checkpoint in ``path`` with its ``manifest``. Reads no tensor.

    An error names the file. It is a CheckpointError, or a WeightsError if a file is not a safetensors file.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest

    def check(self) -> dict[Path, Sums]:
        """Raises the first error; returns the page checksums by file."""
        sums: dict[Path, Sums] = {}
        for error in self._errors(sums):
            raise error
        return sums

    def errors(self) -> Iterator[CheckpointError | WeightsError]:
        """All errors, except in files that cannot be read because of another error."""
        return self._errors({})

    def wrong_sizes(self) -> Iterator[tuple[Path, str]]:
        """Each file that is missing or has a wrong size, with the problem."""
        for name, expected in self._manifest.files.items():
            file = self._path / name
            try:
                size = file.stat().st_size
            except OSError as error:
                yield file, f"it cannot be read: {error.strerror}"
            else:
                if size != expected:
                    yield file, self.save_mismatch(file) or f"it has {size} bytes, not {expected}"

    def read_json(self, rank: int) -> dict[str, Any]:
        """The content of the JSON file of ``rank``."""
        file = self.path_of("rank", rank, "json")
        try:
            return read_sealed(file, sha256=self._manifest.digests.get(file.name))
        except CheckpointError:
            self._check_save(file)
            raise

    def save_mismatch(self, file: Path) -> str | None:
        """The problem if ``file`` belongs to another save than checkpoint.json, or None."""
        save = _save_of(file)
        if save is None or self._manifest.save in (None, save):
            return None
        return (
            f"it belongs to save {short.repr(save)}, and {MANIFEST} to save {short.repr(self._manifest.save)}: files of"
            " two saves are mixed in this directory; copy the whole checkpoint again from the original"
        )

    def _errors(self, sums: dict[Path, Sums]) -> Iterator[CheckpointError | WeightsError]:
        """The errors; fills ``sums``. The order ensures that no content is used before it is checked."""
        wrong = False
        for error in itertools.chain(self._wrong_names(), (damaged(*each) for each in self.wrong_sizes())):
            wrong = True
            yield error
        if wrong:
            return
        for rank in range(self._manifest.world_size):
            try:
                sums |= self._sums(rank)
            except (CheckpointError, WeightsError) as error:
                yield error
        for file, expected in sums.items():
            try:
                self._check_header(file, expected)
            except (CheckpointError, WeightsError) as error:
                yield error
        for rank in range(self._manifest.world_size if self._manifest.save is not None else 0):
            try:
                self.read_json(rank)
            except (CheckpointError, WeightsError) as error:
                yield error

    def _wrong_names(self) -> Iterator[CheckpointError]:
        """Each required file that checkpoint.json does not list."""
        manifest, names = self._manifest, set[str]()
        for rank in range(manifest.world_size):
            with_digest = [self.path_of("checksums", rank).name, self.path_of("rank", rank, "json").name]
            names.update(self.path_of(kind, rank).name for kind in manifest.files_of_rank)
            names.update(with_digest if manifest.save is not None else with_digest[:1])
            if manifest.save is not None and not manifest.digests.keys() >= {*with_digest}:
                yield damaged(self._path / MANIFEST, f"it has no digests for the files of rank {rank}")
        for name in sorted(names - manifest.files.keys()):
            yield damaged(self._path / MANIFEST, f"it does not list {name}")

    def swap_sums(self, rank: int, files: Iterable[NamedFile]) -> dict[Path, SwapSums]:
        """The verified checksums of the swap ``files`` of ``rank`` that have any."""
        checksums, source = self._checksums(rank)
        sums = {}
        for file in files:
            tensor = checksums.tensors.get(file.path.name)
            if tensor is not None:
                if tensor.dtype != "U32" or tensor.numel != file.nbytes // PAGE:
                    raise damaged(checksums.path, f"it does not have the checksums of {file.path.name}")
                sums[file.path] = SwapSums(tensor, source)
        return sums

    def _checksums(self, rank: int) -> tuple[WeightFiles, SumsSource]:
        """The file with the page checksums of the files of ``rank``, and how they are read and verified."""
        file = self.path_of("checksums", rank)
        checksums = open_weights(file)
        if self._manifest.save is None:
            return checksums, SumsSource(file)
        return checksums, self._checksums_of_checksums(file, checksums)

    def _sums(self, rank: int) -> dict[Path, Sums]:
        """The verified page checksums of each file of ``rank``."""
        checksums, source = self._checksums(rank)
        file = checksums.path
        sums: dict[Path, Sums] = {}
        for kind in self._manifest.files_of_rank:
            data_file = self.path_of(kind, rank)
            pages = round_up(self._manifest.files[data_file.name]) // PAGE
            tensor = checksums.tensors.get(data_file.name)
            if tensor is None or tensor.dtype != "U32" or tensor.numel != pages:
                raise damaged(file, f"it does not have the {pages} checksums of {data_file.name}")
            sums[data_file] = PageSums(tensor, source)
        return sums

    def _check_header(self, file: Path, sums: Sums) -> None:
        """Verifies the header of ``file`` before its content is used. Raises CheckpointError."""
        with opened(file) as fd:
            length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
            size = os.fstat(fd).st_size
            for offset in range(0, min(length, size), _PIECE):
                content = os.pread(fd, min(_PIECE, length - offset, size - offset), offset)
                pages = np.zeros(round_up(len(content)), dtype=np.uint8)
                pages[: len(content)] = np.frombuffer(content, dtype=np.uint8)
                bad = sums.first_difference(pages.ctypes.data, offset // PAGE, len(pages) // PAGE)
                if bad is not None:
                    self._check_save(file)
                    raise damaged(file, f"CRC32C mismatch in page {bad} of its header")

    def _checksums_of_checksums(self, file: Path, checksums: WeightFiles) -> SumsSource:
        """The checksums ``file``, whose own page checksums are verified by the digest in checkpoint.json."""
        own = checksums.tensors.get(file.name)
        size = self._manifest.files[file.name]
        if own is None or own.dtype != "U32" or own.offset + own.nbytes != size:
            self._check_save(file)
            raise damaged(file, "it does not end with the checksums of its own pages")
        with opened(file) as fd:
            content = os.pread(fd, own.nbytes, own.offset)
        if hashlib.sha256(content).hexdigest() != self._manifest.digests[file.name]:
            self._check_save(file)
            raise damaged(file, "the SHA-256 of its checksums differs from checkpoint.json")
        sums = np.frombuffer(content, dtype="<u4")
        if sums.size != round_up(own.offset) // PAGE:
            raise damaged(file, f"it has {sums.size} checksums of its own pages")
        self._check_header(file, KnownSums(sums))
        return SumsSource(file, sums, own.offset)

    def _check_save(self, file: Path) -> None:
        """Raises CheckpointError if the damaged ``file`` belongs to another save."""
        if (problem := self.save_mismatch(file)) is not None:
            raise damaged(file, problem)

    def path_of(self, kind: str, rank: int, suffix: str = "safetensors") -> Path:
        """The path of the file of ``kind`` of ``rank``."""
        return self._path / file_name(kind, rank, self._manifest.world_size, suffix)


def _save_of(file: Path) -> str | None:
    """The id of the save in ``file``, or None if the file cannot be read."""
    try:
        metadata = read_sealed(file) if file.suffix == ".json" else open_weights(file).metadata
    except (CheckpointError, WeightsError):
        return None
    save = metadata.get("save")
    return save if isinstance(save, str) else None
