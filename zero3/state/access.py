"""Access to parameters outside the engine's forward and backward: gathered, borrowed, copied, edited.

    with tiering.gathered(model.head.weight, modify=True) as weight, torch.no_grad():
        weight.mul_(0.5)

After every change of a parameter, here or in user code, its fp32 master is updated.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tiering import _logs
from tiering.errors import ConfigError, EngineStateError
from zero3.params import inner_tensors, resharded
from zero3.params.layout import Piece, product
from zero3.params.param_group import ParamGroup
from zero3.params.resharded import Result
from zero3.passes.gradient_parts import TiedParameters, tied_in
from zero3.passes.hooks import OurHook
from zero3.passes.pass_state import PassState, in_autograd, next_node
from zero3.passes.prefetch import Prefetcher
from zero3.passes.schedule import PassSchedule
from zero3.state.parameters import Parameters
from zero3.state.tensors import TieredState

log = logging.getLogger(__name__)

_live: weakref.WeakSet[Access] = weakref.WeakSet()


def _give_up_in_child() -> None:
    """A forked process does not inherit the arenas: there, use of a parameter raises an error and does not crash."""
    # Before any other code of the child can use a parameter.
    for access in list(_live):
        access.give_up()


os.register_at_fork(after_in_child=_give_up_in_child)


@contextmanager
def gathered(
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
    *,
    modify: bool = False,
    rank: int | None = 0,
) -> Iterator[Any]:
    """Within the block, ``params`` (one, several, or a module's) hold their values, in their dtype.

    The parameters hold copies, on the device, which no budget counts: the bytes of ``params``, and the same again for
    parameters whose ``.data`` is read without ``modify``, to detect changes. Modules that are called in the block use
    the copies. With ``modify``, values that were changed in place are stored, also after an exception in the block. The
    fp32 master takes the values of the changed elements; other elements keep their bits below the compute dtype, and
    optimizer state stays. Yields ``params``, as a list unless it is a single parameter. Ordinary parameters, None (an
    absent bias) and other tensors are yielded unchanged. All ranks enter and leave the block together, and the values
    of ``rank`` count; with ``rank`` None, all ranks make the same change, which is then stored without ``modify``, too.

    Before ``initialize``, this recreates the values of parameters that zero.Init has built without memory; with
    ``modify`` they stay in memory, and rank 0's values count.

    Raises EngineStateError: without ``modify``, if the block has changed a value (the change is dropped); with
    ``modify``, while a forward or backward is running; with ``rank`` None, if ranks have made different changes (they
    are dropped); and for ``engine.step()`` in the block.
    """
    listed, yielded = _listed(params)
    loans: list[tuple[resharded.Owner, nn.Parameter]] = []
    try:
        for param in dict.fromkeys(listed):
            owner = resharded.owner_of(param)
            if owner is None and resharded.is_adopted(param):
                raise EngineStateError(
                    "a parameter cannot be gathered: its engine is closed. To keep the values in the model, end the"
                    " engine with release() instead of close()"
                )
            if owner is not None:
                owner.show_values(param, modify=modify)
                # Only shown parameters are hidden below, also if the next parameter cannot be shown.
                loans.append((owner, param))
        with ExitStack() as saving:
            # These blocks end before the copies are hidden below.
            for owner in {owner: None for owner, _ in loans}:
                saving.enter_context(owner.saving_copies())
            yield yielded
    finally:
        refused = _hide_values(loans, modify=modify, rank=rank)
    if refused:
        raise EngineStateError(f"inside gathered(), {refused[0]}; the change is dropped")


def _hide_values(
    loans: list[tuple[resharded.Owner, nn.Parameter]], *, modify: bool, rank: int | None
) -> list[str]:
    """End all loans, also after an error in one of them; returns a message for each change that is refused."""
    refused, errors = list[str](), list[BaseException]()
    for owner, param in loans:
        try:
            problem = owner.hide_values(param, modify=modify, rank=rank)
        except BaseException as error:
            errors.append(error)
        else:
            refused += [problem] if problem else []
    if errors:
        raise errors[0]
    return refused


def _listed(params: Any) -> tuple[list[nn.Parameter], Any]:
    if isinstance(params, nn.Module):
        params = params.parameters()
    if params is None or isinstance(params, Tensor):
        params, yielded = [params], params
    else:
        yielded = params = list(params)
    for param in params:
        if param is not None and not isinstance(param, Tensor):
            raise ConfigError(f"gathered needs parameters or a module, not {type(param).__name__}")
    listed = [param for param in params if isinstance(param, nn.Parameter)]
    return [part for param in listed for part in inner_tensors.parts_of(param)], yielded


class Access:
    """Access to one engine's ``parameters`` outside its passes (resharded.Owner).

    ``on_gradient`` is called with the value that a script assigns to ``.grad`` of a parameter between passes.
    ``partitioned`` is whether DeepSpeed would partition the parameters: stage 3.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        schedule: PassSchedule,
        prefetcher: Prefetcher,
        state: TieredState,
        on_gradient: Callable[[ParamGroup, Piece, Tensor | None], None],
        *,
        partitioned: bool,
    ) -> None:
        self.parameters = parameters
        self._schedule = schedule
        self._prefetcher = prefetcher
        self._state = state
        # Nested state_dict calls that are running, and the copies that they have made.
        self._saving = 0
        self._saved: dict[nn.Parameter, Tensor] = {}
        # Whether state_dict calls read values, with all ranks, or have the parameters themselves.
        self.saves_copies = True
        self._warned_of_gradients = self._warned_of_change = False
        # Parameters whose .grad was read as None since the last update, while the engine had the gradient.
        self._read_as_none: set[nn.Parameter] = set()
        self._on_gradient = on_gradient
        self._tied = tied_in(model)
        self.partitioned = partitioned
        resharded.adopt(parameters.all, self)
        self._handles = _watch_state_dict(model, self)
        _live.add(self)

    def borrow(self, param: nn.Parameter) -> bool:
        group, piece = self.parameters.piece_of(param)
        return self._schedule.borrow(group, trained=piece.trainable)

    def copy_of(self, param: nn.Parameter) -> Tensor:
        return self._state.weight(*self.parameters.piece_of(param)).to(param.device)

    def copy_to_save(self, param: nn.Parameter) -> Tensor | None:
        if not self._saving:
            return None
        if not self.saves_copies:
            return param
        if param not in self._saved:
            # Kept until the outermost call ends: each name of a tied parameter gets the same copy.
            self._saved[param] = self._state.weight(*self.parameters.piece_of(param))
        return self._saved[param]

    def store(self, param: nn.Parameter, values: Tensor) -> bool:
        """Store ``values``, rounded to the parameter's dtype, unless a pass is running. Rank 0's count."""
        if self._schedule.state is not PassState.IDLE:
            return False
        group, piece = self.parameters.piece_of(param)
        self.before_write(group, piece)
        whole = values.detach().expand(piece.shape).to("cpu", group.dtype_of(piece)).reshape(-1)
        self._state.store_edit(group, piece, self._state.values_of_rank(0, piece, whole), in_place=True)
        return True

    def on_data_read(self, param: nn.Parameter) -> None:
        group, position = self.parameters.place_of(param)
        group.alias(position)

    def on_gradient_read(self, param: nn.Parameter) -> None:
        """Warn once that ``.grad`` is None while the engine has the gradient: clipping by hand would do nothing."""
        _, piece = self.parameters.piece_of(param)
        if self._schedule.state.in_backward or not self._state.holds_gradient(piece):
            return
        call, caller = _reading_call()
        if call == "zero_grad":
            self.gradient_assigned(param, None)
            return
        if not self._state.has_gradient(piece):
            return
        if call == "step":
            raise EngineStateError(
                f"{type(caller).__name__}.step() was called on {piece.name!r}, whose gradient the engine has: it"
                " would update nothing. Pass that optimizer to tiering.initialize(optimizer=...), and call"
                " engine.step(); with a trainer, step the optimizer that it returned. To train the model without the"
                " engine, call release() of the engine first"
            )
        self._read_as_none.add(param)
        if not self._warned_of_gradients:
            self._warned_of_gradients = True
            log.warning(
                "%r.grad was read: it is None, because the engine takes gradients as they arrive. To read one, call"
                " tiering.utils.safe_get_full_grad(param) between backward and step; to replace one,"
                " tiering.utils.safe_set_full_grad(param, values); for the norm of all, get_global_grad_norm() of the"
                ' engine. To clip, set "gradient_clipping" in the configuration, or use the clipping of the trainer; to'
                " drop gradients, call optimizer.zero_grad()",
                piece.name,
            )

    def gradient_assigned(self, param: nn.Parameter, values: Tensor | None) -> bool:
        """Give an assigned gradient to the engine, between passes; returns whether it has.

        In backward, a script may replace a gradient before it arrives at the engine: then this does nothing.
        """
        group, piece = self.parameters.piece_of(param)
        if in_autograd():
            if values is not None and not resharded.holds_gradient(param):
                raise EngineStateError(
                    f"{piece.name!r}.grad was assigned in backward while the parameter had none: the next gradient"
                    f" would be added to it. To change a gradient in backward, use param.register_hook(lambda grad:"
                    " ...); otherwise assign it when backward has ended"
                )
            return False
        if values is not None and param in self._read_as_none and self._state.has_gradient(piece):
            raise EngineStateError(
                f"{piece.name!r}.grad was read as None while the engine had the gradient, and is assigned now: a value"
                " that was computed from None would replace the gradient. Read it with"
                " tiering.utils.safe_get_full_grad(param), and replace it with safe_set_full_grad(param, values)"
            )
        self._read_as_none.discard(param)
        self._on_gradient(group, piece, values)
        return True

    def where(self, param: nn.Parameter) -> str:
        group, piece = self.parameters.piece_of(param)
        home = "on NVMe" if group.home.on_nvme else "in host memory"
        return f"{piece.name!r}, whose bytes are {home} (group {group.name!r})"

    def remedy(self) -> str:
        return (
            "no forward or backward is running that would fetch it. Use it inside `with tiering.gathered(param):`"
            " (modify=True to change it); engine.state_dict() and engine.get_fp32_parameter(name) return copies"
        )

    def show_values(self, param: nn.Parameter, *, modify: bool) -> None:
        """Let ``param`` show its values until ``hide_values``."""
        group, position = self.parameters.place_of(param)
        if modify:
            check_idle(self._schedule, "gathered(modify=True)")
        if group.shows_copy_at(position):
            raise EngineStateError(
                f"{group.layout.pieces[position].name!r} is already gathered; gathered() blocks cannot be nested"
            )
        # First: while the parameter shows a copy, an earlier edit of its own bytes would go unnoticed.
        self.parameters.store_edits_of_residents(group)
        group.show_copy(position, self.copy_of(param), modify=modify)
        self._schedule.gathers(group)

    def hide_values(self, param: nn.Parameter, *, modify: bool, rank: int | None) -> str:
        """End ``show_values``, and store the changes of ``rank``. Returns why they are refused, or ""."""
        group, position = self.parameters.place_of(param)
        piece, tensor = group.layout.pieces[position], resharded.data_of(param)
        # Before ``hide_copy``, which forgets the state that it compares with.
        edited = group.copy_was_edited(position)
        try:
            if not modify and not edited:
                return ""
            if not modify and (rank is not None or self._schedule.state is not PassState.IDLE):
                return f"{piece.name!r} was changed without modify=True"
            own = group.dtype_of(piece)
            # A value of another dtype becomes the master; a parameter that keeps its dtype has none.
            is_convertible = piece.own_dtype is None and tensor.is_floating_point()
            has_valid_value = tuple(tensor.shape) == piece.shape and (tensor.dtype == own or is_convertible)
            # A tensor assigned to .data may have another dtype than the parameter, on one rank alone.
            dtype = own if tensor.dtype == own else torch.float32
            # All ranks reach this, whatever their values are: the following depends only on the answer, which is the
            # same on all.
            first = rank or 0
            dtype_on_rank = self._state.dtype_on(first, piece, dtype if has_valid_value else None)
            if dtype_on_rank is None:
                return f"{piece.name!r} of shape {piece.shape} has " + (
                    f"another shape or dtype on rank {first}"
                    if has_valid_value
                    else f"dtype {tensor.dtype} and shape {tuple(tensor.shape)} now"
                )
            # A group that was fetched ahead has the old values.
            self._prefetcher.drop(group)
            flat = tensor.reshape(-1) if has_valid_value else torch.empty(product(piece.shape), device="cpu")
            flat = flat.to(dtype_on_rank)
            values = self._state.values_of_rank(first, piece, flat)
            if rank is None and not self._state.are_alike(piece, values, flat):
                return f"{piece.name!r} was changed, and not alike on all ranks"
            if not modify:
                self._warn_of_change(piece)
            if dtype_on_rank == own:
                self._state.store_edit(group, piece, values, in_place=False)
            else:
                self._state.set_master(group, piece, values.to("cpu", torch.float32))
            # After the change: autograd then refuses the backward of a forward that has used the old values.
            torch.autograd.graph.increment_version([param])
            return ""
        finally:
            group.hide_copy(position)

    def _warn_of_change(self, piece: Piece) -> None:
        if not self._warned_of_change:
            self._warned_of_change = True
            log.log(
                _logs.once(logging.WARNING),
                "GatheredParameters was called without modifier_rank, and its block has changed %r, alike on all ranks:"
                " the change is kept, as it would be without ZeRO. DeepSpeed drops it. Pass modifier_rank=0 if the"
                " change is intended",
                piece.name,
            )

    def call_with(self, params: Sequence[nn.Parameter], function: Callable[[], Result]) -> Result:
        """See resharded.Owner. Called in a forward, or between passes, and by the backward of its result."""
        places = {param: self.parameters.piece_of(param) for param in params}
        first, returned = next_node(), False
        self._schedule.begin_use(dict.fromkeys(group for group, _ in places.values()))
        try:
            result = function()
            returned = True
        finally:
            self._schedule.end_forward(raised=not returned)
        # The nodes that it has made take the parameters as inputs, and give parts of the gradients of tied ones.
        tied = [
            (param, *place) for param, place in places.items() if param in self._tied and place[1].trainable
        ]
        TiedParameters(self._schedule, tied).watch(result, range(first, next_node()))
        return result

    def saving_copies(self) -> AbstractContextManager[Any]:
        """Within the block, autograd saves copies of lent parameters, for a backward after their groups are resharded.

        Without a group that moves, no hooks are installed, which torch.func would refuse.
        """
        return (
            self._schedule.saving() if any(group.moves for group in self.parameters.groups) else nullcontext()
        )

    def note_versions(self) -> None:
        """The engine has changed parameters, which torch counts as in-place edits."""
        # An exception may have ended a state_dict call.
        self._saving = 0
        self._saved.clear()
        self._read_as_none.clear()
        for group in self.parameters.groups:
            group.note_versions()

    def before_write(self, group: ParamGroup, piece: Piece) -> None:
        """Prepare for a change of a parameter's value on its tier."""
        check_idle(self._schedule, f"a change of {piece.name!r}")
        if self.parameters.lending:
            raise EngineStateError(f"{piece.name!r} cannot be set inside gathered(); edit it in place there")
        # A group that was fetched ahead has the old values.
        self._prefetcher.drop(group)
        self.parameters.store_edits_of_residents(group)
        position = group.layout.pieces.index(piece)
        torch.autograd.graph.increment_version([group.params[position]])
        # After the increment, which is no edit of the user's.
        group.note_versions()

    def begin_saving(self, module: nn.Module, *, copies: bool) -> None:
        """``state_dict`` of ``module`` begins. PlacementError if host memory has no room for the ``copies``."""
        if not self._saving and copies:
            nbytes = sum(
                piece.numel * group.dtype.itemsize
                for group, piece in map(self.parameters.piece_of, self._owned_by(module))
                if group.moves
            )
            if nbytes:
                self._state.check_room_for_copies(nbytes, "state_dict()")
        self._saving += 1

    def _owned_by(self, module: nn.Module) -> list[nn.Parameter]:
        return [param for param in module.parameters() if resharded.owner_of(param) is self]

    def end_saving(self) -> None:
        self._saving = max(0, self._saving - 1)
        if not self._saving:
            self._saved.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.give_up()

    def give_up(self) -> None:
        """From now on, any use of the parameters raises an error."""
        _live.discard(self)
        for group in self.parameters.groups:
            group.give_up_parameters()


