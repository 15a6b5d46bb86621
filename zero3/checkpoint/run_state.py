"""The state of a run apart from its tiers: counters, options, schedules, data position, random numbers.

All values have a plain form (see encoding.py). A load restores values that all ranks share from rank 0, and values of a
rank (random numbers, data position, client_state, buffers) from that rank, if it has saved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tiering import _logs
from tiering._remedies import ANOTHER_CHECKPOINT, NEW_OPTIMIZER_STATE, NEW_SCHEDULE
from tiering._strict_json import short
from tiering.checkpoint.manifest import MOST
from tiering.errors import CheckpointError, ConfigError
from zero3.building.model_names import ModelNames
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint import encoding, random_state
from zero3.loop.data_loader import TrainingLoader
from zero3.loop.step import Update
from zero3.loop.step_state import Accumulation
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer

log = logging.getLogger(__name__)

# Options that describe how this optimizer works, not the progress of its run: a load keeps those of this optimizer.
_KEPT_OPTIONS = frozenset(
    {
        *("state_format", "stochastic_rounding", "decoupled_weight_decay", "bias_correction"),
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
    """The state of a rank that is not on tiers: ``content`` is plain, and refers to ``tensors`` by name."""

    content: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Resumable(Protocol):
    """The parts of a run that an engine gets after its construction, and the number of samples of an update."""

    @property
    def lr_scheduler(self) -> LRScheduler | None: ...
    @property
    def training_dataloader(self) -> TrainingLoader | None: ...
    def train_batch_size(self) -> int: ...


class RunState:
    """Collects and restores the state of a ``run`` on this ``rank``, without the tiers. ``names`` names the modules."""

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
        """The current state. ConfigError, with the place of the value, for a value without a plain form."""
        if not isinstance(client_state, Mapping):
            raise ConfigError(
                f"client_state is a {type(client_state).__name__}: pass a dict from names to values"
            )
        tensors = {
            name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in self._buffers()
        }
        buffers = list(tensors)
        loader, scheduler = self._run.training_dataloader, self._run.lr_scheduler
        optimizer = self._optimizer
        # A load takes the state of a client optimizer from rank 0.
        is_first_rank = self._rank == 0
        values = {
            "engine": {"micro_steps": self._accumulation.micro_steps, **self._updates.state_dict()},
            "param_groups": [
                {"options": _options(group), "names": self._names(group)} for group in optimizer.param_groups
            ],
            "optimizer": optimizer.client.state_dict()
            if is_first_rank and isinstance(optimizer, ClientOptimizer)
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
        for name, value in values.items():
            try:
                content[name] = encoding.encode(value, tensors, name)
            except ConfigError as error:
                if name not in _OWNERS:
                    raise
                raise ConfigError(
                    f"{error.message}. The value comes from {_OWNERS[name]}: return plain values there, or do not pass"
                    " the object to initialize(), and save its state in client_state"
                ) from error
        return RankState({"buffers": buffers, **content}, tensors)

    def check(self, shared: RankState, *, optimizer: bool, scheduler: bool) -> None:
        """CheckpointError if ``restore`` cannot use ``shared``; the flags are those of ``restore``."""
        if scheduler:
            self._check_scheduler(_decoded(shared, "lr_scheduler"))
        if not optimizer:
            return
        counters = {"micro_steps": self._accumulation.micro_steps, **self._updates.state_dict()}
        saved_counters = self._counters(shared)
        _check_like(saved_counters, counters, "engine")
        _check_counters(saved_counters)
        saved, param_groups = _decoded(shared, "param_groups"), self._optimizer.param_groups
        _check_like(saved, [], "param_groups")
        as_saved = f"make the optimizer as in the run that saved; {NEW_OPTIMIZER_STATE}"
        if len(saved) != len(param_groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} param groups, but the optimizer has {len(param_groups)}: {as_saved}"
            )
        group_of = {name: number for number, group in enumerate(param_groups) for name in self._names(group)}
        for number, (group, group_here) in enumerate(zip(saved, param_groups, strict=True)):
            _check_like(group, {"options": {}, "names": []}, f"param_groups[{number}]")
            options = group["options"]
            comparable = {
                name: value
                for name, value in _options(group_here).items()
                if name in options and name not in _KEPT_OPTIONS
            }
            _check_like(options, comparable, f"param_groups[{number}]['options']")
            self._check_options(number, group_here | _restored_options(options))
            for name in group["names"]:
                _check_like(name, "", f"a name in param_groups[{number}]")
                if group_of.get(name, number) != number:
                    raise CheckpointError(
                        f"{name!r} was in param group {number} and is in group {group_of[name]} here: {as_saved}"
                    )
        loader, data = self._run.training_dataloader, _decoded(shared, "data")
        if loader is not None and data is not None:
            loader.check_state_dict(data)

    def restore(
        self, shared: RankState, own: RankState | None, *, optimizer: bool, scheduler: bool
    ) -> dict[str, Any]:
        """Restore the run from the state of rank 0 and, if it has saved, of this rank; returns the client_state.

        ``optimizer`` and ``scheduler``: whether the state of each is restored.
        """
        if optimizer:
            counters = self._counters(shared)
            # The run that saved may have had another number of micro-batches per update.
            micro_steps = counters["micro_steps"]
            self._accumulation.resume(micro_steps - micro_steps % self._accumulation.steps)
            self._updates.load_state_dict(counters)
            self._restore_options(shared)
        if scheduler:
            self._restore_scheduler(shared)
            if not optimizer:
                self._follow_schedule()
        rank_state = own or shared
        self._restore_extra_state(rank_state)
        if optimizer:
            self._restore_data(rank_state)
            if own is not None:
                random_state.restore(_decoded(own, "random"))
            else:
                log.warning(
                    "the checkpoint has no random state for this rank, which keeps its current random state"
                )
        client_state: dict[str, Any] = _decoded(rank_state, "client_state")
        _check_like(client_state, {}, "client_state")
        return client_state

    def _counters(self, shared: RankState) -> dict[str, Any]:
        """The saved counters. For an older checkpoint, without samples, assume the current size of an update."""
        saved: dict[str, Any] = _decoded(shared, "engine")
        _check_like(saved, {"steps": 0}, "engine")
        return {"samples": saved["steps"] * self._run.train_batch_size(), **saved}

    def _restore_options(self, shared: RankState) -> None:
        optimizer = self._optimizer
        client = _decoded(shared, "optimizer")
        if isinstance(optimizer, ClientOptimizer):
            if client is None:
                raise CheckpointError(
                    f"the checkpoint has no state for a {type(optimizer.client).__name__}; {NEW_OPTIMIZER_STATE}"
                )
            optimizer.load_state_dict(client)
        for number, group in enumerate(_decoded(shared, "param_groups")):
            options, saved = optimizer.param_groups[number], group["options"]
            for name in sorted(_KEPT_OPTIONS & saved.keys() & options.keys()):
                if saved[name] != options[name]:
                    log.log(
                        _logs.once(logging.WARNING),
                        "param group %d was saved with %s %r, and keeps %r of this optimizer",
                        *(number, name, saved[name], options[name]),
                    )
            options.update(_restored_options(saved))

    def _check_options(self, number: int, options: dict[str, Any]) -> None:
        """CheckpointError if the update rule refuses ``options`` of a param group, before a ``step`` fails by them."""
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
        class_name = type(scheduler).__name__
        if saved["class"] != class_name:
            raise CheckpointError(
                f"the checkpoint has a {saved['class']}, but the learning rate scheduler is a {class_name}: make the"
                f" scheduler of the run that saved; {NEW_SCHEDULE}"
            )

    def _restore_scheduler(self, shared: RankState) -> None:
        scheduler, saved = self._run.lr_scheduler, _decoded(shared, "lr_scheduler")
        if scheduler is not None and saved is not None:
            try:
                scheduler.load_state_dict(saved["state"])
            # A user's scheduler may raise anything for the state of another one.
            except Exception as error:
                raise CheckpointError(
                    f"this {type(scheduler).__name__} cannot load the saved state of the learning rate scheduler"
                    f" ({type(error).__name__}: {error}): make the scheduler of the run that saved;"
                    f" {NEW_SCHEDULE}"
                ) from error
        elif scheduler is not None or saved is not None:
            missing_side = "engine has none" if scheduler is None else "checkpoint has none"
            log.log(
                _logs.once(logging.WARNING),
                "the learning rate scheduler is not restored, because the %s",
                missing_side,
            )

    def _follow_schedule(self) -> None:
        """Set the learning rates of the schedule: options were not loaded, and many schedules continue from them."""
        scheduler = self._run.lr_scheduler
        if scheduler is not None:
            for group, rate in zip(self._optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _restore_data(self, rank_state: RankState) -> None:
        loader, saved = self._run.training_dataloader, _decoded(rank_state, "data")
        if loader is not None and saved is not None:
            loader.load_state_dict(saved)

    def _restore_extra_state(self, rank_state: RankState) -> None:
        saved = _decoded(rank_state, "extra_state")
        _check_like(saved, {}, "extra_state")
        for name, module in self._with_extra_state():
            if name in saved:
                module.set_extra_state(saved.pop(name))
            else:
                log.warning("the checkpoint has no extra state for module %r, which keeps its own", name)
        if saved:
            log.warning(
                "the checkpoint has extra state for modules that the model lacks: %s", ", ".join(saved)
            )

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules with ``get_extra_state``."""
        for name, module in self._model_names.modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        """The names of a param group's parameters."""
        if not self._name_of:
            self._name_of = {param: name for name, param in self._model_names.parameters()}
        names = (self._name_of[param] for param in group["params"] if param in self._name_of)
        # The tiles of a weight have one name.
        return list(dict.fromkeys(names))

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Persistent buffers with their first persistent name. ConfigError for a dtype that safetensors lacks."""
        names: dict[Tensor, str] = {}
        for prefix, module in self._model_names.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
        for buffer, name in names.items():
            if buffer.dtype not in STORED_NAMES:
                raise ConfigError(
                    f"buffer {name!r} has dtype {buffer.dtype}, which safetensors does not support: store it in another"
                    " dtype (view_as_real), or register it with persistent=False"
                )
        return [(name, buffer) for buffer, name in names.items()]


def _check_like(saved: Any, expected: Any, place: str) -> None:
    """CheckpointError unless ``saved`` has the keys of ``expected``, and values of the same kinds."""
    # An option may be None on one side.
    is_optional = expected is None or (saved is None and _kind(expected) not in (bool, float, dict, list))
    if not is_optional and _kind(saved) is not _kind(expected):
        raise CheckpointError(
            f"{place} of the checkpoint is a {type(saved).__name__}, not a {type(expected).__name__} as in this engine:"
            f" the checkpoint is damaged, or of another kind of run; {ANOTHER_CHECKPOINT}"
        )
    if _kind(expected) is list and expected:
        if len(saved) != len(expected):
            raise CheckpointError(
                f"{place} of the checkpoint has {len(saved)} values, not {len(expected)} as in this engine: it is"
                f" damaged; {ANOTHER_CHECKPOINT}"
            )
        for number, (saved_item, expected_item) in enumerate(zip(saved, expected, strict=True)):
            _check_like(saved_item, expected_item, f"{place}[{number}]")
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key not in saved:
                raise CheckpointError(
                    f"{place} of the checkpoint has no {key!r}: it is damaged; {ANOTHER_CHECKPOINT}"
                )
            _check_like(saved[key], value, f"{place}[{key!r}]")


def _check_counters(saved: Mapping[str, Any]) -> None:
    """CheckpointError for counters that no run can reach."""
    scale = saved["loss_scale"]
    counts = {f"engine[{name!r}]": saved[name] for name in ("steps", "samples", "skipped", "micro_steps")}
    counts |= {f"engine['loss_scale'][{name!r}]": scale[name] for name in ("clean", "overflows_left")}
    for place, value in counts.items():
        if type(value) is not int or not 0 <= value < MOST:
            raise CheckpointError(
                f"{place} of the checkpoint is {short.repr(value)}, not a count: it is damaged; {ANOTHER_CHECKPOINT}"
            )
    if not 0 < scale["value"] < math.inf:
        raise CheckpointError(
            f"engine['loss_scale']['value'] of the checkpoint is {short.repr(scale['value'])}, not a loss scale: it is"
            f" damaged; {ANOTHER_CHECKPOINT}"
        )


def _kind(value: Any) -> type:
    """The type for comparison: all numbers and tensors count as float, and tuples as lists, as in configurations."""
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return float
    return list if isinstance(value, tuple) else type(value)


def _state_of(scheduler: Any) -> Any:
    """The ``state_dict`` of a scheduler, which may be a user's own class that only has ``step``."""
    needed = ("state_dict", "load_state_dict", "get_last_lr")
    missing = [f"{name}()" for name in needed if not hasattr(scheduler, name)]
    if missing:
        raise ConfigError(
            f"the {type(scheduler).__name__} passed to initialize(lr_scheduler=...) has no {', '.join(missing)}, which"
            " a checkpoint needs: add the methods, or step it yourself and save its state in client_state"
        )
    return scheduler.state_dict()


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a scheduler without functions: a scheduler that loads it keeps its own."""
    functions = [name for name, value in state.items() if callable(value)]
    if functions:
        log.log(
            _logs.once(logging.WARNING),
            "%s of the learning rate scheduler are functions, which a checkpoint does not contain: a scheduler that"
            " loads the checkpoint keeps its own",
            ", ".join(map(repr, functions)),
        )
    return {name: value for name, value in state.items() if name not in functions}


def _restored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The saved ``options`` that replace those of a param group."""
    return {name: value for name, value in options.items() if name not in _KEPT_OPTIONS}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _decoded(state: RankState, name: str) -> Any:
    if name not in state.content:
        raise CheckpointError(f"the checkpoint has no {name!r}: it is damaged; {ANOTHER_CHECKPOINT}")
    return encoding.decode(state.content[name], dict(state.tensors), name)
