"""The alert rules and the dashboard: well formed, and only about what is exported."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry

from flask_idempotency.integrations.prometheus import SECONDS, RecordsCollector, export_metrics
from tests.docs.pages import ROOT, blocks

FOLDER = ROOT / "docs/monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
(GROUP,) = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
SHOWN = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
QUERIES = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
EXPRESSIONS = [
    *((name, rule["expr"]) for name, rule in RULES.items()),
    *SHOWN,
    *((each["name"], each["query"]["query"]) for each in QUERIES),
]
PAGE = (ROOT / "docs/monitoring.md").read_text("utf-8")

OF_PROMETHEUS = {"le", "job", "instance"}
"""Labels that a series has besides its own."""


@pytest.fixture
def exported(world):
    """The labels of each series, by its name."""
    registry = CollectorRegistry()
    export_metrics(world.app, registry=registry)
    labels = {each.name: {"operation", "state"} for each in RecordsCollector(world.app).collect()}
    for collector, names in registry._collector_to_names.items():
        labels |= {name: set(collector._labelnames) for name in names}
    return labels


def series(expression):
    return set(re.findall(r"\bidempotency_\w+", expression))


def used_labels(expression):
    """The labels that an expression selects, groups by or asks for."""
    selected = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    groups = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    return {*selected, *(name for group in groups for name in re.findall(r"\w+", group))}


def test_every_expression_uses_what_is_exported_and_every_series_is_shown(exported):
    """And tells services apart: each may have an endpoint of the same name, and trouble of its own."""
    for name, expression in EXPRESSIONS:
        used = series(expression)
        assert used, name
        assert used <= exported.keys(), name
        assert used_labels(expression) <= OF_PROMETHEUS.union(*(exported[each] for each in used)), name
        if name in RULES:
            groups = re.findall(r"\bby \(([^)]*)\)", expression)
            assert groups, name
            assert all("job" in group for group in groups), name
        elif name != "job":
            assert len(used) == expression.count('{job=~"$job"'), name
    shown = set().union(*(series(expression) for _, expression in EXPRESSIONS))
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported}
    families -= {name.removesuffix("_total") for name in exported if name.endswith("_total")}
    for name in families:
        assert any(each.startswith(name) for each in shown), name
        assert f"`{name}`" in PAGE, name


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
    anchor = re.sub(r"(?<!^)([A-Z])", r"-\1", name.removeprefix("Idempotency")).lower()
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{anchor}"
    assert f"\n({anchor})=\n" in (ROOT / "docs/runbook.md").read_text("utf-8")
    shown = set().union(*(series(expression) for _, expression in SHOWN))
    assert {each for each in series(rule["expr"]) if not each.endswith("_count")} <= shown
    if "histogram_quantile" in rule["expr"]:  # otherwise it is a guess between two bounds
        assert series(rule["expr"]) == {"idempotency_execution_seconds_bucket"}
        assert float(rule["expr"].rpartition(">")[2]) in SECONDS


def test_the_page_lists_the_alerts_with_their_severity():
    listed = re.findall(r"^\| `(Idempotency\w+)` \|.*\| (\w+) \|$", PAGE, re.MULTILINE)
    assert listed == [(name, rule["labels"]["severity"]) for name, rule in RULES.items()]


def test_grafana_can_import_the_dashboard():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "operation"}
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def promtool(*arguments):
    """Run it where it is installed."""
    if path := shutil.which("promtool"):
        done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_and_the_example_scrape_the_application_and_load_the_rules(tmp_path):
    (tmp_path / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text("utf-8"))
    [block] = blocks(ROOT / "docs/monitoring.md", "yaml")
    for text in block.text, (ROOT / "example/deploy/prometheus.yml").read_text("utf-8"):
        (tmp_path / "prometheus.yml").write_text(text)
        assert yaml.safe_load(text)["rule_files"] == ["alerts.yml"]
        promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yml")


def test_promtool_agrees(tmp_path):
    """It also runs the rules on made-up series: each alert fires when it should, and only then."""
    asked = [re.sub(r"\$(job|operation)", ".*", expression) for _, expression in SHOWN]  # by Grafana
    expressions = [expression.replace("$__rate_interval", "5m") for expression in asked]
    rules = [{"record": "panel", "expr": expression} for expression in expressions]
    (tmp_path / "panels.yml").write_text(yaml.dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", FOLDER / "alerts.yml")
    promtool("check", "rules", tmp_path / "panels.yml")
    promtool("test", "rules", ROOT / "tests/monitoring/alerts_test.yml")
