"""DeepSpeed's learning rate schedules, as torch schedulers over any torch optimizer.

Each schedule is a function of one number: the count of updates, from -1 before the first one, as DeepSpeed counts
(``last_batch_iteration``; torch's ``last_epoch`` is one more). The constructor of the schedule sets the rates of the
first update. ``step()`` after update number n, counted from 0, sets ``rates(n)``. The values are those of DeepSpeed
0.19.8 to the bit, including its oddities; a comment names each oddity.

An option that takes one number also takes a list with one number per param group. The state of a schedule is its count
and the initial rates of the optimizer. Everything else comes from the configuration, so a resumed run follows a changed
configuration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tiering.config.training import SchedulerConfig
from tiering.errors import ConfigError

log = logging.getLogger(__name__)

PerGroup = float | Sequence[float]
Rates = list[float | Tensor]


def from_config(config: SchedulerConfig, optimizer: Optimizer) -> Schedule:
    """The schedule that ``config`` describes, for ``optimizer``. It sets the first rates at once.

    Raises ConfigError when a list has another length than there are param groups.
    """
    return SCHEDULES[config.type](optimizer, **config.params.model_dump())


class Schedule(LRScheduler):
    """A learning rate per param group as a function of the number of updates."""

    def rates(self, iteration: int) -> Rates:
        """The learning rates after update number ``iteration``; before any, it is -1."""
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates for the update after update ``batch_iteration`` (default: the next one)."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def get_lr(self) -> Rates:
        """The learning rates for the next update."""
        return self.rates(self.last_epoch - 1)

    def state_dict(self) -> dict[str, Any]:
        """How far the schedule is: ``last_batch_iteration``, as in DeepSpeed, and ``base_lrs``."""
        return {"last_batch_iteration": self.last_epoch - 1, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``, which may be DeepSpeed's, and set the rates of that point."""
        self.base_lrs = list(state_dict.get("base_lrs", self.base_lrs))
        self.last_epoch = state_dict["last_batch_iteration"]
        self._step_count = 0  # as torch does for its own first step, which follows no update either
        self.step()
        self._step_count = self.last_epoch + 1


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` up to ``warmup_max_lr`` over ``warmup_num_steps`` updates, and there it stays.

    ``warmup_type`` is "log" or "linear". Without ``warmup_max_lr`` the rates of the optimizer are the goal.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self._max_lrs = (
            None if warmup_max_lr is None else _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        )
        super().__init__(optimizer)

    def rates(self, iteration: int) -> Rates:
        if iteration < 0:
            return list(self._min_lrs)
        gamma = self._gamma(iteration)
        # base_lrs are read here, not at the start: a state that is loaded brings its own
        goals = self.base_lrs if self._max_lrs is None else self._max_lrs
        return [low + (high - low) * gamma for low, high in zip(self._min_lrs, goals, strict=True)]

    def _gamma(self, iteration: int) -> float:
        """The share of the way up."""
        return self._warmup.share(iteration) if iteration < self._warmup.steps else 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, and then in a line down to ``warmup_min_lr``, which is reached after ``total_num_steps`` updates."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self._total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        self._warmup.compare(total_num_steps)

    def _gamma(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            return self._warmup.share(iteration)
        return max(0.0, (self._total - iteration) / max(1, self._total - self._warmup.steps))


class WarmupCosineLR(Schedule):
    """The optimizer's own rates, times a ratio that warms up to 1 and then falls along a cosine.

    It rises from ``warmup_min_ratio`` and falls to ``cos_min_ratio`` until ``total_num_steps``, and there it stays.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self._total = total_num_steps
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._warmup_min_ratio = warmup_min_ratio
        self._cos_min_ratio = cos_min_ratio
        super().__init__(optimizer)
        self._warmup.compare(total_num_steps)

    def rates(self, iteration: int) -> Rates:
        if iteration < 0:
            return [0.0 for _ in self.base_lrs]  # whatever warmup_min_ratio says
        ratio = self._ratio(iteration)
        return [rate * ratio for rate in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            low = self._warmup_min_ratio
            return low + self._warmup.share(iteration) * (1.0 - low)
        # one update further than WarmupDecayLR is at the same iteration
        done = min(1.0, (iteration - self._warmup.steps + 1) / max(1, self._total - self._warmup.steps))
        low = self._cos_min_ratio
        return max(0.0, low + (1.0 - low) * ((1 + math.cos(math.pi * done)) / 2))


class LRRangeTest(Schedule):
    """Up in a line without end, to see which rate the model still bears (Smith 2018, arXiv:1803.09820).

    Every ``lr_range_test_step_size`` updates add ``lr_range_test_step_rate`` times the first rate; with
    ``lr_range_test_staircase`` at once, else bit by bit.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        _positive("lr_range_test_step_size", lr_range_test_step_size)
        self._min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self._step_size = lr_range_test_step_size
        self._step_rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)

    def rates(self, iteration: int) -> Rates:
        intervals = (iteration + 1) / self._step_size
        growth = 1 + self._step_rate * (math.floor(intervals) if self._staircase else intervals)
        return [low * growth for low in self._min_lrs]


class OneCycle(Schedule):
    """One cycle from ``cycle_min_lr`` to ``cycle_max_lr`` and back, and then a decay below it (arXiv:1803.09820).

    The halves take ``cycle_first_step_size`` and ``cycle_second_step_size`` updates (None: as many), in as many
    stairs as the stair counts say (0: one per update). After the cycle the rate is ``cycle_min_lr`` divided by
    1 + ``decay_lr_rate`` per ``decay_step_size`` updates; 0 of either is no decay.

    The momentum changes inversely, from ``cycle_max_mom`` to ``cycle_min_mom`` and back, and is then multiplied by
    1 + ``decay_mom_rate`` per ``decay_step_size`` updates. With ``cycle_momentum`` None, DeepSpeed's default, it is the
    first beta of the param groups, the second beta becomes 0.99, and an optimizer without betas keeps its momentum.
    True also cycles the momentum of an optimizer such as SGD, if it has any; False cycles none.
    """

    # The signature is that of DeepSpeed: its parameters are the keys of the configuration.
    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool | None = None,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self._cycle = _Cycle(
            cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
        )
        self._min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self._max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self._max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self._decay_step_size = decay_step_size
        self._decay_lr_rate = decay_lr_rate
        self._decay_mom_rate = decay_mom_rate
        self._cycled = (
            "" if cycle_momentum is False else _momentum_of(optimizer, cycles_momentum=bool(cycle_momentum))
        )
        super().__init__(optimizer)

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the rates and the momentum for the update after update ``batch_iteration``."""
        super().step(batch_iteration)
        for group, momentum in zip(
            self.optimizer.param_groups, self.momenta(self.last_epoch - 1), strict=True
        ):
            if self._cycled == "betas":
                group["betas"] = (momentum, 0.99)
            elif self._cycled:
                group[self._cycled] = momentum

    def rates(self, iteration: int) -> Rates:
        if iteration < self._cycle.size:
            height = self._cycle.height(iteration)
            return [
                low + (high - low) * height for low, high in zip(self._min_lrs, self._max_lrs, strict=True)
            ]
        factor = self._after_cycle(iteration, self._decay_lr_rate)
        return [low / factor for low in self._min_lrs]

    def momenta(self, iteration: int) -> list[float]:
        """The momentum per param group after update number ``iteration``."""
        if iteration < 0:
            return list(self._min_moms)  # although the rate starts at its lowest
        if iteration < self._cycle.size:
            height = self._cycle.height(iteration)
            return [
                high - (high - low) * height for low, high in zip(self._min_moms, self._max_moms, strict=True)
            ]
        factor = self._after_cycle(iteration, self._decay_mom_rate)
        return [high * factor for high in self._max_moms]

    def _after_cycle(self, iteration: int, rate: float) -> float:
        if not self._decay_step_size:
            return 1.0
        return 1 + rate * ((iteration - self._cycle.size + 1) / self._decay_step_size)


class _Warmup:
    """A share that rises from 0 at iteration 0 to 1, along a logarithm or a line."""

    def __init__(self, steps: int, shape: str) -> None:
        if not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"warmup_num_steps must be a whole number of 0 or more, not {steps!r}")
        if shape not in ("log", "linear"):
            raise ConfigError(f"warmup_type must be 'log' or 'linear', not {shape!r}")
        self.steps = max(2, steps)
        self._shape = shape

    def share(self, iteration: int) -> float:
        if self._shape == "linear":
            return iteration / self.steps
        return 1.0 / math.log(self.steps) * math.log(iteration + 1)

    def compare(self, total: int) -> None:
        if total < self.steps:
            log.warning("the schedule ends after %d updates, before its warmup of %d", total, self.steps)


class _Cycle:
    """A height that rises from 0 to 1 and falls back to 0, by update or in stairs."""

    def __init__(
        self, first: float, second: float | None, first_stairs: int, second_stairs: int | None
    ) -> None:
        self._first = float(first)
        self._second = self._first if second is None else float(second)
        if self._first <= 0 or self._second < 0:
            raise ConfigError(
                f"a cycle needs cycle_first_step_size above 0 and cycle_second_step_size of 0 or more,"
                f" not {first} and {second}"
            )
        self._first_stairs = first_stairs
        self._second_stairs = first_stairs if second_stairs is None else second_stairs
        self.size = self._first + self._second

    def height(self, iteration: int) -> float:
        # A cycle begins with the update after the last one of the previous cycle.
        whole = 1 + (iteration + 1) / self.size
        place, peak = whole - math.floor(whole), self._first / self.size
        rising = place <= peak
        stairs = self._first_stairs if rising else self._second_stairs
        if stairs > 0:
            # counted from whole updates, which do not miss a stair by rounding
            updates = (iteration + 1) % self.size
            rising = updates <= self._first
            steps = (
                updates * stairs / self._first if rising else (self.size - updates) * stairs / self._second
            )
            return math.floor(steps) / stairs
        return place / peak if rising else (place - 1) / (peak - 1)


def _momentum_of(optimizer: Optimizer, *, cycles_momentum: bool) -> str:
    """The option of the param groups that OneCycle cycles, or ""."""
    if all("betas" in group for group in optimizer.param_groups):
        return "betas"
    if cycles_momentum and all(group.get("momentum") for group in optimizer.param_groups):
        return "momentum"
    log.warning(
        "OneCycle leaves the momentum as it is: %s has no betas%s",
        type(optimizer).__name__,
        " and no momentum" if cycles_momentum else "; cycle_momentum true cycles a momentum above 0 too",
    )
    return ""


def _per_group(optimizer: Optimizer, name: str, values: PerGroup) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(values, Sequence):
        return [values] * groups
    if len(values) != groups:
        raise ConfigError(
            f"scheduler.params.{name} lists {len(values)} values, but the optimizer has {groups} param groups;"
            " give one number, or one per group"
        )
    return list(values)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule
    for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""The schedules by their names in a configuration file."""
