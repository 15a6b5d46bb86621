"""The native configuration that the engine reads: resolved, frozen, without torch.

``ds_config.load`` usually creates it: it reads a DeepSpeed file, reports every problem in one
:class:`~tiering.errors.ConfigError` and returns a :class:`TieringConfig`. If you construct one directly, an invalid
value raises ``pydantic.ValidationError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from optim_cpu.formats import quantized

from .batch import resolve_batch
from .fields import ALIGNMENT, Bytes, Count, Elements, Number, Section, format_size, parse_size, whole_number
from .monitor import MonitorConfig
from .optimizer import OptimizerConfig
from .scheduler import Schedule, SchedulerConfig

__all__ = [
    "ALIGNMENT",
    "DistributedConfig",
    "IoConfig",
    "LeafModulesConfig",
    "LossScaleConfig",
    "MonitorConfig",
    "OffloadConfig",
    "OffloadOptimizerConfig",
    "OptimizerConfig",
    "QuantizeConfig",
    "SchedulerConfig",
    "TelemetryConfig",
    "TieringConfig",
    "TiersConfig",
    "ZeroConfig",
    "format_size",
    "parse_size",
    "whole_number",
]


def _size_or_auto(value: object) -> int | str:
    return "auto" if value == "auto" else parse_size(value)  # type: ignore[arg-type]


def _paths(value: object) -> object:
    if value is None:
        return ()
    directories = (value,) if isinstance(value, str | Path) else value
    if not isinstance(directories, list | tuple):
        raise ValueError(f"a directory or a list of directories is needed, not {value!r}")
    if not directories:
        raise ValueError("the list of directories is empty; name one or more, or remove the key")
    if "" in directories:
        raise ValueError("a path is empty; write '.' for the current directory")
    return tuple(_expand_home(path) for path in directories)


def _expand_home(path: object) -> object:
    try:
        return Path(path).expanduser() if isinstance(path, str) else path
    except RuntimeError:
        # The named user does not exist, or the current user has no home directory.
        raise ValueError(f"no home directory for the ~ in {path!r}; write the full path") from None


def _refuse_duplicates(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"directory {str(path)!r} is listed twice; list each directory once")
    return paths


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Budget = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]

Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole_number)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_paths), AfterValidator(_refuse_duplicates)]
Precision = Literal["bf16", "fp16", "fp32"]
StateFormat = Literal["fp32", "split", "bf16", "split+bf16"]
GradDtype = Literal["auto", "fp32", "bf16", "fp16"]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)]
Seconds = Annotated[Number, Field(gt=0)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class OffloadConfig(Section):
    """Where parameters or optimizer state may be kept, other than on the device."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Slowest tier allowed for this state: none, cpu (host memory) or nvme."
    )
    nvme_path: Directories = Field(
        default=(),
        description="Directory of the swap space for device nvme, or a list of directories to stripe over.",
    )

    @model_validator(mode="after")
    def _check_nvme_path(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("device 'nvme' needs nvme_path, the directory of the swap space")
        return self

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """The resolved directories of nvme_path; empty unless the device is nvme."""
        return tuple(path.resolve() for path in self.nvme_path) if self.device == "nvme" else ()


class OffloadOptimizerConfig(OffloadConfig):
    """Where the optimizer state may be kept, other than on the device, and how much of it."""

    ratio: Share = Field(default=1.0, description="Fraction of the optimizer state that leaves the device.")


class LeafModulesConfig(Section):
    """Modules whose parameters move together whichever submodules run, for example experts routed per rank."""

    classes: Names = Field(default=(), description="Class names, with or without their Python module.")
    names: Names = Field(default=(), description="Names of modules in the model.")
    name_suffixes: Names = Field(default=(), description="Suffixes of names of modules in the model.")


class ZeroConfig(Section):
    """Partitioning and offload of parameters, gradients and optimizer state."""

    stage: Stage = Field(
        default=0,
        description="Partitioned state: 0 none, 1 optimizer state, 2 also gradients, 3 also parameters.",
    )
    offload_param: OffloadConfig = Field(
        default=OffloadConfig(), description="Home of the compute parameters."
    )
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="Home of masters and optimizer state."
    )
    sub_group_size: Count = Field(default=10**9, description="Maximum elements of state updated at once.")
    prefetch_elements: Elements = Field(
        default=5 * 10**7,
        description="Maximum elements prefetched, but at least room for the next group; 0: no prefetch.",
    )
    reduce_bucket_elements: Count = Field(
        default=5 * 10**8,
        description="Maximum gradients of a group that ranks exchange at once; the plan takes fewer if it has no room.",
    )
    live_elements: Elements = Field(
        default=0,
        description="Maximum elements of parameters that are fetched to the device at once, as far as modules allow:"
        " blocks with more than half of it are cut, and less is prefetched; 0: no limit but device_budget.",
    )
    granularity_threshold: Elements = Field(
        default=0,
        description="A module with fewer parameters per module in it is never cut into groups; 0: any block may be.",
    )
    persistence_threshold: Elements = Field(
        default=10**5, description="Parameters with fewer elements stay on the device."
    )
    leaf_module: LeafModulesConfig = Field(
        default=LeafModulesConfig(), description="Modules whose parameters move together."
    )

    @model_validator(mode="after")
    def _check_stage_allows_offload(self) -> Self:
        if self.offload_param.device != "none" and self.stage < 3:
            raise ValueError(
                f"stage {self.stage} keeps parameters on the device, so offload_param cannot offload them:"
                " use stage 3, or remove offload_param"
            )
        if self.offload_optimizer.device != "none" and self.stage < 1:
            raise ValueError(
                "stage 0 keeps optimizer state on the device, so offload_optimizer cannot offload it:"
                " use stage 1, 2 or 3, or remove offload_optimizer"
            )
        return self

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """The swap directories of both offload sections, without duplicates."""
        return tuple(
            dict.fromkeys((*self.offload_param.swap_directories, *self.offload_optimizer.swap_directories))
        )


