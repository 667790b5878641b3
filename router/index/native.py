"""The compiled index behind the interface of all: what stays in Python, and the bridge to `core/`.

The core decodes the usual form of a batch, counts, places and matches. It asks for help where help
is rare: what events newly say of the layout goes to the `LayoutLearner`, and a batch in an unusual
form is read by `kvevents.codec` and handed back in the form that the core knows. The search for an
engine's hash function, and the hashes of prompts by it, are Python's too.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from typing_extensions import override

from kvevents.codec import decode, encode
from kvevents.errors import MalformedBatch
from kvevents.events import GPU, BlockHash, BlockStored, CacheLayout, Event, EventBatch
from kvevents.hashing import ExtraKeys, HashChain, encode_cbor
from kvevents.layout import GroupKind, KVCacheLayout
from kvevents.messages import WireRun
from kvevents.sealing import held_key
from router._core import Core, EngineHashes, HitMap, Prompt, SharedIndex, StateError
from router._core import block_hashes as _block_hashes
from router._core import pack_token_ids as _pack_token_ids
from router.index.base import (
    NO_HIT,
    ApplyResult,
    DumpError,
    GroupHit,
    HashedPrompt,
    Hit,
    LayoutHints,
    PrefixIndex,
    RunApplied,
    SourceId,
    SourceLimits,
    SourceStatistics,
    TierHint,
    WaitingStatistics,
)
from router.index.reference.export import decoded
from router.index.reference.extra_keys import spellings
from router.index.reference.hash_finder import HashFinder, engine_hashes
from router.index.reference.layout_learner import LayoutLearner, SeenGroup

_KINDS = {
    GroupKind.FULL: 0,
    GroupKind.SLIDING_WINDOW: 1,
    GroupKind.CHUNKED_LOCAL: 2,
    GroupKind.MAMBA: 3,
    GroupKind.NOT_CACHED: 4,
}
"""As `GroupKind` of core/index/layout.hpp counts them."""
_DIGEST_BYTES = 32
_BEFORE_EXTRA_KEYS = (bytes(16), (0,))
_PICKLED_AFTER = len(b"\x87\x94.")
_PICKLED_BEFORE = len(pickle.dumps((*_BEFORE_EXTRA_KEYS, None), protocol=5)) - 1 - _PICKLED_AFTER

_EngineHashes: TypeAlias = list[EngineHashes | list[BlockHash]]
"""In each spelling of extra keys."""
Computed: TypeAlias = tuple[int, bool, _EngineHashes]
"""Slot, whether places learned from events do not count, and the hashes in each spelling."""

Mapping.register(HitMap)


def pack_token_ids(json_array: bytes | memoryview) -> array[int] | None:
    """The token ids of a JSON array, packed; None for anything but integers in `[0, 2**32)`.

    A packed prompt costs `prepare` a copy, where a list costs a conversion of every token.
    """
    packed = _pack_token_ids(json_array)
    return None if packed is None else array("I", packed)


@dataclass(slots=True)
class _Store:
    """What several sources write to and read from: one file system or bucket behind many replicas.

    It is no source's own: it outlives each of them, and a block is there once, whoever announced it
    and how often. Readers take each other's word for the prefix that a hash stands for, so all have
    to hash alike.
    """

    name: str
    slot: int
    tiers: tuple[tuple[str, TierHint], ...]
    """What the configuration says of units."""
    layout: KVCacheLayout | None = None
    """Of the writer heard last: readers lay out their blocks alike."""
    lookahead: int = 0
    """Of the same."""


@dataclass(slots=True)
class _NativeSource:
    """What is known of one source outside the core."""

    slot: int
    learner: LayoutLearner
    finder: HashFinder
    stores: tuple[_Store, ...] = ()
    """That it shares, each once."""
    unplaced: int = 0
    told: object = None
    """The layout as the core knows it."""

    @property
    def layout(self) -> KVCacheLayout | None:
        """None while too little is known. One that has said nothing so far, but shares a store, is
        taken to be like the others."""
        lender = self.lender
        return self.learner.layout if lender is None else lender.layout

    @property
    def lender(self) -> _Store | None:
        """The store whose layout stands in for its own."""
        if self.learner.layout is not None or self.learner.error is not None:
            return None
        return next((store for store in self.stores if store.layout is not None), None)

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its hash covers too, where prompts look it up."""
        lender = self.lender
        return self.learner.lookahead if lender is None else lender.lookahead


