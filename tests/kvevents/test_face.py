"""`from kvevents import ...`: what an engine's author finds there, and what importing it costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvevents

ROOT = Path(__file__).parents[2]
HEAVY = {
    "fastapi",
    "jinja2",
    "numpy",
    "offload",
    "kvroute_engine",
    "prometheus_client",
    "rich",
    "router",
    "starlette",
    "tokenizers",
    "torch",
    "uvicorn",
    "uvloop",
    "yaml",
}


def imports_of_kvevents(source: str) -> list[ast.ImportFrom]:
    """All `from kvevents... import ...` of a piece of code."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvevents"
    ]


def engine_example() -> str:
    text = (ROOT / "docs" / "engines.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(block)


def rank(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_the_list_of_names_is_sorted_and_without_doubles() -> None:
    """It is read by people, as a table of contents."""
    assert kvevents.__all__ == sorted(set(kvevents.__all__), key=rank)


@pytest.mark.parametrize("name", kvevents.__all__)
def test_every_name_can_be_imported(name: str) -> None:
    """A name that is listed and missing breaks `import *` for everyone."""
    assert getattr(kvevents, name) is not None


def test_a_star_import_gives_everything_that_is_listed() -> None:
    """And nothing else."""
    names: dict[str, object] = {}
    exec("from kvevents import *", names)
    assert names.keys() - {"__builtins__"} == set(kvevents.__all__)


def test_nothing_public_is_imported_and_not_listed() -> None:
    """What the package imports for its users is what it promises to keep."""
    source = Path(kvevents.__file__ or "").read_text()
    imported = {alias.name for node in imports_of_kvevents(source) for alias in node.names}
    assert imported == set(kvevents.__all__)


@pytest.mark.parametrize(
    "source",
    [
        engine_example(),
        (ROOT / "examples" / "engine.py").read_text(),
        (ROOT / "examples" / "hybrid_engine.py").read_text(),
    ],
    ids=["docs/engines.md", "engine.py", "hybrid_engine.py"],
)
def test_an_engine_needs_one_import_line_for_it(source: str) -> None:
    """The examples are what an engine's author copies."""
    (line,) = imports_of_kvevents(source)
    assert line.module == "kvevents"
    assert {alias.name for alias in line.names} <= set(kvevents.__all__)


def test_everything_the_guide_for_engines_names_is_there() -> None:
    """Its rules of publishing name classes and functions without a module."""
    text = (ROOT / "docs" / "engines.md").read_text().partition("## Your own engine")[2]
    guide = text.partition("## Checked")[0]
    named = re.findall(r"`([A-Z]\w+|[a-z]+(?:_[a-z]+)+)\(?[^`\n]*`", guide)
    fields = {
        field
        for event in (kvevents.BlockStored, kvevents.BlockRemoved)
        for field in event.__struct_fields__
    }
    arguments = {"present_state", "LAYOUT"}
    assert set(named) - fields - arguments <= set(kvevents.__all__)
    assert {"KVEventAggregator", "create_publisher", "longest_hit"} <= set(named)


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the first thing that anybody tries."""
    docstring = kvevents.__doc__ or ""
    example = docstring[docstring.index("    import kvevents") : docstring.index("`Subscriber`")]
    lines = [line[4:] for line in example.splitlines() if line.strip()]
    assert len(lines) <= 6
    names: dict[str, object] = {}
    exec("\n".join(lines).replace("*:5557", "127.0.0.1:0").replace("*:6557", "127.0.0.1:0"), names)
    publisher = names["publisher"]
    assert isinstance(publisher, kvevents.EventPublisher)
    assert publisher.statistics().stream.dropped == 0


def test_modules_of_the_package_do_not_import_its_face() -> None:
    """It imports all of them."""
    for path in (ROOT / "kvevents").glob("*.py"):
        if path.stem != "__init__":
            modules = {node.module for node in imports_of_kvevents(path.read_text())}
            assert "kvevents" not in modules, path.name


def test_importing_it_is_light() -> None:
    """An engine embeds it; what the router needs is none of the engine's business."""
    code = "import sys, kvevents; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert not HEAVY & set(done.stdout.split())
