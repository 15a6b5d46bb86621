"""The parameters of one engine's model: their names, the checks before a pass or an update, and in-place edits."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from tiering.errors import ConfigError, EngineStateError
from zero3.optimizer.update_rules import UNPLANNED_REMEDY
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup, Residency
from zero3.params.row_tiles import RowTiles
from zero3.state.tensors import TieredState

log = logging.getLogger(__name__)


class Parameters:
    """The parameters of ``model``, which are in ``groups``, and whose masters are in ``state``.

    ``check_files`` raises WeightsError if a file from which frozen parameters are read has changed.
    Stores in-place edits of the groups' parameters (param_group.EditListener). ``trains``: frozen parameters must stay
    frozen, because the trained ones have optimizer state and they have none.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ParamGroup],
        state: TieredState,
        check_files: Callable[[], None],
        *,
        trains: bool,
    ) -> None:
        self.groups = groups
        self._model = model
        self._state = state
        self._check_files = check_files
        with_slices = [each for group in groups for each in (group, *group.slices)]
        self._places = {
            param: (group, position) for group in with_slices for position, param in enumerate(group.params)
        }
        self._frozen = [
            (param, piece.name)
            for group in groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
            if trains and not piece.trainable
        ]
        self._by_name = {piece.name: (group, piece) for group in groups for piece in group.layout.pieces}
        self._warned_of_names = False
        for group in with_slices:
            group.listen(self)

    @property
    def all(self) -> list[nn.Parameter]:
        """The parameters, in the order of the groups, and the slices of those that hold several experts."""
        return list(self._places)

    def place_of(self, param: nn.Parameter) -> tuple[ParamGroup, int]:
        """The group of ``param``, and its position there."""
        return self._places[param]

    def piece_of(self, param: nn.Parameter) -> tuple[ParamGroup, Piece]:
        """The group of ``param``, and its piece."""
        group, position = self._places[param]
        return group, group.layout.pieces[position]

    def name_of(self, param: nn.Parameter) -> str:
        """The current name of ``param`` in ``module.named_parameters()``; ConfigError if the model no longer has it."""
        planned = self.piece_of(param)[1].name
        if self._current(planned) is param:
            return planned
        for name, candidate in self._model.named_parameters():
            if candidate is param:
                return name
        raise ConfigError(f"the model no longer has the parameter that was named {planned!r} at initialize")

    def find(self, name: str) -> tuple[ParamGroup, Piece]:
        """The group and the piece of the parameter with the current name ``name``; ConfigError if there is none.

        A parameter that the model no longer has keeps its name of initialize, unless another parameter has it now.
        """
        param = self._current(name)
        if param is not None and param in self._places:
            return self.piece_of(param)
        if name not in self._by_name:
            raise ConfigError(f"the model has no parameter {name!r}; see dict(model.named_parameters())")
        return self._by_name[name]

    def parts(self, name: str) -> list[tuple[ParamGroup, Piece]]:
        """As ``find``; of a weight that is stored as tiles, all of them, in the order of its rows."""
        module_name, _, short = name.rpartition(".")
        try:
            layer = self._model.get_submodule(module_name)
        except AttributeError:
            layer = None
        if short == "weight" and isinstance(layer, RowTiles):
            return [self.piece_of(tile) for tile in layer.tile_weights]
        return [self.find(name)]

    def warn_of_new_names(self) -> None:
        """Warn once if modules were moved, because checkpoints keep the names of initialize."""
        renamed = next(
            (name for name, (group, piece) in self._by_name.items() if self.find(name)[1] is not piece), None
        )
        if renamed is not None and not self._warned_of_names:
            self._warned_of_names = True
            log.warning(
                "modules were moved after initialize: %r is another parameter now. Checkpoints keep the names of"
                " initialize, so the run that loads one must initialize the model in the order that it had then, and"
                " move modules afterwards; state_dict() and exports have the current names",
                renamed,
            )

    @property
    def lending(self) -> bool:
        """Whether a ``gathered`` block is open."""
        return any(group.shows_copies for group in self.groups)

    def check_before_update(self) -> None:
        """EngineStateError if the model has changed since initialize, or a ``gathered`` block is open."""
        if self.lending:
            raise EngineStateError(
                "step was called inside tiering.gathered(), whose copies would undo the update; end that block first"
            )
        self._check_no_new_parameter()
        self.check_frozen()
        # Gradients of a pass that has read other values must not reach the parameters.
        self._check_files()

    def check_frozen(self) -> None:
        """EngineStateError if a parameter that was frozen at initialize requires a gradient."""
        # This loop visits thousands of parameters before each forward: without __torch_function__ it is faster.
        with torch._C.DisableTorchFunctionSubclass():
            name = next((name for param, name in self._frozen if param.requires_grad), None)
        if name is not None:
            raise EngineStateError(
                f"{name!r} was frozen at initialize and requires a gradient now, but no tier has room for its optimizer"
                f" state: it would never be trained. Freeze it again. {UNPLANNED_REMEDY}"
            )

    def check_residents(self) -> None:
        """EngineStateError if a resident parameter points to other memory."""
        for group in self.groups:
            if group.residency is Residency.RESIDENT:
                group.check_memory()

    def store_edits_of_residents(self, only: ParamGroup | None = None) -> None:
        """Store in-place edits of resident parameters in their masters."""
        for group in self.groups if only is None else [only]:
            if group.residency is Residency.RESIDENT and (edited := group.edited()):
                self.store_edits(group, edited)

    def store_edits(self, group: ParamGroup, positions: list[int]) -> None:
        """Write parameters that were edited in place to their home and to their masters."""
        for position in positions:
            piece = group.layout.pieces[position]
            self._state.store_edit(group, piece, group.view(position).detach().reshape(-1), in_place=True)
        # Only when all of them are stored: after an exception they count as edits again.
        group.note_versions()

    def _check_no_new_parameter(self) -> None:
        """EngineStateError if the model has a parameter that it did not have at initialize."""
        modules = [self._model]
        # This runs at each step: named_parameters() would take ten times as long.
        while modules:
            module = modules.pop()
            modules.extend(child for child in module._modules.values() if child is not None)
            if any(p is not None and p not in self._places for p in module._parameters.values()):
                new = [name for name, param in self._model.named_parameters() if param not in self._places]
                raise EngineStateError(
                    f"{new[0]!r} became a parameter of the model after initialize and would never be trained; build the"
                    " whole model first, then initialize. To continue this run: save_checkpoint(), release(), change"
                    " the model, initialize, and load_checkpoint(load_module_strict=False)"
                )

    def _current(self, name: str) -> nn.Parameter | None:
        """The parameter with the current name ``name``, if there is one."""
        try:
            return self._model.get_parameter(name)
        except AttributeError:
            return None
