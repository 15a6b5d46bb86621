"""ClientOptimizer: a torch optimizer that no kernel replaces, on state that stays on the device.

It steps fp32 tensors: parameters in fp32, else their masters, which replace the parameters' data during its step. So
it keeps its own param groups and state, keyed by the model's parameters, and its schedulers and hooks continue to work.
Its gradients are the accumulated ones, unscaled and clipped, in fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optim_cpu import formats
from tiering.errors import EngineStateError
from zero3.device import kernels
from zero3.optimizer.deepspeed_names import DeepSpeedOptimizerNames
from zero3.optimizer.tiles import StepListener, Tile
from zero3.optimizer.update_rules import planned_group
from zero3.params import resharded
from zero3.params.layout import Piece
from zero3.passes.gradients import GradientStore


@dataclass
class _Trained:
    """A parameter that is stepped: flat views of its gradient and of its master (None: the parameter itself)."""

    param: nn.Parameter
    piece: Piece
    grad: Tensor
    master: Tensor | None
    on_device: bool  # in memory that only a GPU addresses


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure, as that of LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class ClientOptimizer(DeepSpeedOptimizerNames, torch.optim.Optimizer):
    """Steps ``client``, and shares its ``param_groups`` and ``state``. ``tiles`` hold masters, each a whole group's."""

    trains = True
    deferring = False  # the client steps all parameters at once
    stepper = None  # all state is on the device: there is nothing to read ahead
    state_names: tuple[str, ...] = ()  # on the tiers: the client keeps its state itself

    def __init__(self, client: torch.optim.Optimizer, tiles: list[Tile], gradients: GradientStore) -> None:
        super().__init__(client.param_groups, client.defaults)
        self.client = client
        self.steps: dict[int, int] = {}
        self._listener: StepListener | None = None
        self._gradients = gradients
        self._tiles = tiles
        self._share()
        self._trained = [trained for tile in tiles for trained in _trained(tile, gradients)]

    @property
    def rule_name(self) -> str:
        """The name of the client in messages and checkpoints."""
        return type(self.client).__name__

    def listen(self, listener: StepListener) -> None:
        """Call ``listener`` from now on before a tile is stepped. There is one listener."""
        self._listener = listener

    def release_read_ahead(self) -> None:
        """Nothing was read ahead."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float | None = None
    ) -> None:
        """Update every parameter that got a gradient, gradients multiplied by ``grad_scale`` (unscale x clip).

        Only the engine calls it. Scripts call ``engine.step()``.
        """
        if closure is not None or grad_scale is None:
            raise EngineStateError(self._refusal_to_step())
        if self._listener is not None:
            # Before the first change: the client updates all tiles in one call.
            for tile in self._tiles:
                self._listener.before_change(tile)
        received = [each for each in self._trained if self._gradients.received(each.piece)]
        with self._on_masters():
            try:
                for each in received:
                    each.param.grad = _scaled(each.grad, grad_scale).view(each.param.shape)
                self.client.step()
            finally:
                for each in received:
                    # Inside of ``_on_masters``: afterwards the assignment would reach the engine, as an order to drop
                    # its gradient.
                    each.param.grad = None
        for each in received:
            if each.master is not None:
                out = resharded.data_of(each.param).view(-1)
                (kernels if each.on_device else formats).round_parameters(each.master, out)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients. Without effect after the engine is closed."""
        if self._ready.closed:
            return
        self.warn_of_dropped_gradients("zero_grad()")
        self._gradients.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step parameters that are in no group, with these options; they were trainable at initialize."""
        if hasattr(self, "client"):
            self.client.add_param_group(planned_group(param_group, {each.param for each in self._trained}))
        else:
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the client's state; it keeps the precision of the masters."""
        with self._on_masters():
            self.client.load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.client.param_groups, self.client.state

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Within the block the data of the parameters is their fp32 master."""
        # Before the first change: after an exception below, all parameters get their previous values.
        saved = [(each.param, type(each.param), resharded.data_of(each.param)) for each in self._trained]
        try:
            for each in self._trained:
                # The engine must not see the client's accesses to ``.data`` and ``.grad``.
                resharded.make_plain(each.param)
                if each.master is not None:
                    each.param.data = each.master.view(each.param.shape)
            yield
        finally:
            for param, cls, data in saved:
                param.__class__ = cls
                resharded.set_data(param, data)


def _trained(tile: Tile, gradients: GradientStore) -> Iterator[_Trained]:
    grads, state = gradients.homes[tile.group.index].tensor, tile.state.tensor
    assert grads is not None and state is not None and tile.start == 0
    by_piece = dict(zip(tile.group.layout.pieces, tile.group.params, strict=True))
    for piece in (segment.piece for segment in tile.segments):
        elements = slice(piece.start, piece.end)
        masters = state.view(torch.float32)
        grad = grads.view(gradients.dtype_of(tile.group))[elements]
        master = masters[elements] if masters.numel() else None
        yield _Trained(by_piece[piece], piece, grad, master, tile.state.on_device)


def _scaled(grad: Tensor, scale: float) -> Tensor:
    """``grad`` in fp32, scaled; in place if it is fp32, because gradients are dropped after the step."""
    wide = grad if grad.dtype is torch.float32 else grad.float()
    return wide if scale == 1 else wide.mul_(scale)
