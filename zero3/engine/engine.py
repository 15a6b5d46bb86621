"""The engine: forward, backward and step of a training loop, and the other calls that a script makes.

loop_parts.py makes the parts that the engine calls, and closes them. Parameters, gradients and optimizer state by name
are in by_name.py. Checkpoints and exports are in state_files.py, as a base class.
DeepSpeed's names for the engine are in zero3/deepspeed/engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tiering._interrupts import atomic, deferred_interrupts
from tiering.config.training import TieringConfig
from tiering.errors import CheckpointError, EngineStateError
from tiering.telemetry import ConfigurationStatus, Phase, Snapshot
from zero3.building import peft_models
from zero3.building.quantized_linear import explain_codes
from zero3.engine import released
from zero3.engine.loop_parts import connect
from zero3.engine.module_front import ModuleFront
from zero3.engine.optimizer_front import OptimizerFront
from zero3.engine.released import Released
from zero3.engine.state_files import StateFiles
from zero3.loop.data_loader import TrainingLoader
from zero3.loop.lifecycle import check_loss
from zero3.loop.preemption import final_save
from zero3.loop.step_state import StepState
from zero3.params.compilation import eager
from zero3.params.precision import COMPUTE_DTYPES, LossScale, autocast, cast_floating, explain_dtypes
from zero3.passes.hooks import explain_transform, watch_backward
from zero3.ranks.mesh import MeshPlace
from zero3.setup.assembly import Weights, assemble
from zero3.setup.optimizer_choice import ClientOptimizerChoice, ModelParameters


class Engine(StateFiles):
    """A model whose parameters, gradients and optimizer state live on tiers. ``initialize`` makes it.

    It is a context manager; ``close`` releases memory and swap space. All ranks make the same calls in the same order,
    also the calls that read or set parameters, gradients and state by name.
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
        self.module = model
        self.settings = settings
        self.lr_scheduler: LRScheduler | None = None
        self.training_dataloader: TrainingLoader | None = None
        self._loss: Tensor | None = None
        self._optimizer_front: OptimizerFront | None = None
        self._module_front: ModuleFront | None = None

        parts = assemble(model, settings, model_parameters, optimizer, weights, resume, place)
        try:
            loop = connect(self, model, settings, parts, configuration)
        except BaseException as error:
            if parts.collectives is not None:
                parts.collectives.peers.fail(error)
                parts.collectives.close()
            parts.tiers.close()
            raise
        self.device, self.plan, self.optimizer = parts.device, parts.plan, parts.optimizer
        self.monitor = loop.observation.monitor
        self._loop, self._frozen, self._wrapped = loop, parts.frozen, parts.wrapped
        self._world, self._collectives = parts.world, parts.collectives
        self._tiers, self._groups = parts.tiers, parts.groups
        self._updates, self._accumulation = loop.updates, loop.accumulation
        self._parameters, self._access, self._state = loop.parameters, loop.access, loop.state
        self._prefetcher, self._schedule = loop.prefetcher, loop.schedule
        self._ready, self._preemption, self._observation = loop.ready, loop.preemption, loop.observation
        self._checkpoints, self._snapshots, self._export = loop.checkpoints, loop.snapshots, loop.export
        self._named_state = loop.named_state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. After an exception, the state of the engine is that from before the call."""
        self._ready.check_open("forward")
        self._ready.give_up_unfinished()
        self._parameters.check_residents()
        if self.module.training and torch.is_grad_enabled():
            self._parameters.check_frozen()
            self._observation.throughput.count(args, kwargs)
        if self.settings.cast_inputs:
            args, kwargs = cast_floating((args, kwargs), COMPUTE_DTYPES[self.settings.precision])
        with self._phase("forward"), self._ready.running_forward(), autocast(self.settings, self.device):
            try:
                return self.module(*args, **kwargs)
            except BaseException as error:
                self._schedule.abandon()
                explain_dtypes(error, self.module, (args, kwargs), self.settings)
                explain_codes(error, self.module)
                explain_transform(error)
                raise

    def scale(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor:
        """``loss`` multiplied by the loss scale and divided by gradient_accumulation_steps, ready for its backward.

        ``engine.scale(loss).backward()`` does the same as ``engine.backward(loss)``. Raises EngineStateError if
        ``loss`` is not a scalar tensor that requires a gradient.
        """
        check_loss(loss)
        self._loss = loss.detach()
        self._accumulation.note_scaled()
        self._schedule.activations.backward_of(loss)
        if self.settings.precision == "fp16" or self.settings.autocast == "fp16":
            loss = loss.float() * self.loss_scale.value
        scaled = loss / self._accumulation.steps if scale_wrt_gas else loss
        # Here at the latest: a backward that seems to begin in that of a reentrant checkpoint seems to end with it.
        watch_backward(scaled, self._schedule.begin_backward)
        return scaled

    @eager
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of a scalar ``loss``, divided by gradient_accumulation_steps; returns that quotient.

        With ``scale_wrt_gas`` False the script has divided the loss itself. After an exception, the state of the engine
        is that after its last step: the gradients accumulated since then are dropped.
        """
        self._ready.check_open("backward")
        self._ready.check_trains("backward")
        self._parameters.check_frozen()
        self._schedule.check_thread()
        with self._accumulation.one_backward():
            scaled = self.scale(loss, scale_wrt_gas=scale_wrt_gas)
            with self._phase("backward"):
                try:
                    # Before the backward: a failure after it would keep gradients that the caller counts as dropped.
                    divided_loss = loss / self._accumulation.steps if scale_wrt_gas else loss
                    scaled.backward(retain_graph=retain_graph)
                except BaseException:
                    self._loss = None
                    self._ready.give_up_backward()
                    raise
        # Also if no gradient has arrived.
        self._updates.current_step.to_pending()
        return divided_loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only: backwards inside the block add to the gradients, and the next one outside completes them.

        For a loop that accumulates by itself, with gradient_accumulation_steps 1 and losses that it has divided.
        ``step`` raises EngineStateError inside the block. With ``tiering.grad_accum_dtype`` "fp32" the sums are not
        rounded to 16 bits.
        """
        return self._accumulation.no_sync()

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Inside the block, the model computes without its adapters of peft: the reference model of DPO and GRPO.

        Call it under ``torch.no_grad()``. A forward reads the frozen parameters once; the adapters keep their values,
        gradients and state. Raises ConfigError for a model without adapters.
        """
        self._ready.check_open("adapters_disabled")
        return peft_models.adapters_disabled(self.module)

    def as_optimizer(self) -> OptimizerFront:
        """The engine as a ``torch.optim.Optimizer`` with the engine's param groups, whose ``step`` calls ``step``.

        From then on the loop owns the accumulation of gradients: it runs any number of backwards for an update, divides
        their losses itself, and calls ``step`` once. The engine divides no loss and counts no micro-batches;
        gradient_accumulation_steps of the configuration only determines the dtype in which gradients are summed, and
        the number of samples of an update. Use ``no_sync`` for all backwards of an update but the last. Plain
        ``loss.backward()`` works except in fp16, whose losses need their scale: call ``backward(loss)``, or
        ``scale(loss).backward()``.

        Every call returns the same object. Raises EngineStateError without an optimizer, and with divided gradients
        that no step has used.
        """
        if self._optimizer_front is None:
            self._ready.check_open("as_optimizer")
            self._ready.check_trains("as_optimizer")
            if self._accumulation.steps > 1:
                self._ready.check_no_gradients("as_optimizer")
            self._accumulation.leave_to_loop()
            self._optimizer_front = OptimizerFront(self, self._updates, self._accumulation)
        return self._optimizer_front

    def as_module(self) -> ModuleFront:
        """The engine as an ``nn.Module``, with the names, parameters and attributes of the model.

        Its forward is ``forward``. Every call returns the same object.
        """
        if self._module_front is None:
            self._module_front = ModuleFront(self, sharded=self._shards_parameters)
        return self._module_front

    @property
    def _shards_parameters(self) -> bool:
        """Whether all ranks must run each forward together, because each has a shard of the parameters."""
        return self._world.partition_size > 1 and self.settings.zero.stage == 3

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last ``step``. After ``close`` or ``release`` this does nothing."""
        if self._ready.closed:
            return
        self._ready.check_open("zero_grad")
        if self._updates.current_step.state is not StepState.UPDATED_IN_BACKWARD:
            self.optimizer.zero_grad()
            self._ready.drop_gradients()

    @eager
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; after gradient_accumulation_steps of them, update the parameters.

        After an update, the ``step`` of lr_scheduler is called with ``lr_kwargs``.

        A step whose gradients are not finite is skipped and changes no state. With dynamic loss scaling the scale is
        lowered. Otherwise a warning names the parameter, and ``tiering.max_skipped_steps`` skipped steps in a row raise
        EngineStateError. Ctrl-C waits for the end of the step; a second Ctrl-C does not. After an exception in a step,
        ``global_steps`` tells whether the step has begun: if so, the next call that needs the parameters completes it;
        else its gradients are dropped. A step of several ranks, of a torch optimizer or on a GPU that has no memory
        left may be impossible to complete: the engine can then only be closed.
        """
        self._ready.check_open("step")
        self._ready.check_trains("step")
        self._ready.give_up_unfinished()
        self._ready.check_step()
        boundary = self._accumulation.at_boundary
        if boundary:
            self._parameters.check_before_update()
            self._parameters.store_edits_of_residents()
        with deferred_interrupts():
            if boundary:
                with self._phase("step"):
                    self._update(lr_kwargs or {})
                self._checkpoints.after_step(all_written=self._updates.saving == 2)
                self._observation.end_step(self.train_batch_size())
            else:
                with atomic():
                    self._updates.end_micro_batch()
                    self._accumulation.count(updated=False)
            with self._phase("step") if self._updates.deferring else nullcontext():
                self._prefetcher.look_ahead()
        if boundary:
            self._preemption.save_and_exit(self.close)

    def save_and_exit_on(
        self,
        *signals: str,
        save: Callable[[], object] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        client_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        keep: int | None = None,
    ) -> None:
        """Handle ``signals`` (default SIGTERM and SIGUSR1) as a request to stop after the current step.

        ``step`` then saves a checkpoint to ``save_dir`` or calls ``save``, closes the engine and raises
        SystemExit(75), whose code means "try again later" (EX_TEMPFAIL). ``client_state`` (a mapping, or a function
        that returns one and is called then) and ``keep`` are arguments of the save; the code of the loop after
        ``step()`` has not run yet. If the save fails, ``step`` raises its error, and the engine stays open. Without
        ``save_dir`` and ``save`` only ``stop_requested`` reports the signal, for a loop that ends by itself. Call this
        in the main thread; it lasts until ``close``. A second signal changes nothing.
        """
        self._ready.check_open("save_and_exit_on")
        save = final_save(self.save_checkpoint, save, save_dir, client_state, keep)
        self._preemption.handle(signals or ("SIGTERM", "SIGUSR1"), save)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of parameters in the compute dtype and of persistent buffers, by name."""
        self._ready.check_open("state_dict")
        return self._state.weights(self.module)

    def master_state_dict(self) -> dict[str, Tensor]:
        """Copies, in host memory, of the fp32 masters of all trainable parameters, by name."""
        self._ready.check_open("master_state_dict")
        self._parameters.store_edits_of_residents()
        return self._state.masters(self.module)

    def get_fp32_parameter(self, name: str) -> Tensor:
        """A copy, in host memory, of a parameter's fp32 master, or of a frozen parameter in fp32, in its shape.

        ``name`` is that of ``module.named_parameters()``, or of a whole weight that is stored as tiles; the methods
        below take the same names. Raises ConfigError for an unknown name.
        """
        return self._named_state.get_fp32_parameter(name)

    def set_fp32_parameter(self, name: str, values: Tensor) -> None:
        """Set the master to ``values`` (of the parameter's shape), and the parameter to the rounded values.

        Rank 0's ``values`` count. Raises EngineStateError while a forward or backward is running.
        """
        self._named_state.set_fp32_parameter(name, values)

    def get_fp32_gradient(self, name: str) -> Tensor | None:
        """A copy of the accumulated gradient, unscaled, before clipping, in fp32; None if there is none.

        That of a whole weight is zero for tiles that have none.
        """
        return self._named_state.get_fp32_gradient(name)

    def set_fp32_gradient(self, name: str, values: Tensor) -> None:
        """Replace the accumulated gradient by ``values`` (unscaled, of the parameter's shape), between passes.

        Rank 0's ``values`` count. The next ``step`` uses them and needs no backward; a backward before it adds to them.
        """
        self._named_state.set_fp32_gradient(name, values)

    def get_fp32_state(self, name: str, key: str) -> Tensor:
        """A copy of a state tensor of a parameter ("exp_avg", ...; see ``state_names``), fp32, of its shape."""
        return self._named_state.get_fp32_state(name, key)

    def set_fp32_state(self, name: str, key: str, values: Tensor) -> None:
        """Replace a state tensor of a parameter by rank 0's ``values``."""
        self._named_state.set_fp32_state(name, key, values)

    def is_trained(self, name: str) -> bool:
        """Whether the parameter is trained; a parameter that was frozen at ``initialize`` is not."""
        return self._named_state.is_trained(name)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the optimizer's state tensors, without the master."""
        return self._state.state_names

    def flip_bit(self) -> str:
        """Flip one bit of one master on NVMe and return its place: a test fault that comparisons must find."""
        self._ready.check_open("flip_bit")
        return self._state.flip_bit()

    @property
    def global_steps(self) -> int:
        """Updates so far, including skipped ones."""
        return self._updates.steps

    def train_batch_size(self) -> int:
        """Samples per update, over all ranks; those that share sequences count once."""
        samples = self.settings.micro_batch_size * self.settings.gradient_accumulation_steps
        return samples * self._world.place.data_size

    @property
    def loss_scale(self) -> LossScale:
        """The factor of the loss: 1 except in fp16."""
        return self._updates.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite. Checkpoints contain their number.

        Telemetry calls it ``global_skipped_steps``; its ``skipped_steps`` counts from the start of the process.
        """
        return self._updates.skipped

    @property
    def stop_requested(self) -> str:
        """The name of the signal that requested a stop; empty if there is none.

        A signal on one rank stops all ranks after the same step; until that step this stays empty.
        """
        return self._preemption.requested

    def snapshot(self) -> Snapshot:
        """The figures that telemetry publishes, as of now."""
        return self._observation.record.snapshot()

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the next whole step to ``path`` as a Chrome trace (JSON), which chrome://tracing and Perfetto show.

        The trace begins at the end of the current step and ends with the step after it; the engine then waits for its
        transfers. An exception in that step, or ``close``, writes the trace recorded until then.

        Raises TelemetryError if ``path`` cannot be written, EngineStateError if a trace is already in progress.
        """
        self._ready.check_open("trace")
        self._observation.begin_trace(path)

    def close(self) -> None:
        """Wait for transfers, and release memory and swap space. Idempotent.

        The parameters are unusable afterwards; ``release`` ends the engine and keeps them.
        """
        if not self._ready.closed:
            self._loop.end("close()")

    def release(self, device: torch.device | str | None = None, *, masters: bool = False) -> None:
        """End the engine as ``close`` does, and turn the model's parameters into ordinary ones with their values.

        The same parameter objects then hold the values of ``state_dict()`` in memory of their own, on the engine's
        device or on ``device`` ("cpu"), and ``initialize`` accepts the model again. With ``masters``, trained
        parameters hold their fp32 masters instead, so that the next engine starts with the same masters. Optimizer
        state and gradients that no step has used are dropped. All ranks call this together. A second call does nothing.

        Raises PlacementError, with sizes and without a change, if the parameters do not fit in addition to the memory
        of the engine; EngineStateError after ``close``, while a pass is running and after a step that failed.
        """
        trained = {
            param
            for group in self._groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
            if piece.trainable
        }
        self._give_back("release", device, trained if masters else set())

    def _give_back(self, call: str, device: torch.device | str | None, in_fp32: set[nn.Parameter]) -> None:
        """``release``, on behalf of ``call``, with the parameters ``in_fp32`` in fp32."""
        if self._ready.released:
            return
        self._ready.check_between_steps(call)
        target = released.target_device(device, self.device)
        self._parameters.store_edits_of_residents()
        values = Released(
            self._groups,
            self._state,
            target,
            in_fp32=in_fp32,
            frozen=self._frozen,
            collectives=self._collectives,
            local_size=self._world.local_size,
        )
        try:
            self._loop.end(f"{call}()")
        # Also if the close raises the error of a background save.
        finally:
            try:
                values.restore_parameters(self.module)
            finally:
                self._wrapped.join()

    def __reduce__(self) -> Any:
        raise EngineStateError(
            "an engine cannot be copied or pickled; copy engine.module, or save engine.state_dict()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.leave(error)
        try:
            self.close()
        # The error of a background save is in the log: the error that ends the block takes precedence.
        except CheckpointError:
            if error is None:
                raise

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        """Time the block. An exception in it ends the trace, and is reported to the other ranks."""
        with self._observation.record.phases.running(phase), self._tiers.timeline.span("compute", phase):
            try:
                yield
            except BaseException as error:
                self._ready.explain(error, phase)
                self._observation.note_failure(error)
                if self._collectives is not None:
                    self._collectives.report_failure(phase, error)
                raise

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        def schedule() -> None:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)

        self._prefetcher.forget()
        try:
            # The next step may follow loss.backward() alone, and then has no loss.
            loss, self._loss = self._loss, None
            self._updates.run(
                loss,
                self.train_batch_size(),
                self._accumulation,
                stop=self._preemption.received_signal,
                saving=self._checkpoints.progress,
                schedule=schedule,
            )
        finally:
            self._access.note_versions()
