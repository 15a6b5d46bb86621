"""The process of a side: adapters of rank 16 on every linear layer of a frozen Llama, one step at a time.

``settings``: ``library`` is "ours", "peft" (torch's AdamW in memory) or "bitsandbytes" (the same over its base);
``weights`` the directory of the model; ``base`` "bf16", "int8" or "nf4"; ``sequence`` the tokens of a batch of one.
Ours has ``directory`` for its swap space, None to keep everything in memory, and ``tiering``, that section of the
configuration.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from frame.child import serve
from frame.engine import MANY_LOOKS, EngineSide
from frame.process import resident
from frame.training import EngineTrainer, Trainer, baseline, digest, train

RANK = 16
RATE = 1e-3
SEED = 0


def adapted(model: Any) -> Any:
    """``model`` with adapters whose first values depend on ``SEED`` only."""
    import peft
    import torch

    torch.manual_seed(SEED)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )


class Ours(EngineSide):
    """The engine over a base that streams from its files."""

    looks = MANY_LOOKS

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, LlamaForCausalLM

        import tiering

        with torch.device("meta"):
            model = LlamaForCausalLM(AutoConfig.from_pretrained(settings["weights"]))
        if settings["base"] != "bf16":
            tiering.quantize(model.requires_grad_(False), settings["base"])
        model = adapted(model)
        self.about = f"tiering {tiering.__version__}"
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._model = model
        directory = settings["directory"]
        tier = {"device": "nvme", "nvme_path": directory} if directory else {"device": "none"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
            "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
            "tiering": {"telemetry": {"enabled": False}, **settings["tiering"]},
        }
        self.engine = tiering.initialize(model=model, config=config, weights=settings["weights"]).engine

    def facts(self) -> dict[str, Any]:
        from tiering.placement.workload import Tier

        plan, io = self.engine.plan, self.engine.snapshot().io_engine
        read, written = plan.nvme_traffic()
        return {
            **super().facts(),
            "planned": [read, written],
            "needed": needed(plan, self._model),
            "owned": plan.total(Tier.DEVICE) + plan.total(Tier.HOST),
            "on_nvme": plan.total(Tier.NVME),
            "in_place": plan.in_place_bytes,
            "swapped": plan.contents(Tier.NVME).get("parameters", 0),
            "plan": str(plan),
            "io_engine": io.name if io is not None else "",
            "io_flags": io.flags if io is not None else [],
        }

    def forward(self, tokens: Any, targets: Any) -> Any:
        return self.engine(input_ids=tokens, labels=targets).loss

    def adapters(self) -> str:
        return adapter_digest(self.masters())


def needed(plan: Any, model: Any) -> int:
    """Bytes of frozen weights that forward and backward read if the plan leaves them on NVMe, in whole pages.

    Backward needs every weight again except that of an embedding, whose inputs have no gradient.
    """
    from torch import nn

    from tiering.placement.workload import Tier

    load, total, modules = plan.workload, 0, dict(model.named_modules())
    for group, tier in zip(load.groups, plan.param_tiers, strict=True):
        if tier is Tier.NVME:
            nbytes = group.in_files.read_bytes if group.in_files is not None else load.home_bytes(group)
            is_table = isinstance(modules.get(group.name.partition(" ")[0]), nn.Embedding)
            total += nbytes if is_table else 2 * nbytes
    return total


def adapter_digest(tensors: dict[str, Any]) -> str:
    """Of the names and bits of all trained tensors."""
    return digest({name: tensor for name, tensor in tensors.items() if "lora_" in name})


class Plain(EngineTrainer):
    """peft with torch's AdamW, everything in memory."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"dtype": torch.bfloat16}
        self.about = f"peft {peft.__version__}"
        if settings["library"] == "bitsandbytes":
            import bitsandbytes
            from transformers import BitsAndBytesConfig

            self.about += f", bitsandbytes {bitsandbytes.__version__}"
            options |= {
                "device_map": "cpu",
                "quantization_config": BitsAndBytesConfig(**bits(settings["base"])),
            }
        model = AutoModelForCausalLM.from_pretrained(settings["weights"], **options)
        self.model = adapted(model.requires_grad_(False)).train()
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=RATE, fused=True)

    def facts(self) -> dict[str, Any]:
        return {"about": self.about, "parameters": sum(each.numel() for each in self.model.parameters())}

    def forward(self, tokens: Any, targets: Any) -> Any:
        return self.model(input_ids=tokens, labels=targets).loss

    def backward(self, loss: Any) -> None:
        loss.backward()

    def update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def adapters(self) -> str:
        return adapter_digest(dict(self.model.named_parameters()))


def bits(base: str) -> dict[str, Any]:
    """What BitsAndBytesConfig takes for a base."""
    import torch

    if base == "int8":
        return {"load_in_8bit": True}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": base,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }


class Worker:
    """For ``frame.child``: imports, builds, and trains a step per call."""

    def __init__(self, threads: int, model: None, settings: dict[str, Any]) -> None:
        import peft  # noqa: F401 - its import, and transformers', belong to the baseline
        import torch
        from transformers import AutoConfig, LlamaForCausalLM  # noqa: F401

        import tiering

        tiering.initialize  # noqa: B018 - imports the engine, which is loaded at first use
        self._baseline = baseline(threads)
        vocabulary = AutoConfig.from_pretrained(settings["weights"]).vocab_size
        generator = torch.Generator().manual_seed(SEED)
        shape = (1, settings["sequence"])
        self._batches = iter(lambda: torch.randint(vocabulary, shape, generator=generator), None)
        self._began = time.perf_counter()
        self._trainer: Trainer = (Ours if settings["library"] == "ours" else Plain)(settings)
        self._built = time.perf_counter()
        self._peak = resident("VmHWM")

    def facts(self) -> dict[str, Any]:
        return {
            **self._trainer.facts(),
            "baseline": self._baseline,
            "build": self._built - self._began,
            "build_peak": self._peak,
        }

    def step(self) -> dict[str, Any]:
        """One step, with the seconds from the imports to its end."""
        tokens = next(self._batches)
        done = train(self._trainer, iter([(tokens, tokens)]), 1)
        self._peak = max(self._peak, done.peak)
        return asdict(done) | {"since_imports": time.perf_counter() - self._began}

    def end(self) -> dict[str, Any]:
        """The adapters' digest, and the peak of all steps and of building."""
        return {"adapters": self._trainer.adapters(), "peak": self._peak}

    def close(self) -> None:
        self._trainer.close()


if __name__ == "__main__":
    serve(Worker)
