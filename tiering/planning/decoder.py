"""A decoder of a given size or name, for plans without a model: its shape, and its parameters.

For a number of parameters, the shape is that of the Llama family. Its hidden size is a multiple of 128, from 4096 on of
512; heads have 128 elements; the three matrices of the MLP are 8/3 as wide as the hidden size, rounded up to 256; the
embedding of 32,000 tokens and the head are not tied. Of all such shapes within 5 % of the requested size, the rule
selects the one that is closest to it and to a hidden size of 128 times the layers: 4096 x 32 for 7B, 5120 x 40 for 13B
and 12288 x 96 for 175B, as published. The plan depends little on the shape, because the bytes per parameter are the
same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from tiering._text import counted
from tiering.errors import ConfigError
from tiering.planning.activations import Activations, of_decoder
from tiering.planning.adapters import Adapters
from tiering.planning.setting import Setting
from tiering.storage.arena import round_up

# Elements of an attention head.
HEAD = 128
VOCABULARY = 32_000
EMBEDDING = "model.embed_tokens"
# Approximate hidden elements per layer.
ASPECT = 128
TOLERANCE = 0.05
WIDEST = 128 * 1024
# Parameters. The plan lists each sub-group, and more of them would fill the memory.
LARGEST = 2 * 10**13

_IN_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_IN_MLP = ("gate_proj", "up_proj", "down_proj")
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.ASCII | re.IGNORECASE)


class Weight(NamedTuple):
    """A parameter of the module ``module``: (outputs, inputs) elements of a linear layer, or a number of elements."""

    module: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a linear layer."""
        return len(self.shape) == 2 and self.module != EMBEDDING.rpartition(".")[2]

    @property
    def is_head(self) -> bool:
        """Whether it is the matrix of the output head."""
        return self.module == "lm_head"

    @property
    def layer(self) -> str:
        """The name of the module in its block."""
        name = self.module.partition(".")[0]
        around = "self_attn." if name in _IN_ATTENTION else "mlp." if name in _IN_MLP else ""
        return around + name

    def is_adapted(self, adapters: Adapters) -> bool:
        """Whether its layer gets one of ``adapters``."""
        return self.is_linear and adapters.adapts(self.module, is_head=self.is_head)

    def is_stored_as_base(self, adapters: Adapters) -> bool:
        """Whether it is frozen below ``adapters`` in their base format, and not in the compute dtype."""
        return self.is_linear and adapters.stores(self.module, self.shape[1], is_head=self.is_head)


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer. Sizes are elements.

    ``key_values``: the outputs of each of the projections of keys and values, by default as many as ``hidden``.
    ``attention_bias``: the projections of queries, keys and values have biases.
    """

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int = VOCABULARY
    key_values: int | None = None
    attention_bias: bool = False

    @property
    def heads(self) -> int:
        return self.hidden // HEAD

    @property
    def params(self) -> int:
        """Its number of parameters."""
        return (
            self.layers * sum(weight.numel for weight in self.block())
            + 2 * self.vocabulary * self.hidden
            + self.hidden
        )

    def __str__(self) -> str:
        return (
            f"a decoder of {format_count(self.params)} parameters: {counted(self.layers, 'layer')}, hidden"
            f" {self.hidden}, {counted(self.heads, 'head')}, MLP {self.intermediate}, vocabulary {self.vocabulary}"
        )

    def trained_params(self, adapters: Adapters | None = None) -> int:
        """The number of parameters that train: all, or those of ``adapters``."""
        if adapters is None:
            return self.params
        adapted = [weight for weight in self.linear_layers if weight.is_adapted(adapters)]
        return sum(math.prod(shape) for weight in adapted for shape in adapters.matrices(*weight.shape[::-1]))

    @property
    def linear_layers(self) -> list[Weight]:
        """The matrices of all linear layers, with the output head."""
        weights = (weight for weights in self.modules().values() for weight in weights)
        return [weight for weight in weights if weight.is_linear]

    def activations(
        self, setting: Setting, *, itemsize: int, adapters: Adapters | None = None
    ) -> Activations:
        """Those of a micro-batch in a compute dtype of ``itemsize`` bytes."""
        return of_decoder(
            setting,
            layers=self.layers,
            hidden=self.hidden,
            key_values=self.key_values or self.hidden,
            heads=self.heads,
            intermediate=self.intermediate,
            vocabulary=self.vocabulary,
            itemsize=itemsize,
            trained=adapters is None,
            adapted=(lambda name: False) if adapters is None else partial(adapters.adapts, is_head=False),
        )

    def modules(self) -> dict[str, list[Weight]]:
        """The parameters of the embedding, the blocks, the last norm and the head, in the engine's order."""
        block = self.block()
        return {
            EMBEDDING: [Weight("embed_tokens", (self.vocabulary, self.hidden))],
            **{f"model.layers.{layer}": block for layer in range(self.layers)},
            "model.norm": [Weight("norm", (self.hidden,))],
            "lm_head": [Weight("lm_head", (self.vocabulary, self.hidden))],
        }

    def block(self) -> list[Weight]:
        hidden, narrow = self.hidden, self.key_values or self.hidden
        attention = []
        for name, outputs in (("q_proj", hidden), ("k_proj", narrow), ("v_proj", narrow)):
            attention.append(Weight(name, (outputs, hidden)))
            if self.attention_bias:
                attention.append(Weight(f"{name}.bias", (outputs,)))
        return [
            *attention,
            Weight("o_proj", (hidden, hidden)),
            Weight("gate_proj", (self.intermediate, hidden)),
            Weight("up_proj", (self.intermediate, hidden)),
            Weight("down_proj", (hidden, self.intermediate)),
            Weight("input_layernorm", (hidden,)),
            Weight("post_attention_layernorm", (hidden,)),
        ]