class _HeldHashes:
    """The hashes that a source holds."""

    def __init__(self, core: Core, slot: int) -> None:
        self._core = core
        self._slot = slot

    def __contains__(self, block_hash: object) -> bool:
        return self._core.holds_hash(self._slot, block_hash)


def written_extra_keys(algorithm: str, extra_keys: Sequence[ExtraKeys]) -> list[bytes]:
    """Extra keys as they stand in what is hashed for a block: `None` as no bytes.

    Args:
        algorithm: Says in which form.
        extra_keys: By block.
    """
    write = encode_cbor if algorithm.endswith("_cbor") else _pickled_third
    return [b"" if each is None else write(each) for each in extra_keys]


def _pickled_third(value: Any) -> bytes:
    """A value as it stands in the pickle of a block, behind a digest and tokens: what is remembered
    there counts in references to what is remembered later."""
    before, after = _PICKLED_BEFORE, _PICKLED_AFTER
    return pickle.dumps((*_BEFORE_EXTRA_KEYS, value), protocol=5)[before:-after]


class NativePrompt(HashedPrompt):
    """A prompt in the core, which has its keys and most of its hashes."""

    def __init__(
        self,
        core: Core,
        token_ids: Sequence[int],
        lora_name: str | None,
        cache_salt: str | None,
        extra_keys: Sequence[Any] | None,
    ) -> None:
        """
        Args:
            core: Of the index.
            token_ids: See `PrefixIndex.prepare`, as for the others.
            lora_name: The adapter.
            cache_salt: The salt.
            extra_keys: By hash block.
        """
        packed = msgspec.msgpack.encode(extra_keys) if extra_keys else b""
        self.hashed = Prompt(token_ids, lora_name, cache_salt, packed)
        self.lora_name = lora_name
        self._core = core
        self._salt = cache_salt
        self._extra_keys = extra_keys
        self._token_ids: array[int] | None = None
        self._keys: dict[int, Sequence[int]] = {}
        self._hashes: dict[tuple[HashChain, int, int, bool], _EngineHashes] = {}

    @property
    def token_ids(self) -> Sequence[int]:
        """Of the whole prompt; not kept twice unless somebody asks for them. Few do, and prompts
        are kept as long as a cache holds them."""
        if self._token_ids is None:
            self._token_ids = array("I", self.hashed.tokens())
        return self._token_ids

    @override
    def prefix_keys(self, step: int) -> Sequence[int]:
        keys = self._keys.get(step)
        if keys is None:
            keys = self._keys[step] = self._core.prefix_keys(self.hashed, step)
        return keys

    @override
    def forget_keys(self, step: int) -> None:
        self._keys.pop(step, None)

    def spellings(self, step: int) -> Iterator[Sequence[ExtraKeys]]:
        """The ways in which engines may hash the extra keys of blocks of *step* tokens."""
        blocks = -(-len(self.hashed) // step)
        return spellings(self._extra_keys, blocks, self.lora_name, self._salt)

    def core_hashes(
        self, chain: HashChain, step: int, lookahead: int, as_int: bool
    ) -> _EngineHashes:
        """As `engine_hashes`, in the form that the core looks up.

        Args:
            chain: The engine's.
            step: Tokens between two hashes.
            lookahead: Tokens behind a block that its hash covers too.
            as_int: As 64-bit integers, else as digests.
        """
        wanted = (chain, step, lookahead, as_int)
        if wanted not in self._hashes:
            self._hashes[wanted] = [
                self._hashed(chain, step, lookahead, as_int, extra_keys)
                for extra_keys in self.spellings(step)
            ]
        return self._hashes[wanted]

    def _hashed(
        self,
        chain: HashChain,
        step: int,
        lookahead: int,
        as_int: bool,
        extra_keys: Sequence[ExtraKeys],
    ) -> EngineHashes | list[BlockHash]:
        if chain.key_id is not None:
            sealed = self._sealed(chain, step, lookahead, extra_keys)
            if sealed is not None:
                return sealed
            return engine_hashes(chain, self.token_ids, step, extra_keys, lookahead, as_int)
        in_core = self._core.engine_hashes(
            self.hashed,
            chain.algorithm,
            chain.none_hash,
            step,
            lookahead,
            as_int,
            written_extra_keys(chain.algorithm, extra_keys),
        )
        if in_core is not None:
            return in_core
        return engine_hashes(chain, self.token_ids, step, extra_keys, lookahead, as_int)

    def _sealed(
        self, chain: HashChain, step: int, lookahead: int, extra_keys: Sequence[ExtraKeys]
    ) -> list[BlockHash] | None:
        """Hashes under a key: the chain of the core, sealed here. None where that has no such
        chain, or nobody gave us the key."""
        key = held_key(chain.key_id or "")
        written = written_extra_keys(chain.algorithm, extra_keys)
        digests = _block_hashes(
            self.hashed, chain.algorithm, chain.none_hash, step, lookahead, written
        )
        count = max(0, len(self.hashed) - lookahead) // step
        if key is None or digests is None or not count:
            return None
        size = len(digests) // count
        return [key.seal(digests[at : at + size]) for at in range(0, len(digests), size)]


class NativeIndex(PrefixIndex):
    """All sources of a model in one core, and the stores that they share."""

    inline_tokens = 524_288

    def __init__(self, limits: SourceLimits | None = None, secret: bytes | None = None) -> None:
        """
        Args:
            limits: Of each source.
            secret: Indexes that are made with the same one have the same keys; None: a random one.
        """
        self.limits = limits or SourceLimits()
        drawn = secrets.token_bytes(16) if secret is None else _drawn_from(secret)
        self._secrets: tuple[int, int] = struct.unpack("<2Q", drawn)
        self.core = self._new_core()
        self._stores: dict[str, _Store] = {}
        """By name: those that some source shares."""
        self._sources: dict[SourceId, _NativeSource] = {}
        self._numbers: dict[SourceId, int] = {}
        """See `number_of`."""
        self._slots: dict[SourceId, int] = {}
        """Of every source; replaced by another when one comes or goes, since a match keeps it."""
        self._searching: dict[SourceId, _NativeSource] = {}
        """Those whose hash function is known, or may show itself in a prompt."""
        self._has_leftovers = False
        """Of sources that were dropped; nobody finds these."""

    def _new_core(self) -> Core:
        limits, (point, fold) = self.limits, self._secrets
        bounds = [
            limits.blocks,
            limits.tiers,
            limits.waiting_runs,
            limits.waiting_tokens,
            limits.waiting_batches,
            limits.forgotten,
            limits.cleared_at_once,
        ]
        return Core(point, fold, bounds, NO_HIT, ApplyResult)

    def number_of(self, source: SourceId) -> int:
        """What names a source in the core for good, also before it is added and after it was
        dropped."""
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = self.core.new_number()
        return number

    @property
    def shared(self) -> SharedIndex:
        """For what else in the core reads it; another one after `restore`."""
        return self.core.shared()

    # --- feeding ----------------------------------------------------------------------------------

    @override
    def add(self, source: SourceId, hints: LayoutHints | None = None) -> None:
        is_there = self._take_out(source)
        hints = hints or LayoutHints()
        slot = self.core.add(self.number_of(source), _units(hints.tiers))
        known = _NativeSource(slot, LayoutLearner(hints), HashFinder(hints), self._shared_by(hints))
        if hints.stores:
            stores = [
                (self._stores[each.name].slot, list(each.tiers), each.ownership)
                for each in hints.stores
            ]
            self.core.share(slot, stores)
        self._sources[source] = known
        self._slots = {**self._slots, source: known.slot}
        self._tell_layout(known)
        if is_there:
            self._drop_unread_stores()

    def _shared_by(self, hints: LayoutHints) -> tuple[_Store, ...]:
        """The stores that are named, made where they are new."""
        for hint in hints.stores:
            if hint.name not in self._stores:
                slot = self.core.add_store(hint.name, _units(hints.tiers))
                self._stores[hint.name] = _Store(hint.name, slot, hints.tiers)
        return tuple(
            self._stores[name] for name in dict.fromkeys(each.name for each in hints.stores)
        )

    def _drop_unread_stores(self) -> None:
        """What nobody reads counts for nobody."""
        if not self._stores:
            return
        read = {store.name for known in self._sources.values() for store in known.stores}
        for name in [name for name in self._stores if name not in read]:
            self._has_leftovers |= self.core.drop(self._stores.pop(name).slot)

    @override
    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        known = self._sources.get(source)
        if known is None or isinstance(payload, EventBatch):
            return self._apply_slowly(source, payload)
        done = self.core.apply(known.slot, payload)
        if isinstance(done, ApplyResult):
            return done
        if done is None:
            return self._apply_decoded(source, known, decode(payload))
        return self._attend(source, known, done, payload)

    @override
    def apply_run(
        self, source: SourceId, run: WireRun, seq: int, most: int, seed: int
    ) -> RunApplied | None:
        known = self._sources.get(source)
        found = None if known is None else self.core.apply_run(known.slot, *run, seq, most, seed)
        if known is None or found is None:
            return None
        batches, ends_at, stored, removed, has_lower_tiers, digests, done, payload = found
        result = ApplyResult(stored, removed, has_lower_tiers=has_lower_tiers)
        last = None if done is None else self._attend(source, known, done, payload)
        return RunApplied(batches, ends_at, digests, result, last)

    def _attend(
        self,
        source: SourceId,
        known: _NativeSource,
        done: tuple[Any, ...] | list[tuple[Any, ...]],
        payload: bytes,
    ) -> ApplyResult:
        """Do what the core cannot do alone: it applied the batch, or has news of the layout."""
        if isinstance(done, tuple):
            return self._result(source, known, done, payload)
        before = known.layout
        for news in done:
            known.learner.see_run(*news)
        self._tell_layout(known)
        told = self.core.apply_told(known.slot, payload, False, [])
        assert told is not None
        result = self._result(source, known, told, payload)
        result.layout_changed = known.layout != before
        return result

    def _apply_slowly(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        if source not in self._sources:
            self.add(source)
        return self._apply_decoded(source, self._sources[source], batch)

    def _apply_decoded(
        self, source: SourceId, known: _NativeSource, batch: EventBatch
    ) -> ApplyResult:
        """Apply a batch that Python has read: the core gets it in the one form that it knows."""
        before = known.layout
        is_announced = False
        for event in batch.events:
            if isinstance(event, CacheLayout):
                is_announced = True
                known.learner.see_announcement(event)
                known.finder.see_announcement(event)
            elif isinstance(event, BlockStored):
                known.learner.see_stored(event)
        self._tell_layout(known)
        has_chain = known.finder.chain is not None
        self.core.note(known.slot, has_chain, is_announced, False)
        events = [_canonical(event) for event in batch.events if not isinstance(event, CacheLayout)]
        opaque = [number for number, event in enumerate(events) if self._is_opaque(known, event)]
        payload = encode(EventBatch(batch.ts, events))
        done = self.core.apply_told(known.slot, payload, True, opaque)
        if done is None:
            raise MalformedBatch(f"batch of {len(events)} events: a value is out of range")
        result = self._result(source, known, done, batch)
        if batch.hides_removals:
            self.core.note(known.slot, known.finder.chain is not None, False, True)
        result.skipped += batch.skipped
        result.unreadable, result.problem = batch.unreadable, batch.problem
        result.is_incomplete |= batch.hides_removals
        result.layout_changed = known.layout != before
        return result

    def _result(
        self,
        source: SourceId,
        known: _NativeSource,
        done: tuple[Any, ...],
        payload: bytes | EventBatch,
    ) -> ApplyResult:
        """What the core did, with what Python finds out from it."""
        (stored, removed, waiting, skipped, overflow, given_up) = done[:6]
        (cleared, is_incomplete, has_lower_tiers, may_show_function, unplaced, slot) = done[6:12]
        for store in done[12]:
            self._lay_out(store, known)
        if slot != known.slot:  # what it held is left behind, to be taken away by `tidy`
            known.slot = slot
            self._slots = {**self._slots, source: slot}
            self._has_leftovers = True
        if may_show_function and known.finder.may_find and known.layout is not None:
            self._find_hash_function(known, payload)
        if unplaced or known.unplaced or known.finder.chain is not None:
            known.unplaced = unplaced
            self._sort(source, known)
        is_incomplete |= given_up > 0 and known.finder.chain is None
        return ApplyResult(
            stored,
            removed,
            waiting,
            skipped,
            overflow,
            given_up=given_up,
            cleared=cleared,
            has_lower_tiers=has_lower_tiers,
            is_incomplete=is_incomplete,
        )

    def _lay_out(self, slot: int, writer: _NativeSource) -> None:
        """Those that share a store are taken to lay out their blocks as its writer does, until they
        say it themselves."""
        store = next(each for each in writer.stores if each.slot == slot)
        news = (writer.learner.layout, writer.learner.lookahead)
        if news == (store.layout, store.lookahead):
            return
        store.layout, store.lookahead = news
        for known in self._sources.values():
            if store in known.stores:
                self._tell_layout(known)

    def _sort(self, source: SourceId, known: _NativeSource) -> None:
        """Note whether prompts have to be hashed as the source's engine does."""
        if known.finder.chain is not None or (known.unplaced and known.finder.may_find):
            self._searching[source] = known
        else:
            self._searching.pop(source, None)

    def _find_hash_function(self, known: _NativeSource, payload: bytes | EventBatch) -> None:
        layout = known.layout
        assert layout is not None
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        for event in batch.events:
            if isinstance(event, BlockStored) and known.finder.may_find and event.tier == GPU:
                known.finder.try_event(event, layout.hash_block_size)
        if known.finder.chain is not None:
            self.core.note(known.slot, True, False, False)

    def _is_opaque(self, known: _NativeSource, event: Event) -> bool:
        """Whether something that the event hides goes into its hashes; see `SourceCache`."""
        chain, layout = known.finder.chain, known.layout
        if chain is None or layout is None or not isinstance(event, BlockStored):
            return False
        if event.tier != GPU:
            return False
        if event.parent_block_hash is not None or event.extra_keys is not None:
            return False
        if event.lora_name or event.cache_salt or event.lookahead_token_ids:
            return False
        size, wanted = event.tokens_per_block, event.block_hashes[0] if event.block_hashes else None
        if not size or wanted is None:
            return False
        tokens, as_int = event.token_ids[:size], isinstance(wanted, int)
        first = engine_hashes(chain, tokens, layout.hash_block_size, as_int=as_int)
        wanted = wanted if isinstance(wanted, int) else wanted[-_DIGEST_BYTES:]
        return bool(first) and first[-1] != wanted

    def _tell_layout(self, known: _NativeSource) -> None:
        """Pass on what the learner knows, if the core knows something else."""
        learner, layout = known.learner, known.layout
        is_announced = learner.announced is not None
        is_lent = known.lender is not None
        news = (layout, is_announced, learner.lookahead, is_lent, known.lookahead)
        if news == known.told:
            return
        known.told = news
        if is_lent or layout is None:
            self.core.unset_layout(known.slot, is_announced, learner.lookahead)
        if is_lent:
            assert layout is not None
            self.core.borrow_layout(known.slot, _layout_fields(layout), known.lookahead)
        elif layout is not None:
            fields = _layout_fields(layout)
            self.core.set_layout(known.slot, fields, is_announced, learner.lookahead)

    @override
    def clear(self, source: SourceId) -> None:
        if source in self._sources:
            self.add(source, self._sources[source].learner.hints)

    @override
    def drop(self, source: SourceId) -> None:
        if self._take_out(source):
            self._drop_unread_stores()

    def _take_out(self, source: SourceId) -> bool:
        """False where it was not there."""
        known = self._sources.pop(source, None)
        if known is None:
            return False
        self._searching.pop(source, None)
        self._slots = {each: slot for each, slot in self._slots.items() if each != source}
        self._has_leftovers = self.core.drop(known.slot)
        return True

    @override
    def tidy(self) -> bool:
        self._has_leftovers = self._has_leftovers and self.core.tidy()
        return self._has_leftovers

    # --- asking -----------------------------------------------------------------------------------

    @override
    def prepare(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
        extra_steps: Sequence[int] = (),
    ) -> HashedPrompt:
        prompt = NativePrompt(self.core, token_ids, lora_name, cache_salt, extra_keys)
        self.core.hash(prompt.hashed)
        for step in extra_steps:
            prompt.prefix_keys(step)
        return prompt

    @override
    def match_prompt(self, prompt: HashedPrompt) -> Mapping[SourceId, Hit]:
        assert isinstance(prompt, NativePrompt)
        return self.core.match(prompt.hashed, self._slots, self.computed(prompt))

    # What whole decisions in the core need.

    @property
    def is_all_in_core(self) -> bool:
        return True

    @property
    def slots(self) -> Mapping[SourceId, int]:
        """Of every source. Another mapping when one comes or goes, and never changed itself."""
        return self._slots

    @property
    def searches(self) -> bool:
        """Whether some source's blocks are found only by its engine's own hashes of a prompt."""
        return bool(self._searching)

    def computed(self, prompt: NativePrompt) -> list[Computed]:
        """A prompt's hashes by the engines of those sources where blocks are only found by them."""
        computed: list[Computed] = []
        if self._searching and len(prompt.hashed) >= 2:
            for source, known in list(self._searching.items()):
                computed += self._computed(source, known, prompt)
        return computed

    @override
    def match_source(self, prompt: HashedPrompt, source: SourceId) -> Hit:
        assert isinstance(prompt, NativePrompt)
        known = self._sources.get(source)
        if known is None:
            return NO_HIT
        is_long_enough = source in self._searching and len(prompt.hashed) >= 2
        computed = self._computed(source, known, prompt) if is_long_enough else []
        return self.core.match_source(prompt.hashed, known.slot, computed)

    @override
    def match_tier(self, prompt: HashedPrompt, source: SourceId, tier: str) -> int:
        assert isinstance(prompt, NativePrompt)
        known = self._sources.get(source)
        if known is None:
            return 0
        is_long_enough = source in self._searching and len(prompt.hashed) >= 2
        computed = self._computed(source, known, prompt) if is_long_enough else []
        return self.core.match_tier(prompt.hashed, known.slot, tier, computed)

    @override
    def explain(self, prompt: HashedPrompt, source: SourceId) -> tuple[GroupHit, ...]:
        assert isinstance(prompt, NativePrompt)
        known = self._sources.get(source)
        layout = known.layout if known else None
        if known is None or layout is None or len(prompt.hashed) < 2:
            return ()
        computed = self._computed(source, known, prompt)
        accepted = self.core.group_hits(prompt.hashed, known.slot, computed)
        return tuple(
            GroupHit(index, group.kind.value, tokens)
            for index, (group, tokens) in enumerate(zip(layout.groups, accepted, strict=True))
            if group.kind is not GroupKind.NOT_CACHED
        )

    def computed_of(
        self, source: SourceId, prompts: Iterable[NativePrompt]
    ) -> list[list[Computed]]:
        """Of each prompt, its hashes by the source's engine, where blocks are only found by them;
        empty where no prompt needs any."""
        known = self._sources.get(source)
        if known is None or source not in self._searching:
            return []
        return [self._computed(source, known, prompt) for prompt in prompts]

    def _computed(
        self, source: SourceId, known: _NativeSource, prompt: NativePrompt
    ) -> list[Computed]:
        """A prompt's hashes by a source's engine, where blocks are only found by them."""
        layout, finder, slot = known.layout, known.finder, known.slot
        if layout is None:
            return []
        step = layout.hash_block_size
        if known.unplaced and finder.may_find:
            held = _HeldHashes(self.core, slot)
            spellings = prompt.spellings(step)
            finder.try_prompt(prompt.token_ids, spellings, step, known.learner.lookahead, held)
            self.core.note(slot, finder.chain is not None, False, False)
            self._sort(source, known)
        if finder.chain is None:
            return []
        # Salts that events hide make learned places doubtful: only the engine's own hash decides.
        is_alone = self.core.hides_extra_keys(slot) and prompt.lora_name is None
        if not is_alone and not (known.unplaced or (known.stores and self.core.has_unplaced(slot))):
            return []
        as_int = self.core.uses_int_hashes(slot)
        hashes = prompt.core_hashes(finder.chain, step, known.lookahead, as_int)
        return [(slot, is_alone, hashes)]

    # --- sharing ----------------------------------------------------------------------------------

    @property
    @override
    def key_space(self) -> bytes:
        told = struct.pack("<2Q", *self._secrets)
        return hashlib.blake2b(told, digest_size=8, person=b"key space").digest()

    # --- keeping ----------------------------------------------------------------------------------

    @override
    def export(self, only: SourceId | None = None) -> Iterator[bytes]:
        wanted = [each for each in self._sources if only is None or each == only]
        stores = {store.name: store for each in wanted for store in self._sources[each].stores}
        shared = [self._store_record(store) for store in stores.values()]
        yield msgspec.msgpack.encode(_NativeHead("native", self._secrets, shared))
        for source in wanted:
            if source in self._sources:
                yield msgspec.msgpack.encode(self._record_of(source, self._sources[source]))

    def _store_record(self, store: _Store) -> _StoreRecord:
        state = self.core.export_source(store.slot)
        return _StoreRecord(store.name, store.tiers, store.layout, store.lookahead, state)

    def _record_of(self, source: SourceId, known: _NativeSource) -> _NativeRecord:
        learner = known.learner
        return _NativeRecord(
            source=source,
            hints=learner.hints,
            announced=learner.announced,
            seen=learner.seen,
            tiers_seen=learner.tiers_seen,
            smallest_step=learner.smallest_step,
            lookahead=learner.lookahead,
            chain=known.finder.known,
            state=self.core.export_source(known.slot),
        )

    @override
    def restore(self, records: Iterable[bytes | memoryview]) -> None:
        remaining = iter(records)
        head = decoded(next(remaining, b""), _NativeHead)
        restored = NativeIndex(self.limits)
        restored._secrets = head.secrets
        restored.core = restored._new_core()
        for store in head.stores:
            restored._take_store(store)
        for record in remaining:
            restored._take(decoded(record, _NativeRecord))
        restored._drop_unread_stores()
        self.__dict__ = restored.__dict__

    def _take_store(self, record: _StoreRecord) -> None:
        slot = self.core.add_store(record.name, _units(record.tiers))
        self._stores[record.name] = _Store(
            record.name, slot, record.tiers, record.layout, record.lookahead
        )
        self._restore_state(slot, record.state, f"store {record.name!r}")

    def _restore_state(self, slot: int, state: bytes, whose: str) -> None:
        try:
            self.core.restore_source(slot, state)
        except StateError as error:
            raise DumpError(
                f"index dump: the record of {whose} contradicts itself: {error}"
            ) from None

    def _take(self, record: _NativeRecord) -> None:
        self.add(record.source, record.hints)
        known = self._sources[record.source]
        known.learner.tiers_seen = record.tiers_seen
        known.learner.restore(record.announced, record.seen, record.smallest_step, record.lookahead)
        known.finder.take(record.chain)
        self._tell_layout(known)
        self._restore_state(known.slot, record.state, str(record.source))
        self.core.note(known.slot, record.chain is not None, False, False)
        known.unplaced = self.core.unplaced(known.slot)
        self._sort(record.source, known)

    # --- looking ----------------------------------------------------------------------------------

    @override
    def holds(self, source: SourceId) -> bool:
        return source in self._sources

    @override
    def blocks_held(self, source: SourceId) -> int:
        known = self._sources.get(source)
        return self.core.blocks_held(known.slot) if known else 0

    @override
    def removals(self, source: SourceId) -> int:
        known = self._sources.get(source)
        return self.core.removals(known.slot) if known else 0

    @override
    def announced(self, source: SourceId) -> CacheLayout | None:
        known = self._sources.get(source)
        return known.learner.announced if known else None

    @override
    def statistics(self) -> dict[SourceId, SourceStatistics]:
        return {source: self._statistics(known) for source, known in self._sources.items()}

    @override
    def source_statistics(self, source: SourceId) -> SourceStatistics | None:
        known = self._sources.get(source)
        return None if known is None else self._statistics(known)

    def _held_in(self, store: _Store) -> dict[tuple[int, str], int]:
        return _counts(self.core.statistics(store.slot))

    def _statistics(self, known: _NativeSource) -> SourceStatistics:
        found, chain = self.core.statistics(known.slot), known.finder.chain
        lost = found["has_overflowed"] or found["has_lost_removals"]
        return SourceStatistics(
            blocks=_counts(found),
            units={(group, tier): unit for group, tier, unit in sorted(found["units"])},
            unplaced=found["unplaced"],
            ambiguous=found["ambiguous"],
            waiting=WaitingStatistics(
                found["waiting_runs"], found["waiting_tokens"], found["given_up"]
            ),
            layout=known.layout,
            hash_algorithm=chain.algorithm if chain else None,
            assumptions=_assumptions(known, found),
            stores={store.name: self._held_in(store) for store in known.stores},
            removed=dict(found["removed"]),
            key_problem=known.finder.key_problem,
            is_incomplete=lost or (found["given_up"] > 0 and chain is None),
        )


def _counts(found: dict[str, Any]) -> dict[tuple[int, str], int]:
    return {(group, tier): count for group, tier, count in sorted(found["blocks"])}


def _assumptions(known: _NativeSource, found: dict[str, Any]) -> tuple[str, ...]:
    assumed = known.learner.assumptions()
    if found["removes_last_only"]:
        assumed = (*assumed, "removals: announced only with the last copy of a block")
    if known.lender is not None:
        assumed = (*assumed, "layout: as that of others that share its store")
    if found["announces_remote"]:
        assumed = (
            *assumed,
            "blocks announced as remote count for this replica alone: "
            "configure stores if others read them too",
        )
    if not found["unplaced"] or known.finder.known:
        return assumed
    unknown = (
        f"{found['unplaced']} blocks cannot be placed: the engine's hash function is not known; "
        "configure hash_seeds"
    )
    return (*assumed, unknown)


def _drawn_from(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=16, person=b"native keys").digest()


def _units(tiers: Iterable[tuple[str, TierHint]]) -> list[tuple[str, int, int]]:
    return [(tier, hint.unit_blocks or 0, hint.unit_size or 0) for tier, hint in tiers]


def _layout_fields(layout: KVCacheLayout) -> tuple[Any, ...]:
    """As the core takes a layout."""
    groups = [
        (
            _KINDS[group.kind],
            group.block_size,
            _size_or_none(group.sliding_window),
            _size_or_none(group.attention_chunk_size),
            index in layout.eagle,
        )
        for index, group in enumerate(layout.groups)
    ]
    return (
        groups,
        layout.hash_block_size,
        layout.scheduler_block_size,
        layout.eagle_sees_last_token,
        layout.prefix_replay_tokens,
    )


def _size_or_none(size: int | None) -> int | None:
    """A size that is no size is one of a group of another kind: nobody asks for it."""
    return None if size is None or size < 0 else size


def _canonical(event: Event) -> Event:
    """The event with its tier spelled out."""
    assert not isinstance(event, CacheLayout)
    tier = event.tier
    return event if event.medium == tier else msgspec.structs.replace(event, medium=tier)


# --- records --------------------------------------------------------------------------------------


class _StoreRecord(msgspec.Struct):
    name: str
    tiers: tuple[tuple[str, TierHint], ...]
    layout: KVCacheLayout | None
    lookahead: int
    state: bytes
    """What the core keeps."""


class _NativeHead(msgspec.Struct):
    """The first record."""

    implementation: Literal["native"]
    secrets: tuple[int, int]
    """Of the key space: keys mean nothing under others."""
    stores: list[_StoreRecord]


class _NativeRecord(msgspec.Struct):
    source: SourceId
    hints: LayoutHints
    announced: CacheLayout | None
    seen: dict[int, SeenGroup]
    tiers_seen: dict[int, SeenGroup]
    smallest_step: int
    lookahead: int
    chain: HashChain | None
    state: bytes
    """What the core keeps."""
