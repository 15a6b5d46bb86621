"""Where the random numbers of a process are: torch's, on the CPU and on each GPU, Python's and numpy's.

A run that goes on from a checkpoint draws what it would have drawn without a stop. Generators that a script made are
its own to keep, in client_state.
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
    """The state of every generator that there is now, for ``plain.encode``.

    GPUs are among them once CUDA is in use, and numpy's global one once numpy.random was imported: none has a state
    of its own before that.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()  # kept in host memory: nothing waits for a device
        state["cuda_device"] = torch.cuda.current_device()
    if "numpy.random" in sys.modules:
        state["numpy"] = sys.modules["numpy.random"].get_state(legacy=False)
    return state


def restore(state: Any) -> None:
    """Go on where ``capture`` was called. CheckpointError for a state that is none."""
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
            f"the random state of {name!r} is refused: {error}; the file is damaged, or from other versions of"
            " Python, torch or numpy"
        ) from error


def _set_numpy(state: dict[str, Any]) -> None:
    import numpy.random  # not loaded by "import numpy": only a run that had it needs it

    if state["bit_generator"] == "MT19937" and not 0 <= state["state"]["pos"] <= len(state["state"]["key"]):
        raise ValueError("it points outside of itself")  # where numpy would read without a look
    numpy.random.set_state(state)


def _set_devices(states: list[Tensor], *, own: int | None) -> None:
    """``own``: which of them the process computed on; a launcher may show it other GPUs now, or in another order."""
    here = torch.cuda.device_count()
    for device, state in enumerate(states[:here]):
        torch.cuda.set_rng_state(state, device)
    if own is not None and here and own != (current := torch.cuda.current_device()):
        torch.cuda.set_rng_state(states[own], current)
    if len(states) != here:
        log.warning(
            "the checkpoint has random states of %d GPUs, and this process sees %d: only the first %d, and the one it"
            " computes on, go on from it",
            *(len(states), here, min(len(states), here)),
        )
