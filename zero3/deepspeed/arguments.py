"""The command line of a training script."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give ``parser`` the arguments that ``initialize(args=...)`` reads, and return it.

    ``--deepspeed`` is for the script; tiering does not read it. ``--deepspeed_config`` is the path of the
    configuration. The older names of both are accepted, but not shown. The script defines ``--local_rank`` itself.
    """
    group = parser.add_argument_group("DeepSpeed", "the options of DeepSpeed's scripts")
    group.add_argument(
        "--deepspeed", action="store_true", help="a flag for the script; tiering does not read it"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="path of the configuration file")
    group.add_argument("--deepscale", action="store_true", help=SUPPRESS)
    group.add_argument("--deepscale_config", help=SUPPRESS)
    return parser
