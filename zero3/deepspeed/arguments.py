"""The command line of a training script."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give ``parser`` the arguments that ``initialize(args=...)`` reads, and return it.

    ``--deepspeed`` changes nothing here; ``--deepspeed_config`` is the configuration's path. Their older names are
    taken, and not shown. ``--local_rank`` is the script's own.
    """
    group = parser.add_argument_group("DeepSpeed", "as DeepSpeed's scripts have them")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script to look at; nothing else does"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration")
    group.add_argument("--deepscale", action="store_true", help=SUPPRESS)
    group.add_argument("--deepscale_config", help=SUPPRESS)
    return parser
