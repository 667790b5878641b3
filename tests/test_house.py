"""The shape of the source: names that mean one thing, documented arguments, fair-sized rooms."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvevents", "offload", "router")
MAX_FUNCTION_LINES = 50
MAX_SINGLE_IMPORTERS = 1 / 6
"""Of the modules of `router`, how many only one other module imports. Some are kinds of one thing,
such as providers of replicas, which one list names."""
MAX_REQUEST_VALUES = 12
"""Types of values that a request becomes on its way, from its body to its response."""


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module, by dotted name; a package has the name of its folder."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").is_file()


def test_every_class_name_stands_for_one_thing() -> None:
    """Whoever searches for a class should find one definition."""
    places = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_function_is_long() -> None:
    """A long function hides a second name."""
    long = [
        f"{module}.{node.name}: {(node.end_lineno or 0) - node.lineno + 1}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_few_modules_of_the_router_have_a_single_importer() -> None:
    """Such a file often belongs to its caller; each one costs a jump."""
    of_router = {m: users for m, users in importers().items() if m.startswith("router.")}
    single = [module for module, users in of_router.items() if len(users) == 1]
    assert single, "nothing was found: the count is broken"
    assert len(single) <= MAX_SINGLE_IMPORTERS * len(of_router), sorted(single)


def importers() -> dict[str, set[str]]:
    """By module, which others import it; through a package's face counts as directly."""
    found: dict[str, set[str]] = {module: set() for module in trees() if not is_package(module)}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                origin = origin_of(node.module or "", alias.name)
                if origin in found and not is_face(module, origin):
                    found[origin].add(module)
    return found


def origin_of(module: str, name: str) -> str:
    """The module that defines *name*, which *module* may only pass on."""
    if f"{module}.{name}" in trees():
        return f"{module}.{name}"
    while is_package(module) and (passed_on := imports(module).get(name)):
        module, name = passed_on
    return module


@cache
def imports(module: str) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in trees()[module].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_a_request_becomes_few_values() -> None:
    """Each is a type to learn and a place to copy fields. `router.routing` lists them, with the
    room that defines each."""
    text = ast.get_docstring(trees()["router.routing"]) or ""
    listed = re.findall(r"^    ([A-Z]\w+) {2,}.+ {2,}(\w+)$", text, re.MULTILINE)
    assert 5 < len(listed) <= MAX_REQUEST_VALUES - 1, "one is the body itself"
    for name, room in listed:
        assert name in classes_of(f"router.{room}"), f"{name} is not a class of router.{room}"


def classes_of(package: str) -> set[str]:
    return {
        node.name
        for module, tree in trees().items()
        if module == package or module.startswith(f"{package}.")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def is_face(module: str, origin: str) -> bool:
    """Is *module* the package around *origin*, or *origin* itself?"""
    return module == origin or (is_package(module) and origin.startswith(f"{module}."))
