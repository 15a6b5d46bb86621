"""One process that trains one way and tells its parent, in JSON lines on a pipe, how it goes.

Events: ``plan`` (the table as text), ``step`` (after each), ``fault`` (what was broken on purpose),
``result`` (at the end), ``error`` (what the user should read; the process then ends with code 2).
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
from tiering.demo.plain import PlainLoop
from tiering.demo.settings import Settings, Way


class Run(Protocol):
    """One way to train, as the loop below sees it."""

    def step(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> float: ...
    def moved(self) -> Moved: ...
    def plant_fault(self) -> str: ...
    def finish(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Moved:
    """Bytes over NVMe and seconds of stall since the start."""

    read: int = 0
    written: int = 0
    stalled: float = 0.0


class TieredRun:
    """The engine, through the public face."""

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

    def moved(self) -> Moved:
        now = self.engine.snapshot()
        return Moved(
            sum(path.read.bytes for path in now.io),
            sum(path.written.bytes for path in now.io),
            sum(now.stalls.values()),
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
                "16-bit weights": digest(self.engine.state_dict()),
                "fp32 weights": digest(self.engine.master_state_dict()),
            },
        }

    def close(self) -> None:
        self.engine.close()


class PlainRun:
    """The plain loop, which has nothing to say about tiers."""

    def __init__(self, settings: Settings) -> None:
        self.loop = PlainLoop(_model(settings), settings)

    def step(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        return self.loop.step(micro_batches)

    def moved(self) -> Moved:
        return Moved()

    def plant_fault(self) -> str:
        raise NotImplementedError("there is no NVMe state in a plain loop")

    def finish(self) -> dict[str, Any]:
        weights = dict(self.loop.model.named_parameters())
        return {"digests": {"16-bit weights": digest(weights), "fp32 weights": digest(self.loop.masters)}}

    def close(self) -> None:
        pass


def _model(settings: Settings) -> GPT:
    torch.manual_seed(settings.seed)
    return GPT(width=settings.width, layers=settings.layers, heads=settings.heads, sequence=settings.sequence)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _sample(engine: Any, settings: Settings) -> str:
    """What the trained model writes after a prompt, byte by byte, through the tiers."""
    text = list(b"def ")
    generator = torch.Generator().manual_seed(settings.seed)
    engine.eval()
    with torch.no_grad():
        for _ in range(settings.sample_bytes):
            logits = engine(torch.tensor([text[-settings.sequence :]]))[0, -1]
            likely = torch.softmax(logits / 0.8, dim=0)
            text.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(text).decode("ascii", errors="replace")


def _resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _baseline() -> int:
    """Resident bytes of an interpreter with torch, once its lazy parts are loaded."""
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    gc.collect()
    # The peak counts from here; where this is not allowed, the peak since the start is an upper bound.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident("VmRSS")


def train(options: argparse.Namespace, tell: Any) -> None:
    """Trains, and tells the parent about it."""
    settings = Settings.from_json(options.settings)
    way = Way(options.way)
    baseline = _baseline()
    batches = Batches(
        standard_library(), size=settings.micro_batch, sequence=settings.sequence, seed=settings.seed
    )
    run: Run
    if way is Way.PLAIN:
        run = PlainRun(settings)
    else:
        run = TieredRun(settings, settings.config(way, options.dir, options.run_name))
        tell("plan", text=run.plan(options.columns))
    try:
        losses = _steps(settings, run, batches, tell, options.plant_fault)
        peak, moved = _resident("VmHWM"), run.moved()
        result = {"losses": losses, "baseline": baseline, "peak": peak, **asdict(moved)}
        tell("result", **result, **run.finish())
    finally:
        run.close()


def _steps(settings: Settings, run: Run, batches: Batches, tell: Any, plant_fault: bool) -> list[float]:
    losses, before = [], run.moved()
    for step in range(settings.steps):
        if plant_fault and step == settings.steps // 2:
            tell("fault", what=run.plant_fault())
        first = step * settings.accumulation
        start = time.perf_counter()
        losses.append(run.step(batches[first + micro] for micro in range(settings.accumulation)))
        seconds, now = time.perf_counter() - start, run.moved()
        tell(
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
    """0 after a result, 2 after an error that the user should read, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tiering.demo.worker")
    parser.add_argument("--way", choices=[*Way], required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--run-name", required=True)
    parser.add_argument("--events", type=int, required=True, help="descriptor of the pipe to the parent")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--plant-fault", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # close the engine, as Ctrl-C does
    with os.fdopen(options.events, "w", encoding="utf-8") as pipe:

        def tell(event: str, **fields: object) -> None:
            pipe.write(json.dumps({"event": event, **fields}) + "\n")
            pipe.flush()

        try:
            train(options, tell)
        except tiering.TieringError as error:
            tell("error", message=str(error))
            return 2
        except KeyboardInterrupt:
            return 130
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # past the engine, nothing is left to close
    return 0


if __name__ == "__main__":
    sys.exit(main())
