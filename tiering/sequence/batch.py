"""The part of a batch that one rank of a sequence group computes, and the loss of its tokens."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tiering.errors import ConfigError

IGNORED = -100
"""The label of a token that does not count, as in torch and in transformers."""

_SLICED = ("input_ids", "inputs_embeds", "token_type_ids")
_KNOWN = (*_SLICED, "labels", "position_ids", "attention_mask")


def shard(batch: Mapping[str, Any], ranks: int, rank: int, pad: int | None = None) -> dict[str, Any]:
    """The ``rank``-th of ``ranks`` equal parts of the sequences in ``batch``: see Ulysses.shard."""
    strange = [key for key, value in batch.items() if isinstance(value, Tensor) and key not in _KNOWN]
    if strange:
        raise ConfigError(
            f"the batch has {strange[0]!r}, a tensor that cannot be cut along the sequence; remove it from the batch"
            f" (known are {', '.join(_KNOWN)})"
        )
    for key in _KNOWN:
        value = batch.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.dim() < 2):
            form = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"the batch has {key!r} of {form}; pass a tensor of shape (rows, tokens)")
    tokens = length(batch)
    if tokens % ranks and pad is None:
        raise ConfigError(
            f"sequences of {tokens} tokens cannot be cut into {ranks} equal parts; pad them in the collator"
            f" (pad_to_multiple_of={ranks}), or pass shard(batch, pad=tokenizer.pad_token_id)"
        )
    missing = -tokens % ranks
    _check_mask(batch.get("attention_mask"), tokens, missing)
    whole = _with_positions_and_targets(batch, tokens)
    if missing:
        whole = _padded(whole, missing, 0 if pad is None else pad)
    part = (tokens + missing) // ranks
    here = slice(rank * part, (rank + 1) * part)
    mine = {key: _cut(key, value, here) for key, value in whole.items()}
    if "shift_labels" in whole:
        # At least 1: a batch in which no token counts has the loss 0, and no gradient.
        counted = max(int((whole["shift_labels"] != IGNORED).sum()), 1)
        mine["num_items_in_batch"] = counted / ranks
    return mine


def length(batch: Mapping[str, Any]) -> int:
    """The number of tokens in each sequence of ``batch``."""
    return _inputs(batch).shape[1]


def fingerprint(batch: Mapping[str, Any], pad: int | None) -> list[int]:
    """Numbers that differ if two batches differ: the shape of the inputs, and a checksum of all tensors and ``pad``."""
    inputs = _inputs(batch)
    checksum = zlib.crc32(repr(pad).encode())
    for key in _KNOWN:
        tensor = batch.get(key)
        checksum = zlib.crc32(f"{key} {tensor is None}".encode(), checksum)
        if tensor is not None:
            values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            checksum = zlib.crc32(values.data, checksum)
    return [inputs.shape[0], inputs.shape[1], checksum]


def token_loss(logits: Tensor, shift_labels: Tensor, num_items_in_batch: float) -> Tensor:
    """The cross-entropy of a rank's tokens, so that its mean over all ranks is the loss of the whole sequences.

    ``logits`` have the shape (rows, tokens of this rank, vocabulary); the other arguments are entries of
    ``Ulysses.shard``. transformers' models compute the same if they get these entries. The result is fp32.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    targets = shift_labels.reshape(-1).to(logits.device)
    return functional.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum") / num_items_in_batch


def _inputs(batch: Mapping[str, Any]) -> Tensor:
    inputs = batch.get("input_ids")
    inputs = batch.get("inputs_embeds") if inputs is None else inputs
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        raise ConfigError(
            "the batch has no tensor 'input_ids' or 'inputs_embeds' of shape (rows, tokens, ...); pass the batch of a"
            " language model, a dict"
        )
    return inputs


def _with_positions_and_targets(batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """``batch`` with positions, and with targets in place of labels: those of a part's last token are in the next."""
    whole = dict(batch)
    labels = whole.pop("labels", None)
    if labels is not None:
        # Before the cut: a rank cannot see the first label of the next one.
        whole["shift_labels"] = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    for key in ("shift_labels", "token_type_ids"):
        if whole.get(key) is not None and whole[key].shape[1] != tokens:
            raise ConfigError(
                f"{key.removeprefix('shift_')!r} of {whole[key].shape[1]} tokens do not match inputs of {tokens} tokens"
            )
    positions = whole.get("position_ids")
    if positions is not None and positions.shape[-1] != tokens:
        raise ConfigError(
            f"position_ids of {positions.shape[-1]} tokens do not match inputs of {tokens} tokens; pass those of the"
            " whole sequences"
        )
    if positions is None:
        positions = torch.arange(tokens, device=_inputs(whole).device)[None]
    elif whole.get("attention_mask") is None and bool((positions.diff(dim=-1) != 1).any()):
        raise ConfigError(
            "the position_ids of a row begin again: several documents are packed into one sequence, which Ulysses"
            " attention does not separate; train on one document for each row, and pad"
        )
    whole["position_ids"] = positions
    return whole


def _check_mask(mask: Tensor | None, tokens: int, missing: int) -> None:
    if mask is not None and mask.shape[-1] != tokens:
        raise ConfigError(
            f"an attention_mask of {mask.shape[-1]} tokens does not match inputs of {tokens} tokens; pass the mask of"
            " the whole sequences"
        )
    if mask is not None and mask.dim() != 2 and missing:
        raise ConfigError(
            f"an attention_mask of {mask.dim()} dimensions cannot be padded; pad the batch in the collator"
        )


def _padded(whole: dict[str, Any], missing: int, pad: int) -> dict[str, Any]:
    """``missing`` tokens more at the end of each sequence, which no earlier token sees and no loss counts."""
    values = {"input_ids": pad, "shift_labels": IGNORED, "attention_mask": 0, "token_type_ids": 0}
    padded = dict(whole)
    for key, value in values.items():
        if padded.get(key) is not None:
            padded[key] = functional.pad(padded[key], (0, missing), value=value)
    if padded.get("inputs_embeds") is not None:
        padded["inputs_embeds"] = functional.pad(padded["inputs_embeds"], (0, 0, 0, missing))
    positions = padded["position_ids"]
    last = positions[..., -1:]
    padded["position_ids"] = torch.cat(
        [positions, last + torch.arange(1, missing + 1, device=last.device)], dim=-1
    )
    return padded


def _cut(key: str, value: Any, here: slice) -> Any:
    if not isinstance(value, Tensor) or key == "attention_mask":
        # A mask stays whole: this rank computes the attention of all tokens.
        return value
    return (value[..., here] if key == "position_ids" else value[:, here]).contiguous()
