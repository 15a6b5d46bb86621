"""Functions that torch.compile must not compile, and modules that it has compiled.

A module is compiled in place, as a part of a compiled whole, or under a wrapper. Nothing here loads the compiler, which
takes a second and 70 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

Params = ParamSpec("Params")
Result = TypeVar("Result")
Before = Callable[[nn.Module, Any], None]
After = Callable[[nn.Module, Any, Any], Any]


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


class Around:
    """The compiled call of ``module``, with hooks around it.

    If they were torch's own hooks, block.compile() would compile them: it breaks the graph at each hook, raises under
    ``fullgraph``, and omits hooks that must also run after an exception. Each hook in ``after`` is called with the
    output and returns a new output or None. After an exception, also one in a hook, all of them are called with None as
    the output.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], before: Sequence[Before], after: Sequence[After]
    ) -> None:
        self.call = call
        self._module = module
        self._before = before
        self._after = after

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for before in self._before:
                before(self._module, args)
            output = self.call(*args, **kwargs)
            for after in self._after:
                changed = after(self._module, args, output)
                output = output if changed is None else changed
        except BaseException:
            for after in self._after:
                after(self._module, args, None)
            raise
        return output


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper that ``torch.compile`` has made."""
    # By name, because an import of the class would load the compiler.
    return type(module).__name__ == "OptimizedModule"


def unwrap(model: nn.Module) -> None:
    """Replace wrappers in ``model`` by their modules, which stay compiled.

    The name of a wrapper would be a part of its parameters' names, and so of checkpoints.
    """
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and is_wrapped(child):
                wrapper: Any = child
                inner: nn.Module = wrapper._orig_mod
                inner._compiled_call_impl = wrapper.dynamo_ctx(inner._call_impl)
                module._modules[name] = inner


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` run compiled code."""
    forward: Any = module.forward
    by_hand = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return module._compiled_call_impl is not None or by_hand


def in_compiled_autograd() -> bool:
    """Whether a backward that torch has traced is running: it has no callback at its end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def called_by_compiled_code() -> bool:
    """Whether any caller is compiled code, even if functions in between are excluded from compilation."""
    return "compiled" in _callers()


def cuts_compiled_code() -> bool:
    """Whether the running ``eager`` function itself breaks compiled code: no other mark is in between."""
    callers = _callers()
    return next(callers, "") == "left alone" and next(callers, "") == "compiled"


def _callers() -> Iterator[str]:
    """The kinds of torch's wrappers among the callers, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_qualname
        if name.startswith("_TorchDynamoContext.__call__"):
            yield "compiled"
        elif name.startswith("DisableContext.__call__"):
            yield "left alone"
        frame = frame.f_back
