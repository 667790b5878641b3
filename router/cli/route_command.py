"""`kvroute route`: ask a running router where a prompt would go, and why."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from router.cli.running_router import AskFailed, RunningRouter, plain
from router.upstream import Timeouts

API_KEY_VARIABLE = "KVROUTE_API_KEY"
_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=60, idle_s=60)


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "route",
        description=f"Shows where a prompt would go. A key is read from the environment variable {API_KEY_VARIABLE}.",
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
    parser.add_argument("--cache-salt")
    parser.add_argument("--json", action="store_true", help="print the router's answer as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    answer = asyncio.run(_ask(arguments.url, _body(arguments)))
    if arguments.json:
        print(json.dumps(answer))
    else:
        _show(answer)
    return 0


def _body(arguments: argparse.Namespace) -> bytes:
    if arguments.body:
        try:
            return bytes(arguments.body.read_bytes())
        except OSError as error:
            raise AskFailed(f"--body: {arguments.body}: {error.strerror}") from None
    request: dict[str, Any] = {
        name: value for name, value in _fields(arguments).items() if value is not None
    }
    return msgspec.json.encode(request)


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
        raise AskFailed("--token-ids: expected integers, as 1,2,3 or [1, 2, 3]") from None


async def _ask(url: str, body: bytes) -> dict[str, Any]:
    router = RunningRouter(url, API_KEY_VARIABLE, _TIMEOUTS)
    try:
        return await router.ask("POST", "/route", dict[str, Any], body)
    finally:
        await router.close()


def _show(answer: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        title=plain(
            f"{answer['model']}, {answer['prompt_tokens']} prompt tokens, policy {answer['policy']}"
        )
    )
    for heading in (
        "replica",
        "cost",
        "cached on GPU",
        "with lower tiers",
        "longest prefix of each group",
        "reason",
    ):
        table.add_column(heading)
    for entry in answer["ranking"]:
        groups = ", ".join(
            f"{group['kind']} {group['tokens']}" for prompt in entry["groups"] for group in prompt
        )
        hit = entry["hit"]
        doubt = " (suspect)" if hit["suspect"] else ""
        table.add_row(
            plain(entry["replica"]),
            f"{entry['cost']:g}",
            f"{hit['gpu_cached_tokens']}{doubt}",
            str(hit["cached_tokens"]),
            groups,
            plain(entry["reason"]),
        )
    for entry in answer["excluded"]:
        table.add_row(plain(entry["replica"]), "-", "-", "-", "-", plain(entry["reason"]))
    console.print(table)
