"""``tiering launch``: starts the ranks of a script, with the options of the command ``deepspeed``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from tiering.errors import ConfigError
from tiering.launching import lines, over_ssh
from tiering.launching.lines import Job
from tiering.launching.nodes import (
    LOCALHOST,
    Node,
    excluded,
    included,
    is_this_host,
    limited,
    read_hostfile,
)
from tiering.launching.program import Program

HOSTFILE = Path("/job/hostfile")
LAUNCHERS = ("pdsh", "slurm", "openmpi", "mpich", "impi")
FAILED, USAGE = 1, 2


def add_arguments(launch: argparse.ArgumentParser) -> None:
    launch.description = (
        "Starts the ranks of SCRIPT by torchrun, srun or mpirun, and prints the command. The options are those of the"
        " command deepspeed."
    )
    launch.epilog = (
        "exit code: that of the started command; 1 nodes could not be reached, 2 usage error. An option that is not"
        " listed belongs behind SCRIPT."
    )
    launch.add_argument(
        *("-H", "--hostfile"),
        type=Path,
        metavar="FILE",
        help=f"nodes, as lines 'NAME slots=N' (default: {HOSTFILE}; without it, this machine)",
    )
    launch.add_argument(
        "-i", "--include", default="", metavar="NODES", help="nodes and slots to use: node0@node1:0,2"
    )
    launch.add_argument(
        "-e", "--exclude", default="", metavar="NODES", help="nodes and slots to leave out: node0@node1:0,2"
    )
    launch.add_argument("--num_nodes", type=_positive, metavar="N", help="use the first N nodes")
    launch.add_argument(
        *("--num_gpus", "--num_accelerators"),
        type=_positive,
        metavar="N",
        help="GPUs per node, one rank each (default: all); without GPUs the number of ranks (default: 1)",
    )
    launch.add_argument(
        "--master_addr", default="", metavar="HOST", help="host of rank 0 (default: the first node)"
    )
    launch.add_argument(
        "--master_port",
        type=_positive,
        metavar="PORT",
        help=f"port of rank 0 (default: {lines.PORT}; on one machine any free port)",
    )
    launch.add_argument(
        "--launcher",
        type=str.lower,
        default="pdsh",
        choices=LAUNCHERS,
        help="pdsh: torchrun on each node, by ssh; slurm: srun; openmpi, mpich, impi: mpirun (default: %(default)s)",
    )
    launch.add_argument("--launcher_args", default="", metavar="ARGS", help="options for ssh, srun or mpirun")
    launch.add_argument("--module", action="store_true", help="SCRIPT is the name of a Python module")
    launch.add_argument("--no_python", action="store_true", help="SCRIPT is an executable")
    launch.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to SCRIPT")
    launch.add_argument(
        "--no_ssh", action="store_true", help="start only the ranks of this node; run it on each node"
    )
    launch.add_argument(
        "--node_rank",
        type=int,
        metavar="N",
        help="number of this node, with --no_ssh (default: its place in the hostfile)",
    )
    launch.add_argument("--ssh_port", type=_positive, metavar="PORT", help="port of ssh")
    launch.add_argument(
        "--venv_script", default="", metavar="FILE", help="shell script to source on each node"
    )
    launch.add_argument(
        "--enable_each_rank_log", default="", metavar="DIR", help="write the output of each rank to DIR"
    )
    launch.add_argument("--bind_core_list", default="", metavar="CORES", help="CPUs of the ranks: 0-15,32")
    launch.add_argument("--force_multi", action="store_true", help="use ssh also for this machine alone")
    launch.add_argument("-q", "--quiet", action="store_true", help="do not print the command")
    launch.add_argument(
        "--dry-run", action="store_true", help="print the command of each node, and start nothing"
    )
    for flag in ("--bind_cores_to_rank", "--no_ssh_check", "--save_pid"):
        launch.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    launch.add_argument("--log_level", help=argparse.SUPPRESS)
    launch.add_argument("--autotuning", help=argparse.SUPPRESS)
    launch.add_argument("script", metavar="SCRIPT", help="the script that each rank runs")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    launch.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the ranks. Returns only for several nodes; otherwise the command takes the place of this process."""
    try:
        _check(options)
        nodes = _nodes(options)
        job = _job(options, nodes)
        if options.launcher == "slurm":
            names_nodes = bool(options.include or options.exclude)
            return _start(options, lines.srun(job, gpus_per_node=options.num_gpus, names_nodes=names_nodes))
        if options.launcher != "pdsh":
            return _start(options, lines.mpirun(job, launcher=options.launcher))
        if options.no_ssh:
            return _start_node(options, job, nodes[_node_rank(options, nodes)])
        if len(nodes) > 1 or options.force_multi or not is_this_host(nodes[0].name):
            return _start_nodes(options, job)
        return _start_node(options, job, nodes[0])
    except ConfigError as error:
        print(f"tiering launch: {error}", file=sys.stderr)
        return USAGE


def _check(options: argparse.Namespace) -> None:
    if options.autotuning:
        raise ConfigError("--autotuning is not supported; 'tiering plan' computes what fits")
    if options.no_python and options.module:
        raise ConfigError("--no_python and --module exclude each other; remove one of them")
    if options.include and options.exclude:
        raise ConfigError("--include and --exclude exclude each other; remove one of them")
    if (options.include or options.exclude) and (options.num_nodes or options.num_gpus):
        raise ConfigError("--num_nodes and --num_gpus cannot be combined with --include and --exclude")


