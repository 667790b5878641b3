"""`kvroute top`: a running router at a glance, live in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from async_timeout import timeout
from msgspec import structs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.cli.running_router import OPERATOR_KEY_VARIABLE, Name, QueryFailed, RunningRouter, plain
from router.cli.signals import EndedBySignal, run_until_signal
from router.config.origin import Timeouts
from router.doors.http.overview import LastMinute, Overview, ReplicaSummary, StoreSummary
from router.doors.http.request_views import RequestsView, RequestView
from router.telemetry.problems import Level

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
        "requests routed last. Arrows and PageUp, PageDown scroll the replicas, / filters by "
        "name, q or Ctrl-C ends it. A key is read from the environment variable "
        f"{OPERATOR_KEY_VARIABLE}.",
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
    async with RunningRouter(url, OPERATOR_KEY_VARIABLE, _TIMEOUTS) as router:
        glance = await _look(router)
        if interval_s is None:
            console.print(render(glance, console.width, None))
        else:
            await _keep_showing(console, router, glance, interval_s)


async def _look(router: RunningRouter) -> Glance:
    overview = await router.ask("GET", "/overview", Overview)
    requests = await router.ask("GET", f"/requests?limit={_MAX_REQUESTS}", RequestsView)
    return Glance(overview, requests.requests)


async def _keep_showing(
    console: Console, router: RunningRouter, glance: Glance, interval_s: float
) -> None:
    """Update the view until `q`. While the router does not respond, the last view stays, with the
    reason above it."""
    view = TopView()
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys(view):
        while not view.is_over:
            drawn = render(view.of(glance), console.width, console.height - 1)
            live.update(Group(drawn, view.status()), refresh=True)
            if await view.changed_within(interval_s):
                continue
            try:
                glance = await _look(router)
            except QueryFailed as error:
                glance.silence = str(error)


# --- keys -----------------------------------------------------------------------------------------


_KEYS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
_STEPS = {b"\x1b[A": -1, b"\x1b[B": 1, b"\x1b[5~": -10, b"\x1b[6~": 10, b"k": -1, b"j": 1}
"""Arrows, PageUp and PageDown, and what `less` has for the first two."""
_ENTER, _ESCAPE, _ERASE = (b"\r", b"\n"), b"\x1b", (b"\x7f", b"\x08")
_MAX_FILTER = 100


class TopView:
    """Holds what of the router is shown, as the keys have it."""

    def __init__(self) -> None:
        self.is_over = False
        self._first = 0
        self._filter = ""
        self._is_typing = False
        self._most = 0
        self._changed = asyncio.Event()

    def press(self, typed: bytes) -> None:
        """Take keys as a terminal sends them."""
        for key in _KEYS.findall(typed):
            if self._is_typing:
                self._type(key)
            else:
                self._command(key)
        self._changed.set()

    async def changed_within(self, seconds: float) -> bool:
        """Wait for a key; returns whether there was one."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(seconds):
                await self._changed.wait()
        return self._changed.is_set()

    def of(self, glance: Glance) -> Glance:
        """Return the part of *glance* that is to be shown."""
        words = self._filter.lower()
        replicas = [
            each for each in glance.overview.replicas if words in f"{each.id} {each.url}".lower()
        ]
        requests = [
            each
            for each in glance.requests
            if words in f"{each.replica} {each.model} {each.request_id}".lower()
        ]
        self._most = max(len(replicas) - 1, 0)
        self._first = min(self._first, self._most)
        overview = structs.replace(glance.overview, replicas=replicas[self._first :])
        return Glance(overview, requests, glance.silence)

    def status(self) -> Text:
        """Return the last line: the filter, or which keys there are."""
        if self._is_typing or self._filter:
            line = plain(f"/{self._filter}{'_' if self._is_typing else '   Esc: all'}", "bold")
        else:
            line = Text("arrows, PageUp, PageDown: scroll   /: filter   q: quit", "dim")
        _crop([line])
        return line

    def _command(self, key: bytes) -> None:
        if key in _STEPS:
            self._first = min(max(self._first + _STEPS[key], 0), self._most)
        elif key == b"/":
            self._is_typing, self._filter = True, ""
        elif key == _ESCAPE:
            self._filter = ""
        elif key == b"q":
            self.is_over = True

    def _type(self, key: bytes) -> None:
        if key in _ENTER:
            self._is_typing = False
        elif key == _ESCAPE:
            self._is_typing, self._filter = False, ""
        elif key in _ERASE:
            self._filter = self._filter[:-1]
        elif len(key) == 1 and len(self._filter) < _MAX_FILTER and 32 <= key[0] < 127:
            self._filter += key.decode()


