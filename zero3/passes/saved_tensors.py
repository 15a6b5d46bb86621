"""Tensors that autograd saved from a group's storage are handed out only when that storage has bytes.

Note [Backward enters a group from anywhere]
    The pre-backward event, a gradient at an output of the group, comes in time for nearly every graph, and brings the
    bytes early. Not for all: an auxiliary loss kept on the module, an output inside an object that pytree does not
    know, an activation caught by a user's hook, a second derivative, a module that another block calls. Backward then
    reads a storage without bytes, which ends the process. So, while a forward is running and any group moves, what
    autograd saves passes through here: tensors in a group's storage are marked with the group, and it is asked for
    before they are handed out. All other tensors are the activations. No budget covers them, but here they pass and are
    counted: see activations.py.

Note [Hooks around ours see what they would see without us]
    Torch calls the innermost hooks alone, so ours pass every tensor on to those around them, a group's too.
    Checkpointing counts tensors to know when a recomputation can stop, starts one when the first of them is unpacked,
    and hands out what was recomputed at the same position: if a block's forward has side effects (it updates a buffer,
    on which its routing may depend), each of these changes results. Hooks that change values change those of weights,
    too. Only save_on_cpu is left out: it changes nothing, and would copy every group to host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero3.params.eager import eager
from zero3.params.param_group import ParamGroup
from zero3.passes.activations import Activations
from zero3.passes.hooks import graph_task, in_transform


class SavedTensors:
    """Marks what autograd saves between ``enter`` and ``leave``; ``need`` is called with a group before its use.

    ``stepped``: the groups that the running backward has stepped, kept up to date by its owner.
    """

    def __init__(
        self,
        groups: Iterable[ParamGroup],
        need: Callable[[ParamGroup], None],
        stepped: AbstractSet[ParamGroup] = frozenset(),
    ) -> None:
        groups = list(groups)
        self.owners = {group.storage_key: group for group in groups if group.moves}
        self.stepped = stepped
        self.activations = Activations(groups)
        self._need = need
        self._node: Any = None
        self._handed_out: set[ParamGroup] = set()
        # Hooks, and in which thread and backward they were entered. None: the hooks around were ours already.
        self._entered: list[tuple[saved_tensors_hooks | None, tuple[int, int]]] = []

    def enter(self) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        around = getattr(outer[0], "__self__", None) if outer is not None else None
        if not self.owners or (isinstance(around, _Hooks) and around.saved is self) or in_transform():
            self._entered.append((None, _stack()))
            return
        hooks = self.hooks()
        hooks.__enter__()
        self._entered.append((hooks, _stack()))

    def owner_of(self, tensor: Tensor) -> ParamGroup | None:
        """The group in whose storage ``tensor`` lies, None for any other tensor."""
        return self.owners.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None

    def hooks(self) -> saved_tensors_hooks:
        """Hooks to enter, in front of those that are there."""
        ours = _Hooks(self, torch._C._autograd._top_saved_tensors_default_hooks(True))
        return saved_tensors_hooks(ours.pack, ours.unpack)

    def leave(self) -> None:
        hooks, stack = self._entered.pop() if self._entered else (None, None)
        # On one stack, exits of others that an exception runs before ours take our hooks off in place of theirs: what
        # counts is the number.
        if hooks is not None and stack == _stack():
            hooks.__exit__()

    def hand_out(self, group: ParamGroup) -> None:
        """The autograd node that runs now is about to use a saved tensor of ``group``."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._handed_out = node, set()
        self._handed_out.add(group)
        self._need(group)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Other hooks bring a tensor, perhaps by running blocks again: the running node's groups may make room."""
        node, handed_out = self._node, self._handed_out
        running = torch._C._current_autograd_node()
        if running is None or running is not node:
            yield
            return
        self._handed_out = set()
        yield
        self._node, self._handed_out = node, handed_out
        for group in handed_out:
            self._need(group)

    def in_use(self) -> set[ParamGroup]:
        """The groups whose bytes the node that runs now has been given: they must stay until it ends."""
        running = torch._C._current_autograd_node()
        return self._handed_out if running is not None and running is self._node else set()

    def end_of_backward(self) -> None:
        self._node, self._handed_out = None, set()

    def leave_all(self) -> None:
        """After an exception that no module's hook has seen."""
        while self._entered:
            self.leave()


