"""DeepSpeed's five schedules of the learning rate, with its names and defaults.

``zero3.optimizer.schedulers`` has their formulas. A parameter that takes one number for all param groups also accepts a
list with one number per group.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool

from .fields import Count, Elements, Number, Section, whole_number


def _per_group(value: object) -> object:
    numbers = value if isinstance(value, list | tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
            raise ValueError(
                f"a number >= 0 is needed, or a list with one number per param group, not {value!r}"
            )
    return tuple(value) if isinstance(value, list) else value


PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
Rate = Annotated[float, Field(strict=True)]
Shape = Literal["log", "linear"]
Whole = Annotated[int, BeforeValidator(whole_number)]


class SchedulerConfig(Section):
    """Base class: a schedule and its parameters."""

    type: str = Field(description="DeepSpeed's name of the learning rate schedule.")
    params: Section


class _Warmup(Section):
    warmup_num_steps: Elements = Field(default=1000, description="Updates of the warmup; 0 and 1 count as 2.")
    warmup_type: Shape = Field(default="log", description="Shape of the warmup: log or linear.")


class WarmupLRParams(_Warmup):
    """Parameters of WarmupLR."""

    warmup_min_lr: PerGroup = Field(default=0.0, description="Learning rate at the start.")
    warmup_max_lr: PerGroup | None = Field(
        default=None, description="Learning rate after the warmup; null: the optimizer's."
    )


class WarmupDecayLRParams(_Warmup):
    """Parameters of WarmupDecayLR."""

    total_num_steps: Count = Field(description="Updates until the rate is 0.")
    warmup_min_lr: PerGroup = Field(default=0.0, description="Learning rate at the start.")
    warmup_max_lr: PerGroup | None = Field(
        default=0.001, description="Learning rate after the warmup; null: the optimizer's."
    )


class WarmupCosineLRParams(_Warmup):
    """Parameters of WarmupCosineLR."""

    total_num_steps: Count = Field(description="Updates until the end of the cosine.")
    warmup_min_ratio: Number = Field(default=0.0, description="Start, as a fraction of the optimizer's rate.")
    cos_min_ratio: Number = Field(default=0.0001, description="End, as a fraction of the optimizer's rate.")


class OneCycleParams(Section):
    """Parameters of OneCycle."""

    cycle_min_lr: PerGroup = Field(description="Learning rate at both ends of the cycle.")
    cycle_max_lr: PerGroup = Field(description="Learning rate at the peak of the cycle.")
    decay_lr_rate: Number = Field(default=0.0, description="Decay of the rate after the cycle; 0: none.")
    cycle_first_step_size: Annotated[Number, Field(gt=0)] = Field(
        default=2000, description="Updates in the rising half."
    )
    cycle_second_step_size: Number | None = Field(
        default=None, description="Updates in the falling half; null: as in the rising half."
    )
    cycle_first_stair_count: Whole = Field(
        default=0, description="Stairs in the rising half; 0: rise with each update."
    )
    cycle_second_stair_count: Whole | None = Field(
        default=None, description="Stairs in the falling half; null: as in the rising half."
    )
    decay_step_size: Number = Field(
        default=0.0, description="Updates per decay interval after the cycle; 0: no decay."
    )
    cycle_momentum: StrictBool | None = Field(
        default=None,
        description="Cycle the momentum inversely to the rate; null: only betas; true: SGD's momentum too.",
    )
    cycle_min_mom: PerGroup = Field(default=0.8, description="Momentum at the peak of the cycle.")
    cycle_max_mom: PerGroup = Field(default=0.9, description="Momentum at both ends of the cycle.")
    decay_mom_rate: Rate = Field(default=0.0, description="Growth of the momentum after the cycle; 0: none.")


class LRRangeTestParams(Section):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: PerGroup = Field(default=1e-3, description="Learning rate at the start.")
    lr_range_test_step_size: Count = Field(default=2000, description="Updates per interval.")
    lr_range_test_step_rate: Number = Field(
        default=1.0, description="Growth per interval, as a fraction of the start."
    )
    lr_range_test_staircase: StrictBool = Field(
        default=False, description="Grow once per interval, not with each update."
    )


class WarmupLRConfig(SchedulerConfig):
    """Rises from warmup_min_lr to warmup_max_lr, then stays constant."""

    type: Literal["WarmupLR"] = Field(description="WarmupLR.")
    params: WarmupLRParams = Field(default=WarmupLRParams(), description="Parameters of the schedule.")


class WarmupDecayLRConfig(SchedulerConfig):
    """WarmupLR, then a linear decay to 0."""

    type: Literal["WarmupDecayLR"] = Field(description="WarmupDecayLR.")
    params: WarmupDecayLRParams = Field(description="Parameters of the schedule.")


class WarmupCosineLRConfig(SchedulerConfig):
    """A fraction of the optimizer's rate: a warmup, then a cosine decay."""

    type: Literal["WarmupCosineLR"] = Field(description="WarmupCosineLR.")
    params: WarmupCosineLRParams = Field(description="Parameters of the schedule.")


class OneCycleConfig(SchedulerConfig):
    """The rate rises, falls, then decays slowly; the momentum moves inversely."""

    type: Literal["OneCycle"] = Field(description="OneCycle.")
    params: OneCycleParams = Field(description="Parameters of the schedule.")


class LRRangeTestConfig(SchedulerConfig):
    """The rate rises without limit, to find the highest usable rate."""

    type: Literal["LRRangeTest"] = Field(description="LRRangeTest.")
    params: LRRangeTestParams = Field(default=LRRangeTestParams(), description="Parameters of the schedule.")


Schedule = Annotated[
    WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig | OneCycleConfig | LRRangeTestConfig,
    Field(discriminator="type"),
]

PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
"""The parameters of each schedule."""
