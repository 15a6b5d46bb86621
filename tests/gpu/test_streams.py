"""Copies run beside compute on streams of their own: nobody may use bytes before they are there, or after.

Streams are held up here (see delays.py), so that whoever does not wait takes the wrong bytes; and waits are left out,
to see that this shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero3.device.streams import CudaEvent, CudaStream

from .conftest import LAYERS
from .delays import Delays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

# Cycles of the device, half a millisecond: a copy or a block here takes a twentieth of it.
ALWAYS = (1_000_000,)
HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
FEW_GROUPS = HOST | {"device_budget": "1MiB"}
UPDATED = HOST | {"update_on_device": 1.0, "sub_group_size": 20_000}
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
EARLY = "stepped in backward"
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": HOST,
    "host, room for few groups": FEW_GROUPS,
    "optimizer on host": {"offload_optimizer": "cpu"},
    "nvme": NVME,
    "nvme, nothing persistent, room for few groups": NVME | {"threshold": 0, "device_budget": "1MiB"},
    "updated on the device": UPDATED,
    EARLY: HOST | {"step_in_backward": True, "clip": 0.0},
}


@pytest.fixture
def model(small_model: type[nn.Module]) -> Callable[[Delays | None], nn.Module]:
    """``model(delays)`` builds the small model; with ``delays`` its blocks are held up, too."""

    def build(delays: Delays | None) -> nn.Module:
        torch.manual_seed(3)
        network = small_model()
        return network if delays is None else delays.hold_up(network)

    return build


def renamed(run: Any) -> Any:
    """``run`` with the names of a model whose blocks nobody wraps."""
    for values in (run.weights, run.masters):
        for name in list(values):
            values[name.replace(".block.", ".")] = values.pop(name)
    return run


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"only": ("fetch", "offload", "update", "save"), "cycles": ALWAYS}, id="late copies"),
        pytest.param({"only": ("compute",), "cycles": ALWAYS}, id="slow compute"),
        pytest.param({"seed": 1}, id="chance-1"),
        pytest.param({"seed": 2}, id="chance-2"),
    ],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_streams_that_are_held_up_change_no_bit(
    train: Callable[..., Any],
    same: Callable[..., None],
    model: Callable[[Delays | None], nn.Module],
    placement: str,
    settings: dict[str, Any],
) -> None:
    """The CPU runs ahead: what it frees, reuses or overwrites may still have work queued on it."""
    options = PLACEMENTS[placement]
    early = options.get("step_in_backward", False)
    habit = {
        "accumulation": 2 if settings.get("seed") == 2 and not early else 1,
        "clip": options.get("clip", 1.0),
    }
    reference = train(3, model(None), **habit)
    with Delays(**{"seed": 0} | settings) as delays:
        run = train(3, model(delays), **(options | habit))
    same(renamed(run), reference, placement)
    assert delays.count["copies", "to_host"] >= 3 * LAYERS
    if "offload_param" in options:
        assert delays.count["copies", "to_device"] >= 3 * LAYERS
    assert sum(count for (name, _), count in delays.count.items() if name != "copies") > 3 * 3 * LAYERS


@pytest.mark.parametrize(
    ("deaf", "slow", "placement"),
    [
        ("compute", "fetch", FEW_GROUPS),
        ("fetch", "compute", FEW_GROUPS),
        ("offload", "compute", FEW_GROUPS),
        ("update", "fetch", UPDATED),
        ("offload", "update", UPDATED),
        ("fetch", "update", UPDATED),
    ],
)
def test_a_stream_that_waits_for_nobody_shows(
    train: Callable[..., Any],
    model: Callable[[Delays | None], nn.Module],
    deaf: str,
    slow: str,
    placement: dict[str, Any],
) -> None:
    """Without this, nothing above would show anything."""
    reference = train(3, model(None))
    with Delays(0, only=(slow,), cycles=ALWAYS) as delays:
        delays.ignore_waits(deaf)
        run = renamed(train(3, model(delays), **placement))
    assert delays.count[deaf, "ignored"] > 0
    differs = run.losses != reference.losses or run.norms != reference.norms or run.differing(reference)
    assert differs, (
        f"{deaf} does not wait for {slow} and the bits are right: what holds streams up proves nothing"
    )


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != EARLY])
def test_an_evaluation_that_is_still_queued_sees_parameters_of_before_the_step(
    start: Callable[..., Any],
    model: Callable[[Delays | None], nn.Module],
    micro_batches: Callable[..., Iterator[tuple[Tensor, Tensor]]],
    placement: str,
) -> None:
    """Nothing waits for a forward without gradients: the step must, before it overwrites what that still reads."""

    def evaluations(delays: Delays | None, **options: Any) -> list[float]:
        engine = start(model(delays), **options)
        losses = []
        for tokens, targets in micro_batches(4):
            engine.backward(engine(tokens, targets))
            with torch.no_grad():
                losses.append(engine(tokens, targets))
            engine.step()
        return [loss.item() for loss in losses]

    expected = evaluations(None)
    with Delays(0, only=("compute",), cycles=ALWAYS) as delays:
        assert evaluations(delays, **PLACEMENTS[placement]) == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_users_own_stream(
    train: Callable[..., Any],
    same: Callable[..., None],
    model: Callable[[Delays | None], nn.Module],
    placement: str,
) -> None:
    options = PLACEMENTS[placement]
    reference = train(3, model(None), clip=options.get("clip", 1.0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with Delays(3) as delays, torch.cuda.stream(stream):
        run = train(3, model(delays), **options)
    same(renamed(run), reference, "on a stream of the user's")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize(
    ("accumulation", "placement"), [(1, {}), (2, {}), (1, HOST), (2, HOST), (1, FEW_GROUPS), (1, NVME)]
)
def test_nothing_waits_for_the_device_between_the_first_forward_and_the_step(
    start: Callable[..., Any],
    model: Callable[[Delays | None], nn.Module],
    micro_batches: Callable[..., Iterator[tuple[Tensor, Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
    placement: dict[str, Any],
    accumulation: int,
) -> None:
    waits: list[str] = []
    wait, synchronize = CudaEvent.wait, CudaStream.synchronize

    def seen_wait(event: CudaEvent, timeout: float | None = None) -> int:
        if not event.done():
            waits.append("event")
        return wait(event, timeout)

    def seen_synchronize(stream: CudaStream) -> None:
        waits.append("stream")
        synchronize(stream)

    monkeypatch.setattr(CudaEvent, "wait", seen_wait)
    monkeypatch.setattr(CudaStream, "synchronize", seen_synchronize)
    batches = list(micro_batches(4 * accumulation))
    plain = model(None).cuda()
    plain(*batches[0]).backward()  # cuBLAS takes its workspace
    torch.cuda.set_sync_debug_mode("error")
    try:
        try:
            plain(*batches[0]).backward()
        except RuntimeError as error:
            pytest.skip(f"torch's own operations let the CPU wait for this GPU: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine = start(model(None), accumulation=accumulation, **placement)
        for number, batch in enumerate(batches):
            steady = number >= 2 * accumulation  # orders are recorded, and kernels are there
            waits.clear()
            torch.cuda.set_sync_debug_mode("error" if steady else "default")
            engine.backward(engine(*batch))
            torch.cuda.set_sync_debug_mode("default")
            # Where gradients are added up in host memory, or pass through it to NVMe, a full window is waited for.
            if steady and (placement == {} or (accumulation == 1 and placement != NVME)):
                assert waits == []
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
