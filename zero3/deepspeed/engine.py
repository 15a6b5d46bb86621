"""The engine under DeepSpeed's names: ranks, batches, learning rates. Its settings are in setting_names.py."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from tiering import _unsupported
from tiering._placeholders import unsupported_name
from tiering._text import similar
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, DistributedError, EngineStateError, PlacementError, SwapError
from tiering.telemetry import ConfigurationStatus
from zero3.deepspeed.child_engine import ChildEngine
from zero3.deepspeed.setting_names import SettingNames
from zero3.engine.generation import on_all_ranks
from zero3.loop.data_loader import make_loader, make_ordered_loader
from zero3.loop.step_state import accumulation_steps
from zero3.observe.ending import error_under_way
from zero3.params.precision import keeps_dtype
from zero3.params.row_tiles import tiled_weights
from zero3.ranks.mesh import MeshPlace
from zero3.setup.assembly import Weights
from zero3.setup.optimizer_choice import ClientOptimizerChoice, ModelParameters

log = logging.getLogger(__name__)

_GIVE_THE_MODULE = {
    *("to", "cpu", "cuda", "float", "double", "half", "bfloat16"),
    *("apply", "requires_grad_", "share_memory", "to_empty", "type", "xpu"),
}
"""Methods of ``nn.Module`` that return the module."""
_GATHERS_ON_SAVE = [
    f"{prefix}gather_{name}_weights_on_model_save" for prefix in ("stage3_", "") for name in ("16bit", "fp16")
]
"""The names of a key of the section zero_optimization."""


_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DeepSpeedEngine]] = weakref.WeakKeyDictionary()
"""The last engine of each model."""


class DeepSpeedEngine(SettingNames, ChildEngine):
    """The engine that ``initialize`` returns. It also answers under DeepSpeed's names and its module's names.

    ``config`` is the configuration as it was passed to ``initialize``, a dict, with a value in place of each "auto";
    ``settings`` are the settings that are in effect.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TieringConfig,
        model_parameters: ModelParameters | None = None,
        optimizer: ClientOptimizerChoice | None = None,
        weights: Weights | None = None,
        configuration: ConfigurationStatus | None = None,
        resume: Path | None = None,
        place: MeshPlace | None = None,
    ) -> None:
        self._were_fp32 = {
            param for param in model.parameters() if param.dtype == torch.float32 and not keeps_dtype(param)
        }
        super().__init__(model, settings, model_parameters, optimizer, weights, configuration, resume, place)
        _engines[model] = weakref.ref(self)
        self.config: dict[str, Any] = {}
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self._optimizer_class = "" if optimizer is None else _name_of(optimizer)
        self._warned_of_zero_grad = False

    @staticmethod
    def of(model: nn.Module) -> DeepSpeedEngine | None:
        """The open engine of ``model``; None if it has none."""
        reference = _engines.get(model)
        engine = None if reference is None else reference()
        return None if engine is None or engine.ended else engine

    # Not for mypy: the engine's own code must not use attributes of a user's model.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The module's attribute ``name`` (``parameters``, ``generate``, ...), as with torch's wrappers."""
            module = self.__dict__.get("module")
            # A property of the engine, which has itself raised AttributeError.
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            if module is not None and not name.startswith("__") and hasattr(module, name):
                attribute = getattr(module, name)
                if name == "generate" and self._shards_parameters:
                    return on_all_ranks(attribute, module)
                return self._with_itself(attribute) if name in _GIVE_THE_MODULE else attribute
            if _unsupported.replacement(f"engine.{name}"):
                raise unsupported_name(f"engine.{name}")
            near = None if name.startswith("_") else similar(name, dir(self))
            suggestion = f"; did you mean {near!r}?" if near else ""
            raise AttributeError(
                f"neither the engine nor its {type(module).__name__} has an attribute {name!r}{suggestion}",
                name=name,
                obj=None,
            )

    def _with_itself(self, change: Callable[..., Any]) -> Callable[..., DeepSpeedEngine]:
        """``change`` of the module, which returns the engine: scripts write ``engine = engine.to(device)``."""

        @wraps(change)
        def changed(*args: Any, **kwargs: Any) -> DeepSpeedEngine:
            change(*args, **kwargs)
            return self

        return changed

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; ``train`` and ``eval`` change it."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Put the model into training (or evaluation) mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        return self.train(False)

    # Ranks

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self._world.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world.size

    @property
    def mesh_place(self) -> MeshPlace:
        """The place of this rank in the mesh: its ``coordinate``, and which data it gets."""
        return self._world.place

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that load different data: those that share sequences count once."""
        return self.mesh_place.data_size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that share one sample: 1."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """The rank of this process among those that load different data."""
        return self.mesh_place.data_rank

    def get_model_parallel_rank(self) -> int:
        """The rank of this process among those that share one sample: 0."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    # Batches

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update."""
        return self.settings.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on, ``is_boundary`` determines whether a backward completes the gradients, and ``step`` updates.

        For a loop that counts its micro-batches itself, and may call ``step`` only after the last one. Losses are still
        divided by gradient_accumulation_steps.
        """
        self._ready.check_open("set_gradient_accumulation_boundary")
        self._accumulation.boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of an update, between updates; the size of a micro-batch stays.

        ConfigError if ``train_batch_size`` is not a multiple of one micro-batch on each rank, or needs another dtype of
        accumulated gradients than was planned.
        """
        self._ready.check_open("set_train_batch_size")
        self._ready.check_no_gradients("set_train_batch_size")
        steps = accumulation_steps(train_batch_size, self.settings)
        self.settings = self.settings.model_copy(
            update={"train_batch_size": train_batch_size, "gradient_accumulation_steps": steps}
        )
        self._accumulation.resize(steps)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        return self._accumulation.at_boundary

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far, including those that wait for their update."""
        return self._accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self._accumulation.resume(count)

    @property
    def global_samples(self) -> int:
        """Samples of all updates so far, over all ranks."""
        return self._updates.samples

    # The optimizer

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` updated the parameters."""
        return self._updates.applied

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients, unscaled, before clipping; None before the first update.

        Between the last backward and ``step`` it is the norm of the accumulated gradients, and all ranks call this
        together; otherwise it is the norm of the last update. If a gradient is not finite, it is infinity, as in
        DeepSpeed.
        """
        self._ready.check_open("get_global_grad_norm")
        pending = self._updates.current_step.pending and not self._schedule.state.in_backward
        waiting = pending and self._accumulation.syncing
        at_boundary = waiting and self._accumulation.at_boundary
        norm = self._updates.waiting_norm() if at_boundary else self._updates.norm
        return norm if norm is None or math.isfinite(norm) else math.inf

    def optimizer_name(self) -> str:
        """The class name of the optimizer that was passed to initialize, or the type in the configuration."""
        if self._optimizer_class or self.settings.optimizer is None:
            return self._optimizer_class
        return self.settings.optimizer.type

    def scheduler_name(self) -> str | None:
        """The type of the scheduler in the configuration; None without a section."""
        return None if self.settings.scheduler is None else self.settings.scheduler.type

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The betas of each param group, or the momentum."""
        betas = any("betas" in group for group in self.optimizer.param_groups)
        return self._of_groups("betas" if betas else "momentum")

    def get_type(self) -> list[Any]:
        """The option "type" of each param group; 0.0 without it."""
        return self._of_groups("type")

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all param groups; a scheduler sets its own after the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last ``step``, such as those that a GAN's other loss has left.

        Within an accumulation, gradients stay, and a warning is logged once; ``optimizer.zero_grad()`` drops them.

        DeepSpeed differs by stage. At stage 0 it drops gradients. At stages 1 and 2 each backward replaces the
        gradients of the last one, and ``step`` uses them in spite of this call; at stage 3 the gradients of all
        backwards since the last ``step`` add up in spite of it. Within an accumulation, it drops gradients at stages 0
        and 1, and keeps them at 2 and 3.

        After ``close`` or ``release`` this does nothing.
        """
        if self._ready.closed or not self._accumulation.waiting:
            super().zero_grad(set_to_none)
        elif not self._warned_of_zero_grad:
            self._warned_of_zero_grad = True
            log.warning(
                "engine.zero_grad() keeps the gradients of micro-batches that wait for their update, as DeepSpeed"
                " does at stages 2 and 3; to drop them, call optimizer.zero_grad()"
            )

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
        """``module.state_dict()``. All ranks call it together."""
        state: dict[str, Tensor] = self.module.state_dict(
            destination=destination,  # type: ignore[arg-type] # torch's TypeVar has None, too
            prefix=prefix,
            keep_vars=keep_vars,
        )
        if exclude_frozen_parameters:
            self._drop_frozen(state, prefix)
        return state

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The key stage3_gather_16bit_weights_on_model_save: whether a trainer is to save the whole model on rank 0."""
        zero = self.config.get("zero_optimization") or {}
        return any(bool(zero.get(name)) for name in _GATHERS_ON_SAVE)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """``state_dict()`` on rank 0, None on other ranks. All ranks call it together. ConfigError below stage 3."""
        if self.settings.zero.stage < 3:
            raise ConfigError(
                f"_zero3_consolidated_16bit_state_dict was called at stage {self.settings.zero.stage}, where each rank"
                " has the whole model; call module_state_dict()"
            )
        self._ready.check_open("_zero3_consolidated_16bit_state_dict")
        is_first = self._world.rank == 0
        state = self._state.weights(self.module, keep=is_first)
        if exclude_frozen_parameters:
            self._drop_frozen(state, "")
        return state if is_first else None

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """``_zero3_consolidated_16bit_state_dict``, by the name that does not say which stage partitions weights."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _drop_frozen(self, state: dict[str, Tensor], prefix: str) -> None:
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                state.pop(prefix + name, None)
        for tiled in tiled_weights(self.module.named_modules(remove_duplicate=False)):
            if not tiled.layer.tile_weights[0].requires_grad:
                state.pop(prefix + tiled.name, None)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write the model's ``state_dict`` in 16 bits as one safetensors file; returns its path.

        A ``save_filename`` of a pickle file, as DeepSpeed's scripts have it, is changed to a safetensors name:
        pytorch_model.bin becomes model.safetensors. Parameters are written in their compute dtype; those of an fp32
        model in the autocast dtype, or bf16. Buffers, parameters of ``tiering.keep_fp32`` and frozen parameters of
        other dtypes (integers, float8, packed codes) keep their dtype. All ranks call this together. Raises
        CheckpointError, on all ranks, if the file cannot be written.
        """
        self._ready.check_between_steps("save_16bit_model")
        return self._export.save_16bit_model(
            Path(save_dir), save_filename, exclude_frozen_parameters=exclude_frozen_parameters
        )

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
        """A loader of this rank's part of ``dataset``, in batches of ``batch_size`` (default: one micro-batch).

        The route "train" shuffles; "eval" and "predict" keep the order. ``data_sampler`` determines the order itself.
        """
        if route not in ("train", "eval", "predict"):
            raise ConfigError(f"deepspeed_io got route {route!r}; use 'train', 'eval' or 'predict'")
        options: dict[str, Any] = {
            "rank": self.mesh_place.data_rank,
            "world_size": self.mesh_place.data_size,
            "drop_last": self.settings.dataloader_drop_last,
            "workers": num_local_io_workers or 0,
            "pin_memory": pin_memory,
        }
        size = batch_size or self.settings.micro_batch_size
        collate = collate_fn or self.collate_fn
        if route == "train" and data_sampler is None:
            shared = self.world_size > self.mesh_place.data_size
            return make_loader(dataset, size, collate, shared=shared, **options)
        return make_ordered_loader(dataset, size, collate, sampler=data_sampler, **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises EngineStateError: a compiled model does not see that parameters move between tiers."""
        raise EngineStateError(
            "engine.compile() would compile the whole model, which does not see that parameters move between tiers;"
            " compile its blocks in place (block.compile()) before initialize"
        )

    def empty_partition_cache(self) -> None:
        """Does nothing: between passes, no parameter is cached on the device."""

    @property
    def ended(self) -> bool:
        """Whether ``close``, ``release``, ``destroy`` or another ``initialize`` of the model has ended the engine."""
        return self._ready.closed

    def destroy(self) -> None:
        """End the engine and give the model back as ``give_back`` does.

        If host memory has no room for the masters, the parameters hold their 16-bit values there, with a warning. If
        it has no room for these either, or they cannot be read (after a step that failed, or without all ranks), a
        warning says so, and the engine is closed: ``close``, which reads no parameters, leaves a model without values.
        All ranks call this together. A second call does nothing.
        """
        if self.ended:
            return
        if self._collectives is not None and error_under_way() is not None:
            # The other ranks may be elsewhere: this rank must not wait for them.
            self.close()
            return
        try:
            self.give_back("destroy", or_rounded=True)
        except (DistributedError, EngineStateError, PlacementError, SwapError) as error:
            log.warning("the model has no values after destroy(), because %s", error)
            self.close()

    def give_back(
        self, call: str, device: torch.device | str | None = None, *, or_rounded: bool = False
    ) -> None:
        """``release`` on behalf of ``call``, in the dtypes that the parameters had before ``initialize``.

        Trained parameters that were in fp32 hold their masters. With ``device`` None they go to the engine's device or,
        with a warning, to host memory if they do not fit there; with ``or_rounded``, if they do not fit there either,
        in the compute dtype.
        """
        places = {self.device: "", torch.device("cpu"): "in host memory"} if device is None else {device: ""}
        attempts = [(place, self._were_fp32, title) for place, title in places.items()]
        if or_rounded and self.settings.precision != "fp32":
            attempts.append(("cpu", set(), "in host memory, without its fp32 masters"))
        place, in_fp32, _ = attempts.pop(0)
        while True:
            try:
                return self._give_back(call, place, in_fp32)
            except PlacementError as error:
                if not attempts:
                    raise
                place, in_fp32, title = attempts.pop(0)
                # The remedies after the sizes are for an engine that stays open.
                log.warning(
                    "%s() puts the model %s, because %s", call, title, error.message.partition(";")[0]
                )


def _name_of(optimizer: ClientOptimizerChoice) -> str:
    """The class name of an optimizer, or the name of the function that makes it."""
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    return type(optimizer).__name__ if is_optimizer else getattr(optimizer, "__name__", "function")
