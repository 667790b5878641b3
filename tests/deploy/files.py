"""The files in deploy/, parsed: YAML, the dashboard, and every PromQL expression with its place."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
KUBERNETES = DEPLOY / "kubernetes"
KEYS = {"CLIENT_KEY": "a", "OPERATOR_KEY": "b"}

CONFIG_PATH = "/etc/kvroute/kvroute.yaml"
ROUTER_COMMAND = ["serve", "--config", CONFIG_PATH]
HTTP_PORT, EVENT_PORT, REPLAY_PORT = 8000, 5557, 6557
"""An engine's, wherever this repository names one. A data-parallel rank adds its number to the last
two."""
ENGINE_PORTS = {HTTP_PORT, EVENT_PORT, REPLAY_PORT}
ENGINE_COMMAND = [
    *("engine", "--preset", "gemma", "--simulate", "--host", "0.0.0.0", "--port", str(HTTP_PORT)),
    *("--kv-events-endpoint", f"tcp://*:{EVENT_PORT}"),
    *("--kv-events-replay-endpoint", f"tcp://*:{REPLAY_PORT}"),
]


def load(path: Path) -> Any:
    """The one document of a YAML file."""
    return yaml.safe_load(path.read_text())


def version() -> str:
    """The version of this distribution, which is the tag of the images."""
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def tool(name: str, package: str) -> str:
    """The path of a program; skips the test without it, saying how to get it."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: {package})")
    return path


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def succeeds(*command: str, cwd: Path = ROOT) -> str:
    """Run a command, which must exit with 0, and return its output."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- PromQL ---------------------------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recordings() -> dict[str, str]:
    """Names and expressions of what is recorded."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/dashboards/kvroute.json").read_text())


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard that show data."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Place and text of every expression; those of the dashboard with its variables."""
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
    for name, expression in recordings().items():
        yield f"recording {name}", expression
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']!r} {target['refId']}", target["expr"]


def without_variables(expression: str) -> str:
    """The expression as Prometheus gets it when everything is selected."""
    for name in ("instance", "model", "replica"):
        expression = expression.replace(f'"${name}"', '".*"')
    return expression.replace("$__rate_interval", "1m")
