"""The Dockerfile, as far as it can be checked without a builder: its stages, and what the copied
files make."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.dockerfile import copied, copy_sources, instructions, lineage, stages
from tests.deploy.files import (
    DEPLOY,
    ENGINE_COMMAND,
    ENGINE_PORTS,
    ROOT,
    ROUTER_COMMAND,
    succeeds,
    tool,
    version,
)
from tests.support.native import QUICK_BUILD

DOCKERFILE = DEPLOY / "Dockerfile"
TARGETS = ("engine", "router")


def test_continued_lines_are_read_as_one() -> None:
    """The tests below see only what this reads."""
    assert instructions("# no\nFROM a AS b\nRUN c \\\n    d\n") == [
        ("FROM", "a AS b"),
        ("RUN", "c d"),
    ]


def test_hadolint_finds_nothing() -> None:
    """It knows more about Dockerfiles than the tests here."""
    succeeds(tool("hadolint", "none; make tools"), str(DOCKERFILE))


def test_every_base_is_a_stage_or_an_image_pinned_by_digest() -> None:
    """A tag may be another image tomorrow."""
    found = stages(DOCKERFILE)
    pinned = re.compile(r"[a-z]+:\d+\.\d+\.\d+-[a-z-]+@sha256:[0-9a-f]{64}")
    for stage in found.values():
        assert stage.base in found or pinned.fullmatch(stage.base), stage.base


def test_the_image_has_what_gateways_the_board_and_traces_need() -> None:
    """Without the extras a router with any of them does not start."""
    text = (ROOT / "pyproject.toml").read_text()
    locked = set(re.findall(r"^([\w.-]+)==", (DEPLOY / "requirements.lock").read_text(), re.M))
    for extra in ("gateway", "otel", "valkey"):
        found = re.search(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert found is not None
        named = {Requirement(each).name for each in re.findall(r'"(.*?)"', found[1])}
        assert named <= locked, extra


def test_the_router_is_what_a_build_without_a_target_makes() -> None:
    """The last stage is the default."""
    assert list(stages(DOCKERFILE))[-1] == "router"


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_does_not_run_as_root(target: str) -> None:
    """The user is a number, since Kubernetes cannot tell whether a name is root."""
    users = [user for stage in lineage(stages(DOCKERFILE), target) for user in stage.all_of("USER")]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_nothing_of_the_build_but_the_environment(target: str) -> None:
    """It contains no compiler, no cache and no sources."""
    found = stages(DOCKERFILE)
    copies = [line for stage in lineage(found, target) for line in stage.all_of("COPY")]
    assert len(copies) == 1
    assert re.fullmatch(r"--from=build(-engine)? /opt/kvroute /opt/kvroute", copies[0])


def test_the_routers_image_is_not_built_on_torch() -> None:
    """It would be ten times as large, for no benefit."""
    (copy,) = stages(DOCKERFILE)["router"].all_of("COPY")
    assert copy.startswith("--from=build ")
    assert not any(
        "offload]" in line
        for stage in lineage(stages(DOCKERFILE), "build")
        for line in stage.all_of("RUN")
    )
    (engine,) = stages(DOCKERFILE)["build-engine"].all_of("RUN")
    assert engine.endswith("'.[offload]' ./engine")


def test_everything_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    """A file that the builder ignores is missing in the image."""
    kept = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {source.removesuffix("/") for source in copied()} == kept
    for source in copied():
        assert (ROOT / source).exists(), source


def test_every_package_of_the_distribution_is_copied() -> None:
    """A new one must not be forgotten here."""
    listed = re.search(
        r"^wheel.packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert listed
    packages = re.findall(r'"(.*?)"', listed[1])
    assert packages
    assert set(packages) <= set(copied())


def test_the_lock_file_has_what_the_distribution_requires() -> None:
    """An image with other versions than the ones declared would be another router."""
    locked: dict[str, list[str]] = {}
    for line in (DEPLOY / "requirements.lock").read_text().splitlines():
        found = re.match(r"([\w.-]+)==([^ ;]+)", line)
        if found:
            locked.setdefault(found[1], []).append(found[2])
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2]
    required = re.findall(r'^ *"(.*)",$', text.partition("\n]")[0], re.MULTILINE)
    assert "msgspec" in locked
    for requirement in map(Requirement, required):
        versions = locked[requirement.name]
        assert all(requirement.specifier.contains(found) for found in versions), requirement


def test_the_commands_are_what_the_images_hold() -> None:
    """A typing mistake shows up as a container that restarts forever."""
    found = stages(DOCKERFILE)
    assert json.loads(found["engine"].all_of("CMD")[0]) == ENGINE_COMMAND
    assert json.loads(found["router"].all_of("CMD")[0]) == ROUTER_COMMAND
    for stage in lineage(found, "router"):
        assert all(json.loads(line) == ["kvroute"] for line in stage.all_of("ENTRYPOINT"))


def test_an_image_exposes_its_ports() -> None:
    """They are those of the engine's command."""
    lines = [
        line for stage in lineage(stages(DOCKERFILE), "engine") for line in stage.all_of("EXPOSE")
    ]
    assert {int(port) for line in lines for port in line.split()} == ENGINE_PORTS


def test_the_head_of_the_file_names_this_version() -> None:
    """Users copy the commands there."""
    assert set(re.findall(r"-t kvroute(?:-engine)?:(\S+)", DOCKERFILE.read_text())) == {version()}


def test_what_is_copied_is_a_router(tmp_path: Path) -> None:
    """It is built and installed only from the files that the image gets."""
    copy_sources(tmp_path / "source")
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    succeeds(
        "env",
        *(f"{name}={value}" for name, value in QUICK_BUILD.items()),
        *pip,
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(tmp_path / "source"),
    )
    # Without `site`, so that no hook of an editable installation finds the tree of the tests.
    script = (
        "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
        "from router.cli import main; print(main); sys.exit(main.main())"
    )
    config = str(DEPLOY / "compose/kvroute.yaml")
    said = succeeds(
        "env",
        "OPERATOR_KEY=x",
        sys.executable,
        "-IS",
        "-c",
        script,
        str(target),
        sysconfig.get_path("purelib"),
        "serve",
        "--config",
        config,
        "--check",
        cwd=tmp_path,
    )
    assert str(target) in said
    assert "the configuration is sound" in said


def test_what_the_router_requires_does_not_require_torch() -> None:
    """This includes indirect requirements; `python -m tests.deploy.install_image` installs them
    all, which takes a minute."""
    found = required_by("kvroute")
    assert {"msgspec", "uvicorn", "starlette"} <= found
    assert not {"torch", "numpy"} & found


def required_by(name: str) -> set[str]:
    """Distributions that an install without extras requires, by their installed names."""
    found, waiting = set(), [name]
    while waiting:
        for line in requires(waiting.pop()) or ():
            requirement = Requirement(line)
            needed = requirement.name.lower()
            if needed not in found and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                found.add(needed)
                waiting.append(needed)
    return found
