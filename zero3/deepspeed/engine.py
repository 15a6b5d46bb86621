"""The engine under DeepSpeed's names: what scripts ask for ranks, batches, sections of the configuration, rates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from tiering.config.training import OffloadConfig, OffloadOptimizerConfig
from tiering.errors import ConfigError, EngineStateError
from zero3.engine.engine import Engine
from zero3.loop.data_loader import make_loader, make_ordered_loader
from zero3.loop.step_state import StepState
from zero3.params.precision import COMPUTE_DTYPES

log = logging.getLogger(__name__)

_GIVE_THE_MODULE = {
    *("to", "cpu", "cuda", "float", "double", "half", "bfloat16"),
    *("apply", "requires_grad_", "share_memory", "to_empty", "type", "xpu"),
}
"""Methods of every module that return it."""


class DeepSpeedEngine(Engine):
    """The engine that ``initialize`` returns. It also answers under DeepSpeed's names and its module's names."""

    _told_of_zero_grad = False

    if not TYPE_CHECKING:  # our own code gets no attribute of a user's model by a slip

        def __getattr__(self, name: str) -> Any:
            """The module's attribute of that name (``parameters``, ``generate``, ...), as torch's wrappers do it."""
            module = self.__dict__.get("module")
            if hasattr(type(self), name):  # a property, which has raised this error itself
                return object.__getattribute__(self, name)
            if module is not None and not name.startswith("__") and hasattr(module, name):
                found = getattr(module, name)
                if name == "generate" and self._world.size > 1 and self.config.zero.stage == 3:
                    return _on_all_ranks(found, module)
                return self._with_itself(found) if name in _GIVE_THE_MODULE else found
            public = [known for known in dir(self) if not known.startswith("_")]
            near = [] if name.startswith("_") else get_close_matches(name, public, 1, 0.7)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(
                f"neither the engine nor its {type(module).__name__} has an attribute {name!r}{meant}",
                name=name,
                obj=None,
            )

    def _with_itself(self, change: Callable[..., Any]) -> Callable[..., DeepSpeedEngine]:
        """``change`` of the module, but for scripts that go on with what it returns: ``engine = engine.to(device)``."""

        @wraps(change)
        def changed(*args: Any, **kwargs: Any) -> DeepSpeedEngine:
            change(*args, **kwargs)
            return self

        return changed

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; ``train`` and ``eval`` change it."""
        return self.module.training

    # Ranks

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""
        return self._world.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world.size

    @property
    def dp_world_size(self) -> int:
        """How many ranks share out the data: all."""
        return self._world.size

    @property
    def mp_world_size(self) -> int:
        """How many ranks share out one sample: 1."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share out the data."""
        return self._world.rank

    def get_model_parallel_rank(self) -> int:
        """This rank among those that share out one sample: 0."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    # Batches

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward and rank."""
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Backwards per update."""
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on ``is_boundary`` says whether a backward completes the gradients, and ``step`` updates.

        For a loop that counts its micro-batches itself, and may call ``step`` once, after the last one. Losses are
        divided by gradient_accumulation_steps all the same.
        """
        self._ready.check_open("set_gradient_accumulation_boundary")
        self._accumulation.boundary = is_boundary

    # Sections of the configuration

    def zero_optimization(self) -> bool:
        """Whether the stage is 1 or higher."""
        return self.config.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.config.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each rank keeps a part of the gradients only."""
        return self.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each rank keeps a part of the parameters only."""
        return self.config.zero.stage >= 3

    def zero_offload_optimizer(self) -> OffloadOptimizerConfig | None:
        """The section, if optimizer state may leave the device."""
        section = self.config.zero.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> OffloadConfig | None:
        """The section, if parameters may leave the device."""
        section = self.config.zero.offload_param
        return None if section.device == "none" else section

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state is kept in host memory."""
        return self.config.zero.offload_optimizer.device == "cpu"

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.config.precision == "bf16"

    def torch_autocast_enabled(self) -> bool:
        """Whether forwards run under torch.autocast."""
        return self.config.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """What torch.autocast computes in."""
        return None if self.config.autocast is None else COMPUTE_DTYPES[self.config.autocast]

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows, if there is one."""
        return not self.config.loss_scale.scale

    def gradient_clipping(self) -> float:
        """The largest norm of all gradients; 0 is none."""
        return self.config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """After how many updates a line is logged; None is never."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the time of a step is logged in its parts."""
        return self.config.wall_clock_breakdown

    def dataloader_drop_last(self) -> bool:
        """Whether a last, short micro-batch of training_data is left out."""
        return self.config.dataloader_drop_last

    # The optimizer

    def optimizer_name(self) -> str:
        """The class of the optimizer that was given, else what the configuration names."""
        if self._given_optimizer or self.config.optimizer is None:
            return self._given_optimizer
        return self.config.optimizer.type

    def scheduler_name(self) -> str | None:
        """What the configuration names; None without a section."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The betas of each param group, or its momentum."""
        betas = any("betas" in group for group in self.optimizer.param_groups)
        return self._of_groups("betas" if betas else "momentum")

    def get_type(self) -> list[Any]:
        """The option "type" of each param group; 0.0 where there is none."""
        return self._of_groups("type")

    def set_lr(self, lr: float) -> None:
        """Give all param groups this learning rate; a schedule sets its own after the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last ``step``, which then needs others; a GAN's other loss has left some, too.

        In the midst of an accumulation they stay, which is said once; ``optimizer.zero_grad()`` drops them.

        DeepSpeed does so at stage 0. At its stages 1 and 2 each backward replaces what the last one left, and ``step``
        takes that in spite of this call; at stage 3 all backwards since the last ``step`` add up in spite of it. Those
        of an accumulation go at its stages 0 and 1, and stay at 2 and 3.

        After ``close`` or ``release`` there is nothing to do, and nothing happens.
        """
        if self._ready.closed:
            return
        self._ready.check_open("zero_grad")
        if self._accumulation.waiting:
            if not self._told_of_zero_grad:
                self._told_of_zero_grad = True
                log.warning(
                    "engine.zero_grad() leaves the gradients of micro-batches that wait for their update, as DeepSpeed"
                    " does at stages 2 and 3; to drop them, call optimizer.zero_grad()"
                )
        elif self._updates.current_step.state is not StepState.UPDATED_IN_BACKWARD:
            self.optimizer.zero_grad()
            self._ready.drop_gradients()

    def _of_groups(self, option: str) -> list[Any]:
        return [group.get(option, 0.0) for group in self.optimizer.param_groups]

    # State, data, the end

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """``module.state_dict()``; of several ranks, all call it."""
        state: dict[str, Tensor] = self.module.state_dict(
            destination=destination,  # type: ignore[arg-type] # torch's TypeVar has None, too
            prefix=prefix,
            keep_vars=keep_vars,
        )
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> Path:
        """``save_16bit_model``, by its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's share of ``dataset``, in micro-batches unless ``batch_size`` says otherwise.

        Shuffled for the route "train"; in its own order for "eval" and "predict", and in that of ``data_sampler``.
        """
        if route not in ("train", "eval", "predict"):
            raise ConfigError(f"deepspeed_io got route {route!r}; use 'train', 'eval' or 'predict'")
        options: dict[str, Any] = {
            "rank": self._world.rank,
            "world_size": self._world.size,
            "drop_last": self.config.dataloader_drop_last,
            "workers": num_local_io_workers or 0,
            "pin_memory": pin_memory,
        }
        size = batch_size or self.config.micro_batch_size
        collate = collate_fn or self.collate_fn
        if route == "train" and data_sampler is None:
            return make_loader(dataset, size, collate, **options)
        return make_ordered_loader(dataset, size, collate, sampler=data_sampler, **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: parameters come and go, which a compiled whole does not see."""
        raise EngineStateError(
            "engine.compile() would compile the whole model, which does not see parameters come and go; before"
            " initialize, compile its blocks in place (block.compile())"
        )

    def empty_partition_cache(self) -> None:
        """Nothing: between passes no parameter is kept whole that would not be kept anyway."""

    def destroy(self) -> None:
        """``close``."""
        self.close()


def _on_all_ranks(generate: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """``generate`` of transformers, until the last rank has its tokens: each one is a forward, which all ranks make.

    It does so by itself for those who shard parameters as far as it knows them. What a caller says counts.
    """
    # An adapter's generate() hands its options on to the model's.
    methods = (getattr(inner, "generate", None) for inner in module.modules())
    if not any(callable(each) and "synced_gpus" in signature(each).parameters for each in methods):
        return generate

    @wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        if "synced_gpus" not in signature(generate).bind_partial(*args, **kwargs).arguments:
            kwargs.setdefault("synced_gpus", True)
        return generate(*args, **kwargs)

    return together
