"""What all ranks have to agree on in a step: whether it is one, the loss scale, the norm, the clipping, and the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.zero3.plain import differing

from . import models
from .pool import Pool
from .training import assert_as_emulated, start, tokens, train

Ranks = Callable[[int], Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
each_place = pytest.mark.parametrize("place", PLACES)
Said = tuple[float, int, int, float | None]


def everything(engine: Any) -> dict[str, Tensor]:
    """Masters, parameters and state, by name."""
    state = {f"master.{name}": value for name, value in engine.master_state_dict().items()}
    state |= {f"param.{name}": value for name, value in engine.state_dict().items()}
    for name, _ in engine.module.named_parameters():
        for key in engine.state_names:
            state[f"{key}.{name}"] = engine.get_fp32_state(name, key)
    return state


def overflow(
    rank: int, nvme: Path, spoilt: dict[int, int], steps: int, **options: Any
) -> tuple[list[Said], list[list[str]]]:
    """fp16 training; in step s the loss of rank ``spoilt[s]`` is one that overflows. What changed in each step."""
    scaling = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 1}
    figures, changed = [], []
    with start(nvme, precision="fp16", fp16=scaling, **options) as engine:
        accumulation = engine.settings.gradient_accumulation_steps
        before = everything(engine)
        for number, shares in enumerate(tokens(steps * accumulation, 2)):
            loss = engine(*shares[rank])
            engine.backward(loss * 1e6 if spoilt.get(number // accumulation) == rank else loss)
            engine.step()
            if engine.micro_steps % accumulation == 0:
                after = everything(engine)
                changed.append(differing(before, after))
                before = after
                norm = engine.get_global_grad_norm()
                figures.append((engine.loss_scale.value, engine.skipped_steps, engine.global_steps, norm))
    return figures, changed


@pytest.mark.one_of(3)
@pytest.mark.parametrize("accumulation", [1, 2])
@each_place
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, nvme: Path, place: str, accumulation: int
) -> None:
    answers = ranks(2).run(overflow, nvme, {1: 1, 2: 0}, 6, accumulation=accumulation, **PLACES[place])
    (figures, changed), (other_figures, other_changed) = answers
    assert repr(figures) == repr(other_figures)  # a norm may be NaN, and has to be on both sides
    assert changed == other_changed
    assert [scale for scale, *_ in figures] == [256, 128, 64, 64, 64, 128]
    assert [skipped for _, skipped, *_ in figures] == [0, 1, 2, 2, 2, 2]
    assert [bool(names) for names in changed] == [True, False, False, True, True, True]


def spoil(rank: int, nvme: Path, where: int, **options: Any) -> tuple[int, list[str], list[str]]:
    """A NaN in one gradient of rank ``where``, in the second of three steps."""
    changed = []
    with start(nvme, models.Spoilt, threshold=0, **options) as engine:
        before = everything(engine)
        for number, shares in enumerate(models.vectors(3, 2)):
            engine.backward(engine(*shares[rank], number == 1 and rank == where))
            engine.step()
            after = everything(engine)
            changed.append(differing(before, after))
            before = after
        return engine.skipped_steps, *changed[1:]


@pytest.mark.parametrize("where", [0, 1])
@each_place
def test_a_nan_on_one_rank_skips_the_step_on_all_and_is_named(
    ranks: Ranks, nvme: Path, place: str, where: int
) -> None:
    outcomes = ranks(2).outcomes(spoil, nvme, where, **PLACES[place])
    for outcome in outcomes:
        assert outcome.fine, outcome.report()
        skipped, second, third = outcome.value
        assert skipped == 1 and second == [] and third != []
    assert f"the gradient of {models.Spoilt.NAME!r} is not finite" in outcomes[0].log


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("place", ["stage 1", "stage 3, nvme"])
def test_all_ranks_clip_by_the_norm_of_all(ranks: Ranks, nvme: Path, place: str, clip: float) -> None:
    """As emulated, where the norm is that of the whole gradient; and each rank tells the same."""
    runs = assert_as_emulated(ranks(2), nvme, clip=clip, **PLACES[place])
    assert runs[0].norms == runs[1].norms and min(runs[0].norms) > 1.0


def norms(rank: int, nvme: Path, **options: Any) -> list[float]:
    """Before each step and after it."""
    norms_read = []
    with start(nvme, **options) as engine:
        assert engine.get_global_grad_norm() is None
        for shares in tokens(2, 2):
            engine.backward(engine(*shares[rank]))
            norms_read.append(engine.get_global_grad_norm())
            engine.step()
            norms_read.append(engine.get_global_grad_norm())
    return norms_read


@each_place
def test_the_norm_is_the_same_before_the_step_and_after_it_and_on_all_ranks(
    ranks: Ranks, nvme: Path, place: str
) -> None:
    (first, second), plain = ranks(2).run(norms, nvme, **PLACES[place]), ranks(2).run(train, nvme, steps=2)
    assert first == second
    assert first[::2] == first[1::2] == plain[0].norms


def told_to_stop(
    rank: int, nvme: Path, signalled: int, during: str, **options: Any
) -> tuple[int, int, str, dict[str, Tensor]]:
    saved: dict[str, Tensor] = {}
    engine = start(nvme, **options)
    engine.save_and_exit_on("SIGUSR1", save=lambda: saved.update(engine.master_state_dict()))

    def tell(moment: str) -> None:
        if rank == signalled and moment == during and engine.global_steps == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    engine.module.blocks[1].register_forward_hook(lambda *_: tell("forward"))
    try:
        for shares in tokens(8, 2):
            loss = engine(*shares[rank])
            loss.register_hook(lambda grad: tell("backward"))
            engine.backward(loss)
            tell("between")
            engine.step()
    except SystemExit as end:
        return end.code, engine.global_steps, engine.stop_requested, saved
    raise AssertionError("it went on")


@pytest.mark.parametrize(
    ("during", "signalled"), [("forward", 0), ("backward", 1), ("between", 0), ("between", 1)]
)
@pytest.mark.parametrize("place", ["stage 0", "stage 3, nvme"])
def test_a_stop_signal_to_one_rank_ends_all_after_the_same_step(
    ranks: Ranks, nvme: Path, place: str, signalled: int, during: str
) -> None:
    answers = ranks(2).run(told_to_stop, nvme, signalled, during, **PLACES[place])
    assert [answer[:2] for answer in answers] == [(75, 2), (75, 2)]
    assert answers[signalled][2] == "SIGUSR1"
    after_two = ranks(2).run(train, nvme, steps=2)[0].masters
    for *_, saved in answers:
        assert differing(saved, after_two) == []


def asks(rank: int, nvme: Path, signalled: int) -> list[str]:
    requests = []
    with start(nvme) as engine:
        engine.save_and_exit_on("SIGUSR1")
        for number, shares in enumerate(tokens(3, 2)):
            if rank == signalled and number == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            engine.backward(engine(*shares[rank]))
            engine.step()
            requests.append(engine.stop_requested)
    return requests


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_loop_that_asks_hears_of_another_ranks_signal_after_the_step(
    ranks: Ranks, nvme: Path, signalled: int
) -> None:
    """A loop that ends by itself has to end on all ranks at once."""
    answers = ranks(2).run(asks, nvme, signalled)
    assert answers[signalled] == ["", "SIGUSR1", "SIGUSR1"]
    assert [bool(answer) for answer in answers[1 - signalled]] == [False, True, True]
