"""``torch.autograd.grad`` and ``backward(inputs=...)`` over parameters whose bytes are elsewhere.

Differentiating by a parameter needs none of its values, only its place in the graph. Torch takes that place, the
gradient edge, wherever it takes the tensor itself. So the parameters stay what they are while backward runs: a
recomputation under activation checkpointing reads them as the forward did.
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
    """What ``call``, one of CALLS, returns for tensors of which some are elsewhere."""
    bound = signature(call).bind(*args, **kwargs)
    arguments = bound.arguments

    def edges(tensors: Any) -> Any:
        return [_edge(each) if is_elsewhere(each) else each for each in _several(tensors)]

    inputs = arguments.get("inputs")
    for name in ("outputs", "tensors", "inputs"):
        if arguments.get(name) is not None:
            arguments[name] = edges(arguments[name])
    for name in ("grad_outputs", "grad_tensors"):
        if arguments.get(name) is not None:  # values are needed here: a view of them brings the bytes
            arguments[name] = [
                each.view_as(each) if is_elsewhere(each) else each for each in _several(arguments[name])
            ]
    materialize = bool(arguments.get("materialize_grads"))
    if materialize:  # torch makes no zeros for an edge
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
    if isinstance(tensors, Tensor | GradientEdge):  # which is a tuple
        return [tensors]
    return tensors if isinstance(tensors, list | tuple) else list(tensors)


def _edge(param: Tensor) -> GradientEdge:
    if not param.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")  # torch's words
    # Torch finds the edge by a view, which reads nothing.
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(param)
