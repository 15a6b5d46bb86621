"""What autograd keeps for backward, in bytes: no budget covers it, so it is reported beside the tiers.

Where groups move, every tensor that autograd saves passes our hooks (saved_tensors.py), and each is counted. Where none
does there are no hooks, and only to count would be a poor reason for them: they cost time, and torch.func refuses to
run under any. There the graph of the first loss is walked instead, once.
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
    """Bytes of the storages that autograd has saved tensors of, until torch frees them: each once, groups' own never.

    The storage's life counts, not the saved tensor's: what checkpointing recomputes is held by checkpointing, and a
    model's buffer stays. Any thread may ask. Counts change by operators alone, without a call in between at which
    another thread, garbage collection or Ctrl-C could come in.
    """

    def __init__(self, groups: Iterable[ParamGroup]) -> None:
        groups = list(groups)
        self._used = 0
        self._peak = 0
        # By address, which no other storage gets while this one lives. A group's own are known and not counted.
        self._known: dict[int, _Activation | None] = dict.fromkeys(group.storage_key for group in groups)
        self._freed: deque[_Activation] = deque()  # and still in the counts
        # Not a method: Ctrl-C in Python code that runs where a storage is freed would be lost.
        self._on_free: Callable[[Any], None] = self._freed.append
        self._walk = not any(group.moves for group in groups)

    @property
    def used(self) -> int:
        """Bytes now."""
        self._forget_freed()
        return self._used

    @property
    def peak(self) -> int:
        """The most bytes at one time so far."""
        return self._peak

    def saved(self, storage: UntypedStorage) -> None:
        """Autograd keeps a tensor in ``storage``."""
        if self._freed:
            self._forget_freed()  # first: its address may be that of another one by now
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        activation = _Activation(storage, self._on_free)
        activation.key = key
        activation.nbytes = nbytes
        self._known[key] = activation
        self._used += nbytes
        if self._used > self._peak:
            self._peak = self._used

    def backward_of(self, loss: Tensor) -> None:
        """``loss`` is about to go backward. The first of them is walked, where no hooks have counted."""
        if not self._walk:
            return
        self._walk = False
        for tensor in _saved_in_graph(loss):
            if tensor.layout is torch.strided:
                self.saved(tensor.untyped_storage())

    def _forget_freed(self) -> None:
        while self._freed:
            activation = self._freed[0]
            del self._known[activation.key]
            self._used -= activation.nbytes
            del self._freed[0]


class _Activation(weakref.ref[UntypedStorage]):
    """Tells when torch frees a storage: its Python object lives as long as its bytes, seen from Python or not."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


def _saved_in_graph(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that the nodes behind ``loss`` hold, but for those that others' hooks have packed."""
    names: dict[type, list[str]] = {}
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [behind for behind, _ in node.next_functions]
        if type(node) not in names:
            names[type(node)] = [name for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names[type(node)]:
            saved = getattr(node, name)
            for one in saved if isinstance(saved, tuple) else (saved,):
                # What is packed, or the tensor itself: looking at it, unlike unpacking, recomputes nothing.
                data = getattr(one, "data", None)
                if isinstance(data, Tensor):
                    yield data
