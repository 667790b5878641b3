"""The compiled index against the one in plain Python: the same batches, the same answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvevents.codec import decode, encode
from kvevents.errors import MalformedBatch
from kvevents.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
    TierBlocksCleared,
)
from kvevents.hashing import DEFAULT_SEED, HashChain, to_wire_int
from kvevents.layout import GroupKind, KVCacheGroup
from kvevents.sealing import HashKey, hold_key, sealed
from router.index.base import SourceId, SourceLimits
from router.index.hash_finder import HashForm
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, StoreHint, TierHint
from tests.oracle.index.index import ReferenceIndex
from tests.router.index.implementations import CORE
from tests.support.index import (
    blocks_held,
    dump,
    load,
    match_source,
    match_tier,
    removals,
    token_columns,
)

Groups: TypeAlias = tuple[KVCacheGroup, ...]

_TOKENS = 3
_MEDIA = [None, "GPU", "gpu", "CPU", "cpu", "CPU_PINNED", "", "STORAGE", "PÄD"]
_KINDS = [None, "full_attention", "mamba", "sliding_window", "chunked_local_attention", "x", ""]
_LORAS = [None, None, None, "", "sql", "ädapter"]
_SALTS = [None, None, None, None, "tenant", ""]
_EXTRA: list[Any] = [
    None,
    None,
    None,
    [],
    [None],
    [None, None],
    [["sql", "salt"]],
    [[["image", 0]], None],
    [[["image", 1], ["image", -3]], [["image", -1]]],
    [[["image", True], ["one"], [[], 1]]],
    [7],
    [[]],
    ["x"],
    [[b"digest", 7, -7, 2**40, 1.5, {"a": [1]}]],
    [[[["deep", [1, [2, [3, [4, [5]]]]]], 0]]],
]

_STORES = [
    (),
    (StoreHint("bucket", ("STORAGE",)),),
    (StoreHint("bucket", ("STORAGE",)),),
    (StoreHint("bucket", ("STORAGE", "PÄD")), StoreHint("disk", ("DISK", "CPU"), "pool")),
    (StoreHint("anything"), StoreHint("bucket", ("STORAGE",))),
    (StoreHint("bucket", ("CPU",), "pool"), StoreHint("bucket", ("STORAGE",))),
]
_CLEARS = [AllBlocksCleared(), AllBlocksCleared(), TierBlocksCleared("CPU")]
_ASKED = [extra for extra in _EXTRA if "1.5" not in repr(extra)]
"""Prompts have no such values: no engine's hash covers them."""


