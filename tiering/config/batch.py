"""The three batch numbers of a configuration, of which two determine the third."""

from __future__ import annotations

from typing import NamedTuple

from tiering._text import counted


class Batch(NamedTuple):
    """Samples per optimizer step; samples per rank and forward pass; forward passes per step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int = 1
) -> Batch:
    """Completes the three batch numbers, by ``train = micro * accumulation * world_size``.

    Two determine the third; ``train`` or ``micro`` alone implies accumulation 1. Raises ``ValueError`` with the
    numbers if they contradict each other, do not divide, are not positive, or do not suffice.
    """
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    numbers = dict(zip(names, (train, micro, accumulation), strict=True))
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, not {value}")
    if train is None and micro is None:
        raise ValueError("set train_batch_size or train_micro_batch_size_per_gpu; both are missing")
    if train is None:
        assert micro is not None
        return Batch(micro * (accumulation or 1) * world_size, micro, accumulation or 1)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    product = micro * accumulation * world_size
    if train != product:
        settings = ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
        if None in numbers.values():
            divisor = " x ".join(
                f"{name} {value}" for name, value in list(numbers.items())[1:] if value is not None
            )
            reason = f"{train} cannot be divided by {divisor + ' x ' if divisor else ''}{counted(world_size, 'rank')}"
        else:
            reason = f"{micro} x {accumulation} x {counted(world_size, 'rank')} is {product}; set only two of the three"
        raise ValueError(
            f"{settings} with world size {world_size} do not agree: {reason} (train_batch_size is"
            " train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size)"
        )
    return Batch(train, micro, accumulation)
