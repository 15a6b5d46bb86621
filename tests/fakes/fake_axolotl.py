"""A stand-in for axolotl, for the tests of its plugin: the interface of plugins and the order of its calls.

It has the names, signatures and order of calls of axolotl 0.19: of ``axolotl.integrations.base``,
``axolotl.core.builders`` and ``axolotl.core.trainers``, as far as a plugin sees them. Loading of models and data is
left to the caller of ``train``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pydantic
import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, Trainer, TrainingArguments


class Settings(dict[str, Any]):
    """The settings of a run: keys are attributes, a missing one is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


class BasePlugin:
    """Every call of a plugin, which does nothing."""

    def register(self, cfg: Any) -> None: ...
    def get_input_args(self) -> str | None: ...
    def get_training_args_mixin(self) -> str | None: ...
    def get_training_args(self, cfg: Any) -> dict[str, Any] | None: ...
    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any: ...
    def pre_model_load(self, cfg: Any) -> None: ...
    def get_trainer_cls(self, cfg: Any) -> type[Trainer] | None: ...
    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None: ...
    def post_train(self, cfg: Any, model: PreTrainedModel) -> None: ...


class PluginManager:
    """All plugins of the process, by name, in the order of the YAML file."""

    _instance: ClassVar[PluginManager | None] = None

    def __init__(self) -> None:
        self.plugins: dict[str, BasePlugin] = {}

    @staticmethod
    def get_instance() -> PluginManager:
        if PluginManager._instance is None:
            PluginManager._instance = PluginManager()
        return PluginManager._instance

    def get_trainer_cls(self, cfg: Any) -> type[Trainer] | None:
        for plugin in self.plugins.values():
            if (chosen := plugin.get_trainer_cls(cfg)) is not None:
                return chosen
        return None


