"""What the planner says of a side, without an engine: the plan of a model on meta, and the forecast at given rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from frame.reference_model import Model
from frame.side import SideError, Spec
from step.ours import configuration

import tiering
from tiering.config import ds_config
from tiering.config.training import TieringConfig
from tiering.placement.plan import Plan
from tiering.planning import measure
from tiering.planning.forecast import Forecast, forecast
from tiering.planning.rates import Rates
from zero3.observe import device_rates

CPU = torch.device("cpu")


def settled(spec: Spec, directory: Path) -> TieringConfig:
    """The configuration of a side that has its state in ``directory``, if anywhere."""
    settings: dict[str, Any] = {"directory": str(directory) if spec.on_disk else None, **spec.settings}
    config, _ = ds_config.load(configuration(settings), world_size=1)
    return config


def plan_of(spec: Spec, directory: Path) -> Plan:
    """The plan of a side, from its configuration and its model's shapes. Raises SideError if there is none."""
    with torch.device("meta"):
        module = spec.model.build()
    answer = tiering.plan_for(model=module, config=settled(spec, directory))
    if answer.plan is None:
        raise SideError(f"{spec.name} does not fit: {answer.refusal}")
    return answer.plan


@dataclass(frozen=True, slots=True)
class Machine:
    """Measures this machine as ``plan`` would use it."""

    plan: Plan
    directories: Sequence[Path]
    model: Model
    seconds: float
    file_bytes: int

    def measure(self) -> Rates:
        """The rates now."""
        load = self.plan.workload
        device = device_rates.measure(
            CPU, tokens=self.model.sequence, width=self.model.width, seconds=self.seconds
        )
        return device.updated(
            measure.measure(
                self.directories,
                state_format=load.state_format,
                state_tensors=load.state_tensors,
                grad_itemsize=load.grad_itemsize,
                seconds=self.seconds,
                file_bytes=self.file_bytes,
            )
        )

    def forecast(self, rates: Rates) -> Forecast:
        return forecast(self.plan, rates, tokens=self.model.sequence)
