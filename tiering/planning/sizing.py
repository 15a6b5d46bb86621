"""A decoder of a given size or name, for plans without a model: its shape, and its groups.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from tiering._text import counted
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.placement.configured import configured_state, largest_group, make_workload
from tiering.placement.row_tiles import rows_of_tiles
from tiering.placement.tenants import activations
from tiering.placement.tile_sizes import Tiling
from tiering.placement.workload import ITEMSIZES, GroupSizes, Workload, shard_quantum, start_after
from tiering.planning.activations import Activations, of_decoder
from tiering.planning.adapters import Adapters
from tiering.planning.choices import NOTHING, Open, assumptions, choose, together
from tiering.planning.plan_report import PlanReport, report_on
from tiering.planning.request import ModelSize, Request
from tiering.planning.setting import RatesOf, Setting, with_changes
from tiering.storage.arena import round_up

# More tiles would take longer to plan than a command may.
MOST_TILES = 25_000
# Elements of an attention head.
HEAD = 128
VOCABULARY = 32_000
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


class _Weight(NamedTuple):
    """A parameter of the module ``module``: (outputs, inputs) elements of a linear layer, or a number of elements.

    With ``tile``, one of the tiles into which the layer is cut.
    """

    module: str
    shape: tuple[int, ...]
    tile: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a linear layer."""
        return len(self.shape) == 2 and self.module != "embed_tokens"

    @property
    def layer(self) -> str:
        """The name of the module in its block."""
        name = self.module.partition(".")[0]
        around = "self_attn." if name in _IN_ATTENTION else "mlp." if name in _IN_MLP else ""
        return around + name + self.within

    @property
    def within(self) -> str:
        """The name of the tile in its layer."""
        return "" if self.tile is None else f".tiles.{self.tile}"

    def tiles(self, itemsize: int, largest: int) -> Iterator[_Weight]:
        """This weight in tiles of at most ``largest`` bytes, in elements of ``itemsize`` bytes."""
        if len(self.shape) < 2:
            yield self
            return
        rows, columns = self.shape
        parts = rows_of_tiles(rows, columns, itemsize, largest)
        for number, count in enumerate(parts):
            yield self._replace(shape=(count, columns), tile=number if len(parts) > 1 else None)


