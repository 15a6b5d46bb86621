"""The sides by name."""

from __future__ import annotations

from typing import Any

from frame.reference_model import Model
from frame.side import Spec

ON_DEVICE, IN_HOST, ON_NVME = "ours, device", "ours, host", "ours, NVMe"
PLAIN, SAVE_ON_CPU = "plain PyTorch", "torch, save_on_cpu"


def moved_to(place: str, budget: int, host: int) -> dict[str, Any]:
    """Keys of the section ``tiering``: activations in ``place``, and ``host`` bytes of the host budget beside them."""
    if place == "device":
        return {"host_budget": host}
    return {"activations": place, "activation_budget": budget, "host_budget": host + budget}


def ours(name: str, model: Model, tiering: dict[str, Any]) -> Spec:
    """With a directory, so that activations may go there; state goes there if the budgets have no room for it."""
    return Spec(name, "step.ours", model, {"tiering": tiering}, on_disk=True)


def plain(name: str, model: Model, *, save_on_cpu: bool) -> Spec:
    return Spec(name, "activations.plain", model, {"save_on_cpu": save_on_cpu})
