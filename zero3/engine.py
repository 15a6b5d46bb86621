"""The engine: wires groups, tiers, gradients and optimizer together; the parts decide, this file does not."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from tiering import ds_config
from tiering.config import TieringConfig
from tiering.errors import EngineStateError
from tiering.interrupts import deferred_interrupts
from tiering.telemetry import PageWriter, Publisher, Snapshot
from zero3 import hooks
from zero3.assembly import ModelParameters, assemble
from zero3.optimizer import TieredOptimizer
from zero3.prefetch import Prefetcher
from zero3.run_record import RunRecord
from zero3.schedule import PassSchedule
from zero3.state import TieredState

log = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_

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
        self.lr_scheduler: LRScheduler | None = None
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self._closed = False
        self._torn = ""  # why parameters and optimizer state are no longer of one step
        self._norm: float | None = None
        self._loss: Tensor | None = None
        self._pending_backward = False
        self._in_engine_backward = False

        parts = assemble(model, config, model_parameters)
        self.device, self.plan, self.optimizer = parts.device, parts.plan, parts.optimizer
        self._tiers, self._groups, self._gradients = parts.tiers, parts.groups, parts.gradients
        self._state = TieredState(parts)
        self._prefetcher = Prefetcher()
        self._schedule = PassSchedule(
            self._groups, self._prefetcher, self._gradients, self._on_backward, self._on_end_of_backward
        )
        self._record = RunRecord(config.tiering.run_name or f"run-{os.getpid()}", self._tiers)
        try:
            self._publisher = self._publish()
        except BaseException:
            self._tiers.close()
            raise
        self._handles = hooks.install(self._groups, self._schedule)
        self._handles += hooks.install_root(model, self._schedule)

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

        After an exception the engine is as after its last step: gradients accumulated since then are gone.
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
                self.micro_steps -= self.micro_steps % self.config.gradient_accumulation_steps
                raise
            finally:
                self._in_engine_backward = False
        return scaled

    def step(self) -> None:
        """End a micro-batch; after gradient_accumulation_steps of them, update the parameters.

        A step whose gradients are not finite is skipped with a warning and leaves all state as it was. Ctrl-C waits for
        the end of the step (a second one does not). A step that is ended by an exception leaves some parameters updated
        and others not: then the engine can only be closed.
        """
        self._check_open("step")
        if not self._pending_backward:
            raise EngineStateError(
                "step was called without a backward since the last one; call engine.backward(loss) first"
            )
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self._check_unfrozen()
        with deferred_interrupts():
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
        return self._state.weights(self.module)

    def master_state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of the fp32 masters of all trainable parameters, by name."""
        self._check_open("master_state_dict")
        return self._state.masters()

    def snapshot(self) -> Snapshot:
        """What telemetry publishes, as of now."""
        return self._record.snapshot()

    def flip_bit(self) -> str:
        """Flip one bit of one master on NVMe and say where: a planted fault, to show that comparisons find it."""
        self._check_open("flip_bit")
        return self._state.flip_bit()

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
        try:
            self._prefetcher.forget()
            self._norm = self._gradients.norm()
            if math.isfinite(self._norm):
                self._apply(self._norm)
            else:
                self.skipped_steps += 1
                log.warning(
                    "step %d skipped: the gradient of %r is not finite; parameters and optimizer state are unchanged",
                    self.global_steps + 1,
                    self._gradients.first_not_finite(),
                )
        finally:
            self._gradients.reset()

    def _apply(self, norm: float) -> None:
        """Clip and step. What fails in between leaves state of two steps, which nobody may train on."""
        clip = self.config.gradient_clipping
        try:
            self.optimizer.step(grad_scale=min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0)
        except BaseException as error:
            self._torn = f"step {self.global_steps + 1} was ended by {type(error).__name__}: {error}"
            raise
        finally:
            # As an in-place update does: a graph of before the step must not go backward with parameters of after it.
            torch.autograd.graph.increment_version(
                [param for group in self.optimizer.param_groups for param in group["params"]]
            )
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

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

    def _check_unfrozen(self) -> None:
        for group in self._groups:
            for piece, param in zip(group.layout.pieces, group.params, strict=True):
                if param.requires_grad and not piece.trainable:
                    raise EngineStateError(
                        f"{piece.name!r} was frozen at initialize and requires a gradient now, but has no optimizer"
                        " state: it would never be trained. Initialize with it unfrozen, or freeze it again"
                    )

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise EngineStateError(f"{what} was called after close(); initialize the model again")
        if self._torn:
            raise EngineStateError(
                f"{what} was called on parameters that are partly updated ({self._torn}); close the engine, and"
                " initialize the model again from a checkpoint"
            )
