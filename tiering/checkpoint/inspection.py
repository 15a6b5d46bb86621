"""Lists the checkpoints of a directory, describes a checkpoint, and checks its integrity. Imports no torch."""

from __future__ import annotations

import contextlib
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.checkpoint.directory import CheckpointDirectory, Saved
from tiering.checkpoint.integrity import Damage, damages
from tiering.checkpoint.manifest import WEIGHTS, Manifest
from tiering.checkpoint.reader import Checkpoint, open_checkpoint
from tiering.checkpoint.root import Root
from tiering.errors import CheckpointError

OnRead = Callable[[int], None]
"""Called with the bytes of each read."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint of a directory. If sizes or headers are wrong, ``step`` is None and ``damage`` is the problem.

    ``time`` is in seconds since the epoch.
    """

    tag: str
    time: float
    nbytes: int
    step: int | None
    damage: str = ""


@dataclass(frozen=True)
class Listing:
    """The content of a checkpoint directory.

    ``latest`` is the tag to resume from; if there is none, ``lost`` is the reason. ``partials`` has the bytes of
    unfinished saves by name.
    """

    path: Path
    entries: tuple[CheckpointEntry, ...]
    latest: str | None
    lost: str
    partials: Mapping[str, int]

    @property
    def whole(self) -> bool:
        """Whether no damage was found."""
        return not self.lost and not any(entry.damage for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """The object as a JSON value."""
        return {
            "path": str(self.path),
            "latest": self.latest,
            "lost": self.lost or None,
            "checkpoints": [
                {
                    "tag": entry.tag,
                    "time": entry.time,
                    "bytes": entry.nbytes,
                    "step": entry.step,
                    "damage": entry.damage or None,
                }
                for entry in self.entries
            ],
            "partials": dict(self.partials),
        }


@dataclass(frozen=True)
class Kind:
    """The tensors of one kind: their number, by dtype, and their bytes."""

    dtypes: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint, and its damage.

    Without a ``manifest``, the checkpoint could not be read; it has whole weights in place of tiles. ``checked`` is the
    number of bytes compared with their checksums. ``caveat`` is a warning about a property that cannot be checked.
    """

    path: Path
    manifest: Manifest | None
    kinds: Mapping[str, Kind]
    nbytes: int
    checked: int
    damage: tuple[Damage, ...]
    caveat: str = ""

    @property
    def whole(self) -> bool:
        """Whether no damage was found."""
        return not self.damage

    def as_dict(self) -> dict[str, Any]:
        """The object as a JSON value."""
        manifest = self.manifest
        about = None if manifest is None else _about(manifest)
        return {
            "path": str(self.path),
            "whole": self.whole,
            "bytes": self.nbytes,
            "bytes_checked": self.checked,
            "damage": [
                {
                    "file": each.file and each.file.name,
                    "page": each.page,
                    "tensors": list(each.names),
                    "what": each.problem,
                }
                for each in self.damage
            ],
            "caveat": self.caveat or None,
            "about": about,
            "kinds": {
                name: {"dtypes": dict(kind.dtypes), "bytes": kind.nbytes} for name, kind in self.kinds.items()
            },
        }


def list_checkpoints(path: Path) -> Listing:
    """The checkpoints in the directory ``path``, with their sizes and headers checked."""
    directory = CheckpointDirectory(path)
    lost, latest = "", None
    try:
        latest = directory.latest()
    except CheckpointError as error:
        lost = error.message
    return Listing(
        path,
        tuple(
            _entry(directory, saved) for saved in sorted([*directory.tags(), *directory.damaged()], key=_time)
        ),
        latest,
        lost,
        {partial.name: _bytes_below(partial) for partial in directory.partials()},
    )


def inspect(path: Path, *, quick: bool = False, on_read: OnRead = lambda _: None) -> Inspection:
    """Describes the checkpoint in ``path``; unless ``quick``, reads and checks all of its bytes."""
    nbytes = _bytes_below(path)
    manifest: Manifest | None = None
    damage: list[Damage] = []
    try:
        manifest = Manifest.read(path).joined()
        damage = _wrong_files(path, manifest)
        checkpoint = open_checkpoint(path) if not damage else None
    except CheckpointError as error:
        checkpoint, damage = None, [Damage(None, error.message)]
    if checkpoint is None:
        return Inspection(path, manifest, {}, nbytes, 0, tuple(damage))
    checked = 0

    def count(read: int) -> None:
        nonlocal checked
        checked += read
        on_read(read)

    caveat = checkpoint.caveat
    if not quick:
        compares_swap = any(file.path in checkpoint.sums for file in checkpoint.swap.files)
        try:
            with checkpoint.held() if compares_swap else contextlib.nullcontext():
                damage = list(damages(checkpoint, count))
        except CheckpointError as error:
            caveat = f"its swap files were not checked: {error.message}"
            damage = list(damages(checkpoint, count, swap=False))
    return Inspection(path, manifest, _kinds(checkpoint), nbytes, checked, tuple(damage), caveat)


def _entry(directory: CheckpointDirectory, saved: Saved) -> CheckpointEntry:
    step, damage, nbytes = None, "", 0
    try:
        path = directory.find(saved.tag)
        assert path is not None
        nbytes = _bytes_below(path)
        step = open_checkpoint(path).manifest.step
    except CheckpointError as error:
        damage = error.message
    return CheckpointEntry(saved.tag, saved.time, nbytes, step, damage)


def _time(saved: Saved) -> float:
    return saved.time


def _wrong_files(path: Path, manifest: Manifest) -> list[Damage]:
    """The files that do not agree with checkpoint.json."""
    root = Root(path, manifest)
    wrong = [Damage(file, problem) for file, problem in root.wrong_sizes()]
    # A damaged page of checksums is an error of every file with checksums in it; report it once.
    return wrong or [Damage(None, text) for text in dict.fromkeys(error.message for error in root.errors())]


def _kinds(checkpoint: Checkpoint) -> dict[str, Kind]:
    return {
        name: Kind(
            Counter(tensor.dtype for tensor in files.tensors.values()),
            sum(tensor.nbytes for tensor in files.tensors.values()),
        )
        for name, files in {WEIGHTS: checkpoint.weights, **checkpoint.states}.items()
    }


def _about(manifest: Manifest) -> dict[str, Any]:
    parameters = manifest.parameters.values()
    return {
        "step": manifest.step,
        "save": manifest.save,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "optimizer": manifest.optimizer,
        "precision": manifest.precision,
        "parameters": len(parameters),
        "elements": sum(each.numel for each in parameters),
        "trained_elements": sum(each.numel for each in parameters if each.trained),
        "excluded_parameters": len(manifest.excluded),
        "excluded_elements": sum(each.numel for each in manifest.excluded.values()),
        "files": dict(manifest.files),
    }


def _bytes_below(path: Path) -> int:
    """The bytes of the files in ``path``; files that a concurrent save removes meanwhile are skipped."""
    total = 0
    for file in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            status = file.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
