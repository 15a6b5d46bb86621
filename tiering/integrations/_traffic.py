"""Bytes, bandwidth and stall of an engine between two log lines of a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiering.telemetry import Snapshot

_GB = 1e9


class Traffic:
    """Figures of this rank since the last call, by name, for the logs of a trainer. ``snapshot`` reads the engine's."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._totals = _totals(snapshot())
        self._time = time.monotonic()

    def since_last(self) -> dict[str, float]:
        """GB read and written, GB/s of both together, and seconds of stall, since the last call.

        "nvme_read_gb", "nvme_write_gb" and "nvme_gb_per_s" are there if the engine has NVMe paths, "h2d_gb", "d2h_gb"
        and "link_gb_per_s" if it has a GPU; "stall_s" is always there. 1 GB is 10^9 bytes.
        """
        before, self._totals = self._totals, _totals(self._snapshot())
        start, self._time = self._time, time.monotonic()
        elapsed = max(self._time - start, 1e-9)
        moved = {name: self._totals[name] - before.get(name, 0.0) for name in self._totals}
        figures = {"stall_s": moved.pop("stall_s")}
        for place, names in _NAMES.items():
            if names[0] in moved:
                figures |= {name: moved[name] / _GB for name in names}
                figures[f"{place}_gb_per_s"] = sum(moved[name] for name in names) / elapsed / _GB
        return figures


_NAMES = {"nvme": ("nvme_read_gb", "nvme_write_gb"), "link": ("h2d_gb", "d2h_gb")}
"""The names of the figures of both directions."""


def _totals(snapshot: Snapshot) -> dict[str, float]:
    """Bytes in both directions of each place that the engine has, and seconds of stall, since the start."""
    totals = {"stall_s": sum(snapshot.stalls.values())}
    if snapshot.io:
        totals["nvme_read_gb"] = float(sum(path.read.bytes for path in snapshot.io))
        totals["nvme_write_gb"] = float(sum(path.written.bytes for path in snapshot.io))
    if snapshot.link is not None:
        totals["h2d_gb"] = float(snapshot.link.h2d.bytes)
        totals["d2h_gb"] = float(snapshot.link.d2h.bytes)
    return totals
