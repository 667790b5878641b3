"""The examples for autoscalers: they ask for what a router has, and Prometheus reads them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.deploy.files import DEPLOY, ROOT, load, run, succeeds, tool

EXAMPLES = DEPLOY / "autoscaling"
BACKLOG, PRESSURE = "backlog", "pressure"


def queries() -> dict[str, str]:
    triggers = load(EXAMPLES / "keda.yaml")["spec"]["triggers"]
    return dict(
        zip((BACKLOG, PRESSURE), (each["metadata"]["query"] for each in triggers), strict=True)
    )


def test_every_metric_asked_for_exists() -> None:
    """A query of none scales nothing, and nobody notices."""
    documented = (ROOT / "docs/operations.md").read_text()
    for query in queries().values():
        named = re.findall(r"kvroute_\w+", query)
        assert named
        assert all(f"| `{name}` |" in documented for name in named), query


def test_both_autoscalers_go_by_the_same_backlog() -> None:
    """And the one of Kubernetes by the name that the adapter gives it."""
    (rule,) = load(EXAMPLES / "prometheus-adapter.yaml")["rules"]["external"]
    (metric,) = load(EXAMPLES / "hpa.yaml")["spec"]["metrics"]
    assert rule["metricsQuery"] == queries()[BACKLOG]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    validate = tool("kubernetes-validate", "none; make tools")
    said = run(validate, "--strict", str(EXAMPLES / "hpa.yaml"))
    assert said.returncode == 0, said.stdout + said.stderr


def test_the_backlog_of_all_routers_is_seconds_of_one_engine(tmp_path: Path) -> None:
    """With a queue in the router or without: KEDA divides it by the number of engines."""
    name = "kvroute_prefill_backlog_seconds"
    backlogs = [
        {"series": f'{name}{{instance="{router}",replica="{replica}"}}', "values": f"{seconds}x2"}
        for router, replica, seconds in (("1", "a", 2), ("1", "b", 0), ("2", "a", 1))
    ]
    speed = {"series": 'kvroute_prefill_tokens_per_second{model="m"}', "values": "8000x2"}
    queued = {"series": 'kvroute_queue_tokens{priority="high"}', "values": "16000x2"}
    tests = [
        {
            "interval": "1m",
            "input_series": [*backlogs, speed, *queue],
            "promql_expr_test": [
                {
                    "expr": queries()[BACKLOG],
                    "eval_time": "1m",
                    "exp_samples": [{"labels": "{}", "value": value}],
                }
            ],
        }
        for queue, value in (([], 3), ([queued], 5))
    ]
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"tests": tests}))
    succeeds(tool("promtool", "prometheus"), "test", "rules", str(path))
