"""Gradients of a tied parameter, taken where they arise.

Note [The parts of a tied parameter's gradient]
    Autograd adds up the gradients of all uses of a parameter before it hands them out. For an embedding that is tied to
    the output head, the head's gradient then exists from the beginning of backward to its end, when the embedding's and
    their sum join it: three times the largest parameter, beside all budgets. So where modules that share a parameter
    are called, the autograd nodes that will produce parts of its gradient are hooked. Each part is accumulated as it
    arises, and autograd passes on none. The sum is taken in the accumulation dtype then, for every placement: which
    modules are watched follows from the model alone, not from the groups, which a threshold cuts otherwise.

    A part stays with autograd where somebody may want the whole gradient: hooks of others on the parameter,
    torch.autograd.grad, create_graph, backward(inputs=...) without the parameter. Uses that no hook finds (a weight
    read by another module, under an autocast that has cast it before) are summed by autograd as ever.
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

_OUR_HOOKS = 1  # on a parameter, of the kind that runs after its gradient was accumulated


class Events(Protocol):
    """Who takes gradients."""

    @property
    def takes_parts(self) -> bool: ...
    def gradient_part(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None: ...


def tied_in(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that several modules of ``model`` have for their own."""
    owners = Counter(
        param for module in model.modules() for param in {*module._parameters.values()} if param is not None
    )
    return {param for param, count in owners.items() if count > 1}


def tied_parameters(
    model: nn.Module, groups: Iterable[ParamGroup], events: Events
) -> Iterator[tuple[nn.Module, TiedParameters]]:
    """The modules of ``model`` with trained parameters of their own that are others' own, too."""
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
    """The tied ones among the parameters of a module."""

    def __init__(self, events: Events, tied: Iterable[tuple[nn.Parameter, ParamGroup, Piece]]) -> None:
        self._events = weakref.ref(events)
        self._tied = [(param, weakref.ref(group), piece) for param, group, piece in tied]

    def watch(self, output: Any, nodes: range) -> None:
        """The module has returned ``output``, by autograd nodes with these numbers: hook those that make parts."""
        events = self._events()
        if events is None or not events.takes_parts or not torch.is_grad_enabled():
            return
        places = {id(param): (group, piece) for param, group, piece in self._tied}
        for node, index, accumulator in _edges_to_leaves(output, nodes):
            place = places.get(id(accumulator.variable))
            if place is not None:
                node.register_hook(_take(self._events, *place, index, accumulator))


def _edges_to_leaves(output: Any, nodes: range) -> Iterator[tuple[Any, int, Any]]:
    """The edges from ``nodes`` behind ``output`` to leaves: node, index of the edge, the leaf's accumulating node."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() not in nodes:
            continue
        seen.add(node)
        for index, (behind, _) in enumerate(node.next_functions):
            if behind is not None and behind.name() == "torch::autograd::AccumulateGrad":
                yield node, index, behind
            else:
                waiting.append(behind)


def _take(
    listener: weakref.ref[Events],
    of: weakref.ref[ParamGroup],
    piece: Piece,
    index: int,
    accumulator: Any,
) -> Callable[[tuple[Tensor | None, ...], Any], tuple[Tensor | None, ...] | None]:
    def taken(inputs: tuple[Tensor | None, ...], outputs: Any) -> tuple[Tensor | None, ...] | None:
        part, param = inputs[index], accumulator.variable
        events, group = listener(), of()
        if part is None or events is None or group is None or not _is_ours_alone(param, accumulator):
            return None
        resharded.put_gradient(param, part)
        events.gradient_part(group, piece, param)
        return *inputs[:index], None, *inputs[index + 1 :]

    return taken


def _is_ours_alone(param: nn.Parameter, accumulator: Any) -> bool:
    """Whether the backward that runs now accumulates ``param``, and nobody else looks at its gradient."""
    if torch.is_grad_enabled() or param._backward_hooks:
        return False
    if len(param._post_accumulate_grad_hooks or ()) > _OUR_HOOKS:
        return False
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:
        # torch.autograd.grad asks for this gradient.
        return False
