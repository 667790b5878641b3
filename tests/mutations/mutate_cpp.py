"""Single mutations of a C++ file, by the text of its lines.

No parser: an operator that stands between two blanks, a constant, a jump, or a statement of one
line that is left out. What does not compile is no mutation, and is reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.mutations.mutate import Mutation

_INSTEAD = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "+=": "-=",
    "-=": "+=",
    "|=": "&=",
    "&": "|",
    "true": "false",
    "false": "true",
    "continue": "break",
    "min": "max",
    "max": "min",
}
_WORD = re.compile(r"(?<= )[<>=!&|+-]{1,2}(?= )|\b(?:true|false|continue|min|max)\b")
_STATEMENT = re.compile(r"(?!return|throw|using|static_assert)[\w.:>\[\]-]+(?:\(.*\)| = .*|\+\+);")
"""A call or an assignment, and no declaration: those have a blank before the name."""
_FOR_READERS = ("//", "#", "template", "static_assert", "using ", "throw ", "NB_", "friend ")
_FUNCTION = re.compile(r"^(?: {4})?(?! )[\w:<>&*~, ]*?(\w+)\(.*[{,(]$")


def cpp_mutations(path: str, text: str) -> list[Mutation]:
    """Every mutation of a file, in the order of its text.

    Args:
        path: Where it stands in the tree.
        text: Its source.
    """
    found: list[Mutation] = []
    seen: dict[tuple[str, str, str], int] = {}
    start, scope = 0, "file"
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = line.split("//")[0].rstrip()
        function = _FUNCTION.match(code)
        scope = function[1] if function else scope
        for after in _changes(code):
            before = code.strip()
            occurrence = seen.get((scope, before, after.strip()), 0)
            seen[scope, before, after.strip()] = occurrence + 1
            found.append(
                Mutation(
                    path,
                    number,
                    scope,
                    before,
                    after.strip(),
                    start + len(code) - len(code.lstrip()),
                    start + len(code),
                    occurrence,
                )
            )
        start += len(line)
    return found


def _changes(code: str) -> Iterator[str]:
    """The line with each change that it allows."""
    stripped = code.strip()
    if not stripped or stripped.startswith(_FOR_READERS) or '"' in stripped:
        return
    for word in _WORD.finditer(code):
        instead = _INSTEAD.get(word[0])
        if instead is not None:
            yield code[: word.start()] + instead + code[word.end() :]
    if _STATEMENT.fullmatch(stripped):
        yield ";"
