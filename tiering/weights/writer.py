"""Writes weights as Hugging Face keeps them: one safetensors file, or shards with an index.

All is written into a directory of its own within the one that was named, and moved out of it in the end: first what
nobody looks for, and last the file that a loader begins with. So there is a whole set of weights or none, also where
an earlier one is replaced, and never a mixture of two.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from tiering._interrupts import deferred_interrupts
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, SwapError
from tiering.storage.file_system import fsync, remedy
from tiering.storage.io_stats import errno_text
from tiering.weights.tensor_file import Output, TensorFileWriter, TensorSpec

SUFFIX = ".safetensors"


class WeightWriter:
    """Writes ``tensors``, in order, as STEM.safetensors to ``directory``, which is created if it is missing.

    If the tensors have more than ``max_shard_bytes``, they are written as shards of at most that size; one longer
    tensor is one shard. Put further files of the model into ``folder`` before ``finish``.

    Raises CheckpointError if a file cannot be written; then, and after ``abandon``, all written files are removed,
    unless they were complete but could not be moved to ``directory``: the message names the folder that has them.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Sequence[TensorSpec],
        *,
        stem: str = "model",
        max_shard_bytes: int | None = None,
        metadata: Mapping[str, str] | None = None,
        io: IoConfig | None = None,
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._metadata = {"format": "pt"} | dict(metadata or {})
        self._shards = _shards(tensors, max_shard_bytes)
        self._created = [path for path in (directory, *directory.parents) if not path.exists()]
        self._output = Output(io)
        # Index of the shard that is being written.
        self._number = -1
        self._writer: TensorFileWriter | None = None
        # Bytes of that shard that are not appended yet.
        self._missing = 0
        # True while files move out of the folder: an earlier set of weights is then incomplete.
        self._moving = False
        self.folder = directory / f".partial-{secrets.token_hex(4)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
        except OSError as error:
            self.abandon()
            raise self._unwritten(error) from error

    @property
    def files(self) -> list[str]:
        """The names of the written files; the file that a reader opens first is last."""
        count = len(self._shards)
        if count == 1:
            return [self._stem + SUFFIX]
        return [
            *(f"{self._stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)),
            f"{self._stem}{SUFFIX}.index.json",
        ]

    def append(self, content: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Appends the next bytes of the tensors, in their order."""
        remaining = np.frombuffer(content, dtype=np.uint8)
        while remaining.size:
            while not self._missing:
                self._next_shard()
            piece = remaining[: self._missing]
            assert self._writer is not None
            self._writer.append(piece)
            self._missing -= piece.size
            remaining = remaining[piece.size :]

    def finish(self) -> None:
        """Moves the complete files to the directory, after all bytes were appended."""
        # The remaining shards have only tensors without elements.
        while self._number + 1 < len(self._shards):
            self._next_shard()
        self._close_shard()
        try:
            if len(self._shards) > 1:
                self._write_index()
            with deferred_interrupts():
                self._publish()
        except OSError as error:
            raise self._unwritten(error) from error

    def abandon(self) -> None:
        """Removes all written files. Idempotent; without effect after ``finish``."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        # The failed write has already raised.
        with contextlib.suppress(SwapError):
            self._output.close()
        if not self._moving:
            shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._created:
            # Another process may have written files there.
            with contextlib.suppress(OSError):
                path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.abandon()

    def _next_shard(self) -> None:
        self._close_shard()
        self._number += 1
        shard = self._shards[self._number]
        path = self.folder / self.files[self._number]
        self._writer = TensorFileWriter(path, shard, self._metadata, output=self._output)
        self._missing = sum(tensor.nbytes for tensor in shard)

    def _close_shard(self) -> None:
        assert not self._missing, f"{self._missing} bytes of {self.files[self._number]} are missing"
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_index(self) -> None:
        weight_map = {
            tensor.name: file
            for file, shard in zip(self.files, self._shards, strict=False)
            for tensor in shard
        }
        total = sum(tensor.nbytes for shard in self._shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / self.files[-1]).write_text(json.dumps(index, indent=2) + "\n")

    def _publish(self) -> None:
        further_files = sorted(path.name for path in self.folder.iterdir() if path.name not in self.files)
        *shards, first = self.files
        # Shards were fsynced when they were closed.
        for name in (*further_files, first) if shards else further_files:
            fsync(self.folder / name)
        self._moving = True
        # Remove an older index first, which would refer to shards of two sets of weights.
        if shards:
            for name in {first, self._stem + SUFFIX}:
                (self._directory / name).unlink(missing_ok=True)
            fsync(self._directory)
        for name in (*further_files, *shards):
            (self.folder / name).replace(self._directory / name)
        fsync(self._directory)
        (self.folder / first).replace(self._directory / first)
        own_names = re.compile(re.escape(self._stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
        for path in self._directory.iterdir():
            if own_names.fullmatch(path.name) and path.name not in self.files:
                path.unlink()
        self.folder.rmdir()
        self._moving = False
        self._created.clear()
        fsync(self._directory)

    def _unwritten(self, error: OSError) -> CheckpointError:
        code = error.errno or errno.EIO
        advice = ""
        if self._moving:
            advice = (
                f"; all files are complete: move the remaining files from {self.folder} to {self._directory}"
            )
        return CheckpointError(
            f"{self._directory} cannot be written: {errno_text(code)} ({error.filename or self.folder});"
            f" {remedy(code)}{advice}"
        )


def _shards(tensors: Sequence[TensorSpec], max_shard_bytes: int | None) -> list[list[TensorSpec]]:
    """``tensors`` divided into shards of at most ``max_shard_bytes``, or of one longer tensor."""
    shards: list[list[TensorSpec]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if max_shard_bytes is not None and shards[-1] and nbytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(tensor)
        nbytes += tensor.nbytes
    return shards
