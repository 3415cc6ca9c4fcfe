"""The alert rules and the dashboard: well formed, and only about what is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry

from flask_idempotency.integrations.prometheus import (
    SECONDS,
    RecordsCollector,
    export_metrics,
)
from tests.docs.pages import ROOT, blocks

FOLDER = ROOT / "docs/monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
(GROUP,) = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}

EXPRESSIONS = {
    **{name: rule["expr"] for name, rule in RULES.items()},
    **{
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
    **{
        variable["name"]: variable["query"]["query"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    },
}

OF_PROMETHEUS = {"le", "job", "instance"}
"""Labels that a series has besides its own."""


@pytest.fixture
def exported(world):
    """The labels of each series, by its name."""
    registry = CollectorRegistry()
    export_metrics(world.app, registry=registry)
    labels = {each.name: {"operation", "state"} for each in RecordsCollector(world.app).collect()}
    for collector, names in registry._collector_to_names.items():
        labels.update({name: set(collector._labelnames) for name in names})
    return labels


def series(expression):
    return set(re.findall(r"\bidempotency_\w+", expression))


def used_labels(expression):
    """The labels that an expression selects, groups by or asks for."""
    selected = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    return {
        *selected,
        *(name.strip() for group in grouped for name in group.split(",") if name.strip()),
    }


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_uses_only_series_and_labels_that_are_exported(name, exported):
    used = series(EXPRESSIONS[name])
    assert used
    assert used <= exported.keys()
    known = OF_PROMETHEUS.union(*(exported[each] for each in used))
    assert used_labels(EXPRESSIONS[name]) <= known


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_what_it_means_why_and_what_to_do(name):
    rule = RULES[name]
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Idempotency([A-Z][a-z]+)+", name)
    assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
    assert rule["annotations"].keys() == {"summary", "why", "do", "runbook_url"}
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
    labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule)))
    assert labels <= used_labels(rule["expr"])


QUANTILES = [name for name, rule in RULES.items() if "histogram_quantile" in rule["expr"]]


@pytest.mark.parametrize("name", QUANTILES)
def test_the_threshold_of_a_quantile_is_the_bound_of_a_bucket(name):
    """Otherwise the quantile is a guess between two bounds: of 10 and 30, for 15."""
    assert series(RULES[name]["expr"]) == {"idempotency_execution_seconds_bucket"}
    assert float(RULES[name]["expr"].rpartition(">")[2]) in SECONDS


@pytest.mark.parametrize("name", RULES)
def test_an_alert_has_an_entry_in_the_runbook(name):
    anchor = re.sub(r"(?<!^)([A-Z])", r"-\1", name.removeprefix("Idempotency")).lower()
    assert RULES[name]["annotations"]["runbook_url"] == f"docs/runbook.md#{anchor}"
    assert f"\n({anchor})=\n" in (ROOT / "docs/runbook.md").read_text("utf-8")


@pytest.mark.parametrize("name", RULES)
def test_an_alert_has_a_panel_that_shows_the_same_series(name):
    shown = {each for panel in PANELS for target in panel["targets"] for each in series(target["expr"])}
    assert {each for each in series(RULES[name]["expr"]) if not each.endswith("_count")} <= shown


def test_every_series_has_a_panel_and_a_row_on_the_page(exported):
    shown = set().union(*(series(expression) for expression in EXPRESSIONS.values()))
    page = (ROOT / "docs/monitoring.md").read_text("utf-8")
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported}
    families -= {name.removesuffix("_total") for name in exported if name.endswith("_total")}
    for name in families:
        assert any(each.startswith(name) for each in shown), name
        assert f"`{name}`" in page, name


def test_the_page_lists_the_alerts_with_their_severity():
    page = (ROOT / "docs/monitoring.md").read_text("utf-8")
    listed = re.findall(r"^\| `(Idempotency\w+)` \|.*\| (\w+) \|$", page, re.MULTILINE)
    assert listed == [(name, rule["labels"]["severity"]) for name, rule in RULES.items()]


def test_grafana_can_import_the_dashboard():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert DASHBOARD["schemaVersion"] >= 36
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource",
        "job",
        "operation",
    }
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not covered & cells, f"{panel['title']} lies on another panel"
        cells |= covered
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_page_and_the_example_scrape_the_application_and_load_the_rules(tmp_path):
    promtool = shutil.which("promtool")
    (tmp_path / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text("utf-8"))
    [block] = blocks(ROOT / "docs/monitoring.md", "yaml")
    for text in block.text, (ROOT / "example/deploy/prometheus.yml").read_text("utf-8"):
        (tmp_path / "prometheus.yml").write_text(text)
        assert yaml.safe_load(text)["rule_files"] == ["alerts.yml"]
        if promtool:
            command = [promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_agrees_where_it_is_installed(tmp_path):
    """It also runs the rules on made-up series: each alert fires when it should, and only then."""
    promtool = shutil.which("promtool")
    panels = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [{"record": "panel", "expr": filled_in(expression)} for expression in panels]
    (tmp_path / "panels.yml").write_text(yaml.dump({"groups": [{"name": "all", "rules": rules}]}))
    files = [
        ("check", FOLDER / "alerts.yml"),
        ("test", ROOT / "tests/monitoring/alerts_test.yml"),
        ("check", tmp_path / "panels.yml"),
    ]
    for what, file in files if promtool else ():
        done = subprocess.run(
            [promtool, what, "rules", file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def filled_in(expression):
    """An expression of the dashboard as Grafana sends it."""
    return re.sub(r"\$(job|operation)", ".*", expression.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_services_are_told_apart(name):
    """Each may have an endpoint of the same name, and trouble of its own."""
    expression = EXPRESSIONS[name]
    if name in RULES:
        assert "by (" in expression
        assert all("job" in group for group in re.findall(r"\bby \(([^)]*)\)", expression))
    elif name != "job":
        assert len(series(expression)) == expression.count('{job=~"$job"')
