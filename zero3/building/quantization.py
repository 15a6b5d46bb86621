"""Stores frozen linear layers and experts of a model in a block format: ``tiering.quantize``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from optim_cpu.formats import QuantizedFormat, quantized
from tiering import _logs
from tiering._text import counted, shorten
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from zero3.building.peft_models import added_names
from zero3.building.quantized_experts import QuantizedExperts, fused_matrices, to_quantized_experts
from zero3.building.quantized_linear import QuantizedLinear, to_quantized
from zero3.building.zero_init import recipe_of
from zero3.params.inner_tensors import is_wrapper
from zero3.params.precision import NUMBERS, named_by_model
from zero3.params.row_tiles import RowTiledLinear

log = logging.getLogger(__name__)

# fmt: off
_APART = frozenset((
    "ADALORA", "BEFT", "BOFT", "C3A", "FOURIERFT", "GRALORA", "IA3", "LILY", "LORA", "MISS", "OFT", "POLY", "PVERA",
    "RANDLORA", "ROAD", "VBLORA", "VERA", "WAVEFT",
))
# fmt: on
"""Types of adapters of peft that use the input and the output of a layer, and never its weight."""


def quantize(
    model: nn.Module,
    quant_type: str,
    *,
    modules: str | Sequence[str] | None = None,
    double_quant: bool = True,
    block_size: int = 64,
) -> nn.Module:
    """Store the weights of frozen ``nn.Linear`` layers and experts in 4 or 8 bits, in place; returns ``model``.

    ``quant_type`` is "nf4" (0.516 bytes per weight; 0.5625 with ``double_quant=False``), "int8" or "fp8" (1.0625), each
    with a scale per ``block_size`` weights. ``modules`` are names of layers, or the ends of names ("q_proj",
    "mlp.up_proj"). Without it, every frozen ``nn.Linear`` is quantised, except the output layer and the last layer of a
    model of transformers and layers that it keeps in fp32, layers whose weight another module shares, adapters of peft
    and experts with whose matrices they compute, and layers whose inputs are no multiple of ``block_size``, which a log
    line names. Biases stay as they are, and so do layers that are quantised already. A module of transformers whose
    parameters hold the matrices of all its experts, [experts, rows, columns], counts as a layer: each matrix is
    quantised for itself, in blocks of a row.

    A layer on the meta device gets parameters without values: ``tiering.initialize(model=model, weights=DIR)`` encodes
    the stored weights while it reads them. Adapters may be added before or afterwards.

    Raises ConfigError for a type or block size that does not exist, for a name that no layer has, and for a layer that
    is to be trained, that is not an ``nn.Linear``, whose inputs are no multiple of the block size, or whose weight is
    cut into tiles, shared or not finite. Except for a weight that is not finite, the model is then unchanged.
    """
    try:
        form = quantized(quant_type, double_quant=double_quant, block_size=block_size)
    except ValueError as error:
        raise ConfigError(f"quantize: {error}") from None
    if modules is None:
        layers = _by_default(model, form)
    else:
        named = _named(model, (modules,) if isinstance(modules, str) else modules, form)
        # Once each: several of the names may mean the same layer.
        layers = list({id(layer): (name, layer) for name, layer in named}.values())
    for name, layer in layers:
        _check(name, layer, form)
    for name, layer in layers:
        try:
            if isinstance(layer, nn.Linear):
                to_quantized(layer, form, name)
            else:
                to_quantized_experts(layer, form, name)
        except ValueError as error:
            raise ConfigError(f"quantize: the weight of {name!r}: {error}") from None
    _avoid_fused_encoders(model)
    return model


def _by_default(model: nn.Module, form: QuantizedFormat) -> list[tuple[str, nn.Module]]:
    """The frozen layers that are quantised where no names are given, with their names."""
    left_out, adapters, apart = _output_layers(model), set(added_names(model)), _shared_weights(model)
    left_out |= _adapted_experts(model)
    # As transformers does. Among them are layers to whose dtype the model casts inputs.
    apart.update(named_by_model(model, fp16=True))
    frozen = [
        (name, module)
        for name, module in model.named_modules()
        if (weights := _weights(module)) and module not in left_out
        if not any(
            weight.requires_grad or is_wrapper(weight) or weight in apart for weight in weights.values()
        )
        if not any(f"{name}.{short}" in adapters for short in weights)
    ]
    for name, module in model.named_modules():
        if (
            isinstance(module, RowTiledLinear)
            and module not in left_out
            and not any(weight.requires_grad or weight in apart for weight in module.tile_weights)
        ):
            raise ConfigError(
                f"quantize: the weight of {name!r} is cut into tiles, and would stay as it is: call quantize before"
                " tiering.tile"
            )
    undivided = tuple(name for name, layer in frozen if _is_undivided(layer, form))
    found = [(name, layer) for name, layer in frozen if not _is_undivided(layer, form)]
    if not found and not any(_is_quantised(module) for module in model.modules()):
        if undivided:
            raise ConfigError(
                f"quantize: no frozen nn.Linear has inputs that are a multiple of the block size {form.group_size}"
                f" ({shorten(undivided)}); choose a smaller block_size"
            )
        raise ConfigError(
            "quantize: the model has no frozen nn.Linear; freeze it first with model.requires_grad_(False), and add"
            " adapters afterwards"
        )
    if undivided:
        log.log(
            _logs.once(logging.WARNING),
            "quantize leaves out %s whose inputs are no multiple of the block size %d: %s",
            counted(len(undivided), "layer"),
            form.group_size,
            shorten(undivided),
        )
    return found


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of ``module`` that can be quantised, by name: of a linear layer, or of fused experts."""
    if type(module) is nn.Linear:
        # Not from the parameters: a wrapped weight is none of them while the engine starts.
        weight: nn.Parameter | None = getattr(module, "weight", None)
        return {} if weight is None else {"weight": weight}
    return {} if isinstance(module, QuantizedExperts) else fused_matrices(module)