class LossScaleConfig(Section):
    """The factor of the loss in fp16, which prevents underflow of small gradients."""

    scale: Number = Field(default=0.0, description="Fixed factor, best a power of two; 0: dynamic.")
    initial_power: Annotated[Elements, Field(le=127)] = Field(
        default=16, description="Exponent of the initial factor, a power of 2."
    )
    window: Count = Field(default=1000, description="Updates without overflow before the factor doubles.")
    hysteresis: Count = Field(default=2, description="Overflows before the factor halves.")
    consecutive_hysteresis: StrictBool = Field(
        default=False, description="Reset the count of overflows after each update without overflow."
    )
    min_scale: Annotated[Number, Field(gt=0)] = Field(default=1.0, description="Minimum of the factor.")

    @model_validator(mode="after")
    def _check_initial_scale(self) -> Self:
        if not self.scale and 2.0**self.initial_power < self.min_scale:
            raise ValueError(
                f"the loss scale starts at 2**{self.initial_power}, below its minimum {self.min_scale:g};"
                " raise the start or lower the minimum"
            )
        return self


MAX_QUEUE_DEPTH = 512
"""Maximum requests in flight per path."""


class IoConfig(Section):
    """Asynchronous I/O between memory and NVMe."""

    engine: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        default="auto", description="I/O backend; auto: the first that works on this machine."
    )
    block_size: Annotated[Bytes, Field(gt=0, multiple_of=ALIGNMENT)] = Field(
        default=1 << 20,
        description="Maximum bytes per request, a multiple of 4096; longer requests are split.",
    )
    queue_depth: Annotated[Count, Field(le=MAX_QUEUE_DEPTH)] = Field(
        default=16, description="Requests in flight per path."
    )
    registered: StrictBool = Field(
        default=True, description="Register buffers with the kernel if the backend can."
    )
    allow_memory_file_system: StrictBool = Field(
        default=False, description="Allow nvme_path on tmpfs, which uses the memory that swapping saves."
    )


class StagingConfig(Section):
    """Staging: the slots in host memory through which optimizer state passes from NVMe to its update and back."""

    seconds: Number = Field(
        default=0.1,
        description="Seconds of NVMe transfers that the slots cover if much state is on NVMe, within a third of the"
        " host budget; 0: six slots.",
    )
    tile_elements: Count = Field(
        default=16 << 20,
        description="Maximum elements in a slot. Slots become larger only if there are 16 or more.",
    )


class TelemetryConfig(Section):
    """Status that the run publishes for the sidecar."""

    enabled: StrictBool = Field(default=True, description="Publish a status file that the sidecar reads.")
    dir: Annotated[Path, BeforeValidator(_expand_home)] | None = Field(
        default=None, description="Directory of the status file; null: the user's run directory."
    )


class DistributedConfig(Section):
    """Limits of the wait for other ranks."""

    timeout: Seconds = Field(
        default=600.0, description="Seconds to wait for ranks that are alive but make no progress."
    )
    silence: Seconds = Field(
        default=30.0, description="Seconds without a heartbeat after which a rank counts as lost."
    )


