"""Tests that run in processes in which ``import deepspeed`` imports tiering, before transformers is imported."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tests.zero3.ranks.pool import Pools
from tiering.integrations import deepspeed

SECONDS = 300.0
"""The limit of a test: the first one imports transformers, on a machine that may be busy."""


def under_shim(ranks: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in each of ``ranks`` processes; its arguments are pickled."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def shipped(shimmed: Pools, **arguments: Any) -> None:
            name = test.__module__, test.__name__
            shimmed.of(ranks).run(_run, *name, arguments, limit=SECONDS)

        parameters = [*inspect.signature(shipped, follow_wrapped=False).parameters.values()][:1]
        parameters += inspect.signature(test).parameters.values()
        shipped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return shipped

    return decorate


def _run(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    # Before the module of the test imports transformers.
    deepspeed.install(children=False)
    # The libraries warn of their own deprecations.
    warnings.simplefilter("default")
    warnings.filterwarnings("error", module=r"(tiering|zero3|optim_cpu)\b")
    test = inspect.unwrap(getattr(import_module(module), name))
    with _process_as_before():
        try:
            test(**arguments)
        except AssertionError as error:
            # Assertions are not rewritten here: the values of the test's variables tell why one fails.
            trace = traceback.TracebackException.from_exception(error, capture_locals=True)
            raise AssertionError("".join(trace.format())) from None


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Forget, after the block, what transformers and accelerate keep for the process."""
    variables = dict(os.environ)
    try:
        yield
    finally:
        forget_process()
        os.environ.clear()
        os.environ.update(variables)


def forget_process() -> None:
    """Forget what transformers and accelerate keep for the process; a run after this may go without DeepSpeed."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from .loops import forget

    forget()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
