"""`kvroute demo` as people run it, with simulated engines, which need no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvevents.codec import encode
from kvevents.events import GPU, BlockRemoved, BlockStored, Event, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from kvroute_engine.demo.blind import GroupBlindIndex
from kvroute_engine.demo.client import TimedCompletion
from kvroute_engine.demo.command import _verdict
from kvroute_engine.demo.comparison import (
    Play,
    chance,
    mean,
    reused_tokens,
)
from kvroute_engine.demo.phase import PhaseResult
from kvroute_engine.demo.play import DemoSettings, Scene
from kvroute_engine.demo.processes import DemoFailed, engines
from kvroute_engine.demo.workload import WorkloadSizes, questions_about_documents
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.sources import DumpError
from tests.support.index import dump, load
from tests.support.signals import reset_signal_handlers
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S, START_S, eventually
from tests.support.warm_start import ROOT

DEMO = (sys.executable, "-m", "router.cli.main", "demo")
CHAIN = HashChain.from_seed()
SOURCE = SourceId("replica", 0)
PROMPT = list(range(65))
HASHES = list(CHAIN.block_hashes(PROMPT, 16))


def test_the_demo_shows_what_knowing_the_groups_gains() -> None:
    """It is the first thing a user runs: it must end, and its claims must hold on any machine."""
    done = subprocess.run(
        [*DEMO, "--json", "--rounds", "3", "--plays", "1"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    ours, untold, any_copy, first_removal, round_robin = found["plays"]
    assert ours["routed_by"] == "kvroute"
    for play in found["plays"]:
        assert play["requests"] == 2 * questions_about_documents(WorkloadSizes(rounds=3)).requests
        assert play["prompt_tokens"] == ours["prompt_tokens"]
    assert ours["reused_tokens"] > 1.3 * round_robin["reused_tokens"]
    assert untold["routed_by"] == "kvroute, no hints"
    assert untold["phases"][0]["mispredicted"] == 0
    assert ours["phases"][0]["mispredicted"] == round_robin["phases"][0]["mispredicted"] == 0
    assert any_copy["phases"][0]["mispredicted"] + first_removal["phases"][0]["mispredicted"] > 0
    assert found["chance_reused_tokens"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("processes", [1, 4])
async def test_a_demo_ended_by_a_signal_leaves_no_process_behind(
    number: signal.Signals, processes: int
) -> None:
    """Both while the engines start and while it plays: a closed terminal, a CI's limit, Ctrl-C."""
    demo = subprocess.Popen(
        [*DEMO, "--keep"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=reset_signal_handlers,
    )
    assert demo.stderr is not None
    try:
        await eventually(
            lambda: len(session_of(demo.pid)) > processes, "engines and router run", START_S
        )
        demo.send_signal(number)
        assert await asyncio.to_thread(demo.wait, DEADLINE_S) == 0
        await eventually(lambda: not session_of(demo.pid), "all have ended")
        assert b"Traceback" not in demo.stderr.read()
    finally:
        for process in session_of(demo.pid):
            os.kill(process, signal.SIGKILL)
        demo.wait()
        demo.stderr.close()


async def test_a_demo_ended_by_a_signal_reports_failure() -> None:
    """A script must notice that there are no figures; and under nohup it survives SIGHUP."""
    command = ["nohup", *DEMO, "--json"]
    demo = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert demo.stdout is not None
    try:
        await eventually(lambda: len(session_of(demo.pid)) > 1, "engines run", START_S)
        demo.send_signal(signal.SIGHUP)
        demo.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(demo.wait, DEADLINE_S) == 128 + signal.SIGTERM
        assert demo.stdout.read() == b""
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()


async def test_an_engine_that_cannot_start_takes_the_others_with_it() -> None:
    """Those that had just started would be left behind."""
    before = children_of(os.getpid())
    with pytest.raises(DemoFailed, match="did not start"):
        async with engines(3, ["--simulate", "--port", str(free_port())]):
            raise AssertionError("three engines on one port")
    await eventually(lambda: children_of(os.getpid()) <= before, "all have ended")


def session_of(leader: int) -> set[int]:
    """The processes of the session that *leader* began, itself included."""
    return {process for process, _, session in living_processes() if session == leader}


def children_of(parent: int) -> set[int]:
    return {process for process, its_parent, _ in living_processes() if its_parent == parent}


def living_processes() -> Iterator[tuple[int, int, int]]:
    """(process, parent, session)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent, _, session = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if state != "Z":
                yield int(stat.parent.name), int(parent), int(session)


def test_every_routing_mode_gets_the_same_prompts_and_documents_come_back() -> None:
    """Otherwise the modes cannot be compared; and a document that comes back is what misleads an
    index without groups."""
    sizes = WorkloadSizes()
    workloads = [questions_about_documents(sizes) for _ in range(2)]
    sent = [[workload.next() for _ in range(workload.requests)] for workload in workloads]
    assert sent[0] == sent[1]
    assert workloads[0].next() is None
    heads = [tuple(prompt[:64]) for prompt in sent[0] if prompt]
    a_round = sizes.in_use * sizes.questions
    rounds = [set(heads[at : at + a_round]) for at in range(0, len(heads), a_round)]
    assert [len(each) for each in rounds] == [sizes.in_use] * sizes.rounds
    seen: set[tuple[int, ...]] = set()
    back = 0
    for last, now in pairwise(rounds):
        seen |= last
        back += len((now - last) & seen)
    assert back >= 1


def played(way: str, *reused: int) -> list[Play]:
    """Plays of one request each, with these tokens reused."""
    found = []
    for tokens in reused:
        result = PhaseResult("one at a time", {})
        result.add(TimedCompletion("replica-1", tokens, tokens, 1000, tokens / 1e4))
        found.append(Play(way, [result]))
    return found


def test_what_two_plays_of_one_way_differ_by_is_chance() -> None:
    """The figures of one run must not claim what the next one may turn around."""
    quiet = [*played("a", 800, 802), *played("b", 700, 700)]
    # Spread within the ways: 1 + 1 + 0 + 0 over 2 degrees of freedom, t = 4.30.
    assert chance(quiet, reused_tokens) == pytest.approx(4.30)
    noisy = [*played("a", 800, 600), *played("b", 700, 600)]
    assert chance(noisy, reused_tokens) == pytest.approx(4.30 * 12500**0.5)
    assert mean(noisy, "a", reused_tokens) - mean(noisy, "b", reused_tokens) < 60
    assert chance([*played("a", 1), *played("b", 2)], reused_tokens) is None


def test_the_demo_says_in_words_what_is_more_than_chance() -> None:
    """Most who run it read only the last lines."""
    plays = [*played("kvroute", 800, 802), *played("blind", 700, 702), *played("turns", 799, 801)]
    scene = Scene(DemoSettings(), plays=plays, is_over=True)
    verdict = _verdict(scene)
    assert "all 2 predictions were exact" in verdict
    assert "1.14 times the tokens of 'blind', 1.14 times its mean TTFT" in verdict
    assert "1.00 times (within chance) the tokens of 'turns'" in verdict


def gpu_hit(index: PrefixIndex, groups: list[KVCacheGroup], *events: Event) -> int:
    """The GPU hit of the prompt after these events."""
    layout = KVCacheLayout.build(groups)
    index.add(SOURCE)
    index.apply(SOURCE, encode(EventBatch(0.0, [announce(layout, CHAIN), *events], 0)))
    return index.match(PROMPT)[SOURCE].gpu_cached_tokens


def stored(group: int) -> BlockStored:
    return BlockStored([*HASHES], None, PROMPT[:64], GPU, group)


def test_a_group_blind_index_takes_a_slid_window_for_lost_blocks() -> None:
    """The demo's opponent must be wrong where such routers are, and only there."""
    full = KVCacheGroup(GroupKind.FULL, 16)
    hybrid = [full, KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=16)]
    slid = BlockRemoved([*HASHES[:2]], GPU, 1)
    assert gpu_hit(PrefixIndex(), hybrid, stored(0), stored(1), slid) == 64
    assert gpu_hit(GroupBlindIndex(), hybrid, stored(0), stored(1), slid) == 0
    # The window's only block is gone, full attention holds all: nothing can be reused, and the
    # blind index says everything.
    assert gpu_hit(PrefixIndex(), hybrid, stored(0)) == 0
    assert gpu_hit(GroupBlindIndex(), hybrid, stored(0)) == 64
    for index in (PrefixIndex(), GroupBlindIndex(), GroupBlindIndex(any_copy=True)):
        assert gpu_hit(index, [full], stored(0), BlockRemoved([HASHES[2]], GPU, 0)) == 32