class QuantizeConfig(Section):
    """The base of adapters in 4 or 8 bits: ``tiering.quantize`` as a part of ``initialize``."""

    type: Literal["none", "nf4", "int8", "fp8"] = Field(
        default="none", description="Format of the weights of frozen linear layers; none: unchanged."
    )
    modules: Names = Field(
        default=(),
        description="Names of layers, or ends of names; empty: all frozen linear layers but the output layer.",
    )
    double_quant: StrictBool = Field(
        default=True, description="Quantise the scales of nf4 once more: 0.516 bytes per weight, else 0.5625."
    )
    block_size: Count = Field(
        default=64, description="Weights with one scale: a power of two from 32 to 4096 that divides a row."
    )

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        options = sorted(self.model_fields_set - {"type"})
        if options and "type" not in self.model_fields_set:
            raise ValueError(f"{', '.join(options)} without type; set type to 'nf4', 'int8' or 'fp8'")
        if self.type != "none":
            quantized(self.type, double_quant=self.double_quant, block_size=self.block_size)
        return self


class TiersConfig(Section):
    """Budgets and policies of the tiers: the ``tiering`` block of a configuration file."""

    device_budget: Budget = Field(default="auto", description="Maximum bytes of the engine on the device.")
    host_budget: Budget = Field(default="auto", description="Maximum bytes of the engine in host memory.")
    nvme_budget: Budget = Field(default="auto", description="Maximum bytes of swap space.")
    cache_in_host: StrictBool = Field(
        default=True, description="Keep state with device nvme in host memory as far as it fits."
    )
    state: StateFormat = Field(
        default="fp32",
        description="Format of the optimizer state: fp32; split (lossless: the bf16 parameter is half of its master);"
        " bf16 (moments with stochastic rounding); split+bf16.",
    )
    keep_fp32: Literal["auto"] | Names = Field(
        default="auto",
        description="Patterns of names of parameters that stay fp32 when the model computes in 16 bits; auto: those"
        " that a transformers model names.",
    )
    grad_accum_dtype: GradDtype = Field(
        default="auto",
        description="Dtype of gradient accumulation; auto: the compute dtype for one micro-batch, else fp32.",
    )
    reduce_dtype: GradDtype = Field(
        default="auto",
        description="Dtype of gradients sent between ranks; auto: the dtype they have; in stages 2 and 3 the compute"
        " dtype.",
    )
    update_on_device: Share | Literal["auto"] = Field(
        default="auto",
        description="Fraction of the optimizer state in host memory that a GPU updates; auto: the fastest at the rates"
        " of tiering plan --measure, 0 without measured rates.",
    )
    activations: Literal["device", "host", "nvme", "auto"] = Field(
        default="device",
        description="Where tensors that autograd saves wait for backward: on the device; in host memory; in host memory"
        " and then on NVMe; auto: on the device as far as it has room, the oldest in host memory and then on NVMe.",
    )
    activation_budget: Bytes = Field(
        default=1 << 30, description="Maximum bytes of activations in host memory, if they are moved there."
    )
    block_rows: Count | None = Field(
        default=None,
        description="Rows of a micro-batch with which a block computes at once, forward and backward, while its"
        " parameters are on the device once; blocks then keep their inputs only. null: all rows.",
    )
    tile: Bytes = Field(
        default=0,
        description="Maximum bytes of a weight of a linear layer or an embedding, in the compute dtype: a larger one is"
        " cut into tiles of rows, each a module of its own; 0: none is cut.",
    )
    step: Literal["after", "deferred"] = Field(
        default="after",
        description="When step() updates parameters: at once, or each before its next use.",
    )
    step_in_backward: StrictBool = Field(
        default=False, description="Update groups during backward, with the learning rate at its start."
    )
    max_skipped_steps: Elements = Field(
        default=50,
        description="Consecutive steps with non-finite gradients before training ends with an error; 0: no limit."
        " A dynamic loss scale has its own limit.",
    )
    verify: StrictBool = Field(
        default=False, description="Checksum swapped data; needs host memory, 1/1024 of the data on NVMe."
    )
    weights_in_place: StrictBool | Literal["auto"] = Field(
        default="auto",
        description="Read frozen weights of initialize(weights=) from their files instead of swap space, where the"
        " bytes are as compute needs them; auto: on local drives that do not rotate and support O_DIRECT.",
    )
    quantize: QuantizeConfig = Field(
        default=QuantizeConfig(), description="Frozen linear layers in 4 or 8 bits."
    )
    io: IoConfig = Field(default=IoConfig(), description="Asynchronous I/O to NVMe.")
    staging: StagingConfig = Field(
        default=StagingConfig(), description="Slots for optimizer state on its way from NVMe and back."
    )
    distributed: DistributedConfig = Field(
        default=DistributedConfig(), description="Limits of the wait for other ranks."
    )
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="Status for the sidecar.")
    run_name: RunName | None = Field(
        default=None,
        description="Name of the run in telemetry: at most 64 letters, digits, '.', '_' and '-'.",
    )


