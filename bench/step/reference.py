"""What every side trains, and how: one module, the same tokens, the same hyperparameters.

Standard library and torch only: DeepSpeed's environment has nothing else. The model is the demo's, taken from its file,
so that no side imports more than it needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

SEED = 0
CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}

_MODEL = Path(__file__).resolve().parents[2] / "tiering" / "demo" / "model.py"


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT of ``layers`` blocks, trained with batch 1."""

    width: int
    layers: int
    sequence: int = 32

    def build(self) -> nn.Module:
        """The module, its weights drawn anew from the same seed each time."""
        import torch

        torch.manual_seed(SEED)
        made: nn.Module = _gpt()(
            width=self.width, layers=self.layers, heads=self.width // 64, sequence=self.sequence
        )
        return made

    def tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Random bytes and what follows each of them, without end."""
        import torch

        source = torch.Generator().manual_seed(SEED)
        while True:
            drawn = torch.randint(256, (1, self.sequence + 1), generator=source)
            yield drawn[:, :-1], drawn[:, 1:]

    def __str__(self) -> str:
        return f"GPT of {self.layers} blocks, width {self.width}, sequence {self.sequence}, batch 1"


def _gpt() -> Any:
    spec = importlib.util.spec_from_file_location("reference_model", _MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT
