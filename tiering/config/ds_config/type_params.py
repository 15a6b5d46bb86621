"""The parameters of each optimizer and each scheduler, by the name of its type in DeepSpeed's files."""

from __future__ import annotations

from tiering.config.optimizer import RULES
from tiering.config.scheduler import PARAMS

_EXTRA_PARAMS = {
    "torch_adam": "AdamW Adam",
    "decoupled_weight_decay": "Adam",
    "capturable": "AdamW Adam",
    "amsgrad": "AdamW Adam Adagrad",
    "set_grad_none": "AdamW Adam Lion",
    "fp32_optimizer_states": "AdamW Adam Lion Adagrad",
    **dict.fromkeys(("foreach", "fused", "maximize", "differentiable"), "AdamW Adam Adagrad SGD"),
    "max_grad_norm": " ".join(RULES),
}
"""The update rules that have each extra parameter in the classes of DeepSpeed or torch."""

PARAMS_BY_TYPE: dict[str, dict[str, list[str]]] = {
    "optimizer": {
        rule: ["adam_w_mode" if name == "decoupled" else name for name in fields]
        + [name for name, rules in _EXTRA_PARAMS.items() if rule in rules.split()]
        for rule, fields in RULES.items()
    },
    "scheduler": {name: [*params.model_fields, "last_batch_iteration"] for name, params in PARAMS.items()},
}
"""The keys in the ``params`` of a section, by section and ``type``."""
