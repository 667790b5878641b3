"""What GitHub runs: workflows that follow their schema, and do what they say with this tree."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest

from tests.deploy.files import ROOT, load, succeeds, tool, version

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps() -> list[dict[str, Any]]:
    return [
        step for path in WORKFLOWS for job in load(path)["jobs"].values() for step in job["steps"]
    ]


def test_workflows_follow_their_schema() -> None:
    """A mistake in one shows up when a release is due."""
    check = tool("check-jsonschema", "none; make test-deploy")
    succeeds(check, "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))


def test_workflows_call_targets_that_exist() -> None:
    """They do what a developer does, and nothing else."""
    makefile = (ROOT / "Makefile").read_text()
    lines = [line for step in steps() for line in re.findall(r"\bmake (.+)", step.get("run", ""))]
    called = [name for line in lines for name in line.split()]
    assert {"test", "wheels", "sbom", "docs", "audit"} <= set(called)
    assert [name for name in called if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize(("tag", "code"), [(version(), 0), ("9.9.9", 1)])
def test_a_release_is_refused_unless_its_tag_is_the_version(tag: str, code: int) -> None:
    """Image, chart and wheels of one tag must not differ."""
    jobs = load(ROOT / ".github/workflows/release.yml")["jobs"]
    (script,) = (step["run"] for step in jobs["same-version"]["steps"] if "run" in step)
    environment = {**os.environ, "GITHUB_REF_NAME": f"v{tag}"}
    shell = ["bash", "-e", "-c", script]
    assert subprocess.run(shell, cwd=ROOT, env=environment, check=False).returncode == code


def test_actions_are_pinned_by_digest() -> None:
    """A tag can be moved to other code, which would run with what a release may do."""
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
