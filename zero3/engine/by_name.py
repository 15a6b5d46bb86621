"""What an engine keeps of each parameter, read and set by name."""

from __future__ import annotations

import hashlib
import weakref

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError, EngineStateError
from zero3.loop.lifecycle import Readiness
from zero3.loop.step import Update
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params import resharded
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes import hooks
from zero3.state.access import Access
from zero3.state.tensors import TieredState

_engines: weakref.WeakKeyDictionary[Access, weakref.ref[NamedState]] = weakref.WeakKeyDictionary()


def engine_of(param: nn.Parameter) -> tuple[NamedState, str]:
    """The engine that ``param`` belongs to, and its name there; ConfigError if it belongs to none that is open."""
    owner = resharded.owner_of(param)
    engine = _engines[owner]() if isinstance(owner, Access) else None
    if not isinstance(owner, Access) or engine is None:
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine; initialize its model, and ask for the"
            " parameters of engine.module"
        )
    return engine, owner.name_of(param)


class NamedState:
    """The part of ``Engine`` that reads and sets parameters, gradients and optimizer state by name."""

    module: nn.Module
    optimizer: TieredOptimizer | ClientOptimizer
    _access: Access
    _ready: Readiness
    _state: TieredState
    _updates: Update

    def _serve(self, access: Access) -> None:
        """Answer for the parameters of ``access``, which asks for them by object."""
        self._access = access
        access.on_gradient = self._on_gradient
        _engines[access] = weakref.ref(self)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of parameters in the compute dtype and of persistent buffers, by name."""
        self._ready.check_open("state_dict")
        return self._state.weights(self.module)

    def master_state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of the fp32 masters of all trainable parameters, by name."""
        self._ready.check_open("master_state_dict")
        return self._state.masters(self.module)

    def get_fp32_parameter(self, name: str) -> Tensor:
        """A copy of a parameter's fp32 master in host memory, of the parameter's shape; a frozen one as it is, in fp32.

        ``name`` as in ``module.named_parameters()``. ConfigError for a name that is not there.
        """
        self._ready.check_open("get_fp32_parameter")
        return self._state.master(*self._access.named(name))

    def set_fp32_parameter(self, name: str, values: Tensor) -> None:
        """Make ``values`` (of the parameter's shape) the master, and the parameter what it rounds to.

        EngineStateError while a forward or backward is running.
        """
        self._ready.check_open("set_fp32_parameter")
        group, piece = self._access.named(name)
        self._access.before_write(group, piece)
        self._state.set_master(group, piece, self._state.of_rank(0, piece, _flat_fp32(values, piece)))

    def get_fp32_gradient(self, name: str) -> Tensor | None:
        """A copy of the accumulated gradient, unscaled, before clipping, in fp32; None where there was none."""
        self._ready.check_open("get_fp32_gradient")
        self._ready.check_gradients_kept("get_fp32_gradient")
        if hooks.in_autograd():
            raise EngineStateError(
                "get_fp32_gradient was called while a backward is running, and gradients are on their way; call it when"
                " backward has ended"
            )
        gradient = self._state.gradient(*self._access.named(name))
        return None if gradient is None else gradient.float() / self._updates.loss_scale.value

    def set_fp32_gradient(self, name: str, values: Tensor) -> None:
        """Replace the accumulated gradient by ``values`` (unscaled), between passes.

        The next ``step`` uses it, and needs no backward then; a backward before that adds to it.
        """
        group, piece = self._access.named(name)
        self._check_replaceable("set_fp32_gradient", piece)
        flat = self._state.of_rank(0, piece, _flat_fp32(values, piece))
        self._replace_gradient(group, piece, flat)

    def get_fp32_state(self, name: str, key: str) -> Tensor:
        """A copy of a state tensor of a parameter ("exp_avg", ...; see ``state_names``), fp32, of its shape."""
        self._ready.check_open("get_fp32_state")
        group, piece = self._access.named(name)
        _check_trained(piece)
        return self._state.moment(group, piece, key)

    def set_fp32_state(self, name: str, key: str, values: Tensor) -> None:
        """Replace a state tensor of a parameter."""
        self._ready.check_open("set_fp32_state")
        _, piece = self._access.named(name)
        _check_trained(piece)
        self._state.set_moment(piece, key, self._state.of_rank(0, piece, _flat_fp32(values, piece)))

    def _on_gradient(self, group: ParamGroup, piece: Piece, values: Tensor | None) -> None:
        """``.grad`` of a parameter was assigned, between passes: None drops the gradient."""
        what = f"an assignment of {piece.name!r}.grad"
        if values is None:
            if self._state.holds_gradient(piece):
                self._ready.check_gradients_unused(what)
                self.optimizer.tell_of_dropping("param.grad = None")
                self._state.drop_gradient(group, piece)
            return
        self._check_replaceable(what, piece)
        flat = _flat_fp32(values, piece)
        self._check_ranks_alike(piece, flat)
        self._replace_gradient(group, piece, flat)

    def _check_replaceable(self, what: str, piece: Piece) -> None:
        self._ready.check_open(what)
        self._ready.check_gradients_kept(what)
        _check_trained(piece)
        self._access.check_idle(what)

    def _check_ranks_alike(self, piece: Piece, values: Tensor) -> None:
        """EngineStateError, on every rank, unless all of them have these values."""
        if self._state.collectives is None:
            return
        row = torch.frombuffer(bytearray(hashlib.sha256(values.numpy().data).digest()), dtype=torch.uint8)
        rows = self._state.collectives.table(row, f"assign {piece.name!r}.grad")
        for rank, digest in enumerate(rows):
            if not torch.equal(digest, rows[0]):
                raise EngineStateError(
                    f"{piece.name!r}.grad was given other values on rank {rank} than on rank 0, but the ranks step with"
                    " one gradient. Average it over the ranks first (torch.distributed.all_reduce), or let"
                    " engine.backward(loss) do it"
                )

    def _replace_gradient(self, group: ParamGroup, piece: Piece, values: Tensor) -> None:
        self._state.set_gradient(group, piece, values * self._updates.loss_scale.value)
        self._updates.current_step.to_pending()

    def is_trained(self, name: str) -> bool:
        """Whether a parameter has a master, gradients and optimizer state, or was frozen at ``initialize``."""
        return self._access.named(name)[1].trainable

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer's state tensors, beside the master."""
        return self._state.state_names

    def flip_bit(self) -> str:
        """Flip one bit of one master on NVMe and say where: a planted fault, to show that comparisons find it."""
        self._ready.check_open("flip_bit")
        return self._state.flip_bit()


def _flat_fp32(values: Tensor, piece: Piece) -> Tensor:
    if values.layout is not torch.strided:
        raise ConfigError(f"{piece.name!r} takes dense values, not {values.layout}: pass values.to_dense()")
    if tuple(values.shape) != piece.shape:
        raise ConfigError(f"{piece.name!r} has shape {piece.shape}, not {tuple(values.shape)}")
    return values.detach().to("cpu", torch.float32).reshape(-1)


def _check_trained(piece: Piece) -> None:
    if not piece.trainable:
        raise ConfigError(f"{piece.name!r} is frozen: it has neither gradient nor optimizer state")