# By the names of their publishers' configurations.
NAMED = {
    "llama-3-8b": Decoder(4096, 32, 14336, 128_256, key_values=1024),
    "qwen2.5-32b": Decoder(5120, 64, 27648, 152_064, key_values=1024, attention_bias=True),
    "llama-3-70b": Decoder(8192, 80, 28672, 128_256, key_values=1024),
}


def decoder(params: int) -> Decoder:
    """The decoder of about ``params`` parameters. Raises ConfigError if no shape is close, or above LARGEST."""
    if params > LARGEST:
        raise ConfigError(
            f"{format_count(params)} parameters are more than the maximum of {format_count(LARGEST)}"
        )

    def distance(shape: Decoder) -> float:
        ratio = shape.hidden / (ASPECT * shape.layers)
        return abs(math.log(shape.params / params)) + abs(math.log(ratio))

    nearest = min(_shapes(params), key=distance, default=None)
    if nearest is None:
        raise ConfigError(
            f"no decoder of {format_count(params)} parameters: the smallest has"
            f" {format_count(_shape(HEAD, 2).params)}; plan your own model with its config.json, or in Python"
        )
    return nearest


def _shapes(params: int) -> Iterator[Decoder]:
    """For each hidden size, the shapes within the tolerance that can be the nearest."""
    for hidden in (*range(HEAD, 4096, HEAD), *range(4096, WIDEST + 1, 512)):
        thinnest = _shape(hidden, 2)
        block = thinnest.params - _shape(hidden, 1).params

        def layers(target: float, least: int = thinnest.params, block: int = block) -> float:
            return 2 + (target - least) / block

        min_layers = max(2, math.ceil(layers(params * (1 - TOLERANCE))))
        max_layers = math.floor(layers(params * (1 + TOLERANCE)))
        exact = layers(params)
        turns = (min_layers, max_layers, math.floor(exact), math.ceil(exact), hidden // ASPECT)
        yield from (_shape(hidden, count) for count in {*turns} if min_layers <= count <= max_layers)


def _shape(hidden: int, layers: int) -> Decoder:
    return Decoder(hidden, layers, intermediate=round_up(-(-8 * hidden // 3), 256))


def parse_count(text: str) -> int:
    """The number of parameters in text such as ``7B``, ``350M`` or ``6738415616``. Raises ValueError otherwise."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"invalid number of parameters {text!r}; write for example '350M', '7B' or '1.5T'")
    number, unit = match.groups()
    return int(Fraction(number) * _COUNTS[unit.upper()])


def format_count(count: int) -> str:
    """``count`` with a unit, for example ``6.74B``."""
    unit = next((name for name in reversed(_COUNTS) if count >= _COUNTS[name]), "")
    return f"{count / _COUNTS[unit]:.2f}{unit}" if unit else str(count)
