"""The entry point by itself: its version, its list of commands, and what listing them costs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

from router.cli.main import _ADD_ON_RULE, _ADD_ONS, _BUILT_IN, main
from tests.support.warm_start import ROOT

IMPORTS = """
import json, sys
from router.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as done:
    assert done.code == 0, done.code
print(json.dumps(sorted(sys.modules)))
"""


def imported_by(*arguments: str) -> set[str]:
    """The modules a process has imported after running these arguments."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_what_needs_no_command_imports_none(argument: str) -> None:
    """FastAPI takes most of a second, and a command that cannot be imported must not take the
    others with it."""
    imported = imported_by(argument)
    assert imported.isdisjoint({"fastapi", "starlette", "uvicorn", "tokenizers", "jinja2", "rich"})
    assert imported.isdisjoint(
        {"torch", "offload", "kvroute_engine", "pydantic", "prometheus_client"}
    )
    assert imported.isdisjoint(module for module, _ in _BUILT_IN.values())


def test_a_command_imports_no_other() -> None:
    """Recording a stream needs neither a web server nor a terminal."""
    imported = imported_by("capture", "--help")
    assert "router.cli.capture_command" in imported
    assert "router.cli.serve_command" not in imported
    assert imported.isdisjoint({"fastapi", "uvicorn"})


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """The first question of every bug report."""
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert (done.value.code, capsys.readouterr().out) == (0, f"kvroute {version('kvroute')}\n")


def test_every_command_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """The list is made from the table, not from the commands."""
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    own = {f"{name} {text}" for name, (_, text) in _BUILT_IN.items()}
    assert own | {f"{name} {text}" for name, text in _ADD_ONS.items()} <= set(lines)


@pytest.mark.parametrize("name", _BUILT_IN)
def test_every_command_of_the_table_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name in a table is not checked by anything else."""
    assert hasattr(import_module(_BUILT_IN[name][0]), "add_to")
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert f"usage: kvroute {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", _ADD_ONS)
def test_a_command_of_the_engine_says_what_to_install_where_it_is_missing(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router is installed without the engine, and the documents name both commands."""
    monkeypatch.setattr("router.cli.main.entry_points", lambda **_group: ())
    assert main([name, "--help"]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"kvroute: {name}: this command cannot be loaded: it is not installed; {_ADD_ON_RULE}\n"
    )


@pytest.mark.parametrize("option", ["--prompt", "--chat"])
def test_a_prompt_that_is_no_text_is_refused_in_words(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python gives such bytes of a command line to us as lone surrogates."""
    assert main(["route", option, "a\udcffb"]) == 2
    assert capsys.readouterr().err.endswith("must be text in UTF-8\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text_is_refused_in_words(
    errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on the locale whether Python refuses it, or we find it while encoding."""
    given = io.TextIOWrapper(io.BytesIO(b"a\xffb"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["route", "--prompt", "-"]) == 2
    assert capsys.readouterr().err.endswith("must be text in UTF-8\n")
