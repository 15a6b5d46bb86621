"""Adagrad, as in torch.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.fused_optimizer import FusedOptimizer, Params, form_of, scalar, seed_of
from optim_cpu.kernels import Rule
from optim_cpu.tensor_batch import Form, start_state


class Adagrad(FusedOptimizer):
    """Adagrad with L2 decay, as torch.optim.Adagrad.

    State: step, sum; created in the constructor, as by torch. ``FusedOptimizer`` describes ``state_format``,
    ``stochastic_rounding`` and ``seed``.
    """

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

    def _form(self, group: dict[str, Any]) -> Form:
        initial = scalar(group, "initial_accumulator_value")
        if not 0 <= initial < float("inf"):
            raise ValueError(f"initial_accumulator_value must be 0 or more, and finite, got {initial}")
        return form_of(group, ("sum",), initial)

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        return kernels.adagrad(
            lr=scalar(group, "lr"),
            lr_decay=scalar(group, "lr_decay"),
            eps=scalar(group, "eps"),
            weight_decay=scalar(group, "weight_decay"),
            step=step,
            maximize=group["maximize"],
            seed=seed_of(group),
        )