def _is_undivided(module: nn.Module, form: QuantizedFormat) -> bool:
    return any(weight.shape[-1] % form.group_size for weight in _weights(module).values())


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear | QuantizedExperts)


def _named(
    model: nn.Module, modules: Sequence[str], form: QuantizedFormat
) -> Iterator[tuple[str, nn.Module]]:
    """The layers of ``modules``, with their names. Those that are in ``form`` already do not count."""
    shared = _shared_weights(model)
    for wanted in modules:
        matches = [
            (name, module)
            for name, module in model.named_modules()
            if name == wanted or name.endswith(f".{wanted}")
        ]
        if not matches:
            raise ConfigError(f"quantize: no module of the model is named {wanted!r}, or ends in it")
        for name, module in matches:
            # A layer that peft adapts: its base is the layer.
            layer = (
                module.base_layer if isinstance(getattr(module, "base_layer", None), nn.Linear) else module
            )
            if isinstance(layer, QuantizedLinear | QuantizedExperts):
                if layer.form != form:
                    raise ConfigError(
                        f"quantize: {name!r} is in {layer.form} already, and codes are not converted; build the model"
                        " anew, or leave it out of modules"
                    )
                continue
            weights = _weights(layer)
            if not weights:
                kind = type(layer).__name__
                raise ConfigError(
                    f"quantize: {name!r} is a {kind}; only layers of class nn.Linear can be quantised, and modules of"
                    " transformers with fused experts"
                )
            for weight in weights.values():
                if is_wrapper(weight):
                    raise ConfigError(
                        f"quantize: the weight of {name!r} is a {type(weight).__name__}, which is quantised already;"
                        " leave it out of modules"
                    )
                if weight in shared:
                    raise ConfigError(
                        f"quantize: the weight of {name!r} is shared with another module; leave it out of modules"
                    )
            yield name, layer


def _check(name: str, layer: nn.Module, form: QuantizedFormat) -> None:
    for weight in _weights(layer).values():
        _check_weight(name, weight, form)


def _check_weight(name: str, weight: nn.Parameter, form: QuantizedFormat) -> None:
    if weight.requires_grad:
        raise ConfigError(
            f"quantize: the weight of {name!r} is to be trained, and codes have no gradient; freeze it with"
            " requires_grad_(False), or leave it out of modules"
        )
    if isinstance(weight, nn.Parameter) and recipe_of(weight) is not None:
        raise ConfigError(
            f"quantize: the weight of {name!r} was built under zero.Init and has no values yet; build the model on the"
            " meta device and pass weights= to initialize, or build it in memory"
        )
    if weight.dtype not in NUMBERS:
        raise ConfigError(
            f"quantize: the weight of {name!r} is {weight.dtype}, and only floats of 16 bits or more can be"
            " quantised; dequantise it first, or leave it out of modules"
        )
    if weight.shape[-1] % form.group_size:
        raise ConfigError(
            f"quantize: {name!r} has {weight.shape[-1]} inputs, no multiple of the block size {form.group_size};"
            " choose a smaller block_size, or name the other layers with modules"
        )


