"""An index as bytes and back: what comes back is the same index, and nothing half comes back."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvevents.codec import encode
from kvevents.events import (
    CPU,
    AllBlocksCleared,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
)
from kvevents.hashing import HashChain
from router.cli.recordings import Query, Record, RecordingReader
from router.index.base import Hit, SourceId, SourceLimits
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, TierHint
from router.index.sources import DumpError
from tests.router.index.implementations import Implementation
from tests.support.blocks import FULL, SOURCE, Prefix, gpu_hit, tokens, window
from tests.support.index import blocks_held, dump, load, removals

STREAMS = sorted((Path(__file__).parents[2] / "conformance/streams").glob("*.jsonl.gz"))
PROMPT = Prefix(tokens(160))
SECOND = SourceId("replica-b", 1)


def apply(index: PrefixIndex, *events: Event, source: SourceId = SOURCE) -> None:
    index.apply(source, encode(EventBatch(0.0, list(events), 0)))


def dumped(index: PrefixIndex) -> bytes:
    return b"".join(dump(index))


def copy_of(
    index: PrefixIndex, implementation: Implementation, limits: SourceLimits | None = None
) -> PrefixIndex:
    copy = implementation.create(limits)
    load(dumped(index), copy)
    return copy


@pytest.fixture
def filled(index: PrefixIndex) -> PrefixIndex:
    """Two sources; the first one with a window that slid, a lower tier, and a run that waits."""
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(64)))
    apply(index, PROMPT.removed(1, [16, 32]), PROMPT.offloaded(0, [16, 32, 48]))
    apply(index, Prefix(tokens(160, first=9000)).stored(0, FULL, 96))
    apply(index, Prefix(tokens(160), as_int=False).stored(0, FULL, 0, 64), source=SECOND)
    return index


# --- the same index -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_an_index_that_was_kept_in_the_middle_of_a_recording_goes_on_as_if_it_had_not_been(
    implementation: Implementation, path: Path
) -> None:
    """A warm start is only worth it if it is exact, then and for everything that follows."""
    with RecordingReader(path) as reader:
        hints, records = reader.header.hints(learn_layout=True), list(reader)
    index = implementation.create(None)
    index.add(SOURCE, hints)
    restart_at = random.Random(path.name).sample(range(1, len(records)), 2)
    copy = index
    for number, record in enumerate(records):
        if number in restart_at:
            copy = copy_of(copy, implementation)
            assert copy.statistics() == index.statistics()
        _expect_equal_answers(index, copy, record)
    assert copy is not index
    assert copy.statistics() == index.statistics()
    implementation.expect_sound(copy)


def _expect_equal_answers(index: PrefixIndex, copy: PrefixIndex, record: Record) -> None:
    if isinstance(record, Query):
        asked = (record.query, record.lora, record.salt, record.extra_keys)
        hit = copy.match(*asked)[SOURCE]
        assert hit == index.match(*asked)[SOURCE]
        assert hit.cached_tokens == record.hit
    else:
        result = index.apply(SOURCE, record)
        assert copy is index or copy.apply(SOURCE, record) == result


def test_every_source_comes_back_with_everything_it_knows(
    implementation: Implementation, filled: PrefixIndex
) -> None:
    """Blocks, places, layouts, hints, and what waits."""
    copy = copy_of(filled, implementation)
    assert copy.statistics() == filled.statistics()
    assert copy.match(tokens(161)) == filled.match(tokens(161))
    assert copy.match(tokens(161)) == {SOURCE: Hit(160, 160), SECOND: Hit(64, 64)}
    for source, held, removed in ((SOURCE, 22, 2), (SECOND, 4, 0)):
        assert (blocks_held(copy, source), removals(copy, source)) == (held, removed)
    assert dumped(copy_of(copy, implementation)) == dumped(copy)
    implementation.expect_sound(copy)


def test_a_run_that_waited_is_placed_after_the_restart(
    implementation: Implementation, filled: PrefixIndex
) -> None:
    """Its parent may be announced by the first batch then."""
    copy, late = copy_of(filled, implementation), Prefix(tokens(160, first=9000))
    apply(copy, late.stored(0, FULL, 0, 96), late.stored(1, window(64)))
    assert gpu_hit(copy, late.tokens) == 160
    assert copy.statistics()[SOURCE].waiting.runs == 0


def test_a_run_that_waited_is_no_younger_after_the_restart(implementation: Implementation) -> None:
    """Restarts must not keep alive what no parent comes for."""
    limits = SourceLimits(waiting_batches=5)
    index = implementation.create(limits)
    apply(index, PROMPT.stored(0, FULL, 16))
    for _ in range(4):
        apply(index)
    index = copy_of(index, implementation, limits)
    apply(index)
    assert index.statistics()[SOURCE].waiting.runs == 1
    apply(index)
    assert index.statistics()[SOURCE].waiting.given_up == 1


def test_blocks_that_were_evicted_before_the_restart_are_placed_when_a_lower_tier_announces_them(
    implementation: Implementation, filled: PrefixIndex
) -> None:
    """A store to the CPU completes when it completes."""
    apply(filled, PROMPT.removed(0, [144, 160]), PROMPT.removed(1, [144, 160]))
    copy = copy_of(filled, implementation)
    apply(copy, PROMPT.offloaded(0, [144, 160]), PROMPT.offloaded(1, [144, 160]))
    assert copy.match(tokens(161))[SOURCE] == Hit(128, 160, (("CPU", 32),))
    assert copy.statistics()[SOURCE].unplaced == filled.statistics()[SOURCE].unplaced


def test_copies_come_back_as_copies(implementation: Implementation) -> None:
    """One removal of two must leave the block there."""
    index = implementation.create(None)
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(0, FULL))
    copy = copy_of(index, implementation)
    apply(copy, PROMPT.removed(0, [160]))
    assert gpu_hit(copy, PROMPT.tokens) == 160
    apply(copy, PROMPT.removed(0, [160]))
    assert gpu_hit(copy, PROMPT.tokens) == 144


def test_a_block_that_is_in_very_many_places_comes_back_in_all_of_them(
    implementation: Implementation, index: PrefixIndex
) -> None:
    """A count that does not fit would make the dump of every source useless."""
    places = [(group, tier) for tier in ("CPU", "STORAGE") for group in range(256)]
    apply(index, *(BlockStored([1], None, [], tier, group) for group, tier in places))
    assert copy_of(index, implementation).statistics()[SOURCE].blocks == dict.fromkeys(places, 1)


def test_of_two_hashes_of_one_prefix_the_same_one_is_found_again(
    implementation: Implementation,
) -> None:
    """Hidden salts make them: which of the two a prompt finds decides the hit."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    other = Prefix(tokens(160), seed="and a hidden salt")
    apply(index, PROMPT.stored(0, FULL), other.stored(0, FULL), other.removed(0, [160]))
    copy = copy_of(index, implementation)
    assert gpu_hit(copy, PROMPT.tokens) == gpu_hit(index, PROMPT.tokens) == 144
    for each in (index, copy):
        apply(each, other.removed(0, [144]), PROMPT.removed(0, [16]))
        apply(each, PROMPT.stored(0, FULL, 144))
    assert copy.match(tokens(161)) == index.match(tokens(161))
    assert copy.statistics() == index.statistics()


