"""Utilisation, power and temperature of a GPU, from NVML, if the package nvidia-ml-py is installed.

NVML asks the driver for sensors. It needs no context on the GPU and waits for no stream, so that the publisher's thread
may call it while the GPU computes.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from tiering.telemetry import GpuStatus

log = logging.getLogger(__name__)


class GpuSensors:
    """Reads the sensors of ``device``. The first reading opens NVML."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> GpuStatus | None:
        """The sensors now; None without a GPU, without NVML, and if NVML does not know the GPU."""
        if self._opened is None:
            return None
        nvml, handle = self._opened

        def value(read: Callable[[], float]) -> float | None:
            try:
                return float(read())
            except nvml.NVMLError:
                # This GPU, or a part of it (MIG), does not have the sensor.
                return None

        percent = value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = value(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        degrees = value(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return GpuStatus(
            utilization=None if percent is None else percent / 100,
            power=None if milliwatts is None else milliwatts / 1000,
            temperature=degrees,
        )

    @cached_property
    def _opened(self) -> tuple[Any, Any] | None:
        """NVML and its handle of the GPU."""
        if self._device.type != "cuda":
            return None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            # By the id: NVML counts the GPUs that CUDA_VISIBLE_DEVICES hides.
            uuid = torch.cuda.get_device_properties(self._device).uuid
            return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError as error:
            log.info("the sensors of %s are not published: %s", self._device, error)
            return None
