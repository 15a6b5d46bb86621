"""A decoder with a given number of parameters, for plans without a model: its shape by a rule, and its groups.

The shape is that of the Llama family. Its hidden size is a multiple of 128, from 4096 on of 512; heads have 128
elements; the three matrices of the MLP are 8/3 as wide as the hidden size, rounded up to 256; the embedding of 32,000
tokens and the head are not tied. Of all such shapes within 5 % of the requested size, the rule selects the one that is
closest to it and to a hidden size of 128 times the layers: 4096 x 32 for 7B, 5120 x 40 for 13B and 12288 x 96 for 175B,
as published. The plan depends little on the shape, because the bytes per parameter are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tiering._text import counted
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.placement.workload import (
    ITEMSIZES,
    QUANTUM,
    GroupSizes,
    Workload,
    configured_state,
    make_workload,
)
from tiering.planning.plan_report import ModelSize, PlanReport, report
from tiering.planning.setting import RatesOf, Setting
from tiering.storage.arena import round_up

# Elements of an attention head.
HEAD = 128
VOCABULARY = 32_000
# Approximate hidden elements per layer.
ASPECT = 128
TOLERANCE = 0.05
WIDEST = 128 * 1024
# Parameters. The plan lists each sub-group, and more of them would fill the memory.
LARGEST = 2 * 10**13

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer. Sizes are elements."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int = VOCABULARY

    @property
    def heads(self) -> int:
        return self.hidden // HEAD

    @property
    def params(self) -> int:
        """Its number of parameters."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    def __str__(self) -> str:
        return (
            f"a decoder of {format_count(self.params)} parameters: {counted(self.layers, 'layer')}, hidden"
            f" {self.hidden}, {counted(self.heads, 'head')}, MLP {self.intermediate}, vocabulary {self.vocabulary}"
        )

    def groups(
        self, *, persistence_threshold: int, itemsize: int, world_size: int = 1
    ) -> tuple[GroupSizes, ...]:
        """The ParamGroups in a compute dtype of ``itemsize`` bytes, divided and padded as in the engine.

        Parameters with fewer elements than ``persistence_threshold`` are one group. The embedding and the head are
        separate groups if they are larger than a block; otherwise they belong to the root, which encloses all others.
        """
        modules = list(self._modules())
        block = sum(modules[1][1])
        members: dict[str, list[int]] = {}
        for name, params in modules:
            own = ".layers." in name or sum(params) > block
            for numel in params:
                group = "persistent" if numel < persistence_threshold else name if own else "root"
                members.setdefault(group, []).append(numel)
        around = list(members).index("root") if "root" in members else None
        groups = []
        for name, numels in members.items():
            persistent = name == "persistent"
            padded = round_up(sum(numels), QUANTUM * world_size)
            groups.append(
                GroupSizes(
                    name,
                    padded * itemsize,
                    padded,
                    parent=None if persistent or name == "root" else around,
                    persistent=persistent,
                    uses=0 if persistent else 1,
                    largest_trained=max(numels),
                )
            )
        return tuple(groups)

    def _modules(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The embedding, the blocks, the last norm and the head, each with the sizes of its parameters."""
        hidden, vocabulary = self.hidden, self.vocabulary
        block = 4 * (hidden * hidden,) + 3 * (hidden * self.intermediate,) + 2 * (hidden,)
        yield "model.embed_tokens", (vocabulary * hidden,)
        for layer in range(self.layers):
            yield f"model.layers.{layer}", block
        yield "model.norm", (hidden,)
        yield "lm_head", (vocabulary * hidden,)


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


def plan_of_size(params: int, config: TieringConfig, setting: Setting, rates: RatesOf) -> PlanReport:
    """The plan of the decoder of about ``params`` parameters.

    Raises ConfigError if there is no such decoder, or the configuration does not support it.
    """
    shape = decoder(params)
    attention = setting.attention_flops(shape.layers, shape.hidden)
    size = ModelSize(str(shape), shape.params, attention_flops=attention)
    return report(size, load_of(shape, config, setting), config, setting, rates)


def load_of(shape: Decoder, config: TieringConfig, setting: Setting) -> Workload:
    """The engine's Workload for ``shape``, if torch can compute in the memory that reads land in."""
    on_gpu = setting.gpu_memory is not None
    groups = shape.groups(
        persistence_threshold=config.zero.persistence_threshold,
        itemsize=ITEMSIZES[config.precision],
        world_size=setting.world_size,
    )
    return make_workload(
        config,
        groups,
        configured_state(config),
        on_gpu=on_gpu,
        world_size=setting.world_size,
        fetch_by_copy=on_gpu,
    )


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
