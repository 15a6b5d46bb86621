"""Exchanges of the memory of torch storages."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.utils import dlpack

log = logging.getLogger(__name__)


def exchange_pointers(first: Tensor, second: Tensor) -> None:
    """Exchange the memory and the sizes of the storages of two tensors on one device. All their views follow.

    The storages have one size, or one of them is empty.
    """
    # Queued kernels of a device keep their addresses, so this sets no order on the device: code that frees the memory
    # waits for an event behind these kernels.
    first.untyped_storage()._swap_data_ptr_(second.untyped_storage())  # type: ignore[attr-defined]


def apart(part: Tensor) -> Tensor:
    """A contiguous view as a tensor that is its whole storage. It keeps the memory of the viewed tensor alive."""
    # The capsule refers to ``part``, and so to the memory of the whole, as long as the new tensor lives.
    tensor: Tensor = dlpack.from_dlpack(dlpack.to_dlpack(part))  # type: ignore[attr-defined] # torch does not list it
    return tensor


@cache
def can_exchange(device: torch.device = torch.device("cpu")) -> bool:  # noqa: B008 # a constant
    """Whether this torch can exchange the memory of storages on ``device``. The method is private, so it is tried."""
    try:
        whole = torch.arange(4, dtype=torch.uint8, device=device)
        first, second = torch.empty(2, dtype=torch.uint8, device=device), apart(whole[2:])
        first.untyped_storage().resize_(0)
        exchange_pointers(first, second)
        works = first.tolist() == [2, 3] and second.untyped_storage().nbytes() == 0
    except (AttributeError, RuntimeError, TypeError):
        works = False
    if not works:
        log.warning(
            "torch %s cannot exchange storage pointers (%s): unsharding resizes storages, and on a CPU copies",
            *(torch.__version__, device.type),
        )
    return works
