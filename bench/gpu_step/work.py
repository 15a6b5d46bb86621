"""What every side is asked to train, and how: one module, the same tokens, the same hyperparameters.

Standard library and torch only: the environment of a peer need have nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frame.reference_model import SEED

from .shape import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .llama import Llama


@dataclass(frozen=True, slots=True)
class Work:
    """``card`` is how many bytes of the device's memory a process may take, None on a CPU."""

    shape: Shape
    sequence: int
    card: int | None

    @property
    def device(self) -> str:
        return "cpu" if self.card is None else "cuda"

    def build(self, *, reentrant: bool = False) -> Llama:
        """The module, its weights drawn anew from the same seed each time."""
        import torch

        from .llama import Llama

        torch.manual_seed(SEED)
        return Llama(self.shape, reentrant=reentrant)

    def batches(self, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random words and what follows each of them, ``tokens`` at a time, on the device, without end."""
        import torch

        source = torch.Generator().manual_seed(SEED)
        shape = (tokens // self.sequence, self.sequence + 1)
        while True:
            drawn = torch.randint(self.shape.words, shape, generator=source)
            if self.card is not None:
                drawn = drawn.pin_memory().to("cuda", non_blocking=True)
            yield drawn[:, :-1], drawn[:, 1:]

    def at(self) -> torch.device:
        import torch

        return torch.device(self.device)
