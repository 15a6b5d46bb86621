"""The last snapshot of an engine as the source of a checkpoint, while training goes on.

The trained state of a snapshot stays where it is until the next snapshot is published (tiering/storage/versions.py). So
a checkpoint of it needs no copy before a step: the saver reads these pages, and the rest is in the files of the
snapshot. Frozen parameters are read from where they are now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tiering.checkpoint.manifest import Manifest
from tiering.checkpoint.reader import open_checkpoint
from tiering.checkpoint.swap_places import SWAP
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, ConfigError, EngineStateError
from zero3.checkpoint.restore import rank_state
from zero3.checkpoint.run_state import RankState
from zero3.checkpoint.saving import Source
from zero3.checkpoint.swapped_state import SwappedState
from zero3.parts import Assembly

# The id of the save in the state of a rank: a checkpoint has another one.
SAVE = "save"


@dataclass(frozen=True)
class KeptSnapshot:
    """The snapshot at ``path``, saved after ``step`` steps as the save with the id ``save``, which is kept."""

    path: Path
    step: int
    save: str

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> KeptSnapshot:
        """The snapshot at ``path``, of which the swap space of this engine keeps the content."""
        assert manifest.save is not None
        return cls(path, manifest.step, manifest.save)

    def source(self, parts: Assembly, io: IoConfig, *, exclude_frozen: bool, frozen_changed: bool) -> Source:
        """What this rank saves in a checkpoint of the snapshot.

        Raises ConfigError if the snapshot lacks frozen parameters that are to be saved, CheckpointError if their values
        are gone (``frozen_changed``), or the files of the snapshot are damaged.
        """
        manifest = Manifest.read(self.path)
        if manifest.save != self.save:
            raise CheckpointError(
                f"{self.path} is not the last snapshot of this run, but another one: call snapshot_state again"
            )
        if not exclude_frozen and manifest.excluded:
            raise ConfigError(
                f"{self.path} has no frozen parameters, so that a checkpoint from it has none: pass"
                " exclude_frozen_parameters=True, or call snapshot_state without it"
            )
        if (
            not exclude_frozen
            and frozen_changed
            and not all(each.trained for each in manifest.parameters.values())
        ):
            raise CheckpointError(
                f"{self.path}: parameters were changed since the snapshot, and frozen ones are read from where they are"
                " now: call snapshot_state again, or pass exclude_frozen_parameters=True"
            )
        saved = rank_state(open_checkpoint(self.path).rank(parts.world.rank), io)
        content = {name: value for name, value in saved.content.items() if name not in (SAVE, SWAP)}
        return Source(
            RankState(content, saved.tensors),
            _of_checkpoint(manifest, exclude_frozen=exclude_frozen),
            SwappedState(parts),
        )


def kept_snapshot(
    snapshot: KeptSnapshot | None, parts: Assembly, client_state: Mapping[str, Any]
) -> KeptSnapshot:
    """The ``snapshot``. ConfigError without room for snapshots, EngineStateError if there is none yet."""
    if not parts.plan.workload.snapshots:
        raise ConfigError(
            "save_checkpoint(from_snapshot=True) needs snapshots: set tiering.snapshots to true, and call"
            " snapshot_state first; or leave out from_snapshot"
        )
    if snapshot is None:
        raise EngineStateError(
            "save_checkpoint(from_snapshot=True) was called before a snapshot: call snapshot_state first, or leave out"
            " from_snapshot"
        )
    if client_state:
        raise ConfigError(
            "save_checkpoint(from_snapshot=True) saves the client_state that snapshot_state got: pass it there, and"
            " leave it out here"
        )
    return snapshot


def _of_checkpoint(snapshot: Manifest, *, exclude_frozen: bool) -> Manifest:
    """The manifest of a checkpoint of the state of ``snapshot``, without files."""
    saved = {name: each for name, each in snapshot.parameters.items() if each.trained or not exclude_frozen}
    left_out = {name: each for name, each in snapshot.parameters.items() if name not in saved}
    return replace(
        snapshot,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        parameters=saved,
        excluded={**snapshot.excluded, **left_out},
        tied={
            name: first for name, first in snapshot.tied.items() if first in saved or first in snapshot.tiled
        },
        files={},
        digests={},
        swapped=False,
    )
