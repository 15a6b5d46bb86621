"""The device has no memory left, at any operation: what the engine says, and that it is what it says."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.fake_device import FakeDevice
from tiering.errors import EngineStateError
from zero3.device import tiers
from zero3.passes.pass_state import PassState

HOST = {"offload_param": "cpu", "offload_optimizer": "cpu", "threshold": 0}
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS = {
    "device": {"accumulation": 1},
    "nvme": {**STREAMED, "accumulation": 2},
    "nvme, room for few groups": {**STREAMED, "accumulation": 1, "threshold": 0, "device_budget": "256KiB"},
}
ON_A_GPU = {
    "host": {**HOST, "accumulation": 2},
    "nvme, room for few groups": {**STREAMED, "accumulation": 1, "threshold": 0, "device_budget": "256KiB"},
}


class Exhausted(TorchDispatchMode):
    """Of the operations that need memory, the one with the number ``at`` finds none; in hooks and in backward too."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.alias_info is None for each in func._schema.returns):  # all others show what is there
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError(f"CUDA out of memory in {func}.")
        return func(*args, **(kwargs or {}))


def forward_and_backward(engine: Any, batch: tuple[Tensor, Tensor]) -> None:
    engine.backward(engine(*batch))


def train(engine: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        forward_and_backward(engine, batch)
        engine.step()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets engines that are made from now on take a GPU's ways, on streams whose work is done at once."""
    return lambda: FakeDevice().run_engines(monkeypatch)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("placement", "on_gpu"),
    [*((name, False) for name in PLACEMENTS), *((name, True) for name in ON_A_GPU)],
)
def test_a_pass_that_runs_out_of_memory_anywhere_leaves_nothing_behind(
    start: Callable[..., Any],
    gpu: Callable[[], None],
    small_model: Callable[..., nn.Module],
    micro_batches: Callable[..., Any],
    differing: Callable[..., list[str]],
    placement: str,
    on_gpu: bool,
) -> None:
    """What a program does that catches the error, lowers its batch and goes on."""
    if on_gpu:
        gpu()
    options, batches = (ON_A_GPU if on_gpu else PLACEMENTS)[placement], list(micro_batches(6))

    def new_engine() -> Any:
        torch.manual_seed(3)
        engine = start(small_model(16, 2), **options)
        train(engine, batches[:2])  # orders are recorded: from now on groups are fetched ahead
        return engine

    counted, calm, tried = new_engine(), new_engine(), new_engine()
    with Exhausted() as operations:
        forward_and_backward(counted, batches[2])
    notes = set()
    for number in range(1, operations.count + 1):
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory") as caught, Exhausted(number):
            forward_and_backward(tried, batches[2])
        notes.update(getattr(caught.value, "__notes__", []))
        assert tried._schedule.state is PassState.IDLE
        assert not any(param.grad is not None for param in tried.module.parameters())
    assert {"in the state before this forward" in note for note in notes} == {True, False}
    assert all(
        re.match(r"The engine owns [\d.]+ KiB .* device_budget of (16.00 M|256.00 K)iB", note)
        for note in notes
    )
    assert (tried.micro_steps, tried.global_steps) == (calm.micro_steps, calm.global_steps)
    train(calm, batches[2:])
    train(tried, batches[2:])
    assert differing(tried.master_state_dict(), calm.master_state_dict()) == []


