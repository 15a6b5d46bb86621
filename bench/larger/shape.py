"""Llama's shapes by size, from one rule: those of Llama 3.2 3B, scaled.

Per unit of width: 3 heads of 128, one key-value head, 1,024 of the MLP, 16,032 words of vocabulary; so width, MLP and
vocabulary keep their ratios, and the embedding, which is the head too, its share of the model. Eight units with 28
blocks are Llama 3.2 3B. The number of blocks makes the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEAD = 128
HEADS, MLP, WORDS = 3, 1024, 16032  # per unit
USUAL_BLOCKS = 3.5  # per unit


@dataclass(frozen=True, slots=True)
class Shape:
    """``units`` of width, ``blocks`` deep."""

    units: int
    blocks: int

    @property
    def width(self) -> int:
        return HEADS * HEAD * self.units

    @property
    def vocabulary(self) -> int:
        return WORDS * self.units

    @property
    def mlp(self) -> int:
        return MLP * self.units

    @property
    def embedding(self) -> int:
        """Elements of the largest parameter."""
        return self.vocabulary * self.width

    @property
    def block(self) -> int:
        """Elements of a block: queries and output, keys and values, the MLP's three, two norms."""
        width = self.width
        return 2 * width * width + 2 * width * HEAD * self.units + 3 * width * self.mlp + 2 * width

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks * self.block + self.width

    def config(self, sequence: int) -> dict[str, Any]:
        """What transformers' LlamaConfig takes."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": HEADS * self.units,
            "num_key_value_heads": self.units,
            "head_dim": HEAD,
            "max_position_embeddings": sequence,
            "tie_word_embeddings": True,
            "use_cache": False,
        }

    def __str__(self) -> str:
        return (
            f"Llama of {self.parameters / 1e9:.3f} B parameters: {self.blocks} blocks, width {self.width},"
            f" MLP {self.mlp}, {HEADS * self.units} heads on {self.units}, vocabulary {self.vocabulary}, tied"
        )


SMALLEST = Shape(1, 1)


def of_size(parameters: int) -> Shape:
    """The largest shape of at most so many parameters whose proportions are nearest to the usual. Raises ValueError."""
    shapes: list[Shape] = []
    units = 1
    while (least := Shape(units, 1)).parameters <= parameters:
        shapes.append(Shape(units, 1 + (parameters - least.parameters) // least.block))
        units += 1
    if not shapes:
        raise ValueError(f"the smallest shape has {SMALLEST.parameters} parameters, not {parameters}")
    return min(shapes, key=lambda shape: abs(shape.blocks / shape.units - USUAL_BLOCKS))
