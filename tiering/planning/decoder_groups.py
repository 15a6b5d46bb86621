"""The ParamGroups of a decoder, for plans without a model: those that zero3/params/grouping.py makes of it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from tiering.placement.group_sizes import GroupSizes, shard_quantum, start_after
from tiering.placement.row_tiles import rows_of_tiles
from tiering.planning.adapters import Adapters
from tiering.planning.decoder import EMBEDDING, Decoder, Weight
from tiering.storage.arena import round_up

_ROOT, _PERSISTENT = "root", "persistent"
_TILES = ".tiles."


class _Tensor(NamedTuple):
    """A parameter: its elements as the persistence threshold counts them, and those in the flat tensor of a group."""

    numel: int
    flat_numel: int
    trained: bool


class _Kind(NamedTuple):
    persistent: bool
    frozen: bool


class _Part(NamedTuple):
    """The tensors of a module, or of a tile, by their kind: each kind is a group, or belongs to the root's.

    ``name``: what follows the name of the block, or of the module outside of the blocks.
    """

    name: str
    kinds: dict[_Kind, tuple[_Tensor, ...]]

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensors in self.kinds.values() for tensor in tensors)


class _Flat(NamedTuple):
    """The sizes of a group in elements: of its flat tensor, of the trained part, and of the largest trained tensor."""

    numel: int
    trained: int
    largest_trained: int


@dataclass(frozen=True)
class _Cut:
    """How parameters are stored. The fields are arguments of ``form_groups``."""

    persistence_threshold: int
    itemsize: int
    adapters: Adapters | None
    tile: int

    def part(self, name: str, tensors: Iterable[_Tensor]) -> _Part:
        """The part ``name`` with ``tensors``."""
        kinds: dict[_Kind, list[_Tensor]] = {}
        for tensor in tensors:
            small = tensor.numel < self.persistence_threshold
            kinds.setdefault(_Kind(small, frozen=not small and not tensor.trained), []).append(tensor)
        return _Part(name, {kind: tuple(each) for kind, each in kinds.items()})

    def parts(self, weights: Iterable[Weight], *, in_block: bool) -> list[_Part]:
        """A part for each module with some of ``weights``, or for each tile."""
        modules: dict[str, list[_Tensor]] = {}
        for weight in weights:
            for name, tensor in self.tensors(weight, f".{weight.layer}" if in_block else ""):
                modules.setdefault(name, []).append(tensor)
        return [self.part(name, tensors) for name, tensors in modules.items()]

    def tensors(self, weight: Weight, layer: str) -> Iterator[tuple[str, _Tensor]]:
        """The tensors of ``weight`` of the module ``layer``, in the order of their modules, each with the name of its
        own.

        A layer with an adapter counts as one module, unless its weight is cut into tiles.
        """
        if self.adapters is None:
            yield from self._tiles(layer, weight.shape, trained=True)
            return
        adapted = weight.is_adapted(self.adapters)
        if weight.is_stored_as_base(self.adapters):
            stored = self.adapters.stored(weight.numel)
            base = [(layer, _Tensor(nbytes, -(-nbytes // self.itemsize), trained=False)) for nbytes in stored]
        else:
            base = self._tiles(f"{layer}.base_layer" if adapted else layer, weight.shape, trained=False)
        is_cut = _TILES in base[0][0]
        for name, tensor in base:
            yield name if is_cut else layer, tensor
        matrices = self.adapters.matrices(*weight.shape[::-1]) if adapted else ()
        for matrix, shape in zip("AB", matrices, strict=False):
            for name, tensor in self._tiles(f"{layer}.lora_{matrix}.default", shape, trained=True):
                yield name if is_cut else layer, tensor

    def _tiles(self, module: str, shape: tuple[int, ...], *, trained: bool) -> list[tuple[str, _Tensor]]:
        """The tensor of ``module``, or its tiles."""
        rows, *columns = shape
        width = math.prod(columns)
        parts = rows_of_tiles(rows, width, self.itemsize, self.tile) if columns else [rows]
        numels = [each * width for each in parts]
        names = (
            [f"{module}{_TILES}{number}" for number in range(len(numels))] if len(numels) > 1 else [module]
        )
        return [(name, _Tensor(numel, numel, trained)) for name, numel in zip(names, numels, strict=True)]


# A search for budgets needs the same groups many times.
@lru_cache(maxsize=16)
def form_groups(
    shape: Decoder,
    *,
    persistence_threshold: int,
    itemsize: int,
    world_size: int = 1,
    adapters: Adapters | None = None,
    largest: int | None = None,
    tile: int = 0,
) -> tuple[GroupSizes, ...]:
    """The groups of ``shape`` in a compute dtype of ``itemsize`` bytes, divided and padded as in the engine.

    Parameters with fewer elements than ``persistence_threshold`` are one group. The embedding and the head are separate
    groups if they are larger than a block, and so is each tile of them; otherwise they belong to the root, which
    encloses all others. With ``adapters``, trained and frozen parameters of a module are groups beside each other.
    Blocks with more than ``largest`` elements are cut into their layers, and layers of more than ``tile`` bytes into
    tiles.
    """
    cut = _Cut(persistence_threshold, itemsize, adapters, tile)
    # All blocks have the same.
    layers = cut.parts(shape.block(), in_block=True)
    block = sum(part.numel for part in layers)
    most = block if largest is None else min(block, largest)
    if most == block:
        tensors = (cut.tensors(weight, f".{weight.layer}") for weight in shape.block())
        layers = [cut.part("", (tensor for each in tensors for _, tensor in each))]
    members: dict[tuple[str, _Kind], list[tuple[_Tensor, ...]]] = {}
    for module, weights in shape.modules().items():
        in_block = ".layers." in module
        for part in layers if in_block else cut.parts(weights, in_block=False):
            is_own = in_block or _TILES in part.name or part.numel > most
            for kind, tensors_alike in part.kinds.items():
                group = _PERSISTENT if kind.persistent else f"{module}{part.name}" if is_own else _ROOT
                members.setdefault((group, kind), []).append(tensors_alike)
    return tuple(_sizes(members, itemsize, world_size))


def _sizes(
    members: dict[tuple[str, _Kind], list[tuple[_Tensor, ...]]], itemsize: int, world_size: int
) -> Iterator[GroupSizes]:
    """The sizes of the groups with these ``members``, by their names."""

    @cache
    def flat(tensors: tuple[_Tensor, ...]) -> _Flat:
        trained, frozen = ([each for each in tensors if each.trained is kind] for kind in (True, False))
        padded = _padded(trained, itemsize, world_size)
        largest = max((each.numel for each in trained), default=0)
        return _Flat(padded + _padded(frozen, itemsize, world_size), padded, largest)

    index_of = {key: index for index, key in enumerate(members)}

    def index(name: str, *, frozen: bool) -> int | None:
        return index_of.get((name, _Kind(persistent=False, frozen=frozen)))

    # Of two groups beside each other, the trained one encloses those inside.
    trained_root = index(_ROOT, frozen=False)
    around = index(_ROOT, frozen=True) if trained_root is None else trained_root
    for (name, kind), parts in members.items():
        sizes = flat(parts[0] if len(parts) == 1 else tuple(itertools.chain.from_iterable(parts)))
        beside = None if kind.persistent else index(name, frozen=not kind.frozen)
        yield GroupSizes(
            f"{name} (frozen)" if kind.frozen and beside is not None else name,
            sizes.numel * itemsize,
            sizes.trained,
            parent=None if kind.persistent or name == _ROOT else around,
            persistent=kind.persistent,
            uses=0 if kind.persistent else 1,
            uses_in_backward=0 if name.startswith(EMBEDDING) and kind.frozen else None,
            largest_trained=sizes.largest_trained,
            beside=beside,
        )


def _padded(tensors: Iterable[_Tensor], itemsize: int, world_size: int) -> int:
    """Elements of the flat tensor for ``tensors``, with the alignment of each and the padding of all."""
    offset = 0
    for each in tensors:
        offset = start_after(offset, each.flat_numel, itemsize, world_size) + each.flat_numel
    return round_up(offset, shard_quantum(world_size) * world_size)
