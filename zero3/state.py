"""Tiered state as ordinary tensors: read out of its homes piece by piece, for inspection and saving."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tiering.arena import PAGE
from tiering.errors import EngineStateError
from zero3.assembly import Assembly
from zero3.param_group import ParamGroup
from zero3.partition import Piece

FP32 = 4


class TieredState:
    """Reads what ``parts`` keeps on the tiers. Between steps only: not while a step is running."""

    def __init__(self, parts: Assembly) -> None:
        self._tiers = parts.tiers
        self._groups = parts.groups
        self._tiles = parts.tiles
        self._optimizer = parts.optimizer
        self._master_is_param = parts.plan.workload.master_is_param

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's ``state_dict`` with real values, in the compute dtype; tied parameters share their tensor."""
        self._optimizer.release_read_ahead()
        places = {
            param: (group, piece)
            for group in self._groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
        }
        loaded: dict[int, Tensor] = {}
        result: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                result[name] = value.detach().to("cpu", copy=True)
                continue
            group, piece = places[value]
            if piece.index not in loaded:
                loaded[piece.index] = self._weight(group, piece)
            result[name] = loaded[piece.index]
        return result

    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters of all trainable parameters, by name."""
        self._optimizer.release_read_ahead()
        if self._master_is_param:
            return {
                piece.name: self._weight(group, piece)
                for group in self._groups
                for piece in group.layout.pieces
                if piece.trainable
            }
        masters: dict[str, Tensor] = {}
        for tile in self._tiles:
            for segment in tile.segments:
                piece = segment.piece
                if piece.name not in masters:
                    masters[piece.name] = torch.empty(piece.shape, device="cpu")
                raw = self._tiers.load(tile.state, (segment.start - tile.start) * FP32, segment.numel * FP32)
                flat = masters[piece.name].view(-1)
                flat[segment.start - piece.start :][: segment.numel] = raw.view(torch.float32)
        return masters

    def flip_bit(self) -> str:
        """Flip bit 20 of the middle element of the first master on NVMe; returns where that is."""
        self._optimizer.release_read_ahead()
        for tile in self._tiles:
            home, base = (tile.group.home, tile.start * FP32) if self._master_is_param else (tile.state, 0)
            if home.extent is None or not tile.segments:
                continue
            segment = max(tile.segments, key=lambda part: part.numel)
            offset = base + (segment.start - tile.start + segment.numel // 2) * FP32
            page = offset // PAGE * PAGE
            held = self._tiers.load(home, page, PAGE)
            with self._tiers.writing(home, page, PAGE) as raw:
                raw.copy_(held)
                raw[offset - page + 2] ^= 1 << 4
            return f"bit 20 of a master of {segment.piece.name!r}, {home.extent.where(offset)}"
        raise EngineStateError("flip_bit needs a master on NVMe, and the plan keeps none there")

    def _weight(self, group: ParamGroup, piece: Piece) -> Tensor:
        itemsize = group.dtype.itemsize
        raw = self._tiers.load(group.home, piece.start * itemsize, piece.numel * itemsize)
        return raw.view(group.dtype).view(piece.shape)
