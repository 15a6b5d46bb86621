"""Parameters that stay fp32 in a model that computes in 16 bits: norms, routers and others that rounding would harm.

``tiering.keep_fp32`` names them, or the model does, as in transformers. A parameter's name matches

- a pattern without ``*``, ``?`` and ``[`` if it is a sequence of whole parts of the name: "norm" matches
  "layers.0.norm.weight", "mlp.gate" matches "layers.0.mlp.gate.weight", but not "layers.0.mlp.gate_proj.weight";
- any other pattern as a shell pattern for the whole name: "*norm*".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from tiering.config.training import TieringConfig


def kept_in_fp32(model: nn.Module, config: TieringConfig) -> frozenset[nn.Parameter]:
    """The parameters of ``model`` that stay fp32; empty if the model computes in fp32."""
    if config.precision == "fp32":
        return frozenset()
    if config.tiering.keep_fp32 == "auto":
        return frozenset(_by_models(model, fp16=config.precision == "fp16"))
    patterns = config.tiering.keep_fp32
    return frozenset(
        param
        for name, param in _named_parameters(model)
        if any(_matches(name, pattern) for pattern in patterns)
    )


def unmatched(model: nn.Module, config: TieringConfig) -> list[str]:
    """The configured patterns that no parameter of ``model`` matches."""
    if config.tiering.keep_fp32 == "auto":
        return []
    names = [name for name, _ in _named_parameters(model)]
    return [
        pattern for pattern in config.tiering.keep_fp32 if not any(_matches(name, pattern) for name in names)
    ]


def _by_models(model: nn.Module, *, fp16: bool) -> Iterator[nn.Parameter]:
    """Parameters that models of transformers name: one list for both 16-bit dtypes, another for fp16 alone."""
    for module in model.modules():
        patterns: Iterable[str] = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        if fp16:
            patterns = [*patterns, *(getattr(module, "_keep_in_fp32_modules", None) or ())]
        for pattern in patterns:
            yield from (param for name, param in _named_parameters(module) if _matches(name, pattern))


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of each parameter: a tied parameter matches by any of them."""
    return model.named_parameters(remove_duplicate=False)


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
