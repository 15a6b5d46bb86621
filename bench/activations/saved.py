"""What autograd saves of the reference model, and what of it a step moves to NVMe: by the model's shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

from frame.reference_model import VOCABULARY, Model

BF16, FP32 = 2, 4
SMALLEST = 1 << 20
"""Bytes of the smallest storage that leaves the device."""


def storages(model: Model) -> list[int]:
    """Bytes of each storage that leaves the device in a forward, in the order in which autograd saves it."""
    tokens = model.batch * model.sequence
    row = tokens * model.width * BF16
    block = [row]
    if model.checkpointing is None:
        # Behind the block's input: the input of attention; query, key and value in one storage; the mixed values. The
        # stream, the input of the MLP, its hidden values, and these behind their function.
        block += [row, 3 * row, row, row, row, 4 * row, 4 * row]
    # The input of the last norm, that of the head, and the logarithms of the probabilities.
    end = [row, row, tokens * VOCABULARY * FP32]
    return [nbytes for nbytes in [*block * model.layers, *end] if nbytes >= SMALLEST]


def swapped(storages: Sequence[int], budget: int) -> int:
    """Bytes that a step writes to NVMe, and reads.

    Those larger than half of ``budget``, and of the others those saved first, until the rest takes half of it.
    """
    small = [nbytes for nbytes in storages if nbytes <= budget // 2]
    in_memory, count = sum(small), 0
    while in_memory > budget // 2:
        in_memory -= small[count]
        count += 1
    return sum(storages) - in_memory
