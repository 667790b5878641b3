"""How many predictions are exact while requests overlap, and how far off are the others?

Simulated small engines run as processes, with a router in front of them and real sockets. The
requests are conversations with shared system prompts, and questions about documents, with a growing
number of them in flight. With
one request at a time but no pause, a request may overtake the events of the previous one. With
several, what a request finds is determined after the router has made its prediction. The peer in
the same run is an index that ignores groups, with the same policy.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from benchmarks.figures import report
from kvroute_engine.core.presets import preset as model_preset
from kvroute_engine.demo.phase import PhaseResult, PlayPhase
from kvroute_engine.demo.play import MODES, DemoSettings, play
from kvroute_engine.demo.workload import VOCABULARY, Workload

SYSTEM_PROMPTS, SYSTEM_PROMPT_TOKENS = 3, 320
TURNS, TURN_TOKENS = 4, 90
DOCUMENT_TOKENS, QUESTIONS, QUESTION_TOKENS = 900, 4, 30
ANSWER_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["gptoss", "gemma"])
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--blocks-per-group", type=int, default=100, help="of each engine's cache")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--documents", type=int, default=24)
    options = parser.parse_args()
    for preset in options.preset:
        for at_a_time in options.at_a_time:
            _measure(preset, at_a_time, options)


def _measure(preset: str, at_a_time: int, options: argparse.Namespace) -> None:
    num_blocks = options.blocks_per_group * len(model_preset(preset).layer_groups())
    engine = [
        "--preset",
        preset,
        "--simulate",
        "--log-level",
        "error",
        "--num-blocks",
        str(num_blocks),
    ]
    settings = DemoSettings(
        replicas=options.replicas,
        engine_arguments=engine,
        workload=lambda _play: conversations_and_questions(
            options.conversations, options.documents
        ),
        phases=[PlayPhase(f"{at_a_time} at a time", at_a_time)],
        modes=[mode for mode in MODES if mode.policy != "round_robin"],
        plays=1,
        policy="prefix",
    )
    scene = asyncio.run(play(settings, lambda _scene: None))
    for found in scene.plays:
        _report(preset, at_a_time, found.way, found.phases[0])


def conversations_and_questions(conversations: int, documents: int, seed: int = 1) -> Workload:
    """Return turns that extend the last ones, and questions that directly follow a document;
    everyone has a turn before anyone has the next."""
    chance = random.Random(seed)
    systems = [_tokens(chance, SYSTEM_PROMPT_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    turns = [
        _turns(chance, systems[index % SYSTEM_PROMPTS], TURNS, TURN_TOKENS)
        for index in range(conversations)
    ]
    for _ in range(documents):
        document = _tokens(chance, DOCUMENT_TOKENS)
        turns += [_turns(chance, document, 1, QUESTION_TOKENS) for _ in range(QUESTIONS)]
    chance.shuffle(turns)
    prompts = [taken[turn] for turn in range(TURNS) for taken in turns if turn < len(taken)]
    return Workload(prompts, ANSWER_TOKENS)


def _turns(chance: random.Random, head: list[int], turns: int, tokens: int) -> list[list[int]]:
    prompts = []
    for _ in range(turns):
        head = [*head, *_tokens(chance, tokens)]
        prompts.append(head)
    return prompts


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def _report(preset: str, at_a_time: int, way: str, result: PhaseResult) -> None:
    over = [error for error in result.errors if error > 0]
    under = [-error for error in result.errors if error < 0]
    report(
        "predictions",
        preset=preset,
        at_a_time=at_a_time,
        routed_by=way,
        requests=result.requests,
        exact_share=round(1 - result.mispredicted / result.requests, 3),
        over=len(over),
        under=len(under),
        mean_error_tokens=round((sum(over) + sum(under)) / result.requests, 1),
        mean_prompt_tokens=round(result.prompt_tokens / result.requests),
        reused_share=round(result.hit_share, 3),
    )


if __name__ == "__main__":
    main()
