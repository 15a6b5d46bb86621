"""Directories of checkpoints that are hardly more than their records: enough for who looks at names."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import FORMAT, MANIFEST, read_sealed, write_sealed

OURS, OTHERS = "ours", "others"  # runs


def save(
    directory: CheckpointDirectory,
    tag: str,
    content: str = "",
    *,
    run: str = OURS,
    latest: bool = True,
    keep: int | None = None,
) -> Path:
    partial = directory.begin(tag, run=run)
    record(partial, content or tag, run)
    (partial / "weights").write_text(f"weights of {content or tag}")
    return directory.commit(partial, tag, run=run, latest=latest, keep=keep)


def record(path: Path, content: str = "", run: str = OURS) -> None:
    """Make ``path`` a checkpoint."""
    write_sealed(path / MANIFEST, {"format": FORMAT, "run": run, "what": content})


def recorded(path: Path) -> str:
    kind: str = read_sealed(path / MANIFEST)["what"]
    return kind


def names(directory: CheckpointDirectory) -> set[str]:
    return {entry.name for entry in directory.path.iterdir()}


def tags(directory: CheckpointDirectory) -> list[str]:
    return [saved.tag for saved in directory.tags()]


def at(directory: CheckpointDirectory, tag: str, time: int) -> None:
    os.utime(directory.path / tag / MANIFEST, (time, time))


def content(directory: CheckpointDirectory) -> dict[str, str]:
    files = [file for file in directory.path.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(directory.path)): file.read_text() for file in files}


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, nth: int, code: int = errno.EIO
) -> Iterator[list[int]]:
    """The ``nth`` call of ``where.name`` fails, and does nothing."""
    original = getattr(where, name)
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(len(calls))
        if len(calls) == nth + 1:
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, call)
        yield calls
