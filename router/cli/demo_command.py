"""`kvroute demo`: hybrid engines, a router, a live table, and what knowing the groups gained."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.cli.signals import EndedBySignal, run_until_signal
from router.demo.fleet import EVICTED, HIT_TOKENS, SLID_OUT
from router.demo.phase import Tally, percentile
from router.demo.play import DemoSettings, Scene, play
from router.demo.workload import WorkloadSizes

_CACHE_BLOCKS = 600
_SHORT_KINDS = {
    "full_attention": "full",
    "sliding_window": "window",
    "chunked_local_attention": "chunks",
    "mamba": "states",
}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        description="Three small engines with a sliding window and caches too small for everything; the same workload through "
        "the router, through a router that knows no KV cache groups, and round robin.",
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument(
        "--preset", default="gemma", help="the engines' model; see `kvroute engine --help`"
    )
    parser.add_argument(
        "--num-blocks", type=int, default=_CACHE_BLOCKS, help="of each engine's cache"
    )
    parser.add_argument("--conversations", type=int, default=12, help="of four turns each")
    parser.add_argument("--documents", type=int, default=6, help="with four questions each")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="engines without tensors; so too where torch is not installed",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave engines and router running until Ctrl-C"
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="as --keep; the line below the tables says where the live page is",
    )
    parser.add_argument("--json", action="store_true", help="print only the comparison, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    try:
        scene = (
            run_until_signal(play(settings, lambda _scene: None))
            if arguments.json
            else _play_live(settings)
        )
    except EndedBySignal as ended:
        return 0 if settings.keep else ended.exit_code
    if arguments.json:
        print(json.dumps([_figures(tally) for tally in scene.tallies]))
    return 0 if scene.tallies[0].requests else 1


def _settings(arguments: argparse.Namespace) -> DemoSettings:
    simulate = arguments.simulate or importlib.util.find_spec("torch") is None
    engine = [
        "--preset",
        arguments.preset,
        "--num-blocks",
        str(arguments.num_blocks),
        "--log-level",
        "error",
    ]
    return DemoSettings(
        replicas=arguments.replicas,
        engine_arguments=[*engine, *(["--simulate"] if simulate else [])],
        sizes=WorkloadSizes(conversations=arguments.conversations, documents=arguments.documents),
        keep=arguments.keep or arguments.open,
    )


def _play_live(settings: DemoSettings) -> Scene:
    with Live(console=Console(), refresh_per_second=4) as live:
        return run_until_signal(play(settings, lambda scene: live.update(_view(scene))))


# --- what is seen ---------------------------------------------------------------------------------


def _view(scene: Scene) -> Group:
    parts: list[Table | Text] = [_replicas(scene), _comparison(scene.tallies)]
    if scene.is_over:
        parts.append(Text(_verdict(scene.tallies)))
    if scene.router_url and (not scene.is_over or scene.settings.keep):
        parts.append(
            Text(f"live page: {scene.router_url}/" + ("  (Ctrl-C ends)" if scene.is_over else ""))
        )
    return Group(*parts)


def _replicas(scene: Scene) -> Table:
    tally = scene.tallies[-1] if scene.tallies else None
    title = (
        f"{tally.name}: {tally.requests} of {scene.requests} requests"
        if tally
        else "starting engines"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("replica / group", no_wrap=True)
    for heading in ("blocks", "slid out", "evicted", "sent", "predicted", "cached", "TTFT"):
        table.add_column(heading, justify="right", no_wrap=True)
    for view in scene.views:
        replica = tally.replicas[view.name] if tally else None
        if replica:
            p50 = _ms(percentile(replica.ttfts_s, 50))
            counts = (
                str(replica.requests),
                f"{replica.predicted_tokens:,}",
                f"{replica.cached_tokens:,}",
                p50,
            )
            table.add_row(f"[bold]{view.name}[/bold]", "", "", "", *counts)
        before = next((each.groups for each in scene.views_before if each.name == view.name), [])
        for index, group in enumerate(view.groups):
            base = before[index] if index < len(before) else None
            slid_out, evicted, hits = (
                group.count(name, base) for name in (SLID_OUT, EVICTED, HIT_TOKENS)
            )
            name = f"  {index} {_SHORT_KINDS.get(group.kind, group.kind)}"
            table.add_row(name, str(group.blocks), str(slid_out), str(evicted), "", "", f"{hits:,}")
    return table


def _comparison(tallies: list[Tally]) -> Table:
    table = Table(title="the same workload", title_justify="left")
    table.add_column("routed by", no_wrap=True)
    for heading in ("requests", "reused", "of all", "TTFT p50", "p99", "mispredicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tally in tallies:
        table.add_row(
            tally.name,
            str(tally.requests),
            f"{tally.cached_tokens:,}",
            f"{tally.hit_share:.0%}",
            _ms(tally.ttft_s(50)),
            _ms(tally.ttft_s(99)),
            str(tally.mispredicted),
        )
    return table


def _verdict(tallies: list[Tally]) -> str:
    ours, *others = tallies
    said = [
        f"{ours.cached_tokens / max(other.cached_tokens, 1):.2f} times the tokens reused by {other.name}, "
        f"TTFT p50 {ours.ttft_s(50) / max(other.ttft_s(50), 1e-9):.2f} of its"
        for other in others
    ]
    return (
        f"{ours.requests - ours.mispredicted} of {ours.requests} predictions exact; "
        + "; ".join(said)
        + "."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _figures(tally: Tally) -> dict[str, Any]:
    return {
        "routed_by": tally.name,
        "requests": tally.requests,
        "prompt_tokens": tally.prompt_tokens,
        "reused_tokens": tally.cached_tokens,
        "ttft_p50_ms": round(tally.ttft_s(50) * 1000, 1),
        "ttft_p99_ms": round(tally.ttft_s(99) * 1000, 1),
        "mispredicted": tally.mispredicted,
    }
