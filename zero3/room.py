"""What nobody uses on the tiers now: asked of the system, and not at every publication."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tiering.budgets import available_memory
from tiering.plan import Tier
from tiering.swap_file import free_by_file_system
from zero3.tiers import Tiers

INTERVAL = 2.0  # seconds for which an answer is new enough


class Room:
    """Bytes of each tier of ``tiers`` that are free, as any process sees them. Any thread may ask.

    None for a GPU: its driver may keep who asks it waiting, and telemetry must never do that to training.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._asked_at = -INTERVAL
        self._found: Mapping[Tier, int | None] = {}

    def available(self, tier: Tier) -> int | None:
        """Bytes; None where that is not known."""
        now = time.monotonic()
        if now - self._asked_at >= INTERVAL:
            self._asked_at = now
            self._found = self._ask()
        return self._found.get(tier)

    def _ask(self) -> Mapping[Tier, int | None]:
        tiers = self._tiers
        try:
            memory = available_memory()
            nvme = sum(free_by_file_system(tiers.swap.directories).values()) if tiers.swap else None
        except OSError:  # a directory that was removed: the swap files in it live on
            return {}
        return {
            Tier.DEVICE: memory if tiers.device_is_host else None,
            Tier.HOST: memory,
            Tier.NVME: nvme,
        }
