"""The process that is watched: builds a model, or loads one, trains it, and tells how it goes in JSON lines on a pipe.

Events: ``ready`` (torch and transformers are loaded), ``plan``, ``begin`` and ``end`` of each phase, ``step`` after
each, ``result`` at the end, ``refused`` (what the user should read; the process then ends with code 2). Phases end when
nothing is in flight any more, so that what they write behind is paid for in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.process import disk_traffic, forget_peak, resident

from tiering.errors import PlacementError, TieringError

from . import room, shards
from .shape import Shape
from .words import Words

Tell = Callable[..., None]

QUIET = 0.01
"""Seconds between two looks at what is in flight."""
ANONYMOUS = 1.25
"""Anonymous memory that the kernel gives before it refuses, over what may be resident: the heap keeps holes."""
SEED = 0
UNUSABLE, INTERRUPTED = 2, 130


@dataclass(frozen=True, slots=True)
class Task:
    """What to do. ``memory`` is what the process may take, ``disk`` what its state may.

    Training begins with batch ``first``; ``load`` is a directory of weights, else the model is built; ``write`` a
    directory for the weights afterwards.
    """

    directory: str
    shape: Shape
    memory: int
    disk: int
    sequence: int
    steps: int
    threads: int
    first: int = 0
    load: str | None = None
    write: str | None = None

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


class Work:
    """Phases of one process, told as they begin and end."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.engine: Any = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """What is put into the yielded dict is told at the end, with seconds, bytes and the peak of the phase."""
        forget_peak()
        counted, moved = self.counters(), disk_traffic()
        self.tell("begin", name=name)
        began = time.perf_counter()
        more: dict[str, Any] = {}
        yield more
        self._settle()
        seconds = time.perf_counter() - began
        now, after = self.counters(), disk_traffic()
        self.tell(
            "end",
            name=name,
            seconds=seconds,
            peak=resident("VmHWM"),
            read=now["read"] - counted["read"],
            written=now["written"] - counted["written"],
            stalled=now["stalled"] - counted["stalled"],
            disk_read=after[0] - moved[0],
            disk_written=after[1] - moved[1],
            more=more,
        )

    def counters(self) -> dict[str, float]:
        """Bytes over NVMe, and seconds in which compute waited, since the engine was made."""
        if self.engine is None:
            return dict.fromkeys(("read", "written", "stalled"), 0)
        now = self.engine.snapshot()
        return {
            "read": sum(path.read.bytes for path in now.io),
            "written": sum(path.written.bytes for path in now.io),
            "stalled": sum(now.stalls.values()),
        }

    def _settle(self) -> None:
        """Wait until nothing is in flight and nothing has ended, twice in a row."""
        quiet, previous = 0, None
        while self.engine is not None and quiet < 2:
            time.sleep(QUIET)
            paths = self.engine.snapshot().io
            in_flight = sum(path.read.in_flight + path.written.in_flight for path in paths)
            operations = sum(path.read.ops + path.written.ops for path in paths)
            quiet = quiet + 1 if operations == previous and not in_flight else 0
            previous = operations


def work(task: Task, tell: Tell) -> None:
    limit = int(ANONYMOUS * task.memory)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tiering

    torch.set_num_threads(task.threads)
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    words = Words(task.shape.vocabulary)
    llama = LlamaConfig(**task.shape.config(task.sequence))
    with torch.device("meta"):
        sketch = LlamaForCausalLM(llama)
    assert sum(parameter.numel() for parameter in sketch.parameters()) == task.shape.parameters
    baseline = resident("VmRSS")
    tell("ready", baseline=baseline, used=words.used)

    config = _planned(task, sketch, baseline, tell)
    del sketch
    doing = Work(tell)
    batches = words.batches(task.sequence)
    for _ in range(task.first):
        next(batches)
    torch.manual_seed(SEED)
    # What is loaded needs no first values.
    building = torch.device("meta") if task.load else tiering.zero.Init(config=config)
    with doing.phase("build"), building:
        model = LlamaForCausalLM(llama)
    with doing.phase("load" if task.load else "fill"):
        doing.engine = tiering.initialize(model=model, config=config, weights=task.load).engine
    engine = doing.engine
    try:
        _train(doing, task, batches)
        if task.write:
            with doing.phase("write weights") as more:
                more["files"] = shards.write(model, Path(task.write))
        snapshot = engine.snapshot()
        tell("result", activations=snapshot.activations.peak if snapshot.activations else 0)
    finally:
        engine.close()


def _planned(task: Task, sketch: Any, baseline: int, tell: Tell) -> dict[str, Any]:
    """The configuration that ``sketch`` trains with, which fits into memory and onto the disk."""
    from tiering.placement.workload import Tier

    device, host = room.budgets(task.memory, baseline, task.shape, task.sequence)
    config = room.configuration(task.directory, task.shape, device, max(host, 0))
    try:
        plan = room.planned(sketch, config)
    except PlacementError as refused:
        raise TieringError(
            f"{task.memory / 1e9:g} GB are too few for this model; give it more by --memory, or take fewer parameters:"
            f" {refused}"
        ) from refused
    read, written = plan.nvme_traffic()
    on_nvme = plan.total(Tier.NVME)
    tell(
        "plan",
        device=device,
        host=host,
        table=str(plan),
        state=plan.state_bytes(),
        on_nvme=on_nvme,
        read=read,
        written=written,
    )
    if on_nvme > task.disk:
        raise TieringError(
            f"{on_nvme / 1e9:.1f} GB of state go to {task.directory}, where {task.disk / 1e9:.1f} GB may be taken; free"
            " some, or train fewer parameters"
        )
    return config


def _train(doing: Work, task: Task, batches: Iterator[Any]) -> None:
    """The steps, and where weights are written, the loss of the batch after them."""
    import torch

    engine = doing.engine
    for step in range(task.steps):
        tokens = next(batches)
        with doing.phase(f"step {step + 1}") as more:
            began = time.perf_counter()
            loss = engine(input_ids=tokens, labels=tokens).loss
            forwarded = time.perf_counter()
            engine.backward(loss)
            backwarded = time.perf_counter()
            engine.step()
            stepped = time.perf_counter()
            more["loss"] = float(loss.detach())
            more["forward"], more["backward"] = forwarded - began, backwarded - forwarded
            more["update"] = stepped - backwarded
        del loss
    if task.write:
        with doing.phase("next loss") as more, torch.no_grad():
            tokens = next(batches)
            more["loss"] = float(engine(input_ids=tokens, labels=tokens).loss)


def main() -> int:
    task, events = Task.from_json(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # close the engine, as Ctrl-C does
    with os.fdopen(events, "w", encoding="utf-8") as pipe:

        def tell(event: str, **fields: object) -> None:
            pipe.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
            pipe.flush()

        try:
            work(task, tell)
        except TieringError as error:
            tell("refused", message=str(error))
            return UNUSABLE
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # past the engine, nothing is left to close
    return 0


if __name__ == "__main__":
    sys.exit(main())
