"""Access to tiered parameters under DeepSpeed's names. ``Init`` is in zero3/building/zero_init.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from tiering.errors import ConfigError
from zero3.building.zero_init import Init
from zero3.ranks.joining import standing
from zero3.state.access import gathered

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


@contextmanager
def GatheredParameters(  # noqa: N802 # DeepSpeed's is a class
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Within the block, ``params`` hold their values; with ``modifier_rank``, changes of that rank are stored.

    Without ``modifier_rank``, a change that all ranks make alike between passes is stored, with a warning, and any
    other change is an error. (DeepSpeed drops both.) All ranks enter and leave the block together; see
    ``tiering.gathered``. ``fwd_module`` is ignored: the engine detects which parameters of another module a module
    reads.
    """
    if not enabled:
        yield
        return
    world_size = standing()[1]
    if modifier_rank is not None and not 0 <= modifier_rank < world_size:
        raise ConfigError(
            f"GatheredParameters got modifier_rank {modifier_rank}, but the ranks are 0 to {world_size - 1}; pass"
            " modifier_rank=None to read only"
        )
    with gathered(params, modify=modifier_rank is not None, rank=modifier_rank):
        yield


def register_external_parameter(module: object, parameter: object) -> None:
    """Does nothing but check the types: a parameter of another module is fetched when ``module`` reads it."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            "register_external_parameter needs an nn.Module and an nn.Parameter, not"
            f" {type(module).__name__} and {type(parameter).__name__}"
        )
