"""A script with DeepSpeed's names on several ranks: the native way to the bit, whichever launcher has started it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering as deepspeed
from tests.zero3.plain import differing
from tests.zero3.tutorial import CONFIG, WIDTH, data, net, tutorial
from tiering.errors import EngineStateError

from .pool import Pool
from .training import start

Ranks = Callable[[int], Pool]


def both_ways(rank: int, path: str) -> tuple[list[float], list[str], int]:
    """The losses of the script, what the native way leaves that is not the same, and how many ranks there were."""
    losses, state = tutorial(deepspeed, ["--deepspeed_config", path, f"--local_rank={rank}"])
    engine, _, loader, _ = deepspeed.initialize(model=net(), config=CONFIG, training_data=data())
    with engine:
        native = []
        for _ in range(2):
            for x, y in loader:
                loss = nn.functional.cross_entropy(engine(x), y)
                engine.backward(loss)
                engine.step()
                native.append(loss.item())
        wrong = [] if losses == native else ["losses"]
        return losses, wrong + differing(state, engine.master_state_dict()), engine.world_size


def test_the_usual_script_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    first, second = ranks(2).run(both_ways, str(path))
    assert (first[1:], second[1:]) == (([], 2), ([], 2))
    assert len(first[0]) == 8, "half of the data each"
    assert first[0] != second[0], "each its own half"


def joined(rank: int, by: str) -> tuple[float, int, int, int]:
    """Without torchrun's variables, but for where rank 0 is: as srun starts a process, or a script that knows."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    arguments = {}
    if by in ("srun", "initialize"):
        os.environ |= {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank)}
    else:
        arguments = {"rank": rank, "world_size": 2}
    if by == "initialize":  # which joins by itself
        deepspeed.initialize(model=net(), config=CONFIG)[0].close()
    else:
        deepspeed.init_distributed(timeout=timedelta(seconds=60), **arguments)
    value = torch.tensor([rank + 1.0])
    deepspeed.comm.all_reduce(value)
    deepspeed.comm.barrier()
    engine, *_ = deepspeed.initialize(model=net(), config=CONFIG)
    with engine:
        return value.item(), engine.global_rank, deepspeed.comm.get_world_size(), engine.local_rank


@pytest.mark.parametrize("by", ["srun", "arguments", "initialize"])
def test_ranks_find_each_other_without_torchrun(doomed: Callable[..., Pool], by: str) -> None:
    assert doomed(2).run(joined, by) == [(3.0, 0, 2, 0), (3.0, 1, 2, 1)]


def give_another_shape(rank: int, param: nn.Parameter) -> None:
    with deepspeed.zero.GatheredParameters(param, modifier_rank=1):
        if rank == 1:
            param.data = torch.ones(3)


def set_by_rank_1(rank: int, nvme: Path, **options: Any) -> tuple[dict[str, Tensor], str]:
    """In place; by memory of another dtype, which only that rank has; and by what does not fit."""
    with start(nvme, **options) as engine:
        block = engine.module.blocks[0]
        with deepspeed.zero.GatheredParameters([block.up.weight, block.up.bias], modifier_rank=1):
            with torch.no_grad():
                block.up.weight.fill_(rank + 0.5)
            if rank == 1:
                block.up.bias.data = torch.full(block.up.bias.shape, 1 / 3)
        with pytest.raises(EngineStateError, match=r"up.bias' of shape \(192,\) has") as refused:
            give_another_shape(rank, block.up.bias)
        state: dict[str, Tensor] = engine.master_state_dict()
        return state, str(refused.value)


def test_what_the_modifier_rank_has_made_of_a_parameter_stays(ranks: Ranks, nvme: Path) -> None:
    options = {"threshold": 0, "offload_param": "nvme", "cache_in_host": False, "precision": "bf16"}
    (first, at_0), (second, at_1) = ranks(2).run(set_by_rank_1, nvme, **options)
    assert differing(first, second) == []
    assert (first["blocks.0.up.weight"] == 1.5).all()
    assert (first["blocks.0.up.bias"] == 1 / torch.tensor(3.0)).all(), "all bits of it, in the master"
    assert "another shape or dtype on rank 1" in at_0 and "dtype torch.float32 and shape (3,) now" in at_1


def skip_a_batch(rank: int, nvme: Path, stage: int, skips: bool) -> dict[str, Tensor]:
    """One that all ranks know to be bad, and one that they have not even told each other of."""
    generator = torch.Generator().manual_seed(rank)
    with start(nvme, net, accumulation=1, stage=stage, precision="fp32") as engine:
        for syncs in (True, False) if skips else ():
            with nullcontext() if syncs else engine.no_sync():
                engine.backward(engine(torch.full((2, WIDTH), 100.0)).square().mean())
            engine.zero_grad()
        for _ in range(2):
            engine.backward(engine(torch.randn(2, WIDTH, generator=generator)).square().mean())
            engine.step()
        state: dict[str, Tensor] = engine.master_state_dict()
        return state


@pytest.mark.parametrize("stage", [0, 3])
def test_a_bad_batch_is_skipped_on_all_ranks(ranks: Ranks, nvme: Path, stage: int) -> None:
    pool = ranks(2)
    skipped, without = pool.run(skip_a_batch, nvme, stage, True), pool.run(skip_a_batch, nvme, stage, False)
    assert differing(skipped[0], without[0]) == differing(skipped[1], without[1]) == []
    assert differing(*skipped) == []


def whole_model(rank: int, nvme: Path) -> tuple[list[str], list[str]] | None:
    """What differs on rank 0 from the values, and the names without frozen parameters."""
    with start(nvme, offload_param="nvme", offload_optimizer="nvme", cache_in_host=False) as engine:
        engine.module.position.weight.requires_grad_(False)
        state = engine._zero3_consolidated_16bit_state_dict()
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        values = engine.state_dict()
        assert (state is None) == (trained is None)
        return None if state is None else (differing(state, values), sorted(set(values) - set(trained)))


def test_rank_0_has_the_whole_model(ranks: Ranks, nvme: Path) -> None:
    assert ranks(2).run(whole_model, nvme) == [([], ["position.weight"]), None]