def test_an_incomplete_source_is_incomplete_after_the_restart(
    implementation: Implementation,
) -> None:
    """What was refused or given up is still missing."""
    limits = SourceLimits(blocks=9, waiting_batches=0)
    index = implementation.create(limits)
    apply(index, PROMPT.stored(0, FULL))
    apply(index, PROMPT.stored(0, FULL, 144), source=SECOND)
    apply(index, source=SECOND)
    copied = copy_of(index, implementation, limits).statistics()
    assert (copied[SOURCE].is_incomplete, copied[SOURCE].waiting.given_up) == (True, 0)
    assert (copied[SECOND].is_incomplete, copied[SECOND].waiting.given_up) == (True, 1)


def test_a_source_that_lost_removals_is_incomplete_after_the_restart(
    implementation: Implementation, index: PrefixIndex
) -> None:
    """It predicts what is gone until it is cleared, and must be known to."""
    apply(index, PROMPT.stored(0, FULL))
    unreadable = {"type": "BlockRemoved", "block_hashes": "none", "medium": "GPU"}
    index.apply(SOURCE, msgspec.msgpack.encode([0.0, [unreadable], 0]))
    copy = copy_of(index, implementation)
    assert copy.statistics()[SOURCE].is_incomplete
    apply(copy, AllBlocksCleared())
    assert not copy.statistics()[SOURCE].is_incomplete


