"""Ulysses attention among the attention functions of transformers, and which models can use it.

A registered name stands for one model and group, and wraps the implementation that the model had. Of that, transformers
asks two functions: one makes the mask, for all layers of a forward, and one computes the attention of a layer.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tiering.errors import ConfigError
from tiering.sequence.exchange import heads_to_tokens, tokens_to_heads

_PREFIX = "ulysses"
_numbers = itertools.count()

_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers (``config.layer_types``) in which tokens meet in attention only."""

_OTHER_ARGUMENTS = {
    "position_bias": "a bias of positions for each head",
    "s_aux": "attention sinks of each head",
    "cu_seq_lens_q": "several documents in one row",
}
"""Arguments of attention functions that would have to be divided, too."""


class Registered:
    """Ulysses attention of one model: ``enable`` puts it in place of the ``wrapped`` implementation.

    ``computes_loss``: the model computes its loss from shift_labels and num_items_in_batch.
    """

    def __init__(self, model: Any, wrapped: str) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

        self.wrapped = wrapped
        self.computes_loss = _computes_loss(model)
        self._config = model.config
        self._interface = AttentionInterface
        # transformers looks for "flash" in the name: a wrapped implementation is treated as it is itself.
        self.name = f"{_PREFIX}_{next(_numbers)}_{wrapped}"
        self._mask: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[wrapped]
        self._group: dist.ProcessGroup | None = None
        self._size = 1
        AttentionInterface.register(self.name, self.attend)
        AttentionMaskInterface.register(self.name, self.make_mask)

    def enable(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        # The property passes the name on to the configurations of parts.
        self._config._attn_implementation = self.name

    def remove(self) -> None:
        self._config._attn_implementation = self.wrapped

    def make_mask(
        self, *, q_length: int, q_offset: Any = 0, attention_mask: Tensor | None = None, **arguments: Any
    ) -> Any:
        """The mask of the wrapped implementation for whole sequences; ``q_length`` are the tokens of this rank."""
        if int(q_offset):
            raise ConfigError(
                "a model with Ulysses attention cannot continue from a cache of keys and values; call"
                " ulysses.remove() before generate"
            )
        if attention_mask is not None and getattr(self._config, "output_router_logits", False):
            raise ConfigError(
                "output_router_logits adds a loss for the balance of experts, which takes the mask of this rank's"
                " tokens, but the mask is that of whole sequences; set output_router_logits to False, or pass no mask"
            )
        tokens = q_length * self._size
        if attention_mask is not None and attention_mask.shape[-1] != tokens:
            raise ConfigError(
                f"an attention_mask of {attention_mask.shape[-1]} tokens does not match {self._size} ranks with"
                f" {q_length} tokens each; pass the batch through ulysses.shard, and call ulysses.remove() before"
                " generate"
            )
        # Masks are functions of positions: those of the whole sequence make the whole mask.
        whole = {"q_length": tokens, "kv_length": tokens, "q_offset": 0, "kv_offset": 0}
        return self._mask(attention_mask=attention_mask, **arguments | whole)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Attention of this rank's heads over whole sequences; tensors are (rows, heads, tokens of this rank, size)."""
        group = self._group
        assert group is not None, "the name is not in a configuration before enable()"
        _check_arguments(module, query, key, arguments)
        heads, key_heads, ranks = query.shape[1], key.shape[1], self._size
        _check_heads(heads, ranks)
        # Fewer heads of keys than ranks: each is repeated as often as ranks need it. The division is exact, because
        # ranks divide the heads of queries, and these are a multiple of the heads of keys.
        repeats = ranks // math.gcd(key_heads, ranks)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        query, key, value = tokens_to_heads(query, key, value, group=group)
        mask = _of_these_heads(attention_mask, heads, ranks, dist.get_rank(group))
        # Positions of this rank's tokens: flash attention would take them for those of all tokens.
        arguments.pop("position_ids", None)
        seen = _View(
            module,
            config=_View(module.config, _attn_implementation=self.wrapped),
            num_key_value_groups=query.shape[1] // key.shape[1],
        )
        output, _ = self._function(module)(seen, query, key, value, mask, **arguments)
        return heads_to_tokens(output, group=group), None

    def _function(self, module: nn.Module) -> Callable[..., Any]:
        """The wrapped function; "eager" is a function in the file of the model."""
        modeling = sys.modules.get(type(module).__module__)
        eager = getattr(modeling, "eager_attention_forward", None)
        if self.wrapped == "eager" and eager is None:
            raise ConfigError(
                f"{type(module).__name__} has no function for its attention implementation 'eager'; build the model"
                " with attn_implementation='sdpa'"
            )
        interface = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None) or self._interface()
        function: Callable[..., Any] = interface.get_interface(self.wrapped, eager)
        return function


