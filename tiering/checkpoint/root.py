"""What checkpoint.json vouches for: whether each file beside it is of the same save, and its headers are as written.

It has the digests of two small things of each rank, the JSON and the sums of the checksums file; checksums vouch for
headers, and for tensors as they are read. A checkpoint of version 1 has no digests: there, each file is only compared
with the one that has its own sums.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tiering.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest, damaged, file_name, read_sealed
from tiering.errors import CheckpointError, WeightsError
from tiering.storage.arena import PAGE, round_up
from tiering.strict_json import short
from tiering.weights.files import Sums, WeightFiles, open_weights, opened
from tiering.weights.pages import KnownSums, PageSums, SumsSource

_PIECE = 1 << 20  # bytes of a header that are looked at together


class Root:
    """Compares the files of the checkpoint in ``path`` with its ``manifest``. Errors name the file.

    An error is a CheckpointError, or a WeightsError where a file is no safetensors file. No tensor is read.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest

    def check(self) -> dict[Path, Sums]:
        """Raise the first thing that is wrong; returns the sums of each file that has some."""
        sums: dict[Path, Sums] = {}
        for error in self._errors(sums):
            raise error
        return sums

    def errors(self) -> Iterator[CheckpointError | WeightsError]:
        """All that is wrong, but for what cannot be looked at because of it."""
        return self._errors({})

    def wrong_sizes(self) -> Iterator[tuple[Path, str]]:
        """Each file that is not there, with its bytes, and what is wrong with it."""
        for name, expected in self._manifest.files.items():
            file = self._path / name
            try:
                size = file.stat().st_size
            except OSError as error:
                yield file, f"it cannot be read: {error.strerror}"
            else:
                if size != expected:
                    yield file, self.is_of(file) or f"it has {size} bytes and should have {expected}"

    def read_json(self, rank: int) -> dict[str, Any]:
        """What the JSON of ``rank`` holds."""
        file = self._file("rank", rank, "json")
        try:
            return read_sealed(file, sha256=self._manifest.digests.get(file.name))
        except CheckpointError:
            self._check_save(file)
            raise

    def is_of(self, file: Path) -> str | None:
        """Words about the save that ``file`` is of, if it is not that of checkpoint.json."""
        save = _save_of(file)
        if save is None or self._manifest.save in (None, save):
            return None
        return (
            f"it is of save {short.repr(save)}, and {MANIFEST} is of save {short.repr(self._manifest.save)}: files of"
            " two saves are mixed in this directory; copy all of the checkpoint again from where it was saved"
        )

    def _errors(self, sums: dict[Path, Sums]) -> Iterator[CheckpointError | WeightsError]:
        """What is wrong, in an order in which nothing is done by what was not checked; fills ``sums``."""
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
        """Each file that there has to be, and checkpoint.json does not name."""
        manifest, names = self._manifest, set[str]()
        for rank in range(manifest.world_size):
            vouched = [self._file("checksums", rank).name, self._file("rank", rank, "json").name]
            names.update(self._file(kind, rank).name for kind in (WEIGHTS, *manifest.kinds, "rank"))
            names.update(vouched if manifest.save is not None else vouched[:1])
            if manifest.save is not None and not manifest.digests.keys() >= {*vouched}:
                yield damaged(self._path / MANIFEST, f"it has no digests of the files of rank {rank}")
        for name in sorted(names - manifest.files.keys()):
            yield damaged(self._path / MANIFEST, f"it does not name {name}")

    def _sums(self, rank: int) -> dict[Path, Sums]:
        """The sums of each file of ``rank``, which are what was saved."""
        file = self._file("checksums", rank)
        found = open_weights(file)
        source = SumsSource(file) if self._manifest.save is None else self._own_sums(file, found)
        sums: dict[Path, Sums] = {}
        for kind in (WEIGHTS, *self._manifest.kinds, "rank"):
            other = self._file(kind, rank)
            pages = round_up(self._manifest.files[other.name]) // PAGE
            tensor = found.tensors.get(other.name)
            if tensor is None or tensor.dtype != "U32" or tensor.numel != pages:
                raise damaged(file, f"it does not have the {pages} sums of {other.name}")
            sums[other] = PageSums(tensor, source)
        return sums

    def _check_header(self, file: Path, sums: Sums) -> None:
        """Whether the header of ``file`` is what was written, before anything is done by what it says."""
        with opened(file) as fd:
            length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
            size = os.fstat(fd).st_size
            for at in range(0, min(length, size), _PIECE):
                content = os.pread(fd, min(_PIECE, length - at, size - at), at)
                pages = np.zeros(round_up(len(content)), dtype=np.uint8)
                pages[: len(content)] = np.frombuffer(content, dtype=np.uint8)
                bad = sums.first_difference(pages.ctypes.data, at // PAGE, len(pages) // PAGE)
                if bad is not None:
                    self._check_save(file)
                    raise damaged(
                        file, f"page {bad} of its header is not what was written: it has another CRC32C"
                    )

    def _own_sums(self, file: Path, found: WeightFiles) -> SumsSource:
        """The checksums ``file``, of whose pages checkpoint.json vouches for the sums."""
        own = found.tensors.get(file.name)
        size = self._manifest.files[file.name]
        if own is None or own.dtype != "U32" or own.offset + own.nbytes != size:
            self._check_save(file)
            raise damaged(file, "it does not end with the sums of its own pages")
        with opened(file) as fd:
            content = os.pread(fd, own.nbytes, own.offset)
        if hashlib.sha256(content).hexdigest() != self._manifest.digests[file.name]:
            self._check_save(file)
            raise damaged(file, "the SHA-256 of its sums is not the one that checkpoint.json has")
        sums = np.frombuffer(content, dtype="<u4")
        if sums.size != round_up(own.offset) // PAGE:
            raise damaged(file, f"it has {sums.size} sums of its own pages")
        self._check_header(file, KnownSums(sums))
        return SumsSource(file, sums, own.offset)

    def _check_save(self, file: Path) -> None:
        """CheckpointError if ``file``, which is not what it should be, says that it is of another save."""
        if (other := self.is_of(file)) is not None:
            raise damaged(file, other)

    def _file(self, kind: str, rank: int, suffix: str = "safetensors") -> Path:
        return self._path / file_name(kind, rank, self._manifest.world_size, suffix)


def _save_of(file: Path) -> str | None:
    """The save that ``file`` says it is of, if it can be read."""
    try:
        said = read_sealed(file) if file.suffix == ".json" else open_weights(file).metadata
    except (CheckpointError, WeightsError):
        return None
    save = said.get("save")
    return save if isinstance(save, str) else None
