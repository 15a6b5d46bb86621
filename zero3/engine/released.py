"""Parameters of a released engine: ordinary parameters, with memory of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tiering.config.fields import format_size
from tiering.errors import ConfigError, PlacementError
from tiering.placement.workload import FP32
from zero3.params import resharded
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.ranks.collectives import Collectives
from zero3.state.tensors import TieredState
from zero3.state.whole_copies import shortage


class Released:
    """Values of an engine's parameters on ``device``, read from the tiers while the engine is open.

    In the compute dtype, except for those of ``in_fp32``: the fp32 masters of trained parameters, and the values of
    others cast to fp32. ``frozen`` are the parameters that the engine has frozen because nothing trains them; they
    require gradients again. ``local_size`` ranks share the host memory of a node. Raises PlacementError, on every rank
    and before anything is read, if they do not fit on a rank in addition to the memory of its engine.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        state: TieredState,
        device: torch.device,
        *,
        in_fp32: set[nn.Parameter],
        frozen: list[nn.Parameter],
        collectives: Collectives | None,
        local_size: int,
    ) -> None:
        self._device = device
        self._in_fp32 = in_fp32
        self._frozen = frozen
        self._check_room(groups, collectives, local_size)
        self._values: list[tuple[nn.Parameter, Tensor]] = [
            (param, self._read(state, param, group, piece))
            for group in groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
        ]

    def restore_parameters(self, model: nn.Module) -> None:
        """Make the parameters ordinary ones with these values. The engine is closed."""
        for param, values in self._values:
            resharded.release(param)
            param.data = values
            param.grad = None
        for param in self._frozen:
            param.requires_grad_(True)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._device)

    def _read(self, state: TieredState, param: nn.Parameter, group: ParamGroup, piece: Piece) -> Tensor:
        if param not in self._in_fp32:
            return state.weight(group, piece).to(self._device)
        read = state.master if piece.trainable else state.weight
        return read(group, piece).to(self._device, torch.float32)

    def _check_room(self, groups: list[ParamGroup], collectives: Collectives | None, local_size: int) -> None:
        nbytes = sum(
            piece.numel * (FP32 if param in self._in_fp32 else group.dtype.itemsize)
            for group in groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
        )
        tables = None if collectives is None else collectives.run_tables
        lacking = shortage(nbytes, self._device, tables, local_size, "release the parameters")
        if lacking is not None:
            needed, free = map(format_size, lacking)
            elsewhere = (
                "" if self._device.type == "cpu" else "call release(device='cpu') to put them there; or "
            )
            raise PlacementError(
                f"release needs {needed} on {self._device} for the model's parameters, but {free} are free in addition"
                f" to the memory of the engine; nothing has changed. To continue, {elsewhere}save them with"
                " save_16bit_model(DIR) or save_checkpoint(DIR), close() the engine and build the model again, with"
                " initialize(weights=DIR) or load_checkpoint(DIR)"
            )


def target_device(requested: torch.device | str | None, engine_device: torch.device) -> torch.device:
    """The device of released parameters: the engine's device, or host memory. ConfigError for another one."""
    device = engine_device if requested is None else torch.device(requested)
    if device.type not in ("cpu", engine_device.type):
        places = " or on ".join(dict.fromkeys((str(engine_device), "cpu")))
        raise ConfigError(f"release puts parameters on {places}, not on {device}")
    return device
