"""The tensors that autograd saves: those in a group's storage get their bytes back before use, all others are counted.

Note [Backward enters a group from anywhere]
    The pre-backward event, a gradient at an output of the group, occurs in time for nearly every graph, and unshards
    the group early. It does not occur for an auxiliary loss kept on the module, an output inside an object that pytree
    does not know, an activation caught by a user's hook, a second derivative, or a module that another block calls.
    Backward would then read a storage without bytes, which ends the process. So, while a forward runs and any group
    moves, the tensors that autograd saves pass through here. Tensors in a group's storage are marked with the group,
    and the group is unsharded before autograd gets them. All other tensors are activations.

Note [Activations are counted apart from the tiers]
    No budget covers the bytes that autograd keeps for backward. If groups move, every saved tensor passes the hooks
    above, and each is counted. If no group moves, there are no hooks: they cost time, and torch.func refuses to run
    with any, so counting alone does not justify them. In that case the graph of the first loss is walked instead, once.

Note [The user's hooks get the same tensors as without the engine]
    Torch calls only the innermost hooks, so the engine's hooks pass every tensor on to those around them, including
    tensors of groups. Checkpointing counts tensors to know when a recomputation can stop, starts a recomputation when
    the first of them is unpacked, and returns the recomputed tensor of the same position. If a block's forward has side
    effects (it updates a buffer, on which its routing may depend), a missing tensor would change the results. Hooks
    that change values also change those of weights. Only hooks that keep copies in host memory (``_COPYING``) do not
    get tensors of groups: they change no value, and would copy every group.

Note [Activations move once]
    Where other hooks are around the engine's, the engine moves no activation: they have decided where it goes. If
    those hooks keep copies in host memory, two settings ask for the same, and a warning names both.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from tiering import _logs
from zero3.device.storages import check_version
from zero3.params.compilation import eager
from zero3.params.inner_tensors import ordinary_tensors
from zero3.params.param_group import ParamGroup
from zero3.passes.activation_copies import Moved
from zero3.passes.graph import nodes_behind
from zero3.passes.hooks import in_transform
from zero3.passes.kept_activations import Kept
from zero3.passes.moved_activations import MovedActivations
from zero3.passes.pass_state import graph_task

log = logging.getLogger(__name__)

_COPYING = {
    "save_on_cpu.": "torch's save_on_cpu",
    "OffloadActivations.": "activation_offloading of TRL or torchtune",
}
"""Hooks that copy what autograd saves to host memory, by the class whose methods or functions they are."""


class SavedTensors:
    """Marks the tensors that autograd saves between ``enter`` and ``leave``.

    ``need`` is called with a group before a tensor of it is handed out. ``stepped``: the groups that the running
    backward has updated; its owner changes the set. ``moved`` moves activations off the device.
    """

    def __init__(
        self,
        groups: Iterable[ParamGroup],
        need: Callable[[ParamGroup], None],
        stepped: AbstractSet[ParamGroup] = frozenset(),
        moved: MovedActivations | None = None,
    ) -> None:
        groups = list(groups)
        self.moved = moved
        self.owners = {group.storage_key: group for group in groups if group.moves}
        self.stepped = stepped
        self.activations = Activations(groups, has_hooks=bool(self.owners) or moved is not None)
        self._need = need
        self._node: Any = None
        self._handed_out: set[ParamGroup] = set()
        self._warned = False
        # Hooks, and the thread and backward in which they were entered. None: the engine's hooks were already active.
        self._entered: list[tuple[saved_tensors_hooks | None, tuple[int, int]]] = []

    def enter(self) -> None:
        """A forward begins: activate the hooks, unless they are active or a transform forbids hooks."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        innermost = getattr(outer[0], "__self__", None) if outer is not None else None
        is_needed = bool(self.owners) or self.moved is not None
        if not is_needed or (isinstance(innermost, _Hooks) and innermost.saved is self) or in_transform():
            self._entered.append((None, _stack()))
            return
        hooks = self.hooks()
        # Noted only after it: ``leave`` exits as many hooks as were entered.
        hooks.__enter__()
        self._entered.append((hooks, _stack()))
        if self.moved is not None and outer is not None and not self._warned:
            self._warn_of_copies(_copying(outer[0]))

    def _warn_of_copies(self, copying: str) -> None:
        """See Note [Activations move once]."""
        if copying:
            self._warned = True
            log.log(
                _logs.once(logging.WARNING),
                "tiering.activations moves no activation of this model: %s is active around it, and keeps copies of"
                " them in host memory. Remove it, or set tiering.activations to 'device'",
                copying,
            )

    def owner_of(self, tensor: Tensor) -> ParamGroup | None:
        """The group in whose storage ``tensor`` lies, or one inside of it; None for any other tensor."""
        for each in ordinary_tensors(tensor):
            group = self.owners.get(each.untyped_storage()._cdata) if each.layout is torch.strided else None
            if group is not None:
                return group
        return None

    def hooks(self) -> saved_tensors_hooks:
        """Hooks to enter inside of the active ones."""
        hooks = _Hooks(self, torch._C._autograd._top_saved_tensors_default_hooks(True))
        return saved_tensors_hooks(hooks.pack, hooks.unpack)

    def leave(self) -> None:
        """The forward of the last ``enter`` ends: remove the hooks that it added."""
        # Taken off first: after an interruption, the next ``leave`` must not pop another one's hooks.
        hooks, stack = self._entered.pop() if self._entered else (None, None)
        # Each exit pops the top of the stack of hooks, whichever hooks these are. After an exception, the user's hooks
        # may be popped before the engine's: then their exit removes the engine's hooks, and this one removes theirs. So
        # only the number of exits on one stack counts.
        if hooks is not None and stack == _stack():
            hooks.__exit__()

    def hand_out(self, group: ParamGroup) -> None:
        """The autograd node that runs now is about to use a saved tensor of ``group``."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._handed_out = node, set()
        self._handed_out.add(group)
        # Frees other groups if necessary, but not those whose tensors this node uses.
        self._need(group)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The user's hooks produce a tensor, perhaps by running blocks again. The running node's groups may go."""
        node, handed_out = self._node, self._handed_out
        running = torch._C._current_autograd_node()
        if running is None or running is not node:
            yield
            return
        # Empty while blocks run: they need the room. Afterwards the node still reads the tensors that it has got.
        self._handed_out = set()
        yield
        self._node, self._handed_out = node, handed_out
        for group in handed_out:
            self._need(group)

    def in_use(self) -> set[ParamGroup]:
        """The groups whose saved tensors the running node uses: their bytes must stay until the node ends."""
        running = torch._C._current_autograd_node()
        return self._handed_out if running is not None and running is self._node else set()

    def end_of_backward(self) -> None:
        """Backward has ended: drop the reference to its last node."""
        self._node, self._handed_out = None, set()

    def leave_all(self) -> None:
        """Leave all forwards, after an exception that no hook of a module has seen."""
        while self._entered:
            self.leave()


