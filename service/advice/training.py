"""Training that cannot continue or diverges, failed checkpoints, and configuration keys without effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from service.advice.advice import Advice, error, info, warning
from service.formatting import counted
from service.view import RunView


def broken(run: RunView) -> Iterator[Advice]:
    """Live engines that cannot continue training."""
    for rank in run.ranks:
        if rank.fresh and rank.snapshot is not None and rank.snapshot.broken:
            yield error(
                "training-broken",
                f"training cannot continue: {rank.snapshot.broken}",
                "fix the cause, then restart the job from its last checkpoint",
                rank.rank,
            )


def diverged(run: RunView) -> Iterator[Advice]:
    """A loss that is NaN or infinite."""
    for rank in run.ranks:
        loss = rank.snapshot.loss if rank.fresh and rank.snapshot is not None else None
        if loss is not None and not math.isfinite(loss):
            yield error(
                "loss-not-finite",
                f"the loss is {'NaN' if math.isnan(loss) else 'infinite'}",
                "training has diverged, or the data is invalid: resume from the last good checkpoint with a lower"
                " learning rate or gradient_clipping; bf16 has a larger range than fp16",
            )


SKIPPED_FRACTION = 0.05  # of the steps
SCALE_SEARCH_STEPS = 16  # fp16 starts with a loss scale of 2^16 and halves it with each skipped step


def skipping(run: RunView) -> Iterator[Advice]:
    """More skipped steps than the search for a loss scale needs."""
    for rank in run.ranks:
        snapshot = rank.snapshot
        if not rank.fresh or snapshot is None:
            continue
        steps = max(snapshot.step, snapshot.skipped_steps)
        if snapshot.skipped_steps > max(SCALE_SEARCH_STEPS, SKIPPED_FRACTION * steps):
            scale = f", at a loss scale of {snapshot.loss_scale:g}" if snapshot.loss_scale is not None else ""
            yield warning(
                "steps-skipped",
                f"{snapshot.skipped_steps} of {steps} steps were skipped: their gradients overflowed{scale}",
                "use a lower learning rate, gradient_clipping, or bf16, which needs no loss scale",
            )


def failed_saves(run: RunView) -> Iterator[Advice]:
    """A failed save, until a later save succeeds."""
    for rank in run.ranks:
        save = rank.snapshot.checkpoint if rank.fresh and rank.snapshot is not None else None
        if save is not None and save.error:
            yield error(
                "checkpoint-failed",
                f"the last checkpoint, {save.path or 'in the given directory'}, was not written: {save.error}",
                "the previous checkpoint is complete; fix the cause before the next save",
                rank.rank,
            )


MAX_KEYS = 3  # in the text


def configuration(run: RunView) -> Iterator[Advice]:
    """Keys without effect, and deprecated ones."""
    for rank in run.ranks:
        description = rank.description
        configuration = description.configuration if description is not None and rank.fresh else None
        if configuration is None:
            continue
        for code, keys, problem in (
            ("config-without-effect", configuration.without_effect, "without effect"),
            ("config-deprecated", configuration.deprecated, "deprecated"),
        ):
            if keys:
                names = ", ".join(keys[:MAX_KEYS]) + (", ..." if len(keys) > MAX_KEYS else "")
                subject = (
                    f"{counted(len(keys), 'key')} of the configuration {'is' if len(keys) == 1 else 'are'}"
                )
                yield info(
                    code,
                    f"{subject} {problem}: {names}",
                    f"`tiering check {configuration.source or 'FILE'}` explains why",
                )
