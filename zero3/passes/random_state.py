"""The state of torch's random number generators, so that a computation draws the same numbers again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

WITHOUT_GENERATOR = ("cpu", "meta")
"""Types of device of which no state is kept beside that of the CPU."""


class RandomState:
    """The states of the generators of the CPU and of some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = {device: _module_of(device).get_rng_state(device) for device in devices}

    @classmethod
    def now(cls, tensors: Iterable[Tensor]) -> Self:
        """The present state, of the CPU and of the devices of ``tensors``."""
        return cls({tensor.device for tensor in tensors if tensor.device.type not in WITHOUT_GENERATOR})

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            _module_of(device).set_rng_state(state, device)

    def has_changed(self) -> bool:
        """Whether random numbers were drawn since."""
        now = type(self)(self._devices)
        return not self._cpu.equal(now._cpu) or any(
            not state.equal(now._devices[device]) for device, state in self._devices.items()
        )


def _module_of(device: torch.device) -> Any:
    return getattr(torch, device.type)
