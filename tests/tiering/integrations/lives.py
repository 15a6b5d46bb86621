"""A program: a run that is killed again and again, and resumes each time, against one that is not killed.

    python -m tests.tiering.integrations.lives FRONT DIRECTORY RANKS KILLS SEED STEPS

FRONT is "trainer", a Trainer of transformers, or "loop", one of accelerate. Each life is a fork of this process for
each rank, which has imported everything. The last line of output is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiering.integrations.accelerate import COMPLETE

from . import loops
from .trainers import config, llama, reported, state, tiered


def trainer(root: Path, seed: int, steps: int) -> tuple[dict[str, Tensor], list[Any]]:
    """Train to the end, from the last complete checkpoint if there is one; returns the state, and all reports."""
    # The first model's weights; a resumed run starts from others, and loads those of the checkpoint.
    resumes = any(path.stat().st_size for path in (root / "out").glob("checkpoint-*/trainer_state.json"))
    trains = tiered(
        root / "out",
        config("nvme", root),
        llama(seed=seed if resumes else 3),
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=3,
    )
    trains.train(resume_from_checkpoint=resumes or None)
    left = state(trains)
    trains.engine.close()
    return left, reported(trains)


def loop(root: Path, seed: int, steps: int) -> tuple[dict[str, Tensor], list[Any]]:
    """The same with a loop of accelerate, which has no log: each life adds its reports to a file."""
    log = root / f"reports{os.environ.get('RANK', '0')}"
    folders = [path.parent for path in (root / "out").glob(f"checkpoint-*/{COMPLETE}")]
    with loops.accelerator(config("nvme", root)) as made:
        runs = loops.Loop(made, *loops.parts(llama(seed=seed if folders else 3)))
        if folders:
            made.load_state(max(folders, key=_steps))
            runs.skip(made.engine().global_steps)
        for step in range(made.engine().global_steps, steps):
            report = (step, *runs.run(1)[0])
            with log.open("a") as lines:
                lines.write(f"{json.dumps(report)}\n")
            made.save_state(root / f"out/checkpoint-{step + 1}")
        # A step that two lives have done is there twice, unless both have reported the same.
        return loops.state(made.engine()), sorted(set(log.read_text().splitlines()), key=json.loads)


def _steps(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def life(front: str, root: Path, seed: int, steps: int) -> None:
    """Run ``front`` to its end; write what is left to ``root``."""
    root.mkdir(exist_ok=True)
    left, reports = {"trainer": trainer, "loop": loop}[front](root, seed, steps)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"state": left, "reported": reports}, root / "left.pt")


def born(front: str, root: Path, seed: int, ranks: int, steps: int) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            with (root.parent / f"{root.name}.log").open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if ranks > 1:
                where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                numbers = dict.fromkeys(("RANK", "LOCAL_RANK"), rank)
                numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks)
                os.environ |= where | {name: str(number) for name, number in numbers.items()}
            try:
                life(front, root, seed, steps)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def ended(children: list[int]) -> bool:
    """Wait for all; returns whether they ended by themselves. Raises if one failed and none was killed."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if -signal.SIGKILL not in codes and any(codes):
        raise RuntimeError(f"exit codes {codes}")
    return not any(codes)


def _wait_for(path: Path, children: list[int]) -> None:
    """Wait until ``path`` exists, or a child has ended."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not path.exists() and all(os.waitid(os.P_PID, child, flags) is None for child in children):
        time.sleep(0.002)


def main(front: str, root: Path, ranks: int, kills: int, seed: int, steps: int) -> dict[str, Any]:
    dice = random.Random(seed)
    root.mkdir(exist_ok=True)
    began = time.monotonic()
    assert ended(born(front, root / "straight", 0, ranks, steps))
    span = time.monotonic() - began
    killed, resumed = 0, []
    while True:
        children = born(front, root / "killed", 1 + killed, ranks, steps)
        if killed < kills:
            if killed == 0:
                # At least one life ends early and is resumed, also if it is much faster than the first was.
                _wait_for(root / "killed/out/checkpoint-3", children)
            else:
                time.sleep(dice.uniform(0.4, 1.0) * span)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        if ended(children):
            break
        killed += 1
        resumed.append(max(map(_steps, (root / "killed/out").glob("checkpoint-*")), default=0))
    straight, other = (torch.load(root / name / "left.pt") for name in ("straight", "killed"))
    wrong = [name for name, value in straight["state"].items() if not value.equal(other["state"][name])]
    return {
        "wrong": wrong,
        "tensors": len(other["state"]),
        "same reports": straight["reported"] == other["reported"],
        "kills": killed,
        "after": resumed,
    }


if __name__ == "__main__":
    outcome = main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    print(json.dumps(outcome))
