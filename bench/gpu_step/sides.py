"""The sides by name: what each case starts, and about how much memory each takes.

The estimates choose sizes and say who runs beside whom; no figure comes from them. A process has some of the device and
of the host before it has a model; blocks that come and go, and gradients on their way, take room for a few of the
largest. DeepSpeed pins by powers of two: a guess on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .shape import BF16, SMALLEST, Shape, of_size
from .side import Spec

GIB = 1 << 30
CONTEXT = GIB  # of a process on the device, and with torch on the host
PROCESS = 3 * GIB
SPARE = GIB // 2  # of the host budget, for windows and staging
MOVING = 8  # largest groups in the compute dtype
PARAM, GRAD, STATE = 2, 2, 12  # bytes per parameter
ALL = PARAM + GRAD + STATE
PLAIN = 20
DEEPSPEED = 32
CACHED = 4  # bytes per parameter that the NVMe side may keep in host memory
AMPLE = 1 << 60  # bytes, where memory is not what limits
CARD_SHARE, HOST_SHARE, DISK_SHARE = 0.9, 0.85, 0.9  # what of a memory all sides may take together

REFERENCE = "ours, all on the device"
PLAIN_TORCH = "plain PyTorch"
OFFLOADED = "ours, cpu offload"
EAGER = "ours, cpu offload, step in backward"
STATE_OFFLOADED = "ours, optimizer on the CPU"
FILLED = "ours, what fits on the device"
ON_NVME = "ours, NVMe"
RESIZED = "ours, cpu offload, storages resized"
PEER = "DeepSpeed, cpu offload"


@dataclass(frozen=True, slots=True)
class Sides:
    """The sides for a model of ``shape`` in micro-batches of ``tokens``, at most, where a card has ``card`` bytes.

    ``more`` goes into the section "tiering" of each of ours.
    """

    shape: Shape
    tokens: int
    card: int
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def _passing(self) -> int:
        """Bytes of the device that every side needs for a pass, whatever it keeps there."""
        return CONTEXT + self.shape.activations(self.tokens)

    @property
    def _moving(self) -> int:
        return MOVING * BF16 * max(self.shape.block, self.shape.words * self.shape.width)

    @property
    def budget(self) -> int:
        """Of the device, for what the engine owns."""
        return self.card - self._passing

    def _ours(self, name: str, device: int, host: int, **settings: Any) -> Spec:
        tiering = {
            "device_budget": self.budget,
            "host_budget": host + SPARE,  # "auto" would count what the other sides take meanwhile
            "telemetry": {"enabled": False},
            **settings.pop("tiering", {}),
            **self.more,
        }
        everything = {"param": "none", "optimizer": "none", **settings, "tiering": tiering}
        return Spec(
            name,
            "gpu_step.ours",
            settings=everything,
            on_disk="nvme" in everything.values(),
            device=self._passing + device,
            host=PROCESS + host,
        )

    def reference(self) -> Spec:
        return self._ours(REFERENCE, ALL * self.shape.parameters, 0)

    def plain(self) -> Spec:
        nbytes = PLAIN * self.shape.parameters
        return Spec(PLAIN_TORCH, "gpu_step.plain", device=self._passing + nbytes, host=PROCESS)

    def offloaded(self, name: str = OFFLOADED, **settings: Any) -> Spec:
        """Parameters, gradients and state in host memory."""
        return self._ours(
            name,
            self._moving,
            ALL * self.shape.parameters + self._moving,
            **{"param": "cpu", "optimizer": "cpu"} | settings,
        )

    def eager(self) -> Spec:
        """As ``offloaded``, and groups are stepped while backward still runs, which clipping does not allow."""
        return self.offloaded(EAGER, clip=0.0, tiering={"step_in_backward": True})

    def resized(self) -> Spec:
        """As ``offloaded``, and groups are unsharded in memory that torch allocates each time, in place of a slab."""
        return self.offloaded(RESIZED, resize=True)

    def state_offloaded(self) -> Spec:
        """Gradients and state in host memory."""
        parameters = self.shape.parameters
        host = (GRAD + STATE) * parameters + self._moving
        return self._ours(STATE_OFFLOADED, PARAM * parameters + self._moving, host, optimizer="cpu")

    def filled(self) -> Spec:
        """Parameters in host memory, and of gradients and state no more than the device cannot hold."""
        parameters = self.shape.parameters
        room = max(0, self.budget - self._moving)
        ratio = math.ceil(100 * max(0.0, 1 - room / ((GRAD + STATE) * parameters))) / 100
        resident = round((1 - ratio) * (GRAD + STATE) * parameters)
        return self._ours(
            FILLED,
            self._moving + resident,
            ALL * parameters - resident + self._moving,
            param="cpu",
            optimizer="cpu",
            zero={"offload_optimizer": {"ratio": ratio}},
        )

    def on_nvme(self) -> Spec:
        """Parameters and state on NVMe, but for a part that the host budget keeps."""
        host = max(CACHED * self.shape.parameters, 3 * self._moving)
        return self._ours(ON_NVME, self._moving, host, param="nvme", optimizer="nvme")

    @property
    def disk(self) -> int:
        """Bytes that ``on_nvme`` may take there."""
        return ALL * self.shape.parameters

    def peer(self, python: Path) -> Spec:
        parameters = self.shape.parameters
        # It keeps up to a billion parameters unsharded, by its defaults.
        device = self._passing + PARAM * min(parameters, 10**9) + self._moving
        host = PROCESS + DEEPSPEED * parameters
        return Spec(PEER, "gpu_step.deepspeed", python=python, grouped=True, device=device, host=host)


def largest(fits: Callable[[Shape], bool], most: float = 20e9) -> Shape | None:
    """The largest shape that ``fits``, by steps of 3 %; None if there is none."""
    size = most
    while size >= SMALLEST.parameters:
        shape = of_size(int(size))
        if fits(shape):
            return shape
        size *= 0.97
    return None
