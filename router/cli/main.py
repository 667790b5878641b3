"""`kvroute`: the entry point and its commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvevents.errors import KVEventsError
from router.cli import (
    capture_command,
    demo_command,
    plugged_commands,
    replay_command,
    route_command,
    serve_command,
    top_command,
)
from router.errors import RouterError

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it went."""
    typed = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser(typed).parse_args(typed)
        code: int = arguments.run(arguments)
    except (RouterError, KVEventsError) as error:
        print(f"kvroute: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return EXIT_FAILED
    return code


def _parser(typed: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvroute", description="Exact prefix-cache routing for LLM inference engines."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (
        serve_command,
        route_command,
        top_command,
        capture_command,
        replay_command,
        demo_command,
    ):
        command.add_to(commands)
    plugged_commands.add_to(commands, typed, taken=list(commands.choices))
    return parser


if __name__ == "__main__":
    sys.exit(main())
