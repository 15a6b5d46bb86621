"""Registers host memory with CUDA, so that the device copies from it and to it directly."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

from tiering.config.fields import format_size
from tiering.storage.arena import Arena

log = logging.getLogger(__name__)


def register_with_cuda(address: int, nbytes: int) -> None:
    """Page-lock host memory for CUDA. Raises RuntimeError if the driver refuses it."""
    cudart = torch.cuda.cudart()
    result = int(cudart.cudaHostRegister(address, nbytes, 0))
    if result:
        # CUDA's runtime keeps the error and would report it at the next launch of a kernel. This launch takes it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(refused(nbytes, result))


def refused(nbytes: int, error: int) -> str:
    """The message for an error of cudaHostRegister."""
    return (
        f"cudaHostRegister of {nbytes} bytes failed with error {error}: the system allows too little locked memory."
        " Raise it: ulimit -l unlimited; docker run --ulimit memlock=-1; with WSL2, a larger memory= in .wslconfig"
    )


def unregister_with_cuda(address: int, device: torch.device) -> None:
    """Undo ``register_with_cuda``, after all copies on ``device`` that use the memory have ended."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        log.error(
            "the device has failed; pinned memory is unregistered without waiting for its copies: %s", error
        )
    result = int(torch.cuda.cudart().cudaHostUnregister(address))
    if result:
        log.error(
            "cudaHostUnregister failed with error %d; the memory stays pinned until the process ends", result
        )


class PinnedMemory:
    """The ranges of a rank's host memory that are registered with CUDA. ``addresses`` are those where they begin.

    This is the whole arena, where the system allows so much locked memory. WSL2 and many containers do not. Then these
    are the windows, as far as they are allowed: their size does not grow with the model, and all bytes from NVMe pass
    through them. Copies of the other memory pass through a buffer of the driver, and the program waits for them.

    A copy must not cross the edge of a registered range. None does: a window is a lease of the arena, and a copy is
    within one lease.
    """

    def __init__(
        self,
        register: Callable[[int, int], None] = register_with_cuda,
        unregister: Callable[[int, torch.device], None] = unregister_with_cuda,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self.addresses: list[int] = []
        self.nbytes = 0
        self.refusal = ""
        """The reason why the arena is not registered as a whole."""

    def pin_arena(self, address: int, nbytes: int) -> None:
        """Register the whole arena, if the system allows it."""
        self.refusal = self._try(address, nbytes)

    def pin_windows(self, *windows: Arena) -> None:
        """Register the windows that the system allows, unless the whole arena is registered."""
        for window in windows:
            if self.refusal and window.capacity:
                self._try(window.address, window.capacity)

    def _try(self, address: int, nbytes: int) -> str:
        """The refusal, or ""."""
        try:
            self._register(address, nbytes)
        except RuntimeError as refused:
            return str(refused)
        self.addresses.append(address)
        self.nbytes += nbytes
        return ""

    def report(self, arena: Arena) -> None:
        """Warn if the arena is not registered as a whole."""
        if self.refusal:
            log.warning(
                "%s. Of the %s arena, %s are pinned, in windows that transfers pass through, and %s are pageable:"
                " copies of these to and from the GPU are slower, because they pass through a buffer of the driver, and"
                " the program waits for each of them instead of running ahead. Results are the same. A lower"
                " host_budget needs less locked memory",
                self.refusal,
                arena.name,
                format_size(self.nbytes),
                format_size(arena.capacity - self.nbytes),
            )

    def unpin(self, device: torch.device) -> None:
        """Undo all registrations."""
        while self.addresses:
            self._unregister(self.addresses.pop(), device)


def pinned_memory(device: torch.device) -> PinnedMemory | None:
    """What registers the host memory of ``device``; None if that has no CUDA."""
    return PinnedMemory() if device.type == "cuda" else None
