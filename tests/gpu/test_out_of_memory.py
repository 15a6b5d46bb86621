"""The GPU has no memory left: the engine says who has it, and goes on, or says that it cannot."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tiering.errors import EngineStateError

from .conftest import DEVICE, SEQUENCE, VOCABULARY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme, room for few groups": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "device_budget": "1MiB",
    },
}
SPARE = 64 << 20  # bytes beside what torch holds: enough for a batch of 4, not for one of 4096
TOO_MANY = 4096


@contextmanager
def little_memory(spare: int = SPARE) -> Iterator[None]:
    """Within the block torch gets no more of the device than it has in use, and ``spare`` bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def no_memory() -> Iterator[None]:
    """Within the block torch gets nothing of the device, not even out of what it has reserved."""
    blocks: list[Tensor] = []
    with little_memory(spare=0):
        for nbytes in (16 << 20, 1 << 20, 64 << 10, 512):
            with suppress(torch.OutOfMemoryError):
                while True:
                    blocks.append(torch.empty(nbytes, dtype=torch.uint8, device=DEVICE))
        yield
        blocks.clear()


def large_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (TOO_MANY, SEQUENCE + 1), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__
    return str(note)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_program_that_lowers_its_batch_goes_on_with_the_same_bits(
    start: Callable[..., Any], micro_batches: Callable[..., Any], placement: str, where: str
) -> None:
    batches = list(micro_batches(4))
    calm, tried = start(**PLACEMENTS[placement]), start(**PLACEMENTS[placement])
    large = large_batch()
    for number, batch in enumerate(batches):
        for engine in (calm, tried):
            if engine is tried and number == 2:
                gc.collect()
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                note = _run_out(tried, large, where)
                gc.collect()
                torch.cuda.synchronize()
                nbytes = torch.cuda.memory_allocated() - before
                assert nbytes < 1 << 20, "the batch that was too large is there still"
                assert f"of a device_budget of {'1.00' if 'few' in placement else '64.00'} MiB" in note
            engine.backward(engine(*batch))
            engine.step()
    assert tried.global_steps == calm.global_steps == 4
    masters = calm.master_state_dict()
    for name, master in tried.master_state_dict().items():
        assert torch.equal(master, masters[name]), name


def _run_out(engine: Any, batch: tuple[Tensor, Tensor], where: str) -> str:
    """What the error says of an engine whose ``where`` finds too little memory."""
    if where == "forward":
        with little_memory(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            engine(*batch)
        assert "in the state before this forward" in note_of(caught.value)
        return note_of(caught.value)
    loss = engine(*batch)
    with (
        little_memory(spare=0),
        pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught,
    ):
        engine.backward(loss)
    assert "the gradients since the last step are lost" in note_of(caught.value)
    return note_of(caught.value)


def test_a_step_that_is_cut_in_two_says_so(
    build: Callable[..., Any], small_model: type[nn.Module], micro_batches: Callable[..., Any], tmp_path: Any
) -> None:
    """A torch optimizer makes its state in its first step: there is room for a part of it."""
    torch.manual_seed(3)
    model = small_model()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "tiering": {"device_budget": "64MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}},
    }
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, foreach=False)
    batch = next(micro_batches(1))
    with tiering.initialize(model=model, optimizer=optimizer, config=settings).engine as engine:
        engine.backward(engine(*batch))
        with little_memory(spare=0), pytest.raises(torch.OutOfMemoryError) as caught:
            engine.step()
        assert "Close the engine (step 1 was ended by OutOfMemoryError" in note_of(caught.value)
        with pytest.raises(EngineStateError, match="partly updated"):
            engine(*batch)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gathered_without_room_changes_nothing(
    start: Callable[..., Any], micro_batches: Callable[..., Any], placement: str
) -> None:
    batch = next(micro_batches(1))
    engine = start(**PLACEMENTS[placement])
    engine.backward(engine(*batch))
    engine.step()
    before = engine.master_state_dict()
    weights = [parameter for parameter in engine.module.parameters() if parameter.numel() > 10_000]
    with no_memory(), pytest.raises(torch.OutOfMemoryError), tiering.gathered(weights, modify=True):
        raise AssertionError("there is room for copies of all parameters")
    after = engine.master_state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    engine.backward(engine(*batch))
    engine.step()
    with tiering.gathered(weights[0]):
        assert torch.isfinite(weights[0]).all()


def test_storages_that_are_resized_find_no_memory(
    start: Callable[..., Any],
    micro_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch cannot exchange the memory of storages, unsharding allocates; else it never does."""
    batches = list(micro_batches(4))
    calm = start(**PLACEMENTS["host"])
    monkeypatch.setattr("zero3.device.tiers.can_exchange", lambda device=None: False)
    tried = start(**PLACEMENTS["host"])
    for number, batch in enumerate(batches):
        if number == 2:
            with no_memory(), pytest.raises(torch.OutOfMemoryError) as caught:
                tried(*batch)
            assert "in the state before this forward" in note_of(caught.value)
        for engine in (calm, tried):
            engine.backward(engine(*batch))
            engine.step()
    masters = calm.master_state_dict()
    assert all(torch.equal(master, masters[name]) for name, master in tried.master_state_dict().items())


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "device"])
def test_unsharding_needs_no_memory_of_torchs(
    start: Callable[..., Any], micro_batches: Callable[..., Any], placement: str
) -> None:
    """The room for what moves was allocated at the start: a full device does not stop a group from coming."""
    engine = start(threshold=0, **PLACEMENTS[placement])
    batch = next(micro_batches(1))
    engine.backward(engine(*batch))
    engine.step()
    with no_memory():
        for group in (group for group in engine._groups if group.moves):
            group.unshard(wait=True)
            group.wait_for_unshard()
            group.reshard()
