"""The process that trains one way, and reports events to its parent as JSON lines on a pipe.

Events: ``plan`` (the table as text), ``step`` (after each step), ``fault`` (the planted fault), ``trained`` (after the
last step; the process then waits until its standard input is closed), ``result`` (at the end), ``error`` (a message for
the user; the process then ends with code 2).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import tiering
from tiering.demo.corpus import Batches, standard_library
from tiering.demo.model import GPT
from tiering.demo.pytorch_loop import PlainLoop
from tiering.demo.settings import Settings, Way


class TrainingRun(Protocol):
    """The interface of a run to the loop in ``_steps``."""

    def step(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> float: ...
    def traffic(self) -> NvmeTraffic: ...
    def plant_fault(self) -> str: ...
    def finish(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class NvmeTraffic:
    """Bytes read from and written to NVMe, and seconds of stall, since the start."""

    read: int = 0
    written: int = 0
    stalled: float = 0.0


class TieredRun:
    """Training with the engine, through the public API."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        with tiering.zero.Init(config=config):
            model = _model(settings)
        self.settings = settings
        self.engine, *_ = tiering.initialize(model=model, config=config)

    def step(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for tokens, targets in micro_batches:
            loss = self.engine(tokens, targets)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / self.settings.accumulation
        return total

    def plan(self, width: int) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=width)
        console.print(self.engine.plan.table())
        return console.export_text(styles=True)

    def traffic(self) -> NvmeTraffic:
        snapshot = self.engine.snapshot()
        return NvmeTraffic(
            sum(path.read.bytes for path in snapshot.io),
            sum(path.written.bytes for path in snapshot.io),
            sum(snapshot.stalls.values()),
        )

    def plant_fault(self) -> str:
        return str(self.engine.flip_bit())

    def finish(self) -> dict[str, Any]:
        tiers = [asdict(tier) for tier in self.engine.snapshot().tiers]
        sample = _sample(self.engine, self.settings)
        return {
            "tiers": tiers,
            "sample": sample,
            "state_bytes": self.engine.plan.state_bytes(),
            "digests": {
                "model weights": digest(self.engine.state_dict()),
                "fp32 masters": digest(self.engine.master_state_dict()),
            },
        }

    def close(self) -> None:
        self.engine.close()


class PlainRun:
    """Training with the plain loop, without tiers."""

    def __init__(self, settings: Settings) -> None:
        self.loop = PlainLoop(_model(settings), settings)

    def step(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        return self.loop.step(micro_batches)

    def traffic(self) -> NvmeTraffic:
        return NvmeTraffic()

    def plant_fault(self) -> str:
        raise NotImplementedError("a plain loop has no state on NVMe")

    def finish(self) -> dict[str, Any]:
        weights = dict(self.loop.model.named_parameters())
        return {"digests": {"model weights": digest(weights), "fp32 masters": digest(self.loop.masters)}}

    def close(self) -> None:
        pass


def _model(settings: Settings) -> GPT:
    torch.manual_seed(settings.seed)
    return GPT(width=settings.width, layers=settings.layers, heads=settings.heads, sequence=settings.sequence)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, sorted by name."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _sample(engine: Any, settings: Settings) -> str:
    """Text that the trained model generates after a prompt, byte by byte."""
    text = list(b"def ")
    generator = torch.Generator().manual_seed(settings.seed)
    engine.eval()
    with torch.no_grad():
        for _ in range(settings.sample_bytes):
            logits = engine(torch.tensor([text[-settings.sequence :]]))[0, -1]
            probabilities = torch.softmax(logits / 0.8, dim=0)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode("ascii", errors="replace")


def _resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _baseline() -> int:
    """Resident bytes of an interpreter with torch, after its lazy parts are loaded."""
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    gc.collect()
    # Reset the peak (VmHWM). If this is not allowed, the peak since the start is an upper bound.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident("VmRSS")


def train(options: argparse.Namespace, report: Any) -> None:
    """Train, and call ``report(event, **fields)`` for each event."""
    settings = Settings.from_json(options.settings)
    way = Way(options.way)
    baseline = _baseline()
    batches = Batches(
        standard_library(), size=settings.micro_batch, sequence=settings.sequence, seed=settings.seed
    )
    run: TrainingRun
    if way is Way.PLAIN:
        run = PlainRun(settings)
    else:
        run = TieredRun(settings, settings.config(way, options.dir, options.run_name))
        report("plan", text=run.plan(options.columns))
    try:
        losses = _steps(settings, run, batches, report, options.plant_fault)
        # Before finish(), whose sample and digests need memory and traffic of their own.
        peak, traffic = _resident("VmHWM"), run.traffic()
        result = {"losses": losses, "baseline": baseline, "peak": peak, **asdict(traffic)}
        report("trained")
        report("result", **result, **run.finish())
    finally:
        run.close()


def _steps(
    settings: Settings, run: TrainingRun, batches: Batches, report: Any, plant_fault: bool
) -> list[float]:
    losses, before = [], run.traffic()
    for step in range(settings.steps):
        if plant_fault and step == settings.steps // 2:
            report("fault", what=run.plant_fault())
        first = step * settings.accumulation
        start = time.perf_counter()
        losses.append(run.step(batches[first + micro] for micro in range(settings.accumulation)))
        seconds, now = time.perf_counter() - start, run.traffic()
        report(
            "step",
            step=step + 1,
            loss=losses[-1],
            seconds=seconds,
            read=now.read - before.read,
            written=now.written - before.written,
            stalled=now.stalled - before.stalled,
        )
        before = now
    return losses


def main() -> int:
    """The exit code: 0 after a result, 2 after an error event, 130 after an interrupt."""
    parser = argparse.ArgumentParser(prog="python -m tiering.demo.worker")
    parser.add_argument("--way", choices=[*Way], required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--run-name", required=True)
    parser.add_argument("--events", type=int, required=True, help="descriptor of the pipe to the parent")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--plant-fault", action="store_true")
    options = parser.parse_args()
    # SIGTERM raises KeyboardInterrupt, so that train() closes the engine.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with os.fdopen(options.events, "w", encoding="utf-8") as pipe:

        def report(event: str, **fields: object) -> None:
            pipe.write(json.dumps({"event": event, **fields}) + "\n")
            pipe.flush()
            if event == "trained":
                # The parent looks for the run in the sidecar, which may be late on a busy machine.
                sys.stdin.read()

        try:
            train(options, report)
        except tiering.TieringError as error:
            report("error", message=str(error))
            return 2
        except KeyboardInterrupt:
            return 130
        finally:
            # The engine is closed: SIGTERM may end the process at once.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
