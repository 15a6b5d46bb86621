"""A run that is killed again and again, and goes on from its last snapshot; `python -m` runs it.

Each life is a fork of this process, which itself computes nothing. A life checks that it begins with the bits of a step
for which the life before had a snapshot, then trains and makes snapshots until it is killed, or ``STEPS`` are done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

import tiering
from tests.zero3.conftest import config
from tests.zero3.resuming import MIXED, Left, Model, train

STEPS = 40
AS_CONFIGURED: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "split": {"precision": "bf16", "state": "split"},
    "ahead": {"precision": "bf16", "state": "split", "step": "in_backward", "swap_versions": 2},
}


def digest(engine: Any) -> str:
    """Of all that a run leaves, and of its next random numbers."""
    left = Left.by(engine)
    content = hashlib.sha256()
    for name in sorted(left.tensors):
        content.update(left.tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    content.update(repr((engine.global_steps, engine.optimizer.steps)).encode())
    content.update(torch.get_rng_state().numpy().tobytes())
    return content.hexdigest()


def engine_of(nvme: Path, state: str, **changes: Any) -> Any:
    """An engine with room for snapshots, of the same model and random numbers every time."""
    options = {"accumulation": 1, "threshold": 40, **MIXED, **AS_CONFIGURED[state], **changes}
    torch.set_num_threads(1)
    torch.manual_seed(1)
    settings = config(nvme, **options, snapshots=True)
    engine = tiering.initialize(model=Model(), config=settings).engine
    torch.manual_seed(2)
    return engine


def has_snapshot(step: int) -> bool:
    """Whether a life makes a snapshot after so many steps."""
    return step % 3 != 2


class Lives:
    """Lives of a run in ``directory``."""

    def __init__(self, directory: Path, state: str, draw: random.Random) -> None:
        self.nvme, self.saved = directory / "nvme", directory / "saved"
        self.nvme.mkdir()
        self.log = directory / "log"
        self.draw = draw
        self.state = state
        self.reference: list[str] = []

    def begin(self) -> Any:
        return engine_of(self.nvme, self.state)

    def learn(self) -> None:
        """The digests after each step of a run that is not killed."""
        file = self.log.with_name("reference")
        if not (child := os.fork()):
            engine = self.begin()
            digests = [digest(engine)]
            for number in range(STEPS):
                train(engine, range(number, number + 1))
                digests.append(digest(engine))
            file.write_text(json.dumps(digests))
            engine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        self.reference = json.loads(file.read_text())
        assert len({*self.reference}) == STEPS + 1, "the reference does not train"

    def live(self, ready: int) -> None:
        engine = self.begin()
        engine.load_checkpoint(self.saved)
        completed = [int(line) for line in self.log.read_text().split()] if self.log.exists() else [0]
        # The snapshot that the last life has completed; or a later one, which it had no time to note.
        step = engine.global_steps
        later = (number for number in range(completed[-1] + 1, STEPS + 1) if has_snapshot(number))
        assert step in (completed[-1], next(later, STEPS)), f"step {step} after {completed[-1]}"
        assert digest(engine) == self.reference[step], f"other bits at step {step}"
        os.write(ready, b"r")
        with self.log.open("a", buffering=1) as log:
            print(step, file=log)
            for number in range(step, STEPS):
                train(engine, range(number, number + 1))
                if has_snapshot(number + 1):
                    engine.snapshot_state(self.saved)
                    print(number + 1, file=log)
        engine.close()

    def kill_once(self) -> str:
        """One life; how it ended."""
        out, ready = os.pipe()
        if not (child := os.fork()):
            os.close(out)
            try:
                self.live(ready)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        os.close(ready)
        if self.draw.random() < 0.2:
            time.sleep(self.draw.uniform(0, 0.3))
        else:
            os.read(out, 1)
            time.sleep(self.draw.uniform(0, 0.25))
        os.close(out)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            return "killed"
        return "done" if status == 0 else "failed"

    def start_again(self) -> None:
        self.log.unlink()
        shutil.rmtree(self.saved)
        for file in self.nvme.iterdir():
            file.unlink()

    def finish(self) -> list[str]:
        """The files that a life leaves that makes one more snapshot."""
        if not (child := os.fork()):
            engine = self.begin()
            engine.load_checkpoint(self.saved)
            engine.snapshot_state(self.saved)
            engine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        return [file.name for file in self.nvme.iterdir()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("state", choices=AS_CONFIGURED)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    lives = Lives(arguments.directory, arguments.state, random.Random(arguments.seed))
    lives.learn()
    ended = {"killed": 0, "done": 0, "failed": 0}
    while ended["killed"] < arguments.kills and not ended["failed"]:
        outcome = lives.kill_once()
        ended[outcome] += 1
        if outcome == "done":
            lives.start_again()
    ended["files"] = 0 if ended["failed"] else len(lives.finish())
    print(json.dumps(ended))