class Traffic:
    """Batches of several engines that share prompts, hashes, and bad manners."""

    def __init__(self, seed: int, is_sane: bool) -> None:
        self.rng = random.Random(seed)
        self.is_sane = is_sane
        common = self.rng.choices(range(_TOKENS), k=8)
        self.bases = [common + self.rng.choices(range(_TOKENS), k=40) for _ in range(2)]
        self.chains = [
            HashChain.from_seed("sha256", seed) for seed in (DEFAULT_SEED, "a", "b", "b")
        ]

    def prompt(self, most: int = 24) -> list[int]:
        """The start of one of a few, so that prompts meet; seldom with another token in it."""
        prompt = self.bases[self.rng.randrange(len(self.bases))][: self.rng.randint(0, most)]
        if prompt and self.rng.random() < 0.2:
            prompt = [*prompt]
            prompt[self.rng.randrange(len(prompt))] += 1
        return prompt

    def batch(self, engine: int) -> list[Event]:
        return [self._event(engine) for _ in range(self.rng.choice([0, 1, 1, 2, 4]))]

    def _event(self, engine: int) -> Event:
        roll = self.rng.random()
        if roll < 0.55:
            return self._stored(engine)
        if roll < 0.62 and not self.is_sane:
            return self._nonsense()
        if roll < 0.97:
            return self._removed(engine)
        if roll < 0.98:
            return self._layout()
        medium = self.rng.choice(_MEDIA)
        if self.rng.random() < 0.5 and medium is not None:
            return TierBlocksCleared(medium)
        return AllBlocksCleared(medium)

    def _hashes(self, engine: int, prompt: list[int], size: int, look: int) -> list[BlockHash]:
        chain, digests = self.chains[engine % len(self.chains)], []
        digests = list(chain.block_hashes(prompt, size, lookahead=look))
        if engine % 3 == 2:
            return [digest * (1 + (engine % 2)) for digest in digests]
        return [to_wire_int(digest) for digest in digests]

    def _stored(self, engine: int) -> BlockStored:
        any_of, size = self.rng.choice, self.rng.choice([2, 2, 2, 4])
        look = 1 if engine == 3 else 0
        prompt = self.prompt()
        hashes = self._hashes(engine, prompt, size, look)
        first = self.rng.randint(0, max(len(hashes) - 1, 0)) if self.rng.random() < 0.5 else 0
        taken = hashes[first : first + self.rng.randint(1, 6)]
        tokens = prompt[first * size : (first + len(taken)) * size]
        if self.rng.random() < 0.15:
            taken = self.rng.sample(taken, self.rng.randint(0, len(taken)))
        if self.rng.random() < 0.15:
            tokens = []
        group = any_of([None, 0, 0, 1, 1, 2])
        lookahead = None
        if look and self.rng.random() < 0.9:
            ends = range((first + 1) * size, (first + len(taken)) * size + 1, size)
            lookahead = [prompt[end : end + look] for end in ends]
        return BlockStored(
            taken,
            hashes[first - 1] if first else None,
            tokens,
            any_of(["GPU", "GPU", "GPU", *_MEDIA]),
            group,
            lora_name=any_of(_LORAS) if not self.is_sane else None,
            extra_keys=any_of(_EXTRA) if not self.is_sane else any_of([None, [None] * len(taken)]),
            kv_cache_spec_kind="full_attention" if not group else any_of(_KINDS),
            kv_cache_spec_sliding_window=any_of([None, 3, 5]),
            block_size=any_of([None, size]),
            lookahead_token_ids=lookahead,
            cache_salt=any_of(_SALTS) if not self.is_sane else None,
            locality=any_of([None, None, None, "LOCAL", "remote"]),
            ownership=any_of([None, None, "pool", "mine"]),
            lora_id=any_of([None, None, None, -1, 0, 3]) if not self.is_sane else None,
        )

    def _removed(self, engine: int) -> BlockRemoved:
        hashes = self._hashes(engine, self.prompt(), 2, 1 if engine == 3 else 0)
        taken = self.rng.sample(hashes, self.rng.randint(0, len(hashes)))
        counts = None
        if self.rng.random() < 0.1:
            counts = [self.rng.choice([0, 0, 1, 2]) for _ in taken]
        medium = self.rng.choice(["GPU", "GPU", *_MEDIA])
        where = (self.rng.choice([None, None, "remote", "local"]), self.rng.choice([None, "pool"]))
        return BlockRemoved(taken, medium, self.rng.choice([None, 0, 1]), counts, *where)

    def _nonsense(self) -> BlockStored:
        any_of = self.rng.choice

        def hashes() -> list[BlockHash]:
            return self.rng.choices([1, 2, 3, 2**64 - 7, b"six", b"", -7], k=any_of([0, 1, 2, 4]))

        return BlockStored(
            hashes(),
            any_of([None, *hashes()]),
            self.rng.choices(range(_TOKENS), k=any_of([0, 1, 2, 4, 8])),
            any_of(_MEDIA),
            any_of([None, 0, 1, 200]),
            lora_name=any_of(_LORAS),
            extra_keys=any_of(_EXTRA),
            kv_cache_spec_kind=any_of(_KINDS),
            kv_cache_spec_sliding_window=any_of([None, 0, 1, 9]),
            block_size=any_of([None, 0, 1, 2, 4]),
            lookahead_token_ids=any_of([None, None, [], [[]], [[1]], [[1, 2], []]]),
            cache_salt=any_of(_SALTS),
        )

    def _layout(self) -> CacheLayout:
        any_of = self.rng.choice
        kinds = ["full_attention", "mamba", "sliding_window", "chunked_local_attention", "x"]
        groups = [
            GroupSpec(any_of(kinds), any_of([2, 4]), any_of([3, 5]), any_of([4, 3]))
            for _ in range(any_of([1, 2, 3]))
        ]
        root = any_of([None, HashChain.from_seed().none_hash])
        return CacheLayout("p", groups, 2, any_of([2, 4]), "sha256", root, any_of([True, False]))

    def payload(self, events: list[Event]) -> bytes:
        """In one of the forms of the wire."""
        if self.rng.random() < 0.3 and all(map(_fits_array, events)):
            return msgspec.msgpack.encode([0.5, [_as_array(event) for event in events], 0])
        return encode(EventBatch(0.0, events, self.rng.choice([None, 0])))


