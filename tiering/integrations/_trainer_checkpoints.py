"""The folders "checkpoint-N" of a Trainer on an engine, and which of them a run can resume from.

The engine's part of a folder is whole or not there. The files of the Trainer are not synced: a `kill -9` in a save
leaves the folder without the later ones or with one of them cut. A power failure can do so to any of them, and an
interrupted copy of a folder to any file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from tiering.checkpoint.manifest import MANIFEST, Manifest
from tiering.checkpoint.root import Root
from tiering.errors import CheckpointError

TAG = "tiering"
"""The folder of the engine's checkpoint in a folder of a Trainer."""


def last_complete(folders: Sequence[str]) -> tuple[str | None, list[str]]:
    """The last complete one of ``folders``, None if there is none; and the problem of each later one."""
    problems: list[str] = []
    for folder in reversed(folders):
        problem = unusable(folder) or _incomplete(Path(folder))
        if not problem:
            return folder, problems
        problems.append(f"{folder}: {problem}")
    return None, problems


def unusable(folder: str) -> str:
    """The file of ``folder`` that is missing or cut, so that no run can resume from it. Empty if a run can."""
    files = TRAINER_STATE_NAME, SCHEDULER_NAME, f"{TAG}/{MANIFEST}"
    missing = [name for name in files if not (Path(folder) / name).is_file()]
    if missing:
        return f"{', '.join(missing)} is missing"
    return _cut_json(Path(folder) / TRAINER_STATE_NAME) or _cut_pickle(Path(folder) / SCHEDULER_NAME)


def _incomplete(folder: Path) -> str:
    """The problem of ``folder`` with which a run would not resume, or not with the same bits; empty if none."""
    try:
        manifest = Manifest.read(folder / TAG)
    except CheckpointError as error:
        return error.message
    for file, problem in Root(folder / TAG, manifest).wrong_sizes():
        return f"{file.relative_to(folder)}: {problem}"
    ranks = range(manifest.world_size)
    names = [f"rng_state_{rank}.pth" for rank in ranks] if len(ranks) > 1 else ["rng_state.pth"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return f"{', '.join(missing)} is missing"
    return next(filter(None, (_cut_pickle(folder / name) for name in names)), "")


def _cut_json(file: Path) -> str:
    try:
        json.loads(file.read_bytes())
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    except ValueError:
        return f"{file.name} is not valid JSON"
    return ""


def _cut_pickle(file: Path) -> str:
    # The directory of the archive that torch.save writes is at its end.
    return "" if zipfile.is_zipfile(file) else f"{file.name} is truncated"
