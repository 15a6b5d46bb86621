"""``deepspeed.comm``: torch.distributed, with init_distributed; what asks for ranks works in one process, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import lazy

if TYPE_CHECKING:
    from zero3.deepspeed.distributed import (
        barrier,
        get_local_rank,
        get_rank,
        get_world_size,
        init_distributed,
    )

__all__ = ["barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed"]
__getattr__, __dir__ = lazy.names(
    __name__, {"zero3.deepspeed.distributed": __all__}, rest="torch.distributed"
)
