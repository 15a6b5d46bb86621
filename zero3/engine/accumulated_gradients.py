"""The gradients that the engine has accumulated since the last step, read and replaced between passes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from tiering.errors import ConfigError, EngineStateError
from zero3.loop.lifecycle import Readiness
from zero3.loop.step import Update
from zero3.loop.step_state import StepState
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes.pass_state import in_autograd
from zero3.passes.schedule import PassSchedule
from zero3.state.access import check_idle
from zero3.state.tensors import TieredState


class AccumulatedGradients:
    """Reads and replaces accumulated gradients. Values are unscaled, and not clipped."""

    def __init__(
        self,
        state: TieredState,
        schedule: PassSchedule,
        ready: Readiness,
        updates: Update,
        optimizer: TieredOptimizer | ClientOptimizer,
        stage: int,
    ) -> None:
        self._state = state
        self._schedule = schedule
        self._ready = ready
        self._updates = updates
        self._optimizer = optimizer
        self._stage = stage

    def get(self, group: ParamGroup, piece: Piece) -> Tensor | None:
        """See Engine.get_fp32_gradient. The gradient of ``piece``."""
        gradient = self._state.gradient(group, piece)
        return None if gradient is None else gradient.float() / self._updates.loss_scale.value

    def check_readable(self, call: str) -> None:
        """EngineStateError unless the gradients are complete and ``call`` can read them."""
        self._ready.check_open(call)
        self._check_reduced(call)
        if in_autograd():
            raise EngineStateError(
                f"{call} was called while a backward is running, before the gradients are complete; call it"
                " after backward has ended"
            )

    def check_replaceable(self, call: str, piece: Piece) -> None:
        """EngineStateError unless ``call`` can replace the gradient of ``piece`` now."""
        self._ready.check_open(call)
        self._check_reduced(call)
        check_trained(piece)
        check_idle(self._schedule, call)

    def replace(self, group: ParamGroup, piece: Piece, values: Tensor) -> None:
        """Make ``values`` (fp32, flat) the gradient of ``piece``; all ranks have the same values."""
        self._state.set_gradient(group, piece, values * self._updates.loss_scale.value)
        self._updates.current_step.to_pending()

    def assign(self, group: ParamGroup, piece: Piece, values: Tensor | None) -> None:
        """The script has assigned ``values`` to ``.grad`` of a parameter, between passes; None drops the gradient."""
        call = f"an assignment of {piece.name!r}.grad"
        if values is None:
            if self._state.holds_gradient(piece):
                self._check_unused(call)
                self._optimizer.warn_of_dropped_gradients("param.grad = None")
                self._state.drop_gradient(group, piece)
            return
        self.check_replaceable(call, piece)
        flat = flat_fp32(values, piece.name, piece.shape)
        self._check_ranks_alike(piece, flat)
        self.replace(group, piece, flat)

    def _check_reduced(self, call: str) -> None:
        """EngineStateError unless the gradients can be read by name: reduced over the ranks, and not used."""
        if self._state.has_unreduced_gradients:
            raise EngineStateError(
                f"{call} was called before the last backward of a step, and this stage ({self._stage}) reduces"
                " gradients over the ranks only then; call it after that, or use stage 2"
            )
        self._check_unused(call)

    def _check_unused(self, call: str) -> None:
        """EngineStateError if a backward has stepped with the gradients."""
        if self._updates.current_step.state is StepState.UPDATED_IN_BACKWARD:
            raise EngineStateError(
                f"{call} was called after backward has used the gradients (tiering.step 'in_backward'); set step to"
                " 'deferred' or 'after' to keep them until step()"
            )

    def _check_ranks_alike(self, piece: Piece, values: Tensor) -> None:
        """EngineStateError, on every rank, unless all ranks have these values."""
        if self._state.collectives is None:
            return
        row = torch.frombuffer(bytearray(hashlib.sha256(values.numpy().data).digest()), dtype=torch.uint8)
        rows = self._state.collectives.tables.table(row, f"assign {piece.name!r}.grad")
        ranks = self._state.collectives.tables.ranks
        for rank, digest in zip(ranks, rows, strict=True):
            if not torch.equal(digest, rows[0]):
                raise EngineStateError(
                    f"{piece.name!r}.grad was assigned different values on rank {rank} and on rank {ranks[0]}, but all"
                    " ranks step with one gradient. Average it over the ranks first (torch.distributed.all_reduce), or"
                    " let engine.backward(loss) do it"
                )


def flat_fp32(values: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """``values`` for ``name``, which has this ``shape``, as a flat fp32 tensor in host memory; else ConfigError."""
    if values.layout is not torch.strided:
        raise ConfigError(f"{name!r} takes dense values, not {values.layout}: pass values.to_dense()")
    if tuple(values.shape) != shape:
        raise ConfigError(f"{name!r} has shape {shape}, not {tuple(values.shape)}")
    return values.detach().to("cpu", torch.float32).reshape(-1)


def check_trained(piece: Piece) -> None:
    """ConfigError if the parameter is frozen."""
    if not piece.trainable:
        raise ConfigError(f"{piece.name!r} is frozen: it has neither gradient nor optimizer state")
