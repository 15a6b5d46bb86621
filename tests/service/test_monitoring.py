"""The dashboard and the alert rules: Prometheus understands them, and the sidecar tells what they ask for."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import service.advice
from service.metrics import render
from service.metrics.monitoring_files import FILES, main, text
from service.metrics.sidecar_metrics import Scrape

from .full_view import FULL
from .promtool import promtool

DASHBOARD = json.loads(text(FILES["dashboard"]))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALL_RULES = [rule for group in yaml.safe_load(text(FILES["alerts"]))["groups"] for rule in group["rules"]]
RULES = [rule for rule in ALL_RULES if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in ALL_RULES if "record" in rule}
RULE_TESTS = yaml.safe_load(text(FILES["alerts-test"]))["tests"]
ADVICE = "".join(file.read_text() for file in Path(service.advice.__file__).parent.glob("*.py"))
CODES = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', ADVICE))
DOCS = Path(__file__).parents[2] / "docs" / "tools" / "metrics.md"

SCRAPED = {"instance": "node1:8471", "job": "tierd"}  # labels that Prometheus adds
TOLD = [
    sample
    for family in text_string_to_metric_families(render(Scrape(FULL))[0].decode())
    for sample in family.samples
]
LABELS = {sample.name: {*sample.labels, *SCRAPED} for sample in TOLD} | {"up": set(SCRAPED)}


def expressions() -> list[tuple[str, str]]:
    """Of the dashboard, with its variables filled in, and their legends."""
    queries = []
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            for variable in DASHBOARD["templating"]["list"]:
                expression = expression.replace(f"${variable['name']}", ".*")
            assert "$" not in expression
            queries.append((expression, target["legendFormat"]))
    return queries


def annotations() -> list[tuple[str, str]]:
    """The queries of the dashboard's annotations, and their texts."""
    return [
        (re.sub(r"\$\w+", ".*", annotation["expr"]), annotation["titleFormat"] + annotation["textFormat"])
        for annotation in DASHBOARD["annotations"]["list"]
    ]


def as_input() -> list[dict[str, str]]:
    """What the sidecar tells, as promtool's series; counters rise."""

    def series(sample: Any) -> dict[str, str]:
        labels = ", ".join(f"{name}={json.dumps(value)}" for name, value in (sample.labels | SCRAPED).items())
        rising = re.search("_(total|count|sum|bucket)$", sample.name) is not None
        return {"series": f"{sample.name}{{{labels}}}", "values": f"{sample.value:.3f}+{int(rising)}x40"}

    return [series(sample) for sample in TOLD]