def _fits_array(event: Event) -> bool:
    if isinstance(event, BlockStored):
        return not (event.lookahead_token_ids or event.cache_salt or event.locality)
    return not isinstance(event, CacheLayout) and not (
        isinstance(event, BlockRemoved) and event.remaining_copy_counts
    )


def _as_array(event: Event) -> list[Any]:
    if isinstance(event, BlockStored):
        return [
            "BlockStored",
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
        ]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
    if isinstance(event, TierBlocksCleared):
        return ["TierBlocksCleared", event.medium]
    return ["AllBlocksCleared"]


class Pair:
    """Both indexes, with the same sources."""

    def __init__(self, seed: int, limits: SourceLimits, sources: int) -> None:
        self.rng = random.Random(seed)
        self.is_sharing = seed % 3 == 0
        self.reference = ReferenceIndex(limits=limits)
        self.native: PrefixIndex = CORE.create(limits)
        self.limits = limits
        self.sources = [SourceId(f"replica-{number}") for number in range(sources)]
        for source in self.sources:
            self.add(source)

    def add(self, source: SourceId) -> None:
        any_of = self.rng.choice
        groups: tuple[KVCacheGroup, ...] = any_of(
            [
                (),
                (),
                (),
                (KVCacheGroup(GroupKind.FULL, 2), KVCacheGroup(GroupKind.SLIDING_WINDOW, 2, 5)),
                (KVCacheGroup(GroupKind.FULL, 4), KVCacheGroup(GroupKind.MAMBA, 2)),
            ]
        )
        hints = LayoutHints(
            groups,
            any_of([None, 2]),
            eagle=any_of([False, False, True, (0,), (1,), (0, 2)]),
            eagle_sees_last_token=any_of([False, True]),
            prefix_replay_tokens=any_of([0, 0, 0, 4]),
            authoritative=bool(groups) and any_of([False, True]),
            assume_unseen=any_of([False, True]),
            hash_seeds=any_of([(), (), (DEFAULT_SEED,)]),
            tiers=any_of([(), (("CPU", TierHint(unit_blocks=2)), ("DISK", TierHint(unit_size=4)))]),
            stores=any_of(_STORES) if self.is_sharing else (),
        )
        self.reference.add(source, hints)
        self.native.add(source, hints)

    def apply(self, source: SourceId, payload: bytes) -> None:
        expected = self.reference.apply(source, payload)
        assert self.native.apply(source, payload) == expected, decode(payload)

    def ask(self, *prompt: Any) -> None:
        alone, native = self.rng.choice(self.sources), self.native.prepare(*prompt)
        expected_alone = self.reference.match_source(self.reference.prepare(*prompt), alone)
        assert match_source(self.native, native, alone) == expected_alone, prompt
        for tier in ("GPU", "CPU", "STORAGE", "DISK"):
            expected_below = self.reference.match_tier(self.reference.prepare(*prompt), alone, tier)
            assert match_tier(self.native, native, alone, tier) == expected_below, (prompt, tier)
        expected, found = self.reference.match(*prompt), self.native.match(*prompt)
        assert found == expected, prompt
        sources = list(expected)
        assert token_columns(found, sources) == token_columns(expected, sources), prompt
        for source in self.sources:
            old = self.reference.explain(self.reference.prepare(*prompt), source)
            assert self.native.explain(self.native.prepare(*prompt), source) == old

    def compare(self) -> None:
        assert self.native.statistics() == self.reference.statistics()
        for source in self.sources:
            assert blocks_held(self.native, source) == self.reference.blocks_held(source)
            assert removals(self.native, source) == self.reference.removals(source)
        if self.rng.random() < 0.5:
            CORE.expect_sound(self.native)
        elif self.rng.random() < 0.5:
            self.native.tidy()

    def restart(self) -> None:
        """Both from their dumps."""
        reference, native = ReferenceIndex(limits=self.limits), CORE.create(self.limits)
        load(b"".join(dump(self.reference)), reference)
        load(b"".join(dump(self.native)), native)
        self.reference, self.native = reference, native


