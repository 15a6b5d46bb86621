"""A training script that torchrun starts: the training of training.py, told what to do by one argument of JSON.

out       where each rank leaves what it trained, or the words of the error that ended it
nvme      where swap files may be
steps     how many, of which those that an earlier start has saved are not repeated
options   of the configuration
kill      [rank, step]: that rank dies there, in the first start only
saves     after each step, in the "foreground" or the "background"; "" none
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[3]))
from tests.zero3.ranks.training import Trained, start, tokens, trained_state


def main(
    out: str,
    nvme: str,
    steps: int,
    options: dict[str, Any],
    kill: tuple[int, int] | None = None,
    saves: str = "",
) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        trained = train(Path(out), Path(nvme), steps, options, kill, saves)
    except BaseException as error:
        write(Path(out) / f"error{rank}", f"{type(error).__name__}: {error}".encode())
        raise
    torch.save(trained, Path(out) / f"rank{rank}.pt")
    if rank == 0:
        print("trained")


def train(
    out: Path,
    nvme: Path,
    steps: int,
    options: dict[str, Any],
    kill: tuple[int, int] | None,
    saves: str,
) -> Trained:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    losses, norms = [], []
    with start(nvme, **options) as engine:
        engine.load_checkpoint(out / "saved")
        for number, shares in enumerate(tokens(steps, world_size)):
            if number < engine.global_steps:
                continue
            loss = engine(*shares[rank])
            losses.append(loss.item())
            engine.backward(loss)
            if first_start and kill is not None and (rank, number) == tuple(kill):
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            norms.append(engine.get_global_grad_norm())
            if saves:
                engine.save_checkpoint(out / "saved", keep=2, background=saves == "background")
            write(out / f"step{rank}", str(number + 1).encode())
        return trained_state(engine, losses, norms)


def write(path: Path, content: bytes) -> None:
    """Whole or not at all: somebody waits for it."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.rename(path)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