def test_every_query_of_the_dashboard_and_the_docs_finds_something(tmp_path: Path) -> None:
    """Prometheus evaluates them all over what the sidecar tells of a full view: names, labels and joins fit."""
    section = DOCS.read_text(encoding="utf-8").partition("## Queries")[2].partition("\n## ")[0]
    documented = re.findall(r"^    ([^#\s].*)$", section, re.MULTILINE)
    assert len(documented) > 3
    tests = [
        {
            "expr": f"count({expression}) > bool 0",
            "eval_time": "5m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for expression in (*(query for query, _ in (*expressions(), *annotations())), *documented)
    ]
    test = {"interval": "15s", "input_series": as_input(), "promql_expr_test": tests}
    (tmp_path / "test.yaml").write_text(json.dumps({"evaluation_interval": "15s", "tests": [test]}))
    promtool("test", "rules", tmp_path / "test.yaml")


def test_legends_name_labels_that_are_left() -> None:
    for expression, legend in (*expressions(), *annotations()):
        labels = re.search(r"\bby \(([^)]*)\)", expression)
        metric = re.search(r"\b(tiering|process)_\w+", expression)
        assert metric is not None
        allowed = (
            set(labels[1].split(", ")) if labels else set() if "sum(" in expression else LABELS[metric[0]]
        )
        assert set(re.findall(r"{{(\w+)}}", legend)) <= allowed, expression


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    def overlap(first: dict[str, int], other: dict[str, int]) -> bool:
        return (
            first["x"] < other["x"] + other["w"]
            and other["x"] < first["x"] + first["w"]
            and first["y"] < other["y"] + other["h"]
            and other["y"] < first["y"] + first["h"]
        )

    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for first, other in combinations(panels, 2):
        assert not overlap(first["gridPos"], other["gridPos"]), (first["title"], other["title"])
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    variables = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert variables == ["datasource", "instance", "run", "rank"]


def test_the_variables_ask_for_labels_that_are_told() -> None:
    for variable in DASHBOARD["templating"]["list"][1:]:
        query = re.fullmatch(r"label_values\((\w+)({.*})?, (\w+)\)", variable["query"]["query"])
        assert query is not None
        assert query[3] in LABELS[query[1]]
        assert set(re.findall(r"(\w+)=~", query[2] or "")) <= LABELS[query[1]]


def test_prometheus_accepts_the_rules_and_their_tests_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an operator gets them."""
    for kind, file in FILES.items():
        assert main(kind) == 0
        (tmp_path / file).write_text(capsys.readouterr().out, encoding="utf-8")
    assert json.loads((tmp_path / FILES["dashboard"]).read_text(encoding="utf-8")) == DASHBOARD
    promtool("check", "rules", tmp_path / FILES["alerts"])
    promtool("test", "rules", tmp_path / FILES["alerts-test"])


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    fires, rests = set(), set()
    for test in RULE_TESTS:
        for case in test["alert_rule_test"]:
            fired = [" ".join(map(str, alert["exp_labels"].values())) for alert in case["exp_alerts"]]
            fires |= {case["alertname"]} if fired else set()
            rests |= {case["alertname"]} if len(fired) < len(test["input_series"]) else set()
    assert fires == rests == {rule["alert"] for rule in RULES}


def test_the_recorded_figures_are_those_of_a_run_on_64_nodes(tmp_path: Path) -> None:
    """8 ranks on each; one waits for nobody, and one does not publish."""
    series: dict[str, str] = {}
    for node in range(64):
        series[f'tiering_run_ranks_expected{{instance="node{node}", run="gpt"}}'] = "8x40"
        series[f'tiering_run_ranks_up{{instance="node{node}", run="gpt"}}'] = "7x40" if node == 9 else "8x40"
        for rank in range(8 * node, 8 * node + 8):
            labels = f'instance="node{node}", run="gpt", rank="{rank}"'
            series[f"tiering_recent_step_seconds{{{labels}}}"] = f"{1 + rank / 1000}x40"
            series[f"tiering_recent_stall_ratio{{{labels}}}"] = f"{rank / 1000}x40"
            for cause, share in (("gather", 0.5 if rank != 333 else 0.0), ("optimizer state", 0.25)):
                series[f'tiering_stall_seconds_total{{{labels}, phase="forward", cause="{cause}"}}'] = (
                    f"0+{60 * share}x40"
                )
            series[f'tiering_swap_bytes_total{{{labels}, path="/nvme", direction="read"}}'] = "0+6000x40"
    whole_run = '{run="gpt"}'
    expected = {
        f"run:tiering_nodes:count{whole_run}": 64,
        f"run:tiering_ranks_expected:sum{whole_run}": 512,
        f"run:tiering_ranks_up:sum{whole_run}": 511,
        f"run:tiering_recent_step_seconds:max{whole_run}": 1 + 511 / 1000,
        f"run:tiering_recent_stall_ratio:max{whole_run}": 0.511,
        'run_direction:tiering_swap_bytes:rate5m{run="gpt", direction="read"}': 512 * 100,
        'rank:tiering_busy:ratio_rate5m{instance="node41", run="gpt", rank="333"}': 1,
        'rank:tiering_busy_to_median:ratio_rate5m{instance="node41", run="gpt", rank="333"}': 2,
        'rank:tiering_busy_to_median:ratio_rate5m{instance="node0", run="gpt", rank="3"}': 1,
    }
    assert {name.partition("{")[0] for name in expected} == RECORDED.keys()
    stragglers = next(
        expression for expression, _ in expressions() if expression.startswith("topk(10, (1 - sum")
    ).replace("topk(10", "topk(1")
    tests = [
        {"expr": name, "eval_time": "30m", "exp_samples": [{"labels": name, "value": value}]}
        for name, value in expected.items()
    ]
    straggler = {"labels": '{instance="node41", run="gpt", rank="333"}', "value": 2}
    tests.append({"expr": stragglers, "eval_time": "30m", "exp_samples": [straggler]})
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": tests,
    }
    (tmp_path / FILES["alerts"]).write_text(text(FILES["alerts"]), encoding="utf-8")
    document = {"rule_files": [FILES["alerts"]], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(json.dumps(document))
    promtool("test", "rules", tmp_path / "test.yaml")


def test_rules_ask_for_what_is_told_and_speak_plainly() -> None:
    documented = DOCS.read_text(encoding="utf-8")
    for rule in RULES:
        assert f"`{rule['alert']}`" in documented
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        for pattern in re.findall(r'code!~"([^"]*)"', rule["expr"]):
            assert all(any(re.fullmatch(part, code) for code in CODES) for part in pattern.split("|"))
        expression = rule["expr"]
        for name in sorted(RECORDED, key=len, reverse=True) * 2:
            expression = expression.replace(name, f"({RECORDED[name]})")
        metrics = re.findall(r"\b(tiering_\w+|up)\b(?:{([^}]*)})?", expression)
        assert metrics
        for metric, selector in metrics:
            assert set(re.findall(r"(\w+)=~?", selector)) <= LABELS[metric], rule["alert"]
        words = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= LABELS[metrics[0][0]], rule["alert"]
