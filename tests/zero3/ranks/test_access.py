"""Reading and writing by name, where each rank has a share: all ranks call, all get the whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiering
from tests.zero3.plain import differing

from .pool import Pool
from .training import start, tokens, train

Ranks = Callable[..., Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, nvme": {"stage": 2, "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3": {"stage": 3},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
each_place = pytest.mark.parametrize("place", PLACES)
# One parameter of each kind of group.
NAMES = ["blocks.0.up.weight", "blocks.1.norm.bias", "embedding.weight", "position.weight"]
UP = NAMES[0]


def forward_backward(engine: Any, rank: int, world_size: int = 2) -> None:
    engine.backward(engine(*next(tokens(1, world_size))[rank]))


def read(rank: int, nvme: Path, **options: Any) -> dict[str, Tensor]:
    """Everything that can be read by name, after two steps and a backward."""
    with start(nvme, **options) as engine:
        for shares in tokens(2, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
        forward_backward(engine, rank)
        values = {}
        for name in NAMES:
            values[f"{name} master"] = engine.get_fp32_parameter(name)
            values[f"{name} gradient"] = engine.get_fp32_gradient(name)
            for key in engine.state_names:
                values[f"{name} {key}"] = engine.get_fp32_state(name, key)
        with tiering.gathered(engine.module):
            values |= {f"{n} gathered": p.detach().clone() for n, p in engine.module.named_parameters()}
        values |= {f"{name} in state_dict": value for name, value in engine.state_dict().items()}
        values |= {f"{name} in module": value.clone() for name, value in engine.module.state_dict().items()}
        values |= {f"{name} in masters": value for name, value in engine.master_state_dict().items()}
        engine.step()
        return values


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_and_rank_reads_the_same(ranks: Ranks, nvme: Path, precision: str) -> None:
    expected = ranks(2).run(read, nvme, precision=precision, stage=0)[0]
    assert all(value.any() for value in expected.values()) and len(expected) > 50
    for place, options in PLACES.items():
        for rank, values in enumerate(ranks(2).run(read, nvme, precision=precision, **options)):
            assert differing(values, expected) == [], f"{place}, rank {rank}"


def write(rank: int, nvme: Path, **options: Any) -> list[str]:
    """Set everything by name and read it back; which values were not those that were set."""
    wrong = []
    generator = torch.Generator().manual_seed(1)
    with start(nvme, **options) as engine:
        forward_backward(engine, rank)
        for name in NAMES:
            shape = tuple(engine.get_fp32_parameter(name).shape)
            value, gradient, moment = (torch.rand(shape, generator=generator) for _ in range(3))
            engine.set_fp32_gradient(name, gradient)
            engine.set_fp32_parameter(name, value)
            engine.set_fp32_state(name, "exp_avg_sq", moment)
            pairs = {
                "gradient": (engine.get_fp32_gradient(name), gradient),
                "parameter": (engine.get_fp32_parameter(name), value),
                "state": (engine.get_fp32_state(name, "exp_avg_sq"), moment),
                "weights": (engine.state_dict()[name], value),
            }
            wrong += [
                f"{name} {kind}" for kind, (first, other) in pairs.items() if not torch.equal(first, other)
            ]
        engine.step()
        if torch.equal(engine.get_fp32_parameter(UP), value):
            wrong.append("the step changed nothing")
    return wrong


@each_place
def test_what_is_set_is_there(ranks: Ranks, nvme: Path, place: str) -> None:
    assert ranks(2).run(write, nvme, **PLACES[place]) == [[], []]


def edit(rank: int, nvme: Path, **options: Any) -> dict[str, Tensor]:
    """Each rank edits in its own way inside ``gathered``; a step follows."""
    with start(nvme, **options) as engine:
        weight = engine.module.blocks[0].up.weight
        with tiering.gathered(weight, modify=True), torch.no_grad():
            weight[3] = 0.5 + rank
            weight[-1] = -0.25
        values = {"before": engine.get_fp32_parameter(UP)}
        forward_backward(engine, rank)
        engine.step()
        return values | {"after": engine.get_fp32_parameter(UP), "weight": engine.state_dict()[UP]}


@each_place
def test_inside_gathered_the_edit_of_rank_0_counts(ranks: Ranks, nvme: Path, place: str) -> None:
    first, second = ranks(2).run(edit, nvme, **PLACES[place])
    assert differing(first, second) == []
    assert (first["before"][3] == 0.5).all() and (first["before"][-1] == -0.25).all()
    assert not first["after"].equal(first["before"]) and (first["after"][3] - 0.5).abs().max() < 0.1


def look(rank: int, nvme: Path, **options: Any) -> bool:
    """A forward inside ``gathered`` of the whole model is as any other."""
    with start(nvme, **options) as engine:
        batch = next(tokens(1, 2))[rank]
        with torch.no_grad():
            plain = engine(*batch)
            with tiering.gathered(engine.module):
                return torch.equal(engine(*batch), plain)


@each_place
def test_a_gathered_model_computes_the_same(ranks: Ranks, nvme: Path, place: str) -> None:
    assert ranks(2).run(look, nvme, **PLACES[place]) == [True, True]


def evaluate(rank: int, nvme: Path, **options: Any) -> Any:
    """Training with evaluation in between, in which each rank sees as many batches as the others."""
    with start(nvme, **options) as engine:
        for shares in tokens(3, 2):
            engine.eval()
            with torch.no_grad():
                engine(*shares[1 - rank])
            engine.train()
            engine.backward(engine(*shares[rank]))
            engine.step()
        return engine.master_state_dict()


@each_place
def test_evaluation_in_between_changes_no_bit(ranks: Ranks, nvme: Path, place: str) -> None:
    expected = ranks(2).run(train, nvme, **PLACES[place])[0].masters
    for values in ranks(2).run(evaluate, nvme, **PLACES[place]):
        assert differing(values, expected) == []


CALLS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda engine: engine.state_dict(),
    "master_state_dict": lambda engine: engine.master_state_dict(),
    "get_fp32_parameter": lambda engine: engine.get_fp32_parameter(UP),
    "get_fp32_gradient": lambda engine: engine.get_fp32_gradient(UP),
    "get_fp32_state": lambda engine: engine.get_fp32_state(UP, "exp_avg"),
    "gathered": lambda engine: tiering.gathered(engine.module).__enter__(),
    "module.state_dict": lambda engine: engine.module.state_dict(),
}


def alone(rank: int, nvme: Path, call: str, where: str) -> None:
    """Rank 0 calls by itself, after the first backward of the second step or after the last."""
    engine = start(nvme, accumulation=2, distributed={"timeout": 6, "silence": 5})
    for number, shares in enumerate(tokens(6, 2)):
        engine.backward(engine(*shares[rank]))
        if rank == 0 and number == {"before a forward": 2, "before the step": 3}[where]:
            CALLS[call](engine)
        engine.step()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("call", "where"), [(call, "before a forward") for call in CALLS] + [("state_dict", "before the step")]
)
def test_a_call_for_all_on_rank_0_only_is_an_error_that_names_it(
    doomed: Ranks, nvme: Path, call: str, where: str
) -> None:
    """The commonest mistake: `if rank == 0: torch.save(engine.state_dict(), ...)`."""
    for outcome in doomed(2).outcomes(alone, nvme, call, where):
        assert outcome.error is not None, outcome.report()
        assert "DistributedError" in outcome.error.kinds, outcome.report()
        assert outcome.seconds < 20, outcome.report()
        # The message depends on which rank notices first: "waits to read", or "rank 0 in 'read ...'".
        assert re.search(r"rank 0\b.*\bread ", outcome.error.message), outcome.report()
