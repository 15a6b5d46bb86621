"""Ranks that store large layers as tiles have the same bits in every stage, and their checkpoints load into others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zero3.conftest import SmallModel

from .pool import Pool
from .test_unused import PLACES
from .training import start, tokens, train

Ranks = Callable[..., Pool]
CUT: dict[str, Any] = {"tile": 8 << 10, "threshold": 0, "precision": "bf16"}


def saved(rank: int, nvme: Path, directory: Path, **options: Any) -> dict[str, Tensor]:
    """Train, save, and return the masters."""
    with start(nvme, SmallModel, **options) as engine:
        for shares in tokens(2, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
        engine.save_checkpoint(directory, tag="saved")
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters


def loaded(rank: int, nvme: Path, directory: Path, **options: Any) -> dict[str, Tensor]:
    with start(nvme, SmallModel, **options) as engine:
        engine.load_checkpoint(directory, tag="saved")
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters


@pytest.mark.one_of(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", [each for each in PLACES if each != "stage 0"])
def test_every_stage_gives_the_same_bits(ranks: Ranks, nvme: Path, place: str, accumulation: int) -> None:
    case = CUT | {"accumulation": accumulation}
    # Ranks of stages 2 and 3 add the gradients of each micro-batch, those of 0 and 1 once those of all micro-batches.
    in_parts = accumulation > 1 and not place.startswith("stage 1")
    stage = 0 if not in_parts else 3 if place == "stage 2" else 2
    expected = ranks(2).run(train, nvme, stage=stage, **case)
    found = ranks(2).run(train, nvme, **PLACES[place], **case)
    assert [run.differing(before) for run, before in zip(found, expected, strict=True)] == [[], []]
    assert found[0].masters["embedding.weight"].shape == (600, 48)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CUT, {"threshold": 0, "precision": "bf16"}),
        ({"threshold": 0, "precision": "bf16", "stage": 2}, CUT),
        (CUT, CUT | {"tile": 3 << 10, "stage": 1}),
    ],
)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_checkpoints_load_into_other_runs(
    ranks: Ranks,
    nvme: Path,
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    sizes: tuple[int, int],
) -> None:
    first, second = (ranks(size) for size in sizes)
    expected = first.run(saved, nvme, tmp_path / "checkpoints", **before)[0]
    for found in second.run(loaded, nvme, tmp_path / "checkpoints", **after):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], values) for name, values in expected.items())
