"""The update rule of the optimizer and its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from .fields import Beta, Number, Section, refuse_planned

_ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled": True,
    "bias_correction": True,
}

RULES: dict[str, dict[str, object]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "Adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
    },
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
"""The fields of each rule, with the defaults of the class that DeepSpeed creates for its name."""

UNSUPPORTED_OPTIMIZERS = (
    "Lamb",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "ZeroOneAdam",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
)
"""The other optimizers of current and former DeepSpeed versions."""

RuleName = Annotated[
    Literal["AdamW", "Adam", "Lion", "Adagrad", "SGD"],
    BeforeValidator(
        refuse_planned(
            *UNSUPPORTED_OPTIMIZERS,
            instead="another optimizer changes the training: use 'AdamW', or pass a torch optimizer to initialize()",
        )
    ),
]


class OptimizerConfig(Section):
    """An update rule. A missing field has the default of the rule; fields that the rule does not have stay off."""

    type: RuleName = Field(
        default="AdamW", description="Update rule: AdamW, Adam (see decoupled), Lion, Adagrad or SGD."
    )
    lr: Number = Field(default=1e-3, description="Learning rate; Adagrad's default is 1e-2.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999),
        description="Adam: decay of the first and second moment. Lion: of the step and the moment.",
    )
    eps: Number = Field(
        default=1e-8,
        description="Adam and Adagrad: added to the denominator for stability; Adagrad's default is 1e-10.",
    )
    weight_decay: Number = Field(default=0.0, description="Weight decay; 0: off.")
    decoupled: StrictBool = Field(
        default=True, description="Adam: decay the weights directly (AdamW), not through the gradient."
    )
    bias_correction: StrictBool = Field(
        default=True, description="Adam: correct the moments for their start at zero."
    )
    momentum: Number = Field(default=0.0, description="SGD: decay of the momentum buffer; 0: no buffer.")
    dampening: Number = Field(
        default=0.0, description="SGD: fraction of the gradient not added to the momentum."
    )
    nesterov: StrictBool = Field(default=False, description="SGD: use Nesterov momentum.")
    lr_decay: Number = Field(default=0.0, description="Adagrad: decay of the learning rate per update.")
    initial_accumulator_value: Number = Field(default=0.0, description="Adagrad: initial value of the sums.")

    @model_validator(mode="before")
    @classmethod
    def _apply_rule_defaults(cls, settings: Any) -> Any:
        rule = settings.get("type", "AdamW") if isinstance(settings, Mapping) else None
        defaults = RULES.get(rule) if isinstance(rule, str) else None
        if defaults is None:
            # The validator of the field `type` reports an unknown rule.
            return settings
        for name in (settings.keys() & cls.model_fields.keys()) - defaults.keys() - {"type"}:
            # A dump of this section contains the defaults of fields that the rule does not have.
            if settings[name] != cls.model_fields[name].default:
                raise ValueError(f"{rule} has no {name}; it has {', '.join(defaults)}")
        return defaults | settings

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.type == "AdamW" and not self.decoupled:
            raise ValueError(
                "AdamW decays the weights directly; for weight decay through the gradient use type 'Adam'"
            )
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov requires momentum > 0 and dampening 0")
        return self
