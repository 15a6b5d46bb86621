"""The native configuration: what the engine reads, already resolved, frozen, without torch.

``ds_config.load`` is the usual way to one of these: it reads a DeepSpeed file, gathers every problem it finds
into one :class:`~tiering.errors.ConfigError` and fills in a :class:`TieringConfig`. Built directly, a wrong
value raises ``pydantic.ValidationError``.

Sizes are bytes, written ``4K``, ``1M``, ``1GiB`` (1024-based) or ``1GB`` (10^9); fields that count elements
say so. What is planned but not done yet is refused with the words "not supported in this version".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    model_validator,
)

ALIGNMENT = 4096
"""Bytes to which O_DIRECT wants address, offset and length aligned."""

_UNITS = {"": 1, "B": 1, "kB": 1000}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_SPELLINGS = {unit.lower(): unit for unit in _UNITS}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(size: float | str) -> int:
    """Bytes in ``size``: a whole number, or text such as ``4K``, ``1.5GiB`` (1024-based) or ``1GB`` (10^9).

    A fraction of a byte is rounded down. Raises ``ValueError`` for negative sizes and unknown units.
    """
    if isinstance(size, str):
        number, unit = _split_size(size)
        value = math.floor(Fraction(number) * _UNITS[unit])
    else:
        value = whole_number(size)
    if value < 0:
        raise ValueError(f"a size cannot be negative: {size!r}")
    return value


def _split_size(text: str) -> tuple[str, str]:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a size is a number with a unit such as '4K', '1GiB' or '1GB', not {text!r}")
    number, unit = match.groups()
    if unit in _UNITS:
        return number, unit
    similar = get_close_matches(unit.lower(), _SPELLINGS, n=1)
    hint = (
        f"did you mean {_SPELLINGS[similar[0]]!r}?" if similar else "use K, M, G, T, KiB ... TiB or KB ... TB"
    )
    raise ValueError(f"unknown unit {unit!r} in size {text!r}; {hint}")


def format_size(size: float) -> str:
    """``size`` bytes as people read them, 1024-based: ``1.50 GiB``."""
    scaled, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(scaled) >= 1024 and len(units) > 1:
        scaled /= 1024
        units.pop(0)
    return f"{scaled:.0f} {units[0]}" if units[0] == "B" else f"{scaled:.2f} {units[0]}"


def whole_number(value: object) -> int:
    """``value`` as int; a whole float counts, as JSON writers say ``1e9``. Raises ``ValueError``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"a whole number is needed, not {value!r}")


def _size_or_auto(value: object) -> int | str:
    return "auto" if value == "auto" else parse_size(value)  # type: ignore[arg-type]


def _paths(value: object) -> object:
    if value is None:
        return ()
    named = (value,) if isinstance(value, str | Path) else value
    if not isinstance(named, list | tuple):
        raise ValueError(f"a directory or a list of directories is needed, not {value!r}")
    if not named:
        raise ValueError("an empty list names no directory; give one or more, or leave it out")
    if "" in named:
        raise ValueError("an empty path names no directory; '.' is the current one")
    return tuple(Path(path).expanduser() if isinstance(path, str) else path for path in named)


