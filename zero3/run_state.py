"""What a run is beside its tensors: counters, options, schedules, its place in the data, its random numbers.

All of it is plain (see plain.py). What ranks share is taken from rank 0 when it is restored; what is a rank's own
(random numbers, the place in its share of the data, client_state, buffers) from that rank, if the run had it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tiering import logs
from tiering.errors import CheckpointError
from zero3 import plain, random_state
from zero3.client_optimizer import ClientOptimizer

if TYPE_CHECKING:
    from zero3.engine import Engine
    from zero3.update import Update

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankState:
    """What a rank has beside the tiers: ``content`` is plain, and refers to ``tensors`` by name."""

    content: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class RunState:
    """Collects and restores what ``engine`` is beside its tensors."""

    def __init__(self, engine: Engine, updates: Update) -> None:
        self._engine = engine
        self._updates = updates

    def collect(self, client_state: Mapping[str, Any]) -> RankState:
        """All of it, as it is now. ConfigError, naming the place, for what has no plain form."""
        engine = self._engine
        tensors = {
            name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in self._buffers()
        }
        buffers = list(tensors)
        loader, scheduler, optimizer = engine.training_dataloader, engine.lr_scheduler, engine.optimizer
        found = {
            "engine": {"micro_steps": engine.micro_steps, **self._updates.state_dict()},
            "param_groups": [_options(group) for group in optimizer.param_groups],
            "optimizer": optimizer.client.state_dict() if isinstance(optimizer, ClientOptimizer) else None,
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "data": None if loader is None else loader.state_dict(),
            "random": random_state.capture(),
            "client_state": dict(client_state),
        }
        content = {name: plain.encode(value, tensors, name) for name, value in found.items()}
        return RankState({"buffers": buffers, **content}, tensors)

    def check(self, shared: RankState, *, optimizer: bool) -> None:
        """CheckpointError if the engine cannot go on from it."""
        if not optimizer:
            return
        counters = {"micro_steps": self._engine.micro_steps, **self._updates.state_dict()}
        _check_like(_part(shared, "engine"), counters, "engine")
        saved, here = _part(shared, "param_groups"), self._engine.optimizer.param_groups
        _check_like(saved, [], "param_groups")
        if len(saved) != len(here):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} param groups, and the optimizer {len(here)}: make it as it was made"
                " for the run that saved, or load with load_optimizer_states=False"
            )
        for number, (options, group) in enumerate(zip(saved, here, strict=True)):
            _check_like(options, {}, f"param_groups[{number}]")
            known = {name: value for name, value in _options(group).items() if name in options}
            _check_like(options, known, f"param_groups[{number}]")
        loader, data = self._engine.training_dataloader, _part(shared, "data")
        if loader is not None and data is not None:
            loader.check_state_dict(data)

    def restore(
        self, shared: RankState, own: RankState | None, *, optimizer: bool, scheduler: bool
    ) -> dict[str, Any]:
        """Go on from what rank 0 and, if the run had one, this rank had; returns the client_state.

        ``optimizer`` and ``scheduler`` say whether their options are taken over.
        """
        engine = self._engine
        counters = _part(shared, "engine")
        if optimizer:
            micro_steps = counters["micro_steps"]  # of a run that accumulated otherwise, perhaps
            engine.micro_steps = micro_steps - micro_steps % engine.config.gradient_accumulation_steps
            self._updates.load_state_dict(counters)
            self._restore_options(shared)
        if scheduler:
            self._restore_scheduler(shared)
            if not optimizer:
                self._follow_schedule()
        mine = own or shared
        if optimizer:
            self._restore_data(mine)
            if own is not None:
                random_state.restore(_part(own, "random"))
            else:
                log.warning(
                    "the checkpoint has no random state for this rank: its random numbers go on as they are"
                )
        client_state: dict[str, Any] = _part(mine, "client_state")
        return client_state

    def _restore_options(self, shared: RankState) -> None:
        optimizer = self._engine.optimizer
        client = _part(shared, "optimizer")
        if isinstance(optimizer, ClientOptimizer):
            if client is None:
                raise CheckpointError(
                    f"the checkpoint has no state for a {type(optimizer.client).__name__}: load it with"
                    " load_optimizer_states=False"
                )
            optimizer.load_state_dict(client)
        for group, options in zip(optimizer.param_groups, _part(shared, "param_groups"), strict=True):
            group.update(options)

    def _restore_scheduler(self, shared: RankState) -> None:
        scheduler, saved = self._engine.lr_scheduler, _part(shared, "lr_scheduler")
        if scheduler is not None and saved is not None:
            try:
                scheduler.load_state_dict(saved)
            except Exception as error:  # whatever a schedule of the user's makes of another one's state
                raise CheckpointError(
                    f"the learning rate schedule that was saved is none for this {type(scheduler).__name__}"
                    f" ({type(error).__name__}: {error}): make the one of the run that saved, or load with"
                    " load_lr_scheduler_states=False"
                ) from error
        elif scheduler is not None or saved is not None:
            which = "engine has none" if scheduler is None else "checkpoint has none"
            log.log(
                logs.once(logging.WARNING),
                "the learning rate scheduler is not restored, because the %s",
                which,
            )

    def _follow_schedule(self) -> None:
        """Options have not come with the state, and many a schedule goes on from the rate that it finds."""
        scheduler = self._engine.lr_scheduler
        if scheduler is not None:
            for group, rate in zip(self._engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _restore_data(self, mine: RankState) -> None:
        loader, saved = self._engine.training_dataloader, _part(mine, "data")
        if loader is not None and saved is not None:
            loader.load_state_dict(saved)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Persistent buffers, by the first name of each."""
        module = self._engine.module
        persistent = {
            f"{prefix}.{name}" if prefix else name
            for prefix, each in module.named_modules()
            for name in each._buffers
            if name not in each._non_persistent_buffers_set
        }
        return [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]


def _check_like(saved: Any, here: Any, where: str) -> None:
    """CheckpointError unless ``saved`` can stand for what is ``here``: its keys, and values of their kinds."""
    free = here is None or (
        saved is None and _kind(here) is not float
    )  # an option that is not set, here or there
    if not free and _kind(saved) is not _kind(here):
        raise CheckpointError(
            f"{where} of the checkpoint is a {type(saved).__name__} where this engine has a {type(here).__name__}: it"
            " is damaged, or of another kind of run; load another one (tag=)"
        )
    if isinstance(here, dict) and saved is not None:
        for key, value in here.items():
            if key not in saved:
                raise CheckpointError(
                    f"{where} of the checkpoint has no {key!r}: it is damaged; load another one (tag=)"
                )
            _check_like(saved[key], value, f"{where}[{key!r}]")


def _kind(value: Any) -> type:
    """Numbers are alike, whole or in a tensor; tuples come back as lists from a configuration."""
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return float
    return list if isinstance(value, tuple) else type(value)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _part(state: RankState, name: str) -> Any:
    if name not in state.content:
        raise CheckpointError(f"the checkpoint has no {name!r}; it is damaged: load another one (tag=)")
    return plain.decode(state.content[name], dict(state.tensors), name)
