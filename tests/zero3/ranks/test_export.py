"""Weights for others, of parameters that are on several ranks: one file, of the bits that all of them have."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zero3.checkpoint.export
from tests.zero3.plain import differing
from tiering.cli import main
from tiering.errors import CheckpointError

from .pool import Pool
from .training import start, tokens

Ranks = Callable[..., Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3": {"stage": 3},
    "stage 2": {"stage": 2},
}


def step(engine: Any, rank: int) -> None:
    engine.backward(engine(*next(tokens(1, 2))[rank]))
    engine.step()


def save(rank: int, nvme: Path, out: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """After a step, in ranges that end neither with a shard nor with a parameter."""
    usual, zero3.checkpoint.export.RANGE = zero3.checkpoint.export.RANGE, 777
    try:
        with start(nvme, precision="bf16", **options) as engine:
            step(engine, rank)
            engine.save_16bit_model(out)
            step(engine, rank)
            engine.save_16bit_model(out, "later.safetensors")
            engine.save_checkpoint(out.parent / "checkpoints")
            return engine.state_dict(), engine.master_state_dict()
    finally:
        zero3.checkpoint.export.RANGE = usual


@pytest.mark.parametrize("place", PLACES)
def test_one_file_has_what_all_ranks_have(ranks: Ranks, nvme: Path, tmp_path: Path, place: str) -> None:
    out = tmp_path / "out"
    weights, masters = ranks(2).run(save, nvme, out, **PLACES[place])[0]
    del weights["head.weight"]
    assert {each.name for each in out.iterdir()} == {"model.safetensors", "later.safetensors"}
    assert differing(load_file(out / "later.safetensors"), weights) == []
    assert differing(load_file(out / "model.safetensors"), weights) != []
    assert main(["convert", str(tmp_path / "checkpoints"), str(tmp_path / "converted")]) == 0
    assert differing(load_file(tmp_path / "converted" / "model.safetensors"), masters) == []


def fail(rank: int, nvme: Path, out: Path) -> tuple[str, float]:
    """What the error was, and what the next step gives."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with start(nvme, precision="bf16") as engine:
        step(engine, rank)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
        try:
            engine.save_16bit_model(out)
        except CheckpointError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        step(engine, rank)
        return message, float(engine.master_state_dict()["embedding.weight"].sum())


def test_a_full_disk_on_the_first_rank_is_told_to_all(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    (first, sum_of_first), (second, sum_of_second) = ranks(2).run(fail, nvme, tmp_path / "out")
    assert "EFBIG" in first and not first.startswith("[TIER-CHECKPOINT] rank 0")
    assert "rank 0, which writes for all, could not save" in second and "EFBIG" in second
    assert sum_of_first == sum_of_second and not torch.tensor(sum_of_first).isnan()
    assert not (tmp_path / "out").exists()
