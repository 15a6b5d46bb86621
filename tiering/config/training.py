"""The native configuration: what the engine reads, already resolved, frozen, without torch.

``ds_config.load`` is the usual way to one of these: it reads a DeepSpeed file, gathers every problem it finds
into one :class:`~tiering.errors.ConfigError` and fills in a :class:`TieringConfig`. Built directly, a wrong
value raises ``pydantic.ValidationError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from tiering.text import counted

from .fields import ALIGNMENT, Bytes, Count, Elements, Number, Section, format_size, parse_size, whole_number
from .monitor import MonitorConfig
from .optimizer import OptimizerConfig
from .scheduler import Schedule, SchedulerConfig

__all__ = [
    "ALIGNMENT",
    "Batch",
    "DistributedConfig",
    "IoConfig",
    "LeafModulesConfig",
    "LossScaleConfig",
    "MonitorConfig",
    "OffloadConfig",
    "OffloadOptimizerConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TelemetryConfig",
    "TieringConfig",
    "TiersConfig",
    "ZeroConfig",
    "format_size",
    "parse_size",
    "resolve_batch",
    "whole_number",
]


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
    return tuple(_at_home(path) for path in named)


def _at_home(path: object) -> object:
    try:
        return Path(path).expanduser() if isinstance(path, str) else path
    except RuntimeError:  # nobody has that name, or whoever runs this has no home
        raise ValueError(f"no home directory is known for the ~ in {path!r}; write it out") from None


def _named_once(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{str(path)!r} is named twice; name each directory once")
    return paths


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Budget = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]

Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole_number)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_paths), AfterValidator(_named_once)]
Precision = Literal["bf16", "fp16", "fp32"]
StateFormat = Literal["fp32", "split", "bf16", "split+bf16"]
GradDtype = Literal["auto", "fp32", "bf16", "fp16"]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)]
Seconds = Annotated[Number, Field(gt=0)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class OffloadConfig(Section):
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

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """Those of nvme_path, resolved; none for another device."""
        return tuple(path.resolve() for path in self.nvme_path) if self.device == "nvme" else ()


class OffloadOptimizerConfig(OffloadConfig):
    """Where the optimizer state may live beside the device, and how much of it."""

    ratio: Share = Field(default=1.0, description="Share of the optimizer state that leaves the device.")


class LeafModulesConfig(Section):
    """Modules whose parameters move together, whatever is called inside: experts that are routed per rank, say."""

    classes: Names = Field(default=(), description="Class names, with or without their Python module.")
    names: Names = Field(default=(), description="Names of modules in the model.")
    name_suffixes: Names = Field(default=(), description="Ends of names of modules in the model.")


class ZeroConfig(Section):
    """Partitioning and movement of parameters, gradients and optimizer state."""

    stage: Stage = Field(
        default=0,
        description="0 partitions nothing, 1 the optimizer state, 2 also gradients, 3 also parameters.",
    )
    offload_param: OffloadConfig = Field(
        default=OffloadConfig(), description="Home of the compute parameters."
    )
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="Home of masters and optimizer state."
    )
    sub_group_size: Count = Field(default=10**9, description="Most elements of state stepped together.")
    prefetch_elements: Elements = Field(
        default=5 * 10**7,
        description="Most elements fetched ahead of their use, but room for the next group; 0: none.",
    )
    persistence_threshold: Elements = Field(
        default=10**5, description="Parameters with fewer elements stay on the device."
    )
    leaf_module: LeafModulesConfig = Field(
        default=LeafModulesConfig(), description="Modules whose parameters move together."
    )

    @model_validator(mode="after")
    def _the_stage_partitions_what_is_offloaded(self) -> Self:
        if self.offload_param.device != "none" and self.stage < 3:
            raise ValueError(
                f"stage {self.stage} keeps parameters on the device, so offload_param cannot move them:"
                " use stage 3, or remove offload_param"
            )
        if self.offload_optimizer.device != "none" and self.stage < 1:
            raise ValueError(
                "stage 0 keeps optimizer state on the device, so offload_optimizer cannot move it:"
                " use stage 1, 2 or 3, or remove offload_optimizer"
            )
        return self

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """Those of both sections, each once."""
        return tuple(
            dict.fromkeys((*self.offload_param.swap_directories, *self.offload_optimizer.swap_directories))
        )


class LossScaleConfig(Section):
    """The factor of the loss in fp16, which keeps small gradients from vanishing."""

    scale: Number = Field(default=0.0, description="Fixed factor, best a power of two; 0 follows overflows.")
    initial_power: Annotated[Elements, Field(le=127)] = Field(
        default=16, description="The factor starts as 2 to this power."
    )
    window: Count = Field(default=1000, description="Updates without overflow until the factor doubles.")
    hysteresis: Count = Field(default=2, description="Overflows until the factor halves.")
    consecutive_hysteresis: StrictBool = Field(
        default=False, description="Count overflows anew after each update without one."
    )
    min_scale: Annotated[Number, Field(gt=0)] = Field(
        default=1.0, description="The factor never falls below this."
    )

    @model_validator(mode="after")
    def _starts_at_or_above_the_minimum(self) -> Self:
        if not self.scale and 2.0**self.initial_power < self.min_scale:
            raise ValueError(
                f"the loss scale starts at 2**{self.initial_power}, below its minimum {self.min_scale:g};"
                " raise the one or lower the other"
            )
        return self


DEEPEST = 512
"""Requests that a path takes at a time."""


class IoConfig(Section):
    """How bytes travel between memory and NVMe."""

    engine: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        default="auto", description="I/O backend; auto takes the first that works here."
    )
    block_size: Annotated[Bytes, Field(gt=0, multiple_of=ALIGNMENT)] = Field(
        default=1 << 20,
        description="Largest single request in bytes, a multiple of 4096; longer ones are split.",
    )
    queue_depth: Annotated[Count, Field(le=DEEPEST)] = Field(
        default=16, description="Requests in flight per path."
    )
    registered: StrictBool = Field(default=True, description="Register buffers where the backend can.")
    allow_memory_file_system: StrictBool = Field(
        default=False, description="Let nvme_path be on tmpfs, which takes the memory that swapping saves."
    )


class TelemetryConfig(Section):
    """What the run publishes about itself."""

    enabled: StrictBool = Field(default=True, description="Publish a telemetry page that the sidecar reads.")
    dir: Annotated[Path, BeforeValidator(_at_home)] | None = Field(
        default=None, description="Directory of the page; null is the user's run directory."
    )


class DistributedConfig(Section):
    """When to give up on other ranks."""

    timeout: Seconds = Field(
        default=600.0, description="Longest wait in seconds for ranks that live but do not come along."
    )
    silence: Seconds = Field(
        default=30.0, description="Seconds without a sign of life after which a rank counts as lost."
    )


class TiersConfig(Section):
    """Budgets and policies of the tiers: the ``tiering`` block of a configuration file."""

    device_budget: Budget = Field(default="auto", description="Most bytes the engine may own on the device.")
    host_budget: Budget = Field(default="auto", description="Most bytes the engine may own in host memory.")
    nvme_budget: Budget = Field(default="auto", description="Most bytes of swap space.")
    cache_in_host: StrictBool = Field(
        default=True, description="Keep in host memory what fits of state named nvme."
    )
    state: StateFormat = Field(
        default="fp32",
        description="Format of the optimizer state: fp32; split, lossless: half of each master is its bf16 parameter;"
        " bf16, moments rounded stochastically; split+bf16.",
    )
    keep_fp32: Literal["auto"] | Names = Field(
        default="auto",
        description="Parameters that stay fp32 in 16 bits, by patterns of their names; auto: those that a model of"
        " transformers names itself.",
    )
    grad_accum_dtype: GradDtype = Field(
        default="auto",
        description="Gradient accumulation; auto: compute dtype for one micro-batch, else fp32.",
    )
    reduce_dtype: GradDtype = Field(
        default="auto",
        description="Gradients between ranks; auto: as they are when sent, in stages 2 and 3 the compute dtype.",
    )
    update_on_device: Share | Literal["auto"] = Field(
        default="auto",
        description="Share of the optimizer state in host memory that passes through a GPU to be updated there; auto:"
        " what is fastest at the rates that tiering plan --measure found, none if it found none.",
    )
    step_in_backward: StrictBool = Field(
        default=False, description="Step groups while backward still runs, with the rate as it starts."
    )
    max_skipped_steps: Elements = Field(
        default=50,
        description="Steps in a row whose gradients are not finite until training ends with an error; 0: never."
        " A dynamic loss scale has its own end.",
    )
    verify: StrictBool = Field(
        default=False, description="Checksum what is swapped; costs host memory, 1/1024 of what is on NVMe."
    )
    io: IoConfig = Field(default=IoConfig(), description="How bytes travel between memory and NVMe.")
    distributed: DistributedConfig = Field(
        default=DistributedConfig(), description="When to give up on other ranks."
    )
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="What the run publishes.")
    run_name: RunName | None = Field(
        default=None, description="Name in telemetry: letters, digits, '.', '_' and '-', at most 64."
    )


class TieringConfig(Section):
    """Everything the engine needs to know, resolved."""

    train_batch_size: Count = Field(description="Samples per optimizer step over all ranks.")
    micro_batch_size: Count = Field(description="Samples per forward pass and rank.")
    gradient_accumulation_steps: Count = Field(default=1, description="Forward and backward passes per step.")
    world_size: Count = Field(default=1, description="Ranks that train together.")
    precision: Precision = Field(default="fp32", description="Compute dtype of parameters and activations.")
    buffer_dtype: Precision | None = Field(
        default=None, description="Dtype of the model's floating-point buffers; null keeps their own."
    )
    autocast: Literal["bf16", "fp16"] | None = Field(
        default=None, description="Run forward under torch.autocast with this dtype; null does not."
    )
    cast_inputs: StrictBool = Field(
        default=False, description="Cast floating-point inputs of the model to the compute dtype."
    )
    loss_scale: LossScaleConfig = Field(
        default=LossScaleConfig(), description="Loss scaling; only fp16 has any."
    )
    gradient_clipping: Number = Field(default=0.0, description="Largest global gradient norm; 0 is off.")
    steps_per_print: Count | None = Field(default=None, description="Log every so many steps; null is never.")
    wall_clock_breakdown: StrictBool = Field(default=False, description="Log where the time of a step goes.")
    dataloader_drop_last: StrictBool = Field(
        default=False,
        description="Leave out the last micro-batch of a pass over training_data if it is short.",
    )
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="What writes a run's figures.")
    optimizer: OptimizerConfig | None = Field(
        default=None, description="Update rule; null leaves it to the optimizer given to initialize()."
    )
    scheduler: Schedule | None = Field(default=None, description="Schedule of the learning rate.")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="Partitioning and movement.")
    tiering: TiersConfig = Field(default=TiersConfig(), description="Budgets and policies of the tiers.")

    @model_validator(mode="after")
    def _batch_sizes_agree(self) -> Self:
        resolve_batch(
            self.train_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, self.world_size
        )
        return self

    @model_validator(mode="after")
    def _tiers_suit_the_training(self) -> Self:
        problems = [
            InitErrorDetails(
                type="value_error",
                loc=("tiering", key),
                input=getattr(self.tiering, key),
                ctx={"error": reason},
            )
            for key, reason in self._unsuited()
        ]
        if problems:  # all of them, each under its own key
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    def _unsuited(self) -> Iterator[tuple[str, str]]:
        """Keys of ``tiering`` whose value the rest of the configuration forbids, each with the reason."""
        state = self.tiering.state
        if state.startswith("split") and self.precision != "bf16":
            whole = "bf16" if state == "split+bf16" else "fp32"
            reason = (
                f"{state!r} with precision {self.precision}: only a bf16 parameter is the upper half of its fp32"
                f" master; set bf16.enabled to true, or state to {whole!r}"
            )
            yield "state", reason
        if self.tiering.step_in_backward and self.world_size > 1:
            reason = (
                f"true with {self.world_size} ranks is not supported in this version; set step_in_backward to false, or"
                " run one process"
            )
            yield "step_in_backward", reason
        if self.tiering.step_in_backward and self.gradient_clipping:
            reason = (
                f"true with gradient_clipping {self.gradient_clipping:g}: the norm that clips is known when backward"
                " has ended; set gradient_clipping to 0, or step_in_backward to false"
            )
            yield "step_in_backward", reason
        if (
            self.tiering.step_in_backward
            and "fp16" in (self.precision, self.autocast)
            and not self.loss_scale.scale
        ):
            fixed = "fp16.loss_scale to a fixed scale" if self.precision == "fp16" else "autocast to bf16"
            reason = (
                "true with a dynamic loss scale in fp16: an overflow, known when backward has ended, must skip the"
                f" whole update; set {fixed}, or step_in_backward to false"
            )
            yield "step_in_backward", reason


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
    product = micro * accumulation * world_size
    if train != product:
        told = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        if None in given.values():
            divisor = " x ".join(
                f"{name} {value}" for name, value in list(given.items())[1:] if value is not None
            )
            why = f"{train} cannot be divided by {divisor + ' x ' if divisor else ''}{counted(world_size, 'rank')}"
        else:
            why = f"{micro} x {accumulation} x {counted(world_size, 'rank')} is {product}; give two of the three"
        raise ValueError(
            f"{told} with world size {world_size} do not agree: {why} (train_batch_size is"
            " train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size)"
        )
    return Batch(train, micro, accumulation)
