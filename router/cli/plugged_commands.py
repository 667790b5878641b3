"""Commands of other packages, found by the entry point group `kvroute.commands`.

An entry point names a module with an `add_to(commands)`, as the built-in commands have. Only the
one that is to run is imported: another command must not wait for it, nor break with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from router.errors import RouterError

GROUP = "kvroute.commands"


class CommandUnavailable(RouterError):
    """A command of another package cannot be imported, mostly for something that is not
    installed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name}: this command cannot be loaded: {why}; install what it needs, as in pip install '.[offload]'"
        )


def add_to(commands: Any, typed: Sequence[str], taken: Collection[str]) -> None:
    """Add every command there is to a parser's others.

    Args:
        commands: The parser's.
        typed: What the user typed behind the program's name.
        taken: Names of built-in commands, which go first.

    Raises:
        CommandUnavailable: The one that was typed cannot be imported.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in taken}
    for name in sorted(found):
        if name in typed[:1]:
            _imported(found[name]).add_to(commands)
        else:
            commands.add_parser(name, help=f"see kvroute {name} --help")


def _imported(entry: EntryPoint) -> ModuleType:
    try:
        module: ModuleType = entry.load()
    except ImportError as error:
        raise CommandUnavailable(entry.name, str(error)) from error
    return module
