"""How much of the router must one know? Counted from its source.

    python -m benchmarks.house [--tree PATH]

With `--tree`, of another checkout: run it for a commit before a change and for the one after.
`rooms`: packages and files right below `router/`; `packages`: those at any depth. `floors`: the
longest chain of rooms of which each imports the next; `depth`: the same of files. `arrows`: pairs
of rooms of which one imports the other. `types`: classes. `longest_file`: its lines. One line more
for each room, with its files and lines.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from benchmarks.figures import report

Graph: TypeAlias = Mapping[str, set[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    tree = parser.parse_args().tree
    paths = {_name(path.relative_to(tree)): path for path in (tree / "router").rglob("*.py")}
    files = {name: _imported(path, paths) for name, path in paths.items()}
    rooms = _merged(files, _room)
    report(
        "house",
        rooms=len(rooms),
        packages=sum(path.name == "__init__.py" for path in paths.values()) - 1,
        floors=_longest(rooms),
        depth=_longest(files),
        arrows=sum(map(len, rooms.values())),
        types=sum(map(_classes, paths.values())),
        lines=sum(map(_lines, paths.values())),
        longest_file=max(map(_lines, paths.values())),
    )
    for room in sorted(rooms):
        inside = [path for name, path in paths.items() if _room(name) == room]
        report("house_room", room=room, files=len(inside), lines=sum(map(_lines, inside)))


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def _imported(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the files of the router that one imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
    return found & set(known)


def _merged(files: Graph, room_of: Callable[[str], str]) -> Graph:
    rooms: dict[str, set[str]] = {}
    for name, imported in files.items():
        if name != "router":
            others = {room_of(other) for other in imported} - {room_of(name), "router"}
            rooms.setdefault(room_of(name), set()).update(others)
    return rooms


def _longest(graph: Graph) -> int:
    """Return how many stand on each other at most. An arrow that closes a circle is left out."""

    heights: dict[str, int] = {}

    def height(name: str, above: frozenset[str]) -> int:
        if name not in heights:
            below = graph[name] - above - {name}
            heights[name] = 1 + max((height(each, above | {name}) for each in below), default=0)
        return heights[name]

    return max(height(name, frozenset()) for name in graph)


def _classes(path: Path) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(path.read_text())))


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


if __name__ == "__main__":
    main()
