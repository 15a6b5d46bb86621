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
from tiering.telemetry import LABEL_NAME, LONGEST_VALUE, RESERVED_LABELS

from .batch import resolve_batch
from .fields import (
    ALIGNMENT,
    Bytes,
    Count,
    Elements,
    Names,
    Number,
    Section,
    Share,
    expand_home,
    format_size,
    parse_size,
    whole_number,
)
from .monitor import MonitorConfig
from .optimizer import OptimizerConfig
from .scheduler import Schedule, SchedulerConfig
from .step_policy import StepPolicy
from .zero import LeafModulesConfig, OffloadConfig, OffloadOptimizerConfig, ZeroConfig

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
    "StepPolicy",
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


Budget = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
Precision = Literal["bf16", "fp16", "fp32"]
StateFormat = Literal["fp32", "split", "bf16", "split+bf16"]
GradDtype = Literal["auto", "fp32", "bf16", "fp16"]
Seconds = Annotated[Number, Field(gt=0)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


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


def _valid_labels(labels: dict[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if not LABEL_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a label name: use a letter, then letters, digits and underscores"
            )
        if name in RESERVED_LABELS:
            raise ValueError(f"the label {name!r} is reserved; use another name")
        if len(value) > LONGEST_VALUE:
            raise ValueError(f"the value of {name!r} is longer than {LONGEST_VALUE} characters")
    return labels


Labels = Annotated[dict[str, str], AfterValidator(_valid_labels)]


LONGEST_LINK = 1000


def _valid_links(links: dict[str, str]) -> dict[str, str]:
    for name, url in links.items():
        if not name:
            raise ValueError(f"the link to {url[:99]!r} has no name; name the tool")
        if len(name) > LONGEST_VALUE:
            raise ValueError(f"the name of the link {name[:99]!r} is longer than {LONGEST_VALUE} characters")
        if len(url) > LONGEST_LINK:
            raise ValueError(f"the link {name!r} is longer than {LONGEST_LINK} characters")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the link {name!r} is {url[:99]!r}; it must begin with http:// or https://")
    return links


Links = Annotated[dict[str, str], AfterValidator(_valid_links)]


class TelemetryConfig(Section):
    """Status that the run publishes for the sidecar."""

    enabled: StrictBool = Field(default=True, description="Publish a status file that the sidecar reads.")
    dir: Annotated[Path, BeforeValidator(expand_home)] | None = Field(
        default=None, description="Directory of the status file; null: the user's run directory."
    )
    stacks: StrictBool = Field(
        default=True,
        description="Write the Python stacks of the ranks when `tierd stacks` requests them, and at SIGUSR2 to"
        " standard error unless the program handles this signal.",
    )
    labels: Labels = Field(
        default={},
        max_length=16,
        description='Labels of the run for metrics and the web page, for example {"team": "vision"}.',
    )
    links: Links = Field(
        default={},
        max_length=16,
        description='Links to the run in other tools on the web page, for example {"TensorBoard": "http://tb:6006"}.',
    )
    # The upper bound is far above any model; without it, a total could become infinite, which a snapshot refuses.
    flops_per_token: Annotated[Number, Field(gt=0, le=1e18)] | None = Field(
        default=None,
        description="Floating-point operations of forward and backward for one token, for TFLOP/s and MFU; null:"
        " computed for models with a configuration as in transformers.",
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
    step: StepPolicy = Field(
        default=StepPolicy.AFTER,
        description="When parameters are updated: in step(); each before its next use; during backward, with the"
        " learning rate at its start; auto: the fastest of these with which a loop sees the same.",
    )
    swap_versions: Literal[1, 2] = Field(
        default=1,
        description="Versions in swap space of what step() writes there. 2: twice the room and the same traffic; a step"
        " whose writes fail is continued, and step 'in_backward' is exact.",
    )
    snapshots: StrictBool = Field(
        default=False,
        description="Keep room in swap space for engine.snapshot_state(): one version more of what step() writes there,"
        " and two of trained state in memory.",
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
    sequence_ranks: Count = Field(
        default=1, description="Ranks that share each sequence and load the same data: consecutive ones."
    )
    model_ranks: Count = Field(
        default=1, description="Ranks that hold parts of one model and load the same data."
    )
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

    @property
    def data_ranks(self) -> int:
        """Ranks that load different data: those that share sequences, or hold parts of one model, count once."""
        return self.world_size // (self.sequence_ranks * self.model_ranks)

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        resolve_batch(
            self.train_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, self.data_ranks
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
        if self.tiering.snapshots and not self.zero.swap_directories:
            reason = "true without a directory: set nvme_path of offload_optimizer or offload_param, or set it to false"
            yield "snapshots", reason
        if self.tiering.step is StepPolicy.IN_BACKWARD:
            for condition, reason in self.conflicts_in_backward():
                yield "step", f"'in_backward' with {condition}: {reason}"

    def conflicts_in_backward(self) -> Iterator[tuple[str, str]]:
        """The conditions here with which StepPolicy.IN_BACKWARD is not possible, each with the reason and remedies."""
        # With a second version of what it writes, the step can be taken back.
        if self.tiering.swap_versions > 1:
            return
        remedy = "set swap_versions to 2, step to 'deferred'"
        if self.world_size > 1:
            yield (
                f"{self.world_size} ranks",
                f"it is not supported in this version; {remedy}, or run one process",
            )
        if self.gradient_clipping:
            yield (
                f"gradient_clipping {self.gradient_clipping:g}",
                f"the gradient norm is known only after backward; {remedy}, or gradient_clipping to 0",
            )
        if "fp16" in (self.precision, self.autocast) and not self.loss_scale.scale:
            fixed = "fp16.loss_scale to a fixed scale" if self.precision == "fp16" else "autocast to bf16"
            yield (
                "a dynamic loss scale in fp16",
                f"an overflow, known only after backward, must skip the whole update; {remedy}, or {fixed}",
            )
