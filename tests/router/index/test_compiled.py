"""Nothing runs without the compiled core, and whoever lacks it is told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from router.index import compiled
from router.index.compiled import CORE_VERSION, CoreUnavailable, check_core


def test_a_core_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever updates the sources and builds nothing has an old module beside them: what it takes
    and returns has changed since."""
    old = ModuleType("router._core")
    vars(old).update(core_version=CORE_VERSION - 1, __file__="_core.so")
    monkeypatch.setitem(sys.modules, old.__name__, old)
    with pytest.raises(CoreUnavailable, match=r"_core\.so is a compiled core of version .* again"):
        check_core()


def test_the_version_that_is_asked_for_is_that_of_the_sources() -> None:
    """Else a fresh build would be refused, too."""
    binding = Path(compiled.__file__).parents[1] / "core" / "binding" / "module.cpp"
    assert f'module.attr("core_version") = {CORE_VERSION};' in binding.read_text()


@pytest.mark.parametrize("options", [(), ("--check",)], ids=["serve", "check"])
def test_a_command_without_its_core_says_so_in_one_line(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """As where it was not built, or for another Python: a traceback would tell a user nothing."""
    hidden = 'import sys\nsys.modules["router._core"] = None\n'
    (tmp_path / "sitecustomize.py").write_text(hidden)
    done = subprocess.run(
        [sys.executable, "-m", "router.cli.main", "serve", *options],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvroute: its compiled core cannot be loaded (")
    assert done.stderr.endswith("install kvroute again\n")
    assert done.stderr.count("\n") == 1
