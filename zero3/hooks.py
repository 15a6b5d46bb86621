"""Module and gradient hooks: they turn what torch does into events. No policy lives here.

``Events`` is what listens: the pass schedule. Forward hooks sit on the entry modules of each group. The pre-backward
event of a group is the first gradient that reaches an output of one of its entries. ``always_call`` makes the
post-forward event come also when forward raised, or when activation checkpointing stopped a recomputation early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zero3.param_group import ParamGroup
from zero3.partition import Piece


class Events(Protocol):
    """What happens to groups, in the order in which it happens."""

    def begin_forward(self, training: bool) -> None: ...
    def begin_backward(self) -> None: ...
    def pre_forward(self, group: ParamGroup) -> None: ...
    def post_forward(self, group: ParamGroup) -> None: ...
    def pre_backward(self, group: ParamGroup) -> None: ...
    def gradient(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None: ...
    def end_of_backward(self) -> None: ...


def install(groups: Iterable[ParamGroup], events: Events) -> list[RemovableHandle]:
    """Hook ``groups`` up to ``events``; the handles remove the hooks."""
    handles: list[RemovableHandle] = []
    for group in groups:
        for entry in group.entries:
            handles.append(entry.register_forward_pre_hook(_before(events, group), prepend=True))
            handles.append(entry.register_forward_hook(_after(events, group), always_call=True))
        for piece, param in zip(group.layout.pieces, group.params, strict=True):
            if piece.trainable:
                handles.append(param.register_post_accumulate_grad_hook(_accumulated(events, group, piece)))
    return handles


def install_root(model: nn.Module, events: Events) -> list[RemovableHandle]:
    """Tell ``events`` when a pass over the whole model begins. Its hooks run before those of any group."""

    def before(module: nn.Module, args: Any) -> None:
        events.begin_forward(torch.is_grad_enabled())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        watch_backward(output, events.begin_backward)

    return [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)]


def watch_backward(outputs: Any, on_first_gradient: Callable[[], None]) -> None:
    """Call ``on_first_gradient`` once per backward pass, when a gradient first reaches a tensor in ``outputs``."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors and torch.is_grad_enabled():
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: on_first_gradient(), mode="any")


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward_pass() -> bool:
    """Whether this thread is inside autograd's backward (a recomputation under checkpointing is)."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _before(events: Events, group: ParamGroup) -> Callable[[nn.Module, Any], None]:
    def pre_forward(module: nn.Module, args: Any) -> None:
        events.pre_forward(group)

    return pre_forward


def _after(events: Events, group: ParamGroup) -> Callable[[nn.Module, Any, Any], None]:
    def post_forward(module: nn.Module, args: Any, output: Any) -> None:
        watch_backward(output, lambda: events.pre_backward(group))
        events.post_forward(group)

    return post_forward


def _accumulated(events: Events, group: ParamGroup, piece: Piece) -> Callable[[Tensor], None]:
    # Python's collector does not see through these hooks: what they hold, down to the parameter, would never be freed.
    listener, of = weakref.ref(events), weakref.ref(group)

    def gradient(param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        events, group = listener(), of()
        if events is not None and group is not None:
            events.gradient(group, piece, param)

    return gradient
