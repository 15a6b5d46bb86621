"""Float32 masters of 16-bit parameters: their creation, their update after edits, and conversion between two forms.

Steps are smaller than the last place of a 16-bit parameter, so their sum is stored in float32: whole, as ``master`` in
the parameter's state, or split, as the parameter itself (bfloat16) and an int16 ``remainder``. A float32 parameter is
its own master.

A parameter can change between steps: by ``model.load_state_dict``, pruning, or an edit in place. The master then
follows the parameter. Whole: elements of the master that do not round to the parameter get the parameter's value; the
others keep all their bits. Split: the parameter is the upper half of the master, so the master changes with it; the
remainder, which is less than the parameter's last place, stays unless the joined value would be NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_cpu import kernels

HALVES = (torch.bfloat16, torch.float16)


def master_keys(param: Tensor, split: bool) -> tuple[str, ...]:
    """The keys of the master of ``param`` in its state."""
    if param.dtype not in HALVES:
        return ()
    return ("remainder",) if split else ("master",)


def fit_master(param: Tensor, state: dict[str, Any], *, split: bool) -> None:
    """Store the master of ``param`` in ``state``, whole or ``split``, and make it agree with the parameter.

    If ``state`` has ``master`` or ``remainder``, they have the parameter's shape and strides. The conversion of a whole
    master to a split one may change a parameter by one last place, if the master is halfway between two bfloat16.
    """
    if param.dtype not in HALVES:
        state.pop("master", None)
        state.pop("remainder", None)
    elif split:
        _fit_remainder(param, state)
    else:
        _fit_whole(param, state)


def _fit_remainder(param: Tensor, state: dict[str, Any]) -> None:
    master = state.pop("master", None)
    if master is not None:
        _follow(param, master)
        state["remainder"] = remainder = torch.empty_like(param, dtype=torch.int16)
        kernels.split(param.data_ptr(), remainder.data_ptr(), master.data_ptr(), param.numel())
    elif state.get("remainder") is not None:
        remainder = state["remainder"]
        remainder[_joined(param, remainder).isnan()] = 0
    else:
        state["remainder"] = torch.zeros_like(param, dtype=torch.int16)


def _fit_whole(param: Tensor, state: dict[str, Any]) -> None:
    remainder = state.pop("remainder", None)
    if state.get("master") is not None:
        _follow(param, state["master"])
    elif remainder is not None:
        state["master"] = master = _joined(param, remainder)
        _follow(param, master)
    else:
        state["master"] = param.detach().float()


def _joined(param: Tensor, remainder: Tensor) -> Tensor:
    master = torch.empty_like(param, dtype=torch.float32)
    kernels.join(master.data_ptr(), param.data_ptr(), remainder.data_ptr(), param.numel())
    return master


def _follow(param: Tensor, master: Tensor) -> None:
    """Set the elements of ``master`` that do not round to ``param`` to ``param``.

    A bfloat16 may have been rounded by the optimizers, ties away from zero, or by torch, ties to even.
    """
    rounded_to_even = master.to(param.dtype)
    changed = rounded_to_even.view(torch.int16) != param.view(torch.int16)
    if param.dtype is torch.bfloat16:
        rounded_away = torch.empty_like(param)
        kernels.split(rounded_away.data_ptr(), 0, master.data_ptr(), master.numel())
        changed &= rounded_away.view(torch.int16) != param.view(torch.int16)
    master[changed] = param[changed].float()
