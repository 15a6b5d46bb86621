"""Models with adapters of peft: the names of their base in files, the first values of adapters, and the base alone.

peft moves new adapters to the device of the layer that they adapt. Over a base on the meta device they are there too.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from tiering.errors import ConfigError

_WRAPPER = "base_model.model."
_LAYER = ".base_layer."


def is_from_peft(model: nn.Module) -> bool:
    """Whether ``model`` is a model that peft has wrapped."""
    library = sys.modules.get("peft")
    return library is not None and isinstance(model, library.PeftModel)


def base_of(model: nn.Module) -> nn.Module:
    """The model that peft has wrapped, or ``model`` itself."""
    # mypy: get_base_model is a method of peft's class.
    base: nn.Module = model.get_base_model() if is_from_peft(model) else model  # type: ignore[operator]
    return base


def name_in_base(name: str) -> str:
    """The name that a parameter had before peft wrapped the model and its layers."""
    return name.removeprefix(_WRAPPER).replace(_LAYER, ".")


def added_names(model: nn.Module) -> Iterator[str]:
    """The names of the adapters' parameters, which files of the base do not have."""
    if is_from_peft(model):
        prefix = getattr(model.base_model, "prefix", None)
        for name, _ in model.named_parameters():
            if prefix and f".{prefix}" in name:
                yield name


def initialise_adapters(model: nn.Module, params: Container[nn.Parameter]) -> set[nn.Parameter]:
    """Give those of ``params`` that are of adapters the first values that peft gives them; returns them.

    Raises ConfigError for adapters other than LoRA, and for other first values than peft's usual ones.
    """
    added = dict(model.named_parameters())
    adapters = {added[name] for name in added_names(model) if added[name] in params}
    if not adapters:
        return adapters
    lora: Any = sys.modules["peft"].tuners.lora
    configs: Any = model.peft_config
    for adapter, config in configs.items():
        start = getattr(config, "init_lora_weights", None)
        if start not in (True, "gaussian"):
            raise ConfigError(
                f"the first values of the {config.peft_type.value} adapter {adapter!r} (init_lora_weights={start!r})"
                " are unknown over a base on the meta device; use LoRA with init_lora_weights True or 'gaussian', or"
                " load the base before you add adapters"
            )
        for module in model.modules():
            if isinstance(module, lora.LoraLayer):
                module.reset_lora_parameters(adapter, start)
    return adapters


def adapters_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """The context in which ``model`` computes without its adapters. Raises ConfigError if it has none."""
    wrapped: Any = model
    if is_from_peft(model):
        context: AbstractContextManager[None] = wrapped.disable_adapter()
        return context
    if getattr(model, "_hf_peft_config_loaded", False):
        return _disabled_by_transformers(wrapped)
    raise ConfigError(
        f"adapters_disabled() needs a model with adapters of peft, but this {type(model).__name__} has none; for a"
        " model that is trained as a whole, make a second engine without an optimizer for the reference"
    )


@contextmanager
def _disabled_by_transformers(model: Any) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
