"""docs/tools/sizing.md: what trains where, from 1.5 billion parameters to 20 trillion.

python -m docs.generate.sizing_page > docs/tools/sizing.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiering.config.training import TieringConfig
from tiering.errors import PlacementError
from tiering.placement.budgets import AUTO_SHARE, NVME_SHARE, beside_activations
from tiering.placement.placement import place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier, Workload
from tiering.planning.activations import Activations, beside_budget, with_activations
from tiering.planning.adapters import Adapters
from tiering.planning.choices import Open
from tiering.planning.decoder import NAMED, decoder, parse_count
from tiering.planning.fit import UNLIMITED, least_budget
from tiering.planning.forecast import HIDDEN, forecast
from tiering.planning.profiles import PROFILES, SSD_990_PRO, Profile
from tiering.planning.rates import Rates
from tiering.planning.setting import TOKENS, Setting, profile_budgets, usual_config, with_changes
from tiering.planning.sizing import load_of, plan_of_size
from tiering.planning.update_share import best_share

SIZES = ("1.5B", "3B", "7B", "13B", "30B", "70B")
MODELS = ("llama-3-8b", "qwen2.5-32b", "llama-3-70b")
BASES = ("bf16", "nf4")
RANK = 16
CLUSTER_SIZES = ("200B", "530B", "1T", "20T")
CARDS_GIB = (8, 16, 24)
HOST_BYTES = 32 << 30
STATES = ("fp32", "split+bf16")
MICRO_BATCHES = 16
LONG_SIZE = "70B"
LAPTOP_BYTES = 16 << 30
GIB = 1 << 30
ONE_990_PRO = Rates(nvme_read=SSD_990_PRO.read, nvme_write=SSD_990_PRO.write).disk(1, 1)

INTRO = """\
# Model sizes by machine

`python -m docs.generate.sizing_page` writes this page with the planner: each row is a plan for a decoder of the given
size, as `tiering plan --params` chooses it (7B has exactly the parameters of Llama 2 7B; `tiering/planning/decoder.py`
has the rule). The model trains in bf16 with AdamW in ZeRO stage 3; everything that does not fit in memory is on NVMe.
`fp32` state has a master and two moments of 4 bytes each. `split+bf16` has the other half of the master and moments of
2 bytes: 6 bytes instead of 12.

For your own machine or model, run:

```sh
tiering plan --params 13B --profile rtx4090 --checkpointing    # one of the machines below
tiering plan --model config.json --measure /nvme0 /nvme1    # a transformers model, on this machine
tiering plan --params 70B --gpu 24GiB --host-budget 48GiB --nvme-budget 2TB --checkpointing    # no rates: no step time
tiering plan --params 70B --profile a100 --checkpointing --micro-batches 4 --tokens 16384 --activations auto --json
tiering plan --model llama-3-70b --lora 16 --base nf4 --profile rtx4090 --checkpointing    # adapters
tiering plan --params 1T --gpu 32GiB --ranks 512 --nodes 32    # a cluster: what its nodes need
```

In Python, `tiering.plan_for(model=model, config=config)` returns the plan that `initialize` would make.
[planning.md](planning.md) has the formulas for the time of a step, and for the activations of a micro-batch: a plan
whose activations the GPU cannot hold is refused, with changes that make it fit. For a config.json of another family
than Llama's they are not counted, and the plan says so. Sizes below 1 MiB are refused, because `--gpu 24` means 24
bytes. A budget is the memory that the engine may own. In addition, a GPU holds activations, and the host holds Python,
torch and data. If you give no device budget, it is what activations and gradients leave of the GPU; half of the GPU,
where they are not counted, as in `initialize`.

With `--gpu`, several `--nodes`, or more `--ranks` than this machine has GPUs, describe other machines. If you give no
host or NVMe budget for them, these are not limits: the plan says what each node needs. Without `--config`, it may then
assume activation checkpointing, and `tiering.activations` `"auto"`, if there is no plan without; and the rates of the
profile with such GPUs. On any machine it cuts layers that do not fit on the device (`tiering.tile`). It prints each
assumption, and the configuration of the plan, with its budgets, for `--config` and `initialize`. If options can
make the model fit, a refusal prints the command.

