"""TensorRT-LLM's events become batches, and lead to what its cache would reuse."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents import trtllm
from kvevents.codec import MAX_UNREADABLE, decode
from kvevents.errors import MalformedBatch
from kvevents.events import BlockRemoved, BlockStored, Event
from kvevents.trtllm import TrtllmTranslator, read_response
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import tokens
from tests.support.trtllm_engine import BLOCK, TrtllmCache

SOURCE = SourceId("trtllm")
PROMPT = tokens(4 * BLOCK)


def read(*events: dict[str, Any], by: TrtllmTranslator | None = None) -> list[Event]:
    """What these come to, by a reader that knows nothing else; numbers go on where none are
    given."""
    reader = by or TrtllmTranslator()
    first = max(reader._last_seq, 0) + 1
    numbered = [{"event_id": first + place, **each} for place, each in enumerate(events)]
    body = json.dumps(numbered).encode()
    batches = [reader.translate(event) for event in read_response(body).events]
    return [event for batch in batches for event in decode(batch.payload).events]


def event(data: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"window_size": 4096, "data": data, **others}


def stored(*blocks: dict[str, Any], parent: int | str | None = None, **others: Any) -> Any:
    return event({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **others)


def block(block_hash: int | str, length: int = BLOCK, **others: Any) -> dict[str, Any]:
    return {**TrtllmCache.block(block_hash, tokens(length)), **others}


class Followed:
    """A cache, and an index that follows it."""

    def __init__(self, cache: TrtllmCache) -> None:
        self.cache = cache
        self.index = PrefixIndex()
        self.index.add(SOURCE)
        self.reader = TrtllmTranslator()
        self.skipped = 0

    def hit(self, prompt: list[int]) -> tuple[int, int]:
        """On the GPU, and with what lies below."""
        body = json.dumps(self.cache.take()).encode()
        for each in read_response(body).events:
            result = self.index.apply(SOURCE, self.reader.translate(each).payload)
            assert (result.unreadable, result.is_incomplete) == (0, False)
            self.skipped += result.skipped
        found = self.index.match(prompt)[SOURCE]
        return found.gpu_cached_tokens, found.cached_tokens


# --- what a cache would reuse ---------------------------------------------------------------------


@pytest.mark.parametrize("names_groups", [False, True], ids=["in C++", "newer"])
def test_a_prompt_that_was_stored_is_a_hit_until_it_is_removed(names_groups: bool) -> None:
    """Hashes are numbers of 64 bits here, digests there; neither is a hash that we compute."""
    followed = Followed(TrtllmCache(names_groups=names_groups))
    cache = followed.cache
    cache.store([*PROMPT, 1, 2, 3])
    assert followed.hit([*PROMPT, 1, 2, 3, 4]) == (4 * BLOCK, 4 * BLOCK)
    cache.remove(0, *cache.hashes([*PROMPT, 1, 2, 3])[2:])
    assert followed.hit([*PROMPT, 1, 2, 3, 4]) == (2 * BLOCK, 2 * BLOCK)
    assert followed.skipped == 0


_STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "ask"]), st.integers(0, 7), st.integers(1, 150)),
    max_size=40,
)


@given(steps=_STEPS, names_groups=st.booleans(), windows=st.sampled_from([(64, 4096), (4096,)]))
@settings(max_examples=150, deadline=None)
def test_hits_are_what_either_manager_would_reuse(
    steps: list[tuple[str, int, int]], names_groups: bool, windows: tuple[int, ...]
) -> None:
    """With a window of its own a prompt needs all of it in the older manager, its end in the newer
    one; blocks that are not full are never counted."""
    followed = Followed(TrtllmCache(windows, names_groups, block_size=16))
    cache = followed.cache
    # Both groups, so that it is known that there are two.
    cache.store(tokens(32, 50_000))
    for step, which, length in steps:
        prompt = tokens(length, 1000 * (which // 2 + 1)) + tokens(which, 7)
        if step == "store":
            cache.store(prompt)
        elif step == "evict":
            pool = which % len(windows)
            gone = [each for each in cache.hashes(prompt) if each in cache.held[pool]][-2:]
            if gone:
                cache.remove(pool, *gone)
        else:
            assert followed.hit(prompt)[0] == cache.reused(prompt)
    assert followed.skipped == 0


def test_blocks_below_the_gpu_are_found_there_and_come_back() -> None:
    """A level is a tier: what was offloaded can still be reused, after a load."""
    followed = Followed(TrtllmCache())
    cache, prompt = followed.cache, [*PROMPT, 9]
    cache.store(PROMPT)
    third, fourth = cache.hashes(PROMPT)[2:]
    cache.move(0, third, 1)
    cache.move(0, fourth, 1)
    assert followed.hit(prompt) == (2 * BLOCK, 4 * BLOCK)
    cache.move(0, third, 0)
    cache.reprioritise(0, third)
    assert followed.hit(prompt) == (3 * BLOCK, 4 * BLOCK)
    cache.remove(0, fourth)
    assert followed.hit(prompt) == (3 * BLOCK, 3 * BLOCK)
    cache.remove(0, third)
    assert followed.hit(prompt) == (2 * BLOCK, 2 * BLOCK)
    assert followed.skipped == 0


def test_a_prompt_of_one_block_counts_once_its_size_is_known() -> None:
    """Nothing says how many tokens a block has: the first one may not be full."""
    followed = Followed(TrtllmCache())
    cache = followed.cache
    half, whole = tokens(BLOCK // 2, 1), tokens(BLOCK, 500)
    cache.store(half)
    cache.store(whole)
    assert followed.hit([*whole, 1]) == (0, 0)
    cache.store([*whole, *tokens(BLOCK, 900)])
    assert followed.hit([*whole, 1]) == (BLOCK, BLOCK)
    assert followed.hit([*half, 1]) == (0, 0)
    assert followed.hit([*whole, *tokens(BLOCK, 900), 1]) == (2 * BLOCK, 2 * BLOCK)
    cache.remove(0, *cache.hashes(half))
    followed.hit([1])
    assert followed.skipped == 0


def test_a_process_begins_with_event_0_and_its_own_block_size() -> None:
    """Of what the one before held nothing is left to wait for."""
    followed = Followed(TrtllmCache())
    followed.cache.store(tokens(16, 1))
    followed.hit([1])
    followed.index.clear(SOURCE)
    cache = followed.cache = TrtllmCache(block_size=64)
    cache.store(tokens(128, 1))
    assert followed.hit([*tokens(128, 1), 1]) == (128, 128)


def test_a_process_whose_first_events_are_lost_has_its_own_block_size_too() -> None:
    """A number that is not above the last one is of another process: its blocks are not measured by
    those of the one before, nor are its windows."""
    reader = TrtllmTranslator()
    made = {"type": "created", "num_blocks_per_cache_level": [1]}
    read(event(made, event_id=4, window_size=2**17, layer_group_id=1), by=reader)
    read(stored(block(1), block(2), event_id=5), by=reader)
    run = block(3, 2 * BLOCK), block(4, 2 * BLOCK)
    (found,) = read(stored(*run, event_id=5, layer_group_id=3), by=reader)
    assert isinstance(found, BlockStored)
    assert (found.block_size, found.kv_cache_spec_kind) == (2 * BLOCK, "full_attention")


# --- the form -------------------------------------------------------------------------------------


def test_the_last_block_of_a_run_counts_where_it_is_full() -> None:
    """One that is not is left out, and so is its removal."""
    reader = TrtllmTranslator()
    run = [block(1), block(2, parent=1), block(3, 5)]
    (found,) = read(stored(*run, parent=77), by=reader)
    assert isinstance(found, BlockStored)
    assert (found.block_hashes, found.parent_block_hash) == ([1, 2], 77)
    assert (found.token_ids, found.block_size) == (tokens(BLOCK) * 2, BLOCK)
    removed = event({"type": "removed", "block_hashes": [3, 2]})
    assert read(removed, by=reader) == [BlockRemoved([2], "GPU", 0)]


def test_a_run_is_cut_where_its_tier_changes() -> None:
    """A run of ours lies in one tier; the next one follows the last block of the one before."""
    found = read(stored(block(1), block(2, cache_level=1), block(3, cache_level=2)))
    shown = [
        (e.block_hashes, e.parent_block_hash, e.medium) for e in found if hasattr(e, "token_ids")
    ]
    assert shown == [([1], None, "GPU"), ([2], 1, "CPU"), ([3], 2, "STORAGE")]


def test_pictures_and_salts_keep_blocks_apart_from_plain_text() -> None:
    """Their hashes cover more than token ids; a salt reads as SGLang's does."""
    digest = "ab" * 32
    text = [{"token_id": each} for each in range(BLOCK - 2)]
    picture = {
        **block(1),
        "tokens": [{"token_id": digest}, {"token_id": 32_001}, *text],
        "mm_keys": [{"type": "mm_key", "hash": digest, "start_offset": 0}],
    }
    extra = {**block(2), "tokens": [{"token_id": 5, "token_extra_id": 9}] * BLOCK}
    (found,) = read(stored(picture, extra, block(3)))
    assert isinstance(found, BlockStored)
    assert found.extra_keys == [[[digest, 0], digest], ["9"] * BLOCK, None]
    assert found.token_ids[:3] == [0, 32_001, 0]
    (salted,) = read(stored(block(1, cache_salt="s"), block(2, cache_salt="s")))
    assert isinstance(salted, BlockStored)
    assert (salted.cache_salt, salted.extra_keys) == ("s", None)
    index = PrefixIndex()
    index.add(SOURCE)
    reader = TrtllmTranslator()
    body = json.dumps([stored(picture, block(2), event_id=1)]).encode()
    for each in read_response(body).events:
        index.apply(SOURCE, reader.translate(each).payload)
    assert index.match([0, 32_001, *range(BLOCK - 2), 1])[SOURCE].cached_tokens == 0


