"""Our events on the wire, read by vLLM's own classes.

What holds: removals, clears, the batch itself, and every value of a store. What does not, by the
form we write: vLLM's class for a store requires `block_size`, `lora_id` and `lora_name`, which ours
leaves out, and it knows no `CacheLayout`. A reader built from vLLM's class with defaults for these
three reads ours.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events as vllm_events

from kvevents import codec
from kvevents.cache_source import CacheSource, EngineStep
from kvevents.events import BlockRemoved, BlockStored, CacheLayout, Event, EventBatch, GroupSpec
from kvevents.hashing import to_wire_int
from tests.interop import layouts
from tests.interop.cache import FirstStep
from tests.interop.layouts import Layout
from tests.interop.our_cache import OurCache
from tests.interop.vllm_cache import VllmCache

NUM_BLOCKS = 32
LAYOUT = layouts.layout(layouts.full(), layouts.window(50))
TOKENS = list(range(1, 101))
OTHERS = list(range(1001, 1201))

vllm_decoder = msgspec.msgpack.Decoder(vllm_events.KVEventBatch)


def our_events(
    layout: Layout = LAYOUT, prompts: tuple[list[int], ...] = (TOKENS, OTHERS)
) -> list[Event]:
    """The events of prompts, one after the other, through a cache too small for all of them."""
    cache = OurCache(layout, NUM_BLOCKS, 1000, none_hash=bytes(32))
    events: list[Event] = []
    for index, token_ids in enumerate(prompts):
        play(cache, f"r{index}", token_ids)
        events += cache.manager.take_events()
    return events


def play(cache: OurCache | VllmCache, name: str, token_ids: list[int]) -> None:
    cache.add(name, token_ids, None)
    assert cache.admit(name, FirstStep(len(token_ids) - cache.hit(name).num_tokens))
    cache.set_computed(name, len(token_ids))
    cache.free(name)


def on_the_wire(events: list[Event]) -> bytes:
    return codec.encode(EventBatch(1.5, events, 3))


def test_removals_and_clears_are_vllms_own_field_by_field() -> None:
    """A consumer written against vLLM's classes must see our evictions, with the group they are
    of."""
    removals = [event for event in our_events() if isinstance(event, BlockRemoved)]
    cache = OurCache(LAYOUT, NUM_BLOCKS, 1000, none_hash=bytes(32))
    assert cache.reset()
    batch = vllm_decoder.decode(on_the_wire([*removals, *cache.manager.take_events()]))
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    assert {event.group_idx for event in removals} == {0, 1}
    expected = [
        vllm_events.BlockRemoved(event.block_hashes, "GPU", event.group_idx) for event in removals
    ]
    assert batch.events == [*expected, vllm_events.AllBlocksCleared()]


def test_an_untyped_reader_of_vllms_batches_reads_every_event() -> None:
    """vLLM's base batch leaves its events as plain values, which lets a consumer tolerate unknown
    and missing fields."""
    events = our_events()
    batch = msgspec.msgpack.decode(on_the_wire(events), type=vllm_events.EventBatch)
    assert [event["type"] for event in batch.events] == [type(event).__name__ for event in events]


def test_vllms_class_for_a_store_refuses_ours_for_its_missing_block_size() -> None:
    """Our format leaves out block_size, so that blocks of several sizes can share an event; this is
    the price."""
    with pytest.raises(msgspec.ValidationError, match="missing required field `block_size`"):
        vllm_decoder.decode(on_the_wire(our_events()))


def test_with_block_sizes_vllms_own_class_reads_everything_our_cache_says() -> None:
    """`PublisherConfig.with_block_size` is for readers that are built on that class."""
    events = our_events()
    announced = CacheLayout(
        "p", [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, 50)], 16, 16
    )
    source = CacheSource(announced, 3, with_block_size=True)
    batch = vllm_decoder.decode(source.payload(EngineStep(1.5, tuple(events), None)))
    assert len(batch.events) == len(events)
    for theirs, ours in zip(batch.events, events, strict=True):
        assert type(theirs).__name__ == type(ours).__name__
        shared = set(theirs.__struct_fields__) & set(ours.__struct_fields__) - {"block_size"}
        assert {name: getattr(theirs, name) for name in shared} == {
            name: getattr(ours, name) for name in shared
        }
    stored = [event for event in batch.events if isinstance(event, vllm_events.BlockStored)]
    assert {event.block_size for event in stored} == {16}


def test_vllms_batch_refuses_a_cache_layout() -> None:
    """A typed reader of vLLM must skip unknown event types; the class itself does not."""
    layout = CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16)
    with pytest.raises(msgspec.ValidationError, match="CacheLayout"):
        vllm_decoder.decode(on_the_wire([layout]))


def _tolerant(original: type[Any]) -> type[Any]:
    """vLLM's class with its types, with every field optional."""
    fields = [(field.name, field.type, None) for field in msgspec.structs.fields(original)]
    return msgspec.defstruct(original.__name__, fields, tag=original.__name__)


