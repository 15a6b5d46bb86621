"""Processes that tests of the sidecar start: a real ``tierd``, and a real engine that trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One line of standard input ends it, and so does its end. Steps are far apart, so that two cores have room for others.
TRAINER = """
import json, select, sys
from pathlib import Path
import torch
import tiering
from tiering.demo.model import GPT

settings = json.loads(sys.argv[1])
home = Path(settings["home"])
torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT(width=64, layers=2, heads=2, sequence=32)
swap = {"device": "nvme", "nvme_path": str(home)}
engine = tiering.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": swap, "offload_optimizer": swap},
    "tiering": {
        "device_budget": "64MiB", "host_budget": "64MiB", "nvme_budget": "64MiB", "cache_in_host": False,
        "run_name": settings["name"], "telemetry": {"dir": settings["directory"]},
    },
}).engine
data = torch.Generator().manual_seed(1)
losses = (home / "losses").open("w", buffering=1)
print("training", flush=True)
while engine.global_steps < settings["steps"] and not select.select([sys.stdin], [], [], settings["pause"])[0]:
    tokens = torch.randint(256, (2, 33), generator=data)
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
    print(float(loss.detach()).hex(), file=losses)
engine.close()
"""


@contextmanager
def running(*command: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A child of this Python, and the first line it printed; killed on the way out."""
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


@dataclass(frozen=True)
class Sidecar:
    """A ``tierd`` that runs; ``url`` ends without a slash."""

    process: subprocess.Popen[str]
    url: str

    def get(self, path: str) -> Any:
        """The JSON that it answers. Raises urllib's HTTPError unless it answers 200."""
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)

    def states(self) -> list[str]:
        """Of all ranks, as /v1/status tells them."""
        return [rank["state"] for run in self.get("/v1/status")["runs"] for rank in run["ranks"]]


@contextmanager
def tierd(directory: Path, *more: str, **environment: str) -> Iterator[Sidecar]:
    """A sidecar of ``directory`` on a free port of 127.0.0.1, with ``more`` arguments."""
    command = ("-m", "service.cli", "--port", "0", "--dir", str(directory), *more)
    with running(*command, **environment) as (process, line):
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match, line or process.communicate()[1]
        yield Sidecar(process, match[0])


@dataclass(frozen=True)
class Training:
    """A process that trains and swaps to NVMe; its page is in ``directory``."""

    process: subprocess.Popen[str]
    directory: Path
    home: Path

    @property
    def losses(self) -> list[str]:
        """Of the steps so far, as hexadecimal floats."""
        return (self.home / "losses").read_text().split()

    def finish(self) -> None:
        """Let it end by itself, and wait for that."""
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors


@contextmanager
def train(
    home: Path, directory: Path, *, name: str = "small-gpt", pause: float = 0.1, steps: int = 1 << 30
) -> Iterator[Training]:
    """A small model that trains in a process of its own, ``pause`` seconds between its steps, until told to stop."""
    home.mkdir(parents=True, exist_ok=True)
    settings = {"home": str(home), "directory": str(directory), "name": name, "pause": pause, "steps": steps}
    with running("-c", TRAINER, json.dumps(settings), TIERING_DEVICE="cpu", OMP_NUM_THREADS="1") as (
        process,
        line,
    ):
        assert line == "training", process.communicate()[1]
        yield Training(process, directory, home)
