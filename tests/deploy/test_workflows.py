"""What GitHub runs: workflows that follow their schema, and do what they say with this tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deploy.files import KUBERNETES, ROOT, load, succeeds, tool, version
from tests.deploy.test_chart import CHART, helm

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps() -> list[dict[str, Any]]:
    return [
        step for path in WORKFLOWS for job in load(path)["jobs"].values() for step in job["steps"]
    ]


def test_workflows_follow_their_schema() -> None:
    """A mistake in one shows up when a release is due."""
    check = tool("check-jsonschema", "none; make tools")
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


def test_a_releases_chart_names_the_image_that_it_pushes(tmp_path: Path) -> None:
    """Who installs the published chart has no image of their own: `kvroute` is none that a registry
    has."""
    release = load(ROOT / ".github/workflows/release.yml")
    (about,) = (s for s in release["jobs"]["images"]["steps"] if s.get("id") == "about")
    pushed = about["with"]["images"].replace("${{ matrix.image }}", "kvroute")
    assert pushed == "${{ env.REGISTRY }}/kvroute"
    (script,) = (
        step["run"]
        for step in release["jobs"]["chart"]["steps"]
        if "names the image" in step.get("name", "")
    )
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", symlinks=True)
    # As the action that tags images does, names are in lower case: a registry takes no other.
    environment = {**os.environ, "REGISTRY": "ghcr.io/Some-Owner"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True)
    keys = ("--set", "keys.client=a", "--set", "keys.operator=b")
    chart = succeeds(helm(), "template", "r", str(tmp_path / "deploy/chart"), *keys)
    assert re.findall(r"image: (.*)", chart) == [f'"ghcr.io/some-owner/kvroute:{version()}"']


def test_the_chart_and_the_manifests_name_the_registry_of_a_release() -> None:
    """Without one a cluster asks a public registry for an image of that name: it gets nothing, or
    a stranger's."""
    registry = f"ghcr.io/{urlsplit(load(CHART / 'Chart.yaml')['home']).path.split('/')[1]}"
    assert load(CHART / "values.yaml")["image"]["repository"] == f"{registry}/kvroute"
    images = load(KUBERNETES / "base/kustomization.yaml")["images"]
    assert {each["newName"] for each in images} == {
        f"{registry}/kvroute",
        f"{registry}/kvroute-engine",
    }


def test_actions_are_pinned_by_digest() -> None:
    """A tag can be moved to other code, which would run with what a release may do."""
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
