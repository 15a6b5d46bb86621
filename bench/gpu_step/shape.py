"""Llama's shapes by size, from one rule: those of TinyLlama and Llama 2, scaled by width.

Heads of 128, four of them on each key-value head, an MLP of 8/3 of the width in steps of 256, 32,000 words, embedding
and output head apart. The number of blocks makes the size: about as many as there are heads, as in Llama 2 7B.

What a pass needs of memory is an estimate, for choosing sizes: that of this benchmark's module under activation
checkpointing. What it really took is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = 128
SHARED = 4  # heads of queries on one of keys and values
MLP_STEP = 256
WORDS = 32_000
BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """``width`` is a multiple of 512."""

    width: int
    blocks: int
    words: int = WORDS

    @property
    def heads(self) -> int:
        return self.width // HEAD

    @property
    def mlp(self) -> int:
        return -(-self.width * 8 // 3 // MLP_STEP) * MLP_STEP

    @property
    def block(self) -> int:
        """Elements of a block: queries and output, keys and values, the MLP's three, two norms."""
        return self._matrices + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.blocks * self.block + 2 * self.words * self.width + self.width

    def flops(self, sequence: int) -> int:
        """Of the model per token, forward and backward, recomputation not counted.

        Six for each element of a matrix that multiplies (the embedding is looked up, not multiplied), and for attention
        half of 12 x sequence x width in each block, since what is masked need not be computed.
        """
        multiplied = self.blocks * self._matrices + self.words * self.width
        return 6 * multiplied + 6 * self.blocks * sequence * self.width

    def activations(self, tokens: int) -> int:
        """Bytes of a micro-batch, about: each block's input, and one block's inside or the logits with the loss."""
        inside = 34 * self.width + 10 * self.mlp
        logits = self.words * (2 * BF16 + 3 * FP32)  # in bf16, in fp32, their softmax, and both gradients
        return tokens * (BF16 * self.width * (self.blocks + 1) + max(inside, logits))

    @property
    def _matrices(self) -> int:
        attention = 2 * self.width**2 + 2 * self.width * self.width // SHARED
        return attention + 3 * self.width * self.mlp

    def __str__(self) -> str:
        return (
            f"Llama of {self.parameters / 1e9:.2f} B parameters: {self.blocks} blocks, width {self.width},"
            f" MLP {self.mlp}, {self.heads} heads on {self.heads // SHARED}, {self.words} words"
        )


TINY = Shape(512, 2, words=256)
SMALLEST = Shape(512, 2)


def of_size(parameters: int) -> Shape:
    """The largest shape of at most so many parameters whose depth is nearest to its heads. Raises ValueError."""
    shapes = []
    for width in range(SMALLEST.width, 1 << 15, SHARED * HEAD):
        least = Shape(width, SMALLEST.blocks)
        if least.parameters <= parameters:
            shapes.append(Shape(width, least.blocks + (parameters - least.parameters) // least.block))
    if not shapes:
        raise ValueError(f"the smallest shape has {SMALLEST.parameters} parameters, not {parameters}")
    return min(shapes, key=lambda shape: abs(shape.blocks / shape.heads - 1))
