"""Marks functions that torch.compile must not compile, without loading the compiler (a second and 70 MiB)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")


def eager(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """``torch.compiler.disable``, applied only once other code has loaded the compiler."""
    disabled: Callable[Params, Result] | None = None

    @wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            from torch._dynamo.eval_frame import skip_code

            disabled = torch.compiler.disable(function)
            # Otherwise the wrapper would be compiled when uncompiled code calls it.
            skip_code(marked.__code__)
        return disabled(*args, **kwargs)

    marked: Any = call
    # The compiler does not trace into functions with this attribute.
    marked._torchdynamo_disable = True
    return call