`--json` prints bytes and seconds. These values are per rank: `budgets`, `plan.tiers` (bytes by kind), `plan.nvme_read`
and `nvme_written` per step, `micro_batch_tokens`, `forecast.seconds`, its `phases` with their bottlenecks, and
`tokens_that_hide` per micro-batch; `activations` of a micro-batch (in `not_counted` if they are unknown). These values
are for all ranks of a node together: `forecast.tokens` per step, `tokens_per_second`, `nvme_written_per_day`,
`drive_life`, and the budgets in `remedies`. The `change` of a remedy has keys of the configuration, or `ranks`, `gpu`,
`tokens`, `sequence`, `checkpointing` and `loss_chunk` of the run. `needed` lists the tiers whose budgets are what the
plan needs; `assumptions` and `configuration` are those that the text has. [planning.md](planning.md) has the scope of
each of the `rates`. `fits` is true if there is a plan; `refusal` is the reason if there is none. `schema_version`
increases when a name is removed or changes its meaning; `schema` is its former name. The exit status is 0 if the model
fits, 1 if it does not, 2 for a usage error.
"""

LEAST = """\
## Minimum budgets

The size of parameters, gradients and state in GiB, and the smallest budgets of one GPU and its host with which each
model trains. Everything else is on NVMe; the budgets hold the largest groups in transfer.
"""

MACHINES = f"""\
## Machines

A step is {MICRO_BATCHES} micro-batches of one sequence of {TOKENS:,} tokens on each GPU, with activation checkpointing.
Budgets are what activations leave of a GPU's memory, four fifths of the host's, and 95 % of the drives. Sizes are GiB,
of each rank.

The rates are those of data sheets (`tiering/planning/profiles.py` has their sources). Real machines are slower: **a
step takes at least this long**. Real layers often reach only half of a GPU's peak, and a consumer drive writes at its
peak rate only until its cache is full. The bytes that a step moves do not depend on the rates. For measured rates, use
`tiering plan --measure`.