class AxolotlTrainer(Trainer):
    """The trainer of supervised fine-tuning, with arguments that Trainer does not have."""

    def __init__(
        self,
        *args: Any,
        bench_data_collator: Any = None,
        dataset_tags: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.bench_data_collator, self.dataset_tags = bench_data_collator, dataset_tags


class AxolotlRewardTrainer(Trainer): ...


class AxolotlPRMTrainer(Trainer): ...


class AxolotlDPOTrainer(Trainer):
    """A trainer that gets the model and the reference model by position."""

    def __init__(self, model: PreTrainedModel, ref_model: PreTrainedModel | None, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.ref_model = ref_model

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the loss of the reference which TRL 1.9 finds in the called model, if that has an adapter."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.ref_model is None and is_peft_model(model):
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                reference = self.model(**inputs).loss
            loss = loss + reference
        return loss


def _by_name(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class HFCausalTrainerBuilder:
    def __init__(self, cfg: Any, model: PreTrainedModel) -> None:
        self.cfg, self.model = cfg, model

    def _get_trainer_cls(self) -> type[Trainer]:
        if self.cfg.plugins and (chosen := PluginManager.get_instance().get_trainer_cls(self.cfg)):
            return chosen
        if self.cfg.reward_model:
            return AxolotlRewardTrainer
        if self.cfg.process_reward_model:
            return AxolotlPRMTrainer
        return _by_name(self.cfg.trainer_cls) if self.cfg.trainer_cls else AxolotlTrainer

    def build(self, **kwargs: Any) -> Trainer:
        trainer_class = self._get_trainer_cls()
        rewards = self.cfg.reward_model or self.cfg.process_reward_model
        more: dict[str, Any] = {} if rewards else {"bench_data_collator": len}
        # A class derived from these two gets them, too.
        if trainer_class not in (AxolotlRewardTrainer, AxolotlPRMTrainer):
            more["dataset_tags"] = ["a data set"]
        return trainer_class(model=self.model, **kwargs, **more)


class HFRLTrainerBuilder:
    def __init__(self, cfg: Any, model: PreTrainedModel) -> None:
        self.cfg, self.model, self.model_ref = cfg, model, None

    def _get_trainer_cls(self, trainer_kwargs: dict[str, Any]) -> tuple[type[Trainer], list[Any]]:
        if self.cfg.plugins and (chosen := PluginManager.get_instance().get_trainer_cls(self.cfg)):
            # The class of a plugin gets no model.
            return chosen, []
        chosen = _by_name(self.cfg.trainer_cls) if self.cfg.trainer_cls else AxolotlDPOTrainer
        return chosen, [self.model, self.model_ref]

    def build(self, **kwargs: Any) -> Trainer:
        trainer_class, positional = self._get_trainer_cls(kwargs)
        return trainer_class(*positional, **kwargs)


@contextmanager
def installed() -> Iterator[None]:
    """``import axolotl`` imports the stand-in; modules that have imported it are forgotten at the end."""
    modules = {name: ModuleType(name) for name in ("axolotl", "axolotl.integrations", "axolotl.core")}
    base = ModuleType("axolotl.integrations.base")
    base.__dict__.update(BasePlugin=BasePlugin, PluginManager=PluginManager)
    builders = ModuleType("axolotl.core.builders")
    builders.__dict__.update(
        HFCausalTrainerBuilder=HFCausalTrainerBuilder, HFRLTrainerBuilder=HFRLTrainerBuilder
    )
    trainers = ModuleType("axolotl.core.trainers")
    trainers.__dict__.update(
        AxolotlDPOTrainer=AxolotlDPOTrainer,
        AxolotlPRMTrainer=AxolotlPRMTrainer,
        AxolotlRewardTrainer=AxolotlRewardTrainer,
    )
    modules |= {module.__name__: module for module in (base, builders, trainers)}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.modules.pop("tiering.integrations.axolotl", None)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def train(load_model: Callable[[], Any], arguments: dict[str, Any], data: Any, **keys: Any) -> Trainer:
    """Train as axolotl does with the ``keys`` of a YAML file. ``arguments`` are those of TrainingArguments.

    Returns the Trainer; the model is saved in ``output_dir``, which is a key.
    """
    manager = PluginManager._instance = PluginManager()
    cfg = Settings(keys)
    for name in cfg.plugins or ():
        manager.plugins[name] = _by_name(name)()
    plugins = list(manager.plugins.values())
    for plugin in plugins:
        plugin.register(cfg)
    # The keys of plugins are checked by their classes; others pass.
    for plugin in plugins:
        if (name := plugin.get_input_args()) is not None:
            checked = pydantic.create_model("Inputs", __base__=_by_name(name))(**cfg)
            cfg |= {
                key: Settings(value) if isinstance(value, dict) else value
                for key, value in checked.model_dump(exclude_none=True).items()
            }
    cfg = Settings(cfg | {"device_map": "auto"})
    for plugin in plugins:
        assert plugin.load_datasets(cfg) is None
    device_map = cfg.device_map
    for plugin in plugins:
        plugin.pre_model_load(cfg)
    model = load_model()

    mixins = [_by_name(name) for plugin in plugins if (name := plugin.get_training_args_mixin())]
    arguments_class = make_dataclass("AxolotlTrainingArguments", [], bases=(*mixins, TrainingArguments))
    # Trainers pickle their arguments, whose class is found by its name.
    arguments_class.__module__ = __name__
    globals()[arguments_class.__name__] = arguments_class
    given = dict(arguments)
    for plugin in plugins:
        given |= plugin.get_training_args(cfg) or {}
    args = arguments_class(output_dir=cfg.output_dir, **given)

    builder = (HFRLTrainerBuilder if cfg.rl else HFCausalTrainerBuilder)(cfg, model)
    trainer = builder.build(args=args, train_dataset=data)
    trainer.loaded_with_device_map = device_map
    for plugin in plugins:
        plugin.post_trainer_create(cfg, trainer)
    trainer.train(resume_from_checkpoint=cfg.resume_from_checkpoint)
    for plugin in plugins:
        plugin.post_train(cfg, trainer.model)
    if args.process_index == 0:
        Path(cfg.output_dir).mkdir(exist_ok=True)
        model.save_pretrained(cfg.output_dir)
    for plugin in plugins:
        plugin.post_train(cfg, model)
    return trainer