@contextlib.contextmanager
def _keys(view: TopView) -> Iterator[None]:
    """Let *view* have the keys of the terminal; none where the input is something else."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)  # signals still work
    loop.add_reader(terminal, lambda: view.press(os.read(terminal, 1024)))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# --- what it shows --------------------------------------------------------------------------------


_STYLES = {Level.BAD: "bold red", Level.WARN: "yellow", Level.GOOD: "green"}
_VERDICTS = {"over": "bold red", "under": "yellow"}
_ALL = 10**9
_REQUESTS_AT_LEAST = 5
_STORES = 3
_REQUESTS_AT_ONCE = 10
_HEADS = 3
"""Lines of the tables' heads, and between the tables."""


@dataclass
class Glance:
    """The router's last responses."""

    overview: Overview
    requests: Sequence[RequestView]
    """The latest first."""
    silence: str | None = None
    """Why the router has not responded since."""


def render(glance: Glance, width: int, height: int | None) -> RenderableType:
    """Draw everything, or as much as fits; replicas with problems come first and stay.

    Args:
        width: Columns of the terminal.
        height: Lines of the terminal; None for no limit.
    """
    replicas = glance.overview.replicas
    problems = _problems(replicas, _ALL if height is None else height // 4)
    stores = [_store(store) for store in glance.overview.stores]
    above = [_headline(glance), *problems, *_totals(glance.overview), *stores[:_STORES], Text()]
    shown, count = len(replicas), _REQUESTS_AT_ONCE
    if height is not None:
        _crop(above)
        shown, count = _room(replicas, height - len(above))
    table = _replica_table(replicas[:shown], glance.overview.tiers)
    parts: list[RenderableType] = [*above, table]
    if shown < len(replicas):
        parts.append(Text(f"and {len(replicas) - shown:,} more replicas", "dim"))
    if count > 0:
        parts += [Text(), _request_table(glance.requests[:count], width)]
    return Group(*parts)


def _crop(lines: Sequence[Text]) -> None:
    """Make each one line, however narrow the terminal."""
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"


def _room(replicas: Sequence[ReplicaSummary], height: int) -> tuple[int, int]:
    """Return how many replicas and requests fit into *height* lines; at least one replica."""
    room, shown = height - _HEADS, 0
    for replica in replicas:
        if shown and room - _lines(replica) < _REQUESTS_AT_LEAST:
            return shown, room - 1  # one line shows how many more there are
        room -= _lines(replica)
        shown += 1
    return shown, room


# --- above the tables -----------------------------------------------------------------------------


def _headline(glance: Glance) -> Text:
    """Return the one line on whether anything is wrong."""
    if glance.silence is not None:
        seen = _time_of_day(glance.overview.now)
        text = f"showing the state of {seen}; {glance.silence}"
        return plain(text, _STYLES[Level.BAD])
    headline = glance.overview.headline
    has_problems = any(replica.problems for replica in glance.overview.replicas)
    return plain(headline.text + (":" if has_problems else ""), _STYLES[headline.level])


def _store(store: StoreSummary) -> Text:
    """Return the rows of stores, which are in no replica's table, since several replicas share
    them."""
    who = "1 replica" if store.replicas == 1 else f"{store.replicas:,} replicas"
    return plain(f"store {store.name}: {store.blocks:,} blocks of {store.model}, shared by {who}")


def _problems(replicas: Sequence[ReplicaSummary], most: int) -> list[Text]:
    """Return the problems, one on each line, the worst first."""
    wrong = [(replica.id, problem) for replica in replicas for problem in replica.problems]
    wrong.sort(key=lambda each: each[1].level.severity)
    shown = len(wrong) if len(wrong) <= most else most - 1
    lines = [
        plain(f"  {name} {problem.text}", _STYLES[problem.level]) for name, problem in wrong[:shown]
    ]
    if shown < len(wrong):
        lines.append(Text(f"  and {len(wrong) - shown:,} more", "dim"))
    return lines


def _totals(overview: Overview) -> list[Text]:
    """Return the totals of the last minute."""
    minute = overview.minute
    rate = minute.requests / max(minute.seconds, 1.0)
    traffic = f"{rate:,.1f} requests/s, {overview.under_way:,} under way, {minute.failed:,} failed"
    lines = f"{traffic} · policy {overview.policy}", _hits(minute)
    return [plain(line) for line in lines]


def _hits(minute: LastMinute) -> str:
    """Return the hits that engines reported; the predicted ones where none did."""
    if minute.cached_share is not None:
        reported = f"{minute.cached_share} of tokens cached, predicted {minute.predicted_share}"
        split = f"({minute.over:,} over, {minute.under:,} under)"
        return f"{reported} · {minute.mispredicted_share} mispredicted {split}"
    if minute.promised_share is not None:
        return f"{minute.promised_share} of tokens predicted to be cached; no engine reports it"
    return "no prompt in the last minute"


# --- replicas -------------------------------------------------------------------------------------


def _lines(replica: ReplicaSummary) -> int:
    return max(1, len(replica.groups))


def _replica_table(replicas: Sequence[ReplicaSummary], tiers: Sequence[str]) -> Table:
    table = _table()
    table.add_column("replica")  # rich narrows the columns that may wrap
    table.add_column("state", no_wrap=True)
    for name in ("sent", "run", "wait", "KV"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("events", min_width=6)
    table.add_column("group", no_wrap=True)
    for tier in tiers:
        table.add_column(_cell(tier), justify="right", no_wrap=True)
    for replica in replicas:
        _add_replica(table, replica, tiers)
    return table


def _add_replica(table: Table, replica: ReplicaSummary, tiers: Sequence[str]) -> None:
    first = [
        Name(replica.id, _STYLES[replica.level]),
        _cell(replica.state),
        _cell(f"{replica.requests:,}"),
        *map(_cell, _engine_load(replica)),
        _cell(_events(replica)),
    ]
    blank = [Text() for _ in first]
    groups = [(group.label, group.blocks) for group in replica.groups] or [("-", {})]
    for index, (label, held) in enumerate(groups):
        counts = [_cell(f"{held.get(tier, 0):,}") for tier in tiers]
        table.add_row(*(blank if index else first), _cell(label), *counts)


def _engine_load(replica: ReplicaSummary) -> tuple[str, str, str]:
    """Return the engine's own load: running, waiting, use of its KV cache."""
    load = replica.engine_load
    if load is None:
        return "-", "-", "-"
    usage = "-" if load.kv_cache_usage is None else f"{load.kv_cache_usage:.0%}"
    return f"{load.running:,}", f"{load.waiting:,}", usage


def _events(replica: ReplicaSummary) -> str:
    """Return the states of its streams; those of several ranks counted."""
    states = [source.state or "-" for source in replica.sources]
    estimated = ["approximate"] if replica.approximate else []
    if len(states) < 2:
        return ", ".join([*states, *estimated]) or "none"
    counted = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return ", ".join([*counted, *estimated])


# --- requests -------------------------------------------------------------------------------------


def _request_table(requests: Sequence[RequestView], width: int) -> Table:
    table = _table(width)
    table.add_column("at", no_wrap=True)
    table.add_column("to")
    table.add_column("predicted", no_wrap=True, justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_column("TTFB", no_wrap=True, justify="right")
    table.add_column("status", no_wrap=True)
    table.add_column("why", ratio=1)
    for request in requests:
        _add_request(table, request)
    return table


def _add_request(table: Table, request: RequestView) -> None:
    end = {None: "running", "completed": ""}.get(request.end, str(request.end).replace("_", " "))
    status = [
        str(request.status or ""),
        end,
        f"({request.attempts} tries)" if request.attempts > 1 else "",
    ]
    table.add_row(
        _cell(_time_of_day(request.arrived_at)),
        Name(request.replica or "none"),
        _cell(f"{_about(request)}{request.predicted.cached_tokens:,}/{request.prompt_tokens:,}"),
        _cell(
            _verdict(request),
            "" if request.predicted.approximate else _VERDICTS.get(request.verdict or "", ""),
        ),
        _cell("" if request.first_byte_ms is None else f"{request.first_byte_ms:,.0f} ms"),
        _cell(
            " ".join(word for word in status if word), _STYLES[Level.BAD] if request.failed else ""
        ),
        _cell(request.reason if request.replica else "No replica could take it."),
    )


def _about(request: RequestView) -> str:
    return "~" if request.predicted.approximate else ""


def _verdict(request: RequestView) -> str:
    """Return how the prediction compares with what the engine reported."""
    if request.actual is None:
        return "not reported" if request.end else ""
    difference = abs(request.predicted.cached_tokens - request.actual)
    verdict = f"{_about(request)}{request.verdict}"
    return verdict if not difference else f"{verdict} {difference:,}"


def _table(width: int | None = None) -> Table:
    return Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, width=width, header_style="bold dim"
    )


def _cell(value: object, style: str = "") -> Text:
    """Return one line, cut where its column is too narrow."""
    text = plain(value, style)
    _crop([text])
    return text


def _time_of_day(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