def _nodes(options: argparse.Namespace) -> list[Node]:
    """The nodes of the job, after all filters."""
    hostfile = options.hostfile or HOSTFILE
    if options.hostfile or hostfile.is_file():
        nodes = read_hostfile(hostfile)
    elif options.launcher == "slurm":
        return _slurm_nodes(options)
    elif options.num_nodes and options.num_nodes > 1:
        raise ConfigError(f"--num_nodes {options.num_nodes} needs the names of the nodes; pass --hostfile")
    else:
        nodes = [_this_machine(options)]
    if options.include:
        return included(nodes, options.include)
    if options.exclude:
        return excluded(nodes, options.exclude)
    return limited(nodes, options.num_nodes, options.num_gpus)


def _this_machine(options: argparse.Namespace) -> Node:
    """This machine with its GPUs; without GPUs with one slot for each rank."""
    gpus = _gpu_count()
    if not gpus and (options.include or options.exclude):
        raise ConfigError("this machine has no GPU to select; --num_gpus N starts N ranks on its CPUs")
    return Node(LOCALHOST, tuple(range(gpus or 1)))


def _slurm_nodes(options: argparse.Namespace) -> list[Node]:
    """As many nodes as the allocation or --num_nodes has; srun knows their names."""
    if options.include or options.exclude:
        raise ConfigError("--include and --exclude need the slots of the nodes; pass --hostfile")
    count = options.num_nodes or int(os.environ.get("SLURM_NNODES", "1"))
    slots = options.num_gpus or int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) or _gpu_count() or 1
    return [Node(f"node{index}", tuple(range(slots))) for index in range(count)]


def _gpu_count() -> int:
    if os.environ.get("TIERING_DEVICE") == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _job(options: argparse.Namespace, nodes: list[Node]) -> Job:
    on_this_machine = len(nodes) == 1 and is_this_host(nodes[0].name)
    address = options.master_addr or ("127.0.0.1" if on_this_machine else nodes[0].name)
    if len(nodes) > 1 and not options.master_addr and address in (LOCALHOST, "127.0.0.1", "::1"):
        raise ConfigError(
            f"the first node is {address}, which other nodes cannot reach; pass its address with --master_addr"
        )
    # Slots of other nodes are GPUs, also if this one has none.
    has_gpus = _gpu_count() > 0 if on_this_machine else os.environ.get("TIERING_DEVICE") != "cpu"
    selects_slots = options.hostfile or options.include or options.exclude or options.num_gpus
    exports = {} if on_this_machine else lines.exported_variables(os.environ)
    if options.launcher == "slurm":
        # srun passes the variables of this process on.
        exports = {name: value for name, value in exports.items() if os.environ.get(name) != value}
    log = options.enable_each_rank_log
    return Job(
        program=Program(
            options.script,
            tuple(options.arguments),
            is_module=options.module,
            is_executable=options.no_python,
            passes_local_rank=not options.no_local_rank,
        ),
        nodes=tuple(nodes),
        address=address,
        port=options.master_port,
        selects_gpus=has_gpus and bool(selects_slots),
        torchrun_options=(f"--log-dir={log}", "--redirects=3") if log not in ("", "None") else (),
        launcher_options=tuple(shlex.split(options.launcher_args)),
        cores=options.bind_core_list,
        environment_script=options.venv_script,
        exports=exports,
    )


def _node_rank(options: argparse.Namespace, nodes: list[Node]) -> int:
    """The number of this node: the given one, its place in the hostfile, or the one that SLURM gives it."""
    rank: int | None = options.node_rank
    if rank is None:
        here = [index for index, node in enumerate(nodes) if is_this_host(node.name)]
        rank = here[0] if len(here) == 1 else int(os.environ.get("SLURM_NODEID", "-1"))
    if not 0 <= rank < len(nodes):
        names = ", ".join(node.name for node in nodes)
        raise ConfigError(f"the number of this node among {names} is not known; pass --node_rank, from 0")
    return rank


def _start_node(options: argparse.Namespace, job: Job, node: Node) -> int:
    return _start(options, lines.torchrun(job, node), lines.visible_devices(job, node))


def _start(options: argparse.Namespace, line: list[str], variables: dict[str, str] | None = None) -> int:
    variables = variables or {}
    if options.dry_run:
        print(lines.text(line, variables))
        return 0
    _say(options, lines.text(line, variables))
    return _become(line, os.environ | variables)


def _become(line: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by that of ``line``, which then gets the signals and gives the exit code."""
    sys.stdout.flush()
    try:
        os.execvpe(line[0], line, environment)  # noqa: S606 # no shell: each word is one argument
    except FileNotFoundError:
        raise ConfigError(
            f"{line[0]} is not installed on this machine; install it, or use --launcher pdsh"
        ) from None


def _start_nodes(options: argparse.Namespace, job: Job) -> int:
    by_node = {node.name: lines.shell_line(job, node) for node in job.nodes}
    if options.dry_run:
        for name, line in by_node.items():
            print(f"{name}: {line}")
        return 0
    others = [name for name in by_node if not is_this_host(name)]
    if others and shutil.which("ssh") is None:
        print(
            f"tiering launch: ssh is not installed, so {', '.join(others)} cannot be reached from here; run each line"
            " on its node:",
            file=sys.stderr,
        )
        for name, line in by_node.items():
            print(f"{name}: {line}")
        return FAILED
    for name, line in by_node.items():
        _say(options, f"{name}: {line}")
    port = ("-p", str(options.ssh_port)) if options.ssh_port else ()
    return over_ssh.run(by_node, (*port, *job.launcher_options))


def _say(options: argparse.Namespace, message: str) -> None:
    if not options.quiet:
        print(f"tiering launch: {message}", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, not {text}")
    return int(text)
