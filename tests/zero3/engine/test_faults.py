"""What fails in mid-training is told where it shows, never trained on, and leaves nothing behind."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiering._interrupts import deferred_interrupts
from tiering.errors import SwapError
from tiering.storage.aio import Fault
from tiering.storage.arena import Lease
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import SwapSpace
from zero3.engine.engine import Engine
from zero3.optimizer.tile_stepper import TileStepper

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}

pytestmark = pytest.mark.usefixtures("starve_soon")


def update(engine: Engine, batch: Any) -> float:
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def test_a_write_that_fails_is_told_by_the_next_use_or_by_close(
    start: Callable[..., Engine], plan_fault: Callable[..., None], micro_batches: Any
) -> None:
    for first in range(1, 80, 7):
        plan_fault(Fault("write", first=first, error=errno.EIO))
        with pytest.raises(SwapError, match=r"EIO|ECANCELED"):  # noqa: PT012 (whichever call tells it first)
            engine = start(accumulation=1, **STREAMED)
            try:
                for batch in micro_batches(12):
                    update(engine, batch)
                engine.master_state_dict()
            finally:
                engine.close()


def test_a_failing_loss_backward_leaves_the_engine_usable(
    start: Callable[..., Engine], micro_batches: Any
) -> None:
    disturbed, calm = start(accumulation=1, **STREAMED), start(accumulation=1, **STREAMED)
    batches = list(micro_batches(3))

    def stop(gradient: torch.Tensor) -> None:
        raise ValueError("the user's own hook")

    failing = disturbed(*batches[0])
    for parameter in disturbed.module.blocks[1].parameters():  # type: ignore[index, union-attr]
        handle = parameter.register_hook(stop)
        break
    with pytest.raises(ValueError, match="own hook"):
        failing.backward()
    handle.remove()
    for batch in batches:
        losses = []
        for engine in (disturbed, calm):
            loss = engine(*batch)
            loss.backward()
            engine.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert disturbed.get_global_grad_norm() == calm.get_global_grad_norm()


@pytest.mark.parametrize("placement", [{}, STREAMED])
def test_ctrl_c_in_a_step_waits_for_its_end(
    start: Callable[..., Engine],
    train: Callable[..., Any],
    micro_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: dict[str, Any],
) -> None:
    reference = train(3, accumulation=1, **placement)
    engine = start(accumulation=1, **placement)
    add = TileStepper._add_to_batch
    armed = True

    def interrupted(*args: Any) -> None:
        nonlocal armed
        if armed and engine.global_steps == 2:
            armed = False
            signal.raise_signal(signal.SIGINT)
        add(*args)

    monkeypatch.setattr(TileStepper, "_add_to_batch", interrupted)
    before = signal.getsignal(signal.SIGINT)
    for number, (tokens, targets) in enumerate(micro_batches(3), start=1):
        engine.backward(engine(tokens, targets))
        if number == 2:
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        else:
            engine.step()
        assert engine.global_steps == number
    assert not armed
    assert signal.getsignal(signal.SIGINT) is before
    masters = engine.master_state_dict()
    assert all(torch.equal(masters[name], reference.masters[name]) for name in masters)


def test_ctrl_c_while_gradients_are_dropped_drops_each_of_them_once(
    start: Callable[..., Engine],
    train: Callable[..., Any],
    micro_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes after an exception in backward, as soon as the first window of gradients is released."""
    options = {**STREAMED, "accumulation": 1, "host_budget": "250KiB"}
    reference, engine = train(1, **options), start(**options)
    windows, release, armed = engine._tiers.windows["gradients"], Lease.release, True

    def interrupted(lease: Lease) -> None:
        nonlocal armed
        release(lease)
        if armed and lease.arena is windows:
            armed = False
            signal.raise_signal(signal.SIGINT)

    def fail(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(Lease, "release", interrupted)
    tokens, targets = next(micro_batches(1))
    handle = engine.module.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine(tokens, targets))
    assert not armed
    handle.remove()
    engine.backward(engine(tokens, targets))
    engine.step()
    windows.drain()
    assert not windows.by_kind
    masters = engine.master_state_dict()
    assert all(torch.equal(masters[name], reference.masters[name]) for name in masters)


def test_a_second_ctrl_c_goes_through_at_once() -> None:
    reached: list[int] = []

    def press_twice() -> None:
        with deferred_interrupts():
            for press in (1, 2):
                signal.raise_signal(signal.SIGINT)
                reached.append(press)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == [1]


def test_a_read_ahead_that_fails_again_and_again_keeps_no_slot(
    start: Callable[..., Engine],
    train: Callable[..., Any],
    micro_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = train(1, accumulation=1, **STREAMED)
    engine = start(accumulation=1, **STREAMED)
    states = {tile.state.extent for tile in engine.optimizer.stepper._streamed}
    swap_in = SwapSpace.swap_in
    failing = True

    def refused(swap: SwapSpace, extent: StripedExtent, *args: Any, **options: Any) -> Any:
        if failing and extent in states:
            raise SwapError("planted", errno=errno.EIO, filename="swap", offset=0)
        return swap_in(swap, extent, *args, **options)

    monkeypatch.setattr(SwapSpace, "swap_in", refused)
    tokens, targets = next(micro_batches(1))
    for _ in range(2 * engine.plan.staging.slots):
        with pytest.raises(SwapError, match="planted"):
            engine.backward(engine(tokens, targets))
    failing = False
    engine.backward(engine(tokens, targets))
    engine.step()
    masters = engine.master_state_dict()
    assert all(torch.equal(masters[name], reference.masters[name]) for name in masters)