class TieringConfig(Section):
    """The complete, resolved configuration of the engine."""

    train_batch_size: Count = Field(description="Samples per optimizer step over all ranks.")
    micro_batch_size: Count = Field(description="Samples per rank and forward pass.")
    gradient_accumulation_steps: Count = Field(default=1, description="Forward and backward passes per step.")
    world_size: Count = Field(default=1, description="Ranks that train together.")
    precision: Precision = Field(default="fp32", description="Compute dtype of parameters and activations.")
    buffer_dtype: Precision | None = Field(
        default=None, description="Dtype of the model's floating-point buffers; null: unchanged."
    )
    autocast: Literal["bf16", "fp16"] | None = Field(
        default=None, description="Run forward under torch.autocast with this dtype; null: no autocast."
    )
    cast_inputs: StrictBool = Field(
        default=False, description="Cast floating-point inputs of the model to the compute dtype."
    )
    loss_scale: LossScaleConfig = Field(default=LossScaleConfig(), description="Loss scaling, in fp16 only.")
    gradient_clipping: Number = Field(
        default=0.0, description="Maximum global gradient norm; 0: no clipping."
    )
    steps_per_print: Count | None = Field(
        default=None, description="Steps between progress lines; null: none."
    )
    wall_clock_breakdown: StrictBool = Field(default=False, description="Log a time breakdown of the step.")
    dataloader_drop_last: StrictBool = Field(
        default=False,
        description="Drop the last micro-batch of a pass over training_data if it is incomplete.",
    )
    monitor: MonitorConfig = Field(
        default=MonitorConfig(), description="Monitors that write a run's figures."
    )
    optimizer: OptimizerConfig | None = Field(
        default=None, description="Update rule; null: the optimizer passed to initialize()."
    )
    scheduler: Schedule | None = Field(default=None, description="Schedule of the learning rate.")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="Partitioning and offload.")
    tiering: TiersConfig = Field(default=TiersConfig(), description="Budgets and policies of the tiers.")

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        resolve_batch(
            self.train_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, self.world_size
        )
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        problems = [
            InitErrorDetails(
                type="value_error",
                loc=("tiering", key),
                input=getattr(self.tiering, key),
                ctx={"error": reason},
            )
            for key, reason in self._tier_conflicts()
        ]
        # One error reports all problems, each under its own key.
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    def _tier_conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys of ``tiering`` whose value conflicts with the rest of the configuration, each with the reason."""
        state = self.tiering.state
        if state.startswith("split") and self.precision != "bf16":
            whole = "bf16" if state == "split+bf16" else "fp32"
            reason = (
                f"{state!r} with precision {self.precision}: only a bf16 parameter is the upper half of an fp32"
                f" master; set bf16.enabled to true, or state to {whole!r}"
            )
            yield "state", reason
        if self.tiering.activations == "nvme" and not self.zero.swap_directories:
            reason = "'nvme' without a directory: set nvme_path of offload_optimizer or offload_param, or use 'host'"
            yield "activations", reason
        if self.tiering.activations != "device" and not self.tiering.activation_budget:
            reason = (
                f"0 with activations {self.tiering.activations!r}: what leaves the device passes through this memory;"
                " set a size such as '1GiB', or activations to 'device'"
            )
            yield "activation_budget", reason
        if self.tiering.step_in_backward and self.tiering.step == "deferred":
            yield "step_in_backward", "true with step 'deferred': remove one of them"
        if self.tiering.step_in_backward and self.world_size > 1:
            reason = (
                f"true with {self.world_size} ranks is not supported in this version; set step_in_backward to false, or"
                " run one process"
            )
            yield "step_in_backward", reason
        if self.tiering.step_in_backward and self.gradient_clipping:
            reason = (
                f"true with gradient_clipping {self.gradient_clipping:g}: the gradient norm is known only after"
                " backward; set gradient_clipping to 0, or step_in_backward to false"
            )
            yield "step_in_backward", reason
        if (
            self.tiering.step_in_backward
            and "fp16" in (self.precision, self.autocast)
            and not self.loss_scale.scale
        ):
            fixed = "fp16.loss_scale to a fixed scale" if self.precision == "fp16" else "autocast to bf16"
            reason = (
                "true with a dynamic loss scale in fp16: an overflow, known only after backward, must skip the"
                f" whole update; set {fixed}, or step_in_backward to false"
            )
            yield "step_in_backward", reason
