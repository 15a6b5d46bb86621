"""How the learning rate changes: DeepSpeed's five schedules, with its own names and defaults.

``zero3.optimizer.schedulers`` says what they compute. A rate that takes one number for all param groups also takes a
list of one number per group.
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
                f"a number of 0 or more is needed, or a list of one per param group, not {value!r}"
            )
    return tuple(value) if isinstance(value, list) else value


PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
Rate = Annotated[float, Field(strict=True)]
Shape = Literal["log", "linear"]
Whole = Annotated[int, BeforeValidator(whole_number)]


class SchedulerConfig(Section):
    """A schedule and its parameters; each schedule below is one of these."""

    type: str = Field(description="Schedule of the learning rate, by DeepSpeed's name.")
    params: Section


class _Warmup(Section):
    warmup_num_steps: Elements = Field(
        default=1000, description="Updates until the rate is reached; 0 and 1 count as 2."
    )
    warmup_type: Shape = Field(default="log", description="How the rate rises: log or linear.")


class WarmupLRParams(_Warmup):
    """Of WarmupLR."""

    warmup_min_lr: PerGroup = Field(default=0.0, description="Learning rate at the start.")
    warmup_max_lr: PerGroup | None = Field(
        default=None, description="Learning rate after the warmup; null is the optimizer's own."
    )


class WarmupDecayLRParams(_Warmup):
    """Of WarmupDecayLR."""

    total_num_steps: Count = Field(description="Updates until the rate is 0.")
    warmup_min_lr: PerGroup = Field(default=0.0, description="Learning rate at the start.")
    warmup_max_lr: PerGroup | None = Field(
        default=0.001, description="Learning rate after the warmup; null is the optimizer's own."
    )


class WarmupCosineLRParams(_Warmup):
    """Of WarmupCosineLR."""

    total_num_steps: Count = Field(description="Updates until the end of the cosine.")
    warmup_min_ratio: Number = Field(default=0.0, description="Share of the optimizer's rate at the start.")
    cos_min_ratio: Number = Field(default=0.0001, description="Share of the optimizer's rate at the end.")


class OneCycleParams(Section):
    """Of OneCycle."""

    cycle_min_lr: PerGroup = Field(description="Learning rate at both ends of the cycle.")
    cycle_max_lr: PerGroup = Field(description="Learning rate at the peak of the cycle.")
    decay_lr_rate: Number = Field(default=0.0, description="Decay of the rate after the cycle; 0 is none.")
    cycle_first_step_size: Annotated[Number, Field(gt=0)] = Field(
        default=2000, description="Updates of the rising half."
    )
    cycle_second_step_size: Number | None = Field(
        default=None, description="Updates of the falling half; null is as many as of the rising one."
    )
    cycle_first_stair_count: Whole = Field(
        default=0, description="Stairs of the rising half; 0 rises with each update."
    )
    cycle_second_stair_count: Whole | None = Field(
        default=None, description="Stairs of the falling half; null is as many as of the rising one."
    )
    decay_step_size: Number = Field(
        default=0.0, description="Updates per interval of decay after the cycle; 0 is no decay."
    )
    cycle_momentum: StrictBool | None = Field(
        default=None,
        description="Cycle the momentum against the rate; null does so with betas, and true with SGD's momentum too.",
    )
    cycle_min_mom: PerGroup = Field(default=0.8, description="Momentum at the peak of the cycle.")
    cycle_max_mom: PerGroup = Field(default=0.9, description="Momentum at both ends of the cycle.")
    decay_mom_rate: Rate = Field(
        default=0.0, description="Growth of the momentum after the cycle; 0 is none."
    )


class LRRangeTestParams(Section):
    """Of LRRangeTest."""

    lr_range_test_min_lr: PerGroup = Field(default=1e-3, description="Learning rate at the start.")
    lr_range_test_step_size: Count = Field(default=2000, description="Updates per interval.")
    lr_range_test_step_rate: Number = Field(
        default=1.0, description="Growth per interval, as a share of the start."
    )
    lr_range_test_staircase: StrictBool = Field(
        default=False, description="Grow once per interval, not with each update."
    )


class WarmupLRConfig(SchedulerConfig):
    """From warmup_min_lr to warmup_max_lr, and there it stays."""

    type: Literal["WarmupLR"] = Field(description="WarmupLR.")
    params: WarmupLRParams = Field(default=WarmupLRParams(), description="Parameters of the schedule.")


class WarmupDecayLRConfig(SchedulerConfig):
    """WarmupLR, and then down to 0 in a line."""

    type: Literal["WarmupDecayLR"] = Field(description="WarmupDecayLR.")
    params: WarmupDecayLRParams = Field(description="Parameters of the schedule.")


class WarmupCosineLRConfig(SchedulerConfig):
    """A share of the optimizer's own rate: warmed up, and then down a cosine."""

    type: Literal["WarmupCosineLR"] = Field(description="WarmupCosineLR.")
    params: WarmupCosineLRParams = Field(description="Parameters of the schedule.")


class OneCycleConfig(SchedulerConfig):
    """Up, down, and then a slow decay; the momentum goes the other way."""

    type: Literal["OneCycle"] = Field(description="OneCycle.")
    params: OneCycleParams = Field(description="Parameters of the schedule.")


class LRRangeTestConfig(SchedulerConfig):
    """Up without end, to see which rate the model still bears."""

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
