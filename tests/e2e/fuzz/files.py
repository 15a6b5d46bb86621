"""Actions that save, load, and go on somewhere else."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path

from .edits import put_back
from .faults import again, failing_transfers
from .placements import Placement
from .run import Run
from .table import Effect, action


def _directory(run: Run) -> Path:
    return run.directory / "checkpoints"


@action(Effect.NUMBERS)
def save(run: Run, rng: random.Random) -> None:
    """Save a checkpoint, which a later action may load."""
    put_back(run)
    if run.on_tiers:
        run.loop.save_checkpoint(_directory(run), keep=1)
    else:
        run.loop.keep()
    run.has_checkpoint = True
    run.record("steps", run.loop.global_steps)


@action(Effect.NUMBERS)
def load(run: Run, rng: random.Random) -> None:
    """Go back to the last checkpoint."""
    put_back(run)
    if not run.has_checkpoint:
        save(run, rng)
        run.window(rng)
    _load(run)


def _load(run: Run) -> None:
    if run.on_tiers:
        path, _ = run.loop.load_checkpoint(_directory(run))
        assert path is not None
    else:
        run.loop.restore()
    run.record("steps", run.loop.global_steps)


@action(Effect.NUMBERS, plain=False)
def save_in_background(run: Run, rng: random.Random) -> None:
    """Save while an update goes on, and go back to what was saved."""
    put_back(run)
    saving = run.loop.save_checkpoint(_directory(run), keep=1, background=True)
    run.window(rng)
    saving.wait()
    run.has_checkpoint = True
    _load(run)


@action(Effect.NUMBERS)
def resume(run: Run, rng: random.Random) -> None:
    """Save, close, and go on in a new engine, placed in another way."""
    save(run, rng)
    if run.on_tiers and run.training.tile and _updated_equally(run):
        _save_with_other_tiles(run, rng)
    run.begin_anew(_elsewhere(run, rng))
    _load(run)


def _updated_equally(run: Run) -> bool:
    """Whether the tiles of each weight have the same number of updates, which is one number in larger tiles."""
    steps = run.loop.optimizer.steps
    updates = {name: steps.get(number, 0) for number, (name, _) in enumerate(run.model.named_parameters())}
    return all(
        len({updates[part] for part in run.parts_of(name) if part in updates}) <= 1
        for name in run.loop.master_state_dict()
    )


def _save_with_other_tiles(run: Run, rng: random.Random) -> None:
    """The last checkpoint is loaded into larger tiles, or whole weights, and is saved from there."""
    training = run.training
    larger = random.Random(run.action).choice((0, 3 * training.tile))
    run.training = replace(training, tile=larger)
    run.begin_anew(run.placement)
    _load(run)
    save(run, rng)
    run.training = training


@action(Effect.NUMBERS, plain=False, failing=True)
def snapshot(run: Run, rng: random.Random) -> None:
    """Save a snapshot, or a checkpoint where there is no room for that; transfers may fail meanwhile."""
    put_back(run)
    directory = run.directory / "snapshots"
    with failing_transfers(run, random.Random(rng.random())):
        if run.placement is not None and run.placement.snapshots:
            run.snapshot = again(lambda: run.loop.snapshot_state(directory))
        else:
            saving = again(lambda: run.loop.save_checkpoint(directory / "copied", keep=1))
            run.snapshot = saving.path
    run.record("steps", run.loop.global_steps)


@action(Effect.NUMBERS, plain=False, failing=True)
def resume_from_snapshot(run: Run, rng: random.Random) -> None:
    """Train on beyond a snapshot in vain, close, and go on from it: mostly with the same plan, which adopts it."""
    if run.snapshot is None or rng.random() < 0.5:
        snapshot(run, rng)
    for _ in range(rng.randrange(3)):
        run.window(rng)
    assert run.snapshot is not None
    run.begin_anew(run.placement if rng.random() < 0.7 else _elsewhere(run, rng))
    path, _ = run.loop.load_checkpoint(run.snapshot.parent, run.snapshot.name)
    assert path == str(run.snapshot)
    run.record("steps", run.loop.global_steps)


@action(Effect.UPDATE, plain=False)
def stop_by_signal(run: Run, rng: random.Random) -> None:
    """A signal ends the run after its step, with a checkpoint; go on from there, placed in another way."""
    put_back(run)
    run.loop.save_and_exit_on("SIGUSR1", save_dir=_directory(run), keep=1)
    os.kill(os.getpid(), signal.SIGUSR1)
    try:
        run.window(rng)
    except SystemExit as stopped:
        run.record("exit code", stopped.code)
    run.has_checkpoint = True
    run.begin_anew(_elsewhere(run, rng))
    _load(run)


def _elsewhere(run: Run, rng: random.Random) -> Placement | None:
    """Another placement; the reference, and the plain loop, stay what they are."""
    if run.placement is None or run.placement == Placement():
        return run.placement
    other = Placement.draw(random.Random(rng.random()), run.training)
    return other.roomier() if run.roomy else other
