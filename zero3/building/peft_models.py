"""Models with adapters of peft: the names of their base in files, the first values of adapters, and the base alone.

peft moves new adapters to the device of the layer that they adapt. Over a base on the meta device they are there too.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from tiering import _logs
from tiering.errors import ConfigError

log = logging.getLogger(__name__)

_WRAPPER = "base_model.model."
_LAYER = ".base_layer."
# Of layers that peft trains as a whole, the frozen original and the copies; and of trained rows of an embedding.
_INSIDE = re.compile(r"\.(?:original_module|modules_to_save\.[^.]+|token_adapter)\.")


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
    """The name that a parameter had before peft wrapped the model and its layers; that of a copy is the original's."""
    return _INSIDE.sub(".", name.removeprefix(_WRAPPER).replace(_LAYER, "."))


def added_names(model: nn.Module) -> Iterator[str]:
    """The names of the adapters' parameters, which files of the base do not have."""
    library: Any = sys.modules.get("peft")
    if library is None:
        return
    inside = {
        param
        for module in model.modules()
        if isinstance(module, library.tuners.tuners_utils.BaseTunerLayer)
        for kind in module.adapter_layer_names
        if isinstance(container := getattr(module, kind, None), nn.Module)
        for param in container.parameters()
    }
    prefix = getattr(model.base_model, "prefix", None) if is_from_peft(model) else None
    for name, param in model.named_parameters():
        if param in inside or (prefix and f".{prefix}" in name):
            yield name


def initialise_adapters(model: nn.Module, params: Container[nn.Parameter]) -> set[nn.Parameter]:
    """Give those of ``params`` that are of adapters the first values that peft gives them; returns them.

    Raises ConfigError for adapters other than LoRA, and for other first values than peft's usual ones.
    """
    named = dict(model.named_parameters())
    added = {name: named[name] for name in added_names(model) if named[name] in params}
    if not added:
        return set()
    lora: Any = sys.modules["peft"].tuners.lora
    configs: dict[str, Any] = {}
    for module in model.modules():
        configs |= vars(module).get("peft_config") or {}
    for adapter, config in configs.items():
        own = {param for name, param in added.items() if adapter in name.split(".")}
        # Another adapter may have been loaded with values, and keeps them.
        if not own:
            continue
        start = getattr(config, "init_lora_weights", None)
        if start not in (True, "gaussian"):
            raise ConfigError(
                f"the first values of the {config.peft_type.value} adapter {adapter!r} (init_lora_weights={start!r})"
                " are unknown over a base on the meta device; use LoRA with init_lora_weights True or 'gaussian', or"
                " load the base before you add adapters"
            )
        for module in model.modules():
            if isinstance(module, lora.LoraLayer) and not own.isdisjoint(module.parameters()):
                module.reset_lora_parameters(adapter, start)
        log.log(
            _logs.once(logging.WARNING),
            "the adapter %r was made over a base on the meta device, where it has no values: it starts with new ones,"
            " also if it was loaded there. To continue a saved adapter, load it after initialize:"
            " peft.set_peft_model_state_dict(engine.module, peft.load_peft_weights(DIR))",
            adapter,
        )
    return set(added.values())


def adapters_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """The context in which ``model`` computes without its adapters. Raises ConfigError if it has none."""
    library: Any = sys.modules.get("peft")
    injected = bool(getattr(model, "_hf_peft_config_loaded", False))
    if library is None or not (is_from_peft(model) or injected):
        raise ConfigError(
            f"adapters_disabled() needs a model with adapters of peft, but this {type(model).__name__} has none; for a"
            " model that is trained as a whole, make a second engine without an optimizer for the reference"
        )
    others = library.utils.other
    # An older peft has one kind of copy.
    copies = getattr(others, "AuxiliaryTrainingWrapper", None) or others.ModulesToSaveWrapper
    kinds = (library.tuners.tuners_utils.BaseTunerLayer, copies)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:  # learned prompts, which the wrapper adds to inputs
        wrapped: Any = model
        context: AbstractContextManager[None] = wrapped.disable_adapter()
        return context
    return _disabled(layers)


@contextmanager
def _disabled(layers: list[Any]) -> Iterator[None]:
    """The adapters of ``layers`` are off in the block; those that were off before stay so."""
    enabled = [layer for layer in layers if not layer.disable_adapters]
    for layer in enabled:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)
