"""Which update rule, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from .fields import Beta, Number, Section, not_yet

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}

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
"""The fields that each rule has, with the defaults of the class that DeepSpeed would make of its name."""

NOT_HERE = ("Lamb", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD")
"""DeepSpeed's others, now or once."""

UpdateRule = Annotated[
    Literal["AdamW", "Adam", "Lion", "Adagrad", "SGD"],
    BeforeValidator(
        not_yet(
            *NOT_HERE,
            instead="use 'AdamW', or pass a torch optimizer to initialize()",
        )
    ),
]


class OptimizerConfig(Section):
    """An update rule. What is not given has the default of the rule; what the rule does not have stays off."""

    type: UpdateRule = Field(
        default="AdamW", description="Update rule: AdamW, Adam (see decoupled), Lion, Adagrad or SGD."
    )
    lr: Number = Field(default=1e-3, description="Learning rate; Adagrad's default is 1e-2.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="Adam: decay of first and second moment. Lion: of step and moment."
    )
    eps: Number = Field(
        default=1e-8,
        description="Adam and Adagrad: added to the root of the squares' average or sum; Adagrad's default is 1e-10.",
    )
    weight_decay: Number = Field(default=0.0, description="Weight decay; 0 turns it off.")
    decoupled: StrictBool = Field(
        default=True, description="Adam: decay weights directly, not through the gradient."
    )
    momentum: Number = Field(default=0.0, description="SGD: decay of the momentum buffer; 0 is without one.")
    dampening: Number = Field(default=0.0, description="SGD: share of the gradient kept out of the momentum.")
    nesterov: StrictBool = Field(default=False, description="SGD: look ahead along the momentum.")
    lr_decay: Number = Field(default=0.0, description="Adagrad: decay of the learning rate with each update.")
    initial_accumulator_value: Number = Field(default=0.0, description="Adagrad: what the sums start from.")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_rule(cls, given: Any) -> Any:
        rule = given.get("type", "AdamW") if isinstance(given, Mapping) else None
        known = RULES.get(rule) if isinstance(rule, str) else None
        if known is None:
            return given  # not a rule: the field says so
        for name in (given.keys() & cls.model_fields.keys()) - known.keys() - {"type"}:
            # a default that another rule would use is what a dump of this section holds
            if given[name] != cls.model_fields[name].default:
                raise ValueError(f"{rule} has no {name}; it has {', '.join(known)}")
        return known | given

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.type == "AdamW" and not self.decoupled:
            raise ValueError("AdamW decays weights directly; for decay through the gradient use type 'Adam'")
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self
