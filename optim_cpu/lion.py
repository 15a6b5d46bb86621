"""Lion, as in the reference of its paper (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from torch import Tensor

from optim_cpu import rules
from optim_cpu.fused_optimizer import FusedOptimizer, Params


class Lion(FusedOptimizer):
    """Steps of equal size along the sign of an average, with decoupled weight decay.

    The paper recommends an ``lr`` 3 to 10 times smaller than AdamW's, and a ``weight_decay`` larger by the same factor.
    State: step, exp_avg. ``FusedOptimizer`` describes ``state_format``, ``stochastic_rounding`` and ``seed``.
    """

    update_rule = rules.LION

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
