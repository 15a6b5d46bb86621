"""Float32 masters of 16-bit parameters: made, kept in step with the parameter, turned from one form into the other.

Steps are smaller than a 16-bit parameter's last place, so a sum of them is kept in float32: whole, as ``master`` in
the parameter's state, or split, as the parameter itself (bfloat16) and an int16 ``remainder``. A float32 parameter is
its own master.

A parameter can change between steps: ``model.load_state_dict``, pruning, an edit in place. The parameter is then
right, and its master follows. Whole: elements that are no rounding of the master take the parameter's value; the
others keep all their bits. Split: the parameter is half of the master, so it changed with it; the remainder, always
less than the parameter's last place, stays unless both together would no longer be a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_cpu import kernels

HALVES = (torch.bfloat16, torch.float16)


def master_keys(param: Tensor, split: bool) -> tuple[str, ...]:
    """What ``param``'s state holds for its master."""
    if param.dtype not in HALVES:
        return ()
    return ("remainder",) if split else ("master",)


def fit_master(param: Tensor, state: dict[str, Any], *, split: bool) -> None:
    """Let ``state`` hold the master of ``param`` in the form wanted, and agree with the parameter.

    ``master`` and ``remainder``, where they are there, have the parameter's shape and strides. Converting a whole
    master into a split one may move a parameter by one last place, where the master is just between two.
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
    """Elements of ``master`` that do not round to ``param`` become ``param``.

    A bfloat16 may be rounded as the optimizers do, ties away from zero, or as torch does, ties to even.
    """
    as_torch = master.to(param.dtype)
    changed = as_torch.view(torch.int16) != param.view(torch.int16)
    if param.dtype is torch.bfloat16:
        ours = torch.empty_like(param)
        kernels.split(ours.data_ptr(), 0, master.data_ptr(), master.numel())
        changed &= ours.view(torch.int16) != param.view(torch.int16)
    master[changed] = param[changed].float()