def _stack() -> tuple[int, int]:
    """The current stack of hooks: each thread has one, and each backward has its own, which ends with it."""
    return threading.get_ident(), graph_task()


class _Saved:
    """A saved tensor, its version, and the group in whose storage it lies (None: in its own)."""

    __slots__ = ("group", "tensor", "version")

    def __init__(self, group: ParamGroup | None, tensor: Tensor) -> None:
        self.group = group
        # Detached, which shares the version counter. An output would hold the node that holds it: a cycle that neither
        # reference counts nor Python's garbage collector would free.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def checked(self) -> Tensor:
        """The tensor. RuntimeError, as torch raises without hooks, if it was changed in place since it was saved."""
        # Under hooks torch does not compare versions itself.
        check_version(self.tensor, self.version)
        return self.tensor


class _PassedOn(_Saved):
    """A tensor of a group, and the value that the hooks around the engine's packed it into."""

    __slots__ = ("packed",)

    def __init__(self, group: ParamGroup, tensor: Tensor, packed: Any) -> None:
        super().__init__(group, tensor)
        self.packed = packed


class _Outside:
    """What the hooks of another engine around the engine's have packed a tensor into."""

    __slots__ = ("packed",)

    def __init__(self, packed: _Packed) -> None:
        self.packed = packed


_Packed = Moved | Kept | _Saved | _Outside


class _Hooks:
    """One pair of hooks. Code that torch.compile left partly to Python calls them eagerly."""

    def __init__(
        self, saved: SavedTensors, outer: tuple[Callable[..., Any], Callable[..., Tensor]] | None
    ) -> None:
        self.saved = saved
        self._outer_pack: Callable[[Tensor], Any] | None = outer and outer[0]
        self._outer_unpack: Callable[[Any], Tensor] | None = outer and outer[1]
        self._outer_copies = outer is not None and bool(_copying(outer[0]))
        self._outer_recomputes = getattr(self._outer_pack, "__module__", "") == "torch.utils.checkpoint"

    @eager
    def pack(self, tensor: Tensor) -> Any:
        group = self.saved.owner_of(tensor)
        if group is None:
            self.saved.activations.saved_tensor(tensor)
            # Other hooks decide on the tensors that they get: save_on_cpu moves them, checkpointing drops them.
            if self.saved.moved is not None and self._outer_pack is None:
                moved = self.saved.moved.take(tensor)
                if moved is not None:
                    return moved
        if self._outer_pack is None or (group is not None and self._outer_copies):
            return _Saved(group, tensor)
        packed = self._outer_pack(tensor)
        if group is not None:
            return _PassedOn(group, tensor, packed)
        # Its bytes are in the other engine's memory and files.
        return _Outside(packed) if isinstance(packed, _Packed) else packed

    @eager
    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _PassedOn):
            return self._unpack_passed_on(packed)
        if isinstance(packed, _Outside):
            return self._unpack_outside(packed.packed)
        if isinstance(packed, Moved | Kept):
            assert self.saved.moved is not None
            return self.saved.moved.give(packed)
        if not isinstance(packed, _Saved):
            return self._unpack_outside(packed)
        if packed.group is not None:
            # Before the tensor leaves: its storage then has bytes until the node ends.
            self.saved.hand_out(packed.group)
        return packed.checked()

    def _unpack_passed_on(self, packed: _PassedOn) -> Tensor:
        assert packed.group is not None
        if self._outer_recomputes:
            tensor = self._unpack_outside(packed.packed)
            # Torch compares no versions under hooks. But a group that this backward has updated has new values.
            if packed.group in self.saved.stepped:
                packed.checked()
            return tensor
        # First: the user's hooks may read the bytes.
        self.saved.hand_out(packed.group)
        packed.checked()
        return self._unpack_outside(packed.packed)

    def _unpack_outside(self, packed: Any) -> Tensor:
        assert self._outer_unpack is not None
        with self.saved.recomputing():
            tensor = self._outer_unpack(packed)
        # A recomputation may take another path than the forward, and return a tensor of another group.
        group = self.saved.owner_of(tensor)
        if group is not None:
            self.saved.hand_out(group)
        return tensor