def check_idle(schedule: PassSchedule, call: str) -> None:
    """EngineStateError while a forward or backward is running: it would continue with the values of before."""
    if schedule.state not in (PassState.IDLE, PassState.CLOSED):
        raise EngineStateError(
            f"{call} was called while a forward or backward is running, which would not see the change;"
            " call it between passes"
        )


def _reading_call() -> tuple[str, nn.Module | torch.optim.Optimizer | None]:
    """The torch method that reads a gradient now, "step" or "zero_grad", and its object; ("", None) for other readers.

    Both skip a gradient that is None. The engine's own optimizers read no ``.grad``: in their ``step``, it is the
    closure of a training loop, with the hooks of a script, that reads one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        call = frame.f_code.co_name
        caller = frame.f_locals.get("self") if call in ("step", "zero_grad") else None
        if call == "step" and frame.f_globals.get("__name__", "").startswith("zero3."):
            return "", None
        if isinstance(caller, torch.optim.Optimizer) or (
            call == "zero_grad" and isinstance(caller, nn.Module)
        ):
            return call, caller
        frame = frame.f_back
    return "", None


class _BeginSaving(OurHook):
    def __init__(self, access: Access) -> None:
        self.access = access

    def run(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.access.begin_saving(module, copies=self.access.saves_copies and not keep_vars)


class _EndSaving(OurHook):
    def __init__(self, access: Access) -> None:
        self.access = access

    def run(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        self.access.end_saving()


def _watch_state_dict(model: nn.Module, access: Access) -> list[RemovableHandle]:
    """Tell ``access`` when a part of ``model`` makes a ``state_dict``, for which torch detaches parameters."""
    handles = []
    for module in model.modules():
        handles.append(module.register_state_dict_pre_hook(_BeginSaving(access)))
        handles.append(module.register_state_dict_post_hook(_EndSaving(access)))
    return handles
