"""Models that transformers loads under ZeRO-3, where ``import deepspeed`` imports tiering."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

MODULE = "transformers.modeling_utils"
"""The module that loads models."""


def show_biases(module: ModuleType) -> None:
    """Let transformers read the bias of an output layer that it ties to the embeddings.

    It pads the bias to the size of the vocabulary, also after the context in which parameters have no memory.
    """
    adjust = getattr(module.PreTrainedModel, "_adjust_bias", None)
    if adjust is None:
        return

    @functools.wraps(adjust)
    def adjust_bias(self: Any, output_embeddings: Any, input_embeddings: Any) -> None:
        from tiering.zero import GatheredParameters

        bias: Any = getattr(output_embeddings, "bias", None)
        # Only a parameter without memory has this attribute.
        with GatheredParameters([bias], modifier_rank=0, enabled=hasattr(bias, "ds_id")):
            adjust(self, output_embeddings, input_embeddings)

    module.PreTrainedModel._adjust_bias = adjust_bias