def test_adapters_are_told_apart_where_the_engine_names_them() -> None:
    """TensorRT-LLM's own serializer leaves them out as yet."""
    data = {"type": "stored", "parent_hash": None, "blocks": [block(1), block(2)]}
    (found,) = read(event({**data, "lora_id": 3, "lora_name": "sql"}))
    assert isinstance(found, BlockStored)
    assert (found.lora_name, found.lora_id) == ("sql", 3)


def test_groups_are_windows_or_the_engines_own() -> None:
    """The newer manager's smaller windows are sliding ones; the older one needs all of each."""
    older = read(
        stored(block(1), block(2), window_size=128), stored(block(1), block(2), window_size=4096)
    )
    assert [(e.group_idx, e.kv_cache_spec_kind) for e in older if isinstance(e, BlockStored)] == [
        (0, "full_attention"),
        (1, "full_attention"),
    ]
    made = {"type": "created", "num_blocks_per_cache_level": [1]}
    newer = read(
        event(made, window_size=128, layer_group_id=3),
        event(made, window_size=4096, layer_group_id=1),
        stored(block(1), block(2), window_size=128, layer_group_id=3),
        stored(block(1), block(2), window_size=4096, layer_group_id=1),
    )
    assert [
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
        for e in newer
        if isinstance(e, BlockStored)
    ] == [(3, "sliding_window", 128), (1, "full_attention", None)]


