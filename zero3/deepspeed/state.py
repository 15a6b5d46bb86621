"""What an engine keeps of a parameter, read and set by the parameter itself. By name: zero3/engine/by_name.py.

Copies, of the parameter's shape, in fp32 and on its device; collective, as all that reads by name. A frozen parameter
has neither gradient nor optimizer state: None.
"""

from __future__ import annotations

from torch import Tensor, nn

from zero3.engine.by_name import named_state_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 master; a frozen parameter as it is."""
    state, name = named_state_of(param)
    return state.get_fp32_parameter(name).to(param.device)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Make ``value`` the master, and the parameter what it rounds to."""
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
