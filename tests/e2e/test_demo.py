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
from pathlib import Path

import pytest

from kvevents.codec import encode
from kvevents.events import GPU, BlockRemoved, BlockStored, Event, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from router.demo.blind import GroupBlindIndex
from router.demo.processes import DemoFailed, engines
from router.demo.workload import Workload, WorkloadSizes
from router.index import DumpError, PrefixIndex, SourceId, create_index
from router.index.dump import dump, load
from tests.support.http_client import eventually
from tests.support.router_process import ROOT
from tests.support.signals import heed_signals
from tests.support.vllm_publisher import free_port

DEMO = (sys.executable, "-m", "router.cli.main", "demo", "--simulate")
CHAIN = HashChain.from_seed()
SOURCE = SourceId("replica", 0)
PROMPT = list(range(65))
HASHES = list(CHAIN.block_hashes(PROMPT, 16))


def test_the_demo_shows_what_knowing_the_groups_gains() -> None:
    """It is the first thing a user runs: it must end, and its claim must hold on any machine."""
    done = subprocess.run(
        [*DEMO, "--json"], cwd=ROOT, capture_output=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    ours, blind, round_robin = json.loads(done.stdout)
    assert (ours["routed_by"], blind["routed_by"]) == ("kvroute", "group-blind index")
    assert (
        ours["requests"]
        == blind["requests"]
        == round_robin["requests"]
        == Workload(WorkloadSizes()).requests
    )
    assert ours["prompt_tokens"] == blind["prompt_tokens"] == round_robin["prompt_tokens"]
    assert ours["reused_tokens"] > 1.3 * round_robin["reused_tokens"]
    assert ours["mispredicted"] < blind["mispredicted"]


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
        preexec_fn=heed_signals,
    )
    assert demo.stderr is not None
    try:
        await eventually(
            lambda: len(session_of(demo.pid)) > processes, "engines and router run", 60
        )
        demo.send_signal(number)
        assert await asyncio.to_thread(demo.wait, 30) == 0
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
        await eventually(lambda: len(session_of(demo.pid)) > 1, "engines run", 60)
        demo.send_signal(signal.SIGHUP)
        demo.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(demo.wait, 30) == 128 + signal.SIGTERM
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


def test_every_routing_mode_gets_the_same_prompts() -> None:
    """The order of responses must not decide what is sent next."""
    prompts = []
    for order in (1, -1):
        workload, said = Workload(WorkloadSizes(conversations=4, documents=2)), []
        while batch := [dialogue for dialogue in (workload.next(), workload.next()) if dialogue]:
            for dialogue in batch[::order]:
                said.append((dialogue.name, tuple(dialogue.prompt())))
                workload.answered(dialogue)
        prompts.append(sorted(said))
    assert prompts[0] == prompts[1]


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
    assert gpu_hit(create_index(), hybrid, stored(0), stored(1), slid) == 64
    assert gpu_hit(GroupBlindIndex(), hybrid, stored(0), stored(1), slid) == 0
    # The window's only block is gone, full attention holds all: nothing can be reused, and the
    # blind index says everything.
    assert gpu_hit(create_index(), hybrid, stored(0)) == 0
    assert gpu_hit(GroupBlindIndex(), hybrid, stored(0)) == 64
    for index in (create_index(), GroupBlindIndex(), GroupBlindIndex(any_copy=True)):
        assert gpu_hit(index, [full], stored(0), BlockRemoved([HASHES[2]], GPU, 0)) == 32


def test_a_group_blind_index_that_counts_any_copy_promises_what_the_window_has_lost() -> None:
    """The other way to be wrong: full attention's blocks hide that the window's are gone."""
    full = KVCacheGroup(GroupKind.FULL, 16)
    hybrid = [full, KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)]
    cut = BlockRemoved([*HASHES[2:]], GPU, 1)
    for slid, truth in ((BlockRemoved([*HASHES[:2]], GPU, 1), 64), (cut, 32)):
        assert gpu_hit(create_index(), hybrid, stored(0), stored(1), slid) == truth
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
        load(kept, create_index())
    with pytest.raises(DumpError, match="group-blind"):
        load(b"".join(dump(create_index())), copy)
    assert copy.match(PROMPT)[SOURCE].gpu_cached_tokens == (64 if any_copy else 32)
