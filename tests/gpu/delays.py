"""Streams held up at random, so that whoever does not wait takes the wrong bytes. Imports no pytest: stress.py uses it.

What is queued behind a pause is late, and what is on other streams goes on: copies come late, or the memory that they
fill is still in use; events come late; what an event lets go on is slow to do so. The pauses are the device's: the CPU
runs ahead as ever.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from zero3.device.link_copies import Copies
from zero3.device.streams import CudaStream, CudaStreams

CYCLES = (0, 0, 0, 200_000, 1_000_000, 4_000_000)  # of the device: up to 2 or 3 ms


class Delays:
    """Within the block, every stream of every engine is held up around its copies and events.

    ``seed`` draws the pauses; ``only`` are the names of the streams that are (compute, fetch, offload, ...), all unless
    given; ``cycles`` is what is drawn from. ``count`` tells what was held up, by stream and call. Engines are made
    inside the block.
    """

    def __init__(
        self, seed: int, *, only: tuple[str, ...] | None = None, cycles: tuple[int, ...] = CYCLES
    ) -> None:
        self.count: Counter[tuple[str, str]] = Counter()
        self._draw = random.Random(seed)
        self._only = only
        self._cycles = cycles
        self._names: dict[int, str] = {}
        self._patches: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Self:
        create, record, wait_for, running = (
            CudaStreams.__init__,
            CudaStream.record,
            CudaStream.wait_for,
            CudaStream.running,
        )

        def named(streams: CudaStreams, device: torch.device) -> None:
            create(streams, device)
            for name, stream in vars(streams).items():
                if isinstance(stream, CudaStream):
                    self._names[stream.handle.cuda_stream] = name

        def late_event(stream: CudaStream, **options: Any) -> Any:
            self.pause(stream.handle, "record")
            return record(stream, **options)

        def late_waiter(stream: CudaStream, event: Any) -> None:
            wait_for(stream, event)
            self.pause(stream.handle, "wait_for")

        @contextmanager
        def late_work(stream: CudaStream) -> Iterator[object]:
            self.pause(stream.handle, "running")
            with running(stream) as entered:
                yield entered
            self.pause(stream.handle, "running")

        self._patch(CudaStreams, "__init__", named)
        self._patch(CudaStream, "record", late_event)
        self._patch(CudaStream, "wait_for", late_waiter)
        self._patch(CudaStream, "running", late_work)
        for copy in ("to_device", "to_host"):
            self._patch(Copies, copy, self._counted(copy, getattr(Copies, copy)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._patches:
            owner, name, before = self._patches.pop()
            setattr(owner, name, before)

    def name_of(self, stream: torch.cuda.Stream) -> str:
        """What the engine calls it."""
        return self._names.get(stream.cuda_stream, "compute")

    def pause(self, stream: torch.cuda.Stream, where: str) -> None:
        """Hold ``stream`` up for as long as chance has it."""
        name = self.name_of(stream)
        if self._only is not None and name not in self._only:
            return
        cycles = self._draw.choice(self._cycles)
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        self.count[name, where] += 1

    def ignore_waits(self, name: str) -> None:
        """From now on the stream of that name waits for no event: what this shows is that it would have to."""
        wait_for = CudaStream.wait_for

        def deaf(stream: CudaStream, event: Any) -> None:
            if self.name_of(stream.handle) == name:
                self.count[name, "ignored"] += 1
            else:
                wait_for(stream, event)

        self._patch(CudaStream, "wait_for", deaf)

    def hold_up(self, model: nn.Module) -> nn.Module:
        """Let compute pause before and behind each block of ``model``, forward and backward."""
        model.blocks = nn.ModuleList(_HeldUp(block, self) for block in model.blocks)  # type: ignore[union-attr]
        return model

    def _patch(self, owner: type, name: str, replacement: Any) -> None:
        self._patches.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)

    def _counted(self, name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def counted(copies: Copies, *args: Any, **options: Any) -> Any:
            self.count["copies", name] += 1
            return copy(copies, *args, **options)

        return counted


class _HeldUp(nn.Module):
    def __init__(self, block: nn.Module, delays: Delays) -> None:
        super().__init__()
        self.block = block
        self._delays = delays

    def forward(self, stream: Tensor) -> Tensor:
        self._pause()
        out: Tensor = self.block(stream)
        if out.requires_grad:
            out.register_hook(self._pause)
        self._pause()
        return out

    def _pause(self, _: Tensor | None = None) -> None:
        self._delays.pause(torch.cuda.current_stream(), "block")
