"""The choice of the trained parameters and their update rule: from the configuration, or from the user's optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optim_cpu.kernels import StateFormat
from optim_cpu.rules import UpdateRule
from optim_cpu.tensor_batch import Form
from tiering._text import shorten
from tiering.config.training import StepPolicy, TieringConfig
from tiering.errors import ConfigError
from zero3.building.model_checks import check_dense_gradients, check_dtypes
from zero3.optimizer import update_rules
from zero3.optimizer.client import needs_closure
from zero3.optimizer.update_rules import RULE_NAMES, Options
from zero3.params.inner_tensors import parts_of

log = logging.getLogger(__name__)

ModelParameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
ClientOptimizerChoice = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerChoice:
    """Param groups and their update: by the kernels of ``rule``, or with ``rule`` None by the user's ``client``.

    With a client, ``param_groups`` are the client's, and may list frozen parameters besides trained ones.

    ``moments`` is the format of the state tensors. With ``split`` a bf16 parameter is the upper half of its master, and
    the state holds the lower half.
    """

    param_groups: list[Options]
    defaults: Options
    rule: UpdateRule | None
    client: torch.optim.Optimizer | None = None
    split: bool = False
    moments: StateFormat = StateFormat.FP32

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer."""
        return self.rule is not update_rules.NONE

    @property
    def trained(self) -> set[nn.Parameter]:
        return {param for group in self.param_groups for param in group["params"] if param.requires_grad}

    @property
    def state_tensors(self) -> int:
        """The number of state tensors that the tiers hold for each parameter, without its master."""
        return len(update_rules.state_names(self.rule, self.param_groups)) if self.rule is not None else 0

    @property
    def initial_state(self) -> dict[nn.Parameter, float]:
        """The first value of the moments of each parameter."""
        if self.rule is None:
            return {}
        return {param: self.rule.initial(group) for group in self.param_groups for param in group["params"]}


def choose_optimizer(
    model: nn.Module,
    config: TieringConfig,
    model_parameters: ModelParameters | None,
    optimizer: ClientOptimizerChoice | None,
) -> OptimizerChoice:
    """Choose ``optimizer``, or the optimizer that it makes, or with None the configuration's.

    Without any optimizer and without ``model_parameters``, or with none in them, nothing is trained: the model is a
    teacher, for example.
    Raises ConfigError for a model, optimizer and configuration that do not fit together.
    """
    check_dtypes(model, config)
    if optimizer is not None:
        client = _make_client(optimizer, model, model_parameters)
        if config.optimizer is not None:
            log.warning(
                "the %s given to initialize() is used, the configuration's optimizer section (%s) is not",
                _name(client),
                config.optimizer.type,
            )
        return _of_client(client, model, config)
    if config.optimizer is None and not list(model_parameters or ()):
        return OptimizerChoice([{"params": [], "lr": 0.0}], {}, update_rules.NONE)
    if config.optimizer is None:
        raise ConfigError(
            "no optimizer: name one in the configuration's optimizer section"
            ' ({"type": "AdamW", "params": {"lr": 1e-4}}), or pass a torch optimizer to initialize(optimizer=...); a'
            " model that is not trained here needs no model_parameters"
        )
    rule, defaults = update_rules.from_config(config.optimizer)
    groups = [defaults | group for group in _param_groups(model, model_parameters)]
    _check_params(model, groups, "model_parameters")
    update_rules.check_options(rule, groups)
    form = update_rules.state_form(config.tiering.state)
    return OptimizerChoice(groups, defaults, rule, split=form.split, moments=form.format)


