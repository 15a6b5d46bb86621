"""The engine: wires groups, tiers, gradients and optimizer together; the parts decide, this file does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from tiering import ds_config
from tiering.arena import PAGE
from tiering.budgets import resolve_budgets
from tiering.config import TieringConfig
from tiering.errors import ConfigError, EngineStateError
from tiering.placement import GroupSizes, Plan, Tier, Workload, make_plan
from tiering.telemetry import PageWriter, Publisher, Snapshot
from zero3 import hooks
from zero3.grads import GradientStore
from zero3.groups import GroupMembers, form_groups
from zero3.init import fill
from zero3.optimizer import TieredOptimizer, make_tiles
from zero3.param_group import ParamGroup, Streams, can_exchange
from zero3.partition import FlatLayout, lay_out
from zero3.prefetch import Prefetcher
from zero3.run_record import RunRecord
from zero3.schedule import PassSchedule
from zero3.tiers import Tiers

log = logging.getLogger(__name__)

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OFFLOAD_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_

ModelParameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class EngineParts(NamedTuple):
    """What ``initialize`` returns, in DeepSpeed's order."""

    engine: Engine
    optimizer: TieredOptimizer
    dataloader: DataLoader[Any] | None
    lr_scheduler: LRScheduler | None


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    model_parameters: ModelParameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> EngineParts:
    """Place ``model`` on the tiers that ``config`` allows and return (engine, optimizer, dataloader, lr_scheduler).

    ``config`` is a DeepSpeed configuration (dict or path) with an optional ``tiering`` block. ``model_parameters`` may
    be param groups with lr, betas, eps and weight_decay of their own; the default is every parameter that requires a
    gradient. ``lr_scheduler`` is a torch scheduler made for the returned optimizer, so usually a function of it.

    From here on the model's parameters belong to the engine: outside of their modules' forward they may hold NaN.
    Raises ConfigError, PlacementError or SwapSpaceError, each before anything is moved.
    """
    settings, report = ds_config.load(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    for entry in report.entries:
        log.debug("config: %s", entry)
    engine = Engine(model, settings, model_parameters)
    try:
        scheduler = lr_scheduler
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            scheduler = scheduler(engine.optimizer)
        engine.lr_scheduler = scheduler
        loader = None
        if training_data is not None:
            loader = DataLoader(
                training_data, batch_size=settings.micro_batch_size, shuffle=True, collate_fn=collate_fn
            )
    except BaseException:
        engine.close()
        raise
    return EngineParts(engine, engine.optimizer, loader, scheduler)


class Engine:
    """A model whose parameters, gradients and optimizer state live on tiers. Made by ``initialize``.

    Usable as a context manager; ``close`` gives memory and swap space back.
    """

    def __init__(
        self, model: nn.Module, config: TieringConfig, model_parameters: ModelParameters | None = None
    ) -> None:
        self.module = model
        self.config = config
        self.device = _device()
        self.lr_scheduler: LRScheduler | None = None
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self._closed = False
        self._norm: float | None = None
        self._loss: Tensor | None = None
        self._pending_backward = False
        self._in_engine_backward = False

        compute = COMPUTE_DTYPES[config.precision]
        grad_dtype = _grad_dtype(config, compute)
        param_groups = _param_groups(model, model_parameters)
        members, layouts = _grouped(model, config, compute, param_groups)
        nvme_path = _nvme_path(config)
        self.plan = _plan(config, members, layouts, compute, grad_dtype, self.device, nvme_path)

        self._tiers = Tiers(self.plan, self.device, config.tiering.io, nvme_path)
        try:
            streams = None if self._tiers.device_is_host else Streams()
            self._groups = _make_groups(members, layouts, compute, self._tiers, streams)
            self._tiles = make_tiles(self.plan.sub_groups, self._groups, self._tiers)
            self._gradients = GradientStore(
                self._groups,
                _gradient_homes(self._groups, grad_dtype, self._tiers),
                grad_dtype,
                self._tiers,
                streams,
            )
            for buffer in model.buffers():
                buffer.data = buffer.data.to(
                    self.device, compute if buffer.is_floating_point() else buffer.dtype
                )
            fill(model, self._groups, self._tiles, self._tiers)
            chosen = config.optimizer
            self.optimizer = TieredOptimizer(
                param_groups,
                {
                    "lr": chosen.lr,
                    "betas": chosen.betas,
                    "eps": chosen.eps,
                    "weight_decay": chosen.weight_decay,
                },
                self._tiles,
                self._gradients,
                self._tiers,
                decoupled=chosen.decoupled,
            )
            self._prefetcher = Prefetcher()
            self._schedule = PassSchedule(
                self._groups, self._prefetcher, self._gradients, self._on_backward, self._on_end_of_backward
            )
            self._handles = hooks.install(self._groups, self._schedule)
            self._handles += hooks.install_root(model, self._schedule)
            self._record = RunRecord(config.tiering.run_name or f"run-{os.getpid()}", self._tiers)
            self._publisher = self._publish()
        except BaseException:
            self._tiers.close()
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. After an exception the engine is as before the call."""
        self._check_open("forward")
        with self._record.phase("forward"):
            try:
                return self.module(*args, **kwargs)
            except BaseException:
                self._schedule.abandon()
                raise

    def backward(self, loss: Tensor) -> Tensor:
        """Accumulate the gradients of a scalar ``loss``, divided by gradient_accumulation_steps; returns that quotient.

        After an exception the gradients accumulated since the last step are gone, and the engine is usable.
        """
        self._check_open("backward")
        if loss.numel() != 1:
            raise EngineStateError(
                f"backward needs a scalar loss, not shape {tuple(loss.shape)}; reduce it, as by .mean()"
            )
        self._loss = loss.detach()
        scaled = loss / self.config.gradient_accumulation_steps
        self._in_engine_backward = True
        with self._record.phase("backward"):
            try:
                scaled.backward()
            except BaseException:
                self._schedule.abandon()
                self._gradients.reset()
                self._pending_backward = False
                raise
            finally:
                self._in_engine_backward = False
        return scaled

    def step(self) -> None:
        """End a micro-batch; after gradient_accumulation_steps of them, update the parameters.

        A step whose gradients are not finite is skipped with a warning and leaves all state as it was.
        """
        self._check_open("step")
        if not self._pending_backward:
            raise EngineStateError(
                "step was called without a backward since the last one; call engine.backward(loss) first"
            )
        boundary = self.is_gradient_accumulation_boundary()
        self._pending_backward = False
        self.micro_steps += 1
        if boundary:
            with self._record.phase("step"):
                self._update()
            self._record.loss = float(self._loss) if self._loss is not None else None
            self.global_steps += 1
            self._record.end_step()
            self._say_progress()
        self._prefetcher.look_ahead()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one before an update."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients at the last update, before clipping; None before the first."""
        return self._norm

    def train(self, mode: bool = True) -> Self:
        """Put the model into training (or evaluation) mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of parameters in the compute dtype and of persistent buffers, by name."""
        self._check_open("state_dict")
        self.optimizer.release_read_ahead()
        places = self._places()
        loaded: dict[int, Tensor] = {}
        result: dict[str, Tensor] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                result[name] = value.detach().to("cpu", copy=True)
                continue
            group, index = places[value]
            piece = group.layout.pieces[index]
            if piece.index not in loaded:
                itemsize = group.dtype.itemsize
                raw = self._tiers.load(group.home, piece.start * itemsize, piece.numel * itemsize)
                loaded[piece.index] = raw.view(group.dtype).view(piece.shape)
            result[name] = loaded[piece.index]
        return result

    def master_state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of the fp32 masters of all trainable parameters, by name."""
        self._check_open("master_state_dict")
        if self.plan.workload.master_is_param:
            trainable = {
                piece.name for group in self._groups for piece in group.layout.pieces if piece.trainable
            }
            return {name: value for name, value in self.state_dict().items() if name in trainable}
        self.optimizer.release_read_ahead()
        masters: dict[str, Tensor] = {}
        for tile in self._tiles:
            for segment in tile.segments:
                piece = segment.piece
                flat = masters.setdefault(piece.name, torch.empty(piece.shape)).view(-1)
                raw = self._tiers.load(tile.state, (segment.start - tile.start) * 4, segment.numel * 4)
                flat[segment.start - piece.start :][: segment.numel] = raw.view(torch.float32)
        return masters

    def snapshot(self) -> Snapshot:
        """What telemetry publishes, as of now."""
        return self._record.snapshot()

    def flip_bit(self) -> str:
        """Flip one bit of one master on NVMe and say where: a planted fault, to show that comparisons find it."""
        self._check_open("flip_bit")
        self.optimizer.release_read_ahead()
        for tile in self._tiles:
            if self.plan.workload.master_is_param:
                home, offset = tile.group.home, tile.start * 4
            else:
                home, offset = tile.state, 0
            if home.extent is None or not tile.segments:
                continue
            segment = max(tile.segments, key=lambda part: part.numel)
            offset += (segment.start - tile.start + segment.numel // 2) * 4
            page = offset // PAGE * PAGE
            held = self._tiers.load(home, page, PAGE)
            with self._tiers.writing(home, page, PAGE) as raw:
                raw.copy_(held)
                raw[offset - page + 2] ^= 1 << 4
            return f"bit 20 of a master of {segment.piece.name!r}, byte {home.extent.offset + offset} of the swap file"
        raise EngineStateError("flip_bit needs a master on NVMe, and the plan keeps none there")

    def close(self) -> None:
        """Wait for transfers, give memory and swap space back. Parameters are unusable afterwards. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._publisher is not None:
            self._publisher.publish_now()
            self._publisher.close()
        for handle in self._handles:
            handle.remove()
        self._tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _update(self) -> None:
        self._prefetcher.forget()
        self._norm = self._gradients.norm()
        clip = self.config.gradient_clipping
        if not torch.isfinite(torch.tensor(self._norm)):
            self.skipped_steps += 1
            log.warning(
                "step %d skipped: the gradient of %r is not finite; parameters and optimizer state are unchanged",
                self.global_steps + 1,
                self._gradients.first_not_finite(),
            )
        else:
            self.optimizer.step(grad_scale=min(1.0, clip / (self._norm + CLIP_EPSILON)) if clip else 1.0)
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self._gradients.reset()

    def _on_backward(self) -> None:
        """The first gradient of a backward pass has arrived."""
        steps = self.config.gradient_accumulation_steps
        if steps > 1 and not self._in_engine_backward:
            raise EngineStateError(
                f"loss.backward() does not divide by gradient_accumulation_steps ({steps}); call engine.backward(loss)"
            )
        self._gradients.last_micro_batch = self.is_gradient_accumulation_boundary()
        if self._gradients.last_micro_batch:
            self.optimizer.read_ahead()

    def _on_end_of_backward(self) -> None:
        self._pending_backward = True

    def _places(self) -> dict[nn.Parameter, tuple[ParamGroup, int]]:
        """Where each parameter lives: its group, and its number among the group's pieces."""
        return {param: (group, at) for group in self._groups for at, param in enumerate(group.params)}

    def _publish(self) -> Publisher | None:
        telemetry = self.config.tiering.telemetry
        if not telemetry.enabled:
            return None
        publisher = Publisher(
            PageWriter(self._record.run_name, directory=telemetry.dir), self._record.snapshot
        )
        publisher.start()
        return publisher

    def _say_progress(self) -> None:
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            log.info("step %d: loss %s, gradient norm %s", self.global_steps, self._record.loss, self._norm)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise EngineStateError(f"{what} was called after close(); initialize the model again")


def _device() -> torch.device:
    """The GPU if there is one, else the CPU; TIERING_DEVICE=cpu insists."""
    wanted = os.environ.get("TIERING_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"TIERING_DEVICE is {wanted!r}; use 'cpu' or 'cuda'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "TIERING_DEVICE is 'cuda' but torch finds no GPU; install a CUDA build, or use 'cpu'"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _grad_dtype(config: TieringConfig, compute: torch.dtype) -> torch.dtype:
    """The dtype gradients accumulate in: the compute dtype for one micro-batch, else fp32, unless configured."""
    chosen = config.tiering.grad_accum_dtype
    if chosen == "auto":
        return compute if config.gradient_accumulation_steps == 1 else torch.float32
    return COMPUTE_DTYPES[chosen]


def _nvme_path(config: TieringConfig) -> Path | None:
    offloads = (config.zero.offload_param, config.zero.offload_optimizer)
    paths = {offload.nvme_path for offload in offloads if offload.device == "nvme"}
    if len(paths) > 1:
        raise ConfigError(
            f"offload_param and offload_optimizer name different nvme_path directories ({sorted(map(str, paths))});"
            " several paths are not supported in this version: name the same one in both"
        )
    return paths.pop() if paths else None


def _param_groups(model: nn.Module, given: ModelParameters | None) -> list[dict[str, Any]]:
    """torch-style param groups of trainable parameters; every one of the model must be in them."""
    listed = list(given) if given is not None else [p for p in model.parameters() if p.requires_grad]
    groups = [dict(item) if isinstance(item, Mapping) else None for item in listed]
    if any(group is None for group in groups):
        groups = [{"params": listed}]
    chosen = []
    for group in groups:
        assert group is not None
        params = group["params"]
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        chosen.append({**group, "params": [p for p in params if p.requires_grad]})
    inside = {param for group in chosen for param in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in inside]
    if missing:
        raise ConfigError(
            f"{len(missing)} parameters require gradients but are not in model_parameters"
            f" ({', '.join(missing[:3])}, ...):"
            " add them, or freeze them with requires_grad_(False)"
        )
    if not inside:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
    return chosen


def _grouped(
    model: nn.Module, config: TieringConfig, compute: torch.dtype, param_groups: list[dict[str, Any]]
) -> tuple[list[GroupMembers], list[FlatLayout]]:
    trainable = {param for group in param_groups for param in group["params"]}
    members = form_groups(model, config.zero.persistence_threshold)
    layouts = [
        lay_out([(i, name, tuple(p.shape), p in trainable) for i, name, p in group.params], compute.itemsize)
        for group in members
    ]
    return members, layouts


def _plan(
    config: TieringConfig,
    members: list[GroupMembers],
    layouts: list[FlatLayout],
    compute: torch.dtype,
    grad_dtype: torch.dtype,
    device: torch.device,
    nvme_path: Path | None,
) -> Plan:
    on_gpu = device.type == "cuda"
    if on_gpu and config.zero.offload_optimizer.device == "none" != config.zero.offload_param.device:
        raise ConfigError(
            "offload_param without offload_optimizer is not supported in this version on a GPU: offload both"
        )
    load = Workload(
        groups=tuple(
            GroupSizes(
                name=group.name,
                param_bytes=layout.numel * compute.itemsize,
                trainable_numel=layout.trainable_numel,
                parent=group.parent,
                persistent=group.persistent,
                uses=len(group.entries),
            )
            for group, layout in zip(members, layouts, strict=True)
        ),
        micro_batches=config.gradient_accumulation_steps,
        compute_itemsize=compute.itemsize,
        grad_itemsize=grad_dtype.itemsize,
        offload_param=OFFLOAD_TIERS[config.zero.offload_param.device],
        offload_optimizer=OFFLOAD_TIERS[config.zero.offload_optimizer.device],
        cache_in_host=config.tiering.cache_in_host,
        sub_group_numel=config.zero.sub_group_size,
        prefetch_bytes=config.zero.prefetch_elements * compute.itemsize,
        device_is_host=not on_gpu,
        fetch_by_copy=on_gpu or not can_exchange(),
    )
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else None
    return make_plan(load, resolve_budgets(config.tiering, device_memory=free, nvme_path=nvme_path))


def _make_groups(
    members: list[GroupMembers],
    layouts: list[FlatLayout],
    compute: torch.dtype,
    tiers: Tiers,
    streams: Streams | None,
) -> list[ParamGroup]:
    parents = {group.parent for group in members}
    made = []
    for index, (group, layout) in enumerate(zip(members, layouts, strict=True)):
        by_index = {i: param for i, _, param in group.params}
        names = tuple(piece.name for piece in layout.pieces)
        home = tiers.home(tiers.plan.param_tiers[index], layout.numel * compute.itemsize, "parameters", names)
        made.append(
            ParamGroup(
                index,
                group.name,
                layout,
                [by_index[piece.index] for piece in layout.pieces],
                group.entries,
                group.parent,
                dtype=compute,
                home=home,
                tiers=tiers,
                streams=streams,
                nested=index in parents,
            )
        )
    return made


def _gradient_homes(groups: list[ParamGroup], dtype: torch.dtype, tiers: Tiers) -> list[Any]:
    return [
        tiers.home(
            tier,
            group.layout.trainable_numel * dtype.itemsize,
            "gradients",
            tuple(piece.name for piece in group.layout.pieces if piece.trainable),
        )
        for group, tier in zip(groups, tiers.plan.grad_tiers, strict=True)
    ]
