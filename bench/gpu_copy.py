"""Copy rates between a GPU and pinned memory: one direction alone, both at once, and the engine's own copies.

    python bench/gpu_copy.py [--mib 4 64 256] [--rounds 9] [--json]

Each reading is a burst of copies of one size out of 512 MiB in each direction, timed by events of the device. All kinds
take turns in each round, and the first two rounds are dropped; printed are medians and ranges in GB/s (10^9). Memory:
what torch pins, the engine's arena (registered with CUDA as one slab), and pageable memory. The goal is about the
engine's copies (zero3/device/link_copies.py) in both directions at once, beside torch's pinned memory in both
directions at once.

--json prints the figures of 64 MiB as one line. Exit status: 0 when the goal holds, 1 when not, 2 without a device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tiering.storage.arena import Arena
from zero3.device.link_copies import Copies
from zero3.device.pinning import register_with_cuda, unregister_with_cuda
from zero3.device.storages import as_tensor
from zero3.device.streams import CudaStreams, Stream, Streams
from zero3.device.timeline import StallClock, Timeline

TOTAL = 512 << 20  # bytes of each burst in one direction
TOLD = 64  # MiB per copy of what --json tells
WARM_UP = 2  # rounds
GOAL = 0.9
TO_DEVICE, TO_HOST = "h2d", "d2h"
WORDS = {TO_DEVICE: "to device", TO_HOST: "to host"}

Rates = dict[str, list[float]]  # bytes per second, by direction


@dataclass(frozen=True, slots=True)
class Buffers:
    """As much of the device and of host memory for each direction."""

    device: Mapping[str, Tensor]
    host: Mapping[str, Tensor]

    def pairs(self, way: str, nbytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Targets and sources of copies of ``nbytes``, until all of the buffer has gone."""
        target, source = (self.device, self.host) if way == TO_DEVICE else (self.host, self.device)
        yield from zip(target[way].split(nbytes), source[way].split(nbytes), strict=True)


