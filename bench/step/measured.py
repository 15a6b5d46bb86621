"""The run that measures sides, and traces ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.measured import TrainingRun
from frame.side import Side, SideError

from .scale import Scale


@dataclass(slots=True)
class StepRun(TrainingRun[Scale]):
    """With DeepSpeed's interpreter, None without, and the directory for traces of our sides, if they are wanted."""

    peers: Path | None = None
    traces: Path | None = None

    def after_rounds(self, sides: Mapping[str, Side], readings: Mapping[str, Any]) -> None:
        """Trace ours: after the rounds, so that recording takes no part in them."""
        for name, side in sides.items():
            if self.traces is not None and name in readings and side.spec.module == "step.ours":
                path = self.traces / f"{name.replace(' ', '-').replace(',', '')}.json"
                self.say(f"tracing {name} to {path}")
                try:
                    side.trace(path)
                except SideError as error:
                    self.fail(f"trace of {name}", error)
