"""`kvroute demo`: hybrid engines, a router, a live table, and what knowing the KV cache groups
gains."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.cli.signals import EndedBySignal, run_until_signal
from router.demo.fleet import EVICTED, HIT_TOKENS, SLID_OUT, EngineCache
from router.demo.phase import PhaseResult, ReplicaResult, percentile
from router.demo.play import DemoSettings, Scene, play
from router.demo.workload import WorkloadSizes
from router.observability.labels import group_label

_CACHE_BLOCKS = 600


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "demo",
        description="Runs three small engines with a sliding window and caches too small for the "
        "workload, and sends the same workload through the router, through a router that does not "
        "know KV cache groups, and round robin.",
    )
    parser.add_argument(
        "--replicas", type=int, default=3, help="number of engines (default: %(default)s)"
    )
    parser.add_argument(
        "--preset", default="gemma", help="the engines' model; see `kvroute engine --help`"
    )
    parser.add_argument(
        "--num-blocks", type=int, default=_CACHE_BLOCKS, help="size of each engine's cache"
    )
    parser.add_argument(
        "--conversations", type=int, default=12, help="number of conversations, of four turns each"
    )
    parser.add_argument(
        "--documents", type=int, default=6, help="number of documents, with four questions each"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="engines without tensors; implied where torch is not installed",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep engines and router running until Ctrl-C"
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="as --keep; the line below the tables shows the address of the live page",
    )
    parser.add_argument("--json", action="store_true", help="print only the comparison, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Play the demo; the exit code is 1 if no request was served."""
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
        print(json.dumps([_figures(result) for result in scene.results]))
    return 0 if scene.results[0].requests else 1


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


# --- tables and text ------------------------------------------------------------------------------


def _view(scene: Scene) -> Group:
    parts: list[Table | Text] = [_replicas(scene), _comparison(scene.results)]
    if scene.is_over:
        parts.append(Text(_verdict(scene.results)))
    if scene.router_url and (not scene.is_over or scene.settings.keep):
        parts.append(
            Text(
                f"live page: {scene.router_url}/" + ("  (Ctrl-C ends it)" if scene.is_over else "")
            )
        )
    return Group(*parts)


def _replicas(scene: Scene) -> Table:
    result = scene.results[-1] if scene.results else None
    title = "starting engines"
    if result:
        title = f"{result.name}: {result.requests} of {scene.requests} requests"
    table = Table(title=title, title_justify="left")
    table.add_column("replica / group", no_wrap=True)
    for heading in ("blocks", "slid out", "evicted", "sent", "predicted", "cached", "TTFT"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cache in scene.caches:
        if result:
            table.add_row(*_replica_row(cache.name, result.replicas[cache.name]))
        before = next((each for each in scene.caches_before if each.name == cache.name), None)
        for row in _group_rows(cache, before):
            table.add_row(*row)
    return table


def _replica_row(name: str, replica: ReplicaResult) -> tuple[str, ...]:
    return (
        f"[bold]{name}[/bold]",
        *("", "", ""),
        str(replica.requests),
        f"{replica.predicted_tokens:,}",
        f"{replica.cached_tokens:,}",
        _ms(percentile(replica.ttfts_s, 50)),
    )


def _group_rows(cache: EngineCache, before: EngineCache | None) -> Iterator[tuple[str, ...]]:
    """A row for each KV cache group, counted since *before*."""
    bases = before.groups if before else []
    for index, group in enumerate(cache.groups):
        base = bases[index] if index < len(bases) else None
        slid_out, evicted, hits = (
            group.count(name, base) for name in (SLID_OUT, EVICTED, HIT_TOKENS)
        )
        label = f"  {index} {group_label(group.kind)}"
        yield label, str(group.blocks), str(slid_out), str(evicted), "", "", f"{hits:,}"


def _comparison(results: list[PhaseResult]) -> Table:
    table = Table(title="the same workload", title_justify="left")
    table.add_column("routed by", no_wrap=True)
    for heading in ("requests", "reused", "of all", "TTFT p50", "p99", "mispredicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            str(result.requests),
            f"{result.cached_tokens:,}",
            f"{result.hit_share:.0%}",
            _ms(result.ttft_s(50)),
            _ms(result.ttft_s(99)),
            str(result.mispredicted),
        )
    return table


def _verdict(results: list[PhaseResult]) -> str:
    ours, *others = results
    exact = f"{ours.requests - ours.mispredicted} of {ours.requests} predictions exact"
    gains = [
        f"{ours.cached_tokens / max(other.cached_tokens, 1):.2f} times the tokens reused by "
        f"{other.name}, TTFT p50 {ours.ttft_s(50) / max(other.ttft_s(50), 1e-9):.2f} of its"
        for other in others
    ]
    return "; ".join([exact, *gains]) + "."


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _figures(result: PhaseResult) -> dict[str, Any]:
    return {
        "routed_by": result.name,
        "requests": result.requests,
        "prompt_tokens": result.prompt_tokens,
        "reused_tokens": result.cached_tokens,
        "ttft_p50_ms": round(result.ttft_s(50) * 1000, 1),
        "ttft_p99_ms": round(result.ttft_s(99) * 1000, 1),
        "mispredicted": result.mispredicted,
    }
