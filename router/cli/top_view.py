"""What `kvroute top` shows: the same as the live page, in a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.cli.running_router import plain
from router.cli.top_answers import Group as CacheGroup
from router.cli.top_answers import LastMinute, Overview, Replica, Request
from router.observability.problems import Level

_STYLES = {Level.BAD: "bold red", Level.WARN: "yellow", None: "green"}
_VERDICTS = {"over": "bold red", "under": "yellow"}
_KINDS = {
    "full_attention": "full",
    "sliding_window": "window",
    "chunked_local_attention": "chunked",
    "mamba": "Mamba",
    "not_cached": "not cached",
}
_ALL = 10**9
_REQUESTS_AT_LEAST = 5
_REQUESTS_AT_ONCE = 10
_HEADS = 3
"""Lines of the tables' heads, and between them."""


@dataclass
class Glance:
    """What the router said last."""

    overview: Overview
    requests: Sequence[Request]
    """The latest first."""
    silence: str | None = None
    """Why it has not answered since."""


def view(glance: Glance, width: int, height: int | None) -> RenderableType:
    """Everything, or as much as *height* lines hold; replicas with problems first."""
    replicas = sorted(
        glance.overview.replicas,
        key=lambda replica: (_severity(_level(replica)), _natural(replica.id)),
    )
    problems = _problems(replicas, _ALL if height is None else height // 4)
    above = [_headline(glance, replicas), *problems, *_totals(glance.overview), Text()]
    shown, count = len(replicas), _REQUESTS_AT_ONCE
    if height is not None:
        _crop(above)
        shown, count = _room(replicas, height - len(above))
    parts: list[RenderableType] = [*above, _replica_table(replicas[:shown])]
    if shown < len(replicas):
        parts.append(Text(f"and {len(replicas) - shown:,} more replicas", "dim"))
    if count > 0:
        parts += [Text(), _request_table(glance.requests[:count], width)]
    return Group(*parts)


def _crop(lines: Sequence[Text]) -> None:
    """Each is one line, however narrow the terminal."""
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"


def _room(replicas: Sequence[Replica], height: int) -> tuple[int, int]:
    """How many of the first replicas and of the requests fit into so many lines; one replica in any
    case."""
    room, shown = height - _HEADS, 0
    for replica in replicas:
        if shown and room - _lines(replica) < _REQUESTS_AT_LEAST:
            return shown, room - 1  # a line says how many more there are
        room -= _lines(replica)
        shown += 1
    return shown, room


def _level(replica: Replica) -> Level | None:
    return replica.problems[0].level if replica.problems else None


def _natural(name: str) -> list[tuple[str, int]]:
    """So that replica 9 stands before replica 10."""
    return [
        (text, int(number or 0))
        for text, number in re.findall(r"([^0-9]*)([0-9]{0,18})", name)
        if text or number
    ]


def _severity(level: Level | None) -> int:
    return (Level.BAD, Level.WARN, None).index(level)


# --- above the tables -----------------------------------------------------------------------------


def _headline(glance: Glance, replicas: Sequence[Replica]) -> Text:
    """The one line that says whether anything is wrong."""
    if glance.silence is not None:
        return plain(
            f"{glance.silence}; what follows is of {_time_of_day(glance.overview.now)}",
            _STYLES[Level.BAD],
        )
    if not replicas:
        return plain("The router has no replicas.", _STYLES[Level.WARN])
    wrong = sum(bool(replica.problems) for replica in replicas)
    if not wrong:
        return plain("All replicas are well.", _STYLES[None])
    number = "1 replica has" if wrong == 1 else f"{wrong:,} replicas have"
    return plain(f"{number} problems:", _STYLES[_level(replicas[0])])


def _problems(replicas: Sequence[Replica], most: int) -> list[Text]:
    """A line each, the worst first."""
    wrong = [(replica.id, problem) for replica in replicas for problem in replica.problems]
    wrong.sort(key=lambda each: _severity(each[1].level))
    shown = len(wrong) if len(wrong) <= most else most - 1
    lines = [
        plain(f"  {name} {problem.text}", _STYLES[problem.level]) for name, problem in wrong[:shown]
    ]
    return (
        lines
        if shown == len(wrong)
        else [*lines, Text(f"  and {len(wrong) - shown:,} more", "dim")]
    )


def _totals(overview: Overview) -> list[Text]:
    """The last minute."""
    minute = overview.minute
    rate = minute.requests / max(minute.seconds, 1.0)
    traffic = f"{rate:,.1f} requests/s, {overview.under_way:,} under way, {minute.failed:,} failed"
    lines = f"{traffic} · policy {overview.policy}", _hits(minute)
    return [plain(line) for line in lines]


def _hits(minute: LastMinute) -> str:
    """What engines report is the truth; what was predicted stands in where they report nothing."""
    if minute.compared_tokens:
        said = f"{_share(minute.actual_tokens, minute.compared_tokens)} of tokens cached"
        said += f", predicted {_share(minute.predicted_tokens, minute.compared_tokens)}"
        wrong = minute.over + minute.under
        return f"{said} · {_share(wrong, minute.compared)} mispredicted ({minute.over:,} over, {minute.under:,} under)"
    if minute.routed_tokens:
        promised = _share(minute.promised_tokens, minute.routed_tokens)
        return f"{promised} of tokens predicted to be cached; no engine reports it"
    return "no prompt in the last minute"


def _share(part: int, whole: int) -> str:
    """Never rounded up to all or down to nothing: "100 %" of almost all would hide what is
    wrong."""
    percent = 100 * part / max(whole, 1)
    if 0 < part < whole:
        percent = min(max(percent, 0.1), 99.9)
    return f"{percent:.1f} %"


# --- replicas -------------------------------------------------------------------------------------


def _lines(replica: Replica) -> int:
    return max(1, len(_groups(replica)))


def _replica_table(replicas: Sequence[Replica]) -> Table:
    tiers = _tiers(replicas)
    table = _table()
    table.add_column(
        "replica", min_width=8
    )  # what may be wrapped, as rich sees it, is what it makes narrower
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


def _add_replica(table: Table, replica: Replica, tiers: Sequence[str]) -> None:
    name = _cell(replica.id, _STYLES[_level(replica)])
    first = [
        name,
        _cell(replica.state),
        _cell(f"{replica.requests:,}"),
        *map(_cell, _gauges(replica)),
        _cell(_events(replica)),
    ]
    blank = [Text() for _ in first]
    for index, (label, held) in enumerate(_groups(replica) or [("-", {})]):
        table.add_row(
            *(blank if index else first),
            _cell(label),
            *(_cell(f"{held.get(tier, 0):,}") for tier in tiers),
        )


def _gauges(replica: Replica) -> tuple[str, str, str]:
    """What the engine says of itself."""
    if replica.gauges is None:
        return "-", "-", "-"
    running, waiting, usage = replica.gauges
    return f"{running:,.0f}", f"{waiting:,.0f}", "-" if usage is None else f"{usage:.0%}"


def _events(replica: Replica) -> str:
    """The states of its streams, those of several ranks counted."""
    states = [source.state or "-" for source in replica.sources]
    if len(states) < 2:
        return states[0] if states else "none"
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _tiers(replicas: Sequence[Replica]) -> list[str]:
    """The fastest first."""
    held = {tier for replica in replicas for _, tier, _ in replica.blocks} | {"GPU"}
    return sorted(held, key=lambda tier: ({"GPU": 0, "CPU": 1}.get(tier, 2), tier))


def _groups(replica: Replica) -> list[tuple[str, dict[str, int]]]:
    """Of each KV cache group its name, and its blocks by tier."""
    held: dict[int, dict[str, int]] = {number: {} for number in range(len(replica.groups))}
    for number, tier, blocks in replica.blocks:
        held.setdefault(number, {})[tier] = blocks
    return [(_group_name(number, replica.groups), held[number]) for number in sorted(held)]


def _group_name(number: int, groups: Sequence[CacheGroup]) -> str:
    """Groups may hold blocks before the layout is known."""
    if not 0 <= number < len(groups):
        return f"group {number}"
    kind, reach = groups[number].kind, groups[number].reach
    return f"{_KINDS.get(kind, kind)} {reach}" if reach else _KINDS.get(kind, kind)


# --- requests -------------------------------------------------------------------------------------


def _request_table(requests: Sequence[Request], width: int) -> Table:
    table = _table(width)
    table.add_column("at", no_wrap=True)
    table.add_column("to", min_width=8)
    table.add_column("predicted", no_wrap=True, justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_column("TTFB", no_wrap=True, justify="right")
    table.add_column("status", no_wrap=True)
    table.add_column("why", ratio=1)
    for request in requests:
        _add_request(table, request)
    return table


def _add_request(table: Table, request: Request) -> None:
    end = {None: "running", "completed": ""}.get(request.end, str(request.end).replace("_", " "))
    status = [
        str(request.status or ""),
        end,
        f"({request.attempts} tries)" if request.attempts > 1 else "",
    ]
    table.add_row(
        _cell(_time_of_day(request.arrived_at)),
        _cell(request.replica or "nobody"),
        _cell(f"{request.predicted.cached_tokens:,}/{request.prompt_tokens:,}"),
        _cell(_truth(request), _VERDICTS.get(request.verdict or "", "")),
        _cell("" if request.first_byte_ms is None else f"{request.first_byte_ms:,.0f} ms"),
        _cell(
            " ".join(word for word in status if word), _STYLES[Level.BAD] if request.failed else ""
        ),
        _cell(request.reason if request.replica else "No replica could take it."),
    )


def _truth(request: Request) -> str:
    """Of the prediction, by what the engine reported."""
    if request.actual is None:
        return "not told" if request.end else ""
    difference = abs(request.predicted.cached_tokens - request.actual)
    return request.verdict or "" if not difference else f"{request.verdict} {difference:,}"


def _table(width: int | None = None) -> Table:
    return Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, width=width, header_style="bold dim"
    )


def _cell(value: object, style: str = "") -> Text:
    """One line, cut where its column is too narrow for it."""
    text = plain(value, style)
    _crop([text])
    return text


def _time_of_day(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
