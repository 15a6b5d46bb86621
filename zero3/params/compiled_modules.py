"""Modules that torch.compile has compiled: in place, as a part of a compiled whole, or under a wrapper."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from zero3.params.eager import eager

Before = Callable[[nn.Module, Any], None]
After = Callable[[nn.Module, Any, Any], Any]


class Around:
    """The compiled call of ``module``, with hooks around it.

    Among torch's own hooks they would be a part of what block.compile() compiles: it cuts the graph at each of them,
    refuses to under ``fullgraph``, and leaves out those that are to be called after an exception, too.
    ``after`` is told of every call and returns the output that is to be, or None; without an output there was an
    exception, and one in a hook makes the others hear of it again.
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
    """Whether ``module`` is what ``torch.compile`` has made of another one."""
    return type(module).__name__ == "OptimizedModule"  # asking for the class would load the compiler


def unwrap(model: nn.Module) -> None:
    """Put wrapped modules of ``model`` back in their places, compiled there as they were.

    A wrapper's name would be a part of its parameters' names, and so of checkpoints.
    """
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and is_wrapped(child):
                wrapper: Any = child
                inner: nn.Module = wrapper._orig_mod
                inner._compiled_call_impl = wrapper.dynamo_ctx(inner._call_impl)
                module._modules[name] = inner


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` run code that torch.compile has made of it."""
    forward: Any = module.forward
    by_hand = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return module._compiled_call_impl is not None or by_hand


def in_compiled_autograd() -> bool:
    """Whether the backward that runs is one that torch has traced: it calls nobody at its end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def called_by_compiled_code() -> bool:
    """Whether anything that calls what runs now was compiled, though what lies between was told to be left alone."""
    return "compiled" in _callers()


def cuts_compiled_code() -> bool:
    """Whether the function marked ``eager`` that runs now is what cuts compiled code: no other mark is in between."""
    callers = _callers()
    return next(callers, "") == "left alone" and next(callers, "") == "compiled"


def _callers() -> Iterator[str]:
    """What torch has wrapped, of what calls this, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_qualname
        if name.startswith("_TorchDynamoContext.__call__"):
            yield "compiled"
        elif name.startswith("DisableContext.__call__"):
            yield "left alone"
        frame = frame.f_back
