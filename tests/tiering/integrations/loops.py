"""An ordinary loop of accelerate, with the Accelerator of accelerate or with that of the engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tiering.integrations.accelerate import Accelerator

from .trainers import llama, sentences

ACCUMULATION = 2


@contextmanager
def accelerator(settings: Any = None, **options: Any) -> Iterator[Any]:
    """An Accelerator on the CPU; ``settings`` None is that of accelerate. The next one starts anew."""
    given: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": ACCUMULATION} | options
    forget()
    try:
        if settings is None:
            yield accelerate.Accelerator(**given)
        else:
            found = Accelerator(tiering_config=settings, **given)
            yield found
            found.free_memory()
    finally:
        forget()


def forget() -> None:
    """Forget what accelerate keeps for the process: a Trainer in another test has made it.

    The process group stays: it is that of the process.
    """
    # A loader that was dropped in the middle changes the state when it is collected.
    gc.collect()
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def parts(model: nn.Module | None = None, batch_size: int = 2) -> tuple[nn.Module, Any, Any, Any]:
    """A model with its optimizer, a loader and a schedule that falls from update to update."""
    model = model or llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, DataLoader(sentences(64), batch_size=batch_size), schedule


class Loop:
    """A prepared loop, which can be stopped and continued."""

    def __init__(self, accelerator: Any, *objects: Any) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.schedule = accelerator.prepare(*(objects or parts()))
        self.batches = self._endless()
        self.micro_batches = 0

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def skip(self, updates: int) -> None:
        for _ in range(updates * self.accelerator.gradient_accumulation_steps):
            next(self.batches)

    def run(self, updates: int) -> list[tuple[float, float, float]]:
        """(loss of the last micro-batch, norm of the gradient, learning rate) of each update."""
        reports = []
        while len(reports) < updates:
            # Before the block, which reads whether it is the last one of a pass over the data.
            batch = next(self.batches)
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    reports.append((loss.item(), float(norm), self.schedule.get_last_lr()[0]))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return reports


def run(rank: int, settings: Any, updates: int, **options: Any) -> list[tuple[float, float, float]]:
    """The reports of a run with one of both Accelerators."""
    with accelerator(settings, **options) as made:
        return Loop(made).run(updates)


def state(engine: Any) -> dict[str, Tensor]:
    """Masters and moments of a model on an engine, by name."""
    moments = {
        f"{kind} of {name}": engine.get_fp32_state(name, kind)
        for name, param in engine.module.named_parameters()
        if param.requires_grad
        for kind in engine.state_names
    }
    return {**engine.master_state_dict(), **moments}


def saved(rank: int, settings: Any, folder: Path, updates: int, **options: Any) -> tuple[Any, Any, Any]:
    """The state in ``folder`` after ``updates``, and the state and the reports of as many updates more."""
    with accelerator(settings, **options) as made:
        loop = Loop(made)
        loop.run(updates)
        made.save_state(folder)
        before = state(made.engine())
        reports = loop.run(updates)
        return before, state(made.engine()), reports


def resumed(
    rank: int, settings: Any, folder: Path, updates: int, batch_size: int = 2, **options: Any
) -> tuple[Any, Any, Any]:
    """The same of a run that continues from ``folder``."""
    with accelerator(settings, **options) as made:
        loop = Loop(made, *parts(llama(seed=99), batch_size))
        made.load_state(folder)
        loop.skip(made.engine().global_steps)
        loaded = state(made.engine())
        reports = loop.run(updates)
        return loaded, state(made.engine()), reports