def test_a_group_blind_index_that_counts_any_copy_promises_what_the_window_has_lost() -> None:
    """The other way to be wrong: full attention's blocks hide that the window's are gone."""
    full = KVCacheGroup(GroupKind.FULL, 16)
    hybrid = [full, KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)]
    cut = BlockRemoved([*HASHES[2:]], GPU, 1)
    for slid, truth in ((BlockRemoved([*HASHES[:2]], GPU, 1), 64), (cut, 32)):
        assert gpu_hit(PrefixIndex(), hybrid, stored(0), stored(1), slid) == truth
        assert gpu_hit(GroupBlindIndex(any_copy=True), hybrid, stored(0), stored(1), slid) == 64
    gone = [BlockRemoved([*HASHES[1:]], GPU, group) for group in (0, 1)]
    index = GroupBlindIndex(any_copy=True)
    assert gpu_hit(index, hybrid, stored(0), stored(1), *gone) == 16
    assert gpu_hit(index, hybrid, stored(0), stored(0), *gone) == 16


@pytest.mark.parametrize("any_copy", [False, True])
def test_a_group_blind_index_can_be_kept_like_any_other(any_copy: bool) -> None:
    """A router keeps its indexes over a restart, whichever it was started with."""
    index, copy = GroupBlindIndex(any_copy), GroupBlindIndex(any_copy)
    assert gpu_hit(index, [KVCacheGroup(GroupKind.FULL, 16)], stored(0), stored(1)) == 64
    kept = b"".join(dump(index))
    load(kept, copy)
    removed = EventBatch(0.0, [BlockRemoved([HASHES[2]], GPU, 1)])
    for each in (index, copy):
        assert each.apply(SOURCE, removed).removed == (1 if any_copy else 2)
        assert each.match(PROMPT)[SOURCE].gpu_cached_tokens == (64 if any_copy else 32)
    with pytest.raises(DumpError, match="implementation"):
        load(kept, PrefixIndex())
    with pytest.raises(DumpError, match="group-blind"):
        load(b"".join(dump(PrefixIndex())), copy)
    assert copy.match(PROMPT)[SOURCE].gpu_cached_tokens == (64 if any_copy else 32)
