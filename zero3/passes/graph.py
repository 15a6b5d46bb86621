"""The nodes of autograd behind a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Each node of the graph that the tensors were computed by, once."""
    visited, pending = set[Any](), [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        pending += [next_node for next_node, _ in node.next_functions]
        yield node
