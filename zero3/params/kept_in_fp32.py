"""Parameters that stay fp32 in a model that computes in 16 bits: norms, routers and whatever else rounding would hurt.

They are named by ``tiering.keep_fp32``, or by the model itself as those of transformers do. A parameter's name matches

- a pattern without ``*``, ``?`` and ``[`` that is a run of whole parts of it: "norm" matches "layers.0.norm.weight",
  "mlp.gate" matches "layers.0.mlp.gate.weight", and neither matches "layers.0.mlp.gate_proj.weight";
- any other pattern as a file name matches one of the shell, the whole of it: "*norm*".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from tiering.config.training import TieringConfig


def kept_in_fp32(model: nn.Module, config: TieringConfig) -> frozenset[nn.Parameter]:
    """The parameters of ``model`` that stay fp32; none where all of them are fp32 anyway."""
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
    """What models of transformers name: one list for both dtypes of 16 bits, another one for fp16 alone."""
    for module in model.modules():
        patterns: Iterable[str] = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        if fp16:
            patterns = [*patterns, *(getattr(module, "_keep_in_fp32_modules", None) or ())]
        for pattern in patterns:
            yield from (param for name, param in _named_parameters(module) if _matches(name, pattern))


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of each parameter: a tied one is kept by any of them."""
    return model.named_parameters(remove_duplicate=False)


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
