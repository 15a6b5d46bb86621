"""The room for copies of a whole model's values, which no budget counts."""

from __future__ import annotations

import torch

from tiering.placement.budgets import available_memory
from zero3.ranks.tables import Tables


def shortage(
    nbytes: int, device: torch.device, tables: Tables | None, local_size: int, purpose: str
) -> tuple[int, int] | None:
    """The bytes needed and free on the first rank without room for its ``nbytes`` on ``device``; None with room on all.

    ``local_size`` ranks share the host memory of a node. All ranks of ``tables`` call this together, for ``purpose``.
    """
    free = _free(device) // (local_size if device.type == "cpu" else 1)
    rows = [[nbytes, free]]
    if tables is not None:
        row = torch.tensor([nbytes, free], dtype=torch.int64, device="cpu")
        rows = tables.table(row, purpose).tolist()
    return next(((needed, free_on_rank) for needed, free_on_rank in rows if needed > free_on_rank), None)


def _free(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``."""
    if device.type == "cpu":
        return available_memory()
    # Unused memory in torch's pool counts as free.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
