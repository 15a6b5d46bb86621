"""What the peers save: the state of the same model in memory, as tensors of equal bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.reference_model import SEED, Model

from .saver import Saver

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("weights", "exp_avg", "exp_avg_sq")

State = dict[str, dict[str, "Tensor"]]


def drawn(model: Model) -> State:
    """Masters and both moments in fp32, one tensor for each parameter; random, so that nothing is compressed away."""
    import torch

    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in model.build().named_parameters()}
    source = torch.Generator().manual_seed(SEED)
    return {
        kind: {name: torch.empty(shape).uniform_(generator=source) for name, shape in shapes.items()}
        for kind in KINDS
    }


class InMemory(Saver):
    """A side that holds its state in memory, and promises nothing about what else it takes."""

    about: str

    def __init__(self, model: Model) -> None:
        self.state = drawn(model)

    def facts(self) -> dict[str, object]:
        return {
            "about": self.about,
            "parameters": sum(tensor.numel() for tensor in self.state["weights"].values()),
        }

    def change(self) -> None:
        for tensors in self.state.values():
            for tensor in tensors.values():
                tensor.zero_()

    def fingerprint(self) -> list[float]:
        return [float(tensors[max(tensors)].double().sum()) for tensors in self.state.values()]

    def close(self) -> None:
        self.state.clear()