def _stack() -> tuple[int, int]:
    """Which stack of hooks is the current one: each thread has one, and each backward, which is gone with it."""
    return threading.get_ident(), graph_task()


class _Saved:
    """A saved tensor, its version then, and the group whose bytes it shows (None: it has its own)."""

    __slots__ = ("group", "tensor", "version")

    def __init__(self, group: ParamGroup | None, tensor: Tensor) -> None:
        self.group = group
        # Detached, which shares the version: an output would hold the node that holds it, and nothing would free both.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def checked(self) -> Tensor:
        """The tensor, if it is what was saved. Torch leaves this check to the hooks where there are any."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{self.tensor.dtype} {tuple(self.tensor.shape)}], at version {self.tensor._version}; expected"
                f" version {self.version} instead"
            )
        return self.tensor


class _PassedOn(_Saved):
    """A group's tensor, and what the hooks around ours made of it."""

    __slots__ = ("packed",)

    def __init__(self, group: ParamGroup, tensor: Tensor, packed: Any) -> None:
        super().__init__(group, tensor)
        self.packed = packed


class _Hooks:
    """Compiled code that is left to Python in parts calls them eagerly, too."""

    def __init__(
        self, saved: SavedTensors, outer: tuple[Callable[..., Any], Callable[..., Tensor]] | None
    ) -> None:
        self.saved = saved
        self._outer_pack: Callable[[Tensor], Any] | None = outer and outer[0]
        self._outer_unpack: Callable[[Any], Tensor] | None = outer and outer[1]
        self._outer_recomputes = getattr(self._outer_pack, "__module__", "") == "torch.utils.checkpoint"

    @eager
    def pack(self, tensor: Tensor) -> Any:
        group = self.saved.owner_of(tensor)
        if group is None and tensor.layout is torch.strided:
            self.saved.activations.saved(tensor.untyped_storage())
        if self._outer_pack is None or (group is not None and _copies_only(self._outer_pack)):
            return _Saved(group, tensor)
        packed = self._outer_pack(tensor)
        return packed if group is None else _PassedOn(group, tensor, packed)

    @eager
    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PassedOn):
            return self._unpack_passed_on(packed)
        if not isinstance(packed, _Saved):
            return self._unpack_outside(packed)
        if packed.group is not None:
            self.saved.hand_out(packed.group)
        return packed.checked()

    def _unpack_passed_on(self, packed: _PassedOn) -> Tensor:
        assert packed.group is not None
        if self._outer_recomputes:
            tensor = self._unpack_outside(packed.packed)
            # Torch compares no versions under hooks; but what this backward has stepped is no longer what was used.
            if packed.group in self.saved.stepped:
                packed.checked()
            return tensor
        # First: the other hooks may read the bytes.
        self.saved.hand_out(packed.group)
        packed.checked()
        return self._unpack_outside(packed.packed)

    def _unpack_outside(self, packed: Any) -> Tensor:
        assert self._outer_unpack is not None
        with self.saved.recomputing():
            tensor = self._outer_unpack(packed)
        # A recomputation may have taken another way than the forward, to a tensor of another group.
        group = self.saved.owner_of(tensor)
        if group is not None:
            self.saved.hand_out(group)
        return tensor


def _copies_only(pack: Callable[..., Any]) -> bool:
    """Whether ``pack`` is that of save_on_cpu, which would copy whole groups to host memory and changes no value."""
    return getattr(pack, "__qualname__", "").startswith("save_on_cpu.")
