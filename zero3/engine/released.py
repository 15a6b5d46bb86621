"""Parameters of a model that an engine lets go of: ordinary ones, with memory of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tiering.config.fields import format_size
from tiering.errors import ConfigError, PlacementError
from tiering.placement.budgets import available_memory
from tiering.placement.workload import FP32
from zero3.params import resharded
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.ranks.collectives import Collectives
from zero3.state.tensors import TieredState


class Released:
    """Values of an engine's parameters on ``device``, read from the tiers while the engine is open.

    In the compute dtype, or with ``masters`` the fp32 masters of trained parameters. ``frozen`` are the parameters that
    the engine has frozen because nothing trains them; they require gradients again. ``local_size`` ranks share the host
    memory of a node. Raises PlacementError, on every
    rank and before anything is read, if a rank has no room for all of them beside what its engine holds.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        state: TieredState,
        device: torch.device,
        *,
        masters: bool,
        frozen: list[nn.Parameter],
        collectives: Collectives | None,
        local_size: int,
    ) -> None:
        self._device = device
        self._masters = masters
        self._frozen = frozen
        self._check_room(groups, collectives, local_size)
        self._values: list[tuple[nn.Parameter, Tensor]] = [
            (param, self._read(state, group, piece))
            for group in groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
        ]

    def give_back(self, model: nn.Module) -> None:
        """Make the parameters ordinary ones that show these values; their engine is closed."""
        for param, values in self._values:
            resharded.release(param)
            param.data = values
            param.grad = None
        for param in self._frozen:
            param.requires_grad_(True)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._device)

    def _read(self, state: TieredState, group: ParamGroup, piece: Piece) -> Tensor:
        wide = self._masters and piece.trainable
        return (state.master if wide else state.weight)(group, piece).to(self._device)

    def _check_room(self, groups: list[ParamGroup], collectives: Collectives | None, local_size: int) -> None:
        needed = sum(self._nbytes(group, piece) for group in groups for piece in group.layout.pieces)
        free = _free(self._device) // (local_size if self._device.type == "cpu" else 1)
        if collectives is not None:
            row = torch.tensor([free], dtype=torch.int64, device="cpu")
            free = int(collectives.table(row, "find room for released parameters").min())
        if needed > free:
            elsewhere = (
                "" if self._device.type == "cpu" else "give release(device='cpu') to have them there; or "
            )
            raise PlacementError(
                f"release needs {format_size(needed)} on {self._device} for the model's parameters, where"
                f" {format_size(free)} are free beside what the engine holds; the engine is as before. To go on,"
                f" {elsewhere}save them with save_16bit_model(DIR) or save_checkpoint(DIR), close() the engine and"
                " build the model anew, with initialize(weights=DIR) or load_checkpoint(DIR)"
            )

    def _nbytes(self, group: ParamGroup, piece: Piece) -> int:
        return piece.numel * (FP32 if self._masters and piece.trainable else group.dtype.itemsize)


def chosen_device(given: torch.device | str | None, engines: torch.device) -> torch.device:
    """Where released parameters go: the engine's device, or host memory."""
    device = engines if given is None else torch.device(given)
    if device.type not in ("cpu", engines.type):
        places = " or to ".join(dict.fromkeys((str(engines), "cpu")))
        raise ConfigError(f"release gives parameters to {places}, not to {device}")
    return device


def _free(device: torch.device) -> int:
    """Bytes that this process can still take there."""
    if device.type == "cpu":
        return available_memory()
    torch.cuda.empty_cache()  # what torch's pool holds for nobody is free
    return torch.cuda.mem_get_info(device)[0]
