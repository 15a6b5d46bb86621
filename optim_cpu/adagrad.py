"""Adagrad, as in torch.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_cpu import rules
from optim_cpu.fused_optimizer import FusedOptimizer, Params
from optim_cpu.tensor_batch import start_state


class Adagrad(FusedOptimizer):
    """Adagrad with L2 decay, as torch.optim.Adagrad.

    State: step, sum; created in the constructor, as by torch. ``FusedOptimizer`` describes ``state_format``,
    ``stochastic_rounding`` and ``seed``.
    """

    update_rule = rules.ADAGRAD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_format: str = "fp32",
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
            "state_format": state_format,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options, and create their state. Raises ValueError for an invalid option."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            start_state(param, self.state[param], self._form(group))