def run(seed: int, is_sane: bool, sources: int, limits: SourceLimits, steps: int) -> None:
    rng, traffic = random.Random(seed), Traffic(seed, is_sane)
    pair = Pair(seed, limits, sources)
    for _ in range(steps):
        number = rng.randrange(sources)
        source, roll = pair.sources[number], rng.random()
        if roll < 0.01:
            pair.add(source)
        elif roll < 0.02:
            pair.reference.drop(source)
            pair.native.drop(source)
        elif roll < 0.03:
            pair.reference.clear(source)
            pair.native.clear(source)
        elif roll < 0.04:
            pair.restart()
        else:
            batch = traffic.batch(number)
            if roll < 0.14:
                batch.insert(rng.randint(0, len(batch)), rng.choice(_CLEARS))
            pair.apply(source, traffic.payload(batch))
        if rng.random() < 0.3:
            extra = rng.choice(_ASKED) if not is_sane else None
            lora, salt = (None, None) if is_sane else (rng.choice(_LORAS), rng.choice(_SALTS))
            pair.ask(traffic.prompt(40), lora, salt, extra)
            pair.compare()
    CORE.expect_sound(pair.native)


def _window(size: int, block_size: int = 2) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=size)


ROOMY = SourceLimits()
TIGHT = SourceLimits(
    blocks=12, tiers=3, waiting_runs=3, waiting_tokens=20, waiting_batches=6, forgotten=3
)
HASTY = SourceLimits(cleared_at_once=2)
"""A clear of more than two blocks leaves them for later."""
OBLIVIOUS = SourceLimits(forgotten=0, cleared_at_once=2)
SHORT = SourceLimits(forgotten=3, cleared_at_once=2)
_LIMITS = {"roomy": ROOMY, "tight": TIGHT, "hasty": HASTY, "oblivious": OBLIVIOUS, "short": SHORT}
_seeds = st.integers(0, 2**32)
_settings = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.parametrize("limits", _LIMITS.values(), ids=_LIMITS.keys())
@pytest.mark.parametrize("is_sane", [True, False], ids=["engines", "anything"])
@_settings
@given(seed=_seeds)
def test_both_do_and_answer_the_same(is_sane: bool, limits: SourceLimits, seed: int) -> None:
    """The reference defines the behaviour; whatever is faster must not differ in anything."""
    run(seed, is_sane, 5, limits, 60)


@settings(parent=_settings, max_examples=3)
@given(seed=_seeds)
def test_both_answer_the_same_for_more_sources_than_a_word_has_bits(seed: int) -> None:
    """Sources are kept 64 a word."""
    run(seed, True, 150, HASTY if seed % 2 else ROOMY, 400)


