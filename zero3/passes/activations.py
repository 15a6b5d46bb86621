"""Bytes that autograd keeps for backward. No budget covers them, so they are reported separately from the tiers.

If groups move, every tensor that autograd saves passes the engine's hooks (saved_tensors.py), and each is counted. If
no group moves, there are no hooks: they cost time, and torch.func refuses to run with any, so counting alone does not
justify them. In that case the graph of the first loss is walked instead, once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from zero3.params.param_group import ParamGroup


class Activations:
    """Bytes of the storages of saved tensors, until torch frees them. Each storage counts once, those of groups never.

    A storage counts as long as it lives, not as long as the saved tensor: checkpointing keeps recomputed tensors, and a
    buffer of the model stays. Any thread may read the counts. There is no lock: counts change by operators alone,
    without a call at which another thread, garbage collection or Ctrl-C could run.
    """

    def __init__(self, groups: Iterable[ParamGroup]) -> None:
        groups = list(groups)
        self._used = 0
        self._peak = 0
        # By address, which no other storage gets while this one lives. Storages of groups map to None: not counted.
        self._by_address: dict[int, _Activation | None] = dict.fromkeys(group.storage_key for group in groups)
        self._freed: deque[_Activation] = deque()  # freed storages that the counts still include
        # A C method, not Python code: Ctrl-C in Python code that runs while a storage is freed would be lost.
        self._on_free: Callable[[Any], None] = self._freed.append
        self._walk = not any(group.moves for group in groups)

    @property
    def used(self) -> int:
        """Bytes at present."""
        self._forget_freed()
        return self._used

    @property
    def peak(self) -> int:
        """The maximum number of bytes at one time so far."""
        return self._peak

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
            if tensor.layout is torch.strided:
                self.saved(tensor.untyped_storage())

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
    visited, pending = set[Any](), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        pending += [next_node for next_node, _ in node.next_functions]
        if type(node) not in names:
            names[type(node)] = [name for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names[type(node)]:
            saved = getattr(node, name)
            for entry in saved if isinstance(saved, tuple) else (saved,):
                # The packed value, or the tensor itself. Unlike unpacking, reading it recomputes nothing.
                data = getattr(entry, "data", None)
                if isinstance(data, Tensor):
                    yield data
