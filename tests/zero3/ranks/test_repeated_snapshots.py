"""Ranks that make one snapshot after the other, that copy the last one, and that cannot reach each other's files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.zero3.checkpoint.snapshotted import locked
from tests.zero3.resuming import Left, straight
from tiering.errors import CheckpointError

from .test_resume import SNAPSHOTS, Ranks, begin, own


def snapshots_again(rank: int, nvme: Path, directory: Path) -> tuple[list[int], list[str]]:
    """How many files each of some snapshots replaces; and what another run has when it may not lock the directory."""
    options = {**SNAPSHOTS["stage 3"], "accumulation": 1, "snapshots": True, "host_budget": "400KiB"}
    make, teach, replaced = partial(begin, nvme, **options), partial(own, rank), []
    torch.manual_seed(1)
    engine = make()
    losses = teach(engine, range(3))
    file = directory / "snapshot" / f"rank-{rank + 1:05d}-of-00002.json"
    for _ in range(4):
        engine.snapshot_state(directory)
        replaced.append(len(json.loads(file.read_text())["content"]["swap"]["replaced"]))
    engine.close()
    with locked(directory) if rank == 0 else nullcontext():
        engine = make()
        engine.load_checkpoint(directory)
        outcome = Left.by(engine, losses + teach(engine, range(3, 6)))
        engine.close()
    return replaced, outcome.differences(straight(make, 6, teach))


def test_two_ranks_make_one_snapshot_after_the_other_and_copy_the_last(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    for replaced, differences in ranks(2).run(snapshots_again, nvme, tmp_path / "saved"):
        assert replaced == [0] * 4
        assert differences == []


def test_swap_files_that_another_rank_cannot_reach_are_refused(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    for refusal in ranks(2).run(snapshot_on_two_nodes, nvme, tmp_path / "saved"):
        assert "a swap file of rank 1, is not on this host" in refusal and "call save_checkpoint" in refusal


def snapshot_on_two_nodes(rank: int, nvme: Path, directory: Path) -> str:
    """Rank 0 sees no file of rank 1."""
    exists = Path.exists

    def here(path: Path) -> bool:
        return exists(path) and not (rank == 0 and "-rank1-" in path.name)

    options = {**SNAPSHOTS["stage 3"], "accumulation": 1, "snapshots": True, "host_budget": "400KiB"}
    with begin(nvme, **options) as engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "exists", here)
            with pytest.raises(CheckpointError) as refused:
                engine.snapshot_state(directory)
        return str(refused.value)
