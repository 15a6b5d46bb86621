"""Lion, as in the reference of its paper (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optim_cpu import kernels
from optim_cpu.fused_optimizer import FusedOptimizer, Params, betas_of, form_of, scalar, seed_of
from optim_cpu.kernels import Rule
from optim_cpu.tensor_batch import Form


class Lion(FusedOptimizer):
    """Steps of equal size along the sign of an average, with decoupled weight decay.

    The paper recommends an ``lr`` 3 to 10 times smaller than AdamW's, and a ``weight_decay`` larger by the same factor.
    State: step, exp_avg. ``FusedOptimizer`` describes ``state_format``, ``stochastic_rounding`` and ``seed``.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_format: str = "fp32",
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "state_format": state_format,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def _form(self, group: dict[str, Any]) -> Form:
        return form_of(group, ("exp_avg",))

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        beta1, beta2 = betas_of(group)
        return kernels.lion(
            lr=scalar(group, "lr"),
            beta1=beta1,
            beta2=beta2,
            weight_decay=scalar(group, "weight_decay"),
            step=step,
            maximize=group["maximize"],
            seed=seed_of(group),
        )
