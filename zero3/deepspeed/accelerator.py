"""``get_accelerator()``: the device of this process, GPU or CPU, with DeepSpeed's interface."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zero3.device.choice import chosen_device


class Accelerator:
    """The device. Other attributes are those of torch's module for it: ``synchronize``, ``Stream``, ...

    torch does not count memory on the CPU: there, allocated memory is 0 bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._name = device.type
        self._torch = torch.get_device_module(device)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if hasattr(self._torch, name):
                return getattr(self._torch, name)
            if self._name == "cpu" and name in _OF_THE_CPU:
                return _OF_THE_CPU[name]
        raise AttributeError(f"the accelerator, {self._name!r}, has no attribute {name!r}")

    def device_name(self, device_index: int | None = None) -> str:
        """torch's name of the kind of device, or of the device with this index."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The device of this process, for ``tensor.to``."""
        return "cpu" if self._name == "cpu" else f"{self._name}:{self._torch.current_device()}"

    def communication_backend_name(self) -> str:
        """torch.distributed's backend for tensors on this device."""
        return "gloo" if self._name == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        """Whether models can compute in bf16."""
        return self._name == "cpu" or bool(self._torch.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether models can compute in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which models can compute."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *bf16]

    def random(self) -> ModuleType:
        """torch's module of random numbers."""
        return torch.random

    def total_memory(self, device_index: int | None = None) -> int:
        """The memory of the device, in bytes."""
        if self._name == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._torch.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """The free memory of the device, in bytes."""
        if self._name == "cpu":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._torch.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """``tensor`` in pinned memory; on the CPU, ``tensor`` itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in pinned memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the device."""
        return tensor.device.type == self._name

    def range_push(self, msg: str, domain: object = None, category: object = None) -> None:
        """Begin a range of this name in a profile."""
        if self._name == "cuda":
            self._torch.nvtx.range_push(msg)

    def range_pop(self, domain: object = None) -> None:
        """End the range that has begun last."""
        if self._name == "cuda":
            self._torch.nvtx.range_pop()


def _no_bytes(device_index: int | None = None) -> int:
    return 0


def _nothing(device_index: int | None = None) -> None:
    return None


def _rng_state(device_index: int | None = None) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device_index: int | None = None) -> None:
    torch.set_rng_state(new_state)


_TENSORS = (
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
)
_OF_THE_CPU: dict[str, Any] = {
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), _nothing),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated"), _no_bytes),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), _no_bytes),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
    **{name: getattr(torch, name) for name in _TENSORS},
    "device": nullcontext,
    "default_stream": torch.cpu.current_stream,
    "initial_seed": torch.initial_seed,
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
}
"""Functions that torch has for a GPU, but not for the CPU."""


@cache
def get_accelerator() -> Accelerator:
    """The device of this process: the GPU if there is one, otherwise the CPU. TIERING_DEVICE=cpu selects the CPU."""
    return Accelerator(chosen_device())