def test_what_a_full_tier_drops_first_is_the_same_after_the_restart(
    implementation: Implementation,
) -> None:
    """Of storage that never removes, what was announced first: here the prompt's end."""
    limits = SourceLimits(blocks=4)
    index, other = implementation.create(limits), Prefix(tokens(16, first=9000))
    index.add(SOURCE, LayoutHints(hash_seeds=(), tiers=(("STORAGE", TierHint(unit_blocks=1)),)))
    apply(index, PROMPT.stored(0, FULL, 0, 64), AllBlocksCleared())
    for end in (64, 48, 32, 16):
        apply(index, PROMPT.offloaded(0, [end], "STORAGE"))
    for each in (index, copy_of(index, implementation, limits)):
        apply(each, other.stored(0, FULL), AllBlocksCleared(), other.offloaded(0, [16], "STORAGE"))
        assert each.match([*PROMPT.tokens[:64], 1])[SOURCE].cached_tokens == 48
        implementation.expect_sound(each)


def test_salts_and_media_of_a_run_that_waited_are_not_lost(implementation: Implementation) -> None:
    """Without them its blocks would be those of every prompt with these tokens."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    media = [["image", 0]]
    late = msgspec.structs.replace(PROMPT.stored(0, FULL, 96), extra_keys=[media, *[None] * 3])
    apply(index, late)
    copy = copy_of(index, implementation)
    for each in (index, copy):
        apply(each, PROMPT.stored(0, FULL, 0, 96))
        asked = [*PROMPT.tokens, 1]
        assert each.match(asked)[SOURCE].cached_tokens == 96
        extra_keys = [*[None] * 6, media, *[None] * 3]
        assert each.match(asked, None, None, extra_keys)[SOURCE].cached_tokens == 160


def test_a_run_of_a_lower_tier_that_waited_still_hides_nothing_of_the_gpu(
    implementation: Implementation,
) -> None:
    """A tier with hashes of its own is found beside the GPU's, not in their place."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    own = Prefix(PROMPT.tokens, seed="the tier's own")
    apply(index, PROMPT.stored(0, FULL), own.stored(0, FULL, 96, medium=CPU))
    copy = copy_of(index, implementation)
    for each in (index, copy):
        apply(each, own.stored(0, FULL, 0, 96, medium=CPU))
        assert gpu_hit(each, PROMPT.tokens) == 160
    assert copy.statistics() == index.statistics()


def test_the_form_of_an_engines_hashes_is_known_after_the_restart(
    implementation: Implementation,
) -> None:
    """Blocks that are found only by computed hashes are found in that form alone."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(tiers=((CPU, TierHint(unit_blocks=1)),)))
    known, unplaced = (Prefix(tokens(160, first), seed="0") for first in (1000, 9000))
    apply(index, known.stored(0, FULL))
    apply(index, unplaced.offloaded(0, range(16, 161, 16)))
    assert index.match(unplaced.tokens)[SOURCE].cached_tokens == 160
    copy = copy_of(index, implementation)
    assert copy.match(unplaced.tokens)[SOURCE].cached_tokens == 160


def test_what_a_source_has_shown_of_itself_comes_back(implementation: Implementation) -> None:
    """Its removals by group, its hashes that claimed one prefix, and that others read its tier."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    other = Prefix(PROMPT.tokens, seed="and a hidden salt")
    remote = msgspec.structs.replace(PROMPT.offloaded(0, [16]), locality="REMOTE")
    apply(index, PROMPT.stored(0, FULL), other.stored(0, FULL, 0, 32), remote)
    apply(index, PROMPT.stored(1, window(64)), PROMPT.removed(1, [16, 32, 48]))
    found = copy_of(index, implementation).statistics()[SOURCE]
    assert (found.removed, found.ambiguous) == ({1: 3}, 2)
    assert any("announced as remote" in text for text in found.assumptions)


