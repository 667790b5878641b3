"""The tool that judges the tests: every change it makes is one change, and it tells them apart."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.mutations.__main__ import EQUAL, ROOT
from tests.mutations.mutate import mutations
from tests.mutations.mutate_cpp import cpp_mutations
from tests.mutations.targets import TARGETS, mutations_of
from tests.mutations.trial import Copy, Outcome


def changed(source: str) -> list[str]:
    return [mutation.apply(source) for mutation in mutations("file.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b"]),
        ("(a) == (b)", ["(a) != (b)"]),
        ("a not in b", ["a in b"]),
        ("x = a // b", ["x = a * b"]),
        ("x = (a +\n     b)", ["x = (a -\n     b)"]),
        ("x += y", ["x -= y"]),
        ("x = a and b and c", ["x = a or b and c", "x = a and b or c"]),
        ("x = not a", ["x = a"]),
        ("x = True", ["x = False"]),
        ("x = 7", ["x = 8"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("f()", ["pass"]),
        ("x = f()", []),
        ("x = a if b else c", ["x = a if (not b) else c"]),
        ("for x in y:\n    continue", ["for x in y:\n    break"]),
        ('x = "ü" + y', ['x = "ü" - y']),
    ],
)
def test_each_kind_of_change(source: str, expected: list[str]) -> None:
    """What is not tried cannot survive."""
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Docs of 5 < 6."""',
        "x: dict[int, 3]",
        "class A:\n    x: int | None = None",
        "assert a < b",
        'raise E(f"{a + 1}")',
        "import a",
        'if __name__ == "__main__":\n    f(1)',
    ],
)
def test_what_only_readers_see_is_left_alone(source: str) -> None:
    """Survivors there would hide those that matter."""
    assert changed(source) == []


def test_the_scope_is_the_innermost_function() -> None:
    """It is part of a mutation's name; what stands around the body is not changed."""
    source = "class A:\n    @f(1)\n    def g(self, x=2) -> 3 | 4:\n        return x + y\n"
    assert [(each.scope, each.after) for each in mutations("file.py", source)] == [("A.g", "-")]


def test_a_mutation_keeps_its_name_when_other_lines_change() -> None:
    """Reasons why a mutation is equal are kept by that name."""
    body = "def f():\n    x = a < b\n    y = a < b\n"
    first, second = mutations("file.py", body)
    assert first.key != second.key
    moved = mutations("file.py", "import a\n\n\n" + body)
    assert [mutation.key for mutation in moved] == [first.key, second.key]
    assert moved[0].line == first.line + 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("    if (a < b && c) return;", ["if (a <= b && c) return;", "if (a < b || c) return;"]),
        ("    of.is_lost = get<u8>();  // a < b", [";"]),
        ("    forget(seq);", [";"]),
        ("    ++count;", []),
        ("    is_over = true;", ["is_over = false;", ";"]),
        ("    std::vector<u32> fresh;", []),
        ("    const u32 count = std::min(a, b);", ["const u32 count = std::max(a, b);"]),
        ("    throw Error(a + b);", []),
        ("    // a < b", []),
        ("#if A == B", []),
    ],
)
def test_each_kind_of_change_of_a_line_of_cpp(line: str, expected: list[str]) -> None:
    """As in Python, and a statement that is left out."""
    source = f"void f() {{\n{line}\n}}\n"
    found = cpp_mutations("file.hpp", source)
    assert [(each.scope, each.line, each.after) for each in found] == [
        ("f", 2, after) for after in expected
    ]
    assert all(each.after in each.apply(source).splitlines()[1] for each in found)


@pytest.mark.parametrize("path", TARGETS)
def test_every_mutation_of_a_target_is_code_and_differs(path: str) -> None:
    """A syntax error would be killed by any test, and say nothing."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = mutations_of(path, text)
    assert found
    for mutation in found:
        after = mutation.apply(text)
        assert after != text
        if path.endswith(".py"):
            ast.parse(after)
    assert all((ROOT / test).exists() for test in TARGETS[path])


def test_every_equal_mutation_has_a_reason_and_still_exists() -> None:
    """An entry whose code is gone would hide a new survivor of that name."""
    known = {
        mutation.key
        for path in TARGETS
        for mutation in mutations_of(path, (ROOT / path).read_text(encoding="utf-8"))
    }
    for entry in yaml.safe_load(EQUAL.read_text(encoding="utf-8")):
        assert entry["key"] in known, entry
        assert entry["reason"], entry


def test_a_mutation_is_killed_by_a_test_that_notices_it_and_undone(tmp_path: Path) -> None:
    """And survives one that does not; also in a package that is installed from the tree itself."""
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    tree.mkdir()
    (tree / "kvevents.py").write_text("def f(a, b):\n    return a < b\n")
    (tree / "test_strict.py").write_text(
        "from kvevents import f\n\n\ndef test():\n    assert not f(1, 1)\n"
    )
    (tree / "test_lax.py").write_text(
        "from kvevents import f\n\n\ndef test():\n    assert f(1, 2)\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    copied = Copy(tree, copy)
    source = (tree / "kvevents.py").read_text()
    (mutation,) = mutations("kvevents.py", source)
    assert copied.try_out(mutation, ["test_strict.py"], 60) is Outcome.KILLED
    assert copied.try_out(mutation, ["test_lax.py"], 60) is Outcome.SURVIVED
    assert (copy / "kvevents.py").read_text() == source
    assert copied.time(["test_strict.py"], 60) > 0
