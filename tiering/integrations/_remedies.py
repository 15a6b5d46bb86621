"""The remedies of errors, as the user of a front end can carry them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tiering._remedies import (
    ANOTHER_CHECKPOINT,
    CONFIGURED_VALUE,
    FEWER_CHECKPOINTS,
    NEW_OPTIMIZER_STATE,
    NEW_SCHEDULE,
    PART_OF_MODEL,
)
from tiering.errors import TieringError

_WEIGHTS_ALONE = (
    "load the model from that folder with from_pretrained, and call train() without resume_from_checkpoint"
)

TRAINER = {
    NEW_OPTIMIZER_STATE: f"to start with new optimizer state, {_WEIGHTS_ALONE}",
    PART_OF_MODEL: f"to train another model with these weights, {_WEIGHTS_ALONE}",
    ANOTHER_CHECKPOINT: "resume from another folder checkpoint-N (resume_from_checkpoint=)",
    FEWER_CHECKPOINTS: "keep fewer checkpoints (save_total_limit)",
    CONFIGURED_VALUE: "change the TrainingArguments",
}
ACCELERATOR = {
    NEW_OPTIMIZER_STATE: "load_state(folder, load_optimizer_states=False) starts with new optimizer state",
    NEW_SCHEDULE: "load_state(folder, load_lr_scheduler_states=False) keeps this schedule as it is",
    PART_OF_MODEL: "load_state(folder, load_module_strict=False) ignores tensors that only one side has",
    ANOTHER_CHECKPOINT: "load another folder",
    FEWER_CHECKPOINTS: "keep fewer checkpoints (total_limit of ProjectConfiguration)",
}
LIGHTNING = {
    NEW_OPTIMIZER_STATE: (
        "to start with new optimizer state, write the weights with `tiering convert`, and pass them to"
        " TieringStrategy(weights=...) without ckpt_path"
    ),
    PART_OF_MODEL: "strict_loading = False in the LightningModule ignores tensors that only one side has",
    ANOTHER_CHECKPOINT: "load another checkpoint (ckpt_path=)",
    FEWER_CHECKPOINTS: "keep fewer checkpoints (save_top_k of ModelCheckpoint)",
}
FABRIC = {
    NEW_OPTIMIZER_STATE: "fabric.load(path, model) loads the weights alone",
    PART_OF_MODEL: "fabric.load(path, state, strict=False) ignores tensors that only one side has",
    ANOTHER_CHECKPOINT: "load another checkpoint",
    FEWER_CHECKPOINTS: "keep fewer checkpoints",
}


@contextmanager
def named_by(words: Mapping[str, str]) -> Iterator[None]:
    """In the errors of the block, replace each remedy of tiering._remedies by that in ``words``."""
    try:
        yield
    except TieringError as error:
        for remedy, replacement in words.items():
            error.message = error.message.replace(remedy, replacement)
        # Also of SwapError, whose other attributes stay.
        error.args = (f"[{error.code}] {error.message}",)
        raise
