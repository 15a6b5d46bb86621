"""``torch.autograd.grad`` and ``backward(inputs=...)`` for parameters whose bytes are on another tier.

The derivative by a parameter needs none of its values, only its node in the graph. Torch accepts that node, the
gradient edge, in place of the tensor. So the parameters do not change while backward runs: a recomputation under
activation checkpointing reads them as the forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

CALLS = (torch.autograd.grad, torch.autograd.backward)


def differentiate(
    call: Callable[..., Any], args: Any, kwargs: dict[str, Any], is_elsewhere: Callable[[Any], bool]
) -> Any:
    """The result of ``call``, one of CALLS, for tensors of which some have their bytes on another tier."""
    bound = signature(call).bind(*args, **kwargs)
    arguments = bound.arguments

    def edges(tensors: Any) -> Any:
        return [_edge(each) if is_elsewhere(each) else each for each in _several(tensors)]

    inputs = arguments.get("inputs")
    for name in ("outputs", "tensors", "inputs"):
        if arguments.get(name) is not None:
            arguments[name] = edges(arguments[name])
    for name in ("grad_outputs", "grad_tensors"):
        if arguments.get(name) is not None:
            # Values are needed here: a view makes the owner unshard them.
            arguments[name] = [
                each.view_as(each) if is_elsewhere(each) else each for each in _several(arguments[name])
            ]
    materialize = bool(arguments.get("materialize_grads"))
    if materialize:
        # Torch cannot make zeros for an edge.
        arguments["materialize_grads"], arguments["allow_unused"] = False, True
    gradients = call(*bound.args, **bound.kwargs)
    if not materialize:
        return gradients
    requires_grad = bool(arguments.get("create_graph"))
    return tuple(
        torch.zeros_like(tensor, requires_grad=requires_grad) if gradient is None else gradient
        for tensor, gradient in zip(_several(inputs), gradients, strict=True)
    )


def _several(tensors: Any) -> Iterable[Any]:
    # A GradientEdge is a tuple.
    if isinstance(tensors, Tensor | GradientEdge):
        return [tensors]
    return tensors if isinstance(tensors, list | tuple) else list(tensors)


def _edge(param: Tensor) -> GradientEdge:
    if not param.requires_grad:
        # The message of torch.
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    # Torch makes a view to find the edge; that reads no values.
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(param)
