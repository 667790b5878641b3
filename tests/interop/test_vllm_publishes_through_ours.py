"""vLLM 0.33's own scheduler with `"publisher": "kvroute"`: what consumers of `kvevents` get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core import kv_cache_utils

from kvevents.codec import decode
from kvevents.curve import CurveClient, make_keys, read_keys
from kvevents.errors import KVEventsError, LayoutError
from kvevents.events import BlockStored, CacheLayout, Event
from kvevents.hashing import to_wire_int
from kvevents.layout import KVCacheLayout
from kvevents.messages import Batch
from kvevents.sealing import hold_key, make_hash_key, read_hash_key
from kvroute_vllm.hints import RETENTION_HINTS
from kvroute_vllm.layout import describe
from kvroute_vllm.plugin import register
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.interop.hinted_engine import PROMPT_TOKENS, HintedEngine
from tests.interop.plugging import skip_unknown_drafters, unplug_later
from tests.interop.record_hinted import LAYOUTS, hints_for
from tests.interop.record_offloading import Workload
from tests.support.publishing import SNAPSHOT, Client, Peer, new_client, until

PROMPT = list(range(1, PROMPT_TOKENS + 1))
SOURCE = SourceId("vllm")
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "kvroute",
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": "tcp://127.0.0.1:0",
    "topic": "kv-events",
}


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    unplug_later(monkeypatch)
    register()


@pytest.fixture
def client() -> Iterator[Client]:
    with new_client() as client:
        yield client


@contextmanager
def publishing(name: str, **options: Any) -> Iterator[HintedEngine]:
    """An engine that publishes; *options* are ours in `--additional-config`."""
    engine = HintedEngine(
        LAYOUTS[name],
        kv_events_config=KVEventsConfig(**EVENTS),
        additional_config={"kvroute": options},
    )
    try:
        yield engine
    finally:
        engine.scheduler.kv_event_publisher.shutdown()


def endpoints(engine: HintedEngine) -> Any:
    return engine.scheduler.kv_event_publisher.get_publisher_config()


def serve(engine: HintedEngine, workload: Workload, steps: int) -> list[list[int]]:
    prompts = []
    for _ in range(steps):
        prompt = workload.prompt()
        prompts.append(prompt)
        engine.run(prompt, max_tokens=20, **hints_for(workload, prompt))
    return prompts


def events_of(batches: Sequence[Batch]) -> list[Event]:
    return [event for batch in batches for event in decode(batch.payload).events]


def blocks_of(batches: Sequence[Batch]) -> set[tuple[int | None, Any]]:
    return {
        (event.group_idx, block_hash)
        for event in events_of(batches)
        if isinstance(event, BlockStored)
        for block_hash in event.block_hashes
    }


def settled(engine: HintedEngine, client: Client, start: int | bytes) -> list[Batch]:
    """A reply once everything that the engine has said is on the wire."""
    publisher = engine.scheduler.kv_event_publisher.opened
    expected = {(each.group, to_wire_int(each.block_hash)) for each in engine.cached()}
    peer = client.dealer(endpoints(engine).replay_endpoint)
    until(lambda: publisher.statistics().stream.queue_depth == 0, "the queue is empty")
    until(lambda: blocks_of(peer.answer(SNAPSHOT)) == expected, "a snapshot equals the pool")
    return peer.answer(start)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_announced_layout_is_the_caches_own(name: str) -> None:
    """Nothing has to be learned or configured, drafters included."""
    layout = LAYOUTS[name]
    skip_unknown_drafters(layout)
    expected = KVCacheLayout.build(
        layout.groups, layout.hash_block_size, layout.scheduler_block_size, layout.eagle
    )
    with publishing(name) as engine:
        assert describe(engine.scheduler, (0, 33)) == expected


def test_the_first_batch_announces_layout_hash_function_and_hints(client: Client) -> None:
    """A router sends hints to those alone that say they take them."""
    with publishing("gptoss") as engine:
        first, *_ = client.dealer(endpoints(engine).replay_endpoint).answer(0)
    (layout,) = decode(first.payload).events
    assert isinstance(layout, CacheLayout)
    assert layout.retention_hints == RETENTION_HINTS
    assert layout.hash_algorithm == "sha256"
    assert [group.kind for group in layout.groups] == ["full_attention", "sliding_window"]


def test_it_opens_in_an_engine_whose_root_of_hashes_comes_behind_its_scheduler(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's `EngineCore` makes them in that order, and no process has a root before its first."""
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    with publishing("gptoss") as engine:
        first, *_ = client.dealer(endpoints(engine).replay_endpoint).answer(0)
    (layout,) = decode(first.payload).events
    assert isinstance(layout, CacheLayout)
    assert layout.none_hash == kv_cache_utils.NONE_HASH


