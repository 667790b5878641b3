"""What does knowing the KV cache groups gain in front of engines that compute?

Small engines with a model in torch run as processes, with a router in front of them and real
sockets. The requests are the demo's: questions about documents longer than the window, which fall
out of use and come back. Each repetition has a workload of its own, which is sent in four ways of
routing, in turn in one order and in the opposite one. Reported are the tokens that the engines
reused, the times to the first token, and what the engines computed for a request, as the time of
their processes on a processor: on a busy machine times to the first token say how busy it was. Then
kvroute beside each other way, as the mean of the ratios of all repetitions with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.figures import report
from kvroute_engine.demo.comparison import (
    Play,
    mean_ttft_s,
    of_way,
    reused_tokens,
)
from kvroute_engine.demo.phase import PlayPhase
from kvroute_engine.demo.play import DemoSettings, Scene, play
from kvroute_engine.demo.workload import WorkloadSizes, questions_about_documents

_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26, 12: 2.20, 16: 2.13}
"""Student's t for the mean of so many values, two-sided."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=10, choices=sorted(_T_95))
    parser.add_argument("--preset", default="gptoss")
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--num-blocks", type=int, default=140, help="of each engine's cache")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--in-use", type=int, default=9, help="documents in use at a time")
    parser.add_argument("--document-tokens", type=int, nargs="+", default=[210, 700])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1, help="requests at a time")
    parser.add_argument("--pause-s", type=float, default=0.0, help="between a client's requests")
    parser.add_argument("--policy", default="least_delay")
    parser.add_argument("--simulate", action="store_true", help="engines without torch")
    options = parser.parse_args()
    time = EngineTime()
    scene = asyncio.run(play(_settings(options), time.look))
    _report(scene.plays, time, options)


class EngineTime:
    """The computing time of the engines in each play, in seconds on a processor."""

    def __init__(self) -> None:
        self._first_and_last_s: dict[int, tuple[float, float]] = {}
        """The first and the last reading, by the number of the play."""

    def look(self, scene: Scene) -> None:
        """Called when a play has begun, whenever something changes, and when it ends."""
        now_s = sum(map(_processor_s, _children("engine")))
        number = len(scene.plays) - 1
        first_s, _ = self._first_and_last_s.get(number, (now_s, now_s))
        self._first_and_last_s[number] = first_s, now_s

    def of_play(self, number: int) -> float:
        """Return the time of one play, numbered from 0 in the order in which they were played."""
        first_s, last_s = self._first_and_last_s[number]
        return last_s - first_s


def _children(word: str) -> list[int]:
    """Return the processes that this one has started with *word* among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(_fields(path)[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if parent == os.getpid() and word.encode() in words:
            found.append(int(path.name))
    return found


def _processor_s(process: int) -> float:
    user, system = _fields(Path("/proc", str(process)))[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _fields(path: Path) -> list[str]:
    """Return the fields of a process's `stat` behind its name: state, parent, ..."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def _settings(options: argparse.Namespace) -> DemoSettings:
    engine = ["--preset", options.preset, "--num-blocks", str(options.num_blocks)]
    engine += ["--log-level", "error", *(["--simulate"] if options.simulate else [])]
    sizes = [
        WorkloadSizes(
            documents=options.documents,
            document_tokens=options.document_tokens,
            in_use=options.in_use,
            rounds=options.rounds,
            answer_tokens=4,
            seed=100 + number,
        )
        for number in range(options.repetitions)
    ]
    return DemoSettings(
        replicas=options.replicas,
        engine_arguments=engine,
        workload=lambda number: questions_about_documents(sizes[number]),
        phases=[
            PlayPhase(
                f"{options.clients} at a time",
                options.clients,
                options.pause_s,
                is_settled=options.clients == 1,
            )
        ],
        plays=options.repetitions,
        policy=options.policy,
    )


def _report(plays: Sequence[Play], time: EngineTime, options: argparse.Namespace) -> None:
    ways = list(dict.fromkeys(found.way for found in plays))
    computed_s = {id(found): time.of_play(number) for number, found in enumerate(plays)}

    def engine_time_s(found: Play) -> float:
        return computed_s[id(found)] / max(found.requests, 1)

    for way in ways:
        own = of_way(plays, way)
        report(
            "real_engine_quality",
            preset=options.preset,
            clients=options.clients,
            routed_by=way,
            repetitions=len(own),
            requests=sum(found.requests for found in own),
            reused_share=round(
                sum(found.reused_tokens for found in own)
                / sum(found.prompt_tokens for found in own),
                3,
            ),
            mispredicted=sum(found.phases[0].mispredicted for found in own),
            ttft_mean_ms=round(1000 * statistics.fmean(map(mean_ttft_s, own)), 1),
            engine_time_ms=round(1000 * statistics.fmean(map(engine_time_s, own)), 1),
        )
    figures = {
        "reused_tokens": reused_tokens,
        "ttft_mean": mean_ttft_s,
        "engine_time": engine_time_s,
    }
    for other in ways[1:]:
        for name, measure in figures.items():
            _report_ratio(name, measure, of_way(plays, ways[0]), of_way(plays, other), options)


def _report_ratio(
    name: str,
    measure: Callable[[Play], float],
    ours: Sequence[Play],
    others: Sequence[Play],
    options: argparse.Namespace,
) -> None:
    """The geometric mean of the paired ratios: the two plays of a pair had the same requests."""
    logs = [
        math.log(max(measure(mine), 1e-9) / max(measure(theirs), 1e-9))
        for mine, theirs in zip(ours, others, strict=True)
    ]
    middle = statistics.fmean(logs)
    half = _T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    report(
        "real_engine_quality",
        preset=options.preset,
        clients=options.clients,
        compared_with=others[0].way,
        figure=name,
        ratio=round(math.exp(middle), 3),
        interval_95=[round(math.exp(middle - half), 3), round(math.exp(middle + half), 3)],
        better_in=sum(value > 0 if name == "reused_tokens" else value < 0 for value in logs),
        repetitions=len(logs),
    )


if __name__ == "__main__":
    main()