def _make_client(
    optimizer: ClientOptimizerChoice, model: nn.Module, model_parameters: ModelParameters | None
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    params = model_parameters
    if params is None:
        params = [param for param in model.parameters() if param.requires_grad]
    client = optimizer(params) if callable(optimizer) else optimizer
    if not isinstance(client, torch.optim.Optimizer):
        raise ConfigError(
            "initialize(optimizer=...) takes a torch.optim.Optimizer, or a function of the parameters that makes one,"
            f" not {type(client).__name__}"
        )
    return client


def _of_client(client: torch.optim.Optimizer, model: nn.Module, config: TieringConfig) -> OptimizerChoice:
    name = _name(client)
    _check_params(model, client.param_groups, f"the {name}")
    rule = update_rules.from_optimizer(client)
    if rule is None:
        _check_stays(client, config)
        return OptimizerChoice(client.param_groups, client.defaults, None, client)
    if update_rules.has_stepped(client):
        raise ConfigError(
            f"the {name} has stepped before, and this version cannot take over its state: pass a new optimizer"
        )
    update_rules.check_options(rule, client.param_groups)
    form = _state_form(client, config)
    return OptimizerChoice(
        client.param_groups, client.defaults, rule, client, split=form.split, moments=form.format
    )


def _state_form(client: torch.optim.Optimizer, config: TieringConfig) -> Form:
    """The form of state that the client or else the configuration sets; ConfigError if they contradict."""
    name, state = _name(client), config.tiering.state
    requested = update_rules.state_form_of(client)
    if requested is None:
        return update_rules.state_form(state)
    called = client.param_groups[0]["state_format"]
    if state not in ("fp32", called):
        raise ConfigError(
            f"the {name} has state_format {called!r}, but tiering.state is {state!r}: make it with"
            f" state_format={state!r}, or remove tiering.state from the configuration"
        )
    if requested.split and config.precision != "bf16":
        raise ConfigError(
            f"the {name} has state_format {called!r}, but the precision is {config.precision}, and only a bf16"
            " parameter is the upper half of its master: make it with"
            f" state_format={called.replace('split+bf16', 'bf16').replace('split', 'fp32')!r}, or train in bf16"
        )
    return requested


def _check_stays(client: torch.optim.Optimizer, config: TieringConfig) -> None:
    """Raise ConfigError unless all tensors are fp32 and on the device, which a client without a kernel needs."""
    name = _name(client)
    if config.tiering.state != "fp32":
        raise ConfigError(
            f"the {name} has no kernel here and steps fp32 masters by itself, but tiering.state is"
            f" {config.tiering.state!r}: set it to 'fp32', or use {RULE_NAMES}"
        )
    if config.tiering.step not in (StepPolicy.AFTER, StepPolicy.AUTO):
        raise ConfigError(
            f"the {name} has no kernel here and steps all parameters at once, but tiering.step is"
            f" {config.tiering.step.value!r}: set it to 'after', or use {RULE_NAMES}"
        )
    for kind, section in (
        ("offload_param", config.zero.offload_param),
        ("offload_optimizer", config.zero.offload_optimizer),
    ):
        if section.device != "none":
            raise ConfigError(
                f"the {name} needs parameters and state on the device, but {kind}.device is {section.device!r}. Use"
                f" {RULE_NAMES} (by name in the configuration, or from torch.optim or optim_cpu,"
                " without amsgrad, differentiable or a step method of your own), or set"
                f" {kind}.device to 'none'"
            )
    if needs_closure(client):
        raise ConfigError(
            f"the step of {name} takes a closure that computes the loss again, which engine.step() cannot pass; use"
            " an optimizer that needs only gradients"
        )


def _param_groups(model: nn.Module, model_parameters: ModelParameters | None) -> list[Options]:
    """Param groups, as torch has them, of the trainable parameters."""
    listed: list[Any] = (
        list(model_parameters)
        if model_parameters is not None
        else [p for p in model.parameters() if p.requires_grad]
    )
    grouped = bool(listed) and all(isinstance(item, Mapping) for item in listed)
    chosen = []
    for group in listed if grouped else [{"params": listed}]:
        params = group["params"]
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        # ``named_parameters()`` yields pairs.
        params = [p[1] if isinstance(p, tuple) else p for p in params]
        chosen.append({**group, "params": [p for p in params if p.requires_grad]})
    return chosen


def _check_params(model: nn.Module, groups: list[Options], source: str) -> None:
    """Raise ConfigError unless each trainable parameter is in one group, and all parameters are the model's."""
    listed_once = [param for group in groups for param in group["params"]]
    inside = set(listed_once)
    if len(inside) < len(listed_once):
        raise ConfigError(f"{source} lists a parameter twice: list each parameter in one param group")
    own = set(model.parameters())
    # A wrapped parameter, which is frozen, is none of the model's while its parts are.
    foreign = sum(own.isdisjoint(parts_of(param)) for param in inside)
    if foreign:
        raise ConfigError(
            f"{source} lists {foreign} parameters that are not the model's, and would never be trained:"
            " make them part of the model, or update them with a separate optimizer"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in inside]
    if missing:
        raise ConfigError(
            f"{len(missing)} parameters require gradients but are not in {source} ({shorten(tuple(missing))}): add"
            " them, or freeze them with requires_grad_(False)"
        )
    trained = {param for param in inside if param.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
    check_dense_gradients(model, trained)


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
