"""``activations: "auto"``: moves nothing where all fits, the oldest and the least otherwise, and changes no bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.zero3.conftest import same_bits
from tests.zero3.passes.test_moved_activations import MIB, NVME, Chain, moved_by, start, update
from tiering.placement.workload import Tier
from zero3.engine.engine import Engine
from zero3.passes.activation_copies import Moved
from zero3.passes.kept_activations import FixedRoom, KeptActivations, LearnedRoom

__all__ = ["start"]


def kept_by(engine: Engine) -> KeptActivations:
    kept = moved_by(engine)._kept
    assert kept is not None
    return kept


def with_room(start: Callable[..., Engine], nbytes: int, **settings: Any) -> Engine:
    """An engine of 24 links whose device budget leaves ``nbytes`` for activations."""
    used = start(Chain(24), activation_budget=8 * MIB, **settings).plan.total(Tier.DEVICE)
    return start(
        Chain(24), activations="auto", activation_budget=8 * MIB, device_budget=used + nbytes, **settings
    )


@pytest.mark.one_of(2)
@pytest.mark.parametrize("room", [24, 23, 16, 4, 0])
def test_what_fits_stays_and_the_least_moves(start: Callable[..., Engine], room: int) -> None:
    plain = start(Chain(24), **NVME)
    engine = with_room(start, room * MIB, **NVME)
    peaks, moved = [], moved_by(engine)
    for scale in (1.0, 1.5, 2.0):
        loss = engine(scale)
        peaks.append(kept_by(engine).used)
        engine.backward(loss)
        engine.step()
        assert float(loss.detach()) == update(plain, scale)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    assert peaks == [room * MIB] * 3
    assert moved.copied_bytes == 3 * (24 - room) * MIB
    # Half of the memory of activations has room for four.
    assert moved.written_bytes == moved.read_bytes == 3 * max(0, 24 - room - 4) * MIB
    gc.collect()
    assert kept_by(engine).used == 0 and moved.used == {"host": 0, "nvme": 0}


def test_what_backward_needs_first_stays(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_room(start, 8 * MIB, **NVME)
    moved, order = moved_by(engine), []
    give = moved.give
    monkeypatch.setattr(
        moved,
        "give",
        lambda packed: (order.append(isinstance(packed, Moved) or packed.moved is not None), give(packed))[1],
    )
    update(engine, 1.0)
    # The square and the last tanh have saved one tensor.
    assert order == [False] * 9 + [True] * 16


def test_a_tensor_that_has_left_and_is_saved_again_stays_away(start: Callable[..., Engine]) -> None:
    """Its copy serves both: nothing else makes way for it."""

    class Joined(Chain):
        def forward(self, scale: float) -> Tensor:
            first = stream = (self.weight * scale).tanh()
            for _ in range(self.links - 1):
                stream = stream.tanh()
            return (stream * first).mean()

    plain = start(Joined(24), **NVME)
    used = plain.plan.total(Tier.DEVICE)
    engine = start(
        Joined(24), activations="auto", activation_budget=8 * MIB, device_budget=used + 4 * MIB, **NVME
    )
    assert update(engine, 1.0) == update(plain, 1.0)
    assert moved_by(engine).copied_bytes == (24 - 4) * MIB
    assert not same_bits(engine.state_dict(), plain.state_dict())


def test_graphs_in_flight_share_the_room(start: Callable[..., Engine]) -> None:
    """Four forwards, whose backwards run in the order of the forwards: 96 MiB, of which 16 stay."""
    plain = start(Chain(24), accumulation=4, **NVME)
    engine = with_room(start, 16 * MIB, accumulation=4, **NVME)
    for each in (engine, plain):
        losses = [each(1.0 + scale) for scale in range(4)]
        if each is engine:
            assert kept_by(engine).used == 16 * MIB
        for loss in losses:
            each.backward(loss)
            each.step()
    assert moved_by(engine).copied_bytes == (96 - 16) * MIB
    assert not same_bits(engine.state_dict(), plain.state_dict())


def test_a_tensor_that_was_changed_is_refused_wherever_it_is(start: Callable[..., Engine]) -> None:
    class Edited(Chain):
        def forward(self, scale: float) -> Tensor:
            first = (self.weight * scale).tanh()
            second = first.tanh()
            with torch.no_grad():
                first.add_(1)
            for _ in range(4):
                second = second.tanh()
            return second.square().mean()

    for budget in ("1MiB", "1GiB"):
        engine = start(Edited(1), activations="auto", activation_budget=8 * MIB, device_budget=budget, **NVME)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(engine(1.0))


def test_without_room_elsewhere_all_stay(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    plain = start(Chain(24), offload_optimizer="cpu")
    engine = with_room(start, 4 * MIB, offload_optimizer="cpu")
    loss = engine(1.0)
    assert kept_by(engine).used == (24 - 8) * MIB
    engine.backward(loss)
    engine.step()
    assert float(loss.detach()) == update(plain, 1.0)
    assert moved_by(engine).copied_bytes == 8 * MIB
    assert "raise tiering.activation_budget" in caplog.text
    assert not same_bits(engine.state_dict(), plain.state_dict())


PAGES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(PAGES, st.integers(0, 40), st.integers(0, 2**32))
def test_the_youngest_stay_within_the_room(sizes: list[int], room: int, seed: int) -> None:
    """As many of the youngest as fit, and not one more moves; ends come in any order."""
    kept, gone = KeptActivations(FixedRoom(room)), list[int]()

    def move(tensor: Tensor) -> Any:
        gone.append(tensor.numel())
        return object()

    saved = []
    for size in sizes:
        saved.append(kept.keep(torch.zeros(size, dtype=torch.uint8), move))
        assert kept.used <= room
    stay, total = 0, 0
    for size in reversed(sizes):
        total += size
        stay += total <= room
        if total > room:
            break
    assert gone == sizes[: len(sizes) - stay]
    assert [each.tensor is None for each in saved] == [True] * len(gone) + [False] * stay
    assert kept.used == sum(sizes[len(gone) :])
    random.Random(seed).shuffle(saved)
    while saved:
        saved.pop()
        assert kept.used == sum(each.tensor.numel() for each in saved if each.tensor is not None)


def test_a_storage_at_the_address_of_a_freed_one_counts_with_its_own_bytes() -> None:
    kept, addresses = KeptActivations(FixedRoom(1000)), list[int]()
    for size in range(1, 65):
        tensor = torch.zeros(size, dtype=torch.uint8)
        addresses.append(tensor.untyped_storage()._cdata)
        # The one before ends here.
        saved = kept.keep(tensor, lambda _: None)
    assert len({*addresses}) < len(addresses)
    assert saved.tensor is not None and kept.used == 64


def test_tensors_of_one_storage_count_once_and_leave_together() -> None:
    kept = KeptActivations(FixedRoom(10))
    shared = torch.zeros(8, dtype=torch.uint8)
    first, second = kept.keep(shared, lambda _: object()), kept.keep(shared[2:], lambda _: object())
    assert kept.used == 8 and first.tensor is not None
    kept.keep(torch.zeros(4, dtype=torch.uint8), lambda _: object())
    assert first.tensor is None and second.tensor is None
    # Nobody has the last one.
    assert kept.used == 0


def test_what_is_saved_again_is_needed_first() -> None:
    kept, gone = KeptActivations(FixedRoom(8)), []
    early, late = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    tensors = [early, late, early, torch.zeros(4, dtype=torch.uint8)]
    saved = [kept.keep(each, lambda tensor: gone.append(int(tensor[0])) or object()) for each in tensors]
    assert gone == [1] and saved[1].tensor is None and saved[0].tensor is not None


def test_the_room_on_a_gpu_is_what_a_pass_leaves() -> None:
    peak = [100]
    room = LearnedRoom(1000, lambda: peak[0])

    def trained(saved: int, most: int) -> list[int]:
        """The rooms during a pass that saves ``saved`` in two parts, and lets torch have ``most`` bytes."""
        room.begin_pass()
        rooms = [room.of(saved // 2), room.of(saved)]
        peak[0] = max(peak[0], most)
        room.end_backward(saved)
        return rooms

    assert trained(200, 300) == [0, 0]  # all moves, to learn that it needs 300
    assert trained(200, 500) == [700, 700]
    assert trained(100, 400) == [700, 700]
    # A longer pass: all moves from where it is longer.
    assert trained(400, 450) == [700, 0]
    # No more than in the second pass was allocated, but about twice what the first one needed.
    assert trained(400, 900) == [500, 500]
    assert trained(800, 950) == [500, 0]
    assert trained(800, 950) == [50, 50]
