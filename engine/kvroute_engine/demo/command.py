"""`kvroute demo`: hybrid engines, a router, a live table, and the gain of knowing the KV cache
groups."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvroute_engine.demo.comparison import Play, chance, mean, mean_ttft_s, of_way, reused_tokens
from kvroute_engine.demo.fleet import EVICTED, HIT_TOKENS, SLID_OUT, EngineCache
from kvroute_engine.demo.phase import PhaseResult, ReplicaResult
from kvroute_engine.demo.play import DemoSettings, Scene, play
from kvroute_engine.demo.workload import WorkloadSizes, questions_about_documents
from router.cli.signals import EndedBySignal, run_until_signal
from router.telemetry.labels import group_label

_CACHE_BLOCKS = 140
_SIMULATED = ("--simulate", "--prefill-tokens-per-s", "10000")
"""Slow enough that computing times stand out from those of a busy machine."""
_FILE_COLUMNS = 130
"""The width of output to a file, which has none of its own."""
_INTRODUCTION = """\
The same questions about shared documents, routed in five ways. Every document is longer
than the model's sliding window, and the caches are too small for all of them. To reuse
one, a replica needs all of it in full attention, and its end in the window, of which
engines keep little by themselves: what lies before the end of a prompt.

  kvroute               knows what each replica holds in every KV cache group, and hints
                        to engines where prompts part, so that they keep the window there
  kvroute, no hints     the same, without the hints
  blind, any copy       ignores groups: a block is held while any group has it
  blind, first removal  ignores groups: a block is gone when any group drops it
  round robin           does not look at caches

The blind ones weigh what they believe to be cached against load (the policy `prefix`).
kvroute's own also knows what each cache would have to evict.
"""


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    sizes = WorkloadSizes()
    parser = commands.add_parser(
        "demo",
        description="Runs small engines with a sliding window and caches too small for the "
        "documents that are asked about. Sends the same questions through the router, once with "
        "hints to engines what to keep and once without, through two routers that do not know KV "
        "cache groups, and round robin; each twice.",
    )
    parser.add_argument(
        "--replicas", type=int, default=5, help="number of engines (default: %(default)s)"
    )
    parser.add_argument(
        "--preset", default="gptoss", help="the engines' model; see `kvroute engine --help`"
    )
    parser.add_argument(
        "--num-blocks", type=int, default=_CACHE_BLOCKS, help="size of each engine's cache"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=sizes.rounds,
        help="rounds of questions (default: %(default)s)",
    )
    parser.add_argument(
        "--plays", type=int, default=2, help="times that each way is played (default: %(default)s)"
    )
    parser.add_argument(
        "--policy",
        default="least_delay",
        help="kvroute's policy (default: %(default)s)",
    )
    parser.add_argument(
        "--torch", action="store_true", help="engines that compute; by default they only wait"
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
        print(json.dumps(_figures(scene)))
    return 0 if any(found.requests for found in scene.plays) else 1


def _settings(arguments: argparse.Namespace) -> DemoSettings:
    engine = [
        "--preset",
        arguments.preset,
        "--num-blocks",
        str(arguments.num_blocks),
        "--log-level",
        "error",
    ]
    sizes = WorkloadSizes(rounds=arguments.rounds)
    return DemoSettings(
        replicas=arguments.replicas,
        engine_arguments=[*engine, *([] if arguments.torch else _SIMULATED)],
        workload=lambda _play: questions_about_documents(sizes),
        plays=arguments.plays,
        policy=arguments.policy,
        keep=arguments.keep or arguments.open,
    )


def _play_live(settings: DemoSettings) -> Scene:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    console.print(Text(_INTRODUCTION))
    with Live(console=console, refresh_per_second=4) as live:
        return run_until_signal(play(settings, lambda scene: live.update(_view(scene))))


# --- tables and text ------------------------------------------------------------------------------


def _view(scene: Scene) -> Group:
    parts: list[Table | Text] = []
    if not scene.is_over:
        parts.append(_replicas(scene))
    parts += _comparisons(scene)
    if scene.is_over:
        parts.append(Text(_verdict(scene)))
    if scene.router_url and (not scene.is_over or scene.settings.keep):
        parts.append(
            Text(
                f"live page: {scene.router_url}/" + ("  (Ctrl-C ends it)" if scene.is_over else "")
            )
        )
    return Group(*parts)


def _replicas(scene: Scene) -> Table:
    result, title = scene.present, "starting engines"
    if result:
        number = f"play {len(scene.plays)} of {scene.settings.plays * len(scene.settings.modes)}"
        title = (
            f"{number}: {scene.plays[-1].way}, {result.name}: "
            f"{result.requests} of {scene.requests} requests"
        )
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
        _ms(replica.mean_ttft_s),
    )


def _group_rows(cache: EngineCache, before: EngineCache | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each KV cache group, counted since *before*."""
    bases = before.groups if before else []
    for index, group in enumerate(cache.groups):
        base = bases[index] if index < len(bases) else None
        slid_out, evicted, hits = (
            group.count(name, base) for name in (SLID_OUT, EVICTED, HIT_TOKENS)
        )
        label = f"  {index} {group_label(group.kind)}"
        yield label, str(group.blocks), str(slid_out), str(evicted), "", "", f"{hits:,}"


