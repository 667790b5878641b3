"""Scrape configuration and alerts: promtool accepts them, and an operator finds what is needed at 3
a.m."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import PROMETHEUS, ROOT, alerts, load, succeeds, tool


def test_promtool_accepts_the_rules() -> None:
    """Prometheus does not start with an invalid rule."""
    succeeds(tool("promtool", "prometheus"), "check", "rules", str(PROMETHEUS / "alerts.yml"))


def test_promtool_accepts_the_scrape_configuration() -> None:
    """It also finds the files that the configuration names."""
    succeeds(tool("promtool", "prometheus"), "check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_promtool_accepts_the_configuration_for_kubernetes(tmp_path: Path) -> None:
    """Debian's promtool is built without discovery of pods, so that line is left out here."""
    text = (PROMETHEUS / "kubernetes.yml").read_text()
    kept = re.sub(r"^    kubernetes_sd_configs:.*\n(      - .*\n)?", "", text, flags=re.MULTILINE)
    assert kept.count("\n") == text.count("\n") - 3
    (tmp_path / "kubernetes.yml").write_text(kept)
    (tmp_path / "alerts.yml").write_text((PROMETHEUS / "alerts.yml").read_text())
    succeeds(tool("promtool", "prometheus"), "check", "config", str(tmp_path / "kubernetes.yml"))


def test_both_configurations_have_the_jobs_that_alerts_ask_for() -> None:
    """An alert on another job name never fires, except the one for a missing job."""
    jobs = {found for rule in alerts() for found in re.findall(r'job="(\w+)"', rule["expr"])}
    assert jobs == {"kvroute"}
    for name in ("prometheus.yml", "kubernetes.yml"):
        assert [job["job_name"] for job in load(PROMETHEUS / name)["scrape_configs"]] == [
            "kvroute",
            "engines",
        ]


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    """Each test of alerts_test.yml states the whole set of alerts that fire at a moment."""
    succeeds(tool("promtool", "prometheus"), "test", "rules", str(PROMETHEUS / "alerts_test.yml"))


def test_every_alert_is_tested() -> None:
    """An alert that never fired in a test may never fire at all."""
    text = (PROMETHEUS / "alerts_test.yml").read_text()
    fired = set(re.findall(r'alertname="(\w+)"', text))
    assert fired == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_it_means_and_where_to_read_on(
    rule: dict[str, Any],
) -> None:
    """These words are all that the person on call has at first."""
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert len(notes["summary"]) <= 128
    site, _, place = notes["runbook_url"].partition("/blob/main/")
    assert site == "https://github.com/kvroute/kvroute", "a notification has no other place"
    name, anchor = place.split("#")
    headings = re.findall(r"^#+ (.*)", (ROOT / name).read_text(), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_what_an_alert_leads_to_is_about_what_it_saw(rule: dict[str, Any]) -> None:
    """Its section has one of its metrics by name: several led to one that did not mention them."""
    name, anchor = rule["annotations"]["runbook_url"].partition("/blob/main/")[2].split("#")
    text = (ROOT / name).read_text()
    parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    (at,) = [
        index
        for index, part in enumerate(parts)
        if part.startswith("#") and part.lstrip("# ").lower().replace(" ", "-") == anchor
    ]
    seen = re.findall(r"(?:kvroute|vllm)[_:][a-z0-9_:]+?(?=_total|_bucket|\W)", rule["expr"])
    section = "".join(parts[at : at + 2])
    assert any(metric in section for metric in seen) or 'up{job="kvroute"}' in rule["expr"]


def test_alert_names_are_unique() -> None:
    """Silencing one alert must not silence another."""
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
