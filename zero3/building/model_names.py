"""The names of a model's parameters and buffers in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zero3.params.row_tiles import TiledWeight, tiled_weights, whole_names


class ModelNames:
    """The names that modules of ``model`` have now, which they keep when they are moved.

    A run that loads a checkpoint builds the model as it was at ``initialize``, and may move modules after that, before
    or after the load. So a module that was moved, or removed from the model, keeps its name in checkpoints. A module
    that is added later has its current name, unless that is in use.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = dict(model.named_modules(remove_duplicate=False))

    def modules(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """As ``named_modules``."""
        first_modules = {id(module) for module in self._first.values()}
        later = {
            name: module
            for name, module in self._model.named_modules(remove_duplicate=False)
            if id(module) not in first_modules and name not in self._first
        }
        yielded_ids: set[int] = set()
        for name, module in (*self._first.items(), *later.items()):
            if not remove_duplicate or id(module) not in yielded_ids:
                yielded_ids.add(id(module))
                yield name, module

    def parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``named_parameters``, but a tile of a weight has the name of the weight."""
        yielded: set[nn.Parameter] = set()
        wholes = whole_names(self.modules(remove_duplicate=remove_duplicate))
        for prefix, module in self.modules(remove_duplicate=remove_duplicate):
            for short, param in module._parameters.items():
                if param is not None and not (remove_duplicate and param in yielded):
                    yielded.add(param)
                    name = f"{prefix}.{short}" if prefix else short
                    yield wholes.get(name, name), param

    def tiled(self) -> dict[str, tuple[str, ...]]:
        """The names of the tiles of each weight that is stored as tiles; of tied weights, of the first."""
        first: dict[nn.Parameter, TiledWeight] = {}
        for weight in tiled_weights(self.modules()):
            first.setdefault(weight.layer.tile_weights[0], weight)
        return {weight.name: tuple(weight.tiles) for weight in first.values()}