With more than one micro-batch, gradients accumulate in fp32. If they do not fit in host memory, each micro-batch moves
them to NVMe and back: a few micro-batches of many tokens then train faster than many micro-batches of few tokens. Their
activations need the memory of the GPU, or [another place](#few-long-micro-batches).

*Hides*: the tokens per micro-batch from which the step waits for NVMe during less than {1 - HIDDEN:.0%} of a step.
*Days*: days of continuous training until the drives have reached their rated endurance.
"""

PAPER = """\
## The machine of the ZeRO-Infinity paper

32 nodes of the profile `dgx2`, with 16 V100 of 32 GB each: the command above, with other sizes. Nobody gives the memory
and the drives of a node: *host* and *NVMe* are what each node needs, in GiB. *Device* is what a rank plans on its GPU,
beside the *activations* of one sequence of 4,096 tokens. A step is one such micro-batch on each rank, in fp16 with
checkpointing. *Tile* is the maximum of bytes in a layer's weight. *TFLOPS* are those of a GPU: 8 operations per
parameter and token, and those of attention, divided by the time of the step.

The figures are **estimates of the planner, at the rates of data sheets**. Nothing of this size has been run.
"""

BESIDE_THE_PAPER = """\
The paper (Rajbhandari et al., [arXiv 2104.07857](https://arxiv.org/abs/2104.07857)) measured DeepSpeed on this machine:

| | the paper, measured | here, estimated |
| --- | --- | --- |
| largest model on 32 nodes | 32T parameters | 20T, the maximum of `--params` |
| largest model on one node | 1T parameters | 1T fits, by the command below |
| speed of a GPU from 0.5T to 20T | 49 to 34 TFLOPS | the last column above |

The two speeds are not comparable: the paper's are of runs, ours is the limit of the hardware. For one node:

```sh
tiering plan --params 1T --profile dgx2 --checkpointing --activations auto
```
"""

LONG = f"""\
### Few long micro-batches

{LONG_SIZE} with fp32 state on the machine `rtx4090` above. A step is {MICRO_BATCHES * TOKENS:,} tokens in sequences of
{TOKENS:,}, in {MICRO_BATCHES} micro-batches or fewer. *GPU*: the most activations on the GPU at a time, in GiB.
*Moved*: what `tiering.activations` `"auto"` moves to host memory and NVMe in each micro-batch, because the GPU has no
room for it. `"device"` moves nothing. *Read* and *written* have the state and the activations of a step.
"""

LAPTOP = f"""\
### A laptop without GPU

{LAPTOP_BYTES // GIB} GiB of RAM, of which {AUTO_SHARE:.0%} are the budgets, one {SSD_990_PRO.name}, one micro-batch.
Data sheets have no rate for bf16 training on a CPU: the last column is the time that the drive alone needs for a step.
"""

ADAPTERS = f"""\
## Adapters over a frozen model

`tiering plan --lora {RANK}` plans LoRA adapters of rank {RANK} on all linear layers except the output head. Only the
adapters have gradients (bf16) and optimizer state (fp32). The frozen model is read once in forward and once in
backward, its embedding in forward only. `--base` is the format of its linear layers: `bf16`, `nf4` (0.516 bytes per
weight, with the scales quantised once more), `int8` or `fp8` (1.0625 bytes). Embeddings, norms and the output head stay
in bf16. A step is one micro-batch of {TOKENS:,} tokens.

If host memory has room for the adapters, their gradients and their state, a step writes nothing to NVMe. The table has
all bytes, and the smallest budgets of one GPU and its host, as in the first section:
"""

CARDS = f"""\
Cards of {", ".join(map(str, CARDS_GIB))} GiB with half of their memory as the budget, {HOST_BYTES // GIB} GiB of RAM
with {AUTO_SHARE:.0%} as the budget, and one {SSD_990_PRO.name}. Cards with the same figures share a row: the rest of a
card's memory is for activations. The last column is the time that the drive alone needs for a step.
"""

ON_4090 = """\
On the machine `rtx4090` above, with the rates of its data sheets. The times do not include that of decoding a
quantised model.
"""

ADAPTERS_ON_LAPTOP = f"""\
On the laptop above: {LAPTOP_BYTES // GIB} GiB of RAM, no GPU.
"""


def page(sizes: Sequence[str] = SIZES, models: Sequence[str] = MODELS) -> str:
    """docs/tools/sizing.md, or with fewer sizes and models the first rows of its tables."""
    heads: Sequence[str] = ("model", "bytes, fp32", "bytes, split+bf16", "least GPU", "least host")
    parts = [INTRO, LEAST, _table(heads, map(_least, sizes)), MACHINES]
    heads = (
        "model",
        "state",
        "host",
        "NVMe",
        "read",
        "written",
        "step, s",
        "bound by",
        "tokens/s",
        "hides",
        "days",
    )
    for profile in PROFILES.values():
        # The state formats of the rows need bf16.
        if profile.device.dtype != "bf16":
            continue
        parts += [f"### {profile.name}\n\n{profile}.\n", _table(heads, _rows_of(profile, sizes))]
    heads = ("micro-batches", "activations", "GPU", "moved", "read", "written", "step, s", "tokens/s")
    parts += [LONG, _table(heads, _long_rows())]
    heads = ("model", "state", "device and host", "NVMe", "read", "written", "drive alone, s")
    parts += [LAPTOP, _table(heads, _laptop_rows(sizes))]
    heads = (
        "model",
        "device",
        "activations",
        "moved",
        "tile",
        "host",
        "NVMe",
        "step, s",
        "bound by",
        "TFLOPS",
    )
    parts += [PAPER, _table(heads, _cluster_rows()), BESIDE_THE_PAPER]
    return "\n".join([*parts, *_adapters(models)])


def _adapters(models: Sequence[str]) -> Iterator[str]:
    """The section on adapters."""
    heads: Sequence[str] = ("model", "base", "bytes", "least GPU", "least host")
    yield ADAPTERS
    yield _table(heads, _least_of_adapters(models))
    yield CARDS
    moved = ("host", "NVMe", "read", "written")
    yield _table(("model", "base", "GPU", *moved, "drive alone, s"), _rows_of_cards(models))
    yield ON_4090
    heads = ("model", "base", *moved, "step, s", "bound by", "tokens/s", "hides")
    yield _table(heads, _adapters_on_4090(models))
    yield ADAPTERS_ON_LAPTOP
    heads = ("model", "base", "device and host", "NVMe", "read", "written", "drive alone, s")
    yield _table(heads, _adapters_on_laptop(models))


def _least_of_adapters(models: Sequence[str]) -> Iterator[Sequence[str]]:
    for model, base, load in _adapted(models, Setting(gpu_memory=UNLIMITED)):
        budgets = Budgets(UNLIMITED, UNLIMITED, UNLIMITED)
        for tier in (Tier.DEVICE, Tier.HOST):
            budgets = least_budget(load, budgets, tier) or budgets
        held = place(load, Budgets(UNLIMITED, UNLIMITED, UNLIMITED)).state_bytes()
        yield model, base, *map(_gib, (held, budgets.device, budgets.host))


def _rows_of_cards(models: Sequence[str]) -> Iterator[Sequence[str]]:
    for model, base, load in _adapted(models, Setting(gpu_memory=max(CARDS_GIB) * GIB)):
        # By the rest of the row: cards with the same figures are one row.
        cards: dict[Sequence[str], list[str]] = {}
        for card in CARDS_GIB:
            budgets = Budgets(
                card * GIB // 2, int(HOST_BYTES * AUTO_SHARE), int(SSD_990_PRO.capacity * NVME_SHARE)
            )
            try:
                plan = place(replace(load, disk=ONE_990_PRO), budgets)
            except PlacementError:
                cards.setdefault(("too small", *("-" * 4)), []).append(str(card))
                continue
            held = (plan.total(Tier.HOST), plan.total(Tier.NVME), *plan.nvme_traffic())
            cards.setdefault((*map(_gib, held), _digits(_drive_seconds(plan))), []).append(str(card))
        for figures, sizes in cards.items():
            yield model, base, ", ".join(sizes), *figures


def _adapters_on_4090(models: Sequence[str]) -> Iterator[Sequence[str]]:
    profile = PROFILES["rtx4090"]
    setting = Setting(gpu_memory=profile.device.memory_bytes, checkpointed=True)
    for model, base, load in _adapted(models, setting):
        rates, shape = profile.rates(load), NAMED[model]
        sizes = shape.activations(setting, itemsize=load.compute_itemsize, adapters=Adapters(RANK, base=base))
        budgets = _beside(sizes, profile, load, usual_config(Path()))
        share = best_share(load, budgets, rates)
        load = replace(load, update_on_device=share, disk=rates.disk(1, 1))
        plan = place(load, budgets)
        told = forecast(
            plan,
            rates,
            tokens=TOKENS,
            checkpointed=True,
            attention_flops=setting.attention_flops(shape.layers, shape.hidden),
            computed=shape.params + shape.trained_params(Adapters(RANK)),
        )
        yield (
            model,
            base,
            *map(_gib, (plan.total(Tier.HOST), plan.total(Tier.NVME), *plan.nvme_traffic())),
            _digits(told.seconds),
            told.bound.value,
            f"{told.tokens_per_second:,.0f}",
            f"{told.tokens_that_hide:,}" if told.read else "-",
        )


def _adapters_on_laptop(models: Sequence[str]) -> Iterator[Sequence[str]]:
    for model, base, load in _adapted(models, Setting()):
        try:
            plan = place(replace(load, disk=ONE_990_PRO), _of_laptop())
        except PlacementError:
            yield _absent(model, base, 5)
            continue
        memory = plan.total(Tier.DEVICE) + plan.total(Tier.HOST)
        moved = (memory, plan.total(Tier.NVME), *plan.nvme_traffic())
        yield model, base, *map(_gib, moved), _digits(_drive_seconds(plan))


def _adapted(models: Sequence[str], setting: Setting) -> Iterator[tuple[str, str, Workload]]:
    """Each model over each base: (model, base, its Workload)."""
    for model in models:
        for base in BASES:
            adapters = Adapters(RANK, base=base)
            yield model, base, load_of(NAMED[model], usual_config(Path()), setting, adapters)


def _drive_seconds(plan: Plan) -> float:
    read, written = plan.nvme_traffic()
    return read / SSD_990_PRO.read + written / SSD_990_PRO.write


def _of_laptop() -> Budgets:
    half = int(LAPTOP_BYTES * AUTO_SHARE) // 2  # device and host are one memory
    return Budgets(half, half, int(SSD_990_PRO.capacity * NVME_SHARE))


def _least(size: str) -> Sequence[str]:
    in_fp32, in_halves = (load for _, _, load in _loads([size], Setting(gpu_memory=UNLIMITED)))
    budgets = Budgets(UNLIMITED, UNLIMITED, UNLIMITED)
    for tier in (Tier.DEVICE, Tier.HOST):
        budgets = least_budget(in_fp32, budgets, tier) or budgets
    return size, *map(_gib, (_bytes(in_fp32), _bytes(in_halves), budgets.device, budgets.host))


def _bytes(load: Workload) -> int:
    numel = sum(group.trainable_numel for group in load.groups)
    return numel * (load.compute_itemsize + load.grad_itemsize + load.state_itemsize)


def _rows_of(profile: Profile, sizes: Sequence[str]) -> Iterator[Sequence[str]]:
    ranks = profile.devices
    setting = Setting(ranks, ranks, profile.device.memory_bytes, checkpointed=True)
    for size, state, load in _loads(sizes, setting, micro_batches=MICRO_BATCHES):
        rates, shape = profile.rates(load), decoder(parse_count(size))
        activations = shape.activations(setting, itemsize=load.compute_itemsize)
        budgets = _beside(activations, profile, load, usual_config(Path(), world_size=ranks))
        share = best_share(load, budgets, rates.of_rank(ranks))
        load = replace(load, update_on_device=share, disk=rates.disk(1, ranks))
        try:
            plan = place(load, budgets)
        except PlacementError:
            yield _absent(size, state, 9)
            continue
        told = forecast(
            plan,
            rates,
            tokens=TOKENS,
            local_ranks=ranks,
            checkpointed=True,
            attention_flops=setting.attention_flops(shape.layers, shape.hidden),
        )
        days = None if profile.endurance is None else told.drive_days(profile.endurance)
        held = (plan.total(Tier.HOST), plan.total(Tier.NVME))
        yield (
            size,
            state,
            *map(_gib, (*held, *plan.nvme_traffic())),
            _digits(told.seconds),
            told.bound.value,
            f"{told.tokens_per_second:,.0f}",
            f"{told.tokens_that_hide:,}" if told.read else "-",
            f"{days:,.0f}" if days is not None else "-",
        )


def _beside(sizes: Activations, profile: Profile, load: Workload, config: TieringConfig) -> Budgets:
    """The budgets of a rank beside the activations ``sizes``, as `tiering plan --profile` has them."""
    shares, ranks = profile_budgets(profile), profile.devices
    whole = Budgets(0, shares["host_budget"] // ranks, shares["nvme_budget"] // ranks)
    return beside_activations(whole, profile.device.memory_bytes, beside_budget(load, config, sizes))


def _long_rows() -> Iterator[Sequence[str]]:
    profile, shape = PROFILES["rtx4090"], decoder(parse_count(LONG_SIZE))
    memory = profile.device.memory_bytes
    for micro_batches in (16, 8, 4, 2):
        tokens = MICRO_BATCHES * TOKENS // micro_batches
        setting = Setting(gpu_memory=memory, tokens=tokens, sequence=TOKENS, checkpointed=True)
        for where in ("device", "auto"):
            changes = {"activations": where}
            config = with_changes(usual_config(Path()), micro_batches=micro_batches, tiers=changes)
            load = load_of(shape, config, setting)
            sizes = shape.activations(setting, itemsize=load.compute_itemsize)
            start, budgets = f"{micro_batches} x {tokens:,}", _beside(sizes, profile, load, config)
            if not budgets.device:
                yield start, where, _gib(sizes.on_device()), "too large", *("-" * 4)
                continue
            rates = profile.rates(load)
            share = best_share(load, budgets, rates)
            load = replace(load, update_on_device=share, disk=rates.disk(1, 1))
            load, placed = with_activations(load, place(load, budgets), config, setting, sizes)
            plan = place(load, budgets)
            told = forecast(
                plan,
                rates,
                tokens=tokens,
                checkpointed=True,
                attention_flops=setting.attention_flops(shape.layers, shape.hidden),
            )
            yield (
                start,
                where,
                *map(_gib, (placed.on_device, placed.moved, *plan.nvme_traffic())),
                _digits(told.seconds),
                f"{told.tokens_per_second:,.0f}",
            )


def _cluster_rows() -> Iterator[Sequence[str]]:
    profile, nodes = PROFILES["dgx2"], 32
    ranks = profile.devices * nodes
    setting = Setting(ranks, profile.devices, profile.device.memory_bytes, elsewhere=True)
    config = usual_config(Path("/nvme"), world_size=ranks, dtype=profile.device.dtype)
    open_ = Open(checkpointing=True, activations=True, tile=True)
    for size in CLUSTER_SIZES:
        params = parse_count(size)
        planned = plan_of_size(params, config, setting, partial(profile.rates, nodes=nodes), open_=open_)
        plan, told, placed = planned.plan, planned.forecast, planned.activations
        assert plan is not None and told is not None and placed is not None
        shape, tile = decoder(params), planned.request.config.tiering.tile
        done = TOKENS * (8 * shape.params + 4 * setting.attention_flops(shape.layers, shape.hidden))
        held = (plan.total(Tier.DEVICE), placed.on_device, placed.moved, tile)
        node = (profile.devices * plan.budgets.of(tier) for tier in (Tier.HOST, Tier.NVME))
        yield (
            size,
            *map(_gib, (*held, *node)),
            f"{told.seconds:,.0f}",
            told.bound.value,
            f"{done / told.seconds / 1e12:.0f}",
        )


def _laptop_rows(sizes: Sequence[str]) -> Iterator[Sequence[str]]:
    for size, state, load in _loads(sizes, Setting()):
        try:
            plan = place(replace(load, disk=ONE_990_PRO), _of_laptop())
        except PlacementError:
            yield _absent(size, state, 5)
            continue
        memory = plan.total(Tier.DEVICE) + plan.total(Tier.HOST)
        moved = (memory, plan.total(Tier.NVME), *plan.nvme_traffic())
        yield size, state, *map(_gib, moved), _digits(_drive_seconds(plan))


def _loads(
    sizes: Sequence[str], setting: Setting, *, micro_batches: int = 1
) -> Iterator[tuple[str, str, Workload]]:
    """Each size in each format: (size, state, its Workload)."""
    usual = usual_config(Path(), world_size=setting.world_size)
    for size in sizes:
        for state in STATES:
            config = with_changes(usual, micro_batches=micro_batches, tiers={"state": state})
            yield size, state, load_of(decoder(parse_count(size)), config, setting)


def _absent(size: str, state: str, columns: int) -> Sequence[str]:
    """The row of what does not fit."""
    return size, state, "too small", *("-" for _ in range(columns - 1))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, as wide as its cells."""
    cells = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width for width in widths[:1]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = [
        [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (cells[0], rule, *cells[1:])
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _gib(nbytes: int) -> str:
    return _digits(nbytes / GIB)


def _digits(number: float) -> str:
    """Three digits at least; nothing for nothing."""
    return f"{number:,.{2 if number < 10 else 1 if number < 100 else 0}f}" if number else "-"


if __name__ == "__main__":
    print(page(), end="")