def test_ranks_and_numbers_are_read_first() -> None:
    """An event that was none when it was written is `{}`."""
    body = json.dumps(
        [
            {},
            event({"type": "x"}, event_id=4),
            event({"type": "x"}, event_id=9, attention_dp_rank=2),
            {"data": 1},
        ]
    )
    found = read_response(body.encode())
    assert [(each.rank, each.seq) for each in found.events] == [(0, 4), (2, 9)]
    assert found.unreadable == 1


# --- hostile input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (event({"type": "flushed"}), "of an unknown type that takes blocks away"),
        (event({"type": 7}), r"Expected `str`, got `int`"),
        (event({}), "missing required field `type`"),
        (stored({"block_hash": "xyz", "tokens": []}), "a number or hexadecimal digits"),
        (stored(block(1), block(2, BLOCK + 1)), "33 tokens: blocks of this cache have 32"),
        (stored(block(1, trtllm.MAX_BLOCK_TOKENS + 1)), "length <= 4096"),
        (stored(block(2**64)), "must be below|out of range"),
        (stored(block(-1)), ">= 0"),
        (stored({**block(1), "tokens": [{"token_id": 2**32}]}), "<= 4294967295"),
        (stored({**block(1), "tokens": [{"token_id": None}]}), "Expected `int | str`"),
        (stored(block(1, cache_level=-1)), ">= 0"),
        (event({"type": "removed", "block_hashes": 3}), "Expected `array`"),
        (stored(block(1), block(2), layer_group_id=256), "<= 255"),
        (event({"type": "updated", "block_hash": 1, "cache_level": 1}), "Expected `object | null`"),
    ],
)
def test_an_event_that_cannot_be_read_says_why(broken: dict[str, Any], rule: str) -> None:
    """With its number, and nothing of a prompt; the number is then missing."""
    with pytest.raises(MalformedBatch, match=f"(?s)event 1: .*({rule})"):
        read(broken)


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"[1", b"[" * 100_000, b"\xff", b'["a]'])
def test_a_response_that_is_no_array_is_refused_as_a_whole(body: bytes) -> None:
    """An error page, say."""
    with pytest.raises(MalformedBatch, match=f"response of {len(body)} bytes: it must be a JSON"):
        read_response(body)


