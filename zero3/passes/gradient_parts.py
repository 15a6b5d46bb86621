"""Gradients of a tied parameter, accumulated where they arise.

Note [The parts of a tied parameter's gradient]
    Autograd adds up the gradients of all uses of a parameter before it hands them out. For an embedding that is tied to
    the output head, the head's gradient then lives from the beginning of backward to its end. There the embedding's
    gradient and the sum join it: three times the largest parameter, in addition to all budgets. So where modules that
    share a parameter are called, the autograd nodes that will produce parts of its gradient get a hook. Each part is
    accumulated as it arises, and autograd receives none. The sum is taken in the accumulation dtype, for every
    placement: the watched modules follow from the model alone, not from the groups, which depend on a threshold.

    A part stays with autograd where other code may need the whole gradient: the user's hooks on the parameter,
    torch.autograd.grad, create_graph, backward(inputs=...) without the parameter. Autograd also sums uses that no hook
    finds (a weight that another module reads, under an autocast that has cast it before).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero3.params import resharded
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup

_OUR_HOOKS = 1  # post-accumulate hooks of the engine on each parameter


class PartReceiver(Protocol):
    """Receives parts of gradients."""

    @property
    def takes_parts(self) -> bool: ...
    def gradient_part(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None: ...


def tied_in(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that several modules of ``model`` own."""
    owners = Counter(
        param for module in model.modules() for param in {*module._parameters.values()} if param is not None
    )
    return {param for param, count in owners.items() if count > 1}


def tied_parameters(
    model: nn.Module, groups: Iterable[ParamGroup], events: PartReceiver
) -> Iterator[tuple[nn.Module, TiedParameters]]:
    """The modules of ``model`` that own trained parameters which other modules own, too."""
    shared = tied_in(model)
    places = {
        param: (group, piece)
        for group in groups
        for piece, param in zip(group.layout.pieces, group.params, strict=True)
        if piece.trainable and param in shared
    }
    for module in model.modules():
        tied = [(param, *places[param]) for param in module._parameters.values() if param in places]
        if tied:
            yield module, TiedParameters(events, tied)


class TiedParameters:
    """The tied parameters of one module."""

    def __init__(self, events: PartReceiver, tied: Iterable[tuple[nn.Parameter, ParamGroup, Piece]]) -> None:
        self._events = weakref.ref(events)
        self._tied = [(param, weakref.ref(group), piece) for param, group, piece in tied]

    def watch(self, output: Any, nodes: range) -> None:
        """The module has returned ``output``, and made the autograd ``nodes``: add a hook to those that make parts."""
        events = self._events()
        if events is None or not events.takes_parts or not torch.is_grad_enabled():
            return
        places = {id(param): (group, piece) for param, group, piece in self._tied}
        for node, index, accumulator in _edges_to_leaves(output, nodes):
            place = places.get(id(accumulator.variable))
            if place is not None:
                node.register_hook(_part_hook(self._events, *place, index, accumulator))


def _edges_to_leaves(output: Any, nodes: range) -> Iterator[tuple[Any, int, Any]]:
    """The edges from ``nodes`` behind ``output`` to leaves: node, index of the edge, the leaf's accumulating node."""
    pending = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    visited = set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in visited or node._sequence_nr() not in nodes:
            continue
        visited.add(node)
        for index, (next_node, _) in enumerate(node.next_functions):
            if next_node is not None and next_node.name() == "torch::autograd::AccumulateGrad":
                yield node, index, next_node
            else:
                pending.append(next_node)


def _part_hook(
    listener: weakref.ref[PartReceiver],
    group_ref: weakref.ref[ParamGroup],
    piece: Piece,
    index: int,
    accumulator: Any,
) -> Callable[[tuple[Tensor | None, ...], Any], tuple[Tensor | None, ...] | None]:
    def hook(inputs: tuple[Tensor | None, ...], outputs: Any) -> tuple[Tensor | None, ...] | None:
        part, param = inputs[index], accumulator.variable
        events, group = listener(), group_ref()
        if part is None or events is None or group is None or not _is_ours_alone(param, accumulator):
            return None
        # Where the event's receiver looks for it, and takes it off again: autograd finds no gradient to add to.
        resharded.put_gradient(param, part)
        events.gradient_part(group, piece, param)
        # None in place of the part: autograd adds nothing to the parameter.
        return *inputs[:index], None, *inputs[index + 1 :]

    return hook


def _is_ours_alone(param: nn.Parameter, accumulator: Any) -> bool:
    """Whether the running backward accumulates ``param``, and no other code reads its gradient."""
    if torch.is_grad_enabled() or param._backward_hooks:
        return False
    if len(param._post_accumulate_grad_hooks or ()) > _OUR_HOOKS:
        return False
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:
        # torch.autograd.grad returns this gradient to its caller.
        return False
