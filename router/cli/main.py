"""`kvroute`: the entry point. It imports only the command that is to run.

A command is a module with an `add_to(commands)` that adds its parser and sets `run`: a function
from the parsed arguments to the exit code. The router's are in the first table below. Other
distributions name theirs by an entry point of the group `kvroute.commands`; the second table has
those of `engine/`, so that a missing one leads to an error that names its package. A command must
not wait for the imports of another one, nor break with it; `kvroute --help` waits for none of them.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from types import ModuleType

from router.errors import RouterError

EXIT_FAILED = 1
EXIT_USAGE = 2
ENTRY_POINT_GROUP = "kvroute.commands"

_BUILT_IN = {
    "serve": ("router.cli.serve_command", "run the router"),
    "route": ("router.cli.route_command", "ask a running router where a prompt would go"),
    "top": ("router.cli.top_command", "live view of a running router"),
    "capture": ("router.cli.capture_command", "record a live event stream"),
    "replay": ("router.cli.replay_command", "feed recordings to the index and compare"),
    "keys": ("router.cli.keys_command", "make keys for encrypted event streams"),
}
"""Module and help by name."""

_ADD_ONS = {
    "engine": "one replica of a small engine with a real KV cache",
    "demo": "hybrid engines behind a real router, and what it gained",
}
"""Help by name of the commands of `engine/`, a distribution of its own."""
_ADD_ON_RULE = "it belongs to kvroute-engine: pip install ./engine in kvroute's checkout"


class CommandUnavailable(RouterError):
    """A command of another distribution is not installed, or lacks something that it needs."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: this command cannot be loaded: {why}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: None: the command has this process to itself.
    """
    if argv is None and sys.argv[1:2] == ["serve"]:
        # It would end the process during the imports. `router.serve.server` lets it through, as one
        # that asks for the configuration.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    of_events = import_module("kvevents.errors")  # most of a start's time before the command's own
    try:
        arguments = _arguments(sys.argv[1:]) if argv is None else _parser(argv).parse_args(argv)
        code: int = arguments.run(arguments)
    except (RouterError, of_events.KVEventsError) as error:
        print(f"kvroute: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return EXIT_FAILED
    return code


def _arguments(typed: Sequence[str]) -> argparse.Namespace:
    """Import and parse without the garbage collector, which took a tenth of a start: imports leave
    little for it, and what they leave stays. In a process with other work, that would stay as well.
    """
    gc.disable()
    try:
        return _parser(typed).parse_args(typed)
    finally:
        gc.freeze()
        gc.enable()


def _parser(typed: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser with the typed command's arguments; of the others, name and help."""
    parser = argparse.ArgumentParser(
        prog="kvroute", description="Exact prefix-cache routing for LLM inference engines."
    )
    installed = version("kvroute") if "--version" in typed else ""
    parser.add_argument("--version", action="version", version=f"kvroute {installed}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (module, text) in _BUILT_IN.items():
        if name in typed[:1]:
            _own(module).add_to(commands)
        else:
            commands.add_parser(name, help=text)
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    for name in sorted((found.keys() | _ADD_ONS.keys()) - _BUILT_IN.keys()):
        if name in typed[:1]:
            _imported(name, found.get(name)).add_to(commands)
        else:
            commands.add_parser(name, help=_ADD_ONS.get(name, f"see kvroute {name} --help"))
    return parser


def _own(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        _check_core(error)
        raise


def _imported(name: str, entry: EntryPoint | None) -> ModuleType:
    if entry is None:
        raise CommandUnavailable(name, f"it is not installed; {_ADD_ON_RULE}")
    try:
        module: ModuleType = entry.load()
    except ImportError as error:
        _check_core(error)
        raise CommandUnavailable(name, f"{error}; install what its distribution needs") from error
    return module


def _check_core(error: ImportError) -> None:
    """Raise the reason where the compiled core cannot be imported."""
    if error.name == "router._core":
        import_module("router.index.compiled")


if __name__ == "__main__":
    sys.exit(main())