def _named_once(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{str(path)!r} is named twice; name each directory once")
    return paths


def _not_yet(*planned: object, instead: str) -> Callable[[object], object]:
    """A validator that refuses values this version does not do yet, and says what to use."""

    def check(value: object) -> object:
        if value in planned:
            raise ValueError(f"{value!r} is not supported in this version; {instead}")
        return value

    return check


def _one_process(world_size: int) -> int:
    if world_size > 1:
        raise ValueError(f"world size {world_size} is not supported in this version; run one process")
    return world_size


Count = Annotated[int, BeforeValidator(whole_number), Field(gt=0)]
Elements = Annotated[int, BeforeValidator(whole_number), Field(ge=0)]
Number = Annotated[float, Field(strict=True, ge=0)]
Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
Budget = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
AlwaysOff = Annotated[StrictBool, AfterValidator(_not_yet(True, instead="leave it false"))]

UpdateRule = Annotated[
    Literal["AdamW", "Adam"],
    BeforeValidator(_not_yet("Lion", "Adagrad", "SGD", "Lamb", "Muon", "OneBitAdam", instead="use 'AdamW'")),
]
Stage = Annotated[
    Literal[3],
    BeforeValidator(_not_yet(0, 1, 2, instead="use stage 3; with one process it partitions nothing")),
    BeforeValidator(whole_number),
]
OneProcess = Annotated[Literal[1], BeforeValidator(_one_process), BeforeValidator(whole_number)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_paths), AfterValidator(_named_once)]
Precision = Annotated[
    Literal["bf16", "fp32"],
    BeforeValidator(_not_yet("fp16", instead='use bf16: {"bf16": {"enabled": true}}')),
]
StateFormat = Annotated[
    Literal["fp32"], BeforeValidator(_not_yet("split", "bf16", "split+bf16", instead="use 'fp32'"))
]
GradDtype = Annotated[
    Literal["auto", "fp32", "bf16"],
    BeforeValidator(_not_yet("fp16", instead="use 'auto', 'fp32' or 'bf16'")),
]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OptimizerConfig(_Section):
    """Which update rule, and its numbers. Defaults are DeepSpeed's."""

    type: UpdateRule = Field(default="AdamW", description="Update rule: AdamW or Adam; see decoupled.")
    lr: Number = Field(default=1e-3, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay of first and second moment.")
    eps: Number = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: Number = Field(default=0.0, description="Weight decay; 0 turns it off.")
    decoupled: StrictBool = Field(
        default=True, description="Decay weights directly, not through the gradient."
    )

    @model_validator(mode="after")
    def _adamw_is_decoupled(self) -> Self:
        if self.type == "AdamW" and not self.decoupled:
            raise ValueError("AdamW decays weights directly; for decay through the gradient use type 'Adam'")
        return self


class OffloadConfig(_Section):
    """Where a kind of state may live beside the device."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Slowest tier this state may live on: none, cpu (host memory) or nvme."
    )
    nvme_path: Directories = Field(
        default=(),
        description="Directory of the swap space, or a list of them to stripe over, for device nvme.",
    )

    @model_validator(mode="after")
    def _nvme_has_a_path(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("device 'nvme' needs nvme_path, the directory that holds the swap space")
        return self


class ZeroConfig(_Section):
    """Partitioning and movement of parameters, gradients and optimizer state."""

    stage: Stage = Field(default=3, description="3 partitions parameters, gradients and optimizer state.")
    offload_param: OffloadConfig = Field(
        default=OffloadConfig(), description="Home of the compute parameters."
    )
    offload_optimizer: OffloadConfig = Field(
        default=OffloadConfig(), description="Home of master, exp_avg and exp_avg_sq."
    )
    sub_group_size: Count = Field(default=10**9, description="Most elements of state stepped together.")
    prefetch_elements: Elements = Field(
        default=5 * 10**7, description="Most elements fetched ahead of their use."
    )
    persistence_threshold: Elements = Field(
        default=10**5, description="Parameters with fewer elements stay on the device."
    )


class IoConfig(_Section):
    """How bytes travel between memory and NVMe."""

    engine: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        default="auto", description="I/O backend; auto takes the first that works here."
    )
    block_size: Annotated[Bytes, Field(gt=0, multiple_of=ALIGNMENT)] = Field(
        default=1 << 20,
        description="Largest single request in bytes, a multiple of 4096; longer ones are split.",
    )
    queue_depth: Annotated[Count, Field(le=512)] = Field(
        default=16, description="Requests in flight per path."
    )
    registered: StrictBool = Field(default=True, description="Register buffers where the backend can.")
    allow_memory_file_system: StrictBool = Field(
        default=False, description="Let nvme_path be on tmpfs, which takes the memory that swapping saves."
    )


class TelemetryConfig(_Section):
    """What the run publishes about itself."""

    enabled: StrictBool = Field(default=True, description="Publish a telemetry page that the sidecar reads.")
    dir: Path | None = Field(
        default=None, description="Directory of the page; null is the user's run directory."
    )


class TiersConfig(_Section):
    """Budgets and policies of the tiers: the ``tiering`` block of a configuration file."""

    device_budget: Budget = Field(default="auto", description="Most bytes the engine may own on the device.")
    host_budget: Budget = Field(default="auto", description="Most bytes the engine may own in host memory.")
    nvme_budget: Budget = Field(default="auto", description="Most bytes of swap space.")
    cache_in_host: StrictBool = Field(
        default=True, description="Keep in host memory what fits of state named nvme."
    )
    state: StateFormat = Field(default="fp32", description="Format of the optimizer state.")
    grad_accum_dtype: GradDtype = Field(
        default="auto",
        description="Gradient accumulation; auto: compute dtype for one micro-batch, else fp32.",
    )
    step_in_backward: AlwaysOff = Field(default=False, description="Step groups while backward still runs.")
    verify: StrictBool = Field(
        default=False, description="Checksum what is swapped; costs host memory, 1/1024 of what is on NVMe."
    )
    io: IoConfig = Field(default=IoConfig(), description="How bytes travel between memory and NVMe.")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="What the run publishes.")
    run_name: RunName | None = Field(
        default=None, description="Name in telemetry: letters, digits, '.', '_' and '-', at most 64."
    )


class TieringConfig(_Section):
    """Everything the engine needs to know, resolved."""

    train_batch_size: Count = Field(description="Samples per optimizer step over all ranks.")
    micro_batch_size: Count = Field(description="Samples per forward pass and rank.")
    gradient_accumulation_steps: Count = Field(default=1, description="Forward and backward passes per step.")
    world_size: OneProcess = Field(default=1, description="Ranks that train together.")
    precision: Precision = Field(default="fp32", description="Compute dtype of parameters and activations.")
    gradient_clipping: Number = Field(default=0.0, description="Largest global gradient norm; 0 is off.")
    steps_per_print: Count | None = Field(default=None, description="Log every so many steps; null is never.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Update rule.")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="Partitioning and movement.")
    tiering: TiersConfig = Field(default=TiersConfig(), description="Budgets and policies of the tiers.")

    @model_validator(mode="after")
    def _batch_sizes_agree(self) -> Self:
        resolve_batch(
            self.train_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, self.world_size
        )
        return self


class Batch(NamedTuple):
    """Samples per optimizer step; samples per forward pass and rank; passes per step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int = 1
) -> Batch:
    """The three batch numbers from those given, by ``train = micro * accumulation * world``.

    Two determine the third; ``train`` or ``micro`` alone implies accumulation 1. Raises ``ValueError`` naming
    the numbers when they contradict each other, do not divide, are not positive, or do not suffice.
    """
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    given = dict(zip(names, (train, micro, accumulation), strict=True))
    for name, value in given.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, not {value}")
    if train is None and micro is None:
        raise ValueError("give train_batch_size or train_micro_batch_size_per_gpu; neither is there")
    if train is None:
        assert micro is not None
        return Batch(micro * (accumulation or 1) * world_size, micro, accumulation or 1)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if train != micro * accumulation * world_size:
        told = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ValueError(
            f"{told} with world size {world_size} do not agree: train_batch_size must equal "
            "train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size"
        )
    return Batch(train, micro, accumulation)
