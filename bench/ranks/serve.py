"""What the process of a rank does: builds what it is asked for, then trains so many steps whenever it is told to.

As step/serve.py, whose rounds these are; what is different is that each rank has tokens of its own, and that a process
can build one thing after the other. Which rank it is stands in the environment, as torchrun would have put it there.
The baseline is an interpreter with torch in a process group: sides import what they need besides when they build.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from step import reference
from step.serve import Trainer, resident, train

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank trains: the demo's GPT, with ``batch`` sequences in each step."""

    width: int
    layers: int
    sequence: int
    batch: int

    @property
    def model(self) -> reference.Model:
        return reference.Model(self.width, self.layers, self.sequence)

    def tokens(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random bytes and what follows each of them, without end; others for each rank."""
        import torch

        source = torch.Generator().manual_seed(reference.SEED + rank)
        while True:
            drawn = torch.randint(256, (self.batch, self.sequence + 1), generator=source)
            yield drawn[:, :-1], drawn[:, 1:]

    def __str__(self) -> str:
        sizes = f"GPT of {self.layers} blocks, width {self.width}, sequence {self.sequence}"
        return f"{sizes}, a batch of {self.batch} for each rank"


def cpu_seconds() -> float:
    """User and system, of all threads of this process so far."""
    now = os.times()
    return now.user + now.system


def serve(build: Callable[[Work, dict[str, Any]], Trainer]) -> None:
    """Answer questions until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    lines = iter(sys.stdin)
    asked = json.loads(next(lines))

    import torch
    import torch.distributed as dist

    torch.set_num_threads(asked["threads"])
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    dist.init_process_group("gloo")
    work = Work(**asked["work"])
    answer({"baseline": resident("VmRSS")})
    batches = work.tokens(dist.get_rank())
    trainer: Trainer | None = None
    try:
        for line in lines:
            question = json.loads(line)
            if "build" in question:
                if trainer is not None:
                    trainer.close()
                trainer = build(work, question["build"])
                answer({**trainer.facts(), "peak": resident("VmHWM")})
                continue
            assert trainer is not None, "the first question is what to build"
            if "trace" in question:
                trainer.trace(f"{question['trace']}.rank{dist.get_rank()}.json")
            answer(train(trainer, batches, question["steps"]))
    finally:
        if trainer is not None:
            trainer.close()
    dist.destroy_process_group()
