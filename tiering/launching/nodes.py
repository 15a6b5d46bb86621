"""The nodes of a job and their slots, from a hostfile and the filters of the command line.

A slot is the number of a GPU on its node; on a node without GPUs it is one process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering.errors import ConfigError

LOCALHOST = "localhost"
_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")


@dataclass(frozen=True)
class Node:
    """A host by its name, and its slots in the order of the local ranks."""

    name: str
    slots: tuple[int, ...]

    @property
    def takes_first_slots(self) -> bool:
        """Whether the slots are the first ones of the node, in their order."""
        return self.slots == tuple(range(len(self.slots)))


def read_hostfile(path: Path) -> list[Node]:
    """The nodes of a hostfile, in its order: lines ``NAME slots=N``, empty lines, and remarks behind "#".

    Raises ConfigError, with the line, for a line of another form or a node that is listed twice.
    """
    nodes: dict[str, Node] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read the hostfile {path}: {problem}") from None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(text)
        if entry is None:
            raise ConfigError(f"{path}:{number}: {text!r} is not an entry; write 'NAME slots=N'")
        name, slots = entry[1], int(entry[2])
        if name in nodes:
            raise ConfigError(f"{path}:{number}: {name} is listed twice; give all of its slots in one line")
        nodes[name] = Node(name, tuple(range(slots)))
    if not nodes:
        raise ConfigError(f"the hostfile {path} lists no node; write a line 'NAME slots=N' for each node")
    return list(nodes.values())


def included(nodes: Sequence[Node], text: str) -> list[Node]:
    """The nodes that ``text`` names, as ``NAME@NAME:SLOT,SLOT``, in the order of ``nodes``. Raises ConfigError."""
    wanted = _named(nodes, text, "--include")
    kept = [Node(node.name, wanted[node.name] or node.slots) for node in nodes if node.name in wanted]
    return [node for node in kept if node.slots]


def excluded(nodes: Sequence[Node], text: str) -> list[Node]:
    """The nodes and slots that ``text`` does not name. Raises ConfigError if it names all of them."""
    named = _named(nodes, text, "--exclude")
    kept = [
        Node(node.name, tuple(slot for slot in node.slots if slot not in (named[node.name] or node.slots)))
        if node.name in named
        else node
        for node in nodes
    ]
    left = [node for node in kept if node.slots]
    if not left:
        raise ConfigError(f"--exclude {text} leaves no slot; exclude fewer")
    return left


def _named(nodes: Sequence[Node], text: str, option: str) -> Mapping[str, tuple[int, ...]]:
    """The slots that ``text`` lists for each node; none if it lists the node alone."""
    known, named = {node.name: node.slots for node in nodes}, dict[str, set[int]]()
    for part in text.split("@"):
        name, colon, listed = part.partition(":")
        if name not in known:
            raise ConfigError(f"{option} names the node {name!r}; the nodes are {', '.join(known)}")
        if not colon:
            named.setdefault(name, set())
            continue
        for slot in listed.split(","):
            if not slot.isdecimal() or int(slot) not in known[name]:
                slots = ", ".join(map(str, known[name]))
                raise ConfigError(f"{option} names the slot {slot!r} of {name}, which has {slots or 'none'}")
            named.setdefault(name, set()).add(int(slot))
    return {name: tuple(sorted(slots)) for name, slots in named.items()}


def limited(nodes: Sequence[Node], num_nodes: int | None, num_gpus: int | None) -> list[Node]:
    """The first ``num_nodes`` nodes with the slots 0 to ``num_gpus`` - 1. Raises ConfigError if there are too few."""
    if num_nodes is not None and num_nodes > len(nodes):
        raise ConfigError(
            f"--num_nodes {num_nodes}, but the job has {len(nodes)} of them; list all nodes in the hostfile"
        )
    first = nodes if num_nodes is None else nodes[:num_nodes]
    return [Node(node.name, node.slots if num_gpus is None else tuple(range(num_gpus))) for node in first]


def is_this_host(name: str) -> bool:
    """Whether ``name`` is a name or an address of this machine."""
    if name in (LOCALHOST, socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {(family, address[0]) for family, *_, address in socket.getaddrinfo(name, 0)}
    except OSError:
        return False
    return any(_can_bind(family, str(address)) for family, address in addresses)


def _can_bind(family: int, address: str) -> bool:
    """Whether ``address`` belongs to an interface of this machine: no other address can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((address, 0))
    except OSError:
        return False
    return True
