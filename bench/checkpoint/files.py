"""Files between turns: out of the page cache, or gone."""

from __future__ import annotations

import os
from pathlib import Path


def make_cold(path: Path) -> None:
    """Have the page cache forget the files below ``path``."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def removed_from(directory: Path) -> None:
    """Wait until what was removed from ``directory`` is: a journal's work is of the turn that made it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
