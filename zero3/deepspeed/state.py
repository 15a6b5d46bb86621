"""The state that an engine keeps of a parameter, read and set by the parameter. By name: zero3/engine/by_name.py.

Values are copies, of the parameter's shape, in fp32 and on its device. All ranks make each call together. The gradient
and the optimizer state of a frozen parameter are None.
"""

from __future__ import annotations

from torch import Tensor, nn

from zero3.engine.by_name import named_state_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 master; of a frozen parameter its value."""
    state, name = named_state_of(param)
    return state.get_fp32_parameter(name).to(param.device)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master to ``value``, and the parameter to the rounded value."""
    state, name = named_state_of(param)
    state.set_fp32_parameter(name, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A state tensor of the optimizer ("exp_avg", ...)."""
    state, name = named_state_of(param)
    if not state.is_trained(name):
        return None
    return state.get_fp32_state(name, optim_state_key).to(param.device)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace a state tensor of the optimizer."""
    state, name = named_state_of(param)
    state.set_fp32_state(name, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The accumulated gradient, unscaled, between backward and step; None if there is none."""
    state, name = named_state_of(param)
    gradient = state.get_fp32_gradient(name) if state.is_trained(name) else None
    return None if gradient is None else gradient.to(param.device)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the accumulated gradient, between backward and step."""
    state, name = named_state_of(param)
    state.set_fp32_gradient(name, value)
