"""These tests need a running vLLM, which `make e2e-vllm` installs in an environment of its own;
without it they are not collected. Each server takes 1.4 GiB and most of a minute to start, so tests
share them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]

_figures = pytest.StashKey[list[str]]()


class Figures:
    """The figures measured, shown after all tests have run."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def add(self, what: str, figure: object) -> None:
        self._lines.append(f"{what}: {figure}")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    return Figures(request.config.stash.setdefault(_figures, []))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for models and logs."""
    return tmp_path_factory.mktemp("vllm")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(_figures, [])
    if lines:
        terminalreporter.section("held against a running vLLM")
        for line in lines:
            terminalreporter.line(line)