def _copying(pack: Callable[..., Any]) -> str:
    """What keeps copies in host memory by the hook ``pack``; "" for hooks of any other kind."""
    name = getattr(pack, "__qualname__", "")
    return next((setting for prefix, setting in _COPYING.items() if name.startswith(prefix)), "")


class Activations:
    """Bytes of the storages of saved tensors, until torch frees them. Each storage counts once, those of groups never.

    A storage counts as long as it lives, not as long as the saved tensor: checkpointing keeps recomputed tensors, and a
    buffer of the model stays. Any thread may read the counts. There is no lock: counts change by operators alone,
    without a call at which another thread, garbage collection or Ctrl-C could run.
    """

    def __init__(self, groups: Iterable[ParamGroup], *, has_hooks: bool) -> None:
        """``has_hooks``: every saved tensor is reported. Otherwise the graph of the first loss is walked."""
        self._used = 0
        self._peak = 0
        # By address, which no other storage gets while this one lives. Storages of groups map to None: not counted.
        self._by_address: dict[int, _Activation | None] = dict.fromkeys(group.storage_key for group in groups)
        self._freed: deque[_Activation] = deque()  # freed storages that the counts still include
        # A C method, not Python code: Ctrl-C in Python code that runs while a storage is freed would be lost.
        self._on_free: Callable[[Any], None] = self._freed.append
        self._walk = not has_hooks

    @property
    def used(self) -> int:
        """Bytes at present."""
        self._forget_freed()
        return self._used

    @property
    def peak(self) -> int:
        """The maximum number of bytes at one time so far."""
        return self._peak

    def saved_tensor(self, tensor: Tensor) -> None:
        """Autograd has saved ``tensor``. A wrapper has no bytes, but the tensors inside of it do."""
        for each in ordinary_tensors(tensor):
            if each.layout is torch.strided:
                self.saved(each.untyped_storage())

    def saved(self, storage: UntypedStorage) -> None:
        """Autograd has saved a tensor whose bytes are in ``storage``."""
        if self._freed:
            # First: ``storage`` may have the address of a storage that was freed.
            self._forget_freed()
        key = storage._cdata
        if key in self._by_address:
            return
        nbytes = storage.nbytes()
        # The caller holds ``storage``, so its callback cannot run before both fields below are set.
        activation = _Activation(storage, self._on_free)
        activation.key = key
        activation.nbytes = nbytes
        # Keeps the weak reference, without which torch would not call back.
        self._by_address[key] = activation
        self._used += nbytes
        if self._used > self._peak:
            self._peak = self._used

    def backward_of(self, loss: Tensor) -> None:
        """A backward of ``loss`` begins now. Without hooks, the graph of the first loss is walked and counted."""
        if not self._walk:
            return
        self._walk = False
        for tensor in _saved_in_graph(loss):
            self.saved_tensor(tensor)

    def _forget_freed(self) -> None:
        while self._freed:
            # From here to the end of the turn there is no call at which another thread or Ctrl-C could run.
            activation = self._freed[0]
            del self._by_address[activation.key]
            self._used -= activation.nbytes
            del self._freed[0]


class _Activation(weakref.ref[UntypedStorage]):
    """A storage that counts. Its callback runs when torch frees it: the Python object lives as long as the bytes."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


def _saved_in_graph(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that the nodes behind ``loss`` hold, except those that the user's hooks have packed."""
    names: dict[type, list[str]] = {}
    for node in nodes_behind([loss]):
        if type(node) not in names:
            names[type(node)] = [name for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names[type(node)]:
            saved = getattr(node, name)
            for entry in saved if isinstance(saved, tuple) else (saved,):
                # The packed value, or the tensor itself. Unlike unpacking, reading it recomputes nothing.
                data = getattr(entry, "data", None)
                if isinstance(data, Tensor):
                    yield data
