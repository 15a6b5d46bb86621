"""Which checkpoints a save may replace: those of its own run, and those of runs that have ended.

A script that is run again saves under the tags of its last run. While a run has the lock of the directory, no other
process saves there; so a checkpoint of another run is one of a run that has ended, or of another engine of this
process. Two engines of one script that save under the same tag would lose each other's checkpoints: the engine that
was there when the other one saved is refused.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

from tiering.checkpoint.manifest import MANIFEST, run_of
from tiering.errors import CheckpointError

log = logging.getLogger(__name__)

_REMEDY = "choose another tag, save to another directory, resume from it with load_checkpoint, or remove it"

_stored_at: dict[Path, float] = {}
"""When this process has stored a checkpoint, by its path, in seconds of ``time.monotonic()``."""


class Ownership:
    """The checkpoints that a run may replace, which began at ``began``, in seconds of ``time.monotonic()``."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._has_warned = False

    def replaces(self, place: Path, run: str, *, exclusive: bool) -> bool:
        """Whether a save of ``run`` to ``place`` replaces a checkpoint; it logs a warning for the first of another run.

        ``exclusive`` is whether the directory is locked. Raises CheckpointError if ``place`` must not be replaced.
        """
        if not os.path.lexists(place):
            return False
        if place.is_symlink():
            raise CheckpointError(
                f"{place} is a symbolic link, which a save does not replace; choose another tag"
            )
        if not (place / MANIFEST).is_file():
            raise CheckpointError(
                f"{place} is not a checkpoint (it has no {MANIFEST}) and is not replaced; choose another tag"
            )
        saved_by = run_of(place)
        if saved_by is None:
            raise CheckpointError(
                f"{place} is not a valid checkpoint (its {MANIFEST} is damaged or of another program) and is not"
                " replaced; choose another tag, or remove it"
            )
        if saved_by != run:
            self._check_ended(place, exclusive=exclusive)
        return True

    def note_stored(self, place: Path) -> None:
        """This run has stored the checkpoint ``place``."""
        _stored_at[place] = time.monotonic()

    def _check_ended(self, place: Path, *, exclusive: bool) -> None:
        """Raises CheckpointError if the other run that has saved ``place`` may not have ended."""
        if not exclusive:
            raise CheckpointError(
                f"{place} is a checkpoint of another run and is not replaced: the file system has no locks that would"
                f" show whether that run has ended; {_REMEDY}"
            )
        if _stored_at.get(place, -math.inf) > self._began:
            raise CheckpointError(
                f"{place} is a checkpoint of another engine of this process, which has saved it since this engine was"
                f" made, and is not replaced; {_REMEDY}"
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s is a checkpoint of an earlier run, and is replaced, as are others that this run saves under their"
                " tags. To continue that run, call load_checkpoint; to keep its checkpoints, save to another directory",
                place,
            )
