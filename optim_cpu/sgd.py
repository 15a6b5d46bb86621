"""SGD with momentum, dampening and Nesterov, as torch.optim has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_cpu import rules
from optim_cpu.fused_optimizer import FusedOptimizer, Params


class SGD(FusedOptimizer):
    """SGD with L2 decay, as torch.optim.SGD.

    State: momentum_buffer and, unlike torch's, step; neither without momentum. ``FusedOptimizer`` describes
    ``state_format``, ``stochastic_rounding`` and ``seed``.
    """

    update_rule = rules.SGD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_format: str = "fp32",
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
            "state_format": state_format,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def _check_loaded(
        self, param: Tensor, values: dict[str, Any], group: dict[str, Any], describe: Any
    ) -> None:
        if values.get("momentum_buffer") is not None:
            # torch's SGD has no step count. The rule needs only whether the first step is over.
            values.setdefault("step", torch.ones((), device="cpu"))
        super()._check_loaded(param, values, group, describe)
