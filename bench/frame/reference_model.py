"""What sides train, and how: one module, the same tokens, the same hyperparameters.

Standard library and torch only. The model is the demo's, taken from its file, so that no side imports more than it
needs.
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
VOCABULARY = 256
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}

_MODEL = Path(__file__).resolve().parents[2] / "tiering" / "demo" / "model.py"


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT of ``layers`` blocks, trained with ``batch`` sequences per step and rank.

    ``checkpointing``: each block is recomputed in backward, by torch's variant of that name ("reentrant" or "not
    reentrant"); None: its activations are kept.
    """

    width: int
    layers: int
    sequence: int = 32
    batch: int = 1
    checkpointing: str | None = None

    def build(self) -> nn.Module:
        """The module, its weights drawn anew from the same seed each time."""
        import torch

        torch.manual_seed(SEED)
        module: nn.Module = _gpt()(
            width=self.width, layers=self.layers, heads=self.heads, sequence=self.sequence
        )
        if self.checkpointing is not None:
            _checkpoint_blocks(module, self.checkpointing)
        return module

    @property
    def heads(self) -> int:
        return self.width // 64

    def batches(self, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Random bytes and the byte that follows each of them, without end; different ones for each rank."""
        import torch

        source = torch.Generator().manual_seed(SEED + rank)
        while True:
            drawn = torch.randint(VOCABULARY, (self.batch, self.sequence + 1), generator=source)
            yield drawn[:, :-1], drawn[:, 1:]

    def __str__(self) -> str:
        model = (
            f"GPT of {self.layers} blocks, width {self.width}, sequence {self.sequence}, batch {self.batch}"
        )
        return model if self.checkpointing is None else f"{model}, checkpointing: {self.checkpointing}"


def configuration(
    zero: dict[str, Any], *, batch: int = 1, clip: float = CLIP, bf16: bool = True
) -> dict[str, Any]:
    """The sections that our engine and DeepSpeed read alike; ``zero`` is the section zero_optimization."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": zero,
    }


def offload(device: str, directory: str | None) -> dict[str, str]:
    """A section that offloads to ``device``; only ``nvme`` uses ``directory``."""
    return (
        {"device": device, "nvme_path": directory} if device == "nvme" and directory else {"device": device}
    )


def _checkpoint_blocks(module: Any, variant: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    implementation = CheckpointImpl.REENTRANT if variant == "reentrant" else CheckpointImpl.NO_REENTRANT
    for number, block in enumerate(module.blocks):
        module.blocks[number] = checkpoint_wrapper(block, checkpoint_impl=implementation)


def _gpt() -> Any:
    spec = importlib.util.spec_from_file_location("reference_gpt", _MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT
