"""Registers host memory with CUDA, so that the device copies from it and to it directly."""

from __future__ import annotations

import contextlib
import logging

import torch

log = logging.getLogger(__name__)


def register_with_cuda(address: int, nbytes: int) -> None:
    """Page-lock host memory for CUDA. Raises RuntimeError if the driver refuses it."""
    cudart = torch.cuda.cudart()
    result = int(cudart.cudaHostRegister(address, nbytes, 0))
    if result:
        # CUDA's runtime keeps the error and would report it at the next launch of a kernel. This launch takes it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(
            f"cudaHostRegister of {nbytes} bytes failed with error {result}: lower host_budget or raise memlock"
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
