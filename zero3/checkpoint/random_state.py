"""Random states of a process: torch's, on the CPU and on each GPU, Python's and numpy's.

A run that resumes from a checkpoint draws the numbers of an uninterrupted run. Scripts save the states of their own
generators in client_state.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiering.errors import CheckpointError

log = logging.getLogger(__name__)

_REFUSALS = (TypeError, ValueError, LookupError, OverflowError, AttributeError, RuntimeError)


def capture() -> dict[str, Any]:
    """The state of every global generator, for ``encoding.encode``.

    Those of GPUs are included once CUDA is in use, and numpy's once numpy.random is imported: before that they have no
    state.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()  # in host memory: no wait for the device
        state["cuda_device"] = torch.cuda.current_device()
    if "numpy.random" in sys.modules:
        state["numpy"] = sys.modules["numpy.random"].get_state(legacy=False)
    return state


def restore(state: Any) -> None:
    """Restore the state of ``capture``. CheckpointError for an invalid state."""
    if not isinstance(state, dict):
        raise CheckpointError(f"the random states are a {type(state).__name__}; the file is damaged")
    _restore("torch", torch.set_rng_state, state)
    _restore("python", random.setstate, state)
    _restore("numpy", _set_numpy, state)
    _restore("cuda", partial(_set_devices, own=state.get("cuda_device")), state)


def _restore(name: str, set_state: Callable[[Any], None], state: dict[str, Any]) -> None:
    if name not in state:
        return
    try:
        set_state(state[name])
    except _REFUSALS as error:
        raise CheckpointError(
            f"the random state of {name!r} is invalid: {error}; the file is damaged, or from other versions of"
            " Python, torch or numpy"
        ) from error


def _set_numpy(state: dict[str, Any]) -> None:
    # "import numpy" does not load it: only a run that has used it needs it.
    import numpy.random

    if state["bit_generator"] == "MT19937" and not 0 <= state["state"]["pos"] <= len(state["state"]["key"]):
        raise ValueError("its position is out of range")  # numpy would read there unchecked
    numpy.random.set_state(state)


def _set_devices(states: list[Tensor], *, own: int | None) -> None:
    """Restore GPU states. ``own`` is the GPU of the process that saved; a launcher may show other GPUs now."""
    device_count = torch.cuda.device_count()
    for device, state in enumerate(states[:device_count]):
        torch.cuda.set_rng_state(state, device)
    if own is not None and device_count and own != (current := torch.cuda.current_device()):
        torch.cuda.set_rng_state(states[own], current)
    if len(states) != device_count:
        log.warning(
            "the checkpoint has random states of %d GPUs, but this process sees %d: only the first %d, and the GPU of"
            " this process, are restored",
            *(len(states), device_count, min(len(states), device_count)),
        )
