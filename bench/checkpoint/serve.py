"""What the process of a side does: builds its state once, then saves, loads and trains whenever it is asked to.

As ranks/serve.py, whose work this is. Peak memory is VmHWM, of each answer anew; the baseline is an interpreter with
torch, in a process group if there are several ranks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from ranks.serve import Work
from step.serve import SETTLE, disk_traffic, forget_peak, resident


class Saver(Protocol):
    """A side: a state, and how it is saved and loaded."""

    def facts(self) -> dict[str, Any]:
        """What is known once it is built: ``about`` and ``parameters``."""

    def room(self) -> int | None:
        """Bytes that it may take beside the baseline, None if it promises nothing."""

    def save(self, directory: str) -> None:
        """Back when the disk has it."""

    def load(self, directory: str, **how: Any) -> None:
        """Back when the state is what was saved."""

    def change(self) -> None:
        """Make the state another one, so that a load that does nothing is seen."""

    def fingerprint(self) -> list[float]:
        """Something of every kind of tensor in it."""

    def settle(self) -> float:
        """Wait for what is in flight."""

    def close(self) -> None: ...


def give_back() -> None:
    """What malloc keeps of an answer: the next peak would hide in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def clocked(saver: Saver, baseline: int, act: Callable[[], Any]) -> dict[str, Any]:
    """Seconds, memory and bytes of ``act``; what that returns, if anything, as ``told``."""
    saver.settle()
    time.sleep(SETTLE)
    forget_peak()
    before, moved = resident("VmRSS"), disk_traffic()
    began = time.perf_counter()
    told = act()
    seconds = time.perf_counter() - began
    now, room = disk_traffic(), saver.room()
    return {
        "seconds": seconds,
        "before": before,
        "peak": resident("VmHWM"),
        "ceiling": None if room is None else baseline + room,
        "disk": [now[0] - moved[0], now[1] - moved[1]],
        "told": told or {},
    }


class Answers:
    """To the questions of one process. Raises RuntimeError if what was loaded is not what was saved."""

    def __init__(self, saver: Saver, baseline: int, batches: Any) -> None:
        self._saver, self._baseline, self._batches = saver, baseline, batches
        self._saved: list[float] = []

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        saver: Any = self._saver
        match question:
            case {"train": steps, "save": how, "directory": directory}:
                return clocked(
                    saver, self._baseline, lambda: saver.train(self._batches, steps, directory, how)
                )
            case {"save": directory}:
                told = clocked(saver, self._baseline, lambda: saver.save(directory))
                self._saved = saver.fingerprint()
                return told
            case {"change": True}:
                saver.change()
                if saver.fingerprint() == self._saved:
                    raise RuntimeError("the state did not change, and a load could not be seen")
                return {}
            case {"load": directory, "how": how}:
                told = clocked(saver, self._baseline, lambda: saver.load(directory, **how))
                if (loaded := saver.fingerprint()) != self._saved:
                    raise RuntimeError(f"what was loaded ({loaded}) is not what was saved ({self._saved})")
                return told
        raise ValueError(f"{question} is no question")


def serve(build: Callable[[Work, dict[str, Any]], Saver]) -> None:
    """Answer questions until the input ends; the first two say how large, and what to build."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def say(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    lines = iter(sys.stdin)
    asked = json.loads(next(lines))

    import torch
    import torch.distributed as dist

    torch.set_num_threads(asked["threads"])
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    baseline = resident("VmRSS")
    say({"baseline": baseline})
    work = Work(**asked["work"])
    saver = build(work, json.loads(next(lines))["build"])
    try:
        give_back()
        say({**saver.facts(), "peak": resident("VmHWM")})
        batches = work.tokens(dist.get_rank() if ranks > 1 else 0)
        told = Answers(saver, baseline, batches)
        for line in lines:
            answered = told.answer(json.loads(line))
            give_back()
            say(answered)
    finally:
        saver.close()
    if ranks > 1:
        dist.destroy_process_group()
