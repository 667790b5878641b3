"""`kvroute top`: a running router at a glance, live in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from rich.console import Console
from rich.live import Live

from router.cli.running_router import QueryFailed, RunningRouter
from router.cli.signals import EndedBySignal, run_until_signal
from router.cli.top_view import Glance, render
from router.http.views import Overview, RequestsView
from router.upstream import Timeouts

KEY_VARIABLE = "KVROUTE_OPERATOR_API_KEY"
_MAX_REQUESTS = 60
_PIPE_COLUMNS = 200
"""Wide enough that nothing is cut where the output is not a terminal."""
_TIMEOUTS = Timeouts(connect_s=2, first_byte_s=3, idle_s=3)
"""Short, so that a router that hangs is soon reported."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "top",
        description="Shows what is wrong, the last minute, every replica with its blocks, and the "
        "requests routed last. Ctrl-C ends it. A key is read from the environment variable "
        f"{KEY_VARIABLE}.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the router (default: %(default)s)"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        help="seconds between updates (default: %(default)g)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one view and exit; implied where the output is not a terminal",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be from 0.1 to 3600 seconds")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Show the router until a signal, or once."""
    is_live = sys.stdout.isatty() and not arguments.once
    with contextlib.suppress(EndedBySignal):
        console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
        run_until_signal(_show(console, arguments.url, arguments.interval if is_live else None))
    return 0


async def _show(console: Console, url: str, interval_s: float | None) -> None:
    """Show the router every *interval_s*; once if that is None."""
    router = RunningRouter(url, KEY_VARIABLE, _TIMEOUTS)
    try:
        glance = await _look(router)
        if interval_s is None:
            console.print(render(glance, console.width, None))
        else:
            await _keep_showing(console, router, glance, interval_s)
    finally:
        await router.close()


async def _look(router: RunningRouter) -> Glance:
    overview = await router.ask("GET", "/overview", Overview)
    requests = await router.ask("GET", f"/requests?limit={_MAX_REQUESTS}", RequestsView)
    return Glance(overview, requests.requests)


async def _keep_showing(
    console: Console, router: RunningRouter, glance: Glance, interval_s: float
) -> None:
    """Update the view for ever. While the router does not respond, the last view stays, with the
    reason above it."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(glance, console.width, console.height), refresh=True)
            await asyncio.sleep(interval_s)
            try:
                glance = await _look(router)
            except QueryFailed as error:
                glance.silence = str(error)
