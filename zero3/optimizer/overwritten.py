"""Parameters in host memory that a step ahead has overwritten.

Such a step may be taken back. Then swap space has the optimizer state of before, but these parameters have one version.
They are the masters in that state, rounded (see ``hides_in_place`` in tiering/placement/updates.py). So they are
restored from the masters before they are read, unless the next step overwrites them first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch

from optim_cpu.formats import round_parameters
from zero3.device.tiers import Tiers
from zero3.optimizer.tiles import FP32, Tile
from zero3.params.param_group import ParamGroup


class OverwrittenParameters:
    """The parameters of these tiles are newer than their state, or may be. ``make_room`` frees staging for reads."""

    def __init__(self, tiers: Tiers, make_room: Callable[[], None]) -> None:
        self._tiers = tiers
        self._make_room = make_room
        self.tiles: dict[Tile, None] = {}
        """Added before a step ahead writes them, and removed by a step that is certain."""

    def restore(self, group: ParamGroup | None = None, *, wait: bool = True) -> bool:
        """Undo, in the parameters of ``group`` or of all, the step that was taken back.

        Returns False if masters have to be read for that, unless ``wait`` is set.
        """
        tiles = [tile for tile in self.tiles if group in (None, tile.group)]
        if wait:
            self._restore(tiles)
        return wait or not tiles

    def restore_rest(self, stepped: Container[int]) -> None:
        """Do so where a step of the pieces ``stepped`` (indices) does not overwrite all of a tile."""
        self._restore(
            [tile for tile in self.tiles if not all(part.piece.index in stepped for part in tile.segments)]
        )

    def _restore(self, tiles: Iterable[Tile]) -> None:
        for tile in tiles:
            self._make_room()
            master = self._tiers.load(tile.state, 0, tile.numel * FP32).view(torch.float32)
            home, dtype = tile.group.shard_home.tensor, tile.group.dtype
            assert home is not None
            params = home.view(dtype)[tile.start : tile.end]
            for segment in tile.segments:
                part = slice(segment.start - tile.start, segment.start - tile.start + segment.numel)
                round_parameters(master[part], params[part])
            # Last: after an exception, the call can be made again.
            del self.tiles[tile]
