"""The engine's part in the memory of a device on which torch has found no more."""

from __future__ import annotations

import torch

from tiering.config.fields import format_size
from tiering.placement.workload import Tier
from zero3.device.tiers import Tiers


def explain(error: BaseException, tiers: Tiers, state: str) -> None:
    """Add a note about the engine's memory and its ``state`` to ``error``, if it is torch's OutOfMemoryError.

    The type and the text of the error do not change, because programs look for them to continue with a smaller batch.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return
    owned = sorted(tiers.occupancy(Tier.DEVICE).items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {format_size(nbytes)}" for kind, nbytes in owned) or "nothing"
    error.add_note(
        f"The engine owns {format_size(sum(nbytes for _, nbytes in owned))} of the device's memory ({kinds}), of a"
        f" device_budget of {format_size(tiers.plan.budgets.device)}; the rest is activations, gradients in flight"
        f" and the program's own tensors. {state}. To free memory, use a smaller micro-batch, activation"
        " checkpointing or a smaller device_budget."
    )
