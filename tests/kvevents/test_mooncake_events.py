"""Mooncake's events (RFC #1527): the same three frames, another map."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.codec import decode
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import Prefix, tokens

SOURCE = SourceId("mooncake")
ENVELOPE = {
    "event_id": 7,
    "timestamp": 1_700_000_000_000,
    "model_name": "m",
    "block_size": 16,
    "additional_salt": None,
    "lora_name": None,
    "tenant_id": "default",
    "backend_id": "10.0.0.1:50052",
    "medium": "gpu",
    "dp_rank": 0,
}
PROMPT = Prefix(tokens(64))


def payload(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, [{**ENVELOPE, **each} for each in events], 0])


def stored(**fields: Any) -> dict[str, Any]:
    whole = {"event_type": "stored", "seq_hashes": PROMPT.hashes, "token_ids": PROMPT.tokens}
    return {**whole, "base_block_idx": 0, **fields}


def read(*events: dict[str, Any]) -> EventBatch:
    return decode(payload(*events))


def test_the_three_events_are_read() -> None:
    """By their names for the fields."""
    removed = {"event_type": "removed", "seq_hashes": [1], "base_block_idx": 3, "medium": "disk"}
    batch = read(stored(parent_hash=5), removed, {"event_type": "cleared", "medium": "cpu"})
    assert batch.events == [
        BlockStored(PROMPT.hashes, 5, PROMPT.tokens, "gpu", block_size=16),
        BlockRemoved([1], "disk"),
        AllBlocksCleared("cpu"),
    ]
    assert (batch.skipped, batch.unreadable, batch.hides_removals) == (0, 0, False)


def test_they_lead_to_hits() -> None:
    """In the compiled index, which asks Python to read them."""
    index = PrefixIndex()
    index.add(SOURCE)
    result = index.apply(SOURCE, payload(stored()))
    assert (result.stored, result.unreadable) == (4, 0)
    assert index.match([*PROMPT.tokens, 1])[SOURCE].gpu_cached_tokens == 64
    index.apply(SOURCE, payload({"event_type": "removed", "seq_hashes": PROMPT.hashes[3:]}))
    assert index.match([*PROMPT.tokens, 1])[SOURCE].gpu_cached_tokens == 48


def test_their_own_names_count_where_vllms_stand_there_as_well() -> None:
    """Mooncake's publisher writes both by default; only its own say whose prompts are meant."""
    of_vllm = {
        "type": "BlockStored",
        "block_hashes": PROMPT.hashes,
        "parent_block_hash": None,
        "token_ids": PROMPT.tokens,
    }
    event = {**of_vllm, **ENVELOPE, **stored(tenant_id="another")}
    whole = msgspec.msgpack.encode([1.0, [event], 0])
    (found,) = decode(whole).events
    assert isinstance(found, BlockStored)
    assert found.cache_salt == "another"
    index = PrefixIndex()
    index.add(SOURCE)
    assert index.apply(SOURCE, whole).stored == 4
    assert index.match([*PROMPT.tokens, 1])[SOURCE].gpu_cached_tokens == 0
    assert index.match([*PROMPT.tokens, 1], cache_salt="another")[SOURCE].gpu_cached_tokens == 64


def test_an_object_of_a_store_is_left_out() -> None:
    """Its key is no block hash, and the list of hashes is empty."""
    batch = read(stored(seq_hashes=[], object_key="model/rank0/abc"))
    assert (batch.events, batch.skipped, batch.unreadable) == ([], 1, 0)


def test_a_run_whose_place_is_not_said_is_at_no_place() -> None:
    """Its tokens are not the beginning of a prompt."""
    index = PrefixIndex()
    index.add(SOURCE)
    index.apply(SOURCE, payload(stored(base_block_idx=4)))
    assert index.match([*PROMPT.tokens, 1])[SOURCE].gpu_cached_tokens == 0


def test_another_tenants_blocks_are_for_its_prompts_alone() -> None:
    """Its name takes the place of a salt."""
    index = PrefixIndex()
    index.add(SOURCE)
    index.apply(SOURCE, payload(stored(tenant_id="t2")))
    prompt = [*PROMPT.tokens, 1]
    assert index.match(prompt)[SOURCE].gpu_cached_tokens == 0
    assert index.match(prompt, cache_salt="t2")[SOURCE].gpu_cached_tokens == 64


def test_objects_of_the_store_are_skipped() -> None:
    """They name no block; what was not taken in need not be taken out."""
    events = [{"event_type": kind, "object_key": "a/b"} for kind in ("stored", "removed")]
    batch = read(*events)
    assert (batch.events, batch.skipped, batch.hides_removals) == ([], 2, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"seq_hashes": None},
        {"seq_hashes": [[1]]},
        {"token_ids": "words"},
        {"token_ids": [-1]},
        {"parent_hash": {}},
        {"medium": 7},
        {"medium": "x" * 300},
        {"block_size": -1},
        {"tenant_id": 5},
        {"lora_name": []},
    ],
)
def test_an_event_that_breaks_the_form_is_left_out(fields: dict[str, Any]) -> None:
    """And counted; the others of its batch are read."""
    batch = read(stored(**fields), stored())
    assert (len(batch.events), batch.unreadable) == (1, 1)
    assert batch.problem is not None


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_NAMES = ("seq_hashes", "parent_hash", "token_ids", "base_block_idx", "tenant_id", *ENVELOPE)


@given(
    st.lists(
        st.builds(
            dict.__or__,
            st.builds(
                lambda kind: {"event_type": kind},
                st.sampled_from(["stored", "removed", "cleared"]) | st.text(max_size=8),
            ),
            st.dictionaries(st.sampled_from(_NAMES), _ANY, max_size=6),
        ),
        max_size=5,
    )
)
def test_hostile_events_are_counted_and_nothing_else_is_lost(events: list[dict[str, Any]]) -> None:
    """Every event is read, skipped or unreadable; the index goes on."""
    index = PrefixIndex()
    index.add(SOURCE)
    batch = read(*events)
    index.apply(SOURCE, payload(*events))
    assert len(batch.events) + batch.skipped + batch.unreadable == len(events)
    assert index.core.contradictions() == []
    index.apply(SOURCE, payload(stored()))
    assert index.match([*PROMPT.tokens, 1])[SOURCE].gpu_cached_tokens >= 0


def test_a_namespace_is_the_salt_of_those_who_ask() -> None:
    """Mooncake's `additional_salt` of an event is its `cache_salt` of a question; beside a tenant
    one of the two could not be told apart, and the event is left out."""
    index = PrefixIndex()
    index.add(SOURCE)
    index.apply(SOURCE, payload(stored(additional_salt="w8a8")))
    prompt = [*PROMPT.tokens, 1]
    assert index.match(prompt)[SOURCE].cached_tokens == 0
    assert index.match(prompt, cache_salt="w8a8")[SOURCE].cached_tokens == 64
    index.apply(SOURCE, payload({"event_type": "removed", "seq_hashes": PROMPT.hashes}))
    assert index.match(prompt, cache_salt="w8a8")[SOURCE].cached_tokens == 0
    both = read(stored(additional_salt="w8a8", tenant_id="another"))
    assert (both.events, both.unreadable, both.hides_removals) == ([], 1, False)
    assert both.problem is not None
    assert both.problem.startswith("events[0].additional_salt: must be empty where tenant_id")
    plain = read(stored(additional_salt="", tenant_id="another"))
    assert [getattr(event, "cache_salt", None) for event in plain.events] == ["another"]
    assert read(stored(additional_salt=7)).unreadable == 1
