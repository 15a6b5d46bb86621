"""``tiering plan``: plans the arguments of a command line. Imports torch only to build a model or to measure rates."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiering.errors import ConfigError, SwapSpaceError, TieringError

if TYPE_CHECKING:
    from tiering.config.training import TieringConfig
    from tiering.placement.workload import Workload
    from tiering.planning.adapters import Adapters
    from tiering.planning.plan_report import PlanReport
    from tiering.planning.profiles import Profile
    from tiering.planning.rates import Rates
    from tiering.planning.setting import Setting

# Bytes. A smaller number has no unit by mistake.
MIN_MEMORY = 1 << 20
FITS, DOES_NOT_FIT, USAGE_ERROR = 0, 1, 2

EPILOG = """\
sizes: 4K, 1M, 1GiB (1024-based) or 1GB (10^9), as in the configuration. A budget is for a node, with all its ranks.
exit code: 0 the model fits, 1 the model does not fit (changes that make it fit are printed), 2 usage error.
"""

_BUDGETS = {
    "device": "from the configuration, or what activations leave of the GPU",
    "host": "from the profile, the configuration or this machine; for other machines, the plan says what a node needs",
    "nvme": "as for host",
}
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kMGTP]?)(?:B|FLOPS?|FLOP)?(?:/s)?", re.ASCII)
RATE_NAMES = {
    "nvme-read": "reads from all drives of a node, for example 7GB/s",
    "nvme-write": "writes to all drives of a node",
    "nvme-mixed": "reads and writes of all drives at the same time, total",
    "host-copy": "copies within host memory",
    "host-memory": "traffic of host memory from CPUs and links, total",
    "device-link": "copies between host memory and a GPU, one direction",
    "device-link-both": "copies in both directions at the same time, total",
    "device-memory": "memory bandwidth of a GPU",
    "optimizer": "elements that the CPUs of a node update per second, for example 1.5G",
    "gradients": "gradient elements that the CPUs of a node accumulate per second",
    "flops": "operations of each device per second in the compute dtype, for example 165T",
    "network": "bytes that each rank sends to other ranks",
    "checksum": "bytes that the CPUs of a node checksum, for tiering.verify",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tiering plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Plans where a model's state lives, and estimates the time of a training step."
    parser.epilog = EPILOG
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--params",
        type=_count,
        metavar="N",
        help="plan a decoder with about N parameters, for example 350M or 7B",
    )
    model.add_argument(
        "--model",
        metavar="MODEL",
        help="plan the model of a transformers config.json or of its directory, or llama-3-8b, qwen2.5-32b or"
        " llama-3-70b",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with sizes in bytes and times in seconds"
    )

    training = parser.add_argument_group("training")
    _add_training(training)
    _add_batch(training)
    _add_machine(parser.add_argument_group("machine"))
    _add_rates(parser.add_argument_group("rates, in bytes per second unless the text says otherwise"))


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a ds_config.json (default: bf16, AdamW, stage 3, everything may be on NVMe)",
    )
    group.add_argument(
        "--lora",
        type=_positive,
        metavar="RANK",
        help="train LoRA adapters of this rank; the model is frozen",
    )
    group.add_argument(
        "--lora-modules",
        metavar="NAMES",
        help="linear layers with adapters, such as q_proj,v_proj (default: all-linear, without the output head)",
    )
    group.add_argument(
        "--base",
        metavar="FORMAT",
        help="format of the frozen linear layers: bf16, nf4, int8 or fp8 (default: that of --config, else bf16)",
    )
    group.add_argument(
        "--state", metavar="FORMAT", help="format of the optimizer state: fp32, split, bf16 or split+bf16"
    )


def _add_batch(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--micro-batches", type=_positive, metavar="N", help="number of micro-batches in a step"
    )
    group.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help="tokens in a micro-batch of each rank (default: 4096, at least a sequence)",
    )
    group.add_argument(
        "--sequence",
        type=_positive,
        metavar="N",
        help="sequence length in tokens (default: one sequence per micro-batch)",
    )
    group.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="with activation checkpointing, where backward recomputes the forward (default: no; for other machines"
        " than this one, if there is no plan without)",
    )
    group.add_argument(
        "--block-rows",
        type=_positive,
        metavar="N",
        help="sequences that a block computes at a time (tiering.block_rows); with --sequence",
    )
    group.add_argument(
        "--tile",
        type=memory_size,
        metavar="SIZE",
        help="maximum bytes of the weight of a layer (tiering.tile); larger ones are cut into tiles of rows (default:"
        " that of --config, else the largest with which there is a plan)",
    )
    group.add_argument(
        "--chunked-loss",
        action="store_true",
        help="with tiering.chunked_cross_entropy, which never makes all logits",
    )
    group.add_argument(
        "--activations",
        choices=("device", "host", "nvme", "auto"),
        help="where activations wait for backward (default: that of --config, else device; for other machines than this"
        " one auto, if there is no plan otherwise)",
    )
    group.add_argument(
        "--activation-budget",
        type=memory_size,
        metavar="SIZE",
        help="host memory for activations (default: that of --config, else 1GiB)",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile",
        metavar="NAME",
        help="a machine of docs/tools/sizing.md, with rates from data sheets",
    )
    group.add_argument("--gpu", type=memory_size, metavar="SIZE", help="memory of each GPU (default: no GPU)")
    group.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="number of ranks on all nodes (default: 1, or the profile's)",
    )
    group.add_argument(
        "--nodes",
        type=_positive,
        default=1,
        metavar="N",
        help="number of nodes (default: 1); with --gpu they are other machines than this one",
    )
    for tier in ("device", "host", "nvme"):
        group.add_argument(
            f"--{tier}-budget",
            type=memory_size,
            metavar="SIZE",
            help=f"budget of the {tier} tier (default: {_BUDGETS[tier]})",
        )


def _add_rates(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--measure",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="measure this machine and the disks behind DIR; results from the last 7 days are reused",
    )
    group.add_argument("--measure-again", action="store_true", help="measure everything again")
    group.add_argument("--save-rates", type=Path, metavar="FILE", help="write the measured rates to FILE")
    group.add_argument("--rates", type=Path, metavar="FILE", help="read rates from FILE")
    for name, text in RATE_NAMES.items():
        group.add_argument(f"--{name}", type=_rate, metavar="RATE", help=text)
    group.add_argument(
        "--tbw",
        type=_endurance,
        metavar="SIZE",
        help="write endurance of all drives of a node, for example 1200TB",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    try:
        report = answer(options)
    except (TieringError, OSError) as error:
        no_budget = isinstance(error, SwapSpaceError) and not options.measure
        hint = "; to plan for another machine, give --nvme-budget" if no_budget else ""
        print(f"tiering plan: {error}{hint}", file=sys.stderr)
        return USAGE_ERROR
    if options.measure and not report.fits:
        print("no rates were measured, because the model does not fit", file=sys.stderr)
    if options.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        from rich.console import Console

        console = Console()
        # Rich exits with its own code if the pipe is closed: let it write to a string.
        with console.capture() as text:
            report.print(console)
        print(text.get(), end="")
        if (command := _remedied(options, report)) is not None:
            print(f"\nA command with the first of these changes that options can make:\n{command}")
    return FITS if report.fits else DOES_NOT_FIT


def answer(options: argparse.Namespace) -> PlanReport:
    """The report for ``options``. Raises ConfigError, SwapSpaceError or OSError."""
    from tiering.commands.plan_rates import rates_of
    from tiering.config.fields import format_size
    from tiering.planning import profiles
    from tiering.planning.configuration import file_of
    from tiering.planning.setting import LOSS_CHUNK, TOKENS, Setting

    if options.save_rates is not None and not options.measure:
        raise ConfigError("--save-rates needs --measure DIR")
    if options.measure_again and not options.measure:
        raise ConfigError("--measure-again needs --measure DIR")
    profile = _profile(options.profile)
    ranks = options.ranks or (profile.devices * options.nodes if profile else 1)
    if ranks % options.nodes:
        from tiering._text import counted

        raise ConfigError(f"{counted(ranks, 'rank')} cannot be divided over {counted(options.nodes, 'node')}")
    gpu = options.gpu if options.gpu is not None else profile.device.memory_bytes if profile else None
    elsewhere = gpu is not None and not options.measure and _is_elsewhere(ranks, options.nodes)
    assumed = None
    if elsewhere and profile is None and options.rates is None:
        assert gpu is not None
        assumed = profiles.like(gpu, ranks // options.nodes)
    endurance = profile.endurance if profile else None
    setting = Setting(
        world_size=ranks,
        local_size=ranks // options.nodes,
        gpu_memory=gpu,
        tokens=options.tokens or max(TOKENS, options.sequence or 0),
        sequence=options.sequence,
        checkpointed=bool(options.checkpointing),
        loss_chunk=LOSS_CHUNK if options.chunked_loss else 0,
        endurance=endurance if options.tbw is None else options.tbw,
        elsewhere=elsewhere,
    )
    adapters = _adapters(options)
    file = _usual_file(options, profile or assumed, elsewhere=elsewhere) if options.config is None else None
    config = _config(options, file, profile, ranks)
    budget = config.tiering.device_budget
    if gpu is not None and budget != "auto" and budget // setting.local_size > gpu:
        raise ConfigError(
            f"device_budget is {format_size(budget // setting.local_size)} for each GPU, which has {format_size(gpu)}:"
            " lower the budget, or give the memory of the GPUs by --gpu"
        )
    if config.tiering.block_rows is not None and setting.sequence is None:
        raise ConfigError("block_rows counts sequences: give their length by --sequence N")
    rates = rates_of(options, profile or assumed, setting, config.tiering.io)
    report = _planned(options, config, setting, rates, adapters)
    if assumed is not None:
        report = replace(report, assumptions=(*report.assumptions, _assumed_rates(assumed)))
    return report if file is None else replace(report, configuration=file_of(report, file))


def _remedied(options: argparse.Namespace, report: PlanReport) -> str | None:
    """The command of ``options`` with further options, for the first remedy of ``report`` that options can make.

    An option that is there already counts with its last value.
    """
    from tiering.planning.configuration import options_of

    changes = (options_of(remedy, report.setting) for remedy in report.remedies)
    change = next(filter(None, changes), None)
    return None if change is None else shlex.join(["tiering", *options.arguments, *change])


def _planned(
    options: argparse.Namespace,
    config: TieringConfig,
    setting: Setting,
    rates: Callable[[Workload], Rates],
    adapters: Adapters | None,
) -> PlanReport:
    """The report for the model of ``options``."""
    from tiering.planning.choices import Open
    from tiering.planning.decoder import NAMED
    from tiering.planning.sizing import plan_of_decoder, plan_of_size

    bare = options.config is None
    open_ = Open(
        checkpointing=bare and setting.elsewhere and options.checkpointing is None,
        activations=bare and setting.elsewhere and options.activations is None,
        tile=bare and options.tile is None,
    )
    if options.model is None:
        return plan_of_size(options.params, config, setting, rates, adapters, open_)
    if options.model in NAMED and not Path(options.model).exists():
        shape = NAMED[options.model]
        return plan_of_decoder(f"{options.model}, {shape}", shape, config, setting, rates, adapters, open_)
    import tiering

    return tiering.plan_for(
        model=Path(options.model),
        config=config,
        world_size=setting.world_size,
        ranks_per_node=setting.local_size,
        gpu_memory=setting.gpu_memory,
        rates=rates,
        tokens=setting.tokens,
        sequence=setting.sequence,
        checkpointed=setting.checkpointed,
        loss_chunk=setting.loss_chunk,
        endurance=setting.endurance,
        adapters=adapters,
        elsewhere=setting.elsewhere,
    )


def _is_elsewhere(ranks: int, nodes: int) -> bool:
    """Whether the nodes are other machines than this one: several, or with more GPUs than there are here."""
    from tiering.host.machine import gpu_count

    return nodes > 1 or ranks > max(1, gpu_count())


def _assumed_rates(profile: Profile) -> str:
    return (
        f"Assumed: the rates of {profile.name} ({profile}), whose GPUs have this memory; --profile, --rates or single"
        " rates plan with others."
    )


def _adapters(options: argparse.Namespace) -> Adapters | None:
    from tiering.planning.adapters import ALL_LINEAR, Adapters

    if options.lora is None:
        for name in ("lora_modules", "base"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --lora RANK")
        return None
    return Adapters.of(options.lora, options.lora_modules or ALL_LINEAR, options.base or "bf16")


def _profile(name: str | None) -> Profile | None:
    from tiering.planning.profiles import PROFILES

    if name is not None and name not in PROFILES:
        raise ConfigError(f"unknown profile {name!r}; use one of {', '.join(PROFILES)}")
    return None if name is None else PROFILES[name]


def _usual_file(options: argparse.Namespace, profile: Profile | None, *, elsewhere: bool) -> dict[str, Any]:
    """The default ds_config.json, in a dtype in which the GPUs of ``profile`` compute fast."""
    from tiering.planning.setting import usual_file

    directory = options.measure[0] if options.measure else Path("/nvme") if elsewhere else Path()
    if profile is None and options.nvme_budget is None and not options.measure and not elsewhere:
        print(
            f"nvme budget: the free space in {directory.absolute()}; to plan for another machine, give --nvme-budget",
            file=sys.stderr,
        )
    return usual_file(directory, "bf16" if profile is None else profile.device.dtype)


def _config(
    options: argparse.Namespace, file: dict[str, Any] | None, profile: Profile | None, ranks: int
) -> TieringConfig:
    """The configuration from ``file``, or else from --config, with the options of the command line."""
    from tiering.config import ds_config
    from tiering.config.training import OptimizerConfig
    from tiering.planning.setting import profile_budgets, with_changes

    config, _ = ds_config.load(options.config if file is None else file, world_size=ranks)
    if config.optimizer is None:
        print(f"{options.config} names no optimizer; AdamW is assumed", file=sys.stderr)
        config = config.model_copy(update={"optimizer": OptimizerConfig()})
    keys = (
        "device_budget",
        "host_budget",
        "nvme_budget",
        "state",
        "activations",
        "activation_budget",
        "block_rows",
        "tile",
    )
    overrides = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    tiers = {} if profile is None else profile_budgets(profile)
    return with_changes(config, micro_batches=options.micro_batches, tiers=tiers | overrides)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    """``parse(text)``, with a ValueError as an ArgumentTypeError: argparse does not print the text of a ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    from tiering.config.fields import parse_size

    size: int = _parsed(parse_size, text)
    return size


def memory_size(text: str) -> int:
    """Parse a size of memory: ``24GiB``. A number without a unit is bytes, MIN_MEMORY at least."""
    nbytes, number = _size(text), text.strip()
    if 0 < nbytes < MIN_MEMORY and number.isdigit():
        raise argparse.ArgumentTypeError(f"{number} is {nbytes} bytes; did you mean {number}GiB?")
    return nbytes


def _endurance(text: str) -> int:
    """``1200TB``; a number without a unit is TB, as in data sheets."""
    return _size(text if text.strip()[-1:].isalpha() else f"{text}TB")


def _count(text: str) -> int:
    from tiering.planning.decoder import parse_count

    count: int = _parsed(parse_count, text)
    return count


def _rate(text: str) -> float:
    """``3GB/s``, ``165T`` or a number. Prefixes are decimal, as in data sheets."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not rate:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, such as '3GB/s', '165T' or '2e9', not {text!r}"
        )
    return rate
