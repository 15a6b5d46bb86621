"""A step that an I/O error or a second Ctrl-C ends: the step before, or the whole step with the bits of a calm run."""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.signals import interrupted
from tests.zero3.plain import ADAM, STREAMED, Tower, assert_nothing_held, differing, inputs
from tiering.errors import SwapError
from tiering.storage.aio import Fault
from tiering.storage.read_ahead import StagingPipeline
from tiering.storage.striped_extent import TransferOrder
from tiering.storage.swap_space import SwapSpace
from zero3.optimizer.slot_transfers import SlotTransfers, TileRun

Start = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("starve_soon")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "memory": {},
    "nvme": {**STREAMED, "sub_group_size": 1},
    "nvme, deferred": {**STREAMED, "sub_group_size": 1000, "step": "deferred"},
    "nvme, ahead": {
        **STREAMED,
        "sub_group_size": 1000,
        "step_in_backward": True,
        "swap_versions": 2,
        "clip": 1.0,
    },
    "nvme, little room": {**STREAMED, "host_budget": "256KiB", "device_budget": "128KiB"},
    "state in memory": {"offload_param": "nvme", "offload_optimizer": "cpu", "sub_group_size": 1000},
    "a share on nvme": {
        "offload_optimizer": "nvme",
        "ratio": 0.4,
        "cache_in_host": False,
        "sub_group_size": 1000,
    },
}
GRADIENTS_TOO: dict[str, Any] = {
    **STREAMED,
    "sub_group_size": 1000,
    "host_budget": "128KiB",
    "device_budget": "24KiB",
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "masters": {},
    "split": {"state": "split"},
    "split and bf16": {"state": "split+bf16"},
}


def begin(start: Start, **options: Any) -> Any:
    torch.manual_seed(11)
    settings = {"optimizer": ADAM, "accumulation": 1, "threshold": 0, "clip": 0.1} | options
    engine = start(Tower(), **settings)
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7)
    return engine


def micro_batch(engine: Any, x: torch.Tensor, losses: list[float]) -> None:
    loss = engine(x)
    losses.append(loss.item())
    engine.backward(loss)


def train(
    engine: Any, accumulation: int = 1, disturb: Callable[[Callable[[], None]], object] | None = None
) -> list[float]:
    """Three updates; ``disturb`` makes the step of the second one. It is made again unless it has begun."""
    losses: list[float] = []
    for update in range(3):
        micro_batches = list(inputs(accumulation, seed=update))
        for x in micro_batches[:-1]:
            micro_batch(engine, x, losses)
            engine.step()
        micro_batch(engine, micro_batches[-1], losses)
        if update != 1 or disturb is None:
            engine.step()
            continue
        disturb(engine.step)
        if engine.global_steps == 1 and not engine._updates.current_step.pending:
            # All of its gradients were dropped.
            again: list[float] = []
            for x in micro_batches[:-1]:
                micro_batch(engine, x, again)
                engine.step()
            micro_batch(engine, micro_batches[-1], again)
            assert again == losses[-accumulation:]
        if engine.global_steps == 1:
            engine.step()
    return losses


def outcome(engine: Any) -> Any:
    names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    moments = {
        f"{name} {key}": engine.get_fp32_state(name, key) for name in names for key in engine.state_names
    }
    counters = (
        engine.global_steps,
        engine.micro_steps,
        engine.optimizer.steps,
        engine.optimizer.param_groups[0]["lr"],
    )
    return {**moments, **engine.master_state_dict()}, engine.state_dict(), counters


def assert_same(found: Any, expected: Any, where: object) -> None:
    assert differing(found[0], expected[0]) == [], where
    assert differing(found[1], expected[1]) == [], where
    assert found[2] == expected[2], where


