"""SIGTERM and SIGUSR1 ask for save-and-exit; the step that is under way is finished first."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiering.errors import CheckpointError, ConfigError, EngineStateError

LONG = 100.0  # seconds in which even a busy machine forks, or ends, a process
SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import tiering

model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "nvme", "nvme_path": sys.argv[1]},
        "offload_optimizer": {"device": "nvme", "nvme_path": sys.argv[1]},
    },
    "tiering": {"device_budget": "1MiB", "host_budget": "1MiB", "telemetry": {"enabled": False}},
}
engine = tiering.initialize(model=model, config=config).engine
engine.save_and_exit_on(save=lambda: torch.save(engine.master_state_dict(), sys.argv[2]))

def told_to_end(*_):
    if engine.global_steps == 2:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))

model[2].register_forward_hook(told_to_end)
while True:
    engine.backward(engine(torch.ones(1, 32)).square().mean())
    engine.step()
    print(engine.global_steps, flush=True)
    assert engine.global_steps < 9
"""


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_run_that_is_told_to_end_saves_after_its_step_and_exits_with_75(nvme: Path, name: str) -> None:
    saved = nvme / "saved.pt"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(nvme), str(saved), name],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 75, run.stderr
    assert run.stdout.split() == ["1", "2"], "the step under way was not the last one"
    assert all(torch.isfinite(value).all() for value in torch.load(saved).values())


def test_a_loop_may_ask_for_itself(start: Callable[..., Any], micro_batches: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    engine = start(accumulation=1)
    engine.save_and_exit_on("SIGUSR1")
    assert engine.stop_requested == ""
    os.kill(os.getpid(), signal.SIGUSR1)
    assert engine.stop_requested == "SIGUSR1"
    tokens, targets = next(iter(micro_batches(1)))
    engine.backward(engine(tokens, targets))
    engine.step()  # saves nothing, ends nothing
    engine.close()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("called", [False, True])
def test_the_checkpoint_of_the_end_has_what_the_script_wants_back(
    start: Callable[..., Any], micro_batches: Any, tmp_path: Path, called: bool
) -> None:
    engine = start(accumulation=1)
    for _ in range(2):
        engine.save_checkpoint(tmp_path)
        train(engine, micro_batches)
    epoch = {"epoch": 1}
    client_state = (lambda: {"epoch": engine.global_steps}) if called else epoch
    engine.save_and_exit_on(save_dir=tmp_path, client_state=client_state, keep=1)
    os.kill(os.getpid(), signal.SIGUSR1)
    epoch["epoch"] = 3
    with pytest.raises(SystemExit, match="75"):
        train(engine, micro_batches)
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step3"]
    other = start(accumulation=1)
    assert other.load_checkpoint(tmp_path)[1] == {"epoch": 3}


def test_a_checkpoint_that_fails_at_the_end_is_told_and_leaves_the_engine(
    start: Callable[..., Any], micro_batches: Any, tmp_path: Path
) -> None:
    engine = start(accumulation=1)
    (tmp_path / "file").write_text("")
    engine.save_and_exit_on(save_dir=tmp_path / "file")
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(CheckpointError, match="file"):
        train(engine, micro_batches)
    assert engine.global_steps == 1
    engine.save_checkpoint(tmp_path / "elsewhere")


def test_what_is_of_a_checkpoint_needs_one(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(accumulation=1)
    for options, why in (
        ({"keep": 1}, "client_state or keep"),
        ({"client_state": {}, "save": print}, "client_state or keep"),
        ({"save_dir": tmp_path, "save": print}, "both save and save_dir"),
        ({"save_dir": tmp_path, "keep": 0}, "invalid keep=0"),
    ):
        with pytest.raises(ConfigError, match=why):
            engine.save_and_exit_on(**options)


def train(engine: Any, micro_batches: Any) -> None:
    tokens, targets = next(iter(micro_batches(1)))
    engine.backward(engine(tokens, targets))
    engine.step()


def test_what_cannot_be_handled_is_refused(start: Callable[..., Any]) -> None:
    engine = start(accumulation=1)
    for name in ("SIGKILL", "SIGTREM", "signal"):
        with pytest.raises(ConfigError, match=f"{name!r} is not a signal"):
            engine.save_and_exit_on(name)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            engine.save_and_exit_on()
        except EngineStateError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_a_forked_child_still_ends_when_it_is_told_to(start: Callable[..., Any]) -> None:
    engine = start(accumulation=1)
    engine.save_and_exit_on()
    forking = multiprocessing.get_context("fork")
    ready = forking.Event()

    def sleep() -> None:
        faulthandler.dump_traceback_later(LONG / 2)  # if it does not end, where it is
        ready.set()
        # The handler runs when the interpreter next looks: a signal between its last look and the system call does not
        # cut a sleep short, and would go unheard for as long as that lasts.
        while True:
            time.sleep(0.05)

    child = forking.Process(target=sleep, daemon=True)
    child.start()
    assert ready.wait(LONG), "the child does not come to run"
    child.terminate()
    child.join(LONG)
    assert child.exitcode == -signal.SIGTERM
    assert engine.stop_requested == ""
