"""The tool that judges the tests: every change it makes is one change, and it tells them apart."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.mutations.__main__ import EQUAL, ROOT
from tests.mutations.mutate import mutations
from tests.mutations.targets import TARGETS
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


@pytest.mark.parametrize("path", TARGETS)
def test_every_mutation_of_a_target_is_python_and_differs(path: str) -> None:
    """A syntax error would be killed by any test, and say nothing."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for mutation in mutations(path, text):
        after = mutation.apply(text)
        ast.parse(after)
        assert after != text
    assert all((ROOT / test).exists() for test in TARGETS[path])


def test_every_equal_mutation_has_a_reason_and_still_exists() -> None:
    """An entry whose code is gone would hide a new survivor of that name."""
    known = {
        mutation.key
        for path in TARGETS
        for mutation in mutations(path, (ROOT / path).read_text(encoding="utf-8"))
    }
    for entry in yaml.safe_load(EQUAL.read_text(encoding="utf-8")):
        assert entry["key"] in known, entry
        assert entry["reason"], entry


def test_a_mutation_is_killed_by_a_test_that_notices_it_and_undone(tmp_path: Path) -> None:
    """And survives one that does not."""
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    tree.mkdir()
    (tree / "code.py").write_text("def f(a, b):\n    return a < b\n")
    (tree / "test_strict.py").write_text(
        "from code import f\n\n\ndef test():\n    assert not f(1, 1)\n".replace("code", "kv_code")
    )
    (tree / "test_lax.py").write_text(
        "from kv_code import f\n\n\ndef test():\n    assert f(1, 2)\n"
    )
    (tree / "code.py").rename(tree / "kv_code.py")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    copied = Copy(tree, copy)
    source = (tree / "kv_code.py").read_text()
    (mutation,) = mutations("kv_code.py", source)
    assert copied.try_out(mutation, ["test_strict.py"], 60) is Outcome.KILLED
    assert copied.try_out(mutation, ["test_lax.py"], 60) is Outcome.SURVIVED
    assert (copy / "kv_code.py").read_text() == source
    assert copied.time(["test_strict.py"], 60) > 0