def test_with_defaults_for_three_fields_vllms_class_reads_our_stores() -> None:
    """Every value we send has the type and meaning of vLLM's field of the same name."""
    stores = [event for event in our_events() if isinstance(event, BlockStored)]
    tolerant = _tolerant(vllm_events.BlockStored)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(stores), type=list[tolerant])  # type: ignore[valid-type]
    assert stores
    for event, original in zip(read, stores, strict=True):
        shared = set(event.__struct_fields__) & set(original.__struct_fields__)
        assert {name: getattr(event, name) for name in shared} == {
            name: getattr(original, name) for name in shared
        }
    missing = {
        field.name for field in msgspec.structs.fields(vllm_events.BlockStored) if field.required
    }
    assert missing - sent_fields(stores) == {"block_size", "lora_id", "lora_name"}


def sent_fields(events: list[BlockStored]) -> set[str]:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(events))
    return set.intersection(*(set(event) for event in plain))


def test_a_prompt_is_announced_as_vllm_announces_it() -> None:
    """Hashes, parents, tokens, group, kind and window are those of the manager that ours
    replaces."""
    layout = layouts.layout(layouts.full())
    theirs = VllmCache(layout, NUM_BLOCKS, 1000, events=True)
    mine = OurCache(layout, NUM_BLOCKS, 1000, theirs.none_hash)
    for cache in (theirs, mine):
        play(cache, "first", TOKENS)
        play(cache, "longer", TOKENS + OTHERS[:60])
    assert [as_sent_by_vllm(event) for event in mine.manager.take_events()] == [
        (
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.group_idx,
            event.kv_cache_spec_kind,
        )
        for event in theirs.manager.take_events()
    ]


def as_sent_by_vllm(event: Event) -> tuple[Any, ...]:
    """vLLM sends the low 64 bits of a digest unless configured otherwise."""
    assert isinstance(event, BlockStored)
    parent = None if event.parent_block_hash is None else wire_int(event.parent_block_hash)
    hashes = [wire_int(block_hash) for block_hash in event.block_hashes]
    return hashes, parent, event.token_ids, event.group_idx, event.kv_cache_spec_kind


def wire_int(block_hash: int | bytes) -> int:
    assert isinstance(block_hash, bytes)
    return to_wire_int(block_hash)


@pytest.mark.parametrize("name", ["full", "full_two_windows", "full_chunk_128", "full_mamba"])
def test_our_codec_reads_what_vllms_manager_emits(name: str) -> None:
    """Copies counted from the events are those in vLLM's own map."""
    cache = VllmCache(layouts.ALL[name], NUM_BLOCKS * 2, 1000, events=True)
    copies: dict[tuple[int | None, Any], int] = {}
    for index, token_ids in enumerate((TOKENS, OTHERS, TOKENS + OTHERS[:60], OTHERS + TOKENS)):
        play(cache, f"r{index}", token_ids)
        payload = msgspec.msgpack.encode(
            vllm_events.KVEventBatch(ts=0.0, events=cache.manager.take_events())
        )
        for event in codec.decode(payload).events:
            assert isinstance(event, (BlockStored, BlockRemoved))
            step = 1 if isinstance(event, BlockStored) else -1
            for block_hash in event.block_hashes:
                copies[event.group_idx, block_hash] = (
                    copies.get((event.group_idx, block_hash), 0) + step
                )
    present = {key for key, count in copies.items() if count}
    assert present == {(block.group, to_wire_int(block.block_hash)) for block in cache.cached()}