@pytest.mark.one_of(5)
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_second_ctrl_c_anywhere_in_a_step(
    start: Start, placement: str, state: str, accumulation: int
) -> None:
    options = PLACEMENTS[placement] | FORMATS[state] | {"accumulation": accumulation}
    calm = begin(start, **options)
    losses, expected = train(calm, accumulation), outcome(calm)
    numbers, moment, begun, met = random.Random(placement + state), 0, 0, ["the first"]
    while met:
        moment += numbers.randrange(1, max(60, moment))
        met = []
        engine = begin(start, **options)
        press_twice = partial(interrupted, moment=moment, met=met, number=signal.SIGINT, times=2)
        assert train(engine, accumulation, press_twice) == losses, met
        assert_same(outcome(engine), expected, met)
        assert_nothing_held(engine)
        engine.close()
        begun += bool(met)
    assert begun > 2


def reads_of(engine: Any) -> int:
    return sum(file.read.ops for file in engine._tiers.aio.stats())


class Insisting:
    """A user who makes each call again after an I/O error. ``in_step`` counts those that have interrupted a step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.failures = self.in_step = 0

    def __call__(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SwapError:
            self._count()
            return self(call)

    def _count(self) -> None:
        self.failures += 1
        self.in_step += self.engine._updates.deferring

    def forward_and_backward(self, x: torch.Tensor) -> float:
        loss = self.engine(x)
        self.engine.backward(loss)
        return float(loss.detach())

    def update(self, x: torch.Tensor) -> float:
        steps, loss = self.engine.global_steps, self(partial(self.forward_and_backward, x))
        try:
            self.engine.step()
        except SwapError:
            self._count()
            if self.engine.global_steps == steps:
                return self.update(x)
        return loss


@pytest.mark.parametrize("placement", ["nvme", "nvme, deferred", "nvme, little room", "a share on nvme"])
def test_a_read_that_fails_is_made_again(
    start: Start, plan_fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """Some fail in a step, and some of those when other tiles of it are updated."""
    options, in_step = PLACEMENTS[placement], list[object]()

    def drop_failed(*args: Any, original: Any = StagingPipeline._drop_failed) -> None:
        in_step.append(args)
        original(*args)

    monkeypatch.setattr(StagingPipeline, "_drop_failed", drop_failed)
    plan_fault()
    calm = begin(start, **options)
    losses, expected = train(calm), outcome(calm)
    reads = reads_of(calm)
    for number, first in enumerate([*range(2, reads, reads // 10), *range(3, reads)]):
        if number > 9 and in_step:
            break
        plan_fault(Fault("read", first=first, error=errno.ENXIO))
        user = Insisting(begin(start, **options))
        assert [user.update(next(inputs(1, seed=update))) for update in range(3)] == losses, first
        assert_same(user(partial(outcome, user.engine)), expected, first)
        assert user.failures <= 1
        # It may have been a read ahead that was dropped.
        with suppress(SwapError):
            user.engine.close()
    assert in_step, "no read has failed that a step waited for: this test shows nothing"


@pytest.mark.parametrize("placement", ["nvme", "nvme, deferred", "nvme, ahead", "a share on nvme"])
def test_with_two_versions_a_tile_whose_write_fails_is_updated_again(
    start: Start, plan_fault: Callable[..., None], placement: str
) -> None:
    """The write ends behind step(): whoever needs the parameters next is told, and the call after that goes on."""
    options, in_step = PLACEMENTS[placement] | {"swap_versions": 2}, 0
    plan_fault()
    calm = begin(start, **options)
    filled = sum(file.write.ops for file in calm._tiers.aio.stats())
    losses, expected = train(calm), outcome(calm)
    writes = sum(file.write.ops for file in calm._tiers.aio.stats()) - filled
    for first in range(1, writes + 1, max(1, writes // 12)):
        plan_fault(Fault("write", first=filled + first, error=errno.ENXIO))
        user = Insisting(begin(start, **options))
        assert [user.update(next(inputs(1, seed=update))) for update in range(3)] == losses, first
        assert_same(user(partial(outcome, user.engine)), expected, first)
        assert_nothing_held(user.engine)
        in_step += user.in_step
        user.engine.close()
    assert in_step > 3, "few writes have failed behind a step: this test shows nothing"


@pytest.mark.parametrize("step", ["after", "deferred"])
def test_a_step_does_not_begin_with_gradients_that_were_not_written(
    start: Start, plan_fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It could never be completed: nothing writes them again."""
    options = GRADIENTS_TOO | {"swap_versions": 2, "step": step}
    writes: list[TransferOrder] = []

    def store(self: TransferOrder, transfer: Any, original: Any = TransferOrder.store) -> None:
        original(self, transfer)
        writes.extend([self] * transfer.writes)

    plan_fault()
    with monkeypatch.context() as counting:
        counting.setattr(TransferOrder, "store", store)
        calm = begin(start, **options)
        losses = train(calm)
    expected = outcome(calm)
    gradients = {home.extent.order for home in calm._updates._gradients.homes if home.on_nvme}
    of_gradients = [number for number, order in enumerate(writes, 1) if order in gradients]
    for first in of_gradients[:: len(of_gradients) // 4]:
        plan_fault(Fault("write", first=first, error=errno.ENXIO))
        user = Insisting(begin(start, **options))
        assert [user.update(next(inputs(1, seed=update))) for update in range(3)] == losses, first
        assert_same(user(partial(outcome, user.engine)), expected, first)
        assert user.failures and not user.in_step
        user.engine.close()


def test_a_read_that_fails_again_and_again_is_told_by_every_call(
    start: Start, plan_fault: Callable[..., None], nvme: Path, tmp_path: Path
) -> None:
    for first in range(2, 1000, 3):
        plan_fault(Fault("read", first=first, count=0, error=errno.ENXIO))
        engine = begin(start, **PLACEMENTS["nvme"])
        with pytest.raises(SwapError, match="ENXIO") as caught:
            train(engine)
        if engine._updates.deferring:
            break
        with suppress(SwapError):
            engine.close()
    number = engine.global_steps
    assert (
        f"Step {number} has begun. The next call that needs the parameters completes it."
        in caught.value.__notes__
    )
    for call in (
        partial(engine, next(inputs(1))),
        engine.step,
        engine.state_dict,
        engine.master_state_dict,
        partial(engine.get_fp32_state, "into.weight", "exp_avg"),
        partial(engine.save_checkpoint, tmp_path / "checkpoints"),
        engine.release,
    ):
        with pytest.raises(SwapError, match="ENXIO"):
            call()
        assert engine._updates.deferring and engine.global_steps == number
    # Reads ahead that nobody has waited for have failed, too.
    with suppress(SwapError):
        engine.close()
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_write_that_is_refused_is_made_again_from_the_slot(
    start: Start, monkeypatch: pytest.MonkeyPatch, in_run: bool, number: int
) -> None:
    """The first of a tile's two writes or the second: by then, one part of it is new on NVMe, and the other is not."""
    options = PLACEMENTS["nvme"] | {"precision": "fp32"}
    calm = begin(start, **options)
    losses, expected = train(calm), outcome(calm)
    engine = begin(start, **options)
    refused: list[int] = []

    def refuse(step: Callable[[], None]) -> None:
        with monkeypatch.context() as patched:
            if in_run:
                prepare = TileRun._prepare

                def prepare_invalid(run: TileRun) -> Any:
                    transfers = prepare(run)
                    refused.append(1)
                    run._writes[1][number]._request.priority = 99
                    return transfers

                patched.setattr(TileRun, "_prepare", prepare_invalid)
            else:
                patched.setattr(SlotTransfers, "moves_by_swap_alone", lambda *_: False)
                swap_out = SwapSpace.swap_out

                def refuse_one(*args: Any, **options: Any) -> Any:
                    refused.append(1)
                    if len(refused) == 5 + number:
                        raise SwapError("planted", errno=errno.EAGAIN, filename="swap", offset=0)
                    return swap_out(*args, **options)

                patched.setattr(SwapSpace, "swap_out", refuse_one)
            with pytest.raises((SwapError, ValueError)):
                step()
        assert engine._updates.deferring
        assert any(staged.updated for staged in engine._updates._stepper._pipeline.staged)

    assert train(engine, disturb=refuse) == losses
    assert refused
    assert_same(outcome(engine), expected, number)