class Direct:
    """Copies as torch makes them, on the same streams as the engine's."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def to_device(self, target: Tensor, source: Tensor) -> None:
        with self._streams.fetch.running():
            target.copy_(source, non_blocking=True)

    def to_host(self, target: Tensor, source: Tensor) -> None:
        with self._streams.offload.running():
            target.copy_(source, non_blocking=True)


def burst(
    streams: Streams, copies: Direct | Copies, buffers: Buffers, ways: Sequence[str], nbytes: int
) -> dict[str, float]:
    """Bytes per second of each of ``ways``, which run at once, in copies of ``nbytes``."""
    on: dict[str, Stream] = {TO_DEVICE: streams.fetch, TO_HOST: streams.offload}
    copy = {TO_DEVICE: copies.to_device, TO_HOST: copies.to_host}
    for way in ways:
        on[way].synchronize()
    began = {way: on[way].record(timed=True) for way in ways}
    for pairs in zip(*(buffers.pairs(way, nbytes) for way in ways), strict=True):
        for way, (target, source) in zip(ways, pairs, strict=True):
            copy[way](target, source)
    ends = {way: on[way].record(timed=True) for way in ways}
    for event in ends.values():
        event.wait()
    return {way: buffers.host[way].numel() / ends[way].seconds_since(began[way]) for way in ways}


def in_rounds(rounds: int, kinds: Mapping[str, Callable[[], dict[str, float]]]) -> dict[str, Rates]:
    """What each kind found, round by round, without the first ones."""
    readings: dict[str, Rates] = {}
    for number in range(WARM_UP + rounds):
        for kind, measure in kinds.items():
            for way, rate in measure().items():
                if number >= WARM_UP:
                    readings.setdefault(kind, {}).setdefault(way, []).append(rate)
    return readings


def medians(rates: Rates) -> dict[str, float]:
    return {way: statistics.median(values) for way, values in rates.items()}


@contextmanager
def pinned_arena(nbytes: int, device: torch.device) -> Iterator[Arena]:
    arena = Arena.map(nbytes, "host", pin=register_with_cuda)
    try:
        yield arena
    finally:
        unregister_with_cuda(arena.address, device)


def measured(arena: Arena, sizes: Sequence[int], rounds: int, device: torch.device) -> dict[str, Rates]:
    """By kind of memory and copies, and their MiB."""
    streams = CudaStreams(device)
    torch_s, engine_s = Direct(streams), Copies(streams, StallClock(Timeline()))
    ways = (TO_DEVICE, TO_HOST)

    def memory(make: Callable[[], Tensor]) -> Buffers:
        return Buffers(on_device, {way: make().fill_(1) for way in ways})

    on_device = {way: torch.ones(TOTAL, dtype=torch.uint8, device=device) for way in ways}
    pinned = memory(lambda: torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True))
    ours = memory(lambda: as_tensor(arena.lease(TOTAL, "bench")))
    pageable = memory(lambda: torch.empty(TOTAL, dtype=torch.uint8))
    torch.cuda.synchronize(device)
    kinds: dict[str, Callable[[], dict[str, float]]] = {}
    for mib in sizes:
        queue = partial(burst, streams, nbytes=mib << 20)
        for way in ways:
            kinds[f"pinned by torch, {mib} MiB, alone, {WORDS[way]}"] = partial(queue, torch_s, pinned, [way])
            kinds[f"the arena, {mib} MiB, alone, {WORDS[way]}"] = partial(queue, torch_s, ours, [way])
        kinds[f"pinned by torch, {mib} MiB, both"] = partial(queue, torch_s, pinned, ways)
        kinds[f"the engine's copies, {mib} MiB, both"] = partial(queue, engine_s, ours, ways)
    for way in ways:
        kinds[f"pageable, {sizes[-1]} MiB, alone, {WORDS[way]}"] = partial(
            burst, streams, torch_s, pageable, [way], sizes[-1] << 20
        )
    return in_rounds(rounds, kinds)


def summary(readings: Mapping[str, Rates], mib: int) -> dict[str, dict[str, float]]:
    """The medians that are compared: pinned memory of torch's in one direction and in both, the engine's in both."""
    alone: dict[str, float] = {}
    for words in WORDS.values():
        alone |= medians(readings[f"pinned by torch, {mib} MiB, alone, {words}"])
    return {
        "alone": alone,
        "both": medians(readings[f"pinned by torch, {mib} MiB, both"]),
        "engine": medians(readings[f"the engine's copies, {mib} MiB, both"]),
    }


def holds(figures: Mapping[str, Mapping[str, float]]) -> bool:
    return all(figures["engine"][way] >= GOAL * figures["both"][way] for way in WORDS)


def show(readings: Mapping[str, Rates], figures: Mapping[str, Mapping[str, float]], mib: int) -> None:
    for kind, rates in readings.items():
        for way, values in rates.items():
            spread = f"({min(values) / 1e9:.2f} to {max(values) / 1e9:.2f}, {len(values)} bursts)"
            print(f"{kind:46} {WORDS[way]:10} {statistics.median(values) / 1e9:6.2f} GB/s  {spread}")
    for way, words in WORDS.items():
        share = figures["engine"][way] / figures["both"][way]
        print(f"the engine's copies / pinned by torch, {mib} MiB, both, {words}: {share:.3f}; goal {GOAL}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64, 256], help="sizes of a copy")
    parser.add_argument("--rounds", type=int, default=9, help="measured bursts of each kind")
    parser.add_argument("--json", action="store_true", help=f"one line, of copies of {TOLD} MiB")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_copy: torch finds no CUDA device", file=sys.stderr)
        return 2
    sizes = [TOLD] if options.json else options.mib
    if any((TOTAL >> 20) % mib for mib in sizes):
        parser.error(f"--mib must divide {TOTAL >> 20}")
    device = torch.device("cuda", torch.cuda.current_device())
    with pinned_arena(2 * TOTAL, device) as arena:
        readings = measured(arena, sizes, options.rounds, device)
    mib = TOLD if TOLD in sizes else sizes[-1]
    figures = summary(readings, mib)
    card = torch.cuda.get_device_properties(device)
    name = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    if options.json:
        print(json.dumps({"card": card.name, "memory": card.total_memory, "driver": name, **figures}))
    else:
        print(f"{card.name}, {name}")
        show(readings, figures, mib)
    return 0 if holds(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