def test_how_a_source_counts_copies_is_known_after_the_restart(
    implementation: Implementation,
) -> None:
    """One that announces only the last removal of a block has no copy left then."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    for number in range(8):
        again = Prefix(tokens(160, first=1000 * (number + 2)))
        ends = range(16, 161, 16)
        apply(index, again.stored(0, FULL), again.stored(0, FULL), again.removed(0, ends))
        apply(index, again.stored(0, FULL))
    copy = copy_of(index, implementation)
    for each in (index, copy):
        apply(each, PROMPT.stored(0, FULL), PROMPT.stored(0, FULL), PROMPT.removed(0, [160]))
        assert gpu_hit(each, PROMPT.tokens) == 144
    assert copy.statistics() == index.statistics()


def test_an_engine_that_shows_its_salts_is_still_known_to_do_so(
    implementation: Implementation, index: PrefixIndex
) -> None:
    """Of one that hides them, learned places are not trusted once its hash function is known."""
    groups, root = [GroupSpec("full_attention", 16)], HashChain.from_seed().none_hash
    apply(index, CacheLayout("publisher-1", groups, 16, 16, "sha256", root))
    apply(index, Prefix(tokens(160), seed="an adapter's path").stored(0, FULL))
    assert gpu_hit(copy_of(index, implementation), tokens(160)) == 160


def test_hints_survive_the_restart_and_what_follows_it(implementation: Implementation) -> None:
    """An engine that restarts later is cleared, not configured."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(eagle=True))
    copy = copy_of(index, implementation)
    copy.clear(SOURCE)
    apply(copy, PROMPT.stored(0, FULL))
    assert gpu_hit(copy, PROMPT.tokens) == 144


def test_an_empty_index_can_be_kept(implementation: Implementation, index: PrefixIndex) -> None:
    """A router that stops before its first replica."""
    assert copy_of(index, implementation).statistics() == {}


def test_loading_forgets_what_was_held_before(
    implementation: Implementation, filled: PrefixIndex
) -> None:
    """Keys of two indexes mean nothing to each other."""
    other = implementation.create(None)
    apply(other, PROMPT.stored(0, FULL), source=SourceId("replica-c"))
    load(dumped(filled), other)
    assert set(other.statistics()) == {SOURCE, SECOND}


def test_events_may_be_applied_between_two_pieces(
    implementation: Implementation, filled: PrefixIndex
) -> None:
    """A large index is written in the background; each source is whole, and one that went is left
    out."""
    pieces = dump(filled)
    written = [next(pieces), next(pieces), next(pieces)]  # as far as the index's own record
    apply(filled, PROMPT.offloaded(0, [64], medium=CPU))
    filled.drop(SECOND)
    copy = implementation.create(None)
    load(b"".join([*written, *pieces]), copy)
    assert copy.statistics() == filled.statistics()
    assert set(copy.statistics()) == {SOURCE}


# --- no other bytes -------------------------------------------------------------------------------


def expect_refused(index: PrefixIndex, data: bytes, match: str) -> None:
    """With a clear error, and with the index as it was."""
    before = index.statistics()
    with pytest.raises(DumpError, match=match):
        load(data, index)
    assert index.statistics() == before


def test_a_dump_that_was_cut_off_is_refused_wherever_that_was(filled: PrefixIndex) -> None:
    """A disk that is full, a process that was killed."""
    whole = dumped(filled)
    ends = [*range(40), *random.Random(1).sample(range(40, len(whole)), 200), len(whole) - 1]
    for end in ends:
        expect_refused(filled, whole[:end], "cut off|must start with")


def test_a_dump_with_one_wrong_bit_is_refused_wherever_it_is(filled: PrefixIndex) -> None:
    """A wrong hash would be a wrong hit without an explanation."""
    whole = dumped(filled)
    for position in [*range(40), *random.Random(2).sample(range(40, len(whole)), 200)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        expect_refused(filled, bytes(damaged), "index dump")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole + b"\x00", "1 bytes follow its end"),
        (lambda whole: whole[:16] + b"\x00\x01" + whole[18:], "version 1 must be 2"),
        (lambda whole: whole[:16] + b"\x00\x0a" + whole[18:], "version 10 must be 2"),
        (lambda _: b"", "0 bytes: it must start with 'kvroute snapshot'"),
        (lambda _: b"\x1f\x8b" + bytes(100), "102 bytes: it must start with 'kvroute snapshot'"),
    ],
    ids=["something behind it", "an older version", "a newer version", "nothing", "another file"],
)
def test_bytes_that_are_not_a_dump_of_this_version_are_refused(
    filled: PrefixIndex, change: Callable[[bytes], bytes], message: str
) -> None:
    """The operator reads what is wrong with the file."""
    expect_refused(filled, change(dumped(filled)), message)


def test_records_of_another_implementation_are_refused(filled: PrefixIndex) -> None:
    """Their keys would mean nothing here."""
    record = b"\x81\xaeimplementation\xa5other"
    frame = struct.pack(">QI", len(record), zlib.crc32(record)) + record
    whole = dumped(filled)
    expect_refused(filled, whole[:18] + frame + bytes(12), "not of this implementation")
    expect_refused(filled, whole[:18] + bytes(12), "not of this implementation")
