"""The unit for a machine without containers."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from router.cli import main as command_line
from router.config import TimeoutsConfig
from tests.deploy.files import DEPLOY, ROUTER_COMMAND, succeeds, tool

UNIT = DEPLOY / "systemd/kvroute.service"


def values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """It silently ignores unknown directives, even protective ones."""
    analyze = tool("systemd-analyze", "systemd")
    (tmp_path / UNIT.name).write_text(
        UNIT.read_text().replace("/opt/kvroute/bin/kvroute", sys.executable)
    )
    succeeds(analyze, "verify", "--man=no", "--recursive-errors=no", str(tmp_path / UNIT.name))


def test_it_checks_the_configuration_that_it_then_serves() -> None:
    """An error then shows as a failed start with its path, not as a router that restarts."""
    (check,), (serve,) = values("ExecStartPre"), values("ExecStart")
    assert check == f"{serve} --check"
    assert shlex.split(serve)[1:] == ROUTER_COMMAND


def test_a_refused_configuration_is_not_tried_again() -> None:
    """The exit code is that of the command line."""
    assert values("RestartPreventExitStatus") == [str(command_line.EXIT_USAGE)]


def test_running_requests_have_the_time_that_the_router_gives_them() -> None:
    """systemd would kill it in the middle of their responses."""
    assert int(values("TimeoutStopSec")[0]) > TimeoutsConfig().shutdown_grace_s


def test_it_does_not_run_as_root() -> None:
    """It does not need root."""
    assert values("DynamicUser") == ["yes"]
    assert values("CapabilityBoundingSet") == [""]