_FULL, _MAMBA = KVCacheGroup(GroupKind.FULL, 2), KVCacheGroup(GroupKind.MAMBA, 4)
_LAYOUTS = (
    (_FULL,),
    (_FULL, _window(5)),
    (_FULL, _window(40), _window(300)),
    (KVCacheGroup(GroupKind.FULL, 4), _window(6), _MAMBA, _window(6)),
    (KVCacheGroup(GroupKind.MAMBA, 2), _window(131, 4)),
    (_window(17), KVCacheGroup(GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=32)),
)
_LONG = 600
"""Tokens of a prompt: more blocks than a match looks up at a time, and than a window has."""


def holes(rng: random.Random, hashes: Sequence[BlockHash]) -> list[BlockHash]:
    """What a group has lost: its front, single blocks, or whole stretches."""
    lost: list[BlockHash] = [*hashes[: rng.choice([0, 0, rng.randrange(len(hashes))])]]
    for _ in range(rng.choice([0, 0, 1, 1, 9])):
        at = rng.randrange(len(hashes))
        lost += hashes[at : at + rng.choice([1, 1, 3, 70])]
    return lost


def held_events(rng: random.Random, prompt: list[int], groups: Groups) -> Iterator[Event]:
    """A prompt's blocks in all groups, and then some removals."""
    chain = HashChain.from_seed("sha256", DEFAULT_SEED)
    count = rng.choice([_LONG, rng.randrange(1, _LONG)]) // 4 * 4
    for index, group in enumerate(groups):
        size = group.block_size
        every = [to_wire_int(digest) for digest in chain.block_hashes(prompt[:count], 2)]
        hashes: list[BlockHash] = [*every[size // 2 - 1 :: size // 2]]
        stored = prompt[: len(hashes) * size]
        kind, window = group.kind.value, group.sliding_window
        if hashes:
            yield BlockStored(
                hashes,
                None,
                stored,
                "GPU",
                index,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
            yield BlockRemoved(holes(rng, hashes), "GPU", index)


@settings(parent=_settings, max_examples=12)
@given(seed=_seeds)
def test_both_answer_the_same_of_long_prompts_with_holes_in_every_group(seed: int) -> None:
    """Most sources are followed all at once, block by block: no window, hole, chunk of blocks or
    neighbour in the same word may make a difference to what each finds alone."""
    rng = random.Random(seed)
    prompt = rng.choices(range(50), k=_LONG)
    reference, native = ReferenceIndex(), CORE.create(None)
    sources = [SourceId(f"replica-{number}") for number in range(rng.choice([3, 70]))]
    layouts = rng.sample(_LAYOUTS, rng.choice([1, 2, 6]))
    for source in sources:
        groups = rng.choice(layouts)
        payload = encode(EventBatch(0.0, [*held_events(rng, prompt, groups)]))
        for index in (reference, native):
            index.add(source, LayoutHints(groups, 2, authoritative=True, hash_seeds=()))
            index.apply(source, payload)
    for length in (_LONG, rng.randrange(2, _LONG), _LONG + 1):
        asked = native.prepare([*prompt, 1][:length])
        hits = native.match_prompt(asked)
        assert hits == reference.match([*prompt, 1][:length])
        assert {source: match_source(native, asked, source) for source in sources} == hits


# --- bytes that nobody checked --------------------------------------------------------------------


def damaged(rng: random.Random, payload: bytes) -> bytes:
    """With bits turned, parts cut out or doubled, lengths that lie."""
    data = bytearray(payload)
    for _ in range(rng.choice([1, 1, 2, 5])):
        if not data:
            break
        at = rng.randrange(len(data))
        roll = rng.random()
        if roll < 0.5:
            data[at] = rng.choice([rng.randrange(256), 0xC0, 0xC1, 0xDD, 0xDF, 0xC6, 0xDB, 0xFF])
        elif roll < 0.7:
            del data[at : at + rng.randint(1, 6)]
        elif roll < 0.9:
            data[at:at] = data[at : at + rng.randint(1, 12)]
        else:
            del data[at:]
    return bytes(data)


def outcome(index: PrefixIndex, source: SourceId, payload: bytes) -> object:
    try:
        return index.apply(source, payload)
    except MalformedBatch as error:
        return str(error)


def run_damaged(seed: int, steps: int) -> None:
    rng, traffic = random.Random(seed), Traffic(seed, is_sane=seed % 2 == 0)
    pair = Pair(seed, TIGHT if seed % 3 == 0 else ROOMY, 3)
    for _ in range(steps):
        number = rng.randrange(3)
        payload = traffic.payload(traffic.batch(number))
        if rng.random() < 0.6:
            payload = damaged(rng, payload)
        source = pair.sources[number]
        expected = outcome(pair.reference, source, payload)
        assert outcome(pair.native, source, payload) == expected, payload
    pair.ask(traffic.prompt(40), None, None, None)
    pair.compare()


@_settings
@given(seed=_seeds)
def test_both_read_the_same_of_damaged_batches(seed: int) -> None:
    """What the core does not read in the codec's way would be two truths about one stream."""
    run_damaged(seed, 60)


@pytest.mark.parametrize(
    "event",
    [{"type": "TierBlocksCleared", "medium": None}, ["TierBlocksCleared", None]],
    ids=["map", "array"],
)
def test_a_clear_of_no_tier_is_unreadable_to_both(event: object) -> None:
    """Blocks went and nobody knows which: the source must not seem complete."""
    pair = Pair(0, ROOMY, 1)
    pair.apply(pair.sources[0], msgspec.msgpack.encode([0.0, [event], None]))
    assert all(found.is_incomplete for found in pair.native.statistics().values())


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_blocks_under_a_key_are_found_by_both(algorithm: str, salt: str | None) -> None:
    """The chain comes from the core, and is sealed outside; without the key there are no hits."""
    key, unknown = HashKey(b"n" * 32), HashKey(b"u" * 32)
    hold_key(key)
    chain = HashChain.from_seed(algorithm, "7")
    prompt = [at * 7 % 1000 for at in range(161)]
    extra = [(salt,)] if salt else ()
    digests = list(chain.block_hashes(prompt, 16, extra))
    for used, hit in ((key, 80), (unknown, 0)):
        batch = [
            CacheLayout(
                "p",
                [GroupSpec("full_attention", 16)],
                16,
                16,
                algorithm,
                chain.none_hash,
                hash_key_id=used.key_id,
            ),
            sealed(BlockStored(list(digests[:5]), None, [], "GPU", 0), used),
        ]
        for index in (ReferenceIndex(), CORE.create(None)):
            index.add(SourceId("a"))
            index.apply(SourceId("a"), encode(EventBatch(0.0, batch)))
            for length in (2, 16, 17, 81, 160, 161):
                found = index.match(prompt[:length], None, salt)[SourceId("a")].cached_tokens
                assert found == min(hit, (length - 1) // 16 * 16)
            assert index.match(prompt, None, "other")[SourceId("a")].cached_tokens == 0


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 18, 19, 20, 64, 65, 66, 67, 68])
def test_hashes_under_a_key_cover_what_is_drafted(
    algorithm: str, lookahead: int, length: int
) -> None:
    """With EAGLE a block's hash covers the next tokens as well: cut at another place, none of them
    would be found. Without the key they stay as they are, and match nothing that is sealed."""
    key, unknown = HashKey(b"n" * 32), HashKey(b"u" * 32)
    hold_key(key)
    prompt = [at * 7 % 1000 for at in range(length)]
    plain = HashChain.from_seed(algorithm, "7")
    digests = list(plain.block_hashes(prompt, 16, lookahead=lookahead))
    prepared = CORE.create(None).prepare(prompt)
    for used, expected in ((key, [key.seal(each) for each in digests]), (unknown, digests)):
        chain = replace(plain, key_id=used.key_id)
        form = HashForm(chain, 16, lookahead)
        assert prepared.core_hashes(form) == [expected]
