"""Between the first forward and ``step()`` nobody asks for a number: on a GPU that waits for all that is queued.

A CPU has every number at once. Here each request for one is an error, by what it is called in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zero3.conftest import batches

Start = Callable[..., Any]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
OPERATIONS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2"}
METHODS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}


class _NoOperation(TorchDispatchMode):
    """Also what C++ calls, and what runs in backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in OPERATIONS, f"{func} waits"
        return func(*args, **(kwargs or {}))


class _NoMethod(TorchFunctionMode):
    """What copies to the CPU before it looks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in METHODS, f"{func} waits"
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_waits() -> Iterator[None]:
    with _NoOperation(), _NoMethod():
        yield


@pytest.mark.parametrize("call", [torch.Tensor.item, torch.Tensor.tolist, bool, torch.Tensor.cpu])
def test_a_wait_is_seen(call: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.ones(())
    with pytest.raises(AssertionError, match="waits"), nobody_waits():
        call(tensor)


@pytest.mark.parametrize(
    "placement", [{}, STREAMED, {"offload_optimizer": "cpu"}], ids=["device", "nvme", "cpu"]
)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_nobody_waits_before_the_step_that_updates(
    start: Start, precision: str, placement: dict[str, Any]
) -> None:
    """With a dynamic loss scale, clipping and accumulation: what they need is known when it is asked for."""
    engine = start(precision=precision, accumulation=2, **placement)
    updates = []
    for tokens, targets in batches(4):
        with nobody_waits():
            engine.backward(engine(tokens, targets))
        if engine.is_gradient_accumulation_boundary():
            engine.step()
            updates.append(engine.get_global_grad_norm())
        else:
            with nobody_waits():
                engine.step()
    assert len(updates) == 2 and all(updates)
