"""The device's rates: operations of blocks by the seconds they took; a GPU's copies, by a clock that stands in for it.

What needs the GPU itself is in tests/gpu/test_device_rates.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tiering.planning.measure import Leg
from tiering.planning.rates import Rates
from zero3.observe import device_rates

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operations_are_those_of_parameters_and_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    width, tokens, blocks = 64, 16, []
    build = device_rates.Block

    def block(*sizes: int) -> torch.nn.Module:
        block = build(*sizes)
        blocks.append(block)
        return block

    def one_in_two_seconds(call: Callable[[], object], seconds: float) -> float:
        call()
        return 0.5

    monkeypatch.setattr(device_rates, "Block", block)
    monkeypatch.setattr(device_rates, "repeated", one_in_two_seconds)
    monkeypatch.setattr(device_rates, "WEIGHTS_BYTES", 3 * 12 * width * width * dtype.itemsize)
    with torch.no_grad():  # whatever surrounds it
        rates = device_rates.measure(CPU, dtype, tokens=tokens, width=width)
    assert len(blocks) == 3
    matrices = sum(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2)
    assert rates == Rates(flops=6 * matrices * tokens / 2)
    assert {p.dtype for block in blocks for p in block.parameters()} == {dtype}
    assert all(p.grad is None for block in blocks for p in block.parameters())  # taken as they came


@pytest.mark.parametrize(
    ("seconds", "tokens", "blocks"), [(1e-3, 512, 8), (0.04, 400, 8), (1.0, 32, 4), (9.0, 32, 1)]
)
def test_a_slow_cpu_computes_fewer_tokens_and_then_fewer_blocks(
    monkeypatch: pytest.MonkeyPatch, seconds: float, tokens: int, blocks: int
) -> None:
    """``seconds`` are those of 32 tokens in one block."""
    passes = []

    def by_clock(call: Any, _: float) -> float:
        ran_tokens, ran_blocks = call.args
        passes.append((ran_tokens, ran_blocks))
        return 32 / (seconds * ran_tokens * ran_blocks)

    monkeypatch.setattr(device_rates, "repeated", by_clock)
    monkeypatch.setattr(device_rates, "WEIGHTS_BYTES", 8 * 12 * 64 * 64 * 4)
    rates = device_rates.measure(CPU, torch.float32, tokens=512, width=64)
    assert passes == [(32, 1), (tokens, blocks)]
    assert rates.flops == pytest.approx(6 * 12 * 64 * 64 * 32 / seconds)


def test_gradients_are_computed_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    monkeypatch.setattr(device_rates, "_drop", lambda parameter: gradients.append(parameter.grad))
    device_rates.measure(CPU, torch.float32, tokens=8, width=64, seconds=0)
    assert len(gradients) == 2 * 12 * device_rates.MAX_BLOCKS  # one call to warm up and one that counts
    assert all(gradient is not None for gradient in gradients)


def test_wide_blocks_are_few_and_narrow_ones_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(device_rates, "repeated", lambda call, seconds: 1.0)
    build = device_rates.Block
    for width in (64, 1024, 8192):
        shapes = []
        monkeypatch.setattr(
            device_rates, "Block", lambda *sizes, shapes=shapes: shapes.append(sizes) or build(64, 1)
        )
        device_rates.measure(CPU, width=width, tokens=1)
        counts.append((shapes[0], len(shapes)))
    assert counts == [((64, 1), 24), ((1024, 16), 8), ((8192, 128), 2)]


class Clock:
    """Stands in for a GPU: streams that each take their calls one after the other, and events that note when."""

    def __init__(self, milliseconds: dict[str, float]) -> None:
        self.milliseconds = milliseconds
        self.host = 0.0
        self.current: Clock.Stream | None = None
        self.calls: list[tuple[str, int]] = []
        clock = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Clock.Stream) -> None:
                self.at = stream.at = max(stream.at, clock.host)
                stream.waited = False

            def synchronize(self) -> None:
                clock.host = max(clock.host, self.at)

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        @contextlib.contextmanager
        def stream(chosen: Clock.Stream) -> Iterator[None]:
            clock.current = chosen
            yield
            clock.current = None

        self.Event, self.stream = Event, stream

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.at = 0.0
            self.waited = False

        def wait_event(self, event: Any) -> None:
            self.at = max(self.at, event.at)
            self.waited = True

    def synchronize(self, device: torch.device) -> None:
        pass

    def call(self, name: str) -> None:
        assert self.current is not None and self.current.waited, "it may begin before the clock is read"
        self.current.at += self.milliseconds[name]
        self.calls.append((name, id(self.current)))


@pytest.mark.parametrize(
    ("took", "rate"), [({"there": 10.0}, 100.0), ({"there": 10.0, "back": 40.0}, 25.0)], ids=["alone", "both"]
)
def test_calls_side_by_side_take_as_long_as_the_slowest(
    monkeypatch: pytest.MonkeyPatch, took: dict[str, float], rate: float
) -> None:
    clock = Clock(took)
    for name in ("Event", "stream", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(clock, name))
    calls = [functools.partial(clock.call, name) for name in took]
    rate_of_streams = device_rates._calls_per_second_on_streams(calls, torch.device("cuda"), 0.5)
    assert rate_of_streams == pytest.approx(rate)
    streams = {name: {stream for each, stream in clock.calls if each == name} for name in took}
    assert all(len(each) == 1 for each in streams.values())
    assert len(set.union(*streams.values())) == len(took)  # no two share a stream
    counted = len(clock.calls) // len(took) - device_rates.QUEUED  # the first ones warm up
    assert counted / rate >= 0.5 > (counted - device_rates.QUEUED) / rate


def test_a_gpus_legs_are_told_and_the_slower_way_is_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose memory stands in for the device's: what is copied is really copied."""
    link = scratch = 1 << 16
    rates = iter([4.0, 3.0, 2.0, 100.0])
    pinned: list[tuple[str, int]] = []
    copied: list[list[tuple[int, int]]] = []
    copy = torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert target.nbytes == source.nbytes == link
        copied[-1].append((source.data_ptr(), target.data_ptr()))
        return copy(target, source, non_blocking)

    def side_by_side(calls: list[Callable[[], object]], device: torch.device, seconds: float) -> float:
        assert [kind for kind, _ in pinned] == ["pinned"]
        copied.append([])
        for call in calls:
            call()
        return next(rates)

    monkeypatch.setattr(device_rates, "LINK_BYTES", link)
    monkeypatch.setattr(device_rates, "SCRATCH", scratch)
    monkeypatch.setattr(device_rates, "register_with_cuda", lambda at, nbytes: pinned.append(("pinned", at)))
    monkeypatch.setattr(device_rates, "unregister_with_cuda", lambda at, on: pinned.append(("unpinned", at)))
    monkeypatch.setattr(device_rates, "_calls_per_second_on_streams", side_by_side)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    legs: list[Leg] = []
    link_rates = device_rates._memory_rates(CPU, 1.0, legs.append)
    ((_, arena), (last, where)) = pinned
    assert (last, where) == ("unpinned", arena)
    (there,), (back,), both, (within,) = copied
    assert both == [there, back] and there[0] == arena and back[1] == arena + link
    assert not {*there, *back} & {*within}  # the device's own memory is no part of the link
    assert [(leg.name, leg.rate) for leg in legs] == [
        ("to_device", 4.0 * link),
        ("from_device", 3.0 * link),
        ("device_both", 2.0 * 2 * link),
        ("device_memory", 100.0 * 2 * scratch),
    ]
    assert link_rates == Rates(
        device_link=3.0 * link, device_link_both=4.0 * link, device_memory=200.0 * scratch
    )
    pinned.clear()
    with pytest.raises(StopIteration):  # whatever goes wrong, the driver lets go of the memory
        device_rates._memory_rates(CPU, 1.0, legs.append)
    assert [kind for kind, _ in pinned] == ["pinned", "unpinned"]
