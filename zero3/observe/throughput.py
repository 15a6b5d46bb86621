"""Tokens that a rank trains on, and the floating-point operations that its model needs for them.

An operation counts once: what checkpointing or a moved activation computes again is not work of the model. Divided by
the operations that the GPU could do in the same time, this is the model FLOPs utilisation (MFU) of PaLM (arXiv
2204.02311).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiering.config.training import TieringConfig
from tiering.host.gpus import peak_flops
from zero3.params.layout import Piece, product
from zero3.params.param_group import ParamGroup

# Fields of a configuration with attention; a state space model has no heads.
ATTENTION = ("num_attention_heads", "num_hidden_layers", "hidden_size")
# Names of the number of experts, by architecture.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class ModelFlops:
    """Operations of forward and backward for a token: ``per_token``, and ``per_position`` of its sequence."""

    per_token: float
    per_position: float = 0.0

    def of(self, tokens: int, sequence: int) -> float:
        """The operations for ``tokens`` in sequences of a length."""
        return tokens * (self.per_token + sequence * self.per_position)


class Throughput:
    """Counts the ``tokens`` of forwards in training, and the model's operations for them, ``flops``; 0 if unknown.

    ``peak_flops`` is the operations per second in the data sheet of the GPU; None if unknown.
    """

    def __init__(self, model_flops: ModelFlops | None = None, peak_flops: float | None = None) -> None:
        self.tokens = 0
        self.flops = 0.0
        self.peak_flops = peak_flops
        self._model_flops = model_flops

    def count(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the inputs of a forward in training."""
        ids = _token_ids(args, kwargs)
        if ids is None:
            return
        self.tokens += ids.numel()
        if self._model_flops is not None:
            self.flops += self._model_flops.of(ids.numel(), ids.shape[-1])


def throughput_of(
    model: nn.Module, groups: Sequence[ParamGroup], config: TieringConfig, device: torch.device
) -> Throughput:
    """The counters of ``model``, whose parameters are in ``groups``, on ``device``."""
    configured = config.tiering.telemetry.flops_per_token
    counted = _model_flops(model, groups) if configured is None else ModelFlops(configured)
    dtype = config.autocast if config.precision == "fp32" else config.precision
    if device.type != "cuda" or dtype is None:
        return Throughput(counted)
    return Throughput(counted, peak_flops(torch.cuda.get_device_name(device), dtype))


def _token_ids(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """``input_ids``, or else the first argument if it has integers in two dimensions; None for other inputs."""
    first = args[0] if args else None
    for inputs in (kwargs, first if isinstance(first, Mapping) else {}):
        if isinstance(ids := inputs.get("input_ids"), Tensor) and ids.dim():
            return ids
    is_ids = isinstance(first, Tensor) and first.dim() == 2 and first.dtype in _INTEGERS
    return first if is_ids else None


def _model_flops(model: nn.Module, groups: Sequence[ParamGroup]) -> ModelFlops | None:
    """The operations of a model with a configuration as in transformers; None for others.

    A token passes each active parameter in one multiplication and one addition, forward, and twice as many in backward
    if the parameter is trained. Attention is over half a sequence on average, as in the planner.
    """
    config: Any = getattr(model, "config", None)
    if not all(isinstance(getattr(config, name, None), int) for name in ATTENTION):
        return None
    lookups = _lookups(model)
    pieces = [
        piece
        for group in groups
        for param, piece in zip(group.params, group.layout.pieces, strict=True)
        if id(param) not in lookups
    ]
    if any(piece.own_dtype is not None and not piece.own_dtype.is_floating_point for piece in pieces):
        # Codes of quantised weights: their number is not that of the weights.
        return None
    active = active_fraction(config, ((piece.name, product(piece.shape)) for piece in pieces))
    held, trained = _elements(pieces), _elements(piece for piece in pieces if piece.trainable)
    attention = 2.0 * config.num_hidden_layers * config.hidden_size
    return ModelFlops(active * (4.0 * held + 2.0 * trained), 3.0 * attention)


def _elements(pieces: Iterable[Piece]) -> int:
    return sum(product(piece.shape) for piece in pieces)


def _lookups(model: nn.Module) -> set[int]:
    """The ids of parameters that are only looked up: those of embeddings, unless an output layer shares them."""
    embeddings, others = set[int](), set[int]()
    for module in model.modules():
        # Not ``weight``, which an embedding that is cut into tiles does not have.
        used = embeddings if isinstance(module, nn.Embedding) else others
        used.update(id(param) for param in module.parameters(recurse=False))
    return embeddings - others


def active_fraction(config: Any, sizes: Iterable[tuple[str, int]]) -> float:
    """The fraction of the parameters that one token uses: a part of the experts in a mixture of transformers.

    ``config`` is the model's, and ``sizes`` are names and numbers of elements.
    """
    per_token: int | None = getattr(config, "num_experts_per_tok", None)
    count: int | None = next(
        (number for name in EXPERTS if isinstance(number := getattr(config, name, None), int)), None
    )
    if not per_token or not count:
        return 1.0
    of = [(".experts." in f".{name}", numel) for name, numel in sizes]
    routed = sum(numel for expert, numel in of if expert)
    return 1 - routed / sum(numel for _, numel in of) * (1 - per_token / count)
