"""What autograd keeps for backward, in bytes: no budget covers it, so it is reported beside the tiers.

Where groups move, every tensor that autograd saves passes our hooks (saved_tensors.py), and each is counted. Where none
does there are no hooks, and only to count would be a poor reason for them: they cost time, and torch.func refuses to
run under any. There the graph of the first loss is walked instead, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from zero3.param_group import ParamGroup


class Activations:
    """Bytes of the storages that autograd has saved tensors of, until torch frees them: each once, groups' own never.

    The storage's life counts, not the saved tensor's: what checkpointing recomputes is held by checkpointing, and a
    model's buffer stays. ``used`` now, ``peak`` the most so far. Changed by the thread that computes or frees, with
    operators alone: no other thread and no garbage collection gets in between.
    """

    def __init__(self, groups: Iterable[ParamGroup]) -> None:
        groups = list(groups)
        self.used = 0
        self.peak = 0
        # By address, which no other storage gets while this one lives. A group's own are known and not counted.
        self._known: dict[int, _Activation | None] = dict.fromkeys(group.storage_key for group in groups)
        self._walk = not any(group.moves for group in groups)
        self._on_free = self._freed  # bound once: there are thousands of storages in a pass

    def saved(self, storage: UntypedStorage) -> None:
        """Autograd keeps a tensor in ``storage``."""
        key = storage._cdata
        if key in self._known:
            return
        activation = _Activation(storage, self._on_free)
        activation.key = key
        activation.nbytes = nbytes = storage.nbytes()
        self._known[key] = activation
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used

    def backward_of(self, loss: Tensor) -> None:
        """``loss`` is about to go backward. The first of them is walked, where no hooks have counted."""
        if not self._walk:
            return
        self._walk = False
        for tensor in _saved_in_graph(loss):
            if tensor.layout is torch.strided:
                self.saved(tensor.untyped_storage())

    def _freed(self, activation: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(activation, _Activation)
        del self._known[activation.key]
        self.used -= activation.nbytes


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
