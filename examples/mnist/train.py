"""A classifier of digits of 28 x 28 pixels, with its configuration in the script.

    python examples/mnist/train.py
    torchrun --standalone --nproc-per-node=2 examples/mnist/train.py --steps 300

The digits are generated here, with random shifts, brightness and noise, so nothing is downloaded. A guess is right one
time in ten.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tiering as deepspeed

CONFIG = {
    "train_batch_size": 64,  # over all ranks
    "optimizer": {"type": "Adam", "params": {"lr": 2e-3}},
    "steps_per_print": 50,
}
GLYPHS = """
 .###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
 #...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
 #...# ..#.. ....# ....# .#.#. ####. ####. ...#. #...# #...#
 #...# ..#.. ...#. ..##. #..#. ....# #...# ..#.. .###. .####
 #...# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
 #...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ....#
 .###. .###. ##### .###. ...#. .###. .###. .#... .###. .###.
"""


def digits(count: int, *, seed: int) -> TensorDataset:
    """Images [count, 1, 28, 28] and their digits [count]."""
    rows = [
        [[float(dot == "#") for dot in word] for word in line.split()] for line in GLYPHS.split("\n")[1:-1]
    ]
    large = torch.tensor(rows).transpose(0, 1).repeat_interleave(3, 1).repeat_interleave(3, 2)  # [10, 21, 15]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.zeros(count, 1, 28, 28)
    downs, rights = (torch.randint(room, (count,), generator=generator).tolist() for room in (8, 14))
    for image, label, down, right in zip(images, labels.tolist(), downs, rights, strict=True):
        image[0, down : down + 21, right : right + 15] = large[label]
    images *= 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return TensorDataset(images + 0.3 * torch.randn(images.shape, generator=generator), labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, stride=2, padding=2)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.conv2(functional.relu(self.conv1(images))))
        return self.fc2(functional.relu(self.fc1(hidden.flatten(1))))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--local_rank", type=int, default=-1, help="from a launcher that gives it")
    options = deepspeed.add_config_arguments(parser).parse_args(argv)

    deepspeed.init_distributed()
    torch.manual_seed(0)  # the same model on every rank
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=options,
        model=net,
        model_parameters=net.parameters(),
        training_data=digits(4096, seed=0),
        config=CONFIG,
    )
    engine.train()
    while engine.global_steps < options.steps:
        for images, labels in loader:
            loss = functional.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0 and engine.global_steps % 10 == 0:
                print(f"step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
            if engine.global_steps >= options.steps:
                break

    engine.eval()
    images, labels = digits(1000, seed=1).tensors
    with torch.no_grad():
        answers = engine(images.to(engine.device)).argmax(dim=1).cpu()
    if engine.global_rank == 0:
        print(f"right answers: {(answers == labels).float().mean().item():.1%}")
    engine.destroy()


if __name__ == "__main__":
    main()