class _View:
    """An object with some other attributes, for functions that only read."""

    def __init__(self, target: Any, **values: Any) -> None:
        vars(self).update(values, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_target"], name)


def register(model: nn.Module, ranks: int) -> Registered:
    """Ulysses attention for ``model``, not yet enabled. Raises ConfigError with the reason if it cannot have it."""
    try:
        from transformers import PreTrainedModel
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"tiering.sequence.ulysses_attention needs transformers; install it with `pip install 'tiering[hf]'`"
            f" ({error})"
        ) from error
    base: Any = getattr(model, "module", model)
    # Adapters of peft.
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(
            f"{type(base).__name__} is no model of transformers, whose attention ulysses_attention replaces; in a model"
            " of your own, call tiering.sequence.tokens_to_heads before attention and heads_to_tokens after it"
        )
    _check_kind(base)
    _check_heads(getattr(base.config, "num_attention_heads", ranks), ranks)
    wrapped = base.config._attn_implementation
    if str(wrapped).startswith(_PREFIX):
        raise ConfigError(
            f"{type(base).__name__} already has Ulysses attention; call remove() of the first ulysses_attention"
        )
    if not base._can_set_attn_implementation():
        raise ConfigError(
            f"{type(base).__name__} computes its attention itself, not by the attention functions of transformers, so"
            " that Ulysses attention cannot wrap it; choose another model"
        )
    if wrapped not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ConfigError(
            f"the attention implementation {wrapped!r} of {type(base).__name__} cannot be wrapped, because transformers"
            " makes no mask for it; build the model with attn_implementation='sdpa' or another of"
            f" {', '.join(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())}"
        )
    return Registered(base, wrapped)


def _check_kind(model: Any) -> None:
    """Refuse models in which tokens meet outside of attention, or that have several attentions."""
    name, config = type(model).__name__, model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{name} has layers other than attention in which tokens meet ({', '.join(sorted(kinds)) or 'states'}), so"
            " that its sequences cannot be divided by Ulysses attention; choose a model with attention in each layer"
        )
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ConfigError(
            f"{name} has an encoder and cross-attention; Ulysses attention divides sequences of decoders only"
        )
    if config.sub_configs:
        raise ConfigError(
            f"{name} consists of several models ({', '.join(config.sub_configs)}); Ulysses attention divides sequences"
            " of models for text only"
        )
    for part, module in model.named_modules():
        own_start = getattr(module, "offset", 0) or getattr(module, "padding_idx", None) is not None
        if "position" in part.rpartition(".")[2] and isinstance(module, nn.Embedding) and own_start:
            raise ConfigError(
                f"{name} numbers positions in its own way ({part}), and a rank knows those of its tokens only; choose a"
                " model with rotary positions, or whose positions begin at 0"
            )
    if config._attn_implementation == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise ConfigError(
            f"{name} computes its attention itself with reorder_and_upcast_attn; build the model without it, or with"
            " attn_implementation='sdpa'"
        )


def _check_heads(heads: int, ranks: int) -> None:
    if heads % ranks:
        raise ConfigError(
            f"{ranks} ranks for each sequence do not divide the {heads} attention heads of the model; choose a divisor"
            f" of {heads}"
        )


def _check_arguments(module: nn.Module, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> None:
    name = type(module).__name__
    for argument, meaning in _OTHER_ARGUMENTS.items():
        if arguments.get(argument) is not None:
            raise ConfigError(
                f"{name} passes {argument} ({meaning}) to its attention, which Ulysses attention cannot divide"
            )
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{name} has {query.shape[2]} queries and {key.shape[2]} keys: Ulysses attention supports neither"
            " cross-attention nor generation; call ulysses.remove() before generate"
        )


def _of_these_heads(mask: Any, heads: int, ranks: int, rank: int) -> Any:
    """A mask with values for each head, cut to those of this rank; other masks as they are."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] == heads > 1:
        return mask.chunk(ranks, dim=1)[rank]
    return mask


def _computes_loss(model: Any) -> bool:
    """Whether the forward of ``model`` calls its loss function, and that is the one that knows shift_labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    try:
        code = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    return "self.loss_function(" in code and model.loss_function is ForCausalLMLoss