@pytest.mark.parametrize("start", [0, SNAPSHOT], ids=["replayed", "snapshot"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_router_that_starts_late_predicts_every_hit(
    name: str, start: int | bytes, client: Client
) -> None:
    """From the whole stream, and from a snapshot, which vLLM's own publisher has not."""
    skip_unknown_drafters(LAYOUTS[name])
    workload = Workload(LAYOUTS[name].scheduler_block_size, 5)
    with publishing(name) as engine:
        prompts = []
        for _ in range(3):
            prompts += serve(engine, workload, 15)
            index = PrefixIndex()
            index.add(SOURCE)
            for batch in settled(engine, client, start):
                index.apply(SOURCE, batch.payload)
            hits = [engine.hit(prompt) for prompt in prompts]
            assert [index.match(prompt)[SOURCE].cached_tokens for prompt in prompts] == hits
            assert any(hits)


def test_a_request_cannot_have_blocks_announced_twice(client: Client) -> None:
    """vLLM's report mode `full` announces again what a request reuses, as if there were more
    copies: after their removal the router would believe in blocks that are gone."""
    with publishing("gptoss") as engine:
        engine.run(PROMPT)
        before = events_of(settled(engine, client, 0))
        engine.run(PROMPT, kv_cache_report_mode="full")
        engine.run(PROMPT, kv_cache_report_mode="full")
        after = events_of(settled(engine, client, 0))
    assert blocks_stored(after) - blocks_stored(before) == 0


def blocks_stored(events: list[Event]) -> int:
    """With every copy."""
    return sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))


def test_under_a_key_events_carry_nothing_of_prompts(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens and has no key learns how many blocks there are, and nothing else."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    path = make_hash_key(tmp_path, "fleet")
    hold_key(read_hash_key(path))
    with publishing("gptoss", hash_key=str(path)) as engine:
        engine.run(PROMPT, kvroute_keep=[322])
        peer = client.dealer(endpoints(engine).replay_endpoint)
        count = len(engine.cached())
        until(lambda: len(blocks_of(peer.answer(SNAPSHOT))) == count, "all is on the wire")
        batches = peer.answer(0)
        hits = [engine.hit(PROMPT), engine.hit([*PROMPT[:322], 9])]
    stored = [event for event in events_of(batches) if isinstance(event, BlockStored)]
    assert stored
    assert not any(event.token_ids or event.extra_keys for event in stored)
    index = PrefixIndex()
    index.add(SOURCE)
    for batch in batches:
        index.apply(SOURCE, batch.payload)
    predicted = [index.match(prompt)[SOURCE] for prompt in (PROMPT, [*PROMPT[:322], 9])]
    assert [hit.cached_tokens for hit in predicted] == hits == [688, 320]


def test_an_encrypted_stream_is_read_with_a_key(tmp_path: Path) -> None:
    """vLLM's own publisher has plain text only."""
    _, secret = make_keys(tmp_path, "engine")
    keys = read_keys(secret)
    with (
        publishing("gptoss", curve_key=str(secret)) as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        CurveClient(keys, keys.public).protect(socket)
        socket.connect(endpoints(engine).replay_endpoint)
        first, *_ = Peer(socket).answer(0)
        socket.close(linger=0)
    assert isinstance(decode(first.payload).events[0], CacheLayout)


def test_a_hash_key_needs_whole_digests(tmp_path: Path) -> None:
    """64 bits of a hash are too few to hide a prompt behind; vLLM sends these by default."""
    path = make_hash_key(tmp_path, "fleet")
    with pytest.raises(KVEventsError, match="VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"):
        open_engine({"hash_key": str(path)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curve": "x"}, r"additional_config\.kvroute: .*`curve`"),
        ({"curve_key": 5}, r"additional_config\.kvroute: .*curve_key"),
        ([], r"additional_config\.kvroute: "),
        ({"curve_key": "/nowhere"}, "/nowhere"),
    ],
)
def test_options_that_cannot_be_used_are_refused_at_the_start(options: Any, message: str) -> None:
    """An operator who wanted encryption must not get an engine without."""
    with pytest.raises(KVEventsError, match=message):
        open_engine(options)


def test_a_connectors_tiers_are_left_to_vllms_publisher() -> None:
    """Its events say less of them than an announced layout promises."""
    connector = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"cpu_bytes_to_use": 2**20, "blocks_per_chunk": 1},
    )
    with pytest.raises(KVEventsError, match='use "zmq"'):
        open_engine({}, kv_transfer_config=connector)


def open_engine(options: Any, **settings: Any) -> None:
    HintedEngine(
        LAYOUTS["gptoss"],
        kv_events_config=KVEventsConfig(**EVENTS),
        additional_config={"kvroute": options},
        **settings,
    )


def test_drafters_of_old_releases_are_not_announced() -> None:
    """Their hits end elsewhere, which no announcement can say."""
    with (
        pytest.raises(LayoutError, match="drafter"),  # an old engine does not even start
        publishing("drafter_in_full") as engine,
    ):
        describe(engine.scheduler, (0, 31))