class _Stored(NamedTuple):
    """A tensor in the groups: its elements as the persistence threshold counts them, and those of its flat tensor."""

    numel: int
    flat_numel: int
    trained: bool


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
            self.layers * sum(weight.numel for weight in self._block())
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
        adapted = [weight for weight in self.linear_layers if _is_adapted(weight, adapters)]
        return sum(math.prod(shape) for weight in adapted for shape in adapters.matrices(*weight.shape[::-1]))

    @property
    def linear_layers(self) -> list[_Weight]:
        """The matrices of all linear layers, with the output head."""
        weights = (weight for weights in self._modules().values() for weight in weights)
        return [weight for weight in weights if weight.is_linear]

    def groups(
        self,
        *,
        persistence_threshold: int,
        itemsize: int,
        world_size: int = 1,
        adapters: Adapters | None = None,
        largest: int | None = None,
        tile: int = 0,
    ) -> tuple[GroupSizes, ...]:
        """The ParamGroups in a compute dtype of ``itemsize`` bytes, divided and padded as in the engine.

        Parameters with fewer elements than ``persistence_threshold`` are one group. The embedding and the head are
        separate groups if they are larger than a block; otherwise they belong to the root, which encloses all others.
        With ``adapters``, trained and frozen parameters of a module are groups beside each other. Blocks with more than
        ``largest`` elements are cut into their layers, and layers of more than ``tile`` bytes into tiles.
        """
        block = sum(
            stored.numel for weight in self._block() for stored in _stored(weight, itemsize, adapters)
        )
        most = block if largest is None else min(block, largest)

        def tensors_of(
            weights: Iterable[_Weight], part_of: Callable[[_Weight], str]
        ) -> dict[str, list[_Stored]]:
            """The tensors by the part of the module that has them."""
            parts: dict[str, list[_Stored]] = {}
            for weight in (part for whole in weights for part in whole.tiles(itemsize, tile)):
                parts.setdefault(part_of(weight), []).extend(_stored(weight, itemsize, adapters))
            return parts

        # All blocks have the same.
        of_block = tensors_of(self._block(), lambda weight: f".{weight.layer}" if most < block else "")
        modules = {
            module + part: tensors
            for module, weights in self._modules().items()
            for part, tensors in (
                of_block if ".layers." in module else tensors_of(weights, lambda weight: weight.within)
            ).items()
        }
        members: dict[tuple[str, bool], list[_Stored]] = {}
        for name, tensors in modules.items():
            own = ".layers." in name or sum(stored.numel for stored in tensors) > most
            for stored in tensors:
                group = "persistent" if stored.numel < persistence_threshold else name if own else "root"
                frozen = group != "persistent" and not stored.trained
                members.setdefault((group, frozen), []).append(stored)
        index_of = {key: index for index, key in enumerate(members)}
        # Of two groups beside each other, the trained one encloses those inside.
        around = index_of.get(("root", False), index_of.get(("root", True)))
        groups = []
        padded: dict[tuple[_Stored, ...], int] = {}
        for (name, frozen), inside in members.items():
            persistent = name == "persistent"
            beside = None if persistent else index_of.get((name, not frozen))
            kinds = [tuple(each for each in inside if each.trained is kind) for kind in (True, False)]
            for tensors_alike in kinds:
                if tensors_alike not in padded:
                    padded[tensors_alike] = _padded(tensors_alike, itemsize, world_size)
            trained, fixed = map(padded.__getitem__, kinds)
            groups.append(
                GroupSizes(
                    f"{name} (frozen)" if frozen and beside is not None else name,
                    (trained + fixed) * itemsize,
                    trained,
                    parent=None if persistent or name == "root" else around,
                    persistent=persistent,
                    uses=0 if persistent else 1,
                    uses_in_backward=0 if name == "model.embed_tokens" and not trained else None,
                    largest_trained=max((each.numel for each in inside if each.trained), default=0),
                    beside=beside,
                )
            )
        return tuple(groups)

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

    def _modules(self) -> dict[str, list[_Weight]]:
        """The parameters of the embedding, the blocks, the last norm and the head, in the engine's order."""
        block = self._block()
        return {
            "model.embed_tokens": [_Weight("embed_tokens", (self.vocabulary, self.hidden))],
            **{f"model.layers.{layer}": block for layer in range(self.layers)},
            "model.norm": [_Weight("norm", (self.hidden,))],
            "lm_head": [_Weight("lm_head", (self.vocabulary, self.hidden))],
        }

    def _block(self) -> list[_Weight]:
        hidden, narrow = self.hidden, self.key_values or self.hidden
        attention = []
        for name, outputs in (("q_proj", hidden), ("k_proj", narrow), ("v_proj", narrow)):
            attention.append(_Weight(name, (outputs, hidden)))
            if self.attention_bias:
                attention.append(_Weight(f"{name}.bias", (outputs,)))
        return [
            *attention,
            _Weight("o_proj", (hidden, hidden)),
            _Weight("gate_proj", (self.intermediate, hidden)),
            _Weight("up_proj", (self.intermediate, hidden)),
            _Weight("down_proj", (hidden, self.intermediate)),
            _Weight("input_layernorm", (hidden,)),
            _Weight("post_attention_layernorm", (hidden,)),
        ]


# By the names of their publishers' configurations.
NAMED = {
    "llama-3-8b": Decoder(4096, 32, 14336, 128_256, key_values=1024),
    "qwen2.5-32b": Decoder(5120, 64, 27648, 152_064, key_values=1024, attention_bias=True),
    "llama-3-70b": Decoder(8192, 80, 28672, 128_256, key_values=1024),
}


def _is_adapted(weight: _Weight, adapters: Adapters) -> bool:
    return weight.is_linear and adapters.adapts(weight.module, is_head=weight.module == "lm_head")


