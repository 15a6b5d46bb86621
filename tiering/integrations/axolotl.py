"""A plugin of axolotl: its trainers on a tiered engine. In the YAML file of a run:

plugins:
  - tiering.integrations.axolotl.TieringPlugin
tiering_config: ds_config.json
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, Field
from torch import nn

from tiering.errors import ConfigError
from tiering.integrations.transformers import TieringTrainerMixin

try:
    from axolotl.integrations.base import BasePlugin, PluginManager
except ImportError as error:
    raise ImportError(
        "tiering.integrations.axolotl needs axolotl; install it as its documentation says, and"
        f" `pip install 'tiering[hf]'` ({error})"
    ) from error

__all__ = ["TieringInputs", "TieringPlugin"]

log = logging.getLogger(__name__)

_SHARDS = "the engine shards and offloads the model"
_MOVES = "it replaces parameters, which the engine owns"
_REFUSED = {
    "deepspeed": _SHARDS,
    "fsdp": _SHARDS,
    "fsdp_config": _SHARDS,
    "qat": _MOVES,
    "relora": _MOVES,
    "torch_compile": "a compiled model does not see that parameters move between tiers",
}
"""Keys of the YAML file that do not go with an engine, and why."""


class TieringInputs(BaseModel):
    """The keys that the plugin adds to the YAML file."""

    tiering_config: dict[str, Any] | str | None = Field(
        default=None,
        description="Configuration of the engine, in DeepSpeed's format: a path, or the mapping itself.",
    )


class TieringPlugin(BasePlugin):  # type: ignore[misc] # not followed by mypy
    """Trains on a tiered engine what axolotl trains: full or LoRA fine-tuning, rewards, DPO, ORPO, KTO and GRPO.

    The engine places the model, so that axolotl loads it into host memory. At the end of the training, the plugin
    writes the weights to ``output_dir``, from the tiers to files.

    Raises ConfigError if the YAML file has no ``tiering_config``, if it has keys that do not go with an engine, such as
    ``deepspeed``, or if another plugin has chosen the trainer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None

    def get_input_args(self) -> str:
        """The class of the keys in the YAML file."""
        return f"{__name__}.{TieringInputs.__name__}"

    def get_training_args_mixin(self) -> str:
        """The class of the options that the TrainingArguments get."""
        return "tiering.integrations.transformers.TieringArguments"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The values of these options."""
        config = cfg.tiering_config
        return {"tiering_config": config.to_dict() if hasattr(config, "to_dict") else config}

    def register(self, cfg: Any) -> None:
        """Check the keys of the YAML file, before anything is loaded."""
        if not cfg.get("tiering_config"):
            raise ConfigError(
                "TieringPlugin needs the key tiering_config in the YAML file of axolotl: the path of a DeepSpeed"
                " configuration, or its mapping"
            )
        for key, reason in _REFUSED.items():
            if cfg.get(key):
                raise ConfigError(
                    f"the YAML file of axolotl has both tiering_config and {key}; remove {key}, because {reason}"
                )

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Let axolotl load the data, and its model into host memory: this is the last call before the model."""
        cfg.device_map = None
        cfg.experimental_skip_move_to_device = True

    def pre_model_load(self, cfg: Any) -> None:
        """Name the trainer of a run with ``rl``, for which axolotl does not pass the model to a plugin's class."""
        if cfg.rl:
            trainer_class = tiered(self._class_without_tiering(cfg))
            cfg.trainer_cls = f"{__name__}.{trainer_class.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type[Any] | None:
        """The class that axolotl would have chosen, on a tiered engine."""
        return None if cfg.rl else tiered(self._class_without_tiering(cfg))

    def _class_without_tiering(self, cfg: Any) -> type[Any]:
        """The class of another plugin, or else the choice of axolotl's builder."""
        # Imported here: these modules collect the keys of all plugins when they are imported.
        from axolotl.core.builders import HFCausalTrainerBuilder, HFRLTrainerBuilder

        for plugin in PluginManager.get_instance().plugins.values():
            if plugin is not self and (chosen := plugin.get_trainer_cls(cfg)) is not None:
                return chosen  # type: ignore[no-any-return] # not followed by mypy
        builder = SimpleNamespace(cfg=type(cfg)({**cfg, "plugins": None}), model=None, model_ref=None)
        if cfg.rl:
            chosen, _ = HFRLTrainerBuilder._get_trainer_cls(builder, {})
        else:
            chosen = HFCausalTrainerBuilder._get_trainer_cls(builder)
        return chosen  # type: ignore[no-any-return]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Keep the trainer until the end of the training."""
        if not isinstance(trainer, TieringTrainerMixin):
            raise ConfigError(
                f"axolotl made a {type(trainer).__name__}, which does not train on the engine; name"
                " tiering.integrations.axolotl.TieringPlugin first in plugins"
            )
        self._trainer = trainer

    def post_train(self, cfg: Any, model: Any) -> None:
        """Save the weights, all ranks together. axolotl calls it again at the end."""
        if self._trainer is None:
            return
        trainer, self._trainer = self._trainer, None
        trainer.save_model(cfg.output_dir)
        # Next, axolotl saves the model on rank 0 alone, which all ranks would have to join.
        trainer.model.save_pretrained = model.save_pretrained = _SavedModel(cfg.output_dir)


class _SavedModel:
    """The method ``save_pretrained`` of a model whose weights are in ``directory``."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __call__(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """Do nothing for ``directory``. Raises ConfigError for another one."""
        if save_directory != self._directory:
            raise ConfigError(
                f"axolotl cannot save the model to {save_directory}: its parameters are on the tiers; the files in"
                f" {self._directory} have the trained weights"
            )


class _WithoutTags(TieringTrainerMixin):
    """For the two trainers to which axolotl passes no tags of data sets; it does to classes derived from them."""

    def __init__(self, *args: Any, dataset_tags: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class _CallsAdapter(TieringTrainerMixin):
    """For DPO without a reference model: before TRL 1.16, the trainer looks for the adapter in the model it calls."""

    ref_model: Any

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.ref_model is None and hasattr(self.model, "peft_config"):
            model = self.model
        return super().compute_loss(model, *args, **kwargs)


def tiered(trainer_class: type[Any]) -> type[Any]:
    """``trainer_class`` on a tiered engine. axolotl and pickle find it in this module by its name."""
    if issubclass(trainer_class, TieringTrainerMixin):
        return trainer_class
    # Imported here, as above.
    from axolotl.core.trainers import AxolotlDPOTrainer, AxolotlPRMTrainer, AxolotlRewardTrainer

    first = TieringTrainerMixin
    if trainer_class in (AxolotlPRMTrainer, AxolotlRewardTrainer):
        first = _WithoutTags
    elif issubclass(trainer_class, AxolotlDPOTrainer):
        first = _CallsAdapter
    name = f"Tiering{trainer_class.__name__}"
    made = type(name, (first, trainer_class), {"__module__": __name__})
    globals()[name] = made
    return made
