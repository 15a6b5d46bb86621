"""The weights of a checkpoint in fp32, as a ``state_dict`` or as files; ``tiering convert`` writes the same files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from tiering._text import shorten
from tiering.checkpoint.conversion import to_weights
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import FLOATS
from tiering.checkpoint.reader import Checkpoint, open_checkpoint
from tiering.config.fields import parse_size
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, ConfigError
from tiering.weights.reader import WeightReader
from zero3.building.weights import STORED_NAMES

log = logging.getLogger(__name__)

_DTYPES = {name: dtype for dtype, name in STORED_NAMES.items()}

Directory = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Directory,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Parameters in fp32, and buffers in their dtype, of the checkpoint ``tag`` or the latest, in host memory.

    Frozen parameters that keep their dtype, such as integers, are returned in it.
    All tensors are loaded at once, also in ``lazy_mode``. A tied tensor has all its names, and one memory. Raises
    CheckpointError if there is no checkpoint, or it is damaged.
    """
    return _state_dict(_open_checkpoint(checkpoint_dir, tag), exclude_frozen=exclude_frozen_parameters)


def _state_dict(checkpoint: Checkpoint, *, exclude_frozen: bool = False) -> dict[str, Tensor]:
    files, parameters, state = checkpoint.with_buffers(0), checkpoint.manifest.parameters, dict[str, Tensor]()
    with WeightReader(files, IoConfig()) as reader:
        for name, stored in files.tensors.items():
            if exclude_frozen and name in parameters and not parameters[name].trained:
                continue
            whole = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype], device="cpu")
            flat, first = whole.view(-1), 0
            for part in files.parts_of(stored):
                if part.numel:
                    raw = torch.frombuffer(reader.read(part, 0, part.numel), dtype=whole.dtype)
                    flat[first : first + part.numel] = raw
                first += part.numel
            state[name] = whole.float() if name in parameters and stored.dtype in FLOATS else whole
    tied = checkpoint.manifest.tied
    return state | {name: state[shared] for name, shared in tied.items() if shared in state}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as safetensors into ``output_dir``, also with ``safe_serialization`` False."""
    try:
        max_shard_bytes = parse_size(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: {error}") from None
    to_weights(
        _open_checkpoint(checkpoint_dir, tag),
        Path(output_dir),
        max_shard_bytes=max_shard_bytes,
        exclude_frozen=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Directory, tag: str | int | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into ``model``, and return it on the CPU. Not for the model of an engine.

    A warning names tensors that only one of the two has, except those that the save has excluded. Raises
    CheckpointError if they have no name in common.
    """
    checkpoint, model = _open_checkpoint(checkpoint_dir, tag), model.cpu()
    state = _state_dict(checkpoint)
    keys = model.load_state_dict(state, strict=False)
    missing = tuple(name for name in keys.missing_keys if name not in checkpoint.manifest.excluded)
    unexpected = tuple(keys.unexpected_keys)
    if state and len(unexpected) == len(state):
        raise CheckpointError(
            f"{checkpoint.path} has no tensor of this {type(model).__name__}: it has {shorten(unexpected)}, and the"
            f" model {shorten(tuple(model.state_dict())) or 'none'}; pass the model that was saved, without wrappers"
        )
    if missing or unexpected:
        log.warning(
            "%s and this %s differ: the model keeps its own %s, and lacks %s",
            *(
                checkpoint.path,
                type(model).__name__,
                shorten(missing) or "nothing",
                shorten(unexpected) or "others",
            ),
        )
    return model


def _open_checkpoint(directory: Directory, tag: str | int | None) -> Checkpoint:
    checkpoints = CheckpointDirectory(directory)
    try:
        path = checkpoints.find(None if tag is None else str(tag))
        if path is None:
            raise CheckpointError(
                f"{directory} holds no checkpoint; pass the directory that save_checkpoint got"
            )
        checkpoint = open_checkpoint(path)
    finally:
        checkpoints.close()
    if checkpoint.caveat:
        log.warning("%s", checkpoint.caveat)
    return checkpoint
