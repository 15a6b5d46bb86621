"""What a run is beside its tensors: counters, options, schedules, its place in the data, its random numbers.

All of it is plain (see encoding.py). What ranks share is taken from rank 0 when it is restored; what is a rank's own
(random numbers, the place in its share of the data, client_state, buffers) from that rank, if the run had it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tiering import logs
from tiering.checkpoint.manifest import MOST
from tiering.errors import CheckpointError, ConfigError
from tiering.strict_json import short
from zero3.building.model_names import ModelNames
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint import encoding, random_state
from zero3.loop.accumulation import Accumulation
from zero3.loop.data_loader import TrainingLoader
from zero3.loop.step import Update
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer

log = logging.getLogger(__name__)

# Options that say how this optimizer works, and not where its run was: they are not taken over.
_ITS_OWN = frozenset(
    {
        *("state_format", "stochastic_rounding", "decoupled_weight_decay"),
        *("fused", "foreach", "capturable", "differentiable"),
    }
)
_OWNERS = {
    "lr_scheduler": "the learning rate schedule's state_dict()",
    "optimizer": "the optimizer's state_dict()",
    "param_groups": "the optimizer's param_groups",
    "extra_state": "a module's get_extra_state()",
}


@dataclass(frozen=True)
class RankState:
    """What a rank has beside the tiers: ``content`` is plain, and refers to ``tensors`` by name."""

    content: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Resumable(Protocol):
    """The parts of a run that an engine is given after it is built, and the number of samples in its updates."""

    @property
    def lr_scheduler(self) -> LRScheduler | None: ...
    @property
    def training_dataloader(self) -> TrainingLoader | None: ...
    def train_batch_size(self) -> int: ...


class RunState:
    """Collects and restores the state of a ``run`` beside its tensors, on this ``rank``; modules go by ``names``."""

    def __init__(
        self,
        run: Resumable,
        optimizer: TieredOptimizer | ClientOptimizer,
        updates: Update,
        accumulation: Accumulation,
        names: ModelNames,
        rank: int,
    ) -> None:
        self._run = run
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._model_names = names
        self._rank = rank
        self._updates = updates
        self._name_of: dict[nn.Parameter, str] = {}

    def collect(self, client_state: Mapping[str, Any]) -> RankState:
        """All of it, as it is now. ConfigError, naming the place, for what has no plain form."""
        if not isinstance(client_state, Mapping):
            raise ConfigError(
                f"client_state is a {type(client_state).__name__}: give a dict, in which each value has its name"
            )
        tensors = {
            name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in self._buffers()
        }
        buffers = list(tensors)
        loader, scheduler = self._run.training_dataloader, self._run.lr_scheduler
        optimizer = self._optimizer
        leads = self._rank == 0  # whose the state of a client is that all ranks have
        found = {
            "engine": {"micro_steps": self._accumulation.micro_steps, **self._updates.state_dict()},
            "param_groups": [
                {"options": _options(group), "names": self._names(group)} for group in optimizer.param_groups
            ],
            "optimizer": optimizer.client.state_dict()
            if leads and isinstance(optimizer, ClientOptimizer)
            else None,
            "lr_scheduler": None
            if scheduler is None
            else {"class": type(scheduler).__name__, "state": _without_functions(_state_of(scheduler))},
            "extra_state": {name: module.get_extra_state() for name, module in self._with_extra_state()},
            "data": None if loader is None else loader.state_dict(),
            "random": random_state.capture(),
            "client_state": dict(client_state),
        }
        content = {}
        for name, value in found.items():
            try:
                content[name] = encoding.encode(value, tensors, name)
            except ConfigError as error:
                if name not in _OWNERS:
                    raise
                raise ConfigError(
                    f"{error.message}. It is what {_OWNERS[name]} gave: let that give plain values, or keep what it is"
                    " of out of initialize() and save it in client_state"
                ) from error
        return RankState({"buffers": buffers, **content}, tensors)

    def check(self, shared: RankState, *, optimizer: bool, scheduler: bool) -> None:
        """CheckpointError if the engine cannot go on from it; the flags are those of ``restore``."""
        if scheduler:
            self._check_scheduler(_part(shared, "lr_scheduler"))
        if not optimizer:
            return
        counters = {"micro_steps": self._accumulation.micro_steps, **self._updates.state_dict()}
        saved_counters = self._counters(shared)
        _check_like(saved_counters, counters, "engine")
        _check_counters(saved_counters)
        saved, here = _part(shared, "param_groups"), self._optimizer.param_groups
        _check_like(saved, [], "param_groups")
        as_saved = "make the optimizer as it was made for the run that saved, or load with load_optimizer_states=False"
        if len(saved) != len(here):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} param groups, and the optimizer {len(here)}: {as_saved}"
            )
        groups_here = {name: number for number, group in enumerate(here) for name in self._names(group)}
        for number, (group, ours) in enumerate(zip(saved, here, strict=True)):
            _check_like(group, {"options": {}, "names": []}, f"param_groups[{number}]")
            options = group["options"]
            known = {
                name: value
                for name, value in _options(ours).items()
                if name in options and name not in _ITS_OWN
            }
            _check_like(options, known, f"param_groups[{number}]['options']")
            self._check_options(number, ours | _taken_over(options))
            for name in group["names"]:
                _check_like(name, "", f"a name in param_groups[{number}]")
                if groups_here.get(name, number) != number:
                    raise CheckpointError(
                        f"{name!r} was in param group {number} and is in group {groups_here[name]} here: {as_saved}"
                    )
        loader, data = self._run.training_dataloader, _part(shared, "data")
        if loader is not None and data is not None:
            loader.check_state_dict(data)

    def restore(
        self, shared: RankState, own: RankState | None, *, optimizer: bool, scheduler: bool
    ) -> dict[str, Any]:
        """Go on from what rank 0 and, if the run had one, this rank had; returns the client_state.

        ``optimizer`` and ``scheduler`` say whether their options are taken over.
        """
        if optimizer:
            counters = self._counters(shared)
            micro_steps = counters["micro_steps"]  # of a run that accumulated otherwise, perhaps
            self._accumulation.resume(micro_steps - micro_steps % self._accumulation.steps)
            self._updates.load_state_dict(counters)
            self._restore_options(shared)
        if scheduler:
            self._restore_scheduler(shared)
            if not optimizer:
                self._follow_schedule()
        mine = own or shared
        self._restore_extra_state(mine)
        if optimizer:
            self._restore_data(mine)
            if own is not None:
                random_state.restore(_part(own, "random"))
            else:
                log.warning(
                    "the checkpoint has no random state for this rank: its random numbers go on as they are"
                )
        client_state: dict[str, Any] = _part(mine, "client_state")
        _check_like(client_state, {}, "client_state")
        return client_state

    def _counters(self, shared: RankState) -> dict[str, Any]:
        """Those that were saved. An older checkpoint has no samples: as if all updates had had as many as now."""
        saved: dict[str, Any] = _part(shared, "engine")
        _check_like(saved, {"steps": 0}, "engine")
        return {"samples": saved["steps"] * self._run.train_batch_size(), **saved}

    def _restore_options(self, shared: RankState) -> None:
        optimizer = self._optimizer
        client = _part(shared, "optimizer")
        if isinstance(optimizer, ClientOptimizer):
            if client is None:
                raise CheckpointError(
                    f"the checkpoint has no state for a {type(optimizer.client).__name__}: load it with"
                    " load_optimizer_states=False"
                )
            optimizer.load_state_dict(client)
        for number, group in enumerate(_part(shared, "param_groups")):
            ours, saved = optimizer.param_groups[number], group["options"]
            for name in sorted(_ITS_OWN & saved.keys() & ours.keys()):
                if saved[name] != ours[name]:
                    log.log(
                        logs.once(logging.WARNING),
                        "param group %d was saved with %s %r, and goes on with %r, as this optimizer was made",
                        *(number, name, saved[name], ours[name]),
                    )
            ours.update(_taken_over(saved))

    def _check_options(self, number: int, options: dict[str, Any]) -> None:
        """CheckpointError if the update rule refuses ``options`` of a param group, which ``step`` would find."""
        if isinstance(self._optimizer, TieredOptimizer):
            try:
                self._optimizer.check_options(number, options)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"an option of the checkpoint cannot be used: {error}") from None

    def _check_scheduler(self, saved: Any) -> None:
        scheduler = self._run.lr_scheduler
        if scheduler is None or saved is None:
            return
        _check_like(saved, {"class": "", "state": {}}, "lr_scheduler")
        here = type(scheduler).__name__
        if saved["class"] != here:
            raise CheckpointError(
                f"a {saved['class']} was saved, and the schedule here is a {here}: make the one of the run that saved,"
                " or load with load_lr_scheduler_states=False"
            )

    def _restore_scheduler(self, shared: RankState) -> None:
        scheduler, saved = self._run.lr_scheduler, _part(shared, "lr_scheduler")
        if scheduler is not None and saved is not None:
            try:
                scheduler.load_state_dict(saved["state"])
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
        scheduler = self._run.lr_scheduler
        if scheduler is not None:
            for group, rate in zip(self._optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _restore_data(self, mine: RankState) -> None:
        loader, saved = self._run.training_dataloader, _part(mine, "data")
        if loader is not None and saved is not None:
            loader.load_state_dict(saved)

    def _restore_extra_state(self, mine: RankState) -> None:
        saved = _part(mine, "extra_state")
        _check_like(saved, {}, "extra_state")
        for name, module in self._with_extra_state():
            if name in saved:
                module.set_extra_state(saved.pop(name))
            else:
                log.warning("the checkpoint has no extra state for module %r: it keeps its own", name)
        if saved:
            log.warning("the checkpoint has extra state that no module here takes: %s", ", ".join(saved))

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that give their ``state_dict`` more than parameters and buffers."""
        for name, module in self._model_names.modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        """Of a param group's parameters."""
        if not self._name_of:
            self._name_of = {param: name for name, param in self._model_names.parameters()}
        return [self._name_of[param] for param in group["params"] if param in self._name_of]

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Persistent buffers, by the first name under which each is that. ConfigError for a dtype that files lack."""
        found: dict[Tensor, str] = {}
        for prefix, module in self._model_names.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
        for buffer, name in found.items():
            if buffer.dtype not in STORED_NAMES:
                raise ConfigError(
                    f"buffer {name!r} is of {buffer.dtype}, which safetensors files do not hold: keep it as another one"
                    " (view_as_real), or register it with persistent=False"
                )
        return [(name, buffer) for buffer, name in found.items()]


def _check_like(saved: Any, here: Any, where: str) -> None:
    """CheckpointError unless ``saved`` can stand for what is ``here``: its keys, and values of their kinds."""
    # An option may be set here and not there, or there alone.
    free = here is None or (saved is None and _kind(here) not in (bool, float, dict, list))
    if not free and _kind(saved) is not _kind(here):
        raise CheckpointError(
            f"{where} of the checkpoint is a {type(saved).__name__} where this engine has a {type(here).__name__}: it"
            " is damaged, or of another kind of run; load another one (tag=)"
        )
    if _kind(here) is list and here:
        if len(saved) != len(here):
            raise CheckpointError(
                f"{where} of the checkpoint has {len(saved)} values where this engine has {len(here)}: it is damaged;"
                " load another one (tag=)"
            )
        for number, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
            _check_like(theirs, ours, f"{where}[{number}]")
    if isinstance(here, dict):
        for key, value in here.items():
            if key not in saved:
                raise CheckpointError(
                    f"{where} of the checkpoint has no {key!r}: it is damaged; load another one (tag=)"
                )
            _check_like(saved[key], value, f"{where}[{key!r}]")


def _check_counters(saved: Mapping[str, Any]) -> None:
    """CheckpointError for counters that no run can have come to."""
    scale = saved["loss_scale"]
    counts = {f"engine[{name!r}]": saved[name] for name in ("steps", "samples", "skipped", "micro_steps")}
    counts |= {f"engine['loss_scale'][{name!r}]": scale[name] for name in ("clean", "overflows_left")}
    for where, value in counts.items():
        if type(value) is not int or not 0 <= value < MOST:
            raise CheckpointError(
                f"{where} of the checkpoint is {short.repr(value)}, not a count: it is damaged; load another one (tag=)"
            )
    if not 0 < scale["value"] < math.inf:
        raise CheckpointError(
            f"engine['loss_scale']['value'] of the checkpoint is {short.repr(scale['value'])}, not a loss scale: it is"
            " damaged; load another one (tag=)"
        )


def _kind(value: Any) -> type:
    """Numbers are alike, whole or in a tensor; tuples come back as lists from a configuration."""
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return float
    return list if isinstance(value, tuple) else type(value)


def _state_of(scheduler: Any) -> Any:
    """Of one that need be no torch's: to train, a step() suffices."""
    needed = ("state_dict", "load_state_dict", "get_last_lr")
    missing = [f"{name}()" for name in needed if not hasattr(scheduler, name)]
    if missing:
        raise ConfigError(
            f"the {type(scheduler).__name__} given to initialize(lr_scheduler=...) has no {', '.join(missing)}, by"
            " which a run goes on: add what is missing, or step it yourself and save its state in client_state"
        )
    return scheduler.state_dict()


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state without the functions among its attributes, which are those of whoever loads it."""
    functions = [name for name, value in state.items() if callable(value)]
    if functions:
        log.log(
            logs.once(logging.WARNING),
            "%s of the learning rate schedule are functions, which a checkpoint does not hold: a schedule that loads it"
            " keeps its own",
            ", ".join(map(repr, functions)),
        )
    return {name: value for name, value in state.items() if name not in functions}


def _taken_over(options: Mapping[str, Any]) -> dict[str, Any]:
    """The saved ``options`` that replace those of a param group here."""
    return {name: value for name, value in options.items() if name not in _ITS_OWN}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _part(state: RankState, name: str) -> Any:
    if name not in state.content:
        raise CheckpointError(f"the checkpoint has no {name!r}; it is damaged: load another one (tag=)")
    return encoding.decode(state.content[name], dict(state.tensors), name)
