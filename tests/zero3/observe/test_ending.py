"""How a run ended, as its page says last: each way in which a program ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiering.errors import RankLostError
from tiering.telemetry import EndStatus, Snapshot, find_status_files
from zero3.observe.ending import Ending

TRAINING = """
import atexit
import os

# Last of what runs at the exit of a child: torch takes two seconds to leave a forked process.
parent = os.getpid()
atexit.register(lambda: os.getpid() == parent or os._exit(0))

import errno
import json
import signal
import sys
import torch
import tiering
from tiering.storage.aio import AioContext, Fault, FaultPlan
from zero3 import initialize
from zero3.device import tiers  # all that an engine needs, before the children

def start(**tiers):
    nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
    return tiering.initialize(
        model=torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "tiering": {"host_budget": "8MiB", "cache_in_host": False, "telemetry": {"dir": sys.argv[2]}} | tiers,
        },
    ).engine

def train(engine, steps=3):
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()

def break_the_disk():
    faults = FaultPlan((Fault("read", first=30, error=errno.ENXIO),))
    tiers.AioContext = lambda **options: AioContext(fault=faults, **options)

def main():
    engine = start()
    train(engine)

# Each way in a process of its own, which ends as that of a script does; torch is imported once.
for name, program in json.loads(sys.argv[3]).items():
    child = os.fork()
    if child == 0:
        sys.argv[2] = f"{sys.argv[2]}/{name}"
        exec(program)
        break
    os.waitpid(child, 0)
"""

STOPPED = """
engine = start()
engine.save_and_exit_on(save=lambda: None)
train(engine, 2)
os.kill(os.getpid(), signal.SIGTERM)
train(engine)
"""

WAYS = {
    "closed": ("engine = start()\ntrain(engine)\nengine.close()", EndStatus("finished")),
    "with": ("with start() as engine:\n    train(engine)", EndStatus("finished")),
    "never closed": ("engine = start()\ntrain(engine)", EndStatus("finished")),
    "gone before the end": ("main()", EndStatus("finished")),
    "uncaught": (
        "engine = start()\ntrain(engine)\nraise RuntimeError('CUDA out of memory')",
        EndStatus("failed", "RuntimeError", "CUDA out of memory"),
    ),
    "raised in with": (
        "with start() as engine:\n    train(engine)\n    raise KeyError('x')",
        EndStatus("failed", "KeyError", "'x'"),
    ),
    "closed in finally": (
        "engine = start()\ntry:\n    train(engine)\n    raise KeyError('x')\nfinally:\n    engine.close()",
        EndStatus("failed", "KeyError", "'x'"),
    ),
    "exit code": ("engine = start()\ntrain(engine)\nsys.exit(3)", EndStatus("failed", "exit code 3")),
    "exit code of a function": ("main()\nsys.exit(3)", EndStatus("failed", "exit code 3")),
    "exit with a message": (
        "engine = start()\ntrain(engine)\nsys.exit('no data')",
        EndStatus("failed", "SystemExit", "no data"),
    ),
    "exit in with": (
        "with start() as engine:\n    train(engine)\n    sys.exit(3)",
        EndStatus("failed", "exit code 3"),
    ),
    "exit well": ("engine = start()\ntrain(engine)\nsys.exit(0)", EndStatus("finished")),
    "an exit that was caught": (
        "engine = start()\ntrain(engine, 2)\ntry:\n    sys.exit(3)\nexcept SystemExit:\n    train(engine, 1)",
        EndStatus("finished"),
    ),
    "the end of the data": (
        "engine = start()\ntrain(engine)\ntry:\n    next(iter(()))\nexcept StopIteration:\n    engine.close()",
        EndStatus("finished"),
    ),
    "Ctrl-C": (
        "engine = start()\ntrain(engine)\nraise KeyboardInterrupt",
        EndStatus("preempted", "SIGINT"),
    ),
    "an error of the disk": (
        "break_the_disk()\nengine = start()\ntrain(engine, 1000)",
        EndStatus("failed", "TIER-IO", "ENXIO"),
    ),
    "a signal to stop": (
        STOPPED,
        EndStatus("preempted", "SIGTERM"),
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the pages of each way in one of its name."""
    home = tmp_path_factory.mktemp("ended")
    for way in WAYS:
        (home / "pages" / way).mkdir(parents=True, mode=0o700)
    programs = json.dumps({way: program for way, (program, _) in WAYS.items()})
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(home), str(home / "pages"), programs],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return home / "pages"


@pytest.mark.parametrize("way", WAYS)
def test_the_last_page_says_how_the_run_ended(way: str, directory: Path) -> None:
    _, status = WAYS[way]
    (page,) = find_status_files(directory / way)
    reading = page.read()
    last = reading.snapshot
    assert last is not None and last.ended is not None and reading.state == "stale"
    if status.code == "TIER-IO":
        assert "failed: ENXIO (No such device or address)" in last.ended.text
        assert last.step > 0 and last.ended.how == "failed" and last.ended.code == "TIER-IO"
    else:
        assert (last.ended, last.step, last.global_step, last.samples) == (status, 3, 3, 3)
    assert reading.reason == last.ended.summary


def test_a_rank_that_another_one_ended_is_not_blamed() -> None:
    ending = Ending(0, lambda: 1)
    ending.settle(RankLostError("rank 1 failed in forward: KeyError: 'x'"))
    ending.settle(None)  # close(), later
    last = ending.final_snapshot(Snapshot("gpt", 0, 2, 1, 0.0)).ended
    assert last == EndStatus("failed", "TIER-RANK-LOST", "rank 1 failed in forward: KeyError: 'x'", rank=1)


def test_a_step_that_failed_is_said_where_nothing_is_under_way() -> None:
    ending = Ending(0)
    ending.settle(None, broken="the update of step 3 was ended by KeyError")
    status = ending.final_snapshot(Snapshot("gpt", 0, 1, 1, 0.0)).ended
    assert status == EndStatus("failed", "", "the update of step 3 was ended by KeyError")
