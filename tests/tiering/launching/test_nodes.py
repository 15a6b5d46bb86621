"""Hostfiles, and the nodes and slots that are left after the filters of the command line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tiering.errors import ConfigError
from tiering.launching.nodes import Node, excluded, included, is_this_host, limited, read_hostfile

NODES = [Node("a", (0, 1, 2, 3)), Node("b-1", (0, 1)), Node("c.d", (0, 1))]


def hostfile(directory: Path, text: str) -> Path:
    path = directory / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_hostfile(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two of them\n\n  a slots=4\nb-1\tslots=2  # the old one\nc.d slots=2\n")
    assert read_hostfile(path) == NODES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb 2\n", r"hosts:2: 'b 2' is not an entry; write 'NAME slots=N'"),
        ("a slots=x", "hosts:1: .* is not an entry"),
        ("a slots=1 slots=2", "hosts:1: .* is not an entry"),
        ("a slots=1\na slots=2", "hosts:2: a is listed twice"),
        ("# none\n", "lists no node"),
    ],
)
def test_a_hostfile_with_a_mistake(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hostfile(hostfile(tmp_path, text))
    with pytest.raises(ConfigError, match=r"cannot read the hostfile .*missing"):
        read_hostfile(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a", {"a": (0, 1, 2, 3)}),
        ("c.d@a:2,0", {"a": (0, 2), "c.d": (0, 1)}),
        ("a:1@a:3,1", {"a": (1, 3)}),
        ("b-1@b-1:1", {"b-1": (1,)}),
    ],
)
def test_include(text: str, left: dict[str, tuple[int, ...]]) -> None:
    assert {node.name: node.slots for node in included(NODES, text)} == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a", {"b-1": (0, 1), "c.d": (0, 1)}),
        ("a:0,3@b-1", {"a": (1, 2), "c.d": (0, 1)}),
        ("c.d:0,1", {"a": (0, 1, 2, 3), "b-1": (0, 1)}),
    ],
)
def test_exclude(text: str, left: dict[str, tuple[int, ...]]) -> None:
    assert {node.name: node.slots for node in excluded(NODES, text)} == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d", "names the node 'd'; the nodes are a, b-1, c.d"),
        ("a:4", "names the slot '4' of a, which has 0, 1, 2, 3"),
        ("a:", "names the slot '' of a"),
        ("a:0-1", "names the slot '0-1' of a"),
        ("", "names the node ''"),
    ],
)
def test_a_filter_with_a_mistake(text: str, message: str) -> None:
    for filtered in (included, excluded):
        with pytest.raises(ConfigError, match=message):
            filtered(NODES, text)
    with pytest.raises(ConfigError, match="leaves no slot"):
        excluded(NODES, "a@b-1@c.d")


def test_the_first_nodes_and_slots() -> None:
    assert limited(NODES, None, None) == NODES
    assert limited(NODES, 2, None) == NODES[:2]
    assert limited(NODES, 1, 2) == [Node("a", (0, 1))]
    with pytest.raises(ConfigError, match="--num_nodes 4, but the job has 3 of them"):
        limited(NODES, 4, None)


def test_the_names_of_this_host() -> None:
    for name in ("localhost", "127.0.0.1", socket.gethostname()):
        assert is_this_host(name)
    # Addresses for documentation belong to nobody.
    for name in ("192.0.2.1", "no-such-host.invalid"):
        assert not is_this_host(name)
