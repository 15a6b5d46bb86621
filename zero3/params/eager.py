"""Code that torch.compile leaves as it is, marked without loading the compiler: that takes a second and 70 MiB."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")


def eager(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """``torch.compiler.disable``, which is not called before somebody else has loaded the compiler."""
    disabled: Callable[Params, Result] | None = None

    @wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            from torch._dynamo.eval_frame import skip_code

            disabled = torch.compiler.disable(function)
            skip_code(marked.__code__)  # which would be compiled where code that is not calls it
        return disabled(*args, **kwargs)

    marked: Any = call
    marked._torchdynamo_disable = True  # what the compiler asks functions for that it would trace into
    return call
