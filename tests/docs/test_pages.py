"""What README.md and docs/ say that can go stale: links, the tests that are named, configurations, code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from tiering.config import ds_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FEATURES = ROOT / "docs" / "design" / "features.md"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

PLACES = 4  # columns of the table: device, host, NVMe, in between
LABEL = re.compile(r"^\[(?P<label>[^\]]+)\]: (?P<target>\S+)$", re.MULTILINE)
INLINE = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
BY_LABEL = re.compile(r"\[(?P<text>[^\]]*)\]\[(?P<label>[^\]]+)\]")
CELL = re.compile(r"-|n/a|((may be )?refused: )?\[(?P<test>same|test_\w+)\]\[(?P<label>\w+)\]")
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def labels(page: Path) -> dict[str, str]:
    return {match["label"]: match["target"] for match in LABEL.finditer(prose(page))}


def names_of_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


def table_rows() -> list[list[str]]:
    lines = [line for line in FEATURES.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] != "feature" and set(row[0]) != {"-"}]


@every_page
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets_by_label, text = labels(page), prose(page)
    undefined = [link["label"] for link in BY_LABEL.finditer(text) if link["label"] not in targets_by_label]
    assert undefined == []
    targets = [*targets_by_label.values(), *(link["target"] for link in INLINE.finditer(text))]
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [file for file in files if not (page.parent / file).exists()] == []


@every_page
def test_every_label_is_used(page: Path) -> None:
    assert set(labels(page)) <= {link["label"] for link in BY_LABEL.finditer(prose(page))}


@every_page
def test_every_test_that_is_named_exists_where_it_is_linked(page: Path) -> None:
    targets_by_label = labels(page)
    for link in BY_LABEL.finditer(prose(page)):
        if link["text"].startswith("test_"):
            assert link["text"] in names_of_tests(page.parent / targets_by_label[link["label"]]), link["text"]


def test_the_table_of_features_is_whole() -> None:
    rows = table_rows()
    assert len(rows) > 50
    for feature, *cells in rows:
        assert len(cells) == PLACES, feature
        previous = None
        for cell in cells:
            read = CELL.fullmatch(cell)
            assert read, f"{feature}: {cell}"
            if read["test"] == "same":
                assert previous is not None and previous["label"] == read["label"], (
                    f"{feature}: same as what?"
                )
            elif read["test"]:
                previous = read
    assert len({row[0] for row in rows}) == len(rows), "a feature is listed twice"


def test_the_features_name_every_architecture() -> None:
    listed = prose(FEATURES).partition("## Architectures")[2].partition("|")[0]
    words = re.findall(r"\w+", listed.lower().replace("-", ""))
    source = (ROOT / "tests" / "e2e" / "architectures.py").read_text(encoding="utf-8")
    table = source.partition("ARCHITECTURES: dict")[2]
    names = set(re.findall(r'^    "(\w+)": ', table, re.MULTILINE))
    assert len(names) > 10
    assert names - {"untied"} <= set(words)


@every_page
def test_code_is_code(page: Path) -> None:
    for block in FENCED.finditer(page.read_text(encoding="utf-8")):
        # tests/docs runs Python and commands, and writes a jsonc, which may have comments, for them to read
        assert block["language"] in ("python", "json", "jsonc", "console", "sh", "yaml"), (
            "say what a fenced block holds"
        )
        if block["language"] == "python":
            compile(block["body"], page.name, "exec")
            for node in ast.walk(ast.parse(block["body"])):
                if isinstance(node, ast.Dict) and _is_configuration(node):
                    ds_config.load(ast.literal_eval(node))
        elif block["language"] == "json":
            ds_config.load(json.loads(block["body"]))
        elif block["language"] == "yaml":
            config = yaml.safe_load(block["body"]).get("tiering_config")
            if isinstance(config, dict):
                ds_config.load({"train_micro_batch_size_per_gpu": 1, **config})


def _is_configuration(node: ast.Dict) -> bool:
    return any(isinstance(key, ast.Constant) and key.value == "zero_optimization" for key in node.keys)


@every_page
def test_fragments_of_a_configuration_are_known_keys(page: Path) -> None:
    """Indented ones, which show a section or two: with what a file needs besides, they load."""
    for block in INDENTED.finditer(prose(page)):
        if not block[0].lstrip().startswith('"'):
            continue
        bare = re.sub(r"#.*", "", block[0]).strip().rstrip(",")
        settings = json.loads("{" + bare + "}")
        offload = {key: settings.pop(key) for key in [*settings] if key.startswith("offload_")}
        zero = {"zero_optimization": {"stage": 3} | offload}
        ds_config.load({"train_batch_size": 1} | zero | settings)
