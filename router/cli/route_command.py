"""`kvroute route`: ask a running router where a prompt would go, and why."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from router.cli.running_router import Name, QueryFailed, RunningRouter, plain
from router.config.origin import Timeouts
from router.doors.http.route_views import HitView, RankedReplica, RouteView
from router.telemetry.labels import group_label

API_KEY_VARIABLE = "KVROUTE_API_KEY"
_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=60, idle_s=60)
_HEADINGS = (
    *("replica", "cost", "cached on GPU", "with lower tiers"),
    *("longest prefix of each group", "reason"),
)

_Route = TypeVar("_Route")
_Listed = TypeVar("_Listed")


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "route",
        description="Shows where a prompt would go, and why. Nothing is sent to a replica. A key "
        f"is read from the environment variable {API_KEY_VARIABLE}.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the router (default: %(default)s)"
    )
    parser.add_argument("--model", help="needed where the router serves several")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text; - reads it from standard input")
    given.add_argument("--chat", help="text of one user message")
    given.add_argument("--token-ids", help="JSON list of token ids, or comma-separated")
    given.add_argument("--body", type=Path, help="file with a whole request body")
    parser.add_argument("--cache-salt", help="keeps cached blocks of different tenants apart")
    parser.add_argument("--json", action="store_true", help="print the router's response as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    body = _body(arguments)
    if arguments.json:
        print(json.dumps(asyncio.run(_ask(arguments.url, body, dict[str, Any]))))
    else:
        _show(asyncio.run(_ask(arguments.url, body, RouteView)))
    return 0


def _body(arguments: argparse.Namespace) -> bytes:
    if arguments.body:
        try:
            return bytes(arguments.body.read_bytes())
        except OSError as error:
            raise QueryFailed(f"--body: {arguments.body}: {error.strerror}") from None
    try:
        fields = _fields(arguments).items()
        return msgspec.json.encode({name: value for name, value in fields if value is not None})
    except UnicodeError:  # of a command line, or of standard input
        raise QueryFailed("the prompt, the model and the salt must be text in UTF-8") from None


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": arguments.model, "cache_salt": arguments.cache_salt}
    if arguments.token_ids is not None:
        return {**fields, "token_ids": _token_ids(arguments.token_ids)}
    if arguments.chat is not None:
        return {**fields, "messages": [{"role": "user", "content": arguments.chat}]}
    return {**fields, "prompt": sys.stdin.read() if arguments.prompt == "-" else arguments.prompt}


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.strip().strip("[]").split(",")]
    except ValueError:
        raise QueryFailed("--token-ids: expected integers, as 1,2,3 or [1, 2, 3]") from None


async def _ask(url: str, body: bytes, kind: type[_Route]) -> _Route:
    async with RunningRouter(url, API_KEY_VARIABLE, _TIMEOUTS) as router:
        return await router.ask("POST", "/route?explain=true", kind, body)


def _show(route: RouteView) -> None:
    title = f"{route.model}, {route.prompt_tokens} prompt tokens, policy {route.policy}"
    table = Table(title=plain(title))
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for ranked in _listed(route.ranking):
        table.add_row(*_row(ranked))
    for excluded in _listed(route.excluded):
        table.add_row(Name(excluded.replica), "-", "-", "-", "-", plain(excluded.reason))
    Console().print(table)


def _listed(values: list[_Listed] | msgspec.UnsetType) -> list[_Listed]:
    """Return what an explained route lists; nothing where the router left it out."""
    return [] if isinstance(values, msgspec.UnsetType) else values


def _doubt(hit: HitView) -> str:
    return " (suspect)" if hit.suspect else " (approximate)" if hit.approximate else ""


def _row(ranked: RankedReplica) -> tuple[Any, ...]:
    hits = [group for prompt in ranked.groups for group in prompt]
    return (
        Name(ranked.replica),
        f"{ranked.cost:g}",
        f"{ranked.hit.gpu_cached_tokens}{_doubt(ranked.hit)}",
        str(ranked.hit.cached_tokens),
        plain(", ".join(f"{group_label(hit.kind)} {hit.tokens}" for hit in hits)),
        plain(ranked.reason),
    )
