"""Streams without token ids: nothing of a prompt leaves the engine, and whoever has the key finds
every block."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvevents.cache_source import CacheSource, EngineStep
from kvevents.codec import decode
from kvevents.errors import HashKeyError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from kvevents.publisher import ZmqEventPublisher, announce
from kvevents.publisher_config import PublisherConfig
from kvevents.sealing import (
    HashKey,
    held_key,
    hold_key,
    make_hash_key,
    read_hash_key,
    sealed,
)
from tests.support.blocks import FULL

KEY, OTHER = HashKey(b"k" * 32), HashKey(b"o" * 32)
LAYOUT = KVCacheLayout.build([FULL])
DIGEST, PARENT = b"\x01" * 32, b"\x02" * 32
STORED = BlockStored(
    [DIGEST],
    PARENT,
    list(range(70_000, 70_016)),
    "GPU",
    0,
    extra_keys=[["a-secret-salt", ["a-picture", 3]]],
    lookahead_token_ids=[[70_999]],
    cache_salt="a-secret-salt",
    kv_cache_spec_kind="full_attention",
)


def test_nothing_of_a_prompt_is_left() -> None:
    """Token ids, salts, pictures, and hashes that a guess could be compared with."""
    event = sealed(STORED, KEY)
    assert isinstance(event, BlockStored)
    assert event.token_ids == []
    assert (event.extra_keys, event.lookahead_token_ids, event.cache_salt) == (None, None, None)
    assert event.block_hashes == [KEY.seal(DIGEST)]
    assert event.parent_block_hash == KEY.seal(PARENT)
    assert event.kv_cache_spec_kind == "full_attention"
    removed = sealed(BlockRemoved([DIGEST], "GPU", 0), KEY)
    assert removed == BlockRemoved([KEY.seal(DIGEST)], "GPU", 0)
    assert sealed(AllBlocksCleared(), KEY) == AllBlocksCleared()


def test_another_key_gives_other_hashes_and_neither_shows_the_key() -> None:
    """The id tells keys apart; a representation may get into a log."""
    assert KEY.seal(DIGEST) != OTHER.seal(DIGEST) != DIGEST
    assert KEY.key_id != OTHER.key_id
    assert repr(KEY) == f"HashKey({KEY.key_id})"
    assert KEY.seal(b"kvroute hash key id")[:8].hex() != KEY.key_id


def test_what_a_publisher_writes_and_keeps_has_no_tokens() -> None:
    """Batches, and the snapshots that late subscribers get."""
    source = CacheSource(announce(LAYOUT, HashChain.from_seed(), KEY), 0, hash_key=KEY)
    payload = source.payload(EngineStep(1.0, (STORED,), None))
    source.note(EngineStep(2.0, (STORED,), None))
    snapshot = source.snapshot(1)
    assert snapshot is not None
    for written in (payload, *snapshot):
        for event in decode(written).events:
            if isinstance(event, BlockStored):
                assert (event.token_ids, event.block_hashes) == ([], [KEY.seal(DIGEST)])
        assert b"secret" not in written
    assert b"secret" not in source.opening()
    assert KEY.key_id.encode() in source.opening()


def test_a_hash_that_is_a_number_is_left_out_and_counted() -> None:
    """It has too few bits to stand for a prompt; the state is incomplete without it."""
    source = CacheSource(announce(LAYOUT, HashChain.from_seed(), KEY), 0, hash_key=KEY)
    step = EngineStep(1.0, (BlockStored([7], None, [1] * 16, "GPU", 0), STORED), None)
    assert len(decode(source.payload(step)).events) == 1
    assert (source.rejected_events, source.snapshot(0)) == (1, None)


def test_a_publisher_without_a_suitable_hash_function_is_refused() -> None:
    """What consumers cannot compute, or others can make collide, is of no use."""
    config = PublisherConfig(endpoint="inproc://x", include_token_ids=False, hash_key=KEY)
    for chain in (None, HashChain("xxhash", b"0" * 16)):
        with pytest.raises(ValueError, match="must be sha256 or sha256_cbor"):
            ZmqEventPublisher(config, LAYOUT, chain)


@pytest.mark.parametrize(("includes", "key"), [(False, None), (True, KEY)])
def test_a_key_and_token_ids_exclude_each_other(includes: bool, key: HashKey | None) -> None:
    """An operator who sets one of the two means both."""
    with pytest.raises(ValueError, match="include_token_ids: False goes with a hash_key"):
        PublisherConfig(include_token_ids=includes, hash_key=key)


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    """It is as secret as the prompts."""
    path = make_hash_key(tmp_path, "cluster")
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_hash_key(path)
    assert read_hash_key(path).seal(DIGEST) == key.seal(DIGEST)
    assert held_key(key.key_id) is None
    hold_key(key)
    assert held_key(key.key_id) is key
    with pytest.raises(HashKeyError, match="File exists"):
        make_hash_key(tmp_path, "cluster")


def test_a_file_without_a_key_is_named_without_its_contents(tmp_path: Path) -> None:
    """It may be another secret."""
    path = tmp_path / "x"
    with pytest.raises(HashKeyError, match="No such file"):
        read_hash_key(path)
    for text in ("", "0" * 63, "g" * 64, "0" * 65, "a" * 4000):
        path.write_text(text)
        with pytest.raises(HashKeyError, match="expected 64 hex digits") as error:
            read_hash_key(path)
        assert not text or text not in str(error.value)
    with pytest.raises(HashKeyError, match="must have 32"):
        HashKey(b"short")
