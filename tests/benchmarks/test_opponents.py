"""Each rule of another router on a case small enough to do by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.simulation.blind import BLIND_INDEXES
from benchmarks.simulation.layouts import replica_config
from benchmarks.simulation.opponents import OPPONENTS, make_opponent
from benchmarks.simulation.opponents.base import Opponent
from benchmarks.simulation.opponents.event_driven import LlmD, Preble
from benchmarks.simulation.opponents.histories import queue_scores
from kvevents.events import BlockRemoved, BlockStored, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from router.index.base import SourceId

NAMES = ("a", "b", "c")
REPLICA = replica_config("gptoss", 20_000)


def opponent(name: str, now_s: Iterator[float] | None = None) -> Opponent:
    return make_opponent(name, NAMES, lambda: next(now_s) if now_s else 0.0, REPLICA, 0)


def text(start: int, tokens: int) -> list[int]:
    return list(range(start, start + tokens))


def test_sglang_follows_the_longest_match_until_loads_are_apart() -> None:
    """Both balance thresholds must be exceeded: 64 requests, and one and a half times."""
    router = opponent("sglang")
    assert router.choose(1000, {"b": 320, "c": 640}) == "c"
    router.loads["c"].requests = 64
    assert router.choose(1000, {"b": 320, "c": 640}) == "c"
    router.loads["c"].requests = 65
    assert router.choose(1000, {"b": 320, "c": 640}) in ("a", "b")
    router.loads["a"].requests = router.loads["b"].requests = 200
    router.loads["c"].requests = 265
    assert router.choose(1000, {"c": 640}) == "c"


def test_sglang_sends_short_matches_to_the_smallest_tree() -> None:
    """At most 0.3 of the prompt is no match."""
    router = opponent("sglang")
    router.sent("a", text(1000, 640), 0)
    router.sent("b", text(5000, 320), 0)
    router.sent("c", text(9000, 640), 0)
    assert router.choose(1000, {"a": 300}) == "b"
    assert router.choose(999, {"a": 300}) == "a"


def test_a_history_finds_what_was_sent_and_never_forgets() -> None:
    """It does not hear that the engine evicted it."""
    router = opponent("sglang")
    router.sent("a", text(1000, 640), 0)
    assert router.hits(text(1000, 700)) == {"a": 640}
    assert router.hits(text(1001, 700)) == {}


def test_aibrix_prefers_matches_that_are_not_busy() -> None:
    """Within a standard deviation of the mean; nine requests apart it only balances."""
    router = opponent("aibrix")
    assert router.choose(1000, {"a": 64, "b": 640}) == "b"
    router.loads["b"].requests = 6  # mean 2, deviation 2.8
    assert router.choose(1000, {"a": 64, "b": 640}) == "a"
    assert router.choose(1000, {"b": 640}) in ("a", "c")
    router.loads["a"].requests, router.loads["b"].requests = 9, 0
    assert router.choose(1000, {"a": 640}) in ("b", "c")


def test_the_gateway_weighs_prefix_queue_and_usage_by_3_2_2() -> None:
    """A whole match makes up for a third more usage and half a queue, not for more."""
    router = opponent("gateway_api")
    assert router.choose(1280, {"b": 1280}) == "b"
    router.take_engine_load("b", 1, 4, 0.4)  # 3 + 0 + 1.2 against 2 + 2
    assert router.choose(1280, {"b": 1280}) == "b"
    router.take_engine_load("b", 1, 4, 0.6)  # 3.8 against 4
    assert router.choose(1280, {"b": 1280}) in ("a", "c")


def test_the_gateway_matches_a_bounded_history() -> None:
    """256 blocks of a prompt, and as many blocks for each replica as its engine has."""
    router = opponent("gateway_api")
    long = text(1000, 64 * 300)
    router.sent("a", long, 0)
    assert router.hits(long) == {"a": 64 * 256}
    for start in range(10):
        router.sent("a", text(1_000_000 * (start + 1), 64 * 256), 0)
    assert router.hits(long) == {}


def test_queues_are_scored_between_the_shortest_and_the_longest() -> None:
    """Equal queues say nothing."""
    assert queue_scores({"a": 1, "b": 3, "c": 5}) == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert queue_scores({"a": 7, "b": 7}) == {"a": 1.0, "b": 1.0}


def test_dynamo_adds_blocks_to_compute_and_blocks_held() -> None:
    """With an overlap weight of one, ten blocks held elsewhere weigh as much as ten to compute."""
    router = opponent("dynamo")
    assert router.choose(1280, {"b": 640}) == "b"
    router.loads["b"].context_tokens = 641
    assert router.choose(1280, {"b": 640}) in ("a", "c")
    router.loads["b"].context_tokens, router.loads["b"].queued_tokens = 0, 641
    assert router.choose(1280, {"b": 640}) in ("a", "c")


def test_llm_d_gives_cold_prompts_to_who_has_waited_longest() -> None:
    """And prompts that someone holds to the best sum of the other scores."""
    router = opponent("llm_d")
    assert isinstance(router, LlmD)
    assert [router.choose(1000, {}) for _ in range(4)] == ["a", "b", "c", "a"]
    router.take_engine_load("c", 1, 0, 0.9)
    assert router.choose(1000, {"c": 500}) in ("a", "b")
    assert router.choose(1000, {"c": 700}) == "c"


def test_mooncake_estimates_queue_and_prefill() -> None:
    """The shortest of the two together."""
    router = opponent("mooncake")
    router.loads["a"].queued_tokens = 500
    router.loads["c"].queued_tokens = 300
    assert router.choose(1000, {"a": 600, "c": 200}) == "a"
    assert router.choose(1000, {"a": 400, "c": 200}) == "b"


def test_lmetric_multiplies_new_tokens_and_batch() -> None:
    """Half the tokens make up for less than twice the batch."""
    router = opponent("lmetric")
    router.loads["a"].requests = router.loads["c"].requests = 3
    router.loads["b"].requests = 6
    assert router.choose(1000, {"b": 440}) == "b"  # 560 x 7 against 1,000 x 4
    assert router.choose(1000, {"b": 420}) in ("a", "c")
    router.loads["b"].queued_tokens = 20
    assert router.choose(1000, {"b": 440}) in ("a", "c")


def test_preble_exploits_what_is_mostly_cached_and_explores_the_rest() -> None:
    """And does not send more to one that has twice the work of the lightest."""
    router = opponent("preble")
    assert isinstance(router, Preble)
    router.sent("b", text(1000, 4000), 0)  # half a second of work
    assert router.choose(1000, {"b": 501}) == "b"
    assert router.choose(1000, {"b": 500}) in ("a", "c")
    router.sent("b", text(20_000, 8000), 0)
    assert router.choose(1000, {"b": 501}) in ("a", "c")


def test_preble_forgets_after_three_minutes() -> None:
    """Its window is the last three minutes."""
    times = iter([0.0, 179.0, 181.0])
    router = opponent("preble", times)
    router.sent("b", text(1000, 16_000), 0)
    assert router.choose(1000, {"b": 501}) in ("a", "c")
    assert router.choose(1000, {"b": 501}) == "b"


@pytest.mark.parametrize(
    ("name", "after_removal"),
    [("group_blind", 0), ("group_blind_any_copy", 192), ("group_0", 192)],
)
def test_blind_indexes_differ_in_what_a_removal_of_group_1_means(
    name: str, after_removal: int
) -> None:
    """One believes the first removal, one the last, one hears of group 0 only."""
    chain, tokens, source = HashChain.from_seed(), text(1000, 192), SourceId("a")
    groups = [
        KVCacheGroup(GroupKind.FULL, 64),
        KVCacheGroup(GroupKind.SLIDING_WINDOW, 64, sliding_window=128),
    ]
    hashes = [*chain.block_hashes(tokens, 64)]
    stored = [
        BlockStored(hashes, None, tokens, "GPU", group, kv_cache_spec_kind=kind)
        for group, kind in enumerate(("full_attention", "sliding_window"))
    ]
    index = BLIND_INDEXES[name]()
    index.apply(source, EventBatch(0.0, [announce(KVCacheLayout.build(groups), chain), *stored]))
    assert index.match([*tokens, 1])[source].cached_tokens == 192
    index.apply(source, EventBatch(0.0, [BlockRemoved(hashes, "GPU", 1)]))
    found = index.match([*tokens, 1]).get(source)
    assert (found.cached_tokens if found else 0) == after_removal


@pytest.mark.parametrize("name", OPPONENTS)
def test_an_opponent_says_where_its_rule_is_from(name: str) -> None:
    """A rule without a source cannot be checked."""
    said = OPPONENTS[name].__doc__ or ""
    assert "arXiv" in said or "documentation" in said or " v" in said
