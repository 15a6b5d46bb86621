"""The directory in which an engine has its snapshot: one for each run, locked by rank 0."""

from __future__ import annotations

from pathlib import Path

from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.swap_places import SNAPSHOT_TAG
from tiering.errors import ConfigError


class SnapshotDirectory:
    """The directory of the run that began at ``run_began``; none before ``lock`` or ``begin``. Rank 0 uses it."""

    def __init__(self, run_began: float) -> None:
        self._run_began = run_began
        self.current: CheckpointDirectory | None = None

    def lock(self, path: Path) -> None:
        """The snapshot in ``path`` becomes that of the run: no other run replaces it from now on.

        Raises ConfigError if the run has one elsewhere, CheckpointError if another run has locked ``path``.
        """
        self.current = self._locked(path)

    def begin(self, path: Path, *, run: str) -> Path:
        """Create a directory for the files of the snapshot of ``run`` in ``path``. Raises as ``lock``."""
        directory = self._locked(path)
        partial = directory.begin(SNAPSHOT_TAG, run=run)
        self.current = directory
        return partial

    def at(self, path: Path, former: CheckpointDirectory | None) -> CheckpointDirectory:
        """The directory ``path`` for checkpoints of the run, whose ``former`` one may be another.

        The directory with the snapshot is one object, so that a save elsewhere does not unlock it.
        """
        for each in (self.current, former):
            if each is not None and each.path == path.absolute():
                return each
        return CheckpointDirectory(path, run_began=self._run_began)

    def close(self) -> None:
        """Unlock it."""
        if self.current is not None:
            self.current.close()
            self.current = None

    def _locked(self, path: Path) -> CheckpointDirectory:
        directory = self.current or CheckpointDirectory(path, run_began=self._run_began)
        if directory.path != path.absolute():
            raise ConfigError(
                f"{path} cannot have the snapshot: this engine has its snapshot in {directory.path}, and a run has one:"
                " use the same directory, or save_checkpoint"
            )
        directory.lock()
        return directory
