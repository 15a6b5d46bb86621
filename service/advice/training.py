"""Numbers that have gone wrong, and keys of the configuration that do nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from service.advice.finding import Advice, error, info, warning
from service.formatting import counted
from service.view import RunView


def broken(run: RunView) -> Iterator[Advice]:
    """An engine that lives and cannot train any more."""
    for rank in run.ranks:
        if rank.fresh and rank.snapshot is not None and rank.snapshot.broken:
            yield error(
                "training-broken",
                f"training cannot go on: {rank.snapshot.broken}",
                "mend what it names, and start the job again from its last checkpoint",
                rank.rank,
            )


def diverged(run: RunView) -> Iterator[Advice]:
    """A loss that is no number any more."""
    for rank in run.ranks:
        said = rank.snapshot
        if rank.fresh and said is not None and said.loss is not None and not math.isfinite(said.loss):
            yield error(
                "loss-not-finite",
                f"the loss is {'NaN' if math.isnan(said.loss) else 'infinite'}",
                "the run has diverged, or its data have: go back to the last good checkpoint with a lower learning rate"
                " or gradient_clipping; bf16 does not overflow where fp16 does",
            )


SKIPPED = 0.05  # of the steps
FINDING_SCALE = 16  # steps: fp16 starts with a scale of 2^16 and halves it with each skipped step


def skipping(run: RunView) -> Iterator[Advice]:
    """More skipped steps than it takes to find a loss scale."""
    for rank in run.ranks:
        said = rank.snapshot
        if not rank.fresh or said is None:
            continue
        steps = max(said.step, said.skipped_steps)
        if said.skipped_steps > max(FINDING_SCALE, SKIPPED * steps):
            scale = f", at a loss scale of {said.loss_scale:g}" if said.loss_scale is not None else ""
            yield warning(
                "steps-skipped",
                f"{said.skipped_steps} of {steps} steps were skipped: their gradients overflowed{scale}",
                "a lower learning rate, gradient_clipping, or bf16, which needs no loss scale",
            )


def failed_saves(run: RunView) -> Iterator[Advice]:
    """A checkpoint that could not be written, as long as no later one could."""
    for rank in run.ranks:
        save = rank.snapshot.checkpoint if rank.fresh and rank.snapshot is not None else None
        if save is not None and save.error:
            yield error(
                "checkpoint-failed",
                f"the last checkpoint, {save.path or 'in the directory given'}, was not written: {save.error}",
                "the one before it is whole; mend what the error names before the next save is due",
                rank.rank,
            )


MOST_KEYS = 3  # by name


def configuration(run: RunView) -> Iterator[Advice]:
    """Keys without effect, and deprecated ones."""
    for rank in run.ranks:
        told = rank.description.configuration if rank.description is not None and rank.fresh else None
        if told is None:
            continue
        for code, keys, what in (
            ("config-without-effect", told.without_effect, "without effect"),
            ("config-deprecated", told.deprecated, "deprecated"),
        ):
            if keys:
                names = ", ".join(keys[:MOST_KEYS]) + (", ..." if len(keys) > MOST_KEYS else "")
                many = f"{counted(len(keys), 'key')} of the configuration {'is' if len(keys) == 1 else 'are'}"
                yield info(
                    code, f"{many} {what}: {names}", f"`tiering check {told.source or 'FILE'}` says why"
                )