def _stored(weight: _Weight, itemsize: int, adapters: Adapters | None) -> Iterator[_Stored]:
    """The tensors of ``weight`` in a model with ``adapters``, in the order of their modules."""
    if adapters is None:
        yield _Stored(weight.numel, weight.numel, trained=True)
        return
    is_head = weight.module == "lm_head"
    if weight.is_linear and adapters.stores(weight.module, weight.shape[1], is_head=is_head):
        for nbytes in adapters.stored(weight.numel):
            yield _Stored(nbytes, -(-nbytes // itemsize), trained=False)
    else:
        yield _Stored(weight.numel, weight.numel, trained=False)
    if _is_adapted(weight, adapters):
        for shape in adapters.matrices(*weight.shape[::-1]):
            yield _Stored(math.prod(shape), math.prod(shape), trained=True)


def _padded(tensors: Iterable[_Stored], itemsize: int, world_size: int) -> int:
    """Elements of the flat tensor for ``tensors``, with the alignment of each and the padding of all."""
    offset = 0
    for each in tensors:
        offset = start_after(offset, each.flat_numel, itemsize, world_size) + each.flat_numel
    return round_up(offset, shard_quantum(world_size) * world_size)


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


def plan_of_size(
    params: int,
    config: TieringConfig,
    setting: Setting,
    rates: RatesOf,
    adapters: Adapters | None = None,
    open_: Open = NOTHING,
) -> PlanReport:
    """The plan of the decoder of about ``params`` parameters.

    Raises ConfigError if there is no such decoder, or the configuration does not support it.
    """
    shape = decoder(params)
    return plan_of_decoder(str(shape), shape, config, setting, rates, adapters, open_)


def plan_of_decoder(
    name: str,
    shape: Decoder,
    config: TieringConfig,
    setting: Setting,
    rates: RatesOf,
    adapters: Adapters | None = None,
    open_: Open = NOTHING,
) -> PlanReport:
    """The plan of ``shape``, with ``adapters`` over it if they are given; the report calls it ``name``.

    What is ``open_`` is chosen so that there is a plan. Raises ConfigError if the configuration does not support it.
    """
    adapters = Adapters.configured(adapters, config.tiering.quantize)
    setting = setting.following(config)
    attention = setting.attention_flops(shape.layers, shape.hidden)
    activations_of = partial(shape.activations, itemsize=ITEMSIZES[config.precision], adapters=adapters)
    size = ModelSize(name, shape.params, attention_flops=attention, activations=activations_of)
    if adapters is not None:
        size = with_adapters(size, adapters, shape.trained_params(adapters))
        open_ = replace(open_, tile=False)

    def request(config: TieringConfig, setting: Setting) -> Request:
        def tiled(tile: int) -> Workload:
            return load_of(shape, with_changes(config, tiers={"tile": tile}), setting)

        itemsize = ITEMSIZES[config.precision]
        layer = max(weight.numel for weight in shape.linear_layers) * itemsize
        largest = min(layer, config.tiering.tile or layer)
        tiling = Tiling(largest, shape.params * itemsize, tiled, MOST_TILES)
        return Request(
            size if adapters is not None else replace(size, tiling=tiling),
            load_of(shape, config, setting, adapters),
            config,
            setting,
        )

    chosen = choose(request, config, setting, open_)
    report = report_on(chosen, rates)
    if not report.fits and not report.remedies:
        report = replace(report, remedies=tuple(together(request, chosen.config, chosen.setting)))
    return replace(report, assumptions=assumptions(chosen, config, setting))


def with_adapters(size: ModelSize, adapters: Adapters, trained: int) -> ModelSize:
    """``size``, of the frozen model alone, with the ``trained`` parameters of ``adapters``."""
    params = size.params + trained
    return replace(
        size,
        name=f"{size.name}, with {adapters} ({format_count(trained)} trained)",
        params=params,
        computed=params,
    )


def load_of(
    shape: Decoder, config: TieringConfig, setting: Setting, adapters: Adapters | None = None
) -> Workload:
    """The engine's Workload for ``shape``, if torch can compute in the memory that reads land in.

    Raises ConfigError if ``adapters`` name a layer that the decoder does not have, or if tiles are configured besides.
    """
    if adapters is not None:
        if config.tiering.tile:
            raise ConfigError(
                "tiles of a model with adapters are not planned: set tiering.tile to 0, or train all"
            )
        adapters.check_found({each.module for each in shape.linear_layers})
    on_gpu = setting.gpu_memory is not None
    groups = partial(
        shape.groups,
        persistence_threshold=config.zero.persistence_threshold,
        itemsize=ITEMSIZES[config.precision],
        world_size=setting.world_size,
        adapters=adapters,
        tile=config.tiering.tile,
    )
    first, finest = groups(largest=largest_group(config, setting.world_size)), groups(largest=0)
    return make_workload(
        config,
        first,
        configured_state(config),
        on_gpu=on_gpu,
        world_size=setting.world_size,
        fetch_by_copy=on_gpu,
        others=activations(config),
        finer=[finest] if config.tiering.block_rows is None and finest != first else (),
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
