"""``generate`` of transformers on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from torch import nn


def on_all_ranks(generate: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """``generate`` of transformers with ``synced_gpus``: it runs forwards until the last rank has its tokens.

    Each token is a forward, which all ranks must run. transformers sets the option itself only for the sharding
    libraries that it knows. A caller's own ``synced_gpus`` counts.
    """
    # An adapter's generate() passes its options to the model's.
    methods = (getattr(inner, "generate", None) for inner in module.modules())
    if not any(callable(each) and "synced_gpus" in signature(each).parameters for each in methods):
        return generate

    @wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        if "synced_gpus" not in signature(generate).bind_partial(*args, **kwargs).arguments:
            kwargs.setdefault("synced_gpus", True)
        return generate(*args, **kwargs)

    return together