def _avoid_fused_encoders(model: nn.Module) -> None:
    """Make torch's encoder call its quantised layers: in evaluation it would take their codes for weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_quantised(module):
            # Torch's condition for the fused kernel.
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(map(_has_quantised, module.layers)):
            # Only that kernel computes with nested tensors.
            module.use_nested_tensor = False


def _has_quantised(layer: nn.Module) -> bool:
    """Whether a child of ``layer`` is quantised."""
    return any(isinstance(each, QuantizedLinear) for each in layer.children())


def _shared_weights(model: nn.Module) -> set[nn.Parameter]:
    once: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                (shared if param in once else once).add(param)
    return shared


def _output_layers(model: nn.Module) -> set[nn.Module]:
    """The output layer of a model of transformers, and the head of one that classifies: its last module.

    With what adapters have put inside: the original, and copies that are trained as a whole.
    """
    find = getattr(model, "get_output_embeddings", None)
    if find is None:
        return set()
    added, names = set(added_names(model)), [name for name, _ in model.named_parameters()]
    last = next((name for name in reversed(names) if name not in added), "")
    # Of a copy that is trained as a whole: what has it and the original.
    heads = [find(), model.get_submodule(last.rpartition(".")[0].partition(".modules_to_save.")[0])]
    return {part for head in heads if head is not None and head is not model for part in head.modules()}


def _adapted_experts(model: nn.Module) -> set[nn.Module]:
    """Modules with fused experts that adapters of peft adapt: these compute with the matrices."""
    bases = (getattr(module, "base_layer", None) for module in model.modules())
    return {base for base in bases if isinstance(base, nn.Module) and fused_matrices(base)}


def check_adapters(model: nn.Module) -> None:
    """Raise ConfigError for adapters that compute with the weights of quantised layers: they would read the codes."""
    for name, module in model.named_modules():
        base: Any = getattr(module, "base_layer", None)
        rows = isinstance(base, QuantizedLinear) and type(module).__name__ == "TrainableTokensLayer"
        if rows or isinstance(base, QuantizedExperts):
            raise ConfigError(
                f"the adapter of {name!r} computes with the weights of what it adapts, which are codes in"
                f" {base.form.name} here; adapt other layers, or leave it out of the quantised ones (modules)"
            )
    adapted = next(
        (
            module.base_layer
            for module in model.modules()
            if isinstance(getattr(module, "base_layer", None), QuantizedLinear)
        ),
        None,
    )
    if not isinstance(adapted, QuantizedLinear):
        return
    for module in model.modules():
        for adapter, config in (vars(module).get("peft_config") or {}).items():
            kind = getattr(config.peft_type, "value", config.peft_type)
            dora = kind == "LORA" and config.use_dora
            if kind in _APART and not dora and not (kind == "MISS" and config.init_weights == "bat"):
                continue
            raise ConfigError(
                f"the {'DoRA' if dora else kind} adapter {adapter!r} may compute with the weights of layers that it"
                f" adapts, which are codes in {adapted.form.name} here; use LoRA without DoRA, or leave these layers"
                " out of the quantised ones (modules)"
            )


def quantize_as_configured(model: nn.Module, config: TieringConfig) -> None:
    """Quantise the layers that ``tiering.quantize`` of the configuration selects; see ``quantize`` for the errors."""
    wanted = config.tiering.quantize
    if wanted.type != "none":
        before = Counter(
            module.form.name
            for module in model.modules()
            if isinstance(module, QuantizedLinear | QuantizedExperts)
        )
        others = [f"{counted(n, 'layer')} in {name}" for name, n in before.items() if name != wanted.type]
        if others:
            log.log(
                _logs.once(logging.WARNING),
                "tiering.quantize %r: %s stay so; to quantise them anew, build the model again",
                *(wanted.type, " and ".join(others)),
            )
        quantize(
            model, wanted.type, modules=wanted.modules or None, double_quant=wanted.double_quant,
            block_size=wanted.block_size,
        )  # fmt: skip


@contextmanager
def noting_quantised(model: nn.Module) -> Iterator[None]:
    """An error of the block tells if layers of ``model`` have been quantised in it, which are not converted back."""
    before = sum(map(_is_quantised, model.modules()))
    try:
        yield
    except Exception as error:
        converted = sum(map(_is_quantised, model.modules())) - before
        if converted:
            error.add_note(
                f"{counted(converted, 'layer')} of the model had been quantised by then, and stay so: to use other"
                " settings, build the model again"
            )
        raise