@pytest.mark.parametrize(
    ("element", "count", "rule"),
    [
        (b"0", 2, "must be a JSON array of events"),
        (b"{}", trtllm.MAX_EVENTS + 1, "may have 100000 events"),
        (b'{"data":1}', MAX_UNREADABLE + 1, "more than 1000 events name no event_id"),
    ],
    ids=["no objects", "many", "without numbers"],
)
def test_a_response_of_very_many_small_elements_is_refused_as_a_whole(
    element: bytes, count: int, rule: str
) -> None:
    """Each would take far more memory than its text, and time on the event loop."""
    with pytest.raises(MalformedBatch, match=rule):
        read_response(b"[" + b",".join([element] * count) + b"]")
    read_response(b"[" + b",".join([b"{}"] * trtllm.MAX_EVENTS) + b"]")  # counted anew


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "blocks", "block_hashes", "tokens", "block_hash", "token_id"]
                ),
                inner | st.sampled_from(["stored", "removed", "updated", "created"]),
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_no_event_raises_anything_else(data: object) -> None:
    """One would end the task that follows the replica."""
    with contextlib.suppress(MalformedBatch):
        read({"event_id": 1, "data": data})


def test_blocks_wait_for_their_size_within_a_bound_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large blocks are given up before there are many; one that is named again counts once, and
    one that is removed no more."""
    monkeypatch.setattr(trtllm, "MAX_HELD_BACK_TOKENS", 4 * BLOCK)
    reader = TrtllmTranslator()
    read(*(stored(block(number)) for number in (1, 2, 3, 3, 3, 4)), by=reader)
    read(event({"type": "removed", "block_hashes": [4]}), by=reader)
    read(stored(block(5)), stored(block(6)), by=reader)
    found = read(stored(block(100), block(101)), by=reader)
    released = [each.block_hashes for each in found if isinstance(each, BlockStored)]
    assert released == [[2], [3], [5], [6], [100, 101]]


@pytest.mark.parametrize("name", ["MAX_HELD_BACK", "MAX_APART"])
def test_what_is_remembered_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose size is never known, and blocks that are not on the GPU: the oldest are given
    up, or no more are taken, which costs hits."""
    monkeypatch.setattr(trtllm, name, 10)
    reader = TrtllmTranslator()
    make: dict[str, Callable[[int], dict[str, Any]]] = {
        "MAX_HELD_BACK": lambda number: stored(block(number)),
        "MAX_APART": lambda number: stored(block(1), block(number, cache_level=1)),
    }
    many = [make[name](number) for number in range(2, 40)]
    read(*many, by=reader)
    found = read(stored(block(100), block(101)), by=reader)
    released = [each for each in found if isinstance(each, BlockStored)]
    assert len(released) == (11 if name == "MAX_HELD_BACK" else 1)
    removed = event({"type": "removed", "block_hashes": list(range(2, 40))})
    (on_gpu, *below) = read(removed, by=reader)
    assert isinstance(on_gpu, BlockRemoved)
    if name == "MAX_APART":
        assert [len(each.block_hashes) for each in below if isinstance(each, BlockRemoved)] == [28]
