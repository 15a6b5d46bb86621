"""The process of a side that saves: it builds its state once, and then saves, loads and trains when called.

Peak memory is VmHWM, of each call anew.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

from frame.child import serve
from frame.process import disk_traffic, forget_peak, resident
from frame.reference_model import Model
from frame.training import SETTLE, baseline, leave_group, rank


class Saver:
    """A side: a state, and how it is saved and loaded."""

    def facts(self) -> dict[str, Any]:
        """What is known once it is built: ``about`` and ``parameters``."""
        raise NotImplementedError

    def room(self) -> int | None:
        """Bytes that it may take beside the baseline, None if it promises nothing."""
        return None

    def save(self, directory: str) -> None:
        """Returns when the disk has it."""
        raise NotImplementedError

    def load(self, directory: str, **options: Any) -> None:
        """Returns when the state is what was saved."""
        raise NotImplementedError

    def change(self) -> None:
        """Change the state, so that a load that does nothing is seen."""
        raise NotImplementedError

    def fingerprint(self) -> list[float]:
        """A figure of each kind of tensor in the state."""
        raise NotImplementedError

    def settle(self) -> float:
        """Wait for transfers in flight."""
        return time.perf_counter()

    def train(self, batches: Any, steps: int, directory: str, mode: str) -> dict[str, float]:
        """``steps`` steps with a save before them, in the foreground, in the background or left out ("")."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def close(self) -> None:
        """Release what it holds."""


def give_back() -> None:
    """Return freed memory to the system: malloc would keep it, and the next peak would hide in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Saving:
    """The worker of a side that saves. Raises RuntimeError if what was loaded is not what was saved."""

    def __init__(
        self,
        make: Callable[[Model, dict[str, Any]], Saver],
        threads: int,
        model: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        self._baseline = baseline(threads)
        self._saver = make(Model(**model), settings)
        self._batches = Model(**model).batches(rank())
        self._saved: list[float] = []
        give_back()

    def facts(self) -> dict[str, Any]:
        return {**self._saver.facts(), "baseline": self._baseline, "peak": resident("VmHWM")}

    def train(self, steps: int, save: str, directory: str) -> dict[str, Any]:
        reading = self._clocked(lambda: self._saver.train(self._batches, steps, directory, save))
        give_back()
        return reading

    def save(self, directory: str) -> dict[str, Any]:
        reading = self._clocked(lambda: self._saver.save(directory))
        self._saved = self._saver.fingerprint()
        give_back()
        return reading

    def change(self) -> None:
        self._saver.change()
        if self._saver.fingerprint() == self._saved:
            raise RuntimeError("the state did not change, and a load could not be seen")
        give_back()

    def load(self, directory: str, options: dict[str, Any]) -> dict[str, Any]:
        reading = self._clocked(lambda: self._saver.load(directory, **options))
        if (loaded := self._saver.fingerprint()) != self._saved:
            raise RuntimeError(f"what was loaded ({loaded}) is not what was saved ({self._saved})")
        give_back()
        return reading

    def close(self) -> None:
        self._saver.close()
        leave_group()

    def _clocked(self, act: Callable[[], dict[str, float] | None]) -> dict[str, Any]:
        """Seconds, memory and bytes of ``act``; what it returns, if anything, as ``figures``."""
        self._saver.settle()
        time.sleep(SETTLE)
        forget_peak()
        before, moved = resident("VmRSS"), disk_traffic()
        began = time.perf_counter()
        report = act()
        seconds = time.perf_counter() - began
        now, room = disk_traffic(), self._saver.room()
        return {
            "seconds": seconds,
            "before": before,
            "peak": resident("VmHWM"),
            "ceiling": None if room is None else self._baseline + room,
            "disk": [now[0] - moved[0], now[1] - moved[1]],
            "figures": report or {},
        }


def serve_saver(make: Callable[[Model, dict[str, Any]], Saver]) -> None:
    """The main program of a module whose saver ``make`` builds."""
    serve(lambda **arguments: Saving(make, **arguments))
