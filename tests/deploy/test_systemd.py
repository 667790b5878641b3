"""The unit for a machine without containers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from router.cli import main as command_line
from router.config.server import TimeoutsConfig
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


def test_it_serves_the_documented_configuration() -> None:
    """As the containers do."""
    (serve,) = values("ExecStart")
    assert shlex.split(serve)[1:] == ROUTER_COMMAND


def test_a_refused_configuration_is_not_tried_again(tmp_path: Path) -> None:
    """systemd looks at the exit code of the main process only: a refused ExecStartPre would be
    restarted for ever (systemd issue 11868)."""
    assert values("RestartPreventExitStatus") == [str(command_line.EXIT_USAGE)]
    assert values("ExecStartPre") == []
    refused = tmp_path / "kvroute.yaml"
    refused.write_text("server: {port: 99999}\n")
    command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(refused)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == command_line.EXIT_USAGE
    assert "server.port" in done.stderr


def test_running_requests_have_the_time_that_the_router_gives_them() -> None:
    """systemd would kill it in the middle of their responses."""
    assert int(values("TimeoutStopSec")[0]) > TimeoutsConfig().shutdown_grace_s


def test_it_does_not_run_as_root() -> None:
    """It does not need root."""
    assert values("DynamicUser") == ["yes"]
    assert values("CapabilityBoundingSet") == [""]
