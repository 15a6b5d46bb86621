"""A training script as DeepSpeed's tutorial has it, with its model, its data and its configuration."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH = 12


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, WIDTH, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "weight_decay": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "tiering": {"telemetry": {"enabled": False}},
}


def tutorial(deepspeed: Any, arguments: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """A training script as DeepSpeed's tutorial has it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)
    deepspeed.init_distributed()
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=parameters, training_data=data()
    )
    torch.manual_seed(3)
    criterion, losses = nn.CrossEntropyLoss(), []
    for _ in range(2):
        for batch in trainloader:
            inputs, labels = (each.to(model_engine.device) for each in batch)
            if model_engine.fp16_enabled():
                inputs = inputs.half()
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    state = model_engine.master_state_dict()
    model_engine.destroy()
    return losses, state
