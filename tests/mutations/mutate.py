"""Every single mutation of a file's source.

A mutation replaces the text of one expression or statement, so the rest of the file stays as it is
and line numbers stay true.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Div: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """One change in one file."""

    path: str
    line: int
    scope: str
    """The function or class around it."""
    before: str
    after: str
    start: int
    """Offset in the source, in characters."""
    end: int
    occurrence: int
    """Among the same changes of one scope."""

    @property
    def key(self) -> str:
        """The same as long as neither the scope's name nor the changed text is edited."""
        what = f"{self.path}:{self.scope}:{self.before}->{self.after}:{self.occurrence}"
        return hashlib.sha256(what.encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """The file with this change."""
        return source[: self.start] + self.after + source[self.end :]


class _Source:
    """Offsets of syntax nodes, which count UTF-8 bytes by line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        behind = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(behind)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )


def mutations(path: str, text: str) -> list[Mutation]:
    """Every mutation of a file, in the order of its text.

    Args:
        path: Where it stands in the tree.
        text: Its source.
    """
    source = _Source(text)
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for scope, line, start, end, after in sorted(
        _changes(source, ast.parse(text), "module"), key=lambda change: change[1:4]
    ):
        before = text[start:end]
        number = seen.get((scope, before, after), 0)
        seen[scope, before, after] = number + 1
        found.append(Mutation(path, line, scope, before, after, start, end, number))
    return found


_Change = tuple[str, int, int, int, str]
"""Scope, line, start, end, new text."""


def _changes(source: _Source, node: ast.AST, scope: str) -> Iterator[_Change]:
    for child in ast.iter_child_nodes(node):
        yield from _at(source, child, scope)


def _at(source: _Source, node: ast.AST, scope: str) -> Iterator[_Change]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        # Not what is around the body: decorators, defaults and annotations.
        inner = node.name if scope == "module" else f"{scope}.{node.name}"
        for statement in node.body:
            yield from _at(source, statement, inner)
    elif not _is_for_readers(node):
        yield from _of(source, node, scope)
        yield from _changes(source, node, scope)


def _is_for_readers(node: ast.AST) -> bool:
    """Annotations, docstrings, errors' texts, assertions, scripts: no behaviour to test."""
    return (
        _is_script(node)
        or isinstance(
            node, (ast.AnnAssign, ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
        )
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    )


def _is_script(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, which no import runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _of(source: _Source, node: ast.AST, scope: str) -> Iterator[_Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        opposite = _COMPARISONS[type(node.ops[0])]
        yield _between(source, node.left, node.comparators[0], opposite, scope)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield _between(source, node.left, node.right, _ARITHMETIC[type(node.op)], scope)
    elif isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield _between(source, left, right, other, scope)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        sign = "-=" if isinstance(node.op, ast.Add) else "+="
        yield _between(source, node.target, node.value, sign, scope)
    else:
        yield from _of_one(source, node, scope)


def _of_one(source: _Source, node: ast.AST, scope: str) -> Iterator[_Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _whole(source, node, source.text[slice(*source.span(node.operand))], scope)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _whole(source, node, str(not node.value), scope)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield _whole(source, node, str(node.value + 1), scope)
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield _whole(source, node, _NAMES[node.id], scope)
    elif isinstance(node, ast.Continue):
        yield _whole(source, node, "break", scope)
    elif isinstance(node, ast.Break):
        yield _whole(source, node, "continue", scope)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield _whole(source, node, "pass", scope)
    elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Call)):
        condition = source.text[slice(*source.span(node.test))]
        yield _whole(source, node.test, f"(not {condition})", scope)


def _whole(source: _Source, node: ast.expr | ast.stmt, after: str, scope: str) -> _Change:
    return (scope, node.lineno, *source.span(node), after)


def _between(
    source: _Source, left: ast.expr, right: ast.expr, operator: str, scope: str
) -> _Change:
    """The operator between two operands. Parentheses around them stay."""
    start, end = source.span(left)[1], source.span(right)[0]
    between = source.text[start:end]
    closing = len(between) - len(between.lstrip(") \n\t"))
    opening = len(between) - len(between.rstrip("( \n\t"))
    return (scope, left.lineno, start + closing, end - opening, operator)