CLIENT = {"client": True, "accumulation": 1}


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("options", "on_gpu"),
    [
        pytest.param({"precision": "bf16", **CLIENT}, False, id="a torch optimizer on masters"),
        pytest.param({"precision": "fp32", **CLIENT}, False, id="a torch optimizer on parameters"),
        pytest.param({"accumulation": 1}, True, id="state on a gpu"),
        pytest.param({**HOST, "accumulation": 1, "update_on_device": 1.0}, True, id="state visits a gpu"),
    ],
)
def test_a_step_that_runs_out_of_memory_is_whole_or_says_that_it_is_not(
    start: Callable[..., Any],
    gpu: Callable[[], None],
    small_model: Callable[..., nn.Module],
    micro_batches: Callable[..., Any],
    differing: Callable[..., list[str]],
    options: dict[str, Any],
    on_gpu: bool,
) -> None:
    batches = list(micro_batches(2))
    if on_gpu:
        gpu()

    def new_engine() -> Any:
        torch.manual_seed(3)
        model = small_model(16, 2)
        # Its state is allocated in its first step.
        client = torch.optim.NAdam(model.parameters(), lr=1e-3) if "client" in options else None
        return start(model, **options | {"client": client})

    counted = new_engine()
    forward_and_backward(counted, batches[0])
    with Exhausted() as operations:
        counted.step()
    calm = new_engine()
    before = calm.master_state_dict()
    train(calm, batches[1:])
    both = new_engine()
    train(both, batches)
    outcomes = set()
    for number in range(1, operations.count + 1, operations.count // 10):
        engine = new_engine()
        forward_and_backward(engine, batches[0])
        with pytest.raises(torch.OutOfMemoryError) as caught, Exhausted(number):
            engine.step()
        (note,) = caught.value.__notes__
        if "No parameter was updated, and the gradients since the last step are lost" in note:
            outcomes.add("whole")
            train(engine, batches[1:])
            assert differing(engine.master_state_dict(), calm.master_state_dict()) == []
        elif "Step 1 has begun. The next call that needs the parameters completes it" in note:
            outcomes.add("completed")
            train(engine, batches[1:])
            assert differing(engine.master_state_dict(), both.master_state_dict()) == []
        else:
            outcomes.add("torn")
            assert "initialize the model again from a checkpoint" in note
            with pytest.raises(EngineStateError, match=r"partly updated \(step 1 was ended by OutOfMemory"):
                engine(*batches[1])
        engine.close()
    assert outcomes - {"completed"} == {"torn", "whole"}
    assert differing(before, calm.master_state_dict()) != []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_ran_out_of_memory_keeps_none(
    start: Callable[..., Any],
    small_model: Callable[..., nn.Module],
    micro_batches: Callable[..., Any],
    where: str,
) -> None:
    """Whoever catches the error has the memory of the activations at once, or the smaller batch fails as well."""
    engine = start(small_model(16, 2), accumulation=1, **STREAMED)
    batch = next(micro_batches(1))
    train(engine, [batch])
    references: list[weakref.ref[Any]] = []

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        references.append(weakref.ref(output.untyped_storage()))
        if where == "backward":
            output.register_hook(fails)

    for block in engine.module.blocks:
        block.register_forward_hook(note)
    if where == "forward":
        engine.module.norm.register_forward_pre_hook(fails)
    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            forward_and_backward(engine, batch)
        del caught
        assert len(references) == 2
        assert [storage() for storage in references] == [None, None]
    finally:
        gc.enable()


def test_what_was_fetched_ahead_gives_way_to_what_is_needed(
    start: Callable[..., Any],
    gpu: Callable[[], None],
    micro_batches: Callable[..., Any],
    differing: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch cannot exchange the memory of storages, unsharding allocates: here, in room for three groups."""
    gpu()
    monkeypatch.setattr(tiers, "can_exchange", lambda device: False)
    batches = list(micro_batches(3))
    calm = start(accumulation=1, **HOST)
    train(calm, batches)
    sizes = {group.name: group.layout.numel * group.dtype.itemsize for group in calm._groups}
    room = sum(sorted(sizes.values())[-3:])
    assert room < sum(sizes.values())
    resize, allocated, refused = torch.UntypedStorage.resize_, Counter[int](), []

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes and nbytes + sum(allocated.values()) - allocated[storage._cdata] > room:
            refused.append(nbytes)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        allocated[storage._cdata] = nbytes
        return resize(storage, nbytes)

    tried = start(accumulation=1, **HOST)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    train(tried, batches)
    assert len(refused) > 3
    assert differing(tried.master_state_dict(), calm.master_state_dict()) == []
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        tried(*batches[0])
    room = 2 * sum(sizes.values())
    train(calm, batches)
    train(tried, batches)
    assert differing(tried.master_state_dict(), calm.master_state_dict()) == []
