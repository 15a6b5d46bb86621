"""Linear layers and embeddings whose weight is stored as tiles of rows, each a parameter of a module of its own.

A module has its parameters in memory while it runs. So a layer needs memory for one tile at a time where the tiles are
groups of their own, not for its whole weight. The rows of a weight are the outputs of a linear layer, and the entries
of an embedding. Outside of the engine a layer has its usual names: its state dict holds one ``weight``.

Note [What is the same in tiles]
    Each output of a linear layer is a product with one row, and the gradient of a row comes from this output alone. So
    torch computes both from a tile as from the whole weight, as far as its product does not depend on the number of
    outputs. The gradient of a bias is a sum over all rows of the input, whose order may depend on that number, too. The
    gradient of the input is a sum over all outputs, here of a part for each tile: in 16 bits, each part is rounded, and
    the parts are added up in fp32, from the last tile to the first, and rounded once. The entries of an embedding are
    copied, and the gradient of an entry is the sum of its uses, in their order: both have the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional


class LinearTile(nn.Module):
    """Some outputs of a linear layer: a weight of shape (rows, in_features)."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(input, self.weight, bias)

    def extra_repr(self) -> str:
        return f"rows={self.weight.shape[0]}, in_features={self.weight.shape[1]}"


class RowTiles(nn.Module):
    """A layer without a ``weight``, of shape (rows, columns): ``tiles`` are modules with some of its rows each."""

    tiles: nn.ModuleList

    @property
    def tile_weights(self) -> tuple[nn.Parameter, ...]:
        """The weights of the tiles, in the order of the rows."""
        return tuple(param for tile in self.tiles for param in tile.parameters())

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the whole weight."""
        weights = self.tile_weights
        return sum(weight.shape[0] for weight in weights), weights[0].shape[1]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            _refuse(self)
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # Also an assignment: the layer would not use what it is given.
        if name == "weight":
            _refuse(self)
        super().register_parameter(name, param)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override] # torch's has overloads
        """As ``nn.Module.state_dict``, with the whole weight. With ``keep_vars``, each tile has a name of its own."""
        saved: dict[str, Any] = super().state_dict(*args, **options)
        if not options.get("keep_vars", False):
            prefix = options.get("prefix", "")
            parts = [saved.pop(_tile_name(prefix, number)) for number in range(len(self.tiles))]
            saved[f"{prefix}weight"] = torch.cat(parts)
        return saved

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        whole = state_dict.get(f"{prefix}weight")
        if isinstance(whole, Tensor) and tuple(whole.shape) == self.shape:
            del state_dict[f"{prefix}weight"]
            parts = whole.split([weight.shape[0] for weight in self.tile_weights])
            state_dict |= {_tile_name(prefix, number): part for number, part in enumerate(parts)}
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Gradient:
    """The gradient of a tensor with several users, each of which gives a part of it in every backward."""

    def __init__(self, users: int) -> None:
        self._users = self._missing = users
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> Tensor | None:
        """Adds ``part`` in fp32. Returns the sum, rounded to the dtype of ``part``, if no part is missing."""
        self._sum = part.float() if self._sum is None else self._sum + part
        self._missing -= 1
        if self._missing:
            return None
        total, self._sum, self._missing = self._sum.to(part.dtype), None, self._users
        return total


class _Share(torch.autograd.Function):
    """The input for one of several users, whose gradients are added up in ``gradient``."""

    @staticmethod
    def forward(input: Tensor, gradient: _Gradient) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Gradient], output: Tensor) -> None:
        _, ctx.gradient = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient.add(grad), None


def _shared(input: Tensor, users: int) -> list[Tensor]:
    """``input`` for each of its users. Each takes part in every backward, because their outputs are one tensor."""
    if torch.compiler.is_compiling():
        # The same sum, and the compiler makes one copy of these. It cannot trace an object that changes in backward.
        exact = input.float()
        return [exact.to(input.dtype) for _ in range(users)]
    gradient = _Gradient(users)
    return [_Share.apply(input, gradient) for _ in range(users)]  # type: ignore[no-untyped-call] # torch's


class RowTiledLinear(RowTiles, nn.Linear):
    """``nn.Linear`` whose weight is stored as tiles of rows. See Note [What is the same in tiles]."""

    def forward(self, input: Tensor) -> Tensor:
        outputs, first = [], 0
        kind = input.device.type
        if not input.is_meta and torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:
            # Once: autocast would make a copy for each tile, and each would be kept for backward.
            input = input.to(torch.get_autocast_dtype(kind))
        if input.requires_grad and input.dtype in (torch.bfloat16, torch.float16):
            inputs = _shared(input, len(self.tiles))
        else:
            inputs = [input] * len(self.tiles)
        for tile, part, weight in zip(self.tiles, inputs, self.tile_weights, strict=True):
            rows = weight.shape[0]
            bias = None if self.bias is None else self.bias[first : first + rows]
            outputs.append(tile(part, bias))
            first += rows
        return torch.cat(outputs, -1)

    def reset_parameters(self) -> NoReturn:
        _refuse(self)


class RowTiledEmbedding(RowTiles, nn.Embedding):
    """``nn.Embedding`` whose weight is stored as tiles of rows. See Note [What is the same in tiles]."""

    def forward(self, input: Tensor) -> Tensor:
        # Uses of one entry stay in their order, in which their gradients are added up.
        indices, order = input.reshape(-1).sort(stable=True)
        ends = list(itertools.accumulate(len(weight) for weight in self.tile_weights))
        places = _places(indices, [0, *ends])
        if places[0] or places[-1] != len(indices):
            raise IndexError(f"an index is out of range: the embedding has {self.num_embeddings} rows")
        # Also a tile without any index: so each runs, and gets a gradient, in every pass.
        parts = [
            tile(indices[start:stop] - first)
            for tile, first, (start, stop) in zip(
                self.tiles, [0, *ends], itertools.pairwise(places), strict=False
            )
        ]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return torch.cat(parts).index_select(0, back).view(*input.shape, self.embedding_dim)

    def reset_parameters(self) -> NoReturn:
        _refuse(self)


def to_tiles(layer: nn.Linear | nn.Embedding, weights: Sequence[nn.Parameter]) -> None:
    """Turn ``layer`` into a layer of tiles with ``weights``, in place, so that its hooks and references to it stay.

    It may be a layer of larger tiles.
    """
    assert type(layer) in (nn.Linear, nn.Embedding, RowTiledLinear, RowTiledEmbedding)
    layer._parameters.pop("weight", None)
    if isinstance(layer, nn.Linear):
        tiles: list[nn.Module] = [LinearTile(weight) for weight in weights]
        layer.__class__ = RowTiledLinear
    else:
        tiles = list(_embedding_tiles(layer, weights))
        layer.__class__ = RowTiledEmbedding
    layer.tiles = nn.ModuleList(tiles)


def _embedding_tiles(layer: nn.Embedding, weights: Sequence[nn.Parameter]) -> Iterator[nn.Embedding]:
    first = 0
    for weight in weights:
        rows, columns = weight.shape
        padding = None if layer.padding_idx is None else layer.padding_idx - first
        inside = padding is not None and 0 <= padding < rows
        # Without initial values, even of memory that it does not have: they would take longer than the tile.
        values = torch.empty(rows, columns, device="meta")
        tile = nn.Embedding.from_pretrained(values, padding_idx=padding if inside else None)
        tile.weight = weight
        yield tile
        first += rows


class TiledWeight(NamedTuple):
    """The weight of a layer of tiles: its name, and the layer."""

    name: str
    layer: RowTiles

    @property
    def tiles(self) -> dict[str, nn.Parameter]:
        """The tiles by their names, in the order of the rows."""
        prefix = self.name.removesuffix("weight")
        return {_tile_name(prefix, number): weight for number, weight in enumerate(self.layer.tile_weights)}


def tiled_weights(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[TiledWeight]:
    """The weights that are stored as tiles in ``modules``, by name."""
    for prefix, module in modules:
        if isinstance(module, RowTiles):
            yield TiledWeight(f"{prefix}.weight" if prefix else "weight", module)


def whole_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """The name of the whole weight for the name of each tile in ``modules``."""
    return {name: tiled.name for tiled in tiled_weights(modules) for name in tiled.tiles}


def join_tiles(model: nn.Module, state: dict[str, Any]) -> None:
    """Replace the tiles in ``state``, tensors by their names in ``model``, by whole weights. Tied ones share one."""
    joined: dict[tuple[nn.Parameter, ...], Tensor] = {}
    for tiled in tiled_weights(model.named_modules(remove_duplicate=False)):
        parts = [state.pop(name) for name in tiled.tiles if name in state]
        if parts:
            weights = tiled.layer.tile_weights
            if weights not in joined:
                joined[weights] = torch.cat(parts)
            state[tiled.name] = joined[weights]


def tile_modules(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The tiles of all layers in ``modules``."""
    return {tile for module in modules if isinstance(module, RowTiles) for tile in module.tiles}


def _tile_name(prefix: str, number: int) -> str:
    return f"{prefix}tiles.{number}.weight"


def _places(indices: Tensor, rows: list[int]) -> list[int]:
    """Where in the sorted ``indices`` those of each of ``rows`` begin. Indices without values are in the first tile."""
    if indices.is_meta or isinstance(indices, FakeTensor):
        return [0] + [len(indices)] * (len(rows) - 1)
    # One wait for a GPU, whatever the number of tiles.
    return torch.searchsorted(
        indices, torch.tensor(rows, device=indices.device, dtype=indices.dtype)
    ).tolist()


def _refuse(layer: RowTiles) -> NoReturn:
    raise AttributeError(
        f"a {type(layer).__name__} has no weight: tiling has cut it into {len(layer.tiles)} tiles, which"
        " `with tiering.gathered(list(layer.tiles.parameters())):` reads; if the code of the model uses the weight"
        " instead of calling the layer, leave the layer out of tiling (modules); add adapters and tie weights before"
        " tiling"
    )