def _comparisons(scene: Scene) -> list[Table | Text]:
    """Return one table of the ways with hints beside those that cannot give any; one of all
    without."""
    modes = scene.settings.modes
    hinting = [mode.name for mode in modes if mode.gives_hints]
    silent = [mode.name for mode in modes if not mode.gives_hints]
    others = [mode.name for mode in modes if mode.policy is not None]
    tables: list[Table | Text] = []
    if hinting and others:
        tables.append(_comparison(scene, [*hinting, *others], "with hints"))
    return [*tables, _comparison(scene, silent, "without hints")]


def _comparison(scene: Scene, ways: Sequence[str], what: str) -> Table:
    table = Table(
        title=f"{what}: what the engines reused; a / b: first and second play;\n"
        "exact: predictions of what is cached when the router decides, and at admission",
        title_justify="left",
    )
    table.add_column("routed by", no_wrap=True)
    for phase in scene.settings.phases:
        # Not without wrapping: a narrow terminal would cut figures off.
        table.add_column(f"{phase.name}:\nreused", justify="right")
        table.add_column("\nexact", justify="right")
    table.add_column("TTFT\nmean", justify="right")
    for way in ways:
        table.add_row(*_way_row(way, scene))
    return table


def _way_row(way: str, scene: Scene) -> Iterator[str]:
    plays = of_way(scene.plays, way)
    yield way
    for index in range(len(scene.settings.phases)):
        results = [found.phases[index] for found in plays if index < len(found.phases)]
        yield " / ".join(f"{result.hit_share:.1%}" for result in results)
        yield _exact(results)
    yield " / ".join(_ms(found.mean_ttft_s) for found in plays)


def _exact(results: Sequence[PhaseResult]) -> str:
    """Return how many predictions were exact: of the moment of the decision, of that of the
    admission."""
    requests = sum(result.requests for result in results)
    exact = requests - sum(result.mispredicted for result in results)
    at_admission = sum(result.exact_at_admission for result in results)
    compared = any(result.compared_at_admission for result in results)
    return f"{exact}{f', {at_admission}' if compared else ''} of {requests}"


def _verdict(scene: Scene) -> str:
    """Return the results in sentences."""
    plays = scene.plays
    ours, *others = dict.fromkeys(found.way for found in plays)
    lines = [_prediction_sentence(of_way(plays, ours), others, plays)]
    reused = mean(plays, ours, reused_tokens)
    of_all = reused / max(of_way(plays, ours)[0].prompt_tokens, 1)
    lines.append(f"{ours} reused {reused:,.0f} prompt tokens a play, {of_all:.0%} of all:")
    lines += [f"  {_gain(plays, ours, other)}" for other in others]
    return "\n".join([*lines, *_noise(plays)])


def _prediction_sentence(ours: Sequence[Play], others: Sequence[str], plays: Sequence[Play]) -> str:
    serial = [found.phases[0] for found in ours]
    requests = sum(result.requests for result in serial)
    wrong = sum(result.mispredicted for result in serial)
    exact = "all" if not wrong else f"{requests - wrong} of"
    blind = [
        f"{sum(found.phases[0].mispredicted for found in of_way(plays, other))} with '{other}'"
        for other in others[:-1]
    ]
    return (
        f"{serial[0].name.capitalize()}, {exact} {requests} predictions were exact to the token"
        + (f"; wrong were {' and '.join(blind)}." if blind else ".")
    )


def _gain(plays: Sequence[Play], ours: str, other: str) -> str:
    """Return one way compared with ours, and whether chance explains the difference."""
    return (
        f"{_ratio(plays, ours, other, reused_tokens)} the tokens of '{other}', "
        f"{_ratio(plays, ours, other, mean_ttft_s)} its mean TTFT"
    )


def _ratio(plays: Sequence[Play], ours: str, other: str, measure: Any) -> str:
    left, right = (mean(plays, way, measure) for way in (ours, other))
    limit = chance(plays, measure)
    within = limit is not None and abs(left - right) <= limit
    return f"{left / max(right, 1e-9):.2f} times" + (" (within chance)" if within else "")


def _noise(plays: Sequence[Play]) -> list[str]:
    """Return what two plays of the same way show about chance."""
    tokens, ttft_s = chance(plays, reused_tokens), chance(plays, mean_ttft_s)
    if tokens is None or ttft_s is None:
        return ["Each way was played once, so a difference may be chance."]
    return [
        f"Each way was played more than once. By how far its own plays differ, up to {tokens:,.0f} "
        f"tokens and\n{_ms(ttft_s)} between two ways would be chance (95 %)."
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _figures(scene: Scene) -> dict[str, Any]:
    plays = scene.plays
    limit_s = chance(plays, mean_ttft_s)
    return {
        "plays": [_play_figures(found) for found in plays],
        "chance_reused_tokens": chance(plays, reused_tokens),
        "chance_ttft_mean_ms": None if limit_s is None else round(limit_s * 1000, 1),
    }


def _play_figures(found: Play) -> dict[str, Any]:
    return {
        "routed_by": found.way,
        "requests": found.requests,
        "prompt_tokens": found.prompt_tokens,
        "reused_tokens": found.reused_tokens,
        "ttft_mean_ms": round(found.mean_ttft_s * 1000, 1),
        "phases": [
            {
                "name": result.name,
                "requests": result.requests,
                "reused_tokens": result.cached_tokens,
                "mispredicted": result.mispredicted,
                "exact_at_admission": result.exact_at_admission,
                "compared_at_admission": result.compared_at_admission,
            }
            for result in found.phases
        ],
    }
