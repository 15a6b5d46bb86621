"""The process of a side that trains: it builds its model once, and then trains so many steps per round.

A round's clock runs from its first step until the side is idle again: what a side writes back behind its last step
belongs to the round that caused it. Peak memory is VmHWM, of building and of each round. The baseline is an
interpreter with torch (in a process group if there are several ranks), once torch's lazy parts are loaded.
Standard library and torch only.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .child import serve
from .process import age, disk_traffic, forget_peak, resident
from .reference_model import Model

SETTLE = 0.05
"""Seconds of sleep before each round. Idle OpenMP threads of the previous side spin for some milliseconds."""


class Trainer:
    """A side: the parts of one training step, and what it counts. The defaults are those of a side without counters."""

    def facts(self) -> dict[str, Any]:
        """What is known once it is built: ``about``, ``parameters`` and, where it has one, its plan."""
        raise NotImplementedError

    def forward(self, tokens: Any, targets: Any) -> Any:
        """The loss."""
        raise NotImplementedError

    def backward(self, loss: Any) -> None:
        loss.backward()

    def update(self) -> None:
        raise NotImplementedError

    def settle(self) -> float:
        """Wait for transfers that the last step left in flight; the ``perf_counter`` at which the last one ended."""
        return time.perf_counter()

    def counters(self) -> dict[str, float]:
        """Totals so far, by name: bytes ``read`` and ``written``, seconds ``stalled``, ..."""
        return {}

    def masters(self) -> dict[str, Any]:
        """The trained values by name, fp32."""
        raise NotImplementedError(f"{type(self).__name__} names no masters")

    def trace(self, path: str) -> None:
        """Write a trace of the next whole step to ``path``."""
        raise NotImplementedError(f"{type(self).__name__} writes no traces")

    def close(self) -> None:
        """Release what it holds."""


class EngineTrainer(Trainer):
    """A side that trains through ``engine``, ours or DeepSpeed's."""

    engine: Any

    def forward(self, tokens: Any, targets: Any) -> Any:
        return self.engine(tokens, targets)

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


Build = Callable[[Model, dict[str, Any]], Trainer]


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps of a side: seconds and bytes are totals of all of them.

    ``settled`` is the part of ``seconds`` from the end of the last step until the side was idle. ``disk`` is (read,
    written) as the kernel counts it, ``counted`` what the side counted itself. ``peak`` is VmHWM; ``age`` that of the
    process at the end.
    """

    steps: int
    seconds: float
    forward: float
    backward: float
    update: float
    settled: float
    loss: float
    peak: int
    disk: tuple[int, int]
    counted: dict[str, float]
    age: float

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def moved(self) -> float:
        """Bytes over NVMe per step, both directions: as the side counts them, else as the kernel does."""
        counted = self.counted.get("read", 0) + self.counted.get("written", 0)
        return (counted or sum(self.disk)) / self.steps

    @property
    def stall_share(self) -> float:
        return self.counted.get("stalled", 0.0) / self.seconds


def stalls(rounds: Sequence[Any]) -> str:
    """Seconds per step that compute waited, by cause, over all ``rounds`` together; the longest first."""
    steps = sum(round_.steps for round_ in rounds)
    causes: Counter[str] = Counter()
    for round_ in rounds:
        for name, seconds in round_.counted.items():
            kind, _, cause = name.partition(": ")
            if kind == "stalled" and cause:
                causes[cause] += seconds
    return ", ".join(f"{cause} {seconds / steps:.3f} s" for cause, seconds in causes.most_common() if seconds)


def train(trainer: Trainer, batches: Iterator[Any], steps: int) -> Round:
    """One round."""
    time.sleep(SETTLE)
    forget_peak()
    before, moved = trainer.counters(), disk_traffic()
    forward = backward = update = 0.0
    loss: Any = None
    began = last = time.perf_counter()
    for _ in range(steps):
        loss = trainer.forward(*next(batches))
        forwarded = time.perf_counter()
        trainer.backward(loss)
        backwarded = time.perf_counter()
        trainer.update()
        forward, backward = forward + forwarded - last, backward + backwarded - forwarded
        last = time.perf_counter()
        update += last - backwarded
    end = max(last, trainer.settle())
    now, after = disk_traffic(), trainer.counters()
    return Round(
        steps=steps,
        seconds=end - began,
        forward=forward,
        backward=backward,
        update=update,
        settled=end - last,
        loss=float(loss.detach()),
        peak=resident("VmHWM"),
        disk=(now[0] - moved[0], now[1] - moved[1]),
        counted={name: after[name] - before.get(name, 0) for name in after},
        age=age(),
    )


def digest(tensors: Mapping[str, Any]) -> str:
    """Of the names and bits of ``tensors``."""
    import torch

    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def baseline(threads: int) -> int:
    """Import torch, warm it up, join the process group if there are several ranks; the resident bytes after that."""
    import torch

    torch.set_num_threads(threads)
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    if world_size() > 1:
        torch.distributed.init_process_group("gloo")
    return resident("VmRSS")


def leave_group() -> None:
    """The end of what ``baseline`` joined."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


class Training:
    """The worker of a side that trains, for ``frame.child``."""

    def __init__(self, make: Build, threads: int, model: dict[str, Any], settings: dict[str, Any]) -> None:
        import torch  # noqa: F401 - its import is a fact of its own

        self._facts = {"torch": age(), "baseline": baseline(threads)}
        self._make, self._model = make, Model(**model)
        self._batches = self._model.batches(rank())
        self._trainer = make(self._model, settings)

    def facts(self) -> dict[str, Any]:
        return {**self._trainer.facts(), **self._facts, "peak": resident("VmHWM")}

    def rebuild(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Close the trainer and build another one, which sees the same batches."""
        self._trainer.close()
        self._batches = self._model.batches(rank())
        self._trainer = self._make(self._model, settings)
        return self.facts()

    def train(self, steps: int) -> dict[str, Any]:
        return asdict(train(self._trainer, self._batches, steps))

    def masters(self) -> str:
        """The digest of the trained values."""
        return digest(self._trainer.masters())

    def trace(self, path: str, steps: int) -> None:
        """Train ``steps`` steps, of which one whole step is traced."""
        self._trainer.trace(path.replace("RANK", str(rank())))
        self.train(steps)

    def close(self) -> None:
        self._trainer.close()
        leave_group()


def serve_training(make: Build) -> None:
    """The main program of a module whose trainer ``make`` builds."""
    serve(lambda **arguments: Training(make, **arguments))
