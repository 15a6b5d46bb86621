"""Copies run beside compute on streams of their own: nobody may use bytes before they are there, or after.

Every copy is made late here, and compute is made slow, so that whoever does not wait takes the wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero3.flat_storage import CopiedStorage
from zero3.grads import GradientStore

pytestmark = pytest.mark.gpu

PAUSE = 4_000_000  # cycles of the device, 2 to 3 ms
HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS = [
    pytest.param(HOST, id="host"),
    pytest.param(HOST | {"device_budget": "1MiB"}, id="host, room for few groups"),
    pytest.param({"offload_optimizer": "cpu"}, id="optimizer on host"),
    pytest.param(NVME, id="nvme"),
]


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Holds each copy back on its stream; the list receives the direction of each."""
    seen: list[str] = []
    copy_in, send_to_host = CopiedStorage._copy_in, GradientStore._send_to_host

    def pause(stream: torch.cuda.Stream, direction: str) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)
        seen.append(direction)

    def late_copy_in(storage: CopiedStorage) -> None:
        assert storage._streams is not None
        pause(storage._streams.fetch, "to the device")
        copy_in(storage)

    def late_send(store: GradientStore, *args: Any) -> None:
        assert store._streams is not None
        pause(store._streams.offload, "to the host")
        send_to_host(store, *args)

    monkeypatch.setattr(CopiedStorage, "_copy_in", late_copy_in)
    monkeypatch.setattr(GradientStore, "_send_to_host", late_send)
    return seen


class Slowly(nn.Module):
    """A block that holds the compute stream up before it computes, forward and backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, stream: Tensor) -> Tensor:
        torch.cuda._sleep(PAUSE)
        out: Tensor = self.block(stream)
        if out.requires_grad:
            out.register_hook(lambda gradient: torch.cuda._sleep(PAUSE))
        return out


@pytest.fixture
def slow_model(small_model: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        model = small_model()
        model.blocks = nn.ModuleList(Slowly(block) for block in model.blocks)  # type: ignore[union-attr]
        return model

    return make


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_late_copies_change_no_bit(
    train: Callable[..., Any],
    same: Callable[..., None],
    late_copies: list[str],
    placement: dict[str, Any],
    accumulation: int,
) -> None:
    reference = train(3, accumulation=accumulation)
    assert late_copies == [], "everything is on the device"
    same(train(3, accumulation=accumulation, **placement), reference, "late copies")
    assert late_copies.count("to the host") > 0
    assert (late_copies.count("to the device") > 0) == ("offload_param" in placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_slow_compute_changes_no_bit(
    train: Callable[..., Any],
    same: Callable[..., None],
    slow_model: Callable[[], nn.Module],
    placement: dict[str, Any],
) -> None:
    """The CPU runs ahead: what it frees, reuses or overwrites may still have work queued on it."""
    reference = train(3, slow_model())
    same(train(3, slow_model(), **placement), reference, "slow compute")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_evaluation_that_is_still_queued_sees_parameters_of_before_the_step(
    start: Callable[..., Any],
    slow_model: Callable[[], nn.Module],
    micro_batches: Callable[..., Iterator[tuple[Tensor, Tensor]]],
    placement: dict[str, Any],
) -> None:
    """Nothing waits for a forward without gradients: the step must, before it overwrites what that still reads."""

    def evaluations(**options: Any) -> list[float]:
        engine = start(slow_model(), **options)
        found = []
        for tokens, targets in micro_batches(4):
            engine.backward(engine(tokens, targets))
            with torch.no_grad():
                found.append(engine(tokens, targets))
            engine.step()
        return [loss.item() for loss in found]

    assert evaluations(**placement) == evaluations()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_users_own_stream(
    train: Callable[..., Any],
    same: Callable[..., None],
    late_copies: list[str],
    placement: dict[str, Any],
) -> None:
    reference = train(3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = train(3, **placement)
    same(run, reference, "on a stream of the user's")
