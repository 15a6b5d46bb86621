"""The settings of autocast for a computation that is repeated, and the copies that autocast keeps.

Autocast keeps the cast copies of weights until its outermost context ends. A copy that was made without gradients would
be used where gradients are needed, and one of an earlier recomputation refers to a graph that is gone. So a forward
that is to be repeated keeps none, and each recomputation begins without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class Autocast:
    """The settings of autocast when it was made, for the CPU and the devices of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        types = {"cpu", *(tensor.device.type for tensor in tensors)}
        self._settings = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(types)
            if torch.amp.is_autocast_available(kind)
        ]
        self._keeps_copies = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with these settings. No cast copy passes its borders: see the top of this file."""
        torch.clear_autocast_cache()
        try:
            with ExitStack() as stack:
                for kind, dtype, enabled in self._settings:
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self._keeps_copies))
                yield
        finally:
            torch.clear_autocast_cache()


@contextmanager
def without_copies() -> Iterator[None]:
    """Autocast keeps no cast copies within the context."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
