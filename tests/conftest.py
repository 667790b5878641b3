"""Settings for every test; and at the end of every run, what was skipped and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# On a machine with other load, the time an example takes says nothing about the code.
settings.register_profile("kvroute", deadline=None)
settings.load_profile("kvroute")

LONGEST = ("router/core/", "test_distribution.py", "e2e/", "benchmarks/", "test_documents.py")
"""Where the files are that take longest."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first: a worker that began one as the last would work alone at the end."""
    folder = f"{Path(__file__).parent}/"

    def place(item: pytest.Item) -> int:
        path = str(item.path).removeprefix(folder)
        found = (index for index, start in enumerate(LONGEST) if path.startswith(start))
        return next(found, len(LONGEST))

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run that is green because it tested less must say so in its last lines."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.ensure_newline()
        terminalreporter.write_line("Not tested here; `make tools` installs what it can:")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count:4} skipped: {reason}")
